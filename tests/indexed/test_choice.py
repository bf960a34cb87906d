"""cp.index: the keys that an indexer chooses, against the whole table of scores."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from support.chosen_problems import Indexer, chosen_by, indexer
from support.drawn_layouts import drawn, drawn_mask
from torch import Tensor

import tilewise as tw
from tilewise.indexed import choice
from tilewise.indexed.visible import visible_keys
from tilewise.masks.tables import PerHead


def as_lists(positions: Tensor) -> list[list[int]]:
    """Chosen positions of each row, and that -1 stands for the rest."""
    return [sorted(at for at in row if at >= 0) for row in positions.tolist()]


@pytest.mark.parametrize("seed", range(60))
def test_the_choice_is_that_of_the_whole_table(seed: int):
    """Over layouts, documents, masks, k, heads, batches and ties."""
    split, draw = drawn(seed), Random(seed)
    layout, num_tokens = split.layout, split.layout.num_tokens
    batch, ties = draw.choice([None, 2]), draw.random() < 0.6
    whole = indexer(num_tokens, batch, draw.choice([1, 3]), seed, ties=ties)
    k, mask = draw.randint(1, num_tokens), drawn_mask(draw, num_tokens)
    cu_seqlens = draw.choice([None, split.cu_seqlens])
    seen = mask if cu_seqlens is None else mask & tw.Document(cu_seqlens)
    positions = np.arange(num_tokens)
    allowed = seen.dense(positions, positions)

    def run(rank: int, group: Any) -> Tensor:
        cp = tw.ContextParallel(group, num_tokens=num_tokens, layout=layout, mask=given_masks[0])
        found = cp.index(*whole.on_rank(cp), k, mask=given_masks[1], cu_seqlens=cu_seqlens)
        assert found.dtype == torch.int64
        return found

    given_masks = draw.choice([(mask, None), (tw.Full(), mask)])
    found = layout.unshard(tw.loopback(layout.world_size, run), 0 if batch is None else 1)
    assert found.shape == (*whole.k.shape[:-1], k)
    scores = whole.scores()
    entries = [(scores, found)] if batch is None else zip(scores, found, strict=True)
    for table, mine in entries:
        assert as_lists(mine) == chosen_by(table, allowed, k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [67, 700])
def test_the_choice_is_the_same_at_any_split(num_tokens: int, dtype: torch.dtype):
    """Scores that differ by a rounding at most: keys are few ones, again and again, and moved by
    the last bit, so that another order of additions would choose others.
    """
    whole = indexer(num_tokens, None, 3, 0, ties=False, width=400)
    few = whole.k[torch.arange(num_tokens) % 7]
    moved = whole._replace(k=few * (1 + 1e-7 * whole.k))
    whole = Indexer(*(x.to(dtype) for x in moved))
    mask = tw.Causal() & tw.Document((0, num_tokens // 3, num_tokens))
    layouts = [tw.contiguous(num_tokens, n) for n in range(1, 9)]
    layouts += [tw.zigzag(num_tokens, 4), tw.striped(num_tokens, 3)]
    found = list[Tensor]()
    for layout in layouts:

        def run(rank: int, group: Any, layout: tw.Layout = layout) -> Tensor:
            cp = tw.ContextParallel(group, num_tokens=num_tokens, layout=layout, mask=mask)
            return cp.index(*whole.on_rank(cp), 11)

        found.append(layout.unshard(tw.loopback(layout.world_size, run), 0))
    for other in found[1:]:
        assert torch.equal(found[0], other)


@pytest.mark.parametrize("num_tokens", [67, 700])
def test_products_have_one_shape_at_any_split(num_tokens: int, monkeypatch: pytest.MonkeyPatch):
    """A library may add in another order for another number of rows or columns. Here its results
    differ by far more than a rounding, so that one block that is not filled up would show.
    """
    whole, multiply = indexer(num_tokens, None, 3, 0, ties=False), torch.mm
    shapes = set[tuple[int, ...]]()

    def by_shape(a: Tensor, b: Tensor) -> Tensor:
        shapes.add((*a.shape, *b.shape))
        noise = torch.sin(torch.arange(b.shape[1], dtype=a.dtype) * sum(a.shape) * b.shape[1])
        return multiply(a, b) * (1 + 0.3 * noise)

    monkeypatch.setattr(torch, "mm", by_shape)
    mask = tw.Causal() & tw.Document((0, num_tokens // 3, num_tokens))
    found = list[Tensor]()
    for layout in (*(tw.contiguous(num_tokens, n) for n in (1, 2, 5, 8)), tw.zigzag(num_tokens, 3)):

        def run(rank: int, group: Any, layout: tw.Layout = layout) -> Tensor:
            cp = tw.ContextParallel(group, num_tokens=num_tokens, layout=layout, mask=mask)
            return cp.index(*whole.on_rank(cp), 11)

        found.append(layout.unshard(tw.loopback(layout.world_size, run), 0))
    assert len(shapes) == 1
    for other in found[1:]:
        assert torch.equal(found[0], other)


def test_many_columns_are_merged(monkeypatch: pytest.MonkeyPatch):
    """Where the scores of all keys are not held at a time."""
    monkeypatch.setattr(choice, "MOST_COLUMNS", 64)
    monkeypatch.setattr(choice, "SIZES", {"cpu": choice.BlockSizes(8, 16)})
    whole = indexer(300, None, 2, 1, ties=True)
    allowed = tw.Causal().dense(np.arange(300), np.arange(300))
    for k in (1, 20, 100, 300):

        def run(rank: int, group: Any, k: int = k) -> Tensor:
            cp = tw.ContextParallel(group, num_tokens=300, layout=tw.zigzag(300, 2))
            return cp.index(*whole.on_rank(cp), k, mask=tw.Causal())

        found = tw.zigzag(300, 2).unshard(tw.loopback(2, run), 0)
        assert as_lists(found) == chosen_by(whole.scores(), allowed, k)


def test_keys_that_no_query_sees_stay(monkeypatch: pytest.MonkeyPatch):
    """Bytes: index keys alone, and of those what the mask shows."""
    n, num_tokens, width = 4, 64, 5
    layout = tw.contiguous(num_tokens, n)
    whole = indexer(num_tokens, None, 3, 1, ties=False)

    def run(rank: int, group: Any) -> int:
        cp = tw.ContextParallel(group, num_tokens=num_tokens, layout=layout, mask=tw.Causal())
        cp.index(*whole.on_rank(cp), 4)
        return group.bytes_sent

    shard = num_tokens // n * width * 8
    assert tw.loopback(n, run) == [shard * (n - 1 - rank) for rank in range(n)]


def test_a_score_that_is_no_number_is_chosen():
    q, k, weights = indexer(8, None, 1, 0, ties=True)
    k[3] = torch.nan

    def run(rank: int, group: Any) -> Tensor:
        cp = tw.ContextParallel(group, num_tokens=8, mask=tw.Causal())
        return cp.index(q, k, weights, 1)

    (found,) = tw.loopback(1, run)
    assert (found[3:] == 3).all()


def test_visible_keys_are_the_masks():
    draw = Random(0)
    for seed in range(40):
        layout = drawn(seed).layout
        mask, keys = drawn_mask(draw, layout.num_tokens), torch.arange(layout.num_tokens)
        for rank in range(layout.world_size):
            found = visible_keys(mask, layout, rank).contain(keys)
            assert np.array_equal(found.numpy(), mask.dense(layout.rows(rank), keys))


def test_scores_take_bounded_memory():
    """A million tokens on 64 ranks: no more than for a shorter sequence."""
    assert max(choice.score_bytes(64, 2048, device) for device in ("cpu", "cuda")) < 2 << 30


WRONG = (
    ({"k": 9}, r"k \(9\) must be from 1 to the 8 tokens of the sequence; pass min\(9, 8\)"),
    ({"k": 0}, r"k \(0\) must be at least 1"),
    ({"weights": torch.zeros(4, 3)}, r"weights is \[4, 3\], but must be \[4, 2\]"),
    ({"k_index": torch.zeros(4, 6)}, r"k_index is \[4, 6\], but must be \[4, 5\]"),
    ({"q_index": torch.zeros(3, 2, 5)}, "q_index has 3 tokens, but the layout gives this rank 4"),
    ({"q_index": torch.zeros(4, 5)}, r"q_index is \[4, 5\], but must be"),
    ({"weights": torch.zeros(4, 2, dtype=torch.int64)}, "weights is torch.int64"),
    (
        {"mask": PerHead([tw.Causal(), tw.Full()])},
        "mask is PerHead, but an indexer has one choice for all heads",
    ),
    ({"cu_seqlens": [0, 3]}, "cu_seqlens ends at 3"),
)


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_wrong_rank_is_named_on_all(change: dict[str, Any], message: str):
    good = {
        "q_index": torch.zeros(4, 2, 5),
        "k_index": torch.zeros(4, 5),
        "weights": torch.zeros(4, 2),
        "k": 3,
    }

    def run(rank: int, group: Any) -> None:
        cp = tw.ContextParallel(group, num_tokens=8, layout=tw.contiguous(8, 2))
        with pytest.raises(ValueError, match=f"rank 1: {message}"):
            cp.index(**(good | change if rank else good))
        assert group.bytes_sent == 0

    tw.loopback(2, run)


@pytest.mark.parametrize(
    ("heads", "k", "mask", "message"),
    [
        (3, 3, None, "disagree on heads and width of the indexer"),
        (2, 4, None, "disagree on k"),
        (2, 3, tw.Causal(), "disagree on mask"),
    ],
)
def test_indexers_that_differ_are_named_before_rows_travel(
    heads: int, k: int, mask: tw.masks.Mask | None, message: str
):
    def run(rank: int, group: Any) -> None:
        cp = tw.ContextParallel(group, num_tokens=8, layout=tw.contiguous(8, 2))
        mine = (heads, k, mask) if rank else (2, 3, None)
        q, keys = torch.zeros(4, mine[0], 5), torch.zeros(4, 5)
        with pytest.raises(ValueError, match=message):
            cp.index(q, keys, torch.zeros(4, mine[0]), mine[1], mask=mine[2])
        assert group.bytes_sent == 0

    tw.loopback(2, run)

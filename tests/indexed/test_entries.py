"""Compressed keys: which there are, who makes them, who sees them, and attention to them."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from support.drawn_layouts import drawn, normal
from torch import Tensor

import tilewise as tw
from tilewise.indexed.entries import (
    NO_WINDOW,
    attend_to_entries,
    entries_of,
    merged,
    windows_of,
)
from tilewise.transport.resolve import transport_for


def windows_written_out(cu_seqlens: tuple[int, ...], rate: int) -> list[tuple[int, int, int]]:
    """(first token, number in its document, first token of the document) of each full window."""
    return [
        (at, (at - start) // rate, start)
        for start, stop in pairwise(cu_seqlens)
        for at in range(start, stop - rate + 1, rate)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_entries_of_documents(seed: int):
    split, rate = drawn(seed), Random(seed).randint(1, 5)
    layout, want = split.layout, windows_written_out(split.cu_seqlens, rate)
    made = list[int]()
    for rank in range(layout.world_size):
        entries = entries_of(layout, rank, split.cu_seqlens, rate)
        if not want:
            assert entries is None
            return
        assert entries is not None
        assert [*zip(entries.starts.tolist(), entries.numbers.tolist())] == [x[:2] for x in want]  # noqa: B905
        rows = layout.rows(rank)
        documents = np.searchsorted(split.cu_seqlens, rows, side="right") - 1
        low, high = (x[0].tolist() for x in entries.visible)
        for row, query in enumerate(rows.tolist()):
            own = split.cu_seqlens[documents[row]]
            seen = [
                number
                for number, (start, _, document) in enumerate(want)
                if document == own and start + rate - 1 <= query
            ]
            assert [*range(low[row], high[row])] == seen
            assert int(entries.first_tokens[row]) == own + rate * len(seen)
        mine = entries.layout.rows(rank).tolist()
        assert all(want[entry][0] + rate - 1 in rows for entry in mine)
        made += mine
        for overlapping in (False, True):
            windows = windows_of(entries, rank, overlapping=overlapping)
            assert len(windows.numbers) > 0
            assert windows.numbers[windows.kept].tolist() == mine
            assert (windows.tokens[windows.numbers == NO_WINDOW] == -1).all()
            for place in windows.kept.tolist() if overlapping else ():
                number = int(windows.numbers[place])
                first = want[number][1] == 0
                assert windows.numbers[place - 1] == (NO_WINDOW if first else number - 1)
                assert bool(windows.is_first[place - 1]) == first
    assert sorted(made) == [*range(len(want))]


@pytest.mark.parametrize("seed", range(30))
def test_attention_to_tokens_and_entries_is_one_softmax(seed: int):
    """Each gradient, in fp64; of entries that are chosen, and of all that a query sees."""
    split, draw = drawn(seed), Random(seed)
    layout, n = split.layout, split.layout.num_tokens
    rate, heads, chooses = draw.randint(1, 4), draw.choice([1, 3]), draw.random() < 0.5
    table = windows_written_out(split.cu_seqlens, rate)
    if not table:
        return
    mask = tw.Causal() & tw.Window(draw.randint(0, 3), 0) & tw.Document(split.cu_seqlens)
    q, k, made = normal(n, heads, 4), normal(n, 1, 4, seed=1), normal(len(table), 4, seed=2)
    weight = normal(n, heads, 4, seed=3)
    allowed = torch.zeros(n, len(table), dtype=torch.bool)
    chosen = torch.full((n, 3), -1)
    document = np.searchsorted(split.cu_seqlens, np.arange(n), side="right") - 1
    for query in range(n):
        start = split.cu_seqlens[document[query]]
        seen = [e for e, x in enumerate(table) if x[2] == start and x[0] + rate - 1 <= query]
        seen = draw.sample(seen, min(3, len(seen))) if chooses else seen
        allowed[query, seen] = True
        if chooses:
            chosen[query, : len(seen)] = torch.tensor(seen, dtype=torch.int64)

    leaves = [x.clone().requires_grad_() for x in (q, k, made)]
    keys = torch.cat([leaves[1][:, 0], leaves[2]])
    both = torch.cat([torch.from_numpy(mask.dense(np.arange(n), np.arange(n))), allowed], 1)
    scores = torch.einsum("qhd,kd->hqk", leaves[0], keys).masked_fill(~both, -torch.inf)
    want = torch.einsum("hqk,kd->qhd", scores.softmax(-1), keys)
    (want * weight).sum().backward()

    def run(rank: int, group: Any) -> tuple[Tensor, ...]:
        cp = tw.ContextParallel(group, num_tokens=n, layout=layout, mask=mask)
        entries = entries_of(layout, rank, split.cu_seqlens, rate)
        assert entries is not None
        own = [cp.shard(q), cp.shard(k), entries.layout.shard(made, rank, 0)]
        own = [x.clone().requires_grad_() for x in own]
        result = cp.attention(own[0], own[1], own[1], softmax_scale=1.0, return_lse=True)
        mine = cp.shard(chosen, 0) if chooses else None
        others = attend_to_entries(own[0], own[2], mine, entries, 1.0, transport_for(group))
        out, _ = merged(*result, *others)
        (out * cp.shard(weight)).sum().backward()
        return out.detach(), *(x.grad for x in own)  # pyright: ignore[reportReturnType]

    outs, dq, dk, made_grads = zip(*tw.loopback(layout.world_size, run), strict=True)
    entries = entries_of(layout, 0, split.cu_seqlens, rate)
    assert entries is not None
    assert (layout.unshard(outs, 0) - want).abs().max() < 1e-12
    found = layout.unshard(dq, 0), layout.unshard(dk, 0), entries.layout.unshard(made_grads, 0)
    for mine, leaf in zip(found, leaves, strict=True):
        assert leaf.grad is not None
        assert (mine - leaf.grad).abs().max() < 1e-12 * max(1.0, float(leaf.grad.abs().max()))

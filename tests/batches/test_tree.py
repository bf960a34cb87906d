"""Trees of sequences: the trie itself, and models over it against the separate sequences."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from support.thinned import thinned
from torch import Tensor

import tilewise as tw

VOCABULARY, HEADS, KV_HEADS, HEAD_DIM = 12, 4, 2, 4


def drawn_sequences(rng: np.random.Generator, count: int, longest: int = 9) -> list[list[int]]:
    """Sequences that often share a beginning: each grows from a piece of an earlier one."""
    sequences: list[list[int]] = []
    for _ in range(count):
        known = sequences[rng.integers(len(sequences))] if sequences else []
        kept = known[: rng.integers(len(known) + 1)]
        rest = rng.integers(VOCABULARY, size=rng.integers(0 if kept else 1, longest))
        sequences.append([*kept, *rest.tolist()])
    return sequences


class Model(torch.nn.Module):
    """One layer of attention between an embedding with positions and a head, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = HEADS * HEAD_DIM
        kv_width = KV_HEADS * HEAD_DIM
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.positions = torch.nn.Embedding(200, width)
        self.q = torch.nn.Linear(width, width)
        self.k, self.v = torch.nn.Linear(width, kv_width), torch.nn.Linear(width, kv_width)
        self.head = torch.nn.Linear(width, VOCABULARY)
        self.double()

    def forward(self, tokens: Tensor, position_ids: Tensor, attend) -> Tensor:
        x = self.embedding(tokens) + self.positions(position_ids)
        q, k, v = (f(x).unflatten(-1, (-1, HEAD_DIM)) for f in (self.q, self.k, self.v))
        return self.head(x + attend(q, k, v).flatten(-2))


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)


def separate(model: Model, sequences: list[list[int]]) -> list[Tensor]:
    """Log-probabilities of every sequence by itself."""
    values = []
    for sequence in sequences:
        tokens = torch.tensor(sequence)
        logits = model(tokens, torch.arange(len(tokens)), causal)
        values.append(logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0])
    return values


def loss(values: list[Tensor]) -> Tensor:
    """One that weighs every token of every sequence differently."""
    weighed = [(i + 1) * x * torch.arange(1, len(x) + 1) for i, x in enumerate(values)]
    return torch.cat([x.new_zeros(1) for x in values] + weighed).sum()


def gradients(model: torch.nn.Module) -> list[Tensor]:
    return [x.grad if x.grad is not None else torch.zeros_like(x) for x in model.parameters()]


def test_shared_tokens_stand_once_in_depth_first_order():
    tree = tw.Tree.from_sequences([[1, 2, 3], [1, 2, 4, 5], [7], [1, 2], [1, 2, 3]])
    assert tree.tokens.tolist() == [1, 2, 3, 4, 5, 7]
    assert tree.position_ids.tolist() == [0, 1, 2, 2, 3, 0]
    assert tree.parents.tolist() == [-1, 0, 1, 1, 3, -1]
    assert tree.counts.tolist() == [4, 4, 2, 1, 1, 1]
    assert [tree.rows(i).tolist() for i in range(5)] == [
        [0, 1, 2],
        [0, 1, 3, 4],
        [5],
        [0, 1],
        [0, 1, 2],
    ]
    assert (tree.num_tokens, tree.num_tokens_apart, tree.num_sequences) == (6, 13, 5)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 100])
@pytest.mark.parametrize("seed", range(4))
def test_a_window_counts_along_each_sequence(seed: int, width: int):
    tree = tw.Tree.from_sequences(drawn_sequences(np.random.default_rng(seed), 12))
    wanted = np.zeros((tree.num_tokens, tree.num_tokens), bool)
    for sequence in range(tree.num_sequences):
        rows = tree.rows(sequence).numpy()
        for place, row in enumerate(rows):
            wanted[row, rows[max(place - width + 1, 0) : place + 1]] = True
    everywhere = np.arange(tree.num_tokens)
    assert np.array_equal(tree.windowed(width).dense(everywhere, everywhere), wanted)


def test_a_window_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match=r"width \(0\) must be at least 1"):
        tw.Tree.from_sequences([[1, 2]]).windowed(0)


STRATEGIES = ("auto", "needed", "tiled", "mesh")
EVERY = [*itertools.product(STRATEGIES, (1, 2, 3, 5, 8)), ("ulysses", 1), ("ulysses", KV_HEADS)]
CASES = thinned(EVERY, 3, 1)


@pytest.mark.parametrize(("strategy", "world_size"), CASES)
def test_log_probs_and_gradients_are_those_of_the_separate_sequences(world_size, strategy):
    sequences = drawn_sequences(np.random.default_rng(world_size), 10)
    tree = tw.Tree.from_sequences(sequences)
    layout = tw.balanced(tree.mask, tree.num_tokens, world_size, chunk=1)
    plans = {
        "needed": lambda: tw.needed(tree.mask, layout),
        "tiled": lambda: tw.tiled(tree.mask, layout),
        "mesh": lambda: tw.mesh(world_size, q_tile=world_size),
        "ulysses": lambda: tw.ulysses(world_size),
    }
    compare(sequences, layout, plans[strategy]() if strategy in plans else "auto")


def compare(sequences: list[list[int]], layout: tw.Layout, plan: Any) -> None:
    """Values and gradients over a tree, split by a layout, are those of the sequences apart."""
    tree, whole = tw.Tree.from_sequences(sequences), Model()
    wanted = separate(whole, sequences)
    loss(wanted).backward()

    def run(rank: int, group: tw.Group) -> tuple[list[Tensor], list[Tensor]]:
        cp = tw.ContextParallel(
            group, num_tokens=tree.num_tokens, mask=tree.mask, layout=layout, strategy=plan
        )
        model = Model()
        values = tree.log_probs(model(*tree.shard(cp), cp.attention), cp)
        loss(values).backward()
        return [x.detach() for x in values], gradients(model)

    results = tw.loopback(layout.world_size, run)
    for values, _ in results:
        for value, want in zip(values, wanted, strict=True):
            torch.testing.assert_close(value, want.detach(), rtol=1e-12, atol=1e-12)
    summed = [sum(parts) for parts in zip(*(grads for _, grads in results), strict=True)]
    for grad, want in zip(summed, gradients(whole), strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-11)


def test_a_tree_is_level_and_sends_little_over_64_ranks():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(50, size=rng.integers(50, 800)) for _ in range(6)]
    sequences = [
        np.concatenate([prompt, rng.integers(50, size=rng.integers(10, 600))])
        for prompt in prompts
        for _ in range(16)
    ]
    tree = tw.Tree.from_sequences(sequences)
    layout = tw.balanced(tree.mask, tree.num_tokens, 64)
    sizes = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 64}
    work, full = (
        tw.Workload(num_tokens=tree.num_tokens, mask=mask, layout=layout, **sizes)
        for mask in (tree.mask, tw.Full())
    )
    plan = tw.needed(tree.mask, layout)
    total = np.sum(tw.volume(plan, work), axis=0)
    everything = np.sum(tw.volume(tw.all_gather(64), full), axis=0)
    assert (2 * total < everything).all()
    areas = [
        sum(tree.mask.area(r, (0, tree.num_tokens)) for r in layout.ranges(i)) for i in range(64)
    ]
    assert max(areas) <= 1.03 * np.mean(areas)


@pytest.mark.parametrize(
    ("token_lists", "message"),
    [
        ([], "0 sequences"),
        ([[1], []], "sequence 1"),
        ([[1.5, 2]], "sequence 0"),
        ([[[1, 2]]], "sequence 0"),
        ([[3, -1]], "sequence 0"),
        ([[3], [2**70]], "sequence 1"),
        ([[-1e30, None]], "sequence 0"),
        (["abc"], "sequence 0"),
        ([7], "sequence 0"),
    ],
)
def test_what_is_no_sequence_is_refused(token_lists, message):
    with pytest.raises(ValueError, match=message):
        tw.Tree.from_sequences(token_lists)


def test_wrong_logits_and_layouts_are_refused_on_every_rank():
    tree = tw.Tree.from_sequences([[1, 2, 3], [1, 4]])
    with pytest.raises(ValueError, match="4 rows"):
        tree.log_probs(torch.zeros(3, 9))
    with pytest.raises(ValueError, match="vocabulary of 4, but the tree has token 4"):
        tree.log_probs(torch.zeros(4, 4))
    with pytest.raises(ValueError, match="sequence"):
        tree.rows(2)

    def run(rank: int, group: tw.Group) -> str:
        cp = tw.ContextParallel(group, num_tokens=4, mask=tree.mask)
        with pytest.raises(ValueError, match="rank 1: logits is") as info:
            tree.log_probs(torch.zeros(2 + rank, 9), cp)
        other = tw.ContextParallel(group, num_tokens=5)
        with pytest.raises(ValueError, match="5 tokens, but the tree has 4"):
            tree.shard(other)
        return str(info.value)

    first, second = tw.loopback(2, run)
    assert first == second


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_model_of_transformers_runs_over_a_tree(world_size):
    transformers = pytest.importorskip("transformers")
    from tilewise.integrations import hf

    def made(attention: str) -> torch.nn.Module:
        torch.manual_seed(0)
        config = transformers.Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
        )
        return transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention
        ).double()

    sequences = drawn_sequences(np.random.default_rng(3), 12)
    tree = tw.Tree.from_sequences(sequences)
    whole, wanted = made("eager"), []
    for sequence in sequences:
        tokens = torch.tensor([sequence])
        logits = whole(input_ids=tokens, use_cache=False).logits[0]
        wanted.append(logits[:-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0])
    loss(wanted).backward()

    def run(rank: int, group: tw.Group) -> tuple[list[Tensor], list[Tensor]]:
        layout = tw.balanced(tree.mask, tree.num_tokens, world_size, chunk=1)
        cp = tw.ContextParallel(group, num_tokens=tree.num_tokens, mask=tree.mask, layout=layout)
        model = made(hf.register(cp, f"tree_of_{world_size}_{rank}"))
        tokens, position_ids = tree.shard(cp)
        out = model(input_ids=tokens[None], position_ids=position_ids[None], use_cache=False)
        values = tree.log_probs(out.logits, cp)
        loss(values).backward()
        return [x.detach() for x in values], gradients(model)

    results = tw.loopback(world_size, run)
    for values, _ in results:
        for value, want in zip(values, wanted, strict=True):
            torch.testing.assert_close(
                value, want.detach(), rtol=1e-7, atol=1e-7
            )  # its norms are fp32
    summed = [sum(parts) for parts in zip(*(grads for _, grads in results), strict=True)]
    for grad, want in zip(summed, gradients(whole), strict=True):
        assert (grad - want).abs().max() <= 1e-6 * want.abs().max().clamp(min=1)


def _trl_row(sequences: list[list[int]]) -> dict[str, Tensor]:
    """What TRL packs of these samples."""
    packing = pytest.importorskip("trl.experimental.async_grpo.packing", reason="needs trl")
    row = packing.TreeRow()
    for sequence in sequences:
        ones = torch.ones(len(sequence), dtype=torch.long)
        values = {"old_log_probs": ones * 0.0, "advantage": 1.0, "group_id": 0}
        row.add({"input_ids": torch.tensor(sequence), "completion_mask": ones, **values})
    return row.pack()


def test_a_row_that_trl_packed_is_the_tree_of_its_segments():
    rng = np.random.default_rng(3)
    for _ in range(20):
        sequences = [list(x) for x in {tuple(x) for x in drawn_sequences(rng, 6)}]
        row = _trl_row(sequences)
        borders, keys = row["tree_cu_seqlens_q"].tolist(), row["tree_cu_seqlens_k"].tolist()
        want = torch.zeros(borders[-1], borders[-1], dtype=torch.bool)
        for i, (start, stop) in enumerate(itertools.pairwise(borders)):
            seen = row["tree_kv_index"][keys[i] : keys[i + 1]]
            for at in range(start, stop):
                want[at, seen[: len(seen) - (stop - at) + 1]] = True
        args = row["tree_cu_seqlens_q"], row["tree_cu_seqlens_k"], row["tree_kv_index"]
        tree = tw.Tree.from_segments(*args, tokens=row["input_ids"])
        every = range(tree.num_tokens)
        assert torch.equal(torch.from_numpy(tree.mask.dense(every, every)), want)
        assert torch.equal(tree.position_ids, row["position_ids"])
        found = [tree.tokens[tree.rows(i)].tolist() for i in range(tree.num_sequences)]
        assert sorted(found) == sorted(sequences)
        assert int(tree.counts.sum()) == sum(map(len, sequences))


def test_segments_that_are_no_tree_are_refused_by_number():
    borders, key_borders, rows = [0, 2, 3, 4], [0, 2, 5, 8], [0, 1, 0, 1, 2, 0, 1, 3]
    tree = tw.Tree.from_segments(borders, key_borders, rows)
    assert tree.num_sequences == 2
    with pytest.raises(ValueError, match="this tree has no tokens"):
        tree.tokens  # noqa: B018
    with pytest.raises(ValueError, match=r"segment 2 has queries 3..3 and keys \[0, 2, 3\]"):
        tw.Tree.from_segments(borders, key_borders, [0, 1, 0, 1, 2, 0, 2, 3])
    with pytest.raises(ValueError, match="kv_index 7 rows"):
        tw.Tree.from_segments(borders, key_borders, rows[:-1])
    with pytest.raises(ValueError, match="tokens has 3 entries, but cu_seqlens_q ends at 4"):
        tw.Tree.from_segments(borders, key_borders, rows, tokens=[1, 2, 3])

"""What callers pass that is odd but right is computed; what is wrong is named, and never hangs."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable

import pytest
import torch
from conformance.oracle import Inputs, assert_close, dense, draw, error, split
from torch import Tensor

import tilewise as tw
from tilewise.masks.tables import Blocks

N, NUM_TOKENS = 3, 26


def spaced(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1).flatten(-2)[..., ::2]


def heads_last(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def tokens_last(x: Tensor) -> Tensor:
    return x.movedim(-3, -1).contiguous().movedim(-1, -3)


STRIDES = {"spaced": spaced, "heads last": heads_last, "tokens last": tokens_last}


@pytest.mark.parametrize("head_dim", [1, 8])
@pytest.mark.parametrize("strides", STRIDES)
def test_operands_and_gradients_of_any_strides(strides: str, head_dim: int):
    given, layout, mask = STRIDES[strides], tw.zigzag(NUM_TOKENS, N), tw.Causal()
    x = draw((2, NUM_TOKENS, 4, head_dim), (2, NUM_TOKENS, 2, head_dim), seed=3)

    def on_rank(rank: int, group) -> tuple[Tensor, ...]:
        q, k, v, dout, dlse = (given(layout.shard(t, rank, dim=1)) for t in (*x[:4], x.dlse))
        assert head_dim == 1 or q.stride(-1) != 1
        operands = [t.requires_grad_() for t in (q, k, v)]
        out, lse = tw.attention(
            *operands, plan=tw.ring(N), layout=layout, mask=mask, group=group, return_lse=True
        )
        grads = torch.autograd.grad([out, lse], operands, [dout, dlse])
        return out.detach(), lse.detach(), *grads

    ranks = zip(*tw.loopback(N, on_rank), strict=True)
    want = dense(x, mask)
    assert_close(type(want)(*(layout.unshard(tensors, dim=1) for tensors in ranks)), want)


@pytest.mark.parametrize(
    "plan, heads", [(tw.ring(2, moves="q"), 1), (tw.tree(2), 1), (tw.ulysses(2), 2)], ids=repr
)
def test_a_kernels_dimensions_of_one_have_any_stride(plan: tw.Plan, heads: int):
    """torch calls such a tensor contiguous, but makes no bytes of it."""
    layout, shape = tw.contiguous(4 // heads, 2), (4 // heads, heads, 1)
    x = Inputs(*(t.float().double() for t in draw(shape, shape, seed=3)))
    if plan.replicated_queries:
        x = Inputs(x.q[-2:], x.k, x.v, x.dout[-2:], x.dlse[-2:])
    got = split(x, plan, layout, tw.Full(), torch.float32, kernel="reference", wire_dtype="float64")
    assert_close(got, dense(x, tw.Full()), 1e-5)


def test_a_row_of_any_stride_is_gathered():
    def on_rank(rank: int, group) -> Tensor:
        cp = tw.ContextParallel(group, num_tokens=2, layout=tw.contiguous(2, 2))
        return cp.unshard(torch.arange(9.0)[rank::3][:1], 0)

    for whole in tw.loopback(2, on_rank):
        assert whole.tolist() == [0, 1]


def test_a_query_of_any_strides_is_decoded():
    q, k, v = (torch.randn(2, 5, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))

    def on_rank(rank: int, group) -> tuple[Tensor, Tensor]:
        both = []
        for given in (lambda x: x, spaced):
            cache = tw.KVCache(
                8, num_kv_heads=2, head_dim=8, batch=2, dtype=torch.float64, group=group
            )
            both.append(cache.decode(given(q), given(k), given(v)))
        return both[0], both[1]

    for plain, odd in tw.loopback(N, on_rank):
        assert error(odd, plain) < 1e-15


def test_components_without_any_pair_are_tiled():
    num_tokens, n = 5, 8
    nothing = Blocks([[False]], [0, num_tokens], [0, num_tokens])
    first_only = tw.Document([0, 1, num_tokens]) & tw.Slices([((0, 1), (0, 1), "full")])
    for mask in (nothing, first_only):
        layout = tw.tiled_layout(mask, num_tokens, n)
        tw.check(tw.tiled(mask, layout), mask, layout)


@pytest.mark.parametrize("seed", range(8))
def test_few_tokens_are_tiled_over_many_ranks(seed: int):
    draws = random.Random(seed)
    num_tokens = draws.randint(1, 6)
    edges = [0, *sorted(draws.choices(range(num_tokens + 1), k=3)), num_tokens]
    table = [[draws.random() < 0.4 for _ in edges[1:]] for _ in edges[1:]]
    mask = Blocks(table, edges, edges)
    layout = tw.tiled_layout(mask, num_tokens, 8)
    tw.check(tw.tiled(mask, layout), mask, layout)


def test_auto_with_save_gathered_runs_one_plan_in_both_passes():
    """Of a plan that the planner chose for each pass."""

    def on_rank(rank: int, group) -> tuple[Tensor, ...]:
        cp = tw.ContextParallel(group, num_tokens=16, mask=tw.Causal())
        cp.plan(torch.zeros(4, 2, 8), torch.zeros(4, 2, 8))
        cp._plan, cp._backward_plan = tw.ring(4), tw.all_gather(4)
        q, k, v = (cp.shard(t).requires_grad_() for t in torch.ones(3, 16, 2, 8))
        out = cp.attention(q, k, v, save="gathered")
        out.sum().backward()
        assert v.grad is not None
        return out.detach(), v.grad

    outs, grads = zip(*tw.loopback(4, on_rank), strict=True)
    assert all(torch.equal(out, torch.ones(4, 2, 8)) for out in outs)
    assert error(sum(g.sum() for g in grads).double(), torch.tensor(16.0 * 2 * 8)) < 1e-5


def test_balanced_chooses_a_chunk_for_short_sequences():
    assert sorted(tw.balanced(tw.Causal(), 16, 4).sizes) == [4] * 4


def test_torchs_own_dtypes_are_names():
    work = tw.Workload(16, 4, 2, 8, dtype=torch.float32, wire_dtype=torch.bfloat16)  # pyright: ignore
    assert work == tw.Workload(16, 4, 2, 8, dtype="float32", wire_dtype="bfloat16")


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "mask of cp": (
        lambda: tw.ContextParallel(num_tokens=4, mask="causal"),  # pyright: ignore
        r"mask \('causal'\) must be a Mask, such as tw.Causal\(\)",
    ),
    "layout of cp": (
        lambda: tw.ContextParallel(num_tokens=4, layout="zigzag"),  # pyright: ignore
        r"layout \('zigzag'\) must be a Layout",
    ),
    "machine of cp": (
        lambda: tw.ContextParallel(num_tokens=4, machine="h100x8"),  # pyright: ignore
        r"machine \('h100x8'\) must be a Machine, such as tw.Machine.preset",
    ),
    "inner": (lambda: tw.ulysses(2, 4), r"inner \(4\) must be a Plan"),  # pyright: ignore
    "outer": (lambda: tw.hierarchical(4, tw.ring(2)), r"outer \(4\) must be a Plan"),  # pyright: ignore
    "no kv_bytes": (lambda: tw.mesh(4, 2, kv_bytes=0), r"kv_bytes \(0\) must be finite and above"),
    "kv_bytes below 0": (lambda: tw.mesh(4, 2, kv_bytes=-1), r"kv_bytes \(-1\)"),
    "kv_bytes nan": (lambda: tw.mesh(4, 2, kv_bytes=float("nan")), r"kv_bytes \(nan\)"),
    "half a token": (lambda: tw.zigzag(2.5, 2), r"num_tokens \(2.5\) must be a whole number"),  # pyright: ignore
    "rank before the first": (
        lambda: tw.zigzag(8, 2).positions(-1),
        r"rank \(-1\) must be at least",
    ),
    "rank after the last": (lambda: tw.zigzag(8, 2).ranges(2), r"rank \(2\) must be from 0 to 1"),
    "tokens alone": (
        lambda: tw.ContextParallel(num_tokens=8).shard(torch.arange(8)),
        r"dim \(-3\) must be in -1..0 for a tensor \(8,\); name the one of its tokens",
    ),
    "head_dim": (lambda: tw.Workload(16, 4, 4, 0), r"head_dim \(0\) must be at least 1"),
    "mask of a workload": (
        lambda: tw.Workload(16, 4, 4, 8, mask="causal"),  # pyright: ignore
        r"mask \('causal'\) must be a Mask",
    ),
    "save": (lambda: tw.Workload(16, 4, 4, 8, save="some"), r"save \('some'\) must be 'replay'"),
}


CHECKED: dict[str, Callable[[], object]] = {
    "plan": lambda: tw.check("ring"),  # pyright: ignore
    "mask": lambda: tw.prune(tw.ring(2), "causal", tw.zigzag(8, 2)),  # pyright: ignore
    "layout": lambda: tw.needed(tw.Causal(), "zigzag"),  # pyright: ignore
    "work": lambda: tw.volume(tw.ring(2), tw.ring(2)),  # pyright: ignore
    "machine": lambda: tw.search(tw.Workload(16, 4, 4, 8), "h100x8", world_size=2),  # pyright: ignore
    "backward_plan": lambda: tw.volume(tw.ring(2), tw.Workload(16, 4, 4, 8), "mesh"),  # pyright: ignore
}


@pytest.mark.parametrize("name", CHECKED)
def test_what_is_of_another_kind_is_named(name: str):
    with pytest.raises(ValueError, match=rf"{name} \(.*\) must be a .*, such as tw\."):
        CHECKED[name]()


@pytest.mark.parametrize("what", REFUSED)
def test_refused_with_the_fix(what: str):
    call, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", ["mesh", "ulysses", "tree", "tiled"])
def test_a_plan_goes_to_another_process(name: str):
    mask = tw.masks.causal_document([0, 5, NUM_TOKENS])
    layout = tw.tiled_layout(mask, NUM_TOKENS, 4)
    plan = {
        "mesh": tw.mesh(4, q_tile=2),
        "ulysses": tw.ulysses(2, inner=tw.ring(2)),
        "tree": tw.tree(4),
        "tiled": tw.tiled(mask, layout),
    }[name]
    there = pickle.loads(pickle.dumps(plan))
    assert there == plan and (there.name, there.traits) == (plan.name, plan.traits)
    tw.check(there, mask, layout)
    assert there.tuned(8, 8) == plan.tuned(8, 8) and there.tuned(8, 1) == plan.tuned(8, 1)


def test_a_copied_model_shares_its_context_parallel():
    def on_rank(rank: int, group) -> bool:
        cp = tw.ContextParallel(group, num_tokens=8, mask=tw.Causal(), strategy=tw.ring(2))
        assert repr(cp) == (
            f"ContextParallel(rank {rank} of 2, zigzag(8, 2), Causal(), ring(2, moves='kv'))"
        )
        return copy.deepcopy([cp])[0] is cp

    assert all(tw.loopback(2, on_rank))


def test_auto_names_the_shape_that_differs_not_the_plans_made_for_it():
    def on_rank(rank: int, group) -> str:
        cp = tw.ContextParallel(group, num_tokens=16)
        try:
            cp.attention(*torch.zeros(3, 4, 3 if rank == 1 else 4, 8))
        except ValueError as error:
            return str(error)
        return "no error"

    assert set(tw.loopback(4, on_rank)) == {
        "ranks disagree on num_heads: rank 0 has 4, rank 1 has 3; pass the same value on every rank"
    }


@pytest.mark.parametrize("wrong", [None, torch.zeros(3, 2, 8), torch.zeros(())])
def test_unshard_of_a_wrong_tensor_is_told_to_all_ranks(wrong: object):
    def on_rank(rank: int, group) -> str:
        cp = tw.ContextParallel(group, num_tokens=8)
        try:
            cp.unshard(wrong if rank == 1 else torch.zeros(4, 2, 8))  # pyright: ignore
        except ValueError as error:
            return str(error)
        return "no error"

    first, second = tw.loopback(2, on_rank)
    assert first == second and first.startswith("rank 1: ")


@pytest.mark.parametrize(
    "plan", [tw.ring(2), tw.all_gather(2), tw.ulysses(2)], ids=lambda x: x.name
)
def test_a_batch_of_no_entries_has_gradients_of_no_entries(plan: tw.Plan):
    def on_rank(rank: int, group) -> tuple[int, ...]:
        q, k, v = (torch.zeros(0, 4, 2, 8, requires_grad=True) for _ in range(3))
        call = {"plan": plan, "layout": tw.contiguous(8, 2), "mask": tw.Causal(), "group": group}
        tw.attention(q, k, v, **call).sum().backward()
        assert q.grad is not None
        return tuple(q.grad.shape)

    assert tw.loopback(2, on_rank) == [(0, 4, 2, 8)] * 2


def test_tokens_in_the_place_of_a_group_are_named():
    with pytest.raises(ValueError, match=r"mesh_or_group \(60\) .* num_tokens=60"):
        tw.ContextParallel(60)  # pyright: ignore[reportArgumentType]


def test_a_window_of_minus_one_says_what_is_unbounded():
    with pytest.raises(ValueError, match=r"Window left \(-1\) .* None is unbounded"):
        tw.Window(-1, 0)

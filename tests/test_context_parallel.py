"""ContextParallel: shard, attention and unshard as they belong together."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from conformance.oracle import dense, draw, error
from torch.distributed.device_mesh import init_device_mesh

import tilewise as tw
from tilewise.layouts.balanced import default_layout
from tilewise.planning.search import promising
from tilewise.simulation.machine import Link

N, NUM_TOKENS = 4, 22


def work(**fields) -> tw.Workload:
    good = {"num_tokens": 1 << 12, "num_heads": 8, "num_kv_heads": 8, "head_dim": 64}
    return tw.Workload(**{**good, **fields})


def layouts(mask: tw.Mask | None) -> list[tw.Layout]:
    def on_rank(rank: int, group) -> tw.Layout:
        return tw.ContextParallel(group, num_tokens=NUM_TOKENS, mask=mask).layout

    return tw.loopback(N, on_rank)


def test_the_default_layout_levels_the_work():
    assert layouts(None) == layouts(tw.Full()) == [tw.contiguous(NUM_TOKENS, N)] * N
    assert layouts(tw.Causal()) == [tw.zigzag(NUM_TOKENS, N)] * N
    documents = tw.Causal() & tw.Document([0, 5, NUM_TOKENS])
    (layout, *others) = layouts(documents)
    assert layout.name == "balanced" and others == [layout] * (N - 1)


@pytest.mark.parametrize("strategy", ["auto", tw.mesh(N, q_tile=2)], ids=repr)
@pytest.mark.parametrize("mask", [tw.Full(), tw.Causal()], ids=repr)
def test_shard_attend_unshard_is_dense_attention(mask: tw.Mask, strategy):
    """The loss is of the whole sequence on every rank; unshard's backward sums over ranks."""
    x = draw((NUM_TOKENS, 4, 4), (NUM_TOKENS, 2, 4), seed=0)
    want = dense(x._replace(dlse=0 * x.dlse), mask)

    def on_rank(rank: int, group) -> tuple[torch.Tensor, ...]:
        cp = tw.ContextParallel(group, num_tokens=NUM_TOKENS, mask=mask, strategy=strategy)
        whole = [t.clone().requires_grad_() for t in x[:3]]
        out = cp.unshard(cp.attention(*map(cp.shard, whole)))
        (out * x.dout).sum().div(N).backward()
        return out.detach(), *(t.grad for t in whole)

    ranks = tw.loopback(N, on_rank)
    assert all(error(out, want.out) <= 1e-12 for out, *_ in ranks)
    for parts, expected in zip(zip(*(r[1:] for r in ranks), strict=True), want[2:5], strict=True):
        assert error(torch.stack(parts).sum(0), expected) <= 1e-12


def test_position_ids_go_with_the_shard():
    def on_rank(rank: int, group) -> bool:
        cp = tw.ContextParallel(group, num_tokens=NUM_TOKENS, mask=tw.Causal())
        positions = torch.arange(NUM_TOKENS)
        assert (cp.rank, cp.world_size) == (rank, N)
        return torch.equal(cp.shard(positions, dim=0), cp.position_ids)

    assert all(tw.loopback(N, on_rank))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_unshard_is_the_inverse_of_shard_along_any_dim(dim: int):
    whole = torch.randn(NUM_TOKENS, NUM_TOKENS)

    def on_rank(rank: int, group) -> bool:
        cp = tw.ContextParallel(group, num_tokens=NUM_TOKENS, mask=tw.Causal())
        return torch.equal(cp.unshard(cp.shard(whole, dim), dim), whole)

    assert all(tw.loopback(N, on_rank))


def test_unshard_of_fewer_tokens_than_ranks():
    def on_rank(rank: int, group) -> list[float]:
        cp = tw.ContextParallel(group, num_tokens=2)
        mine = cp.shard(torch.arange(2.0), dim=0).requires_grad_()
        whole = cp.unshard(mine, dim=0)
        (whole * torch.tensor([1.0, 10.0])).sum().backward()
        return [*whole.tolist(), *mine.grad.tolist()]

    assert tw.loopback(N, on_rank) == [[0, 1, 4], [0, 1, 40], [0, 1], [0, 1]]


def test_the_gradient_of_unshard_sums_over_ranks():
    def on_rank(rank: int, group) -> torch.Tensor:
        cp = tw.ContextParallel(group, num_tokens=NUM_TOKENS)
        mine = cp.shard(torch.randn(NUM_TOKENS, 3), dim=0).requires_grad_()
        (cp.unshard(mine, dim=0) * (rank + 1)).sum().backward()
        return mine.grad

    assert all(bool((grad == 1 + 2 + 3 + 4).all()) for grad in tw.loopback(N, on_rank))


def test_another_mask_for_one_call():
    x = draw((NUM_TOKENS, 2, 4), (NUM_TOKENS, 2, 4), seed=1)
    window = tw.Causal() & tw.Window(3, 0)

    def on_rank(rank: int, group) -> list[torch.Tensor]:
        cp = tw.ContextParallel(group, num_tokens=NUM_TOKENS, mask=tw.Causal())
        mine = [cp.shard(t) for t in x[:3]]
        return [cp.unshard(cp.attention(*mine, mask=mask)) for mask in (None, window)]

    full, windowed = tw.loopback(N, on_rank)[0]
    assert error(full, dense(x, tw.Causal()).out) <= 1e-12
    assert error(windowed, dense(x, window).out) <= 1e-12


def test_options_reach_attention():
    def on_rank(rank: int, group) -> torch.Tensor:
        cp = tw.ContextParallel(group, num_tokens=NUM_TOKENS)
        q = cp.shard(torch.randn(NUM_TOKENS, 2, 4))
        return cp.attention(q, q, q, return_lse=True, softmax_scale=0.5)[1]

    assert [lse.shape for lse in tw.loopback(N, on_rank)] == [(6, 2), (6, 2), (5, 2), (5, 2)]


def test_one_rank_needs_no_group():
    cp = tw.ContextParallel(num_tokens=5, mask=tw.Causal())
    x = draw((5, 2, 4), (5, 2, 4), seed=2)
    assert error(cp.unshard(cp.attention(*map(cp.shard, x[:3]))), dense(x, tw.Causal()).out) < 1e-12


@pytest.mark.parametrize("preset", ["cpu-gloo", "h100x8"])
@pytest.mark.parametrize("n", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_auto_is_near_the_best_that_a_search_finds(n: int, preset: str):
    machine = tw.Machine.preset(preset)
    for mask in (tw.Full(), tw.Causal(), tw.Causal() & tw.Document([0, 700, 1000, 1 << 12])):
        asked = work(mask=mask, layout=default_layout(mask, 1 << 12, n))
        plan, backward, _ = promising(asked, machine, n)
        found = tw.simulate(plan, asked, machine, None if backward is plan else backward)
        best = tw.search(replace(asked, save="replay"), machine, world_size=n)[0]
        assert found.seconds <= 1.1 * best.seconds, (mask, plan, best.plan)


def test_auto_keeps_a_split_by_heads_to_what_the_heads_allow():
    machine = tw.Machine.preset("cpu-gloo")
    for plan in promising(work(num_heads=7, num_kv_heads=7), machine, 16)[:2]:
        assert plan.num_head_groups == 1
    assert promising(work(), machine, 1)[:2] == (tw.ring(1), tw.ring(1))


def test_what_auto_chose_is_logged_once_by_the_first_rank(caplog):
    def on_rank(rank: int, group) -> None:
        cp = tw.ContextParallel(group, num_tokens=NUM_TOKENS)
        q = cp.shard(torch.randn(NUM_TOKENS, 2, 4))
        for _ in range(2):
            cp.attention(q, q, q)

    with caplog.at_level(logging.INFO, "tilewise"):
        tw.loopback(N, on_rank)
    (record,) = caplog.records
    assert record.message.startswith("strategy='auto' chose ")
    assert f"for {NUM_TOKENS} tokens on {N} ranks: " in record.message
    assert "simulated as the fastest on cpu-gloo, " in record.message


def test_auto_is_as_fast_as_plans_made_for_the_mask():
    """Two documents longer than a rank's share, over links that are slow."""
    tokens = 1 << 12
    mask, slow = tw.Causal() & tw.Document([0, 100, 2500, tokens]), Link(1e6, 1e-4)
    link = replace(tw.Machine.preset("cpu-gloo"), inside=slow, between=slow)
    layout = tw.zigzag(tokens, N)

    def on_rank(rank: int, group) -> tw.Plan:
        cp = tw.ContextParallel(group, num_tokens=tokens, mask=mask, layout=layout, machine=link)
        q = cp.shard(torch.randn(tokens, 3, 4))
        cp.attention(q, q, q)
        cp.attention(q, q, q, mask=tw.Causal())
        return cp.plan(q, q)

    work = tw.Workload(tokens, 3, 3, 4, "float32", mask=mask, layout=layout)
    made = tw.needed(mask, layout), tw.tiled(mask, layout)
    least = min(tw.simulate(plan, work, link).seconds for plan in made)
    for plan in tw.loopback(N, on_rank):
        assert tw.simulate(plan, work, link).seconds <= 1.01 * least


def test_auto_is_decided_at_the_first_call_and_the_same_on_all_ranks():
    def on_rank(rank: int, group) -> str:
        cp = tw.ContextParallel(group, num_tokens=NUM_TOKENS, mask=tw.Causal())
        q = cp.shard(torch.randn(NUM_TOKENS, 4, 4))
        first = cp.plan(q, q)
        cp.attention(q, q, q)
        assert cp.plan(q[:, :1], q[:, :1]) is first
        return first.name

    assert len({*tw.loopback(N, on_rank)}) == 1


def error_of(make) -> str:
    def on_rank(rank: int, group) -> str:
        with pytest.raises(ValueError) as raised:
            make(rank, group)
        return str(raised.value)

    (message,) = set(tw.loopback(N, on_rank))
    return message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strategy": "ring"}, "strategy ('ring') must be 'auto' or a plan, such as tw.ring(8)"),
        ({"layout": tw.zigzag(21, N)}, "layout is for 21 tokens on 4 ranks, not for 22 on 4"),
        ({"layout": tw.zigzag(22, 3)}, "layout is for 22 tokens on 3 ranks, not for 22 on 4"),
        ({"mask": tw.Document([0, 21])}, "21"),
        ({"num_tokens": 0}, "num_tokens (0) must be at least 1"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(fields: dict, message: str):
    arguments = {"num_tokens": NUM_TOKENS, **fields}
    assert message in error_of(lambda rank, group: tw.ContextParallel(group, **arguments))


def test_a_plan_for_another_world_is_refused_at_the_call():
    def make(rank: int, group) -> None:
        cp = tw.ContextParallel(group, num_tokens=NUM_TOKENS, strategy=tw.ring(5))
        q = cp.shard(torch.zeros(NUM_TOKENS, 2, 4))
        cp.attention(q, q, q)

    assert "for 5 ranks, but the group has 4" in error_of(make)


@pytest.mark.parametrize(
    ("shape", "message"),
    [((6, 3, 4), "must be a multiple"), ((6,), "must all be"), ((9, 2, 4), "q has 9 tokens")],
)
def test_one_ranks_bad_input_is_every_ranks_error_with_auto_too(shape: tuple, message: str):
    def make(rank: int, group) -> None:
        cp = tw.ContextParallel(group, num_tokens=NUM_TOKENS)
        q, k = (cp.shard(torch.zeros(NUM_TOKENS, 2, 4)) for _ in range(2))
        cp.attention(torch.zeros(shape) if rank == 1 else q, k, k)

    assert error_of(make).startswith("rank 1: ") and message in error_of(make)


def test_one_ranks_bad_rows_are_every_ranks_error_in_unshard():
    def make(rank: int, group) -> None:
        cp = tw.ContextParallel(group, num_tokens=NUM_TOKENS)
        cp.unshard(torch.zeros(7 if rank == 2 else cp.layout.size(rank), 3), dim=0)

    text = "rank 2: x has 7 tokens along dim 0, but the layout gives this rank 5"
    assert error_of(make) == text

    def disagree(rank: int, group) -> None:
        cp = tw.ContextParallel(group, num_tokens=NUM_TOKENS)
        cp.unshard(torch.zeros(cp.layout.size(rank), 3 + (rank == 3)), dim=0)

    assert error_of(disagree).startswith("ranks disagree on shape: rank 0 has [-1, 3], rank 3")


def test_shard_wants_the_whole_sequence():
    cp = tw.ContextParallel(num_tokens=5)
    with pytest.raises(ValueError, match="x has 4 tokens along dim -3, but the layout is for 5"):
        cp.shard(torch.zeros(4, 2, 2))


@pytest.fixture
def one_process(tmp_path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_a_device_mesh_of_one_dimension():
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp"))
    cp = tw.ContextParallel(mesh["cp"], num_tokens=6, mask=tw.Causal())
    assert (cp.rank, cp.world_size) == (0, 1)
    x = draw((6, 2, 4), (6, 2, 4), seed=3)
    out = cp.unshard(cp.attention(*map(cp.shard, x[:3])))
    assert error(out, dense(x, tw.Causal()).out) < 1e-12
    with pytest.raises(ValueError, match=r"2 dimensions.*mesh\[\"cp\"\]"):
        tw.ContextParallel(mesh, num_tokens=6)


@pytest.mark.usefixtures("one_process")
def test_a_process_group_or_the_default_one():
    for group in (None, dist.group.WORLD):
        cp = tw.ContextParallel(group, num_tokens=3)
        q = torch.randn(3, 1, 2)
        assert cp.attention(q, q, q).shape == q.shape


@pytest.mark.parametrize("shifts", [-1, -3, 2, 0, 40])
@pytest.mark.parametrize("make", [tw.contiguous, tw.zigzag, tw.striped])
def test_roll_is_that_of_the_whole_sequence_within_documents(make, shifts):
    whole = torch.randn(2, NUM_TOKENS, 3, dtype=torch.float64)
    for edges in (None, [0, 5, 5, 6, NUM_TOKENS]):
        want = torch.full_like(whole, -100)
        bounds = edges or [0, NUM_TOKENS]
        for t in range(NUM_TOKENS):
            lows = [a <= t < b and a <= t - shifts < b for a, b in pairwise(bounds)]
            if any(lows):
                want[:, t] = whole[:, t - shifts]

        def on_rank(rank: int, group, edges=edges, want=want) -> torch.Tensor:
            cp = tw.ContextParallel(group, num_tokens=NUM_TOKENS, layout=make(NUM_TOKENS, N))
            x = cp.shard(whole, 1).requires_grad_()
            rolled = cp.roll(x, shifts, cu_seqlens=edges)
            assert torch.equal(rolled, cp.shard(want, 1))
            (rolled * (1 + cp.position_ids[None, :, None])).sum().backward()
            assert x.grad is not None
            return x.grad

        grads = tw.loopback(N, on_rank)
        leaf = whole.clone().requires_grad_()
        index = [t for t in range(NUM_TOKENS) if (want[0, t] != -100).all()]
        for t in index:
            (leaf[:, t - shifts].sum() * (1 + t)).backward()
        total = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        assert torch.equal(make(NUM_TOKENS, N).unshard(grads, 1), total)


def test_roll_refuses_on_all_ranks():
    def on_rank(rank: int, group, **wrong):
        cp = tw.ContextParallel(group, num_tokens=NUM_TOKENS)
        options = {name: values[rank] for name, values in wrong.items()}
        cp.roll(cp.shard(torch.arange(NUM_TOKENS)[None], 1), **{"shifts": -1, **options})

    for wrong, message in (
        ({"shifts": [-1, -1, -2, -1]}, "ranks disagree on shifts"),
        ({"shifts": [-1, "1", -1, -1]}, r"rank 1: shifts \('1'\) must be a whole number"),
        ({"cu_seqlens": [[0, 9]] * 4}, "cu_seqlens ends at 9, but the sequence has 22"),
        ({"dim": [5] * 4}, "dim"),
    ):
        with pytest.raises(ValueError, match=message):
            tw.loopback(N, lambda rank, group, w=wrong: on_rank(rank, group, **w))


def test_mean_is_the_wholes_and_gradients_add_up():
    """Rank 1 has no label; counts differ."""
    losses = torch.randn(NUM_TOKENS, dtype=torch.float64)
    labelled = torch.arange(NUM_TOKENS) % 3 != 0
    layout = tw.contiguous(NUM_TOKENS, N)
    labelled[layout.positions(1)] = False

    def on_rank(rank: int, group) -> tuple[torch.Tensor, torch.Tensor]:
        cp = tw.ContextParallel(group, num_tokens=NUM_TOKENS, layout=layout)
        x, kept = cp.shard(losses, 0).requires_grad_(), cp.shard(labelled, 0)
        mean = cp.mean(x[kept].sum(), kept.sum())
        mean.backward()
        assert x.grad is not None
        return mean.detach(), x.grad

    means, grads = zip(*tw.loopback(N, on_rank), strict=True)
    whole = losses.clone().requires_grad_()
    whole[labelled].mean().backward()
    assert all(torch.equal(mean, means[0]) for mean in means)
    assert torch.allclose(means[0], losses[labelled].mean(), rtol=1e-14, atol=0)
    assert whole.grad is not None
    assert torch.allclose(layout.unshard(grads), whole.grad, rtol=1e-14, atol=0)


def test_mean_refuses_what_is_no_number_on_all_ranks():
    def on_rank(rank: int, group):
        cp = tw.ContextParallel(group, num_tokens=NUM_TOKENS)
        cp.mean(torch.ones(2 if rank == 2 else 1), 3)

    with pytest.raises(ValueError, match=r"rank 2: losses \(2,\) are fewer than count \(3\); pass"):
        tw.loopback(N, on_rank)

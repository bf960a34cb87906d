"""Joint layouts: tokens that every rank holds beside tokens that one rank holds, exact in fp64."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.conformance.oracle import Inputs, Result, assert_close, dense, draw
from tilewise.masks import Mask
from tilewise.tokens.same_rows import Difference, first_difference
from tilewise.transport import transport_for


class Rows(NamedTuple):
    """Of one rank."""

    rows: Tensor


LAYOUTS = tw.contiguous, tw.zigzag, tw.striped


def drawn_layout(random: Random, n: int) -> tw.Layout:
    """Replicated tokens before, after, between or anywhere among others, or alone."""
    shared, others = random.randint(1, 7), random.choice((0, 3, 17, 30))
    total = shared + others
    middle = random.randint(0, others)
    places = {
        "before": range(shared),
        "after": range(others, total),
        "between": range(middle, middle + shared),
        "anywhere": random.sample(range(total), shared),
    }
    held = random.choice(LAYOUTS)(others, n) if others else n
    return tw.joint(held, places[random.choice([*places])])


def drawn_plan(random: Random, n: int, mask: Mask | None, layout: tw.Layout) -> tw.Plan:
    plans = [tw.ring(n), tw.ring(n, moves="q"), tw.all_gather(n), tw.mesh(n, q_tile=n)]
    if 4 % n == 0:
        plans.append(tw.ulysses(n))
    if n % 2 == 0:
        inner = tw.ulysses(2, inner=tw.ring(n // 2)), tw.double_ring(2, n // 2)
        plans += [*inner, tw.attention2d(2, n // 2), tw.hierarchical(tw.ring(n // 2), tw.ring(2))]
    if mask is not None:
        plans += [tw.needed(mask, layout), tw.tiled(mask, layout)]
    return random.choice(plans)


def shares(x: Tensor, layout: tw.Layout, dim: int) -> list[Tensor]:
    """The ranks' rows of a gradient: those of a replicated token add up to the whole's."""
    n = layout.world_size
    weights = torch.randn(n, layout.num_tokens, generator=torch.Generator().manual_seed(3))
    shared = torch.from_numpy(layout.replicated)
    rest = torch.ones(n, layout.num_tokens, dtype=torch.float64)
    rest[:, shared] = weights.double()[:, shared]
    rest[-1, shared] = 1 - rest[:-1, shared].sum(0)
    shape = [1] * dim + [-1] + [1] * (x.ndim - dim - 1)
    return [layout.shard(x * rest[rank].view(shape), rank, dim) for rank in range(n)]


def total(parts: list[Tensor], layout: tw.Layout, dim: int) -> Tensor:
    """The sum over ranks of what each has of every token."""
    shape = [*parts[0].shape]
    shape[dim] = layout.num_tokens
    whole = parts[0].new_zeros(shape)
    for rank, part in enumerate(parts):
        whole.index_add_(dim, layout.positions(rank), part)
    return whole


def split(
    x: Inputs, plan: tw.Plan, layout: tw.Layout, kv_layout: tw.Layout | None = None, **options: Any
) -> Result:
    """Attention of a joint layout; every copy of a replicated row of out and lse is compared."""
    keys, dim = kv_layout or layout, x.q.ndim - 3
    replicated = plan.replicated_queries
    n = plan.world_size
    douts = [[t] * n if replicated else shares(t, layout, dim) for t in (x.dout, x.dlse)]

    def on_rank(rank: int, group: Any) -> tuple[Tensor, ...]:
        q = x.q if replicated else layout.shard(x.q, rank, dim)
        k, v = (keys.shard(t, rank, dim) for t in (x.k, x.v))
        q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
        words = {"plan": plan, "layout": layout, "kv_layout": kv_layout, "group": group}
        out, lse = tw.attention(q, k, v, return_lse=True, **words, **options)
        reached = lse != -torch.inf
        dlse = douts[1][rank]
        (out * douts[0][rank]).sum().add((lse[reached] * dlse[reached]).sum()).backward()
        assert q.grad is not None and k.grad is not None and v.grad is not None
        return out.detach(), lse.detach(), q.grad, k.grad, v.grad

    out, lse, dq, dk, dv = map(list, zip(*tw.loopback(n, on_rank), strict=True))
    if replicated:
        return Result(out[0], lse[0], dq[0], total(dk, keys, dim), total(dv, keys, dim))
    whole = layout.unshard(out, dim), layout.unshard(lse, dim)
    for found, every in zip((out, lse), whole, strict=True):
        for rank, rows in enumerate(found):
            assert_close([rows], Rows(layout.shard(every, rank, dim)))
    return Result(
        *whole,
        *(total(t, side, dim) for t, side in zip((dq, dk, dv), (layout, keys, keys), strict=True)),
    )


@pytest.mark.parametrize("seed", range(40))
def test_attention_is_that_of_the_whole_sequence(seed: int) -> None:
    random = Random(seed)
    n, batch = random.randint(1, 8), random.choice(((), (2,)))
    layout = drawn_layout(random, n)
    tokens, kv_heads = layout.num_tokens, random.choice((1, 2, 4))
    masks = [tw.Full(), tw.Causal(), tw.Window(5, 3), tw.Document([0, tokens // 3, tokens])]
    masks.append(tw.PerHead([tw.Causal() if h % 2 else tw.Full() for h in range(kv_heads)]))
    mask = random.choice(masks)
    x = draw((*batch, tokens, 4, 8), (*batch, tokens, kv_heads, 8), seed, random.choice((8, 5)))
    plan = drawn_plan(random, n, mask, layout)
    assert_close(split(x, plan, layout, mask=mask), dense(x, mask))


@pytest.mark.parametrize("seed", range(24))
def test_cross_attention_reads_a_context_of_any_length(seed: int) -> None:
    random = Random(seed)
    n = random.randint(2, 6)
    queries, plan = 23, drawn_plan(random, n, None, tw.contiguous(1, n))
    context = random.choice((tw.joint(n, range(9)), tw.contiguous(9, n), drawn_layout(random, n)))
    layout = random.choice(
        (tw.zigzag(queries, n), tw.joint(tw.contiguous(queries - 4, n), range(4)))
    )
    keys = context.num_tokens
    mask = random.choice((tw.Full(), tw.Slices([((0, queries), (0, max(1, keys - 3)), "full")])))
    x = draw((2, queries, 4, 8), (2, keys, 2, 8), seed)
    want = dense(x, mask)
    assert_close(split(x, plan, layout, context, mask=mask), want)


@pytest.mark.parametrize("positions", [[15, 16], [3, 0], range(17)])
@pytest.mark.parametrize("others", [14, 0])
def test_replicated_queries_read_a_joint_context(positions: Any, others: int) -> None:
    """They are computed on every rank; replicated keys count once, also where all are."""
    layout = tw.joint(tw.contiguous(14, 3), [0, 7, 15]) if others else tw.joint(3, range(17))
    x = draw((len(positions), 4, 8), (17, 2, 8), 0)
    mask = tw.Causal()
    plan = tw.from_json(tw.to_json(tw.tree(3)))
    found = split(x, plan, layout, mask=mask, q_positions=positions)
    assert_close(found, dense(x, mask, torch.tensor([*positions])))


def test_a_context_on_every_rank_is_read_without_a_message() -> None:
    layout, context = tw.contiguous(12, 3), tw.joint(3, range(5))
    x = draw((12, 2, 8), (5, 2, 8), 0)

    def on_rank(rank: int, group: Any) -> int:
        transport = transport_for(group)
        tw.attention(
            layout.shard(x.q, rank),
            x.k,
            x.v,
            plan=tw.ring(3),
            layout=layout,
            kv_layout=context,
            mask=tw.Full(),
            group=transport,
        )
        return transport.bytes_sent

    assert tw.loopback(3, on_rank) == [0, 0, 0]


@pytest.mark.parametrize("n", (2, 5))
def test_volume_is_what_ranks_send(n: int) -> None:
    layout, mask = tw.joint(tw.contiguous(17, n), range(3, 9)), tw.Causal()
    work = tw.Workload(23, 4, 2, 8, dtype="float64", layout=layout, mask=mask, v_head_dim=5)
    x = draw((23, 4, 8), (23, 2, 8), 0, 5)

    def on_rank(rank: int, group: Any) -> tuple[int, int]:
        transport = transport_for(group)
        q, k, v = (layout.shard(t, rank).requires_grad_() for t in x[:3])
        words = {"plan": tw.ring(n), "layout": layout, "mask": mask, "group": transport}
        out = tw.attention(q, k, v, **words)
        sent = transport.bytes_sent
        out.sum().backward()
        return sent, transport.bytes_sent - sent

    forward, backward = zip(*tw.loopback(n, on_rank), strict=True)
    assert tw.volume(tw.ring(n), work) == (forward, backward)


def test_simulation_has_the_rows_that_all_ranks_get(tmp_path: Any) -> None:
    layout, machine = tw.joint(tw.contiguous(4096, 8), range(512)), tw.Machine.preset("h100x8")
    work = tw.Workload(4608, 24, 24, 128, layout=layout)
    inner = tw.Workload(4608, 24, 24, 128, layout=layout.owned)
    for plan in (tw.ring(8), tw.ulysses(8)):
        joint, alone = (tw.simulate(plan, one, machine) for one in (work, inner))
        sent = [sum(tw.volume(plan, one).forward) for one in (work, inner)]
        assert sent[0] - sent[1] == 7 * 512 * 24 * 128 * 2
        assert joint.forward_seconds > alone.forward_seconds
        assert joint.backward_seconds > alone.backward_seconds
        assert joint.sent_bytes - alone.sent_bytes == 2 * 7 * 64 * 24 * 128 * 2
        joint.trace(tmp_path / "trace.json")
    uneven = tw.Workload(21, 4, 4, 8, mask=tw.Causal(), layout=tw.joint(tw.zigzag(16, 3), range(5)))
    simulated = tw.simulate(tw.ring(3), uneven, machine)
    assert sum(sum(x) for x in tw.volume(tw.ring(3), uneven)) == sum(
        simulated.total_bytes_by_link.values()
    )


def test_planner_checker_and_files_take_joint_layouts(tmp_path: Any) -> None:
    from tilewise.planning import load_candidate

    layout, mask = tw.joint(tw.zigzag(80, 4), range(80, 96)), tw.Causal()
    work = tw.Workload(96, 4, 4, 16, layout=layout, mask=mask)
    best = tw.search(work, tw.Machine.preset("h100x8"), world_size=4)[0]
    path = tmp_path / "candidate.json"
    path.write_text(best.to_json())
    loaded = load_candidate(str(path))
    assert loaded.layout == layout and loaded.plan == best.plan
    for plan in (tw.ring(4), tw.needed(mask, layout), tw.tiled(mask, layout)):
        plan.check(mask, layout)
        plan.pruned(mask, layout).check(mask, layout)


def test_positions_and_shards() -> None:
    layout = tw.joint(tw.contiguous(4, 2), replicated=[5, 0])
    assert [layout.positions(r).tolist() for r in range(2)] == [[0, 1, 2, 5], [0, 3, 4, 5]]
    assert layout.num_tokens == 6 and layout.replicated.tolist() == [0, 5]
    assert layout.owned.is_partition and layout.owned.sizes == (3, 3)
    x = torch.arange(6.0)
    assert torch.equal(layout.unshard([layout.shard(x, r) for r in range(2)]), x)
    uneven = tw.joint(tw.Layout.from_positions([[0, 1, 2], [], [3]]), range(2))
    assert uneven.owned.sizes == (3, 2, 1)
    partly = tw.Layout(3, [[tw.layouts.Run(0, 2)], [tw.layouts.Run(1, 2)], []])
    assert not len(partly.replicated) and partly.owned is partly


def test_unshard_and_gather_take_one_rank_s_rows() -> None:
    layout = tw.joint(tw.contiguous(7, 3), range(2, 5))
    x = torch.randn(2, 10, 4, dtype=torch.float64)

    def on_rank(rank: int, group: Any) -> tuple[Tensor, Tensor]:
        cp = tw.ContextParallel(group, num_tokens=10, layout=layout)
        rows = cp.shard(x, dim=1).requires_grad_()
        whole = cp.unshard(rows, dim=1)
        (whole * x).sum().backward()
        assert torch.equal(cp.gather(rows, dim=1, mask=tw.Full()), whole)
        assert rows.grad is not None
        return whole.detach(), rows.grad

    wholes, grads = zip(*tw.loopback(3, on_rank), strict=True)
    assert all(torch.equal(whole, x) for whole in wholes)
    assert torch.allclose(total([*grads], layout, 1), 3 * x)


def test_the_short_way_chooses_a_plan() -> None:
    layout = tw.joint(tw.contiguous(20, 4), range(20, 26))
    x = draw((26, 4, 8), (26, 4, 8), 0)

    def on_rank(rank: int, group: Any) -> Tensor:
        cp = tw.ContextParallel(group, num_tokens=26, layout=layout)
        return cp.attention(*(cp.shard(t) for t in x[:3]))

    assert torch.allclose(layout.unshard(tw.loopback(4, on_rank)), dense(x, tw.Full()).out)


def attend(change: Any = None, **options: Any) -> list[Tensor]:
    """Attention on 3 ranks, of which change(rank, q, k, v) spoils one."""
    layout = tw.joint(tw.contiguous(9, 3), range(4))
    x = draw((13, 2, 8), (13, 2, 8), 0)

    def on_rank(rank: int, group: Any) -> Tensor:
        rows = [layout.shard(t, rank).float() for t in x[:3]]
        rows = rows if change is None else change(rank, *rows)
        words = {"plan": tw.ring(3), "layout": layout, "mask": tw.Full(), "group": group}
        return tw.attention(*rows, **words, **options)

    return tw.loopback(3, on_rank)


def test_replicated_rows_that_differ_are_named() -> None:
    def other_prompt(rank: int, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        if rank == 2:
            v = v.clone()
            v[1:3] = v[1:3].flip(-1)
        return [q, k, v]

    with pytest.raises(ValueError, match=r"of v differ: token 1 .* rank 2 .* \(2 of 4 rows\)"):
        attend(other_prompt)
    attend(other_prompt, validate="never")

    def rounded(rank: int, *rows: Tensor) -> list[Tensor]:
        return [x * (1 + 1e-6 * rank) for x in rows]

    attend(rounded)


def test_replicated_rows_that_differ_are_refused_at_every_try() -> None:
    layout = tw.joint(tw.contiguous(8, 2), [0, 1])
    whole = torch.randn(10, 2, 4)

    def on_rank(rank: int, group: Any) -> list[str]:
        told, words = [], {"plan": tw.ring(2), "layout": layout, "mask": tw.Full(), "group": group}
        for other_text in (1, 1, 0, 1):
            rows = layout.shard(whole, rank) + rank * other_text
            try:
                tw.attention(rows, rows, rows, **words)
                told.append("taken")
            except ValueError as error:
                told.append("refused" if "rows of k differ" in str(error) else str(error))
        return told

    # once they were the same, a kind is compared no more
    assert tw.loopback(2, on_rank) == [["refused", "refused", "taken", "taken"]] * 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.inf, 0.0),
        (torch.inf, -torch.inf),
        (torch.nan, 0.0),
        (torch.nan, torch.inf),
        (torch.nan, torch.nan),
        (1e300, 1e300),
    ],
)
def test_rows_that_are_not_finite_are_compared(first: float, second: float) -> None:
    same = str(first) == str(second)

    def on_rank(rank: int, group: Any) -> Difference | None:
        x = torch.ones(3, 2, 4, dtype=torch.float64)
        x[1, 0, 2] = second if rank else first
        x[2, 0, 1 + (rank and not same)] = torch.nan  # at another place
        return first_difference(group, {"call": "rows"}, lambda: [("x", x)], "first")

    wanted = None if same else Difference("x", 1, 1, 2)
    assert tw.loopback(2, on_rank) == [wanted] * 2


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"k has 6 tokens on rank 1, .* 7 of 13, 4 of them on ev"):
        attend(lambda rank, q, k, v: [q, k[:6], v] if rank == 1 else [q, k, v])
    layout = tw.contiguous(9, 3)
    with pytest.raises(ValueError, match=r"positions 3\.\.11 must lie in 0\.\.10"):
        tw.joint(layout, [3, 11])
    with pytest.raises(ValueError, match="position 3 twice"):
        tw.joint(layout, [3, 3])
    with pytest.raises(ValueError, match="join all replicated tokens at once"):
        tw.joint(tw.joint(layout, [1]), [2])
    with pytest.raises(
        ValueError, match=r"layout, a Layout or a number of ranks, \('layout'\) must"
    ):
        tw.joint("layout", [2])  # pyright: ignore[reportArgumentType]

    def halo(rank: int, group: Any) -> None:
        cp = tw.ContextParallel(group, num_tokens=10, layout=tw.joint(layout, [1]))
        cp.halo(torch.zeros(4, 2), 1)

    with pytest.raises(ValueError, match=r"halo on joint\(10, 3\): 12 rows for 10 tokens"):
        tw.loopback(3, halo)

    def dropped(rank: int, group: Any) -> None:
        words = {"plan": tw.ring(3), "layout": layout, "kv_layout": tw.joint(3, range(5))}
        q, kv = torch.zeros(3, 2, 8), torch.zeros(5, 2, 8)
        tw.attention(q, kv, kv, **words, mask=tw.Full(), group=group, dropout_p=0.5)

    with pytest.raises(ValueError, match=r"dropout_p \(0.5\) on 3 ranks needs a dropout_seed"):
        tw.loopback(3, dropped)

"""Verbs on tokens: values and every gradient of the unsplit operation, on any layout, in fp64."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from support.drawn_layouts import Split, drawn, normal
from torch import Tensor
from torch.nn import functional as F

import tilewise as tw
from tilewise.compiler.row_code import row_code
from tilewise.compiler.row_moves import RowMoves
from tilewise.execution.run import BoundCode
from tilewise.tokens import moves as moves_of_verbs
from tilewise.tokens.gather import gather_stages, gathers_in_stages
from tilewise_verify.code_check import check_code

Leaves = list[Tensor]


def compare(
    split: Split,
    tokens: Leaves,
    parameters: Leaves,
    on_rank: Callable[..., Tensor],
    whole: Callable[..., Tensor],
    dim: int = 0,
) -> None:
    """The result of all ranks, and the gradients of a weighted sum of it, are the whole's.

    Args:
        tokens, parameters: leaves that are sharded along dim, and leaves that every rank has.
        on_rank: (cp, this rank's leaves) -> this rank's rows of the result.
        whole: (leaves) -> the result.
    """
    layout, n = split.layout, split.layout.world_size
    leaves = [x.clone().requires_grad_() for x in (*tokens, *parameters)]
    want = whole(*leaves)
    weight = normal(*want.shape, seed=9)
    (want * weight).sum().backward()

    def run(rank: int, group: Any) -> tuple[Tensor, list[Tensor]]:
        cp = tw.ContextParallel(group, num_tokens=layout.num_tokens, layout=layout)
        mine = [layout.shard(x, rank, dim).clone().requires_grad_() for x in tokens]
        mine += [x.clone().requires_grad_() for x in parameters]
        out = on_rank(cp, *mine)
        (out * layout.shard(weight, rank, dim)).sum().backward()
        return out.detach(), [torch.zeros_like(x) if x.grad is None else x.grad for x in mine]

    outs, grads = zip(*tw.loopback(n, run), strict=True)
    assert (layout.unshard(outs, dim) - want).abs().max() < 1e-12
    for number, leaf in enumerate(leaves):
        parts = [mine[number] for mine in grads]
        found = layout.unshard(parts, dim) if number < len(tokens) else sum(parts)
        assert leaf.grad is not None
        scale = max(1.0, float(leaf.grad.abs().max())) if leaf.grad.numel() else 1.0
        assert (found - leaf.grad).abs().max() < 1e-12 * scale


def dense_conv(x: Tensor, weight: Tensor, bias: Tensor | None, split: Split) -> Tensor:
    """x: [tokens, channels]."""
    parts = []
    for start, stop in split.documents:
        padded = F.pad(x[start:stop].T, (weight.shape[1] - 1, 0))[None]
        parts.append(F.conv1d(padded, weight[:, None], bias, groups=len(weight))[0].T)
    return torch.cat(parts)


@pytest.mark.parametrize("seed", range(24))
def test_conv1d(seed: int):
    split, width = drawn(seed), 1 + seed % 5
    cu = split.cu_seqlens
    x, weight, bias = normal(split.layout.num_tokens, 3), normal(3, width), normal(3)
    if seed % 3:
        compare(
            split,
            [x],
            [weight, bias],
            lambda cp, x, w, b: cp.conv1d(x, w, b, activation="silu", cu_seqlens=cu),
            lambda x, w, b: F.silu(dense_conv(x, w, b, split)),
        )
    else:
        batch = torch.stack([x, -2 * x])
        compare(
            split,
            [batch],
            [weight],
            lambda cp, x, w: cp.conv1d(x, w, cu_seqlens=cu),
            lambda x, w: torch.stack([dense_conv(y, w, None, split) for y in x]),
            dim=1,
        )


@pytest.mark.parametrize("seed", range(24))
def test_halo(seed: int):
    """Each piece with its neighbours, summed up again to one row a token."""
    split, (left, right) = drawn(seed), ((2, 0), (0, 3), (3, 1), (0, 0))[seed % 4]
    weights = normal(left + 1 + right, seed=4)

    def windows(rows: Tensor) -> Tensor:
        """[left + n + right, 2] -> [n, 2]"""
        return torch.einsum("ncw,w->nc", rows.unfold(0, len(weights), 1), weights)

    def on_rank(cp: tw.ContextParallel, x: Tensor) -> Tensor:
        found = cp.halo(x, left, right, cu_seqlens=split.cu_seqlens, fill=0.5)
        pieces = cp.pieces(split.cu_seqlens)
        assert [len(rows) for rows in found] == [left + b - a + right for a, b in pieces]
        return torch.cat([x[:0], *map(windows, found)])

    def whole(x: Tensor) -> Tensor:
        padded = (F.pad(x[a:b], (0, 0, left, right), value=0.5) for a, b in split.documents)
        return torch.cat([windows(rows) for rows in padded])

    # A rank without tokens has no pieces; everybody's backward pass goes on without it.
    compare(split, [normal(split.layout.num_tokens, 2)], [], on_rank, whole)


@pytest.mark.parametrize("seed", range(16))
def test_relayout_there_and_back(seed: int):
    split = drawn(seed)
    num_tokens, n = split.layout.num_tokens, split.layout.world_size
    there = (tw.contiguous, tw.zigzag, tw.striped)[seed % 3](num_tokens, n)
    positions = torch.arange(num_tokens, dtype=torch.float64)

    def on_rank(cp: tw.ContextParallel, x: Tensor) -> Tensor:
        moved = cp.relayout(x, there, dim=1)
        assert moved.shape == (2, there.size(cp.rank), 3)
        other = tw.ContextParallel(cp.group, num_tokens=num_tokens, layout=there)
        scaled = moved * there.shard(positions, cp.rank)[:, None]
        return other.relayout(scaled, cp.layout, dim=1)

    x = normal(2, num_tokens, 3)
    compare(split, [x], [], on_rank, lambda x: x * positions[:, None], dim=1)


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("masked", [False, True])
def test_gather(seed: int, masked: bool):
    split = drawn(seed)
    num_tokens = split.layout.num_tokens
    mask = tw.Causal() & tw.Window(3, 0) & tw.Document(split.cu_seqlens)
    every = torch.arange(num_tokens).numpy()
    allowed = torch.from_numpy(mask.dense(every, every) if masked else mask.dense(every, every) < 2)
    mixing = normal(num_tokens, num_tokens, seed=5) * allowed

    def on_rank(cp: tw.ContextParallel, x: Tensor) -> Tensor:
        whole = cp.gather(x, mask=mask if masked else None)
        assert not masked or not whole[~cp.shard(allowed, 0).any(0)].any()
        return cp.shard(mixing, 0) @ whole

    compare(split, [normal(num_tokens, 3)], [], on_rank, lambda x: mixing @ x)


STAGED = {
    4: tw.hierarchical(tw.all_gather(2), tw.all_gather(2)),
    6: tw.hierarchical(tw.all_gather(3), tw.all_gather(2)),
    8: tw.hierarchical(tw.all_gather(2), tw.hierarchical(tw.all_gather(2), tw.all_gather(2))),
}


@pytest.mark.parametrize("seed", range(12))
def test_gather_in_the_stages_of_a_plan(seed: int):
    """Values and gradients are those of all rows; bytes are the stages', once to each node."""
    draw = Random(seed)
    n, num_tokens = (4, 6, 8)[seed % 3], draw.choice((1, 13, 40))
    plan, order = STAGED[n], draw.sample(range(num_tokens), num_tokens)
    edges = [0, *sorted(draw.randrange(num_tokens + 1) for _ in range(n - 1)), num_tokens]
    layout = tw.Layout.from_positions([order[a:b] for a, b in pairwise(edges)])
    seen = tw.Causal() & tw.Window(5, 0) if seed % 2 else tw.Full()
    mask = seen if seed % 2 else None
    every = torch.arange(num_tokens).numpy()
    allowed = seen.dense(every, every)
    mixing = normal(num_tokens, num_tokens, seed=5) * torch.from_numpy(allowed)
    stages = gather_stages(plan, layout, mask)
    volume = [stage.moves.volume(3 * 8) for stage in stages]

    def on_rank(cp: tw.ContextParallel, x: Tensor) -> Tensor:
        staged = tw.ContextParallel(cp.group, num_tokens=num_tokens, layout=layout, strategy=plan)
        before = cp.group.bytes_sent
        whole = staged.gather(x, mask=mask)
        rank = cp.rank
        assert cp.group.bytes_sent - before == sum(forward[rank] for forward, _ in volume)
        seen_here = cp.shard(torch.from_numpy(allowed), 0).any(0)
        assert mask is None or not whole[~seen_here].any()
        return cp.shard(mixing, 0) @ whole

    split = Split(layout, (0, num_tokens))
    compare(split, [normal(num_tokens, 3)], [], on_rank, lambda x: mixing @ x)


def test_a_gather_by_nodes_of_documents_that_stay_on_theirs():
    """No row goes to another node, so that stage is left out, and nothing of it is passed on."""
    layout, mask = tw.contiguous(8, 4), tw.Causal() & tw.Document([0, 4, 8])
    plan, x = STAGED[4], normal(8, 3)
    (stage,) = gather_stages(plan, layout, mask)
    assert sum(len(rows) for sent in stage.sent for rows in sent.values()) == 4

    def on_rank(rank: int, group: Any) -> Tensor:
        cp = tw.ContextParallel(group, num_tokens=8, layout=layout, strategy=plan)
        return cp.gather(cp.shard(x, 0), mask=mask)

    for rank, rows in enumerate(tw.loopback(4, on_rank)):
        seen = slice(4 * (rank // 2), 2 * rank + 2)
        want = torch.zeros(8, 3, dtype=torch.float64)
        want[seen] = x[seen]
        assert torch.equal(rows, want)


def test_a_gather_by_nodes_without_a_message_is_compared():
    """One token, which no other rank sees: not one stage is left."""

    def on_rank(rank: int, group: Any) -> str:
        layout = tw.contiguous(1, 4)
        cp = tw.ContextParallel(group, num_tokens=1, layout=layout, strategy=STAGED[4])
        rows = normal(1 - bool(rank), 2)
        with pytest.raises(ValueError) as raised:
            cp.gather(rows.float() if rank == 3 else rows, mask=tw.Causal())
        return str(raised.value)

    (message,) = set(tw.loopback(4, on_rank))
    assert "ranks disagree on dtype: rank 0 has float64, rank 3 has float32" in message


def test_a_gather_by_nodes_sends_a_row_once_to_each_node():
    n, layout = 8, tw.zigzag(64, 8)
    node = lambda rank: rank // 4  # noqa: E731

    def crossing(moves: list[RowMoves]) -> int:
        return sum(
            sent.num_rows
            for one in moves
            for rank in range(n)
            for sent in one.of_rank(rank).sends
            if node(sent.peer) != node(rank)
        )

    plan = tw.hierarchical(tw.all_gather(2), tw.all_gather(4))
    assert gathers_in_stages(plan)
    assert crossing([stage.moves for stage in gather_stages(plan, layout, None)]) == 64
    assert crossing([moves_of_verbs.gather_moves(layout, None)]) == 4 * 64
    for other in (tw.all_gather(8), tw.ring(8), tw.double_ring(2, 4), tw.ulysses(8)):
        assert not gathers_in_stages(other)


def test_a_gather_by_nodes_along_another_dimension_on_one_rank_is_refused():
    def on_rank(rank: int, group: Any) -> str:
        cp = tw.ContextParallel(group, num_tokens=8, layout=tw.contiguous(8, 4), strategy=STAGED[4])
        with pytest.raises(ValueError) as raised:
            cp.gather(normal(2, 2), int(rank == 1))
        return str(raised.value)

    (message,) = set(tw.loopback(4, on_rank))
    assert "ranks disagree on dim of tokens: rank 0 has 0, rank 1 has 1" in message


@pytest.mark.parametrize("seed", range(24))
def test_roll(seed: int):
    split, shifts, wrap = drawn(seed), (-1, 2, -3, 50)[seed % 4], bool(seed % 3)
    options = {"cu_seqlens": split.cu_seqlens, "wrap": wrap, "fill": 7.0}

    def whole(x: Tensor) -> Tensor:
        parts = []
        for start, stop in split.documents:
            rolled = x[start:stop].roll(shifts, 0)
            if not wrap:
                at = torch.arange(stop - start) - shifts
                inside = (at >= 0) & (at < stop - start)
                rolled = torch.where(inside[:, None], rolled, 7.0)
            parts.append(rolled)
        return torch.cat(parts)

    x = normal(split.layout.num_tokens, 2)
    compare(split, [x], [], lambda cp, x: cp.roll(x, shifts, 0, **options), whole)


KINDS = ("number", "row", "all", "matrix", "batch", "states of a number")


def recurrence(a: Tensor, u: Tensor, split: Split, kind: str) -> Tensor:
    """The state after each token: S <- a[t] * S + u[t], token by token."""
    states = []
    for start, stop in split.documents:
        state = torch.zeros_like(u[0])
        for t in range(start, stop):
            if kind == "matrix":
                state = a[t] @ state + u[t]
            else:
                state = a[t].reshape((*a[t].shape, *[1] * (u.ndim - a.ndim))) * state + u[t]
            states.append(state)
    return torch.stack(states)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(12))
def test_scan(seed: int, kind: str):
    """A recurrence token by token: each piece starts from the state that scan gives."""
    split = drawn(seed)
    num_tokens = split.layout.num_tokens
    shapes = {
        "number": ((2, 1, 1), (2, 3, 4)),
        "row": ((2, 3), (2, 3, 4)),
        "all": ((2, 3, 4), (2, 3, 4)),
        "matrix": ((2, 3, 3), (2, 3, 4)),
        "batch": ((5, 1), (5, 4)),
        "states of a number": ((), ()),
    }[kind]
    a, u = (normal(num_tokens, *shape, seed=s) / 2 for s, shape in enumerate(shapes))

    def on_rank(cp: tw.ContextParallel, a: Tensor, u: Tensor) -> Tensor:
        pieces = cp.pieces(split.cu_seqlens)
        decays, updates, begin = [], [], 0
        for start, stop in pieces:
            rows = slice(begin, begin + stop - start)
            begin += stop - start
            decay = a[rows][0]
            for x in a[rows][1:]:
                decay = x @ decay if kind == "matrix" else x * decay
            decays.append(decay)
            alone = Split(tw.contiguous(stop - start, 1), (0, stop - start))
            updates.append(recurrence(a[rows], u[rows], alone, kind)[-1])
        decay = torch.stack(decays) if decays else a.sum(0, keepdim=True)[:0]
        update = torch.stack(updates) if updates else u.sum(0, keepdim=True)[:0]
        options: dict[str, Any] = {"cu_seqlens": split.cu_seqlens, "matrix": kind == "matrix"}
        if kind == "batch":  # pieces second
            before = cp.scan(decay.movedim(0, 1), update.movedim(0, 1), dim=1, **options)
            before = before.movedim(1, 0)
        else:
            before = cp.scan(decay, update, dim=0, **options)
        states, begin = [u[:0]], 0
        for state, (start, stop) in zip(before, pieces, strict=True):
            rows = slice(begin, begin + stop - start)
            begin += stop - start
            first = u[rows][:1]
            if kind == "matrix":
                first = first + (a[rows][0] @ state)[None]
            else:
                one = a[rows][0]
                first = first + (one.reshape((*one.shape, *[1] * (u.ndim - a.ndim))) * state)[None]
            alone = Split(tw.contiguous(stop - start, 1), (0, stop - start))
            states.append(recurrence(a[rows], torch.cat([first, u[rows][1:]]), alone, kind))
        return torch.cat(states)

    compare(split, [a, u], [], on_rank, lambda a, u: recurrence(a, u, split, kind))


@pytest.mark.parametrize("seed", range(30))
def test_bytes_are_the_volumes_and_codes_are_right(seed: int):
    split = drawn(seed)
    layout, cu = split.layout, split.cu_seqlens
    n, num_tokens = layout.world_size, layout.num_tokens
    verbs: dict[str, tuple[RowMoves, Callable[[tw.ContextParallel, Tensor], Any]]] = {
        "halo": (
            moves_of_verbs.halo_moves(layout, 3, 1, cu),
            lambda cp, x: torch.cat([x[:0], *cp.halo(x, 3, 1, cu_seqlens=cu)]),
        ),
        "relayout": (
            moves_of_verbs.relayout_moves(layout, tw.zigzag(num_tokens, n)),
            lambda cp, x: cp.relayout(x, tw.zigzag(num_tokens, n)),
        ),
        "gather": (
            moves_of_verbs.gather_moves(layout, tw.Causal()),
            lambda cp, x: cp.gather(x, mask=tw.Causal()),
        ),
        "roll": (
            moves_of_verbs.roll_moves(layout, -1, cu, wrap=False),
            lambda cp, x: cp.roll(x, -1, 0, cu),
        ),
    }
    for moves, verb in verbs.values():
        moves.check()
        volume = moves.volume(5 * 8)
        for rank in range(n):
            for backward in (False, True):
                code = row_code(moves, rank, (5,), "float64", backward=backward)
                check_code(code)
                assert code.bytes_sent == volume[backward][rank]
                assert str(code).splitlines() == [op.label for op in code.ops]

        def on_rank(rank: int, group: Any, verb=verb) -> tuple[int, int]:
            cp = tw.ContextParallel(group, num_tokens=num_tokens, layout=layout)
            x = layout.shard(normal(num_tokens, 5), rank).requires_grad_()
            result = verb(cp, x)
            forward = group.bytes_sent
            result.sum().backward()
            return forward, group.bytes_sent - forward

        sent = tw.loopback(n, on_rank)
        assert tuple(zip(*sent, strict=True)) == volume


@pytest.mark.parametrize("seed", range(12))
def test_bytes_of_a_scan_are_those_of_its_rounds(seed: int):
    layout, cu = drawn(seed)
    rounds = [one.volume((1 + 6) * 8) for one in moves_of_verbs.scan_moves(layout, cu)]
    n = layout.world_size
    wanted = [tuple(sum(one[i][rank] for one in rounds) for i in range(2)) for rank in range(n)]

    def on_rank(rank: int, group: Any) -> tuple[int, int]:
        cp = tw.ContextParallel(group, num_tokens=layout.num_tokens, layout=layout)
        decay, update = (normal(len(cp.pieces(cu)), x).requires_grad_() for x in (1, 6))
        before = cp.scan(decay, update, cu_seqlens=cu, dim=0)
        forward = group.bytes_sent
        before.square().sum().backward()
        return forward, group.bytes_sent - forward

    assert tw.loopback(n, on_rank) == wanted


def test_bytes_of_a_scan_do_not_grow_with_the_length():
    def bytes_at(num_tokens: int, n: int) -> int:
        def on_rank(rank: int, group: Any) -> int:
            cp = tw.ContextParallel(group, num_tokens=num_tokens, layout=tw.zigzag(num_tokens, n))
            pieces = len(cp.pieces())
            cp.scan(normal(pieces, 1), normal(pieces, 16))
            return group.bytes_sent

        return max(tw.loopback(n, on_rank))

    assert bytes_at(64, 8) == bytes_at(4096, 8)
    assert bytes_at(4096, 16) < 2 * bytes_at(4096, 8)


def test_gradcheck_of_each_verb():
    """Also of second derivatives: the verbs are linear."""
    layout, cu = tw.zigzag(7, 1), (0, 3, 7)
    cp = tw.ContextParallel(num_tokens=7, layout=layout)
    x, w, b = (y.requires_grad_() for y in (normal(7, 2), normal(2, 3), normal(2)))
    a, u = (y.requires_grad_() for y in (normal(2, 1), normal(2, 3)))
    m, s = (y.requires_grad_() for y in (normal(2, 2, 2), normal(2, 2, 3)))
    checks: list[tuple[Any, tuple[Tensor, ...]]] = [
        (lambda x: torch.cat(cp.halo(x, 2, 1, cu_seqlens=cu)), (x,)),
        (lambda x: cp.relayout(x, tw.striped(7, 1)), (x,)),
        (lambda x: cp.gather(x), (x,)),
        (lambda x: cp.roll(x, -1, 0, cu), (x,)),
        (lambda x, w, b: cp.conv1d(x, w, b, "silu", cu), (x, w, b)),
        (lambda a, u: cp.scan(a, u, cu_seqlens=cu), (a, u)),
        (lambda m, s: cp.scan(m, s, matrix=True, cu_seqlens=cu), (m, s)),
    ]
    for function, inputs in checks:
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_other_dtypes_travel_as_they_are(dtype: torch.dtype):
    layout = tw.striped(12, 3)
    whole = (10 * normal(12, 2)).to(dtype)

    def on_rank(rank: int, group: Any) -> None:
        cp = tw.ContextParallel(group, num_tokens=12, layout=layout)
        mine = cp.shard(whole, 0)
        assert torch.equal(cp.gather(mine), whole)
        want = cp.shard(torch.cat([whole[1:], torch.zeros_like(whole[:1])]), 0)
        assert torch.equal(cp.roll(mine, -1, 0, fill=0), want)

    tw.loopback(3, on_rank)


def test_codes_of_verbs_go_with_their_group():
    """Moves are kept for other groups; codes have the memory of one."""

    def on_rank(rank: int, group: Any) -> None:
        cp = tw.ContextParallel(group, num_tokens=12, layout=tw.zigzag(12, 2))
        cp.gather(normal(6, 2).requires_grad_()).sum().backward()

    def num_codes() -> int:
        gc.collect()
        return sum(isinstance(x, BoundCode) for x in gc.get_objects())

    before = num_codes()
    for _ in range(3):
        tw.loopback(2, on_rank)
        assert num_codes() == before


def test_half_precision_gradients_are_summed_in_fp32():
    """64 ranks give 1 + 2^-7 each, which bf16 would round at every addition."""
    layout, n = tw.contiguous(64, 64), 64

    def on_rank(rank: int, group: Any) -> Tensor:
        cp = tw.ContextParallel(group, num_tokens=n, layout=layout)
        x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
        (cp.gather(x) * (1 + 2**-7)).sum().backward()
        assert x.grad is not None
        return x.grad

    assert {float(grad) for grad in tw.loopback(n, on_rank)} == {64.5}


def refusals(call: Callable[[tw.ContextParallel], Any], layout: tw.Layout) -> str:
    def on_rank(rank: int, group: Any) -> str:
        cp = tw.ContextParallel(group, num_tokens=layout.num_tokens, layout=layout)
        with pytest.raises(ValueError) as raised:
            call(cp)
        assert group.bytes_sent == 0
        return str(raised.value)

    (message,) = set(tw.loopback(layout.world_size, on_rank))
    return message


ZIGZAG, STRIPED = tw.zigzag(12, 2), tw.striped(400, 2)
ROWS = torch.zeros(6, 3)
WRONG: dict[str, tuple[Callable[[tw.ContextParallel], Any], str]] = {
    "rows": (lambda cp: cp.halo(ROWS[1:], 1), "x has 5 tokens along dim 0, but .* this rank 6"),
    "dim": (lambda cp: cp.gather(ROWS, 4), r"dim \(4\) must be in -2..1"),
    "no tensor": (lambda cp: cp.gather([1.0]), r"x \(list\) must be a Tensor"),
    "left": (lambda cp: cp.halo(ROWS, -1), r"left \(-1\) must be at least 0"),
    "right": (lambda cp: cp.halo(ROWS, 1, 0.5), r"right \(0.5\) must be a whole number"),
    "documents": (lambda cp: cp.halo(ROWS, 1, cu_seqlens=[0, 5]), "ends at 5, .* 12 tokens"),
    "to": (lambda cp: cp.relayout(ROWS, tw.zigzag(12, 3)), r"to is zigzag\(12, 3\), but must"),
    "no layout": (lambda cp: cp.relayout(ROWS, "zigzag"), r"to \('zigzag'\) must be a Layout"),
    "mask": (lambda cp: cp.gather(ROWS, mask="causal"), r"mask \('causal'\) must be a Mask"),
    "weight": (
        lambda cp: cp.conv1d(ROWS, torch.zeros(4, 2)),
        r"weight \(4, 2\) must be \[channels, width\] for x \(6, 3\)",
    ),
    "conv1d's weight": (lambda cp: cp.conv1d(ROWS, torch.zeros(3, 1, 2)), r"weight.squeeze\(1\)"),
    "bias": (lambda cp: cp.conv1d(ROWS, torch.zeros(3, 2), torch.zeros(2)), r"bias \(2,\) must be"),
    "activation": (lambda cp: cp.conv1d(ROWS, torch.zeros(3, 2), None, "gelu"), "'gelu'"),
    "pieces": (
        lambda cp: cp.scan(torch.zeros(3, 1), torch.zeros(3, 4)),
        r"decay \(3, 1\) and update \(3, 4\) must be \[\(batch,\) pieces, ...\] of .* 2 pieces",
    ),
    "sizes": (
        lambda cp: cp.scan(torch.zeros(2, 3), torch.zeros(2, 4)),
        r"decay \(2, 3\) and update \(2, 4\): each size of decay must be 1 or that of update",
    ),
    "matrix": (
        lambda cp: cp.scan(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), matrix=True),
        r"decay \(2, 3, 4\) and update \(2, 3, 4\) must be \[..., d, d\] and \[..., d, e\]",
    ),
    "whole numbers": (
        lambda cp: cp.scan(torch.zeros(2, 1).long(), torch.zeros(2, 4)),
        r"decay \(torch.int64\) must be a Tensor of floating-point numbers",
    ),
    "one rank": (
        lambda cp: cp.halo(ROWS, 1 + cp.rank),
        "ranks disagree on left: rank 0 has 1, rank 1 has 2",
    ),
    "dim of a scan": (
        lambda cp: cp.scan(*[torch.zeros(2 - cp.rank, 1, 1)] * 2),
        "have 1 entries in dimensions 0 and 1 on rank 1, .* pass dim=0 or dim=1",
    ),
    "dim of a scan on one rank": (
        lambda cp: cp.scan(*[torch.zeros(2 - cp.rank, 2, 3)] * 2, dim=1 - cp.rank),
        "ranks disagree on dim of pieces: rank 0 has 1, rank 1 has 0",
    ),
    "a dim that is no number": (
        lambda cp: cp.scan(torch.zeros(2, 2), torch.zeros(2, 2, 3), dim=False),
        r"dim \(False\) must be a whole number",
    ),
    "matrix on one rank": (
        lambda cp: cp.scan(*[torch.ones(2 - cp.rank, 3, 3)] * 2, matrix=cp.rank == 1),
        "ranks disagree on matrix: rank 0 has False, rank 1 has True",
    ),
    "decay of a scan on one rank": (
        lambda cp: cp.scan(
            torch.ones(2 - cp.rank, 3, 1 + 3 * cp.rank), torch.ones(2 - cp.rank, 3, 4)
        ),
        r"ranks disagree on shape of decay: rank 0 has \[-1, 3, 1\], rank 1 has \[-1, 3, 4\]",
    ),
    "activation on one rank": (
        lambda cp: cp.conv1d(ROWS, torch.zeros(3, 2), activation="silu" if cp.rank else None),
        "ranks disagree on activation: rank 0 has None, rank 1 has silu",
    ),
    "bias on one rank": (
        lambda cp: cp.conv1d(ROWS, torch.zeros(3, 2), torch.zeros(3) if cp.rank else None),
        "ranks disagree on bias: rank 0 has None, rank 1 has float32",
    ),
    "verb on one rank": (
        lambda cp: cp.halo(ROWS, 1) if cp.rank else cp.conv1d(ROWS, torch.zeros(3, 2)),
        "ranks disagree on call: rank 0 has conv1d, rank 1 has halo",
    ),
    "complex numbers on one rank": (
        lambda cp: cp.gather(ROWS.to(torch.complex64 if cp.rank else torch.float32)),
        r"rank 1: x is torch.complex64, .*; pass torch.view_as_real\(x\)",
    ),
    "sparse rows on one rank": (
        lambda cp: cp.halo(ROWS.to_sparse() if cp.rank else ROWS, 1),
        r"rank 1: x is torch.sparse_coo, but must be dense; pass x.to_dense\(\)",
    ),
    "nested losses": (
        lambda cp: cp.mean(torch.nested.nested_tensor([ROWS], layout=torch.jagged), 1),
        r"losses is nested; pass all its rows as one tensor",
    ),
    "device of a weight": (
        lambda cp: cp.conv1d(ROWS, torch.zeros(3, 2, device="meta")),
        "weight is on meta, x on cpu; move it there",
    ),
    "gradients on one rank": (
        lambda cp: cp.gather(ROWS.clone().requires_grad_(cp.rank == 1)),
        "ranks disagree on requires_grad",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_refused_on_every_rank(what: str):
    call, message = WRONG[what]
    with pytest.raises(ValueError, match=message):
        raise ValueError(refusals(call, ZIGZAG))


def test_a_scan_asks_for_dim_where_a_batch_is_as_long_as_the_pieces_of_another_rank():
    """Pieces 2 and 1: on the second rank alone it is plain which dimension they are."""
    layout = tw.Layout.from_positions([[0, 1, 4, 5], [2, 3]])

    def before(cp: tw.ContextParallel, dim: int | None) -> Tensor:
        pieces = len(cp.pieces())
        return cp.scan(normal(2, pieces, 1), normal(2, pieces, 3), dim=dim)

    assert "pass dim=0 or dim=1" in refusals(lambda cp: before(cp, None), layout)
    cps = lambda group: tw.ContextParallel(group, num_tokens=6, layout=layout)  # noqa: E731
    assert [len(x[0]) for x in tw.loopback(2, lambda r, g: before(cps(g), 1))] == [2, 1]
    one = tw.loopback(2, lambda r, g: cps(g).scan(normal(3, 2 - r), normal(3, 2 - r, 3)))
    assert [x.shape for x in one] == [(3, 2, 3), (3, 1, 3)]


@pytest.mark.parametrize("verb", ["halo", "conv1d", "scan"])
def test_too_many_pieces_name_relayout(verb: str):
    calls = {
        "halo": lambda cp: cp.halo(torch.zeros(200, 1), 1),
        "conv1d": lambda cp: cp.conv1d(torch.zeros(200, 1), torch.zeros(1, 2)),
        "scan": lambda cp: cp.scan(torch.zeros(200, 1), torch.zeros(200, 1)),
    }
    message = refusals(calls[verb], STRIPED)
    assert "has 200 pieces of neighbouring tokens, more than 64" in message
    assert "cp.relayout(x, tw.contiguous(400, 2))" in message


def test_moves_are_drawn_as_a_table():
    text = str(moves_of_verbs.halo_moves(tw.contiguous(12, 3), 2, 0, (0, 12)))
    assert text.splitlines() == [
        "halo over contiguous(12, 3): rows to rank",
        "from     0    1    2",
        "   0     .    2    .",
        "   1     .    .    2",
        "   2     .    .    .",
    ]

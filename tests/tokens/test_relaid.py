"""Attention on a layout of its own: exact on any two layouts, at the bytes that are counted."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from conformance.oracle import dense, draw, error
from support.latents import Layer, Sizes
from torch import Tensor

import tilewise as tw
from tilewise.tokens.moves import relayout_moves
from tilewise.workload import Volume


def some_layout(draw: Random, num_tokens: int, n: int) -> tw.Layout:
    """Any kind of layout, some with ranks without tokens."""
    kind = draw.choice(("contiguous", "zigzag", "striped", "uneven", "any"))
    if kind in ("contiguous", "zigzag", "striped"):
        return getattr(tw, kind)(num_tokens, n)
    order = list(range(num_tokens))
    if kind == "any":
        draw.shuffle(order)
    edges = [0, *sorted(draw.randrange(num_tokens + 1) for _ in range(n - 1)), num_tokens]
    return tw.Layout.from_positions([order[a:b] for a, b in pairwise(edges)])


def bytes_of(layout: tw.Layout, to: tw.Layout, there: int, back: int) -> Volume:
    """Bytes by rank of rows that move there and back.

    Args:
        there, back: of a token's q, k and v, and of its results.
    """
    both = (
        relayout_moves(layout, to).volume(there),
        relayout_moves(to, layout).volume(back),
    )
    return Volume(*(tuple(map(sum, zip(*x, strict=True))) for x in zip(*both, strict=True)))


@pytest.mark.parametrize("seed", range(24))
def test_attention_on_a_layout_of_its_own_is_dense_attention_at_the_bytes_of_volume(seed: int):
    """Values and each gradient in fp64, documents whose borders lie inside shards."""
    chance = Random(seed)
    n, num_tokens = 1 + seed % 8, chance.choice((1, 7, 16, 29))
    tokens, within = (some_layout(chance, num_tokens, n) for _ in range(2))
    inside = {chance.randrange(num_tokens + 1) for _ in range(2)}
    mask = tw.Causal() & tw.Document([*sorted({0, *inside, num_tokens})])
    plan = chance.choice((tw.ring(n), tw.all_gather(n), tw.mesh(n, q_tile=1)))
    heads, kv_heads, batch = 4, 2, (2,) if seed % 2 else ()
    x = draw((*batch, num_tokens, heads, 3), (*batch, num_tokens, kv_heads, 3), seed, 5)
    want = dense(x, mask)
    with_lse = seed % 3 > 0

    def on_rank(rank: int, group: Any) -> tuple[list[Tensor], tuple[int, int]]:
        cp = tw.ContextParallel(
            group,
            num_tokens=num_tokens,
            mask=mask,
            layout=tokens,
            attention_layout=within,
            strategy=plan,
        )
        q, k, v = (cp.shard(y).clone().requires_grad_() for y in x[:3])
        out, lse = cp.attention(q, k, v, return_lse=True, save="replay")
        forward = group.bytes_sent
        total = (out * cp.shard(x.dout)).sum()
        if with_lse:
            total = total + (lse * cp.shard(x.dlse, -2)).sum()
        total.backward()
        gradients = [y.grad for y in (q, k, v)]
        assert all(y is not None for y in gradients)
        found = [out.detach(), lse.detach(), *gradients]
        return found, (forward, group.bytes_sent - forward)  # type: ignore[return-value]

    ranks, sent = zip(*tw.loopback(n, on_rank), strict=True)
    parts = list(zip(*ranks, strict=True))
    if not with_lse:
        want = dense(x._replace(dlse=0 * x.dlse), mask)
    for number, wanted in enumerate(want):
        found = tokens.unshard(parts[number], -2 if number == 1 else -3)
        assert error(found, wanted) <= 1e-12, want._fields[number]

    sizes: dict[str, Any] = {"head_dim": 3, "v_head_dim": 5, "dtype": "float64", "save": "replay"}
    work = tw.Workload(num_tokens, heads, kv_heads, mask=mask, layout=within, **sizes)
    counted, row = tw.volume(plan, work), 8 * (batch or (1,))[0]
    moved = bytes_of(tokens, within, row * (4 * 3 + 2 * (3 + 5)), row * 4 * 5)
    lse = relayout_moves(within, tokens).volume(row * 4)
    for number in range(2):  # forward, backward
        back = lse[number] if number == 0 or with_lse else [0] * n
        own = [(batch or (1,))[0] * y for y in counted[number]]
        moves = (
            [0] * n
            if tokens == within
            else [a + b for a, b in zip(moved[number], back, strict=True)]
        )
        assert [one[number] for one in sent] == [a + b for a, b in zip(own, moves, strict=True)]


def test_latents_move_as_they_are():
    make = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float64)

    sizes, n, num_tokens = Sizes(), 3, 17
    layer = Layer(
        sizes,
        normal(num_tokens, 8, 5),
        normal(num_tokens, 7),
        normal(5, 4 * 3),
        normal(5, 4 * 6),
        normal(num_tokens, 8, 6),
        normal(num_tokens, 8),
    )
    want = layer.dense(tw.Causal())

    def on_rank(rank: int, group: Any) -> tuple[Tensor, ...]:
        cp = tw.ContextParallel(
            group,
            num_tokens=num_tokens,
            mask=tw.Causal(),
            strategy=tw.ring(n),
            layout=tw.contiguous(num_tokens, n),
            attention_layout=tw.zigzag(num_tokens, n),
        )
        rows = [cp.shard(x, 0).clone() for x in (layer.q, layer.latent)]
        given = [x.clone().requires_grad_() for x in (*rows, layer.w_k, layer.w_v)]
        wire = layer.wire(given[2:])
        out, lse = cp.attention(given[0], given[1], None, wire=wire, return_lse=True)
        dout, dlse = cp.shard(layer.dout, 0), cp.shard(layer.dlse, 0)
        ((out * dout).sum() + (lse * dlse).sum()).backward()
        return out.detach(), lse.detach(), *(x.grad for x in given)  # type: ignore[misc]

    parts = list(zip(*tw.loopback(n, on_rank), strict=True))
    layout = tw.contiguous(num_tokens, n)
    for number, (name, wanted) in enumerate(zip(want._fields, want, strict=True)):
        whole = layout.unshard(parts[number], 0) if number < 4 else sum(parts[number])
        assert error(torch.as_tensor(whole), wanted) <= 1e-12, name


def messages(call: Any, num_tokens: int = 12, **options: Any) -> str:
    """What every rank raises, before anything is sent."""

    def on_rank(rank: int, group: Any) -> str:
        given = {"layout": tw.contiguous(num_tokens, 2), "attention_layout": tw.zigzag(12, 2)}
        with pytest.raises(ValueError) as raised:
            cp = tw.ContextParallel(
                group, num_tokens=num_tokens, mask=tw.Causal(), **{**given, **options}
            )
            call(cp)
        assert group.bytes_sent == 0
        return str(raised.value)

    (message,) = set(tw.loopback(2, on_rank))
    return message


def rows(cp: tw.ContextParallel, num_rows: int = 6) -> list[Tensor]:
    return [torch.zeros(num_rows, 2, 4) for _ in range(3)]


def test_what_cannot_move_is_refused_on_every_rank():
    short = lambda cp: cp.attention(*rows(cp, 6 - cp.rank))  # noqa: E731
    assert "q has 5 tokens on rank 1, but the layout gives it 6 of 12" in messages(short)
    mixed = lambda cp: cp.attention(rows(cp)[0], *(x.double() for x in rows(cp)[1:]))  # noqa: E731
    assert "q, k, v have dtype torch.float32, torch.float64" in messages(mixed)
    keys = lambda cp: cp.attention(*rows(cp), kv_layout=tw.striped(12, 2))  # noqa: E731
    assert "kv_layout is given, but cp moves q, k and v to zigzag(12, 2)" in messages(keys)
    tree = lambda cp: cp.attention(*rows(cp), plan=tw.tree(2))  # noqa: E731
    assert "tree(2) keeps all queries on every rank, but cp moves" in messages(tree)
    assert "attention_layout is for 12 tokens on 2 ranks, not for 14 on 2" in messages(
        short, num_tokens=14
    )
    joint = tw.joint(tw.contiguous(10, 2), [10, 11])
    assert "attention_layout is joint" in messages(short, attention_layout=joint)


def test_ranks_with_different_layouts_of_attention_raise_the_same_error():
    def on_rank(rank: int, group: Any, layouts: list[tw.Layout | None]) -> str:
        cp = tw.ContextParallel(
            group,
            num_tokens=12,
            mask=tw.Causal(),
            layout=tw.contiguous(12, 2),
            attention_layout=layouts[rank],
        )
        with pytest.raises(ValueError) as raised:
            cp.attention(*rows(cp))
        assert group.bytes_sent == 0
        return str(raised.value)

    for other in (tw.striped(12, 2), None):
        (message,) = set(tw.loopback(2, partial(on_rank, layouts=[tw.zigzag(12, 2), other])))
        assert "disagree" in message, message


def test_a_layout_that_was_read_is_chosen_no_more():
    cp = tw.ContextParallel(num_tokens=8, mask=tw.Causal())
    assert cp.layouts_are_open and cp.num_tokens == 8
    assert "zigzag(8, 1)" in repr(cp) and cp.layouts_are_open
    cp.choose_layouts(tw.contiguous(8, 1), tw.striped(8, 1))
    assert (cp.layout, cp.attention_layout) == (tw.contiguous(8, 1), tw.striped(8, 1))
    for used in (
        cp,
        tw.ContextParallel(num_tokens=8, layout=tw.contiguous(8, 1)),
        tw.ContextParallel(num_tokens=8, attention_layout=tw.striped(8, 1)),
    ):
        assert not used.layouts_are_open
        with pytest.raises(ValueError, match="has its layout already"):
            used.choose_layouts(tw.contiguous(8, 1))
    read = tw.ContextParallel(num_tokens=8)
    read.shard(torch.zeros(8), 0)
    assert not read.layouts_are_open


def test_a_canonical_reduction_keeps_its_bits_through_a_relayout():
    num_tokens = 256
    x = [y.float() for y in draw((num_tokens, 2, 8), (num_tokens, 1, 8), 3)]

    def run(rank: int, group: Any, layout: tw.Layout, within: tw.Layout | None) -> list[Tensor]:
        cp = tw.ContextParallel(
            group,
            num_tokens=num_tokens,
            mask=tw.Causal(),
            layout=layout,
            attention_layout=within,
            strategy=tw.all_gather(layout.world_size),
            reduction="canonical",
        )
        q, k, v = (cp.shard(y).clone().requires_grad_() for y in x[:3])
        out = cp.attention(q, k, v)
        (out * cp.shard(x[3])).sum().backward()
        return [out.detach(), *(y.grad for y in (q, k, v))]  # type: ignore[list-item]

    (want,) = tw.loopback(1, partial(run, layout=tw.contiguous(num_tokens, 1), within=None))
    layout, within = tw.striped(num_tokens, 2), tw.contiguous(num_tokens, 2)
    parts = zip(*tw.loopback(2, partial(run, layout=layout, within=within)), strict=True)
    for found, right in zip(parts, want, strict=True):
        assert torch.equal(layout.unshard(list(found), 0), right)

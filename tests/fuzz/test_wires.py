"""Wires that round: within their bounds, with the bytes that are counted; latents are exact."""

from __future__ import annotations

from typing import Any

import torch
from conformance.oracle import assert_close
from hypothesis import given
from hypothesis import strategies as st
from support.drawn_calls import DrawnCall, calls
from support.fuzzing import examples
from support.latents import Sizes, draw_layer
from torch import Tensor

import tilewise as tw
from tilewise.kernels.float8 import decode, encode
from tilewise_verify import error_bound

WIDE, NARROW = ("float64", "float32"), ("bfloat16", "float16")
SEEDS = st.integers(0, 2**32)


def float8s() -> st.SearchStrategy[tw.wire.Float8]:
    return st.builds(tw.wire.Float8, st.integers(1, 40), st.booleans(), st.integers(0, 2**63 - 1))


@st.composite
def wires(draw: st.DrawFn) -> tw.wire.Wires:
    """Operands in any wire; partials plain, and not in float16: bounds of others are not proven."""
    operand = float8s() | st.builds(tw.wire.Plain, st.sampled_from((None, *WIDE, *NARROW)))
    partial = st.builds(tw.wire.Plain, st.sampled_from((None, *WIDE, "bfloat16")))
    return tw.wire.Wires(draw(operand), draw(operand), draw(partial))


@st.composite
def numbers(draw: st.DrawFn, *shape: int) -> Tensor:
    """Of very different size by row, column or one alone; zeros and equal ones among them."""
    generator = torch.Generator().manual_seed(draw(SEEDS))
    x = torch.randn(*shape, dtype=torch.float64, generator=generator)
    match draw(st.sampled_from(("plain", "rows", "columns", "outlier", "zeros", "tiny"))):
        case "rows":
            scale = torch.logspace(-4, 1, shape[0], dtype=torch.float64)
            scale = scale[torch.randperm(shape[0], generator=generator)]
            x = x * scale.view(-1, *[1] * (x.ndim - 1))
        case "columns":
            x = x * torch.logspace(-4, 1, shape[-1], dtype=torch.float64)
        case "outlier":
            x.view(-1)[draw(st.integers(0, x.numel() - 1))] = 500.0
        case "zeros":
            x = x * (torch.rand(x.shape, generator=generator) < 0.3)
        case "tiny":
            x = x * 1e-30
    return x


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@examples(3)
@given(
    x=st.tuples(*(st.integers(1, most) for most in (30, 2, 3, 9))).flatmap(lambda x: numbers(*x)),
    wire=float8s(),
    dtype=st.sampled_from(DTYPES),
    cut=st.tuples(st.integers(0, 29), st.integers(0, 29)),
)
def test_a_number_arrives_within_its_bound(
    x: Tensor, wire: tw.wire.Float8, dtype: torch.dtype, cut: tuple[int, int]
):
    x = x.to(dtype)
    packed = encode(wire, x, (3, 1))
    assert packed.shape[-1] == x.shape[2] * wire.row_bytes(x.shape[3], "float32")
    arrived = decode(packed, torch.empty_like(x))
    exact, error = x.double().abs(), (x.double() - arrived.double()).abs()
    rows = exact.amax(-1, keepdim=True)
    blocks = torch.cat([y.amax(0, keepdim=True).expand_as(y) for y in rows.split(wire.block)])
    least = max(2.0**-136, torch.finfo(dtype).tiny * torch.finfo(dtype).eps)
    bound = torch.maximum(exact / 16, (blocks / 2**17).clamp_min(least))
    assert (error <= (1 + wire.stochastic) * bound).all()
    rows = slice(min(cut), max(cut) + 1)
    assert torch.equal(decode(packed[rows], torch.empty_like(x[rows])), arrived[rows])


def rounded(
    call: DrawnCall, wholes: list[Tensor], wire: tw.wire.Wires, options: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor], tw.Volume]:
    """out, dq, dk, dv of the whole sequence, their bounds, and the bytes that each rank sent."""

    def on_rank(rank: int, group: Any) -> tuple[list[Tensor], tuple[Tensor, ...], tuple[int, int]]:
        q, k, v, dout = (call.layout.shard(x, rank, dim=0).clone() for x in wholes)
        asked = {"plan": call.plan, "layout": call.layout, "mask": call.mask, "group": group}
        asked |= {"wire": wire, **options}
        bounds = error_bound(q, k, v, dout, **asked)
        before = group.bytes_sent
        operands = [x.requires_grad_() for x in (q, k, v)]
        out = tw.attention(*operands, **asked)
        forward = group.bytes_sent - before
        out.backward(dout)
        moved = forward, group.bytes_sent - before - forward
        return [out.detach(), *(x.grad for x in operands if x.grad is not None)], bounds, moved

    found, bounds, moved = zip(*tw.loopback(call.plan.world_size, on_rank), strict=True)
    whole = [
        [call.layout.unshard(parts, dim=0) for parts in zip(*given, strict=True)]
        for given in (found, bounds)
    ]
    return whole[0], whole[1], tw.Volume(*zip(*moved, strict=True))


@examples(0.5)
@given(data=st.data(), call=calls(replicated_queries=False), wire=wires())
def test_a_call_stays_within_its_bound_and_sends_what_is_counted(
    data: st.DataObject, call: DrawnCall, wire: tw.wire.Wires
):
    tokens = call.layout.num_tokens
    wholes = [
        data.draw(numbers(tokens, *size))
        for size in (
            (call.num_heads, call.head_dim),
            (call.num_kv_heads, call.head_dim),
            (call.num_kv_heads, call.v_head_dim),
            (call.num_heads, call.v_head_dim),
        )
    ]
    options = {"save": data.draw(st.sampled_from((None, "replay", "gathered")))}
    if data.draw(st.booleans()):
        options["softcap"] = data.draw(st.floats(0.5, 20.0))
    exact, _, _ = rounded(call, wholes, tw.wire.Wires(), options)
    found, bounds, moved = rounded(call, wholes, wire, options)
    for x, y, bound in zip(found, exact, bounds, strict=True):
        off = (x - y).abs().amax(-1)  # a bound may be inf where scores are huge, never nan
        assert (off <= bound + 1e-12 * (1 + y.abs().max())).all()
    work = tw.Workload(
        *call.sizes,
        "float64",
        mask=call.mask,
        layout=call.layout,
        v_head_dim=call.v_head_dim,
        wire=wire,
        save=options["save"],
    )
    assert moved == tw.volume(call.plan, work)


@examples(0.5)
@given(data=st.data(), call=calls(replicated_queries=False, by_head=False), seed=SEEDS)
def test_latents_are_dense_attention_and_send_what_is_counted(
    data: st.DataObject, call: DrawnCall, seed: int
):
    widths = data.draw(st.tuples(st.integers(3, 6), st.integers(1, 6), st.integers(3, 8)), "widths")
    sizes = Sizes(call.num_heads, call.num_kv_heads, *widths)
    layer = draw_layer(call.layout.num_tokens, sizes, seed)
    save = data.draw(st.sampled_from((None, "replay", "gathered")), "save")
    keep = data.draw(st.booleans(), "keep")
    found, moved = layer.split(call.plan, call.layout, call.mask, save=save, keep=keep)
    assert_close(found, layer.dense(call.mask))
    work = layer.workload(mask=call.mask, layout=call.layout, save=save)
    assert moved == tw.volume(call.plan, work)

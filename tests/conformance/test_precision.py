"""bf16 against fp64: splitting a sequence costs little more than the dense bf16 kernel itself."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilewise as tw
from conformance.oracle import Inputs, Result, dense, draw, split

NUM_TOKENS, HEAD_DIM = 320, 32
COMPARED = ("out", "dq", "dk", "dv")


class Shape(NamedTuple):
    """What a plan is compared on."""

    num_heads: int
    num_kv_heads: int
    causal: bool
    num_queries: int = NUM_TOKENS

    @property
    def mask(self) -> tw.Mask:
        return tw.Causal() if self.causal else tw.Full()


class Error(NamedTuple):
    """Against fp64: root of the mean square, and the largest."""

    rms: float
    largest: float


def errors(got: Result, want: Result) -> dict[str, Error]:
    found = {}
    for name in COMPARED:
        difference = (getattr(got, name).double() - getattr(want, name)).abs()
        found[name] = Error(float(difference.square().mean().sqrt()), float(difference.max()))
    return found


@cache
def inputs(shape: Shape) -> Inputs:
    """Values that bf16 holds exactly; the loss has no lse, which the dense kernel cannot return."""
    q_shape = shape.num_queries, shape.num_heads, HEAD_DIM
    x = draw(q_shape, (NUM_TOKENS, shape.num_kv_heads, HEAD_DIM), seed=7)
    x = Inputs(*(t.bfloat16().double() for t in x))
    return x._replace(dlse=torch.zeros_like(x.dlse))


@cache
def exact(shape: Shape) -> Result:
    return dense(inputs(shape), shape.mask)


@cache
def dense_kernel(shape: Shape) -> dict[str, Error]:
    """Errors of PyTorch's flash attention on the whole sequence in bf16."""
    x = inputs(shape)
    q, k, v = (_heads_first(t).requires_grad_() for t in x[:3])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = scaled_dot_product_attention(
            q, k, v, is_causal=shape.causal, enable_gqa=shape.num_heads != shape.num_kv_heads
        )
    out.backward(_heads_first(x.dout))
    assert q.grad is not None and k.grad is not None and v.grad is not None
    whole = [_rows_first(t) for t in (out.detach(), q.grad, k.grad, v.grad)]
    return errors(Result(whole[0], x.dlse, *whole[1:]), exact(shape))


def _heads_first(x: Tensor) -> Tensor:
    return x.bfloat16().transpose(0, 1)[None].contiguous()


def _rows_first(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)


def plans(*world_sizes: int) -> Iterator[tw.Plan]:
    for n in world_sizes:
        side = max(d for d in range(1, n + 1) if n % d == 0 and d * d <= n)
        yield tw.ring(n)
        yield tw.ring(n, moves="q")
        yield tw.all_gather(n)
        yield tw.double_ring(side, n // side)
        yield tw.balanced_ring(n)
        yield tw.attention2d(n // side, side)
        yield tw.mesh(n, q_tile=side)
        yield tw.mesh(n, q_tile=side, schedule="gather")
        yield tw.ulysses(2, inner=tw.ring(n // 2))


def ratios(plan: tw.Plan, shape: Shape, wire_dtype: str | None) -> dict[str, Error]:
    """Errors of the split over those of the dense kernel."""
    layout = (tw.zigzag if shape.causal else tw.contiguous)(NUM_TOKENS, plan.world_size)
    options = {"wire_dtype": wire_dtype, "uses": (True, False)}
    got = split(inputs(shape), plan, layout, shape.mask, torch.bfloat16, **options)
    mine, theirs = errors(got, exact(shape)), dense_kernel(shape)
    return {
        name: Error(mine[name].rms / theirs[name].rms, mine[name].largest / theirs[name].largest)
        for name in COMPARED
    }


def assert_bounded(plan: tw.Plan, shape: Shape) -> None:
    """fp32 wire: RMS at most 1.5x and largest at most 2x; default wire: RMS at most 2x."""
    for name, ratio in ratios(plan, shape, "float32").items():
        assert ratio.rms <= 1.5 and ratio.largest <= 2, (name, ratio)
    for name, ratio in ratios(plan, shape, None).items():
        assert ratio.rms <= 2, (name, ratio)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "plan",
    [*plans(2, 8), *(pytest.param(plan, marks=pytest.mark.slow) for plan in plans(4, 16))],
    ids=repr,
)
def test_error_is_bounded_by_the_dense_kernels(plan: tw.Plan, causal: bool):
    assert_bounded(plan, Shape(2, 2, causal))


@pytest.mark.parametrize(
    "plan", [tw.ring(16), tw.ring(16, moves="q"), tw.mesh(16, q_tile=4)], ids=repr
)
def test_error_is_bounded_with_grouped_queries(plan: tw.Plan):
    assert_bounded(plan, Shape(4, 1, True))


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_decoding_is_as_close(n: int):
    assert_bounded(tw.tree(n), Shape(4, 2, False, num_queries=8))


def test_error_does_not_grow_with_the_ring():
    """On an fp32 wire partials are rounded once, at home, however many ranks they passed."""
    found = [ratios(tw.ring(n), Shape(2, 2, False), "float32") for n in (2, 16)]
    assert all(found[1][name].rms <= 1.1 * found[0][name].rms for name in COMPARED)

"""Cases for kernels: calls of every kind, operands, the answer by autograd of dense attention."""

import math
from typing import NamedTuple

import torch

from tilewise.kernels.call_masks import call_mask
from tilewise.kernels.protocol import accumulator_dtype
from tilewise.tiles.calls import KernelCall, Kind, Slice

SCALE = 0.3


def call_of(m: int, n: int, kind: Kind = Kind.FULL, slices: tuple[Slice, ...] = ()) -> KernelCall:
    return KernelCall(((0, m),) if m else (), ((0, n),) if n else (), kind, slices)


CALLS = {
    "full": call_of(37, 53),
    "causal": call_of(41, 41, Kind.CAUSAL),
    "one row": call_of(1, 9),
    "bands": call_of(16, 24, Kind.SLICES, (Slice(0, 16, 0, 1, 5, 1),)),
    # two slices on rows 0 to 9, rows 10, 11 and 20, 21 without keys
    "holes": call_of(
        30,
        33,
        Kind.SLICES,
        (
            Slice(0, 10, 0, 0, 3, 1),
            Slice(0, 10, 20, 0, 25, 0),
            Slice(12, 20, 0, 1, 33, 0),
            Slice(22, 30, 2, 0, 3, 0),
        ),
    ),
}
HEADS = {"MHA": (3, 3), "GQA": (6, 2), "MQA": (4, 1)}


class Case(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor


class Answer(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    grads: tuple[torch.Tensor, ...]


def draw(
    call: KernelCall, heads: tuple[int, int], dtype: torch.dtype, batch=2, head_dim=19
) -> Case:
    g = torch.Generator().manual_seed(0)
    shapes = [(call.num_q, heads[0]), (call.num_k, heads[1]), (call.num_k, heads[1])]
    q, k, v, dout = (
        torch.randn(rows, batch, h, head_dim, generator=g, dtype=torch.float64).to(dtype)
        for rows, h in (*shapes, shapes[0])
    )
    dlse = torch.randn(q.shape[:3], generator=g, dtype=torch.float64).to(accumulator_dtype(dtype))
    return Case(q, k, v, dout, dlse)


def dense(case: Case, call: KernelCall) -> Answer:
    """Autograd of attention written out in fp64."""
    q, k, v = (x.detach().double().requires_grad_() for x in case[:3])
    group = q.shape[2] // k.shape[2]
    scores = SCALE * torch.einsum("mbhd,nbhd->mbhn", q, k.repeat_interleave(group, 2))
    scores = scores.masked_fill(~call_mask(call)[:, None, None], -math.inf)
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    out = torch.einsum("mbhn,nbhd->mbhd", p, v.repeat_interleave(group, 2))
    finite = lse.isfinite()
    loss = (out * case.dout.double()).sum() + (lse * case.dlse.double())[finite].sum()
    grads = torch.autograd.grad(loss, (q, k, v))
    out, lse = out.detach(), lse.detach()
    return Answer(out, lse, (out * case.dout.double()).sum(-1) - case.dlse.double(), grads)


def error(x: torch.Tensor, y: torch.Tensor) -> float:
    """Largest error relative to max(1, largest); -inf must match exactly."""
    assert torch.equal(x == -math.inf, y == -math.inf)
    x, y = (a.double().masked_fill(a == -math.inf, 0.0) for a in (x, y))
    return float((x - y).abs().max() / max(1.0, float(y.abs().max())))


def run(kernel, case: Case, answer: Answer, call: KernelCall) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv of a kernel that is given the exact lse and delta."""
    wide = accumulator_dtype(case.q.dtype)
    out, lse = kernel.forward(*case[:3], call, SCALE)
    assert lse.dtype == wide and lse.shape == case.q.shape[:3]
    given_ = (answer.lse.to(wide), answer.delta.to(wide))
    return [out, lse, *kernel.backward(*case[:4], *given_, call, SCALE)]

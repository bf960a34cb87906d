"""Cases for kernels: calls of every kind, operands, the answer by autograd of dense attention."""

import math
import sys
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from tilewise.kernels.call_masks import call_mask
from tilewise.kernels.dropout import kept
from tilewise.kernels.protocol import Places, Scores, accumulator_dtype
from tilewise.tiles.calls import KernelCall, Kind, Slice

SCALE = 0.3
SCORES = {
    "plain": Scores(SCALE),
    "softcap": Scores(SCALE, softcap=1.5),
    "wide softcap": Scores(SCALE, softcap=40.0),
    "dropout": Scores(SCALE, dropout_p=0.3, dropout_seed=-1 % (1 << 63)),
    "max_logit": Scores(SCALE, max_logit=True),
    "all": Scores(SCALE, 2.0, 0.5, 7, max_logit=True),
}


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
    largest: torch.Tensor


def draw(
    call: KernelCall,
    heads: tuple[int, int],
    dtype: torch.dtype,
    batch=2,
    head_dim=19,
    v_head_dim=None,
) -> Case:
    g = torch.Generator().manual_seed(0)
    width, (m, n) = v_head_dim or head_dim, (call.num_q, call.num_k)
    shapes = [(m, heads[0], head_dim), (n, heads[1], head_dim), (n, heads[1], width)]
    q, k, v, dout = (
        torch.randn(rows, batch, h, d, generator=g, dtype=torch.float64).to(dtype)
        for rows, h, d in (*shapes, (m, heads[0], width))
    )
    dlse = torch.randn(q.shape[:3], generator=g, dtype=torch.float64).to(accumulator_dtype(dtype))
    return Case(q, k, v, dout, dlse)


def placed(scores: Scores, call: KernelCall) -> Scores:
    """With positions far apart and out of order, and heads from 3 on, if there is dropout."""
    q, k = torch.arange(call.num_q).flip(0) * 5 + 2, torch.arange(call.num_k) * 70_000 + 1
    return scores._replace(places=Places(q, k, 3)) if scores.dropout_p else scores


def dense(case: Case, call: KernelCall, scores: Scores = SCORES["plain"]) -> Answer:
    """Autograd of attention written out in fp64."""
    q, k, v = (x.detach().double().requires_grad_() for x in case[:3])
    group = q.shape[2] // k.shape[2]
    table = SCALE * torch.einsum("mbhd,nbhd->mbhn", q, k.repeat_interleave(group, 2))
    if scores.softcap is not None:
        table = scores.softcap * torch.tanh(table / scores.softcap)
    table = table.masked_fill(~call_mask(call)[:, None, None], -math.inf)
    lse = torch.logsumexp(table, -1)
    p = torch.exp(table - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    if scores.dropout_p:
        keeps = kept(placed(scores, call), q.shape[1], q.shape[2]).permute(2, 0, 1, 3)
        p = p * keeps / (1 - scores.dropout_p)
    out = torch.einsum("mbhn,nbhd->mbhd", p, v.repeat_interleave(group, 2))
    finite = lse.isfinite()
    loss = (out * case.dout.double()).sum() + (lse * case.dlse.double())[finite].sum()
    grads = torch.autograd.grad(loss, (q, k, v))
    out, lse = out.detach(), lse.detach()
    delta = (out * case.dout.double()).sum(-1) - case.dlse.double()
    return Answer(out, lse, delta, grads, table.detach().amax(-1))


def error(x: torch.Tensor, y: torch.Tensor) -> float:
    """Largest error relative to max(1, largest); -inf must match exactly."""
    assert torch.equal(x == -math.inf, y == -math.inf)
    x, y = (a.double().masked_fill(a == -math.inf, 0.0) for a in (x, y))
    return float((x - y).abs().max() / max(1.0, float(y.abs().max())))


def run(
    kernel, case: Case, answer: Answer, call: KernelCall, scores: Scores | None = None
) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv of a kernel that is given the exact lse and delta; and the largest
    scores, if they are asked for."""
    wide = accumulator_dtype(case.q.dtype)
    also = {"scores": placed(scores, call)} if scores else {}
    out, lse, *largest = kernel.forward(*case[:3], call, SCALE, **also)
    assert lse.dtype == wide and lse.shape == case.q.shape[:3]
    given_ = (answer.lse.to(wide), answer.delta.to(wide))
    return [out, lse, *kernel.backward(*case[:4], *given_, call, SCALE, **also), *largest]


def wanted(answer: Answer, scores: Scores) -> list[torch.Tensor]:
    """What `run` should yield."""
    return [answer.out, answer.lse, *answer.grads, *[answer.largest] * scores.max_logit]


def agrees(
    kernel, call, heads, dtype, bound: float, head_dim: int = 24, scores=None, v_head_dim=None
) -> None:
    """Both passes are within a bound of dense attention, alone and added to what was there."""
    case = draw(call, heads, dtype, head_dim=head_dim, v_head_dim=v_head_dim)
    answer = dense(case, call, scores or SCORES["plain"])
    got, true = run(kernel, case, answer, call, scores), (answer.out, answer.lse, *answer.grads)
    for x, y in zip(got, true, strict=True):
        assert x.shape == y.shape and error(x, y) < bound
    into = torch.zeros_like(case.dout, dtype=torch.float32), torch.full_like(got[1], -math.inf)
    assert kernel.forward(*case[:3], call, SCALE, into, scores) is into
    assert error(into[0], answer.out) < bound
    totals = tuple(torch.ones_like(x, dtype=torch.float32) for x in case[:3])
    given = answer.lse.float(), answer.delta.float()
    assert kernel.backward(*case[:4], *given, call, SCALE, totals, scores) is totals
    for x, y in zip(totals, answer.grads, strict=True):
        assert error(x - 1, y) < bound


def package(monkeypatch: pytest.MonkeyPatch, name: str, **functions: object) -> None:
    """Let a module of this name have these functions and nothing else."""
    module = ModuleType(name)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)

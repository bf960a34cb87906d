"""Which gradients of attention are wrong, and how: scaled, or without the log-sum-exps' part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.layouts.layout import contiguous, striped, zigzag

MOST_PARTS = 16  # that partial results may have been merged from


class ForwardRead(NamedTuple):
    """Attention as it was read; tensors in fp64.

    Attributes:
        weights: [num_heads, num_tokens, num_tokens].
        scores: of q and k [num_tokens, heads, head_dim], differentiable; as weights.
        value_heads: the KV head of every query head.
    """

    weights: Tensor
    scores: Callable[[Tensor, Tensor], Tensor]
    value_heads: Sequence[int]

    def gradients(
        self, operands: Sequence[Tensor], dout: Tensor, blocks: Tensor | None = None
    ) -> dict[str, Tensor]:
        """dq, dk, dv; a weight changes as exp(score), beside the others and what a sink takes.

        Args:
            blocks: shard of each token: of partial results that are merged by weights without a
                gradient, so that each is beside the others of its shard alone.
        """
        q, k, v = (x.detach().requires_grad_() for x in operands)
        w, member = self.weights, torch.ones(len(k), 1, dtype=torch.float64)
        rest = (1 - w.sum(-1, keepdim=True)).clamp(min=0)
        if blocks is not None:
            member, rest = torch.nn.functional.one_hot(blocks).double(), 0.0
        with torch.enable_grad():
            scores = self.scores(q, k)
            grown = w * torch.exp(scores - scores.detach())
            p = grown * (
                ((w @ member + rest) / (grown @ member + rest).clamp(min=1e-300)) @ member.T
            )
            own = torch.tensor(self.value_heads).clamp(min=0)
            out = torch.einsum("hqk,khd->qhd", p, v[:, own])
        return dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), dout), strict=True))


def facts_of_gradients(
    forward: ForwardRead,
    operands: Sequence[Tensor],
    dout: Tensor,
    got: Mapping[str, Tensor],
    tolerance: float,
) -> dict[str, Any]:
    """What is wrong with dq, dk and dv of q, k, v: texts by their names; empty if nothing is."""

    def wrong(blocks: Tensor | None = None) -> dict[str, str]:
        want = forward.gradients(operands, dout, blocks)
        texts = {name: difference(x, got[name], tolerance) for name, x in want.items()}
        return {name: text for name, text in texts.items() if text}

    found = wrong()
    if set(found) == {"dq", "dk"}:
        for name, blocks in _partitions(len(dout)):
            if not wrong(blocks):
                return {"lse_lost": f"dq and dk are those of {name} whose shares are constants"}
    return found


def difference(want: Tensor, got: Tensor, tolerance: float) -> str | None:
    """How a tensor differs from what is right, in words; None within tolerance of the largest."""
    error = relative(want, got)
    if error <= tolerance:
        return None
    if not torch.isfinite(got).all():
        return "not finite"
    if not got.any():
        return "zero"
    ratio = multiple(want, got, tolerance)
    return f"{ratio:.4g} times what is right" if ratio else f"off by {error:.2g} of its size"


def multiple(want: Tensor, got: Tensor, tolerance: float) -> float | None:
    """The number that a tensor is the right one times, or None."""
    ratio = float((want * got).sum() / want.square().sum().clamp(min=1e-300))
    return ratio if ratio and relative(ratio * want, got) <= tolerance else None


def relative(want: Tensor, got: Tensor) -> float:
    """max|got - want| / max|want|; inf for what is not finite."""
    if not want.numel():
        return 0.0
    error = float((got - want).abs().max() / want.abs().max().clamp(min=1e-300))
    return error if error == error else float("inf")


def _partitions(num_tokens: int) -> Iterator[tuple[str, Tensor]]:
    """Ways in which keys may have been split; the whole as one part is a sink's merge."""
    yield "a merge with a sink", torch.zeros(num_tokens, dtype=torch.int64)
    for n in range(2, min(MOST_PARTS, num_tokens) + 1):
        for layout in (contiguous(num_tokens, n), zigzag(num_tokens, n), striped(num_tokens, n)):
            shards = torch.empty(num_tokens, dtype=torch.int64)
            for shard in range(n):
                shards[layout.positions(shard)] = shard
            yield f"{n} {layout.name} parts", shards

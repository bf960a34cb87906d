"""Facts about wrong gradients of attention: scaled, or without the log-sum-exps' part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tilewise.layouts.layout import contiguous, striped, zigzag

MOST_PARTS = 16  # that partial results may have been merged from


def softmax_of_read(weights: Tensor, scores: Tensor, shards: Tensor | None) -> Tensor:
    """Rebuild the weights that were read as a function of scores, so that they have gradients.

    Args:
        weights, scores: [num_heads, num_tokens, num_tokens].
        shards: the shard of each key, if results of shards are merged by shares that get no
            gradient. None: one softmax, with a sink where weights do not sum to 1.
    """
    member = torch.ones(weights.shape[-1], 1, dtype=torch.float64)
    other_weight: Tensor | float = (1 - weights.sum(-1, keepdim=True)).clamp(min=0)
    if shards is not None:
        member, other_weight = torch.nn.functional.one_hot(shards).double(), 0.0
    unnormalized = weights * torch.exp(scores - scores.detach())
    share = (weights @ member + other_weight) / (unnormalized @ member + other_weight).clamp(
        min=1e-300
    )
    return unnormalized * (share @ member.T)


def facts_of_gradients(
    rebuilt: Callable[..., Tensor],
    operands: Sequence[Tensor],
    dout: Tensor,
    gradients: Mapping[str, Tensor],
    tolerance: float,
) -> dict[str, str]:
    """Return what is wrong with dq, dk and dv of q, k, v: texts by their names; empty if nothing
    is.

    Args:
        rebuilt: out of q, k, v and shards (softmax_of_read), as it was read.
    """

    def wrong(shards: Tensor | None = None) -> dict[str, str]:
        leaves = [x.detach().requires_grad_() for x in operands]
        with torch.enable_grad():
            right = torch.autograd.grad(rebuilt(*leaves, shards), leaves, dout)
        pairs = zip(("dq", "dk", "dv"), right, strict=True)
        texts = {name: difference(x, gradients[name], tolerance) for name, x in pairs}
        return {name: text for name, text in texts.items() if text}

    wrong_gradients = wrong()
    if set(wrong_gradients) == {"dq", "dk"}:
        for name, shards in _partitions(len(dout)):
            if not wrong(shards):
                return {"lse_lost": f"dq and dk are those of {name} whose shares are constants"}
    return wrong_gradients


def difference(want: Tensor, got: Tensor, tolerance: float) -> str | None:
    """Return how a tensor differs from what is right, in words; None within tolerance of the
    largest.
    """
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
    """Yield ways in which keys may have been split; the whole as one part: a merge with a sink."""
    yield "a merge with a sink", torch.zeros(num_tokens, dtype=torch.int64)
    for n in range(2, min(MOST_PARTS, num_tokens) + 1):
        for layout in (contiguous(num_tokens, n), zigzag(num_tokens, n), striped(num_tokens, n)):
            shards = torch.empty(num_tokens, dtype=torch.int64)
            for shard in range(n):
                shards[layout.positions(shard)] = shard
            yield f"{n} {layout.name} parts", shards

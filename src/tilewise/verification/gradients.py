"""Which gradients of attention are wrong, and how: scaled, or without the log-sum-exps' part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.layouts.layout import contiguous, striped, zigzag

MOST_PARTS = 16  # that partial results may have been merged from


class ForwardRead(NamedTuple):
    """Attention as it was read; tensors in fp64.

    Attributes:
        weights: [num_heads, num_tokens, num_tokens].
        q, k, v: [num_tokens, heads, head_dim].
        key_heads, value_heads: the KV head of every query head.
        scale: [num_heads].
        softcap: None without one.
    """

    weights: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    key_heads: Sequence[int]
    value_heads: Sequence[int]
    scale: Tensor
    softcap: float | None

    def gradients(self, dout: Tensor, blocks: Tensor | None = None) -> dict[str, Tensor]:
        """dq, dk, dv by the formulas, ds = p (dp - sum_j p dp).

        Args:
            blocks: shard of each token: of partial results that are merged by weights without a
                gradient, so that each has a sum of its own, ds = p (dp - sum_b p dp / sum_b p).
        """
        own = [torch.tensor(heads).clamp(min=0) for heads in (self.key_heads, self.value_heads)]
        keys, values = self.k[:, own[0]], self.v[:, own[1]]
        p, dp = self.weights, torch.einsum("qhd,khd->hqk", dout, values)
        if blocks is None:
            delta = (p * dp).sum(-1, keepdim=True) / p.sum(-1, keepdim=True).clamp(min=1)
        else:
            member = torch.nn.functional.one_hot(blocks).to(p)
            delta = ((p * dp) @ member / (p @ member).clamp(min=1e-300)) @ member.T
        ds = p * (dp - delta) * self.scale[:, None, None]
        if self.softcap is not None:
            scores = torch.einsum("qhd,khd,h->hqk", self.q, keys, self.scale)
            ds = ds * (1 - torch.tanh(scores / self.softcap) ** 2)
        dk, dv = torch.zeros_like(self.k), torch.zeros_like(self.v)
        dk.index_add_(1, own[0], torch.einsum("hqk,qhd->khd", ds, self.q))
        dv.index_add_(1, own[1], torch.einsum("hqk,qhd->khd", p, dout))
        return {"dq": torch.einsum("hqk,khd->qhd", ds, keys), "dk": dk, "dv": dv}


def facts_of_gradients(
    forward: ForwardRead, dout: Tensor, got: Mapping[str, Tensor], tolerance: float
) -> dict[str, Any]:
    """What is wrong with dq, dk and dv: texts by their names; empty if nothing is."""
    wrong = _differences(forward.gradients(dout), got, tolerance)
    if set(wrong) == {"dq", "dk"}:
        for name, blocks in _partitions(len(forward.q)):
            if not _differences(forward.gradients(dout, blocks), got, tolerance):
                return {"lse_lost": f"dq and dk are those of {name} whose shares are constants"}
    return wrong


def _differences(
    want: Mapping[str, Tensor], got: Mapping[str, Tensor], tolerance: float
) -> dict[str, str]:
    texts = {name: difference(right, got[name], tolerance) for name, right in want.items()}
    return {name: text for name, text in texts.items() if text}


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

"""The mask that a function of q, k and v applies, read from its output, which is linear in v."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.arguments import checks_arguments, whole_number
from tilewise.masks.base import Mask
from tilewise.masks.tables import bool_table
from tilewise.verification.causes import classify, explained
from tilewise.verification.gradients import facts_of_gradients, softmax_of_read
from tilewise.verification.pictures import drawn, text_picture
from tilewise.verification.tables import (
    centred,
    facts_of_attention,
    fitted_cap,
    fitted_slope,
    largest,
    of_seen_keys,
)
from tilewise.verification.weights import Weights, above, read_weights

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
SPREAD, WIDE = 0.25, 6.0  # standard deviation of scores: all weights show; a cap would show
LEAST_CHANGE = 1e-3  # of a scale, to be called one
ROUNDING = torch.finfo(torch.float32).eps
MOST_NOISE = 0.05  # of a log weight, or a result, that a kernel's rounding may make
LEAST_VISIBLE = 1e-6  # weight
UNCAPPED = 1e9
MOST_WEIGHTS, MOST_SIZE = 1 << 24, 1 << 12


@dataclass(frozen=True, eq=False)
class EffectiveMask:
    """The weights by which values are multiplied, as they were read.

    Attributes:
        weights: fp64 [num_heads, num_tokens, num_tokens], query by key. A row sums to 1, less what
            a sink takes.
        key_heads, value_heads: the KV heads that each query head reads, -1 for none.
        scale: that scores are multiplied by, by query head; nan where no row shows it.
        softcap: that scores are capped with; None without one.
        softmax_scale: what scale should be.
    """

    weights: Tensor
    key_heads: tuple[int, ...]
    value_heads: tuple[int, ...]
    scale: tuple[float, ...]
    softcap: float | None
    softmax_scale: float
    _probe: _Probe
    _tolerance: float
    _gradients: dict[str, str] | None = None

    @cached_property
    def allowed(self) -> Tensor:
        """bool as weights: those above rounding."""
        return above(self.weights, 1e-3 * ROUNDING)

    def matches(self, mask: Mask | Tensor) -> bool:
        """Return whether every head attends to exactly the pairs that a mask allows."""
        return bool((self.allowed.numpy() == self._dense(mask)).all())

    def causes(self, mask: Mask | Tensor) -> list[str]:
        """Names from the closed list (verification/causes.py), most telling first.

        Args:
            mask: what should be attended, or a bool table [(num_heads,) num_tokens, num_tokens].
        """
        return [finding.cause for finding in classify(self._facts(mask))]

    def explain(self, mask: Mask | Tensor) -> str:
        """Explain what is wrong for a mask, with evidence in numbers, a line a cause."""
        return (
            explained(classify(self._facts(mask)))
            or f"exactly {mask!r} is attended: nothing is wrong"
        )

    def __str__(self) -> str:
        num_heads, n, _ = self.weights.shape
        pairs = [f"{count:,}" for count in self.allowed.sum((1, 2)).tolist()]
        shown = pairs[0] if len(set(pairs)) == 1 else ", ".join(pairs)
        lost = 1 - self.weights.sum(-1)[self.allowed.any(-1)]
        gradients = "not read: not differentiable" if self._gradients is None else "as they must be"
        if self._gradients:
            gradients = ", ".join(f"{name} {text}" for name, text in self._gradients.items())
        scales = ", ".join(dict.fromkeys(f"{x:.4g}" for x in self.scale))
        lines = [
            f"{n} tokens, {num_heads} query heads on {self._probe.k.shape[1]} KV heads",
            f"pairs attended by head: {shown} of {n * n:,}",
            f"weight lost: {float(lost.mean()) if len(lost) else 0:.2%} on average",
            f"scale: {scales}, asked {self.softmax_scale:.4g}",
            f"softcap: {self.softcap and round(self.softcap, 2)}",
            f"gradients: {gradients}",
        ]
        return "\n".join([*lines, "", text_picture(self.allowed.any(0).numpy())])

    def svg(self, mask: Mask | Tensor | None = None) -> str:
        """A picture of all heads: attended rightly, wrongly, and missed, if a mask says which."""
        got = self.allowed.any(0).numpy()
        return drawn(got, got if mask is None else np.asarray(self._dense(mask).any(0)))

    def _dense(self, mask: Mask | Tensor) -> np.ndarray:
        num_heads, n, _ = self.weights.shape
        if isinstance(mask, Mask):
            mask.check_tokens(n)
        table = mask.dense(np.arange(n), np.arange(n)) if isinstance(mask, Mask) else mask
        allowed = bool_table(table, "mask")
        allowed = allowed[None] if allowed.ndim == 2 else allowed
        if allowed.shape[1:] != (n, n) or not len(allowed) or num_heads % len(allowed):
            raise ValueError(
                f"the mask is {np.shape(table)}, but {num_heads} heads of {n} tokens were read; "
                "give a mask of these tokens, for one or all heads"
            )
        return np.repeat(allowed, num_heads // len(allowed), 0)

    def _facts(self, mask: Mask | Tensor) -> dict[str, Any]:
        right, dense = self._probe.heads.tolist(), torch.as_tensor(self._dense(mask))
        scores = self._probe.scores(right, [self.softmax_scale] * len(right), self.softcap)
        want, got = scores.masked_fill(~dense, -torch.inf).softmax(-1).nan_to_num(), self.weights
        sums = got.sum(-1, keepdim=True).clamp(max=1.0)
        attended = sums[sums > 0]
        # What a sink takes differs from row to row.
        if len(attended) and float(attended.max() - attended.min()) > self._tolerance:
            want = want * sums.where(sums > 0, 1.0)
        asked = "the mask" if isinstance(mask, Tensor) else repr(mask)
        tables = want.numpy(), (got * self.allowed).numpy()
        facts = facts_of_attention(*tables, self._tolerance, asked) | (self._gradients or {})
        pairs = zip(self.value_heads, self.key_heads, right, strict=True)
        foreign = [h for h, (v, k, own) in enumerate(pairs) if v >= 0 and (v, k) != (own, own)]
        if foreign:
            h = foreign[0]
            facts["foreign_heads"] = (
                f"{len(foreign)} of {len(right)} heads: query head {h} reads keys of KV head "
                f"{self.key_heads[h]} and values of {self.value_heads[h]}, not of {right[h]}"
            )
        return facts


class _Probe(NamedTuple):
    """Queries and keys whose scores are small enough that every weight shows."""

    attend: Attend
    q: Tensor
    k: Tensor

    @property
    def heads(self) -> Tensor:
        """The KV head that each query head should read."""
        return torch.arange(self.q.shape[1]) * self.k.shape[1] // self.q.shape[1]

    def scores(
        self, heads: Sequence[int], scales: Sequence[float], softcap: float | None = None
    ) -> Tensor:
        """[num_heads, num_tokens, num_tokens] in fp64, of the KV heads that query heads read."""
        q, k = self.q.double(), self.k[:, [max(h, 0) for h in heads]].double()
        scores = torch.einsum("qhd,khd,h->hqk", q, k, torch.tensor(scales, dtype=q.dtype))
        return scores if softcap is None else softcap * torch.tanh(scores / softcap)

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        try:
            out = self.attend(q, k, v)
        except Exception as error:
            raise ValueError(
                f"attend failed on fp32 CPU tensors q {tuple(q.shape)} and k, v {tuple(k.shape)} "
                f"({type(error).__name__}: {error}); if it needs a GPU or another dtype, convert "
                "inside it and convert back what it returns"
            ) from error
        if not isinstance(out, Tensor) or out.shape != q.shape:
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"attend returned {got}, not the shape of q, {tuple(q.shape)}: tokens, heads, "
                "head_dim of the whole sequence; unshard and transpose inside it"
            )
        return out

    def read(self, values: Tensor) -> Tensor:
        """The result [num_tokens, numbers] in fp64 for values [num_tokens, numbers]."""
        with torch.no_grad():
            out = self.call(self.q, self.k, values.float().view(self.k.shape))
        if not torch.isfinite(out).all():
            count = int((~torch.isfinite(out)).sum())
            raise ValueError(
                f"attend returned {count} values that are not finite for finite q, k and v"
            )
        return out.double().cpu().flatten(1)

    def weights(self) -> Weights:
        return read_weights(self.read, len(self.q), self.k[0].numel(), self.q.shape[2])


@checks_arguments
def effective_mask(
    attend: Attend,
    *,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int = 64,
    softmax_scale: float | None = None,
) -> EffectiveMask:
    """Find which keys each query of a black box attends to, and with what weight.

    out is linear in v, so values that are rows of the identity read the weights themselves,
    head_dim keys a call; more calls find heads and a softcap, and one backward pass checks the
    gradients against the weights. Operands are fp32 on the CPU.

    Args:
        attend: q [num_tokens, num_heads, head_dim], k, v [num_tokens, num_kv_heads, head_dim] to
            out, as q: whole tensors; it does its own splitting inside.
        num_kv_heads: None: num_heads.
        softmax_scale: what scores should be multiplied by; None: head_dim ** -0.5.
    Raises:
        ValueError: if attend cannot be read: another shape, random, independent of v, not linear
            in v, or it does not run on CPU tensors.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    sizes = {"num_tokens": num_tokens, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    for name, size in sizes.items():
        whole_number(name, size, most=MOST_SIZE)
    whole_number("head_dim", head_dim, most=MOST_SIZE)
    num_weights = num_heads * num_tokens**2
    if num_weights > MOST_WEIGHTS:
        raise ValueError(
            f"num_heads ({num_heads}) x num_tokens ({num_tokens}) squared are {num_weights:.3g} "
            f"weights; read {MOST_WEIGHTS} at most: a few heads of few tokens show a mask"
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads})"
        )
    scale = head_dim**-0.5 if softmax_scale is None else float(softmax_scale)
    if not scale or not math.isfinite(scale):
        raise ValueError(
            f"softmax_scale ({scale:g}) must be finite and not 0, which makes all weights alike"
        )
    make = torch.Generator().manual_seed(0)
    size = math.sqrt(SPREAD / (abs(scale) * math.sqrt(head_dim)))
    shapes = (num_tokens, num_heads, head_dim), (num_tokens, num_kv_heads, head_dim)
    probe = _Probe(attend, *(size * torch.randn(shape, generator=make) for shape in shapes))
    weights, value_heads = _checked(probe)
    errors, slopes, key_heads = zip(*_fits(probe, weights), strict=True)
    tolerance = min(max(4 * max(errors), ROUNDING**0.5), MOST_NOISE)
    scales = tuple(scale if abs(x / scale - 1) < LEAST_CHANGE else x for x in slopes)
    read = scales, _softcap(probe, scales), scale, probe, tolerance
    seen = EffectiveMask(weights, key_heads, tuple(value_heads), *read)
    return replace(seen, _gradients=_gradients(seen))


def _checked(probe: _Probe) -> Weights:
    """The weights, if the function is one of attention."""
    make = torch.Generator().manual_seed(2)
    v = torch.randn(probe.k.shape, generator=make, dtype=torch.float64)
    out, again, nothing = map(probe.read, (v, v, 0 * v))
    if not torch.equal(out, again):
        raise ValueError(
            "attend gives different results for the same input; turn off dropout, or seed it "
            "inside, so that it can be read"
        )
    if torch.equal(out, nothing):
        raise ValueError(
            "the output of attend does not depend on v: two different v give the same; attend must "
            "return the weighted sums of v"
        )
    found = probe.weights()
    want = torch.einsum("hqk,khd->qhd", found.weights, v[:, [max(h, 0) for h in found.sources]])
    error = max(float((out - want.flatten(1)).abs().max()), float(nothing.abs().max()))
    if error > MOST_NOISE * max(float(want.abs().max()), 1.0):
        raise ValueError(
            "attend must be linear in v, each head a weighted sum of one KV head's values; weights "
            f"read from one-hot v do not explain its output for a random one (off by {error:.3g})"
        )
    return found


def _fits(probe: _Probe, weights: Tensor) -> list[tuple[float, float, int]]:
    """Fit log weights by scale times scores, by query head: return how far they are off at most,
    the scale, and the KV head whose keys explain them; the right one if none does.
    """
    found, q, k = [], probe.q.double().numpy(), probe.k.double().numpy()
    table = of_seen_keys((weights * above(weights, 1e-3 * ROUNDING)).numpy())
    logs = np.log(table, out=np.full(table.shape, np.nan), where=table > 0)
    for h, (rows, own) in enumerate(zip(logs, probe.heads.tolist(), strict=True)):
        seen, fits = np.isfinite(rows).sum(-1) > 1, []
        for g in range(k.shape[1]):
            scores = np.where(np.isnan(rows), np.nan, q[:, h] @ k[:, g].T)
            slope, left = fitted_slope(scores[seen], rows[seen])
            fits.append((largest(left), slope if seen.any() else math.nan, g))
        found.append(min(fits) if min(fits)[0] < MOST_NOISE < fits[own][0] else fits[own])
    return found


def _softcap(probe: _Probe, scales: Sequence[float]) -> float | None:
    """The cap that explains weights of large scores: score = cap tanh(score / cap)."""
    wide = probe._replace(q=probe.q * (WIDE / SPREAD))
    table = of_seen_keys(wide.weights().weights.numpy())
    scores = wide.scores(wide.heads.tolist(), scales).numpy()
    visible = (table > LEAST_VISIBLE) & np.isfinite(scores)
    rows = visible.sum(-1) > 2
    logs = np.log(table, out=np.full(table.shape, np.nan), where=visible)[rows]
    x, y = np.where(visible[rows], scores[rows], np.nan), logs
    cap, left = fitted_cap(x, y, np.geomspace(1, 300, 400))
    uncapped = np.nansum(centred(y - x) ** 2)
    return cap if uncapped > MOST_NOISE**2 * visible[rows].sum() and left < uncapped / 100 else None


def _gradients(seen: EffectiveMask) -> dict[str, str] | None:
    """Return what is wrong with the gradients, by one backward pass; None where there is none."""
    make, probe = torch.Generator().manual_seed(1), seen._probe
    v = torch.randn(probe.k.shape, generator=make)
    n, num_heads, head_dim = probe.q.shape
    at, dout = torch.arange(n), torch.zeros_like(probe.q)
    # One-hot rows: a column of dv is the weights of the queries t with t mod head_dim there.
    dout[at, :, at % head_dim] = 1.0 + 0.5 * torch.randn(n, num_heads, generator=make)
    leaves = [x.clone().requires_grad_() for x in (probe.q, probe.k, v)]
    with torch.enable_grad():
        out = probe.call(*leaves)
        try:
            got = torch.autograd.grad(
                out, leaves, dout.to(out), allow_unused=True, materialize_grads=True
            )
        except RuntimeError:  # also if out has no gradient
            return None
    keyed = torch.from_numpy(of_seen_keys(seen.weights.numpy()))
    scales = [seen.softmax_scale if math.isnan(x) else x for x in seen.scale]

    def rebuilt(q: Tensor, k: Tensor, v: Tensor, shards: Tensor | None) -> Tensor:
        scores = probe._replace(q=q, k=k).scores(seen.key_heads, scales, seen.softcap)
        p = softmax_of_read(keyed, scores, shards) + seen.weights - keyed
        return torch.einsum("hqk,khd->qhd", p, v[:, [max(h, 0) for h in seen.value_heads]])

    read = {name: x.double().cpu() for name, x in zip(("dq", "dk", "dv"), got, strict=True)}
    operands = [x.detach().double() for x in leaves]
    return facts_of_gradients(rebuilt, operands, dout.double(), read, 4 * seen._tolerance)

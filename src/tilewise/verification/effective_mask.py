"""What a function of q, k and v attends to, read from its output: that is linear in v."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.masks.base import Mask
from tilewise.verification.causes import Finding, classify, explained
from tilewise.verification.gradients import Forward, facts_of_gradients
from tilewise.verification.pictures import drawn, text_picture
from tilewise.verification.tables import facts_of_masks, facts_of_weights

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
SPREAD, WIDE = 0.25, 6.0  # standard deviation of scores: all weights show; a cap would show
LEAST_CHANGE = 1e-3  # of a scale, to be called one
ROUNDING = torch.finfo(torch.float32).eps
MOST_NOISE = 0.05  # of a log weight, that a kernel's rounding may make
LEAST_VISIBLE = 1e-6  # weight


@dataclass(frozen=True, eq=False)
class EffectiveMask:
    """What was read; weights are what values are multiplied by.

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
    _gradients: dict[str, Any] | None

    @cached_property
    def allowed(self) -> Tensor:
        """bool as weights: those above rounding."""
        return _above_rounding(self.weights)

    def matches(self, mask: Mask | Tensor) -> bool:
        """Whether exactly the pairs are attended that a mask allows, by every head."""
        return bool((self.allowed.numpy() == self._dense(mask)).all())

    def causes(self, mask: Mask | Tensor) -> list[str]:
        """Names from the closed list (verification/causes.py), most telling first.

        Args:
            mask: what should be attended, or a bool table [(num_heads,) num_tokens, num_tokens].
        """
        return [finding.cause for finding in self.findings(mask)]

    def findings(self, mask: Mask | Tensor) -> list[Finding]:
        """The causes with their evidence in numbers."""
        return classify(self._facts(mask))

    def explain(self, mask: Mask | Tensor) -> str:
        """What is wrong for a mask, a line a cause."""
        return explained(self.findings(mask)) or f"exactly {mask!r} is attended: nothing is wrong"

    def __str__(self) -> str:
        num_heads, n, _ = self.weights.shape
        pairs = self.allowed.sum((1, 2)).tolist()
        lost = 1 - self.weights.sum(-1)[self.allowed.any(-1)]
        counts = f"{pairs[0]:,}" if len(set(pairs)) == 1 else ", ".join(f"{x:,}" for x in pairs)
        gradients = "not read: not differentiable" if self._gradients is None else "as they must be"
        if self._gradients:
            gradients = ", ".join(f"{name} {text}" for name, text in self._gradients.items())
        lines = [
            f"{n} tokens, {num_heads} query heads on {self._probe.num_kv_heads} KV heads",
            f"pairs attended by head: {counts} of {n * n:,}",
            f"weight lost: {float(lost.mean()) if len(lost) else 0:.2%} on average",
            f"scale: {_number(self.scale)}, asked {self.softmax_scale:.4g}",
            f"softcap: {self.softcap and round(self.softcap, 2)}",
            f"gradients: {gradients}",
        ]
        return "\n".join([*lines, "", text_picture(self.allowed.any(0).numpy())])

    def _repr_svg_(self) -> str:
        return self.svg()

    def svg(self, mask: Mask | Tensor | None = None) -> str:
        """A picture of all heads: attended rightly, wrongly, and missed, if a mask says which."""
        got = self.allowed.any(0).numpy()
        wanted = got if mask is None else np.asarray(self._dense(mask).any(0))
        return drawn(got, wanted)

    def _dense(self, mask: Mask | Tensor) -> np.ndarray:
        num_heads, n, _ = self.weights.shape
        if isinstance(mask, Mask):
            mask.check_tokens(n)
            allowed = np.asarray(mask.dense(np.arange(n), np.arange(n)))
        else:
            allowed = np.asarray(mask, bool)
        heads = allowed.shape[0] if allowed.ndim == 3 else 1
        if allowed.shape[-2:] != (n, n) or num_heads % heads:
            raise ValueError(
                f"the mask is {allowed.shape}, but {num_heads} heads of {n} tokens were read; give "
                "a mask of these tokens, for one or all heads"
            )
        return (
            np.broadcast_to(allowed, (num_heads, n, n))
            if allowed.ndim == 2
            else np.repeat(allowed, num_heads // heads, 0)
        )

    def _facts(self, mask: Mask | Tensor) -> dict[str, Any]:
        asked = "the mask" if isinstance(mask, Tensor) else repr(mask)
        facts = facts_of_masks(self._dense(mask), self.allowed.numpy(), asked)
        right = self._probe.heads
        pairs = zip(self.value_heads, self.key_heads, right.tolist(), strict=True)
        foreign = [h for h, (v, k, own) in enumerate(pairs) if v >= 0 and (v, k) != (own, own)]
        if foreign:
            h = foreign[0]
            facts["foreign_heads"] = (
                f"{len(foreign)} of {len(right)} heads: query head {h} reads keys of KV head "
                f"{self.key_heads[h]} and values of {self.value_heads[h]}, not of {right[h]}"
            )
        else:
            scores = self._probe.scores(self.softmax_scale, self.softcap)
            masked = scores.masked_fill(~self.allowed, -torch.inf).softmax(-1).nan_to_num()
            sums = self.weights.sum(-1, keepdim=True).clamp(max=1.0)
            got = self.weights.numpy()
            facts |= facts_of_weights((masked * sums).numpy(), got, self._tolerance)
        return facts | (self._gradients or {})


class _Probe(NamedTuple):
    """Queries and keys whose scores are small enough that every weight shows."""

    q: Tensor
    k: Tensor

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def kv_range(self) -> range:
        return range(self.num_kv_heads)

    @property
    def heads(self) -> Tensor:
        """The KV head that each query head should read."""
        return torch.arange(self.q.shape[1]) * self.num_kv_heads // self.q.shape[1]

    def products(self, query_head: int, kv_head: int) -> Tensor:
        """q k [num_tokens, num_tokens] in fp64."""
        return self.q[:, query_head].double() @ self.k[:, kv_head].double().T

    def scores(self, scale: float, softcap: float | None = None) -> Tensor:
        """[num_heads, num_tokens, num_tokens], as they should be."""
        products = [self.products(h, g) for h, g in enumerate(self.heads.tolist())]
        scores = torch.stack(products) * scale
        return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def effective_mask(
    attend: Attend,
    *,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int = 64,
    softmax_scale: float | None = None,
) -> EffectiveMask:
    """Which keys each query of a black box attends to, and with what weight.

    out is linear in v, so values that are rows of the identity read the weights themselves,
    head_dim keys a call; two calls more find heads and a softcap, and one backward pass checks the
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
    for name, size in {**sizes, "head_dim": head_dim}.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} ({size!r}) must be a whole number, at least 1")
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads})"
        )
    scale = head_dim**-0.5 if softmax_scale is None else float(softmax_scale)
    make = torch.Generator().manual_seed(0)
    size = math.sqrt(SPREAD / (abs(scale) * math.sqrt(head_dim)))
    shapes = (num_tokens, num_heads, head_dim), (num_tokens, num_kv_heads, head_dim)
    probe = _Probe(*(size * torch.randn(shape, generator=make) for shape in shapes))
    weights = _read(attend, probe, range(num_tokens))
    value_heads = _value_heads(attend, probe, weights)
    key_heads, lines = _key_heads(probe, weights)
    scales = tuple(_rounded(line.slope, scale) for line in lines)
    noise = max((line.misfit for line in lines), default=0.0)
    tolerance = min(max(4 * noise, ROUNDING**0.5), MOST_NOISE)
    softcap = _softcap(attend, probe, scales)
    q, k = (x.double() for x in probe)
    read = torch.tensor(scales, dtype=torch.float64).nan_to_num(scale)
    forward = Forward(weights, q, k, k, key_heads, value_heads, read, softcap)
    gradients = _gradients(attend, probe, forward, tolerance)
    return EffectiveMask(
        weights, key_heads, value_heads, scales, softcap, scale, probe, tolerance, gradients
    )


def _call(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    try:
        out = attend(q, k, v)
    except Exception as error:
        raise ValueError(
            f"attend failed on fp32 CPU tensors q {tuple(q.shape)} and k, v {tuple(k.shape)} "
            f"({type(error).__name__}: {error}); if it needs a GPU or another dtype, convert "
            "inside it and convert back what it returns"
        ) from error
    if not isinstance(out, Tensor) or out.shape != q.shape:
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(
            f"attend returned {got}, not the shape of q, {tuple(q.shape)}: tokens, heads, head_dim "
            "of the whole sequence; unshard and transpose inside it"
        )
    return out


def _read(attend: Attend, probe: _Probe, keys: range) -> Tensor:
    """Weights [num_heads, num_tokens, len(keys)] by one-hot values, head_dim keys a call."""
    head_dim, parts = probe.q.shape[2], []
    for start in range(0, len(keys), head_dim):
        some = keys[start : start + head_dim]
        v = torch.zeros_like(probe.k)
        v[list(some), :, : len(some)] = torch.eye(len(some))[:, None]
        with torch.no_grad():
            out = _call(attend, probe.q, probe.k, v)
            if not torch.isfinite(out).all():
                count = int((~torch.isfinite(out)).sum())
                raise ValueError(
                    f"attend returned {count} values that are not finite for finite q, k and v"
                )
            if start == 0 and not torch.equal(out, _call(attend, probe.q, probe.k, v)):
                raise ValueError(
                    "attend gives different results for the same input; turn off dropout, or seed "
                    "it inside, so that it can be read"
                )
        parts.append(out[..., : len(some)].double().cpu().permute(1, 0, 2))
    return torch.cat(parts, -1)


def _value_heads(attend: Attend, probe: _Probe, weights: Tensor) -> tuple[int, ...]:
    """By values that are 1 + the number of their head; and whether attend is linear in them."""
    v = torch.ones_like(probe.k) * (1.0 + torch.arange(probe.num_kv_heads))[:, None]
    with torch.no_grad():
        out, nothing = (_call(attend, probe.q, probe.k, x).double().cpu() for x in (v, 0 * v))
    sums = weights.sum(-1)
    if torch.equal(out, nothing):
        raise ValueError(
            "the output of attend does not depend on v: values of 1 and of 0 give the same; "
            "attend must return the weighted sums of v"
        )
    out = out[..., 0].T
    found = []
    for h, (row, total) in enumerate(zip(out, sums, strict=True)):
        reached = total.abs() > 1e-6
        numbers = (row[reached] / total[reached]) - 1
        if not len(numbers):
            found.append(-1)
            continue
        head = round(float(numbers.median()))
        if float((numbers - head).abs().max()) > 0.05 or head not in probe.kv_range:
            raise ValueError(
                f"head {h} of attend is not a weighted sum of the values of one KV head: with "
                f"values 1..{probe.num_kv_heads} by KV head and weights that sum to 1 it gives "
                f"{1 + float(numbers.min()):.4g} to {1 + float(numbers.max()):.4g}; attend must be "
                "linear in v"
            )
        found.append(head)
    return tuple(found)


class _Line(NamedTuple):
    """Log weights as a multiple of products of q and k: the multiple, the largest difference."""

    slope: float
    misfit: float


def _line(products: Tensor, weights: Tensor, allowed: Tensor) -> _Line:
    rows = allowed.sum(-1) > 1
    hidden, count = ~allowed[rows], allowed[rows].sum(-1, keepdim=True)
    x, y = (t[rows].masked_fill(hidden, 0) for t in (products, weights.log()))
    x, y = ((t - t.sum(-1, keepdim=True) / count).masked_fill(hidden, 0) for t in (x, y))
    if not len(x) or float(x.square().sum()) == 0:
        return _Line(math.nan, 0.0)
    slope = float((x * y).sum() / x.square().sum())
    return _Line(slope, float((y - slope * x).abs().max()))


def _key_heads(probe: _Probe, weights: Tensor) -> tuple[tuple[int, ...], list[_Line]]:
    """The KV head whose keys explain each query head's weights; the right one if none does."""
    allowed, found, lines = _above_rounding(weights), [], []
    for h, own in enumerate(probe.heads.tolist()):
        by_head = [_line(probe.products(h, g), weights[h], allowed[h]) for g in probe.kv_range]
        best = min(probe.kv_range, key=lambda g: by_head[g].misfit)
        other = by_head[best].misfit < MOST_NOISE < by_head[own].misfit
        found.append(best if other else own)
        lines.append(by_head[found[-1]])
    return tuple(found), lines


def _rounded(slope: float, asked: float) -> float:
    return asked if abs(slope / asked - 1) < LEAST_CHANGE else slope


def _softcap(attend: Attend, probe: _Probe, scales: tuple[float, ...]) -> float | None:
    """The cap that explains weights of large scores: score = cap tanh(score / cap)."""
    n, _, head_dim = probe.q.shape
    wide = probe._replace(q=probe.q * (WIDE / SPREAD))
    keys = range(0, n, max(1, -(-n // head_dim)))
    weights = _read(attend, wide, keys)
    products = [wide.products(h, g)[:, list(keys)] for h, g in enumerate(probe.heads.tolist())]
    scores = torch.stack(products) * torch.tensor(scales, dtype=torch.float64)[:, None, None]
    visible = weights > LEAST_VISIBLE
    rows = (visible.sum(-1) > 2) & torch.isfinite(scores).all(-1)
    if not rows.any():
        return None
    x, y, hidden = scores[rows], weights[rows].log(), ~visible[rows]

    def misfit(cap: float) -> float:
        off = (y - cap * torch.tanh(x / cap)).masked_fill(hidden, torch.nan)
        return float((off - off.nanmedian(-1, keepdim=True).values).abs().nanmean())

    best = min(np.geomspace(1, 300, 200).tolist(), key=misfit)
    best = min(np.linspace(0.97 * best, 1.03 * best, 121).tolist(), key=misfit)
    uncapped = misfit(1e9)
    return best if uncapped > MOST_NOISE and misfit(best) < uncapped / 10 else None


def _gradients(
    attend: Attend, probe: _Probe, forward: Forward, tolerance: float
) -> dict[str, Any] | None:
    """What is wrong with the gradients, by one backward pass; None where there is none."""
    make = torch.Generator().manual_seed(1)
    v = torch.randn(probe.k.shape, generator=make)
    n, num_heads, head_dim = probe.q.shape
    at, dout = torch.arange(n), torch.zeros_like(probe.q)
    # One-hot rows: a column of dv is the weights of the queries t with t mod head_dim there.
    dout[at, :, at % head_dim] = 1.0 + 0.5 * torch.randn(n, num_heads, generator=make)
    leaves = [x.clone().requires_grad_() for x in (*probe, v)]
    with torch.enable_grad():
        out = _call(attend, *leaves)
        if not out.requires_grad:
            return None
        try:
            got = torch.autograd.grad(out, leaves, dout.to(out), allow_unused=True)
        except RuntimeError:
            return None
    read = {
        name: (torch.zeros_like(x) if grad is None else grad).detach().double().cpu()
        for name, x, grad in zip(("dq", "dk", "dv"), leaves, got, strict=True)
    }
    return facts_of_gradients(forward._replace(v=v.double()), dout.double(), read, 4 * tolerance)


def _above_rounding(weights: Tensor) -> Tensor:
    """Which weights are more than what rounding leaves of a zero, beside the row's largest."""
    return weights > weights.amax(-1, keepdim=True).clamp(min=1e-30) * (1e-3 * ROUNDING)


def _number(scales: tuple[float, ...]) -> str:
    shown = list(dict.fromkeys(f"{x:.4g}" for x in scales))
    return shown[0] if len(shown) == 1 else ", ".join(shown)

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

from tilewise.arguments import as_array, checks_arguments, shown, whole_number
from tilewise.execution.validation import checked_softcap
from tilewise.masks.base import Mask
from tilewise.masks.tables import bool_table
from tilewise_verify.causes import classify, explained
from tilewise_verify.gradients import facts_of_gradients, softmax_of_read
from tilewise_verify.pictures import drawn, text_picture
from tilewise_verify.tables import (
    centred,
    facts_of_attention,
    fitted_cap,
    fitted_slope,
    largest,
    of_seen_keys,
)
from tilewise_verify.weights import Weights, above, read_weights

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
SPREAD, WIDE = 0.25, 6.0  # standard deviation of scores: all weights show; a cap would show
LEAST_CHANGE = 1e-3  # of a scale, to be called one
ROUNDING = torch.finfo(torch.float32).eps
MOST_NOISE = 0.05  # of a log weight, or a result, that a kernel's rounding may make
LEAST_VISIBLE = 1e-6  # weight
SAME_CAP = 0.03  # relative: caps are read on a grid
SAME_SINK = 0.1  # logits
FIT_STEPS = 12
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
        sink: logit of what takes the rest of a row's weight, by query head; -inf where nothing
            does, None where it is not one number for all rows of a head.
        softmax_scale, wanted_softcap, wanted_sink: what scale, softcap and sink should be.
    """

    weights: Tensor
    key_heads: tuple[int, ...]
    value_heads: tuple[int, ...]
    scale: tuple[float, ...]
    softcap: float | None
    sink: tuple[float, ...] | None
    softmax_scale: float
    wanted_softcap: float | None
    wanted_sink: tuple[float, ...] | None
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
        """Names from the closed list (tilewise_verify/causes.py), most telling first.

        Args:
            mask: what should be attended, or a bool table [(num_heads,) num_tokens, num_tokens].
        """
        return [finding.cause for finding in classify(self._facts(mask))]

    def explain(self, mask: Mask | Tensor) -> str:
        """Explain what is wrong for a mask, with evidence in numbers, a line a cause."""
        requirements = [f"mask {mask!r}", f"scale {self.softmax_scale:.4g}"]
        requirements.append(
            "no softcap" if self.wanted_softcap is None else f"cap {self.wanted_softcap}"
        )
        requirements.append("no sink" if self.wanted_sink is None else "the sink given")
        return (
            explained(classify(self._facts(mask)))
            or f"nothing is wrong: {', '.join(requirements)}, as asked"
        )

    def __str__(self) -> str:
        num_heads, n, _ = self.weights.shape
        pairs = [f"{count:,}" for count in self.allowed.sum((1, 2)).tolist()]
        pair_counts = pairs[0] if len(set(pairs)) == 1 else ", ".join(pairs)
        lost_weight = 1 - self.weights.sum(-1)[self.allowed.any(-1)]
        lost_percent = 100 * float(lost_weight.mean()) if len(lost_weight) else 0.0
        gradients = "not read: not differentiable" if self._gradients is None else "as they must be"
        if self._gradients:
            gradients = ", ".join(f"{name} {text}" for name, text in self._gradients.items())
        scales = ", ".join(dict.fromkeys(f"{x:.4g}" for x in self.scale))
        lines = [
            f"{n} tokens, {num_heads} query heads on {self._probe.k.shape[1]} KV heads",
            f"pairs attended by head: {pair_counts} of {n * n:,}",
            f"weight lost: {lost_percent:.2f} % on average",
            f"scale: {scales}, asked {self.softmax_scale:.4g}",
            f"softcap: {self.softcap and round(self.softcap, 2)}",
            f"sink: {_shown_sink(self.sink)}",
            f"gradients: {gradients}",
        ]
        return "\n".join([*lines, "", text_picture(self.allowed.any(0).numpy())])

    def svg(self, mask: Mask | Tensor | None = None) -> str:
        """A picture of all heads: attended rightly, wrongly, and missed, if a mask says which."""
        allowed = self.allowed.any(0).numpy()
        return drawn(allowed, allowed if mask is None else np.asarray(self._dense(mask).any(0)))

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
        right_heads, dense = self._probe.heads.tolist(), torch.as_tensor(self._dense(mask))
        # A cap and a sink are compared by themselves, so that weights show what else is wrong.
        scores = self._probe.scores(
            right_heads, [self.softmax_scale] * len(right_heads), self.softcap
        )
        right_weights = scores.masked_fill(~dense, -torch.inf).softmax(-1).nan_to_num()
        weights = self.weights
        sums = weights.sum(-1, keepdim=True).clamp(max=1.0)
        attended = sums[sums > 0]
        # What a sink takes differs from row to row.
        rows_differ = len(attended) and float(attended.max() - attended.min()) > self._tolerance
        if self.sink is not None or rows_differ:
            right_weights = right_weights * sums.where(sums > 0, 1.0)
        name = "the mask" if isinstance(mask, Tensor) else repr(mask)
        tables = right_weights.numpy(), (weights * self.allowed).numpy()
        facts = facts_of_attention(*tables, self._tolerance, name) | (self._gradients or {})
        facts |= self._cap_facts() | self._sink_facts()
        pairs = zip(self.value_heads, self.key_heads, right_heads, strict=True)
        foreign_heads = [
            h
            for h, (v, k, right_head) in enumerate(pairs)
            if v >= 0 and (v, k) != (right_head, right_head)
        ]
        if foreign_heads:
            h = foreign_heads[0]
            facts["foreign_heads"] = (
                f"{len(foreign_heads)} of {len(right_heads)} heads: query head {h} reads keys of "
                f"KV head {self.key_heads[h]} and values of {self.value_heads[h]}, not of "
                f"{right_heads[h]}"
            )
        return facts

    def _cap_facts(self) -> dict[str, str]:
        """Return how the cap that was read differs from the one that is wanted."""
        read_cap, wanted_cap = self.softcap, self.wanted_softcap
        if wanted_cap is None and read_cap is not None:
            return {"added_cap": f"scores are capped with about {read_cap:.3g}"}
        if wanted_cap is not None and read_cap is None:
            return {"lost_cap": f"scores are not capped, wanted {wanted_cap:g}"}
        if (
            wanted_cap is not None
            and read_cap is not None
            and abs(read_cap / wanted_cap - 1) > SAME_CAP
        ):
            return {
                "lost_cap": f"scores are capped with about {read_cap:.3g}, wanted {wanted_cap:g}"
            }
        return {}

    def _sink_facts(self) -> dict[str, str]:
        """Return how the sinks that were read differ from those that are wanted."""
        read_sinks, wanted_sinks = self.sink, self.wanted_sink
        if read_sinks is None:
            return {}
        if wanted_sinks is None:
            heads = [h for h, x in enumerate(read_sinks) if x > -math.inf]
            lost_weight = float((1 - self.weights.sum(-1)[self.allowed.any(-1)]).mean())
            count_text = (
                f"{len(heads)} of {len(read_sinks)} heads lose {100 * lost_weight:.2f} % of weight"
            )
            count_text += " to a sink of about"
            return {"added_sink": f"{count_text} {_shown_sink(read_sinks)}"} if heads else {}
        # A sink far below all scores takes nothing, and cannot be read.
        lowest_logit = math.log(self._tolerance)
        pairs = enumerate(zip(read_sinks, wanted_sinks, strict=True))
        wrong_heads = [
            h for h, (x, y) in pairs if abs(max(x, lowest_logit) - max(y, lowest_logit)) > SAME_SINK
        ]
        if not wrong_heads:
            return {}
        h = wrong_heads[0]
        count_text = f"{len(wrong_heads)} of {len(read_sinks)} heads: head {h} has"
        sink = "no sink" if read_sinks[h] == -math.inf else f"a sink of about {read_sinks[h]:.3g}"
        return {"lost_sink": f"{count_text} {sink}, wanted {wanted_sinks[h]:.3g}"}


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
            returned = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"attend returned {returned}, not the shape of q, {tuple(q.shape)}: tokens, heads, "
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
def effective_mask(  # noqa: PLR0913 - what is asked for, by name
    attend: Attend,
    *,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int = 64,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | Sequence[float] | None = None,
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
        softcap: what scores should be capped with; None: nothing.
        sink: [num_heads], the logits that should take part in the softmax; None: none.
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
    wanted_sink = None if sink is None else _logits(sink, num_heads)
    checked_softcap(softcap)
    generator = torch.Generator().manual_seed(0)
    size = math.sqrt(SPREAD / (abs(scale) * math.sqrt(head_dim)))
    shapes = (num_tokens, num_heads, head_dim), (num_tokens, num_kv_heads, head_dim)
    probe = _Probe(attend, *(size * torch.randn(shape, generator=generator) for shape in shapes))
    weights, value_heads, _ = _checked(probe)
    errors, slopes, key_heads = zip(*_fits(probe, weights, None), strict=True)
    read_softcap = _softcap(probe, [slopes, [scale] * num_heads])
    if read_softcap is not None:  # the scale of scores before they are capped
        errors, slopes, key_heads = zip(*_fits(probe, weights, read_softcap), strict=True)
    tolerance = min(max(4 * max(errors), ROUNDING**0.5), MOST_NOISE)
    scales = tuple(scale if abs(x / scale - 1) < LEAST_CHANGE else x for x in slopes)
    sinks = _sinks(probe, weights, key_heads, scales, read_softcap, tolerance)
    readings = scales, read_softcap, sinks, scale, softcap, wanted_sink, probe, tolerance
    result = EffectiveMask(weights, key_heads, tuple(value_heads), *readings)
    return replace(result, _gradients=_gradients(result))


def _checked(probe: _Probe) -> Weights:
    """The weights, if the function is one of attention."""
    generator = torch.Generator().manual_seed(2)
    v = torch.randn(probe.k.shape, generator=generator, dtype=torch.float64)
    out, second_out, out_of_zeros = map(probe.read, (v, v, 0 * v))
    if not torch.equal(out, second_out):
        raise ValueError(
            "attend gives different results for the same input; turn off dropout, or seed it "
            "inside, so that it can be read"
        )
    if torch.equal(out, out_of_zeros):
        raise ValueError(
            "the output of attend does not depend on v: two different v give the same; attend must "
            "return the weighted sums of v"
        )
    weights = probe.weights()
    expected = torch.einsum(
        "hqk,khd->qhd", weights.weights, v[:, [max(h, 0) for h in weights.sources]]
    )
    error = max(float((out - expected.flatten(1)).abs().max()), float(out_of_zeros.abs().max()))
    if error > MOST_NOISE * max(float(expected.abs().max()), 1.0):
        raise ValueError(
            "attend must be linear in v, each head a weighted sum of one KV head's values; weights "
            f"read from one-hot v do not explain its output for a random one (off by {error:.3g})"
        )
    return weights


def _fits(probe: _Probe, weights: Tensor, softcap: float | None) -> list[tuple[float, float, int]]:
    """Fit log weights by scale times scores, by query head: return how far they are off at most,
    the scale, and the KV head whose keys explain them; the right one if none does.

    Args:
        softcap: that capped the scores; None: nothing did.
    """
    best_fits, q, k = [], probe.q.double().numpy(), probe.k.double().numpy()
    table = of_seen_keys((weights * above(weights, 1e-3 * ROUNDING)).numpy())
    logs = np.log(table, out=np.full(table.shape, np.nan), where=table > 0)
    for h, (rows, right_head) in enumerate(zip(logs, probe.heads.tolist(), strict=True)):
        rows_with_keys, fits = np.isfinite(rows).sum(-1) > 1, []
        for g in range(k.shape[1]):
            scores = np.where(np.isnan(rows), np.nan, q[:, h] @ k[:, g].T)[rows_with_keys]
            slope, residual = fitted_slope(scores, rows[rows_with_keys])
            if softcap is not None and rows_with_keys.any():
                slope, residual = _fitted_scale(scores, rows[rows_with_keys], softcap, slope)
            fits.append((largest(residual), slope if rows_with_keys.any() else math.nan, g))
        best_fits.append(
            min(fits) if min(fits)[0] < MOST_NOISE < fits[right_head][0] else fits[right_head]
        )
    return best_fits


def _fitted_scale(
    scores: np.ndarray, logs: np.ndarray, cap: float, first_scale: float
) -> tuple[float, np.ndarray]:
    """Fit log weights by cap tanh(scale * score / cap) with the Gauss-Newton method.

    Returns:
        the scale, and the residual.
    """
    scale = first_scale
    for _ in range(FIT_STEPS):
        capped = np.tanh(scale * scores / cap)
        residual = centred(logs - cap * capped)
        slope = centred(scores * (1 - capped**2))
        scale += float(np.nansum(residual * slope) / max(np.nansum(slope**2), 1e-300))
    return scale, centred(logs - cap * np.tanh(scale * scores / cap))


def _softcap(probe: _Probe, scales: Sequence[Sequence[float]]) -> float | None:
    """The cap that explains weights of large scores: score = cap tanh(score / cap).

    Args:
        scales: choices of a scale by query head: a small cap bends even small scores.
    """
    wide_probe = probe._replace(q=probe.q * (WIDE / SPREAD))
    table = of_seen_keys(wide_probe.weights().weights.numpy())
    best: tuple[float, float] | None = None
    for choice in scales:
        scores = wide_probe.scores(wide_probe.heads.tolist(), choice).numpy()
        visible = (table > LEAST_VISIBLE) & np.isfinite(scores)
        rows = visible.sum(-1) > 2
        logs = np.log(table, out=np.full(table.shape, np.nan), where=visible)[rows]
        x, y = np.where(visible[rows], scores[rows], np.nan), logs
        cap, residual = fitted_cap(x, y, np.geomspace(0.05, 300, 600))
        uncapped = np.nansum(centred(y - x) ** 2)
        is_capped = uncapped > MOST_NOISE**2 * visible[rows].sum() and residual < uncapped / 100
        if is_capped and (best is None or residual < best[1]):
            best = cap, residual
    return None if best is None else best[0]


def _sinks(
    probe: _Probe,
    weights: Tensor,
    key_heads: Sequence[int],
    scales: Sequence[float],
    softcap: float | None,
    tolerance: float,
) -> tuple[float, ...] | None:
    """The logit by head that takes what is missing of each row's weight; None if no number does.

    sum of weights = Z / (Z + exp(sink)), where Z is the sum of exp(scores) of attended keys.
    """
    scores = probe.scores(key_heads, [0.0 if math.isnan(x) else x for x in scales], softcap)
    allowed = above(weights, 1e-3 * ROUNDING)
    logits: list[float] = []
    for head, mask, sums in zip(scores, allowed, weights.sum(-1), strict=True):
        rows = mask.any(-1)
        lost_weight = (1 - sums[rows]).clamp(min=0)
        if not len(lost_weight) or float(lost_weight.max()) <= tolerance:
            logits.append(-math.inf)
            continue
        total = head[rows].masked_fill(~mask[rows], -torch.inf).logsumexp(-1)
        row_logits = (lost_weight / sums[rows].clamp(min=1e-300)).log() + total
        if float(row_logits.max() - row_logits.min()) > SAME_SINK:
            return None
        logits.append(float(row_logits.mean()))
    return tuple(logits)


def _logits(sink: Tensor | Sequence[float], num_heads: int) -> tuple[float, ...]:
    """Sinks that are wanted, by head."""
    try:
        array = as_array("sink", sink.detach() if isinstance(sink, Tensor) else sink)
        logits = torch.as_tensor(array, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"sink ({shown(sink)}) must be one logit for each of num_heads ({num_heads}) heads"
        ) from error
    if logits.shape != (num_heads,) or logits.isnan().any():
        raise ValueError(
            f"sink {tuple(logits.shape)} must be one logit for each of num_heads ({num_heads}) "
            "heads"
        )
    return tuple(logits.tolist())


def _shown_sink(sink: Sequence[float] | None) -> str:
    if sink is None:
        return "weight is lost, but not to one number a head"
    texts = dict.fromkeys("none" if x == -math.inf else f"{x:.3g}" for x in sink)
    return ", ".join(texts)


def _gradients(result: EffectiveMask) -> dict[str, str] | None:
    """Return what is wrong with the gradients, by one backward pass; None where there is none."""
    generator, probe = torch.Generator().manual_seed(1), result._probe
    v = torch.randn(probe.k.shape, generator=generator)
    n, num_heads, head_dim = probe.q.shape
    tokens, dout = torch.arange(n), torch.zeros_like(probe.q)
    # One-hot rows: a column of dv is the weights of the queries t with t mod head_dim there.
    dout[tokens, :, tokens % head_dim] = 1.0 + 0.5 * torch.randn(n, num_heads, generator=generator)
    leaves = [x.clone().requires_grad_() for x in (probe.q, probe.k, v)]
    with torch.enable_grad():
        try:  # it ran without gradients; if it fails with them, it has a forward pass alone
            out = probe.call(*leaves)
            gradients = torch.autograd.grad(
                out, leaves, dout.to(out), allow_unused=True, materialize_grads=True
            )
        except (RuntimeError, ValueError):
            return None
    weights_of_seen_keys = torch.from_numpy(of_seen_keys(result.weights.numpy()))
    scales = [result.softmax_scale if math.isnan(x) else x for x in result.scale]

    def rebuilt(q: Tensor, k: Tensor, v: Tensor, shards: Tensor | None) -> Tensor:
        scores = probe._replace(q=q, k=k).scores(result.key_heads, scales, result.softcap)
        p = (
            softmax_of_read(weights_of_seen_keys, scores, shards)
            + result.weights
            - weights_of_seen_keys
        )
        return torch.einsum("hqk,khd->qhd", p, v[:, [max(h, 0) for h in result.value_heads]])

    gradients_by_name = {
        name: x.double().cpu() for name, x in zip(("dq", "dk", "dv"), gradients, strict=True)
    }
    operands = [x.detach().double() for x in leaves]
    return facts_of_gradients(
        rebuilt, operands, dout.double(), gradients_by_name, 4 * result._tolerance
    )

"""From two runs that differ to facts: which layer deviates first, and what about it."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tilewise.transport.processes import RankError
from tilewise.verification.attention_path import PathPart, find_path, q_and_k
from tilewise.verification.causes import classify
from tilewise.verification.comparison import Comparison, loss_difference, rows_of, step_errors
from tilewise.verification.gradients import difference, multiple
from tilewise.verification.ranks import RankRunner
from tilewise.verification.records import (
    ModelRun,
    OutputSetting,
    first_rows,
    rows_of_one,
    run_whole,
)
from tilewise.verification.tables import facts_of_masks, facts_of_weights
from tilewise.verification.weights import UnreadableError, Weights, read_weights

LEAST_WEIGHT = 1e-30  # beside the row's largest: a model may have any scores
UNKNOWN = MappingProxyType({"unread": True})
BORDERS = 0.5  # of the rows, at most, may have another label if the loss is right
UNEVEN = 0.1  # of the largest: ranks' gradients differ in scale


class Diagnosis(NamedTuple):
    """What was found.

    Attributes:
        facts: what causes.classify reads; empty if nothing deviates.
        layer: None: the loss, or all gradients.
        parameters: error of each parameter's gradient, as a multiple of what rounding explains.
        allowed: (split, unsplit), what any head of the layer attends to.
    """

    facts: Mapping[str, Any]
    layer: str | None
    parameters: dict[str, float]
    allowed: tuple[Tensor, Tensor] | None = None


class Probes:
    """Further runs of both models, with columns of a module's output set."""

    def __init__(
        self, model: nn.Module, inputs: Mapping[str, Any], world: RankRunner, found: Comparison
    ):
        self.model, self.inputs, self.world, self.found = model, inputs, world, found
        self.dtype: torch.dtype | None = None  # in which both run; None: the model's own
        self._template = torch.empty(0, 0)

    def whole(self, setting: OutputSetting) -> Tensor:
        reading = run_whole(self.model, self.inputs, ModelRun(setting, dtype=self.dtype)).reading
        rows = None if reading is None else rows_of_one(reading, self.found.num_tokens)
        if rows is None or self.world.seconds_left < 0:
            raise UnreadableError("the unsplit model shows nothing there")
        self._template = rows
        return rows

    def split(self, setting: OutputSetting) -> Tensor:
        if self.world.seconds_left < 0:
            raise UnreadableError("the time is over")
        positions, n = self.found.positions, self.found.num_tokens
        try:
            records = self.world.run(
                [ModelRun(setting, own, dtype=self.dtype) for own in positions]
            )
        except RankError as error:
            raise UnreadableError("the split model does not run so") from error
        read = [record.reading for record in records if record.reading is not None]
        parts = [x[:1] if x.ndim > 2 and x.shape[0] != n else x for x in read]
        rows = rows_of(self._template, parts, positions[: len(parts)], n)
        if rows is None or len(parts) < len(records):
            raise UnreadableError("the split model shows nothing there")
        return torch.zeros_like(self._template).index_copy(0, rows.positions, rows.got)

    def around_projection(self, name: str) -> str:
        """A projection is never at fault, what it gets is; so the module around it, else itself."""
        module = dict(self.model.named_modules()).get(name)
        return name.rpartition(".")[0] or name if isinstance(module, nn.Linear | None) else name


def diagnose(found: Comparison, probes: Probes) -> Diagnosis:
    """Forward first, then the loss, then gradients: what comes first explains what follows."""
    loss_facts = _loss(found)
    parameters, unreduced, common = _parameters(found)
    layer = found.forward_layer()
    if layer is not None:
        layer = probes.around_projection(layer)
        facts, allowed = _forward(found, probes, layer)
        return Diagnosis(facts or UNKNOWN, layer, parameters, allowed)
    if "nan_loss" in loss_facts:
        return Diagnosis(loss_facts, None, parameters)
    scales, facts = _labels(found, not loss_facts)
    facts |= loss_facts
    wrong = [name for name, error in parameters.items() if error > 1]
    if facts or not wrong:
        return Diagnosis(facts, None, parameters)
    if max(scales) - min(scales) > UNEVEN * max(map(abs, scales)):
        text = f"gradients are {_listed(scales)} times what is right on the ranks, before any layer"
        return Diagnosis({"gradient_ratio": text}, None, parameters)
    layer = _gradient_layer(found, scales)
    if layer is not None:
        layer = probes.around_projection(layer)
        facts = UNKNOWN
        with suppress(UnreadableError):
            facts = _backward(found, probes, layer, scales)
        return Diagnosis(facts, layer, parameters)
    if common is not None:
        text = f"all gradients are {common:.4g} times what is right, on {len(found.ranks)} ranks"
        return Diagnosis({"gradient_ratio": text}, None, parameters)
    facts = {"unreduced": unreduced} if unreduced else UNKNOWN
    return Diagnosis(facts, wrong[0].rpartition(".")[0], parameters)


def _loss(found: Comparison) -> dict[str, Any]:
    want, known = found.whole.loss, [r.loss for r in found.ranks if r.loss is not None]
    broken = [rank for rank, x in enumerate(known) if not math.isfinite(x)]
    if want is None or broken:
        return {"nan_loss": ", ".join(map(str, broken))} if broken else {}
    off = [abs(r.loss - want) for r in found.noisy if r.loss is not None]
    text = loss_difference(found.whole, found.ranks, 4 * max(off) + 2 * found.eps * abs(want))
    if text is None:
        return {}
    n, times = len(known), sum(known) / want if want else float("inf")
    close = any(abs(times / x - 1) < 0.02 for x in (n, 1 / n, n * n))
    return {"loss_total": text, "loss_times": close}


def _labels(found: Comparison, loss_is_right: bool) -> tuple[list[float], dict[str, Any]]:
    """By how much each rank's gradients are scaled, from the last rows that have one.

    The second is what is wrong about labels or the loss.
    """
    n = len(found.ranks)
    for name in reversed(found.whole.outputs):
        rows = found.rows("grads", name)
        if rows is not None and len(torch.unique(rows.positions)) > 1:
            break
    else:
        return [1.0] * n, {}
    tolerance = max(found.tolerances("grads", name)[0], 1e-3)
    ratios = [rows.where(rows.ranks == rank).ratios().nanmedian() for rank in range(n)]
    scales = [float(x.nan_to_num(nan=1.0)) for x in ratios]
    off = rows.scaled(scales).errors() > (max(tolerance, 0.3) if loss_is_right else tolerance)
    silent = (rows.want.norm(dim=1) == 0) & (rows.got.norm(dim=1) > 0)
    bad = sorted(rows.positions[off | silent].tolist())
    if bad and len(bad) <= (BORDERS if loss_is_right else 1) * len(rows.want):
        text = (
            f"{len(bad)} of {len(rows.want)} rows have the gradient of another label, at positions "
            f"{', '.join(map(str, bad[:6]))}{', ...' if len(bad) > 6 else ''}"
        )
        return scales, {"border_rows": text}
    return scales, {} if loss_is_right else {"loss_ratio": _listed(scales)}


def _listed(numbers: list[float]) -> str:
    return ", ".join(f"{x:.4g}" for x in numbers)


def _parameters(found: Comparison) -> tuple[dict[str, float], str | None, float | None]:
    """Errors of parameters' gradients, as sums over ranks or on each rank, as most of them are.

    Also a text on those that are not reduced where others are, and a number that all are
    multiplied with.
    """
    wanted, records = found.whole.parameters, found.ranks
    if not any(record.parameters for record in records):
        return {}, None, None
    limits = {}
    least = max(float(x.norm()) for x in wanted.values())
    for name, x in wanted.items():
        noisy = [r.parameters[name] for r in found.noisy if name in r.parameters]
        limits[name] = 8 * max(found.eps * least + 1e-300, *(float((x - y).norm()) for y in noisy))
    errors = step_errors(wanted, [record.parameters for record in records], limits)
    reduced = sum(x <= 1 for x in errors.each.values()) > sum(x <= 1 for x in errors.total.values())
    chosen = errors.each if reduced else errors.total
    wrong = [name for name, x in chosen.items() if x > 1]
    text = common = None
    if reduced and wrong and all(errors.total[name] <= 1 for name in wrong):
        text = (
            f"{', '.join(wrong[:3])}: each rank has its share only, while the gradients of "
            f"{len(wanted) - len(wrong)} other parameters are summed over ranks"
        )
    if len(wrong) > len(wanted) / 2:
        ratios = [x for x in (multiple(wanted[n], errors.sums[n], 0.02) for n in wrong) if x]
        same = len(ratios) > len(wrong) / 2
        if same and max(ratios) - min(ratios) <= 0.02 * abs(max(ratios)):
            common = ratios[0]
    return chosen, text, common


def _forward(
    found: Comparison, probes: Probes, layer: str
) -> tuple[dict[str, Any], tuple[Tensor, Tensor] | None]:
    """What is wrong with a module whose output deviates, and what it attends to if that shows."""
    for key, rows in found.other_inputs(layer):
        wrong = (rows.want != rows.got).any(1)
        row = int(wrong.nonzero()[0])
        text = (
            f"{int(wrong.sum())} of {len(wrong)} rows get another value of {layer}'s input {key}: "
            f"rank {int(rows.ranks[row])} gives {int(rows.got[row][0])} to the token at "
            f"{int(rows.positions[row])}, not {int(rows.want[row][0])}"
        )
        return {"wrong_positions": text}, None
    again = run_whole(probes.model, probes.inputs, ModelRun(seed=1)).outputs.get(layer)
    if again is not None and not torch.equal(again, found.whole.outputs[layer]):
        draws = "another seed changes the unsplit model's output too; compare with dropout off"
        return {"random_layer": layer, "draws": draws}, None
    facts: dict[str, Any] = {}
    # What a coarse dtype hides shows in fp32, if the split runs in it and errs there too.
    for dtype in (torch.float32, None) if found.eps > torch.finfo(torch.float32).eps else (None,):
        probes.dtype = dtype
        with suppress(UnreadableError):
            path = find_path(layer, found.whole, probes.whole, found.num_tokens)
            if path is None:
                break
            reader = path.v.reader(probes.split, path.read)
            got = read_weights(reader, found.num_tokens, path.heads)
            eps = found.eps if dtype is None else torch.finfo(dtype).eps
            facts, allowed = _weights(found, path.weights, got, eps)
            if classify(facts):
                return facts, allowed
    rows = found.rows("outputs", layer)
    if not facts and rows is not None and _runs_alone(found, probes, layer):
        count = int((rows.errors() > found.tolerances("outputs", layer)[0]).sum())
        text = (
            f"{count} of {len(rows.want)} rows of {layer} deviate: it is no attention, and runs on "
            "each rank's rows as if they were the sequence"
        )
        return {"mixes_rows": text}, None
    return facts, None


def _runs_alone(found: Comparison, probes: Probes, layer: str) -> bool:
    """Whether the unsplit module makes what a rank got of that rank's rows alone."""
    module, record = dict(probes.model.named_modules())[layer], found.ranks[-1]
    kind = next((p.dtype for p in module.parameters()), torch.float64)
    inputs = record.inputs[layer].items()
    given = {key: x.to(kind) if x.is_floating_point() else x for key, x in inputs}
    try:
        places = [given.pop(str(i)) for i in range(sum(key.isdigit() for key in given))]
        with torch.no_grad():
            out = first_rows(copy.deepcopy(module)(*places, **given))
    except Exception:  # whatever a module raises that is called without the rest of its arguments
        return False
    got = record.outputs[layer]
    if out is None or out.shape != got.shape:
        return False
    limit = found.tolerances("outputs", layer)[0]
    return float((out.double().cpu() - got).norm()) <= limit * float(got.norm())


def _weights(
    found: Comparison, want: Weights, got: Weights, eps: float
) -> tuple[dict[str, Any], tuple[Tensor, Tensor]]:
    blocks = np.full(found.num_tokens, -1)
    for own in (x[x >= 0].numpy() for x in found.positions):
        blocks[own] = blocks.max() + 1 + np.cumsum(np.diff(own, prepend=own[:1] - 1) != 1)
    several = blocks if blocks.max() < found.num_tokens / 2 else None
    tables = [x.allowed(LEAST_WEIGHT) & found.counted[:, None] for x in (want, got)]
    facts = facts_of_masks(tables[0].numpy(), tables[1].numpy(), "the unsplit model", several)
    foreign = [h for h, (a, b) in enumerate(zip(want.sources, got.sources, strict=True)) if a != b]
    if foreign and not facts.get("empty_heads"):
        h = foreign[0]
        facts["foreign_heads"] = (
            f"{len(foreign)} of {len(want.sources)} heads: head {h} reads the values in columns "
            f"{got.sources[h][0]}.., not {want.sources[h][0]}.."
        )
    right, read = (
        torch.where(table, x.weights, 0).numpy()
        for table, x in zip(tables, (want, got), strict=True)
    )
    values = facts_of_weights(right, read, max(eps**0.5, 1e-3), several)
    if not facts["differing"] and "values_differ" in values:
        values["moved"] = values.pop("values_differ")
    return facts | values, (tables[1].any(0), tables[0].any(0))


def _gradient_layer(found: Comparison, scales: list[float]) -> str | None:
    """The module between outputs whose gradient is right and those, before, whose is not."""

    def wrong(name: str) -> bool:
        rows = found.rows("grads", name)
        limit = found.tolerances("grads", name)[0] if rows else 0
        return rows is not None and rows.scaled(scales).sizes()[0] > limit

    for name in reversed(found.whole.outputs):
        if wrong(name):
            while "." in name:
                parent = name.rpartition(".")[0]
                if parent in found.whole.grads and not wrong(parent):
                    return parent
                if parent not in found.whole.grads and parent in found.whole.outputs:
                    break
                name = parent
            return name
    return None


def _backward(
    found: Comparison, probes: Probes, layer: str, scales: list[float]
) -> Mapping[str, Any]:
    """Which gradients of a layer's attention are wrong."""
    path = find_path(layer, found.whole, probes.whole, found.num_tokens)
    if path is None:
        return UNKNOWN
    q, k = q_and_k(path, probes.whole)
    parts = {"dq": q, "dk": k, "dv": path.v}
    read = {name: part and _gradient_text(found, part, scales) for name, part in parts.items()}
    texts = {name: text for name, text in read.items() if text}
    if set(texts) == {"dq", "dk"} and not any("times" in text for text in texts.values()):
        return {"lse_lost": f"dv is right, dq is {texts['dq']} and dk {texts['dk']}"}
    return texts or UNKNOWN


def _gradient_text(found: Comparison, part: PathPart, scales: list[float]) -> str | None:
    rows = found.rows("grads", part.module)
    if rows is None:
        return None
    rows, columns = rows.scaled(scales), list(part.columns)
    limit = max(found.tolerances("grads", part.module)[0], 1e-3)
    return difference(rows.want[:, columns], rows.got[:, columns], limit)

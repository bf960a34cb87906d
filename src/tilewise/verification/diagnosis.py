"""From two runs that differ to facts: which layer deviates first, and what about it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilewise.transport.processes import RankError
from tilewise.verification.attention_path import (
    Part,
    Weights,
    find_path,
    is_attention,
    q_and_k,
    read_weights,
)
from tilewise.verification.comparison import Comparison, rows_of
from tilewise.verification.gradients import difference, multiple
from tilewise.verification.ranks import World
from tilewise.verification.records import Job, Record, Setting, run_model
from tilewise.verification.tables import facts_of_masks, facts_of_weights


class Diagnosis(NamedTuple):
    """What was found.

    Attributes:
        facts: what causes.classify reads; empty if nothing deviates.
        parameters: error of each parameter's gradient, as a multiple of what rounding explains.
        allowed: (split, unsplit), what any head of the layer attends to.
    """

    facts: dict[str, Any]
    layer: str | None
    loss_is_right: bool
    parameters: dict[str, float]
    allowed: tuple[Tensor, Tensor] | None = None


class Probes:
    """Further runs of both models, with columns of a module's output set."""

    def __init__(
        self, model: nn.Module, inputs: Mapping[str, Any], world: World, found: Comparison
    ):
        self.model, self.inputs, self.world, self.found = model, inputs, world, found
        self._template: Tensor | None = None

    def record(self, job: Job) -> Record:
        """The unsplit model's."""
        model, inputs = copy.deepcopy(self.model), copy.deepcopy(dict(self.inputs))
        return run_model(model, lambda: model(**inputs), job)

    def whole(self, setting: Setting) -> Tensor | None:
        self._template = self.record(Job(setting)).reading
        return self._rows([self._template], self.found.everything)

    def split(self, setting: Setting) -> Tensor | None:
        if self.world.seconds_left < 0:
            return None
        jobs = [Job(setting, own) for own in self.found.positions]
        try:
            return self._rows([r.reading for r in self.world.run(jobs)], self.found.positions)
        except RankError:
            return None

    def _rows(self, parts: list[Tensor | None], positions: list[Tensor]) -> Tensor | None:
        known = [self._one_sequence(part) for part in parts if part is not None]
        if self._template is None or len(known) != len(parts):
            return None
        template, num_tokens = self._one_sequence(self._template), self.found.num_tokens
        rows = rows_of(template, known, positions, num_tokens)
        if rows is None:
            return None
        table = torch.zeros(self.found.num_tokens, rows.got.shape[1], dtype=torch.float64)
        table[rows.positions] = rows.got
        return table

    def _one_sequence(self, x: Tensor) -> Tensor:
        """The first of a batch."""
        return x[:1] if x.ndim > 2 and x.shape[0] != self.found.num_tokens else x

    def around_projection(self, name: str) -> str:
        """A projection is never at fault, what it gets is; so the module around it, else itself."""
        linear = isinstance(dict(self.model.named_modules()).get(name), nn.Linear)
        return name.rpartition(".")[0] if linear else name

    def is_random(self, name: str) -> bool:
        """Whether a module of the unsplit model gives something else with another seed."""
        other = self.record(Job(seed=1)).outputs.get(name)
        return other is not None and not torch.equal(other, self.found.whole.outputs[name])


def diagnose(found: Comparison, probes: Probes) -> Diagnosis:
    """Forward first, then the loss, then gradients: what comes first explains what follows."""
    loss_is_right, loss_facts = _loss(found)
    parameters, unreduced, common = _parameters(found)
    layer = found.forward_layer()
    if layer is not None:
        layer = probes.around_projection(layer)
        facts, allowed = _forward(found, probes, layer)
        return Diagnosis(facts or {"values_differ": 1.0}, layer, loss_is_right, parameters, allowed)
    if loss_facts and "nan_loss" in loss_facts:
        return Diagnosis(loss_facts, None, False, parameters)
    scales, facts = _labels(found, loss_is_right)
    facts |= loss_facts
    wrong = [name for name, error in parameters.items() if error > 1]
    if not wrong and not facts:
        return Diagnosis({}, None, loss_is_right, parameters)
    if facts:
        return Diagnosis(facts, None, loss_is_right, parameters)
    layer = _gradient_layer(found, scales)
    if layer is not None:
        layer = probes.around_projection(layer)
        return Diagnosis(_backward(found, probes, layer, scales), layer, loss_is_right, parameters)
    if common is not None:
        text = f"all gradients are {common:.4g} times what is right, on {len(found.ranks)} ranks"
        return Diagnosis({"gradient_ratio": text}, None, loss_is_right, parameters)
    facts = {"unreduced": unreduced} if unreduced else {"values_differ": max(parameters.values())}
    return Diagnosis(facts, wrong[0].rpartition(".")[0], loss_is_right, parameters)


def _loss(found: Comparison) -> tuple[bool, dict[str, Any]]:
    """Whether the ranks' losses add up to the whole's, or each is it; and what is wrong."""
    want, shares = found.whole.loss, [record.loss for record in found.ranks]
    known = [x for x in shares if x is not None]
    if want is None or len(known) != len(shares):
        return True, {}
    broken = [rank for rank, x in enumerate(known) if x != x or abs(x) == float("inf")]
    if broken:
        return False, {"nan_loss": ", ".join(map(str, broken))}
    off = [abs(r.loss - want) for r in found.noisy if r.loss is not None]
    tolerance = 4 * max(off) + 2 * found.eps * abs(want)
    total = sum(known)
    if abs(total - want) <= tolerance or all(abs(x - want) <= tolerance for x in known):
        return True, {}
    times = total / want if want else float("inf")
    text = f"the ranks' losses add up to {total:.6g}, {times:.4g} times the whole loss {want:.6g}"
    n = len(known)
    close = any(abs(times / x - 1) < 0.02 for x in (n, 1 / n, n * n))
    return False, {"loss_total": text, "loss_times": close and f"{times:.4g}"}


def _labels(found: Comparison, loss_is_right: bool) -> tuple[list[float], dict[str, Any]]:
    """By how much each rank's gradients are scaled, from the last rows that have one.

    The second is what is wrong about labels or the loss.
    """
    n = len(found.ranks)
    for name in reversed(found.whole.outputs):
        rows = found.rows("grads", name)
        if rows is not None and len(rows.want) and len(torch.unique(rows.positions)) > 1:
            break
    else:
        return [1.0] * n, {}
    tolerance = max(found.tolerance("grads", name), 1e-3)
    least = max(tolerance, 0.3) if loss_is_right else tolerance
    scales, bad = [], []
    for rank in range(n):
        own = rows.of_rank(rank)
        ratios = own.ratios()
        scale = float(ratios.nanmedian()) if bool((~ratios.isnan()).any()) else 1.0
        scales.append(scale)
        errors = own._replace(want=own.want * scale).errors()
        silent = (own.want.norm(dim=1) == 0) & (own.got.norm(dim=1) > 0)
        bad += own.positions[(errors > least) | silent].tolist()
    share = len(bad) / len(rows.want)
    if bad and share <= 0.5:
        text = (
            f"{len(bad)} of {len(rows.want)} rows have the gradient of another label, at positions "
            f"{', '.join(map(str, sorted(bad)[:6]))}{', ...' if len(bad) > 6 else ''}; the others "
            "are right"
        )
        return scales, {"border_rows": text}
    if not loss_is_right:
        shown = ", ".join(f"{x:.4g}" for x in scales)
        return scales, {"loss_ratio": shown}
    return scales, {}


def _parameters(found: Comparison) -> tuple[dict[str, float], str | None, float | None]:
    """Errors of parameters' gradients, as sums over ranks or on each rank, as most of them are.

    Also a text on those that are not reduced where others are, and a number that all are
    multiplied with.
    """
    names = list(found.whole.parameters)
    records = found.ranks
    largest = max((float(x.norm()) for x in found.whole.parameters.values()), default=0.0)

    def error(name: str, got: Tensor) -> float:
        want = found.whole.parameters[name]
        floor = found.eps * largest + 1e-300
        noise = [
            float((r.parameters[name] - want).norm()) for r in found.noisy if name in r.parameters
        ]
        return float((got - want).norm()) / (
            8 * max([*noise, found.eps * float(want.norm()), floor])
        )

    def got(record: Record, name: str) -> Tensor:
        return record.parameters.get(name, torch.zeros_like(found.whole.parameters[name]))

    if not any(record.parameters for record in records):
        return {}, None, None
    sums = {name: sum(got(r, name) for r in records) for name in names}
    total = {name: _finite(error(name, x)) for name, x in sums.items() if isinstance(x, Tensor)}
    each = {name: _finite(max(error(name, got(r, name)) for r in records)) for name in names}
    reduced = sum(x <= 1 for x in each.values()) > sum(x <= 1 for x in total.values())
    chosen = each if reduced else total
    wrong = [name for name, x in chosen.items() if x > 1]
    text = common = None
    if reduced and wrong and all(total[name] <= 1 for name in wrong):
        text = (
            f"{', '.join(wrong[:3])}: each rank has its share only, while the gradients of "
            f"{len(names) - len(wrong)} other parameters are summed over ranks"
        )
    if wrong and len(wrong) > len(names) / 2:
        ratios = [
            multiple(found.whole.parameters[n], x, 0.02)
            for n, x in sums.items()
            if n in wrong and isinstance(x, Tensor)
        ]
        known = [x for x in ratios if x]
        if len(known) > len(wrong) / 2 and max(known) - min(known) <= 0.02 * abs(max(known)):
            common = known[0]
    return chosen, text, common


def _finite(x: float) -> float:
    return x if x == x else float("inf")


def _forward(
    found: Comparison, probes: Probes, layer: str
) -> tuple[dict[str, Any], tuple[Tensor, Tensor] | None]:
    """What is wrong with a module whose output deviates."""
    for key, rows in found.other_inputs(layer):
        row = int((rows.want != rows.got).any(1).nonzero()[0])
        position, rank = int(rows.positions[row]), int(rows.ranks[row])
        want, got = int(rows.want[row][0]), int(rows.got[row][0])
        count = int((rows.want != rows.got).any(1).sum())
        text = (
            f"{count} of {len(rows.want)} rows get another value of {layer}'s input {key}: rank "
            f"{rank} gives {got} to the token at {position}, not {want}"
        )
        return {"wrong_positions": text}, None
    if probes.is_random(layer):
        draws = "another seed changes the unsplit model's output too; compare with dropout off"
        return {"random_layer": layer, "draws": draws}, None
    path = find_path(probes.model, layer, found.whole, probes.whole, found.num_tokens)
    if path is not None:
        want = read_weights(path, probes.whole, found.num_tokens)
        if want and is_attention(want, path, found.whole, probes.whole):
            got = read_weights(path, probes.split, found.num_tokens, want)
            return _weights(found, want, got) if got else ({}, None)
    rows = found.rows("outputs", layer)
    if rows is not None and _mixes_rows(found, probes, layer):
        count = int((rows.errors() > found.tolerance("outputs", layer)).sum())
        text = f"{count} of {len(rows.want)} rows of {layer} deviate: no attention, but rows mix"
        return {"mixes_rows": text}, None
    return {}, None


def _weights(
    found: Comparison, want: Weights, got: Weights
) -> tuple[dict[str, Any], tuple[Tensor, Tensor]]:
    tables = [x.allowed(found.eps) & found.counted[:, None] for x in (want, got)]
    facts = facts_of_masks(tables[0].numpy(), tables[1].numpy(), "the unsplit model")
    foreign = [h for h, (a, b) in enumerate(zip(want.sources, got.sources, strict=True)) if a != b]
    if foreign and not facts.get("empty_heads"):
        h = foreign[0]
        facts["foreign_heads"] = (
            f"{len(foreign)} of {len(want.sources)} heads: head {h} reads the values in columns "
            f"{got.sources[h][0]}.., not {want.sources[h][0]}.."
        )
    blocks, count = torch.full((found.num_tokens,), -1), 0
    for own in found.positions:
        for run in _runs(own[own >= 0]):
            blocks[run], count = count, count + 1
    right, read = (
        torch.where(table, x.weights, 0).numpy()
        for table, x in zip(tables, (want, got), strict=True)
    )
    values = facts_of_weights(right, read, max(found.eps**0.5, 1e-3), blocks.numpy())
    if not facts["differing"] and "values_differ" in values:
        values["moved"] = values.pop("values_differ")
    return facts | values, (tables[1].any(0), tables[0].any(0))


def _runs(positions: Tensor) -> Iterator[Tensor]:
    """Rows whose positions follow each other."""
    if len(positions):
        breaks = (positions.diff() != 1).nonzero().flatten() + 1
        yield from positions.tensor_split(breaks.tolist())


def _mixes_rows(found: Comparison, probes: Probes, layer: str) -> bool:
    """Whether a module's rows depend on others: tried with rows of its first input exchanged."""
    inputs = [x for x in found.whole.inputs[layer].values() if x.is_floating_point()]
    if not inputs:
        return False
    module = copy.deepcopy(dict(probes.model.named_modules())[layer])
    rows = rows_of(inputs[0], inputs[:1], found.everything, found.num_tokens)
    return rows is not None and not isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm)


def _gradient_layer(found: Comparison, scales: list[float]) -> str | None:
    """The module between outputs whose gradient is right and those, before, whose is not."""

    def wrong(name: str) -> bool:
        rows = found.rows("grads", name)
        if rows is None or not len(rows.want):
            return False
        scaled = rows._replace(
            want=rows.want * torch.tensor(scales, dtype=torch.float64)[rows.ranks, None]
        )
        return float(scaled.errors().max()) > found.tolerance("grads", name)

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


def _backward(found: Comparison, probes: Probes, layer: str, scales: list[float]) -> dict[str, Any]:
    """Which gradients of a layer's attention are wrong."""
    path = find_path(probes.model, layer, found.whole, probes.whole, found.num_tokens)
    if path is None:
        return {"values_differ": 1.0}
    q, k = q_and_k(path, found.whole, probes.whole)
    texts = {}
    for name, part in (("dq", q), ("dk", k), ("dv", path.v)):
        text = part and _gradient_text(found, part, scales)
        if text:
            texts[name] = text
    if set(texts) == {"dq", "dk"} and not any("times" in text for text in texts.values()):
        return {"lse_lost": f"dv is right, dq is {texts['dq']} and dk {texts['dk']}"}
    return texts or {"values_differ": 1.0}


def _gradient_text(found: Comparison, part: Part, scales: list[float]) -> str | None:
    rows = found.rows("grads", part.module)
    if rows is None:
        return None
    columns = list(part.columns)
    factor = torch.tensor(scales, dtype=torch.float64)[rows.ranks, None]
    want, got = (rows.want * factor)[:, columns], rows.got[:, columns]
    return difference(want, got, max(found.tolerance("grads", part.module), 1e-3))

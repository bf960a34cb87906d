"""Diagnosis of two runs that differ: which layer deviates first, and the facts about it."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tilewise.transport.processes import RankError
from tilewise.verification.attention_path import (
    Path,
    PathPart,
    Run,
    find_path,
    read_by,
)
from tilewise.verification.causes import Facts, classify
from tilewise.verification.comparison import (
    Comparison,
    MatchedRows,
    loss_difference,
    rows_of,
    step_errors,
)
from tilewise.verification.gradients import difference, multiple
from tilewise.verification.layer_order import LayerOrder
from tilewise.verification.ranks import RankRunner
from tilewise.verification.records import (
    LeafSetting,
    ModelRun,
    OutputSetting,
    first_rows,
    rows_of_one,
    run_whole,
)
from tilewise.verification.row_probe import RowProbe
from tilewise.verification.tables import facts_of_attention, some
from tilewise.verification.weights import UnreadableError, above, read_weights

LEAST_WEIGHT = 1e-30  # beside the row's largest: a model may have any scores
UNKNOWN: Facts = MappingProxyType({"unread": True})
BORDERS = 0.5  # of the rows, at most, may have another label if the loss is right
SAME_SCALE = 0.02  # of gradients
LEAST_CLASSES = 8  # numbers of a row that may be the gradient of logits
MOSTLY_TWO = 0.98  # of a row's change that lies in two numbers, where a label is another one
MOSTLY_LABELS = 0.9  # of the rows that differ
UNEVEN = 0.1  # of the largest: ranks' gradients differ in scale


class Diagnosis(NamedTuple):
    """Result of a diagnosis.

    Attributes:
        facts: what causes.classify reads; empty if nothing deviates.
        layer: None: the loss, or all gradients.
        allowed: (split, unsplit), what any head of the layer attends to.
    """

    facts: Facts
    layer: str | None = None
    allowed: tuple[Tensor, Tensor] | None = None


@dataclass
class Examination:
    """A comparison, and the two models to run again."""

    model: nn.Module
    inputs: Mapping[str, Any]
    world: RankRunner
    found: Comparison
    scales: list[float] = field(default_factory=list)  # of each rank's gradients

    def diagnosis(self) -> Diagnosis:
        """Forward first, then the loss, then gradients: what comes first explains what follows."""
        stages = self.of_outputs, self.of_loss, self.of_layers, self.of_parameters
        return next(filter(None, (stage() for stage in stages)))

    def of_outputs(self) -> Diagnosis | None:
        """The first module whose output deviates although its inputs do not.

        A module that gets its rows in an order of its own, as an expert does, is no evidence: the
        module around it has to deviate too.
        """
        found = self.found
        names = [name for name in found.whole.outputs if found.error("output", name) > 1]
        names = [name for name in names if found.around(name) in (None, *names)]
        if not names:
            return None
        first = next((name for name in names if self._inputs_are_right(name)), names[0])
        layer = self._around_projection(first)
        for look in (self._other_inputs, self._draws, self._foreign_inputs):
            if facts := look(layer):
                return Diagnosis(facts, layer)
        facts, allowed = self._attention(layer, first)
        if not facts and self._inputs_are_right(layer):
            with suppress(UnreadableError):
                facts = LayerOrder(self, layer).forward()
            facts = {**facts, **self._runs_alone(layer)}
        return Diagnosis(facts or UNKNOWN, layer, allowed)

    def of_loss(self) -> Diagnosis | None:
        """Return what is wrong about the loss or labels, if it is; or nothing at all."""
        found, facts = self.found, dict[str, Any]()
        want, known = found.whole.loss or 0.0, [r.loss for r in found.ranks if r.loss is not None]
        broken = [rank for rank, x in enumerate(known) if not math.isfinite(x)]
        if broken:
            return Diagnosis({"nan_loss": ", ".join(map(str, broken))})
        off = max(abs((r.loss or 0.0) - want) for r in found.noisy)
        text = loss_difference(found.whole, found.ranks, 4 * off + 2 * found.eps * abs(want))
        if text is not None:
            n, times = len(known), sum(known) / want if want else math.inf
            facts["loss_total"] = text
            facts["loss_times"] = any(abs(times / x - 1) < 0.02 for x in (n, 1 / n, n * n))
        facts |= self._labels(text is None, known)
        right = all(error <= 1 for error in self.parameters.values())
        return Diagnosis(facts) if facts or right else None

    def of_layers(self) -> Diagnosis | None:
        """The module between outputs whose gradient is right and those, before, whose is not."""
        if max(self.scales) - min(self.scales) > UNEVEN * max(map(abs, self.scales)):
            text = f"gradients are {_listed(self.scales)} times what is right on the ranks"
            return Diagnosis({"gradient_ratio": f"{text}, before any layer"})
        wanted, outputs = self.found.whole.tables["gradient"], self.found.whole.outputs
        wrong = {name for name in wanted if self.found.error("gradient", name, self.scales) > 1}
        layer = next((name for name in reversed(outputs) if name in wrong), None)
        if layer is None:
            return None
        innermost = layer
        while layer in wrong or layer not in outputs:
            around = layer.rpartition(".")[0]
            if not around or (around in outputs and around not in wanted):
                break
            layer = around
        layer = self._around_projection(layer if layer in outputs else innermost)
        if facts := self._shared_gradient(wrong):
            return Diagnosis(facts, layer)
        for look in (self._gradients, lambda layer: LayerOrder(self, layer).backward()):
            with suppress(UnreadableError):
                if facts := look(layer):
                    return Diagnosis(facts, layer)
        return Diagnosis(UNKNOWN, layer)

    def _shared_gradient(self, wrong: set[str]) -> Facts:
        """Return whether gradients are wrong on rows that all ranks hold, and on these alone."""
        found, shared = self.found, self.found.shared
        if not len(shared):
            return {}
        for name in reversed([name for name in found.whole.outputs if name in wrong]):
            rows = found.rows("gradient", name)
            assert rows is not None
            off = rows.scaled(self.scales).errors() > float(found.limits("gradient", name)[0])
            of_shared = torch.isin(rows.positions, shared)
            if off.any() and not (off & ~of_shared).any():
                text = f"{int(off.sum())} of {len(shared)} rows that every rank holds"
                return {
                    "shared_gradient": f"{text} have another gradient at {name}, summed over "
                    "ranks; all other rows are right"
                }
            break
        return {}

    def of_parameters(self) -> Diagnosis:
        """Gradients that are not reduced where others are, or all multiplied by one number."""
        wanted, errors = self.found.whole.parameters, self._step_errors
        wrong = [name for name, x in self.parameters.items() if x > 1]
        if len(wrong) > len(wanted) / 2:
            reduced = self.parameters is errors.each
            gradients = self.found.ranks[0].parameters if reduced else errors.sums
            ratios = [
                multiple(wanted[name], gradients.get(name, 0 * wanted[name]), 0.02)
                for name in wrong
            ]
            same = [x for x in ratios if x]
            if len(same) > len(wrong) / 2 and max(same) - min(same) <= 0.02 * abs(max(same)):
                n = len(self.found.ranks)
                text = f"all gradients are {same[0]:.4g} times what is right, on {n} ranks"
                return Diagnosis({"gradient_ratio": text})
        layer, facts = wrong[0].rpartition(".")[0], UNKNOWN
        if self.parameters is errors.each and all(errors.total[name] <= 1 for name in wrong):
            text = (
                f"{some(wrong, 3)}: each rank has its share only, while the gradients of "
                f"{len(wanted) - len(wrong)} other parameters are summed over ranks"
            )
            facts = {"unreduced": text}
        return Diagnosis(facts, layer)

    @cached_property
    def parameters(self) -> dict[str, float]:
        """Errors of gradients, as sums over ranks or on each rank, as most of them are.

        Gradients of the same bits on all ranks are reduced already: shares would differ.
        """
        if not any(record.parameters for record in self.found.ranks):
            return {}
        each, total = self._step_errors.each, self._step_errors.total
        reduced = sum(x <= 1 for x in each.values()) > sum(x <= 1 for x in total.values())
        return each if reduced or 2 * len(self._alike) > len(each) else total

    @cached_property
    def _alike(self) -> list[str]:
        """Parameters whose gradient is not zero, and the same bits on several ranks."""
        first, *others = [record.parameters for record in self.found.ranks]
        return [
            name
            for name, x in first.items()
            if others and x.any() and all(torch.equal(x, y.get(name, 0 * x)) for y in others)
        ]

    @cached_property
    def _step_errors(self) -> Any:
        found, limits = self.found, {}
        wanted = found.whole.parameters
        least = found.eps * max(float(x.norm()) for x in wanted.values()) + 1e-300
        for name, x in wanted.items():
            noisy = [r.parameters[name] for r in found.noisy if name in r.parameters]
            limits[name] = 8 * max(least, *(float((x - y).norm()) for y in noisy))
        return step_errors(wanted, [record.parameters for record in found.ranks], limits)

    def _inputs_are_right(self, name: str) -> bool:
        inputs = self.found.whole.inputs(name).items()
        return all(self.found.error(k, name) <= 1 for k, x in inputs if x.is_floating_point())

    def _around_projection(self, name: str) -> str:
        """The innermost module with a forward pass around a projection, "" for the model itself.

        A projection is never at fault, what it gets is. Other modules are returned as they are.
        """
        module = dict(self.model.named_modules()).get(name)
        if not isinstance(module, nn.Linear | None):
            return name
        around = name.rpartition(".")[0]
        while around and around not in self.found.whole.outputs:  # a ModuleList, say
            around = around.rpartition(".")[0]
        return around

    def _other_inputs(self, layer: str) -> Facts:
        """Inputs of whole numbers, such as positions, that differ."""
        for kind, x in self.found.whole.inputs(layer).items():
            rows = None if x.is_floating_point() else self.found.rows(kind, layer)
            if rows is not None and not torch.equal(rows.want, rows.got):
                wrong = (rows.want != rows.got).any(1)
                row = int(wrong.nonzero()[0])
                want, got, at, rank = (int(x[row].flatten()[0]) for x in rows)
                text = (
                    f"{int(wrong.sum())} of {len(wrong)} rows get another value of {layer}'s "
                    f"{kind}: rank {rank} gives {got} to the token at {at}, not {want}"
                )
                return {"wrong_positions": text}
        return {}

    def _foreign_inputs(self, layer: str) -> Facts:
        """Return whether what a module gets is right on some ranks only, and no module made it."""
        for kind, x in self.found.whole.inputs(layer).items():
            rows = self.found.rows(kind, layer) if x.is_floating_point() else None
            if rows is None or self.found.error(kind, layer) <= 1:
                continue
            wrong = rows.errors() > float(self.found.limits(kind, layer)[0])
            wholly = {int(r) for r in rows.ranks.unique() if wrong[rows.ranks == r].all()}
            others = {*rows.ranks.tolist()} - wholly
            elsewhere = torch.cdist(rows.got[wrong], rows.want).min(1).values
            moved = (elsewhere <= 1e-4 * float(rows.want.norm(dim=1).max())).any()
            if wholly and not moved and not any(wrong[rows.ranks == r].any() for r in others):
                text = f"{layer or 'the model'} gets rows on ranks {some(sorted(wholly))} that are"
                return {
                    "foreign_inputs": f"{text} none of the unsplit model's, and no module made "
                    "them; draw noise from generators of one seed, or broadcast it"
                }
        return {}

    def _draws(self, layer: str) -> Facts:
        again = run_whole(self.model, self.inputs, ModelRun(seed=1)).outputs.get(layer)
        if again is None or torch.equal(again, self.found.whole.outputs[layer]):
            return {}
        text = "draws random numbers: another seed changes the unsplit model's output too; compare"
        return {"random_layer": f"{layer} {text} with dropout off"}

    def _attention(self, layer: str, first: str) -> tuple[Facts, tuple[Tensor, Tensor] | None]:
        """Return how what a layer attends to differs, and the weights that say so.

        Args:
            first: the module inside that deviates first.
        """
        found, facts, allowed = self.found, dict[str, Any](), None
        # What a coarse dtype hides shows in fp32, if the split runs in it and errs there too.
        coarse = found.eps > torch.finfo(torch.float32).eps
        for dtype in (torch.float32, None) if coarse else (None,):
            with suppress(UnreadableError):
                run, num_tokens = self.whole_run(dtype), len(found.counted)
                path = find_path(layer, found.whole, run, num_tokens, first)
                if path is None:
                    break
                eps = found.eps if dtype is None else torch.finfo(dtype).eps
                width = len(path.weights.weights) * path.head_dim
                facts, allowed = self._weights(path, self.split_run(width, dtype), eps)
                if classify(facts):
                    return facts, allowed
        return facts, allowed

    def _weights(
        self, path: Path, run: Run, eps: float
    ) -> tuple[dict[str, Any], tuple[Tensor, Tensor]]:
        counted, n = self.found.counted, len(self.found.counted)
        want, reader = path.weights, read_by(path.v, path.read, run)
        got = read_weights(reader, n, len(path.v.columns), path.head_dim)
        blocks = np.full(n, -1)
        for own in (x[x >= 0].numpy() for x in self.found.positions):
            blocks[own] = blocks.max() + 1 + np.cumsum(np.diff(own, prepend=own[:1] - 1) != 1)
        several = blocks if blocks.max() < n / 2 else None
        whole, split = (
            x.weights * above(x.weights, LEAST_WEIGHT) * counted[:, None] for x in (want, got)
        )
        tolerance = max(eps**0.5, 1e-3)
        tables = whole.numpy(), split.numpy()
        if (other := _head_order(*tables, tolerance)) is not None:
            text = f"heads 0, 1, ... give what heads {some(other, 8)} should"
            return {"permuted_heads": text}, (split.any(0), whole.any(0))
        facts = facts_of_attention(*tables, tolerance, "the unsplit model", several)
        foreign = [h for h, x in enumerate(want.sources) if x != got.sources[h]]
        if foreign and not facts.get("empty_heads"):
            h = foreign[0]
            facts["foreign_heads"] = (
                f"{len(foreign)} of {len(want.sources)} heads: head {h} reads the values of KV "
                f"head {got.sources[h]}, not {want.sources[h]}"
            )
        facts["projected"] = True
        facts |= self._shared_keys(*tables)
        facts |= self._local_keys(split.any(0).numpy(), whole.any(0).numpy())
        return facts, (split.any(0), whole.any(0))

    def _shared_keys(self, want: np.ndarray, got: np.ndarray) -> Facts:
        """Return whether the weights of keys that all ranks hold are as many times too large."""
        shared, n = self.found.shared.numpy(), len(self.found.ranks)
        if not len(shared):
            return {}
        times = np.ones(want.shape[-1])
        times[shared] = n
        right = want * times
        right /= right.sum(-1, keepdims=True).clip(1e-300)
        if np.abs(right - got).max() > 1e-3 or np.abs(want - got).max() <= 1e-3:
            return {}
        return {
            "shared_keys": f"the {len(shared)} keys that every rank holds weigh {n} times what is "
            "right beside the others"
        }

    def _local_keys(self, got: np.ndarray, want: np.ndarray) -> Facts:
        """Return whether queries see keys of every rank by the numbers of their rows there."""
        expected = np.zeros_like(got)
        ranks = [own[own >= 0].numpy() for own in self.found.positions]
        for a, b in product(ranks, ranks):
            expected[np.ix_(a, b)] = np.tri(len(a), len(b), dtype=bool)
        if len(ranks) < 2 or (got == want).all() or (got != expected)[want.any(1)].any():
            return {}
        return {
            "local_keys": "row i of a rank sees keys 0 to i of every rank: each block is masked as "
            "the diagonal one"
        }

    def whole_run(self, dtype: torch.dtype | None) -> Run:
        def run(setting: OutputSetting | LeafSetting | RowProbe) -> Tensor:
            reading = run_whole(self.model, self.inputs, ModelRun(setting, dtype=dtype)).reading
            rows = None if reading is None else rows_of_one(reading, len(self.found.counted))
            if rows is None or self.world.seconds_left < 0:
                raise UnreadableError("the unsplit model shows nothing there, or the time is over")
            return rows

        return run

    def split_run(self, width: int, dtype: torch.dtype | None) -> Run:
        """Runs of the split model, of which rows of so many numbers are read."""
        positions, n = self.found.positions, len(self.found.counted)
        template = torch.zeros(n, width).double()

        def run(setting: Any) -> Tensor:
            if self.world.seconds_left < 0:
                raise UnreadableError("the time is over")
            jobs = [ModelRun(setting._replace(positions=own), dtype=dtype) for own in positions]
            try:
                read = [record.reading for record in self.world.run(jobs)]
            except RankError as error:
                raise UnreadableError("the split model does not run so") from error
            parts = [x[:1] if x.ndim > 2 and x.shape[0] != n else x for x in read if x is not None]
            rows = rows_of(template, parts, positions, n) if len(parts) == len(read) else None
            if rows is None:
                raise UnreadableError("the split model shows nothing there")
            return template.index_copy(0, rows.positions, rows.got)

        return run

    def _runs_alone(self, layer: str) -> Facts:
        """Return whether the unsplit module makes what a rank got of that rank's rows alone."""
        rows, record = self.found.rows("output", layer), self.found.ranks[-1]
        module = dict(self.model.named_modules())[layer]
        kind = next((p.dtype for p in module.parameters()), torch.float64)
        given = {key[6:]: x for key, x in record.inputs(layer).items()}
        given = {key: x.to(kind) if x.is_floating_point() else x for key, x in given.items()}
        try:
            places = [given.pop(str(i)) for i in range(sum(key.isdigit() for key in given))]
            with torch.no_grad():
                out = first_rows(copy.deepcopy(module)(*places, **given))
        except Exception:  # whatever a module raises that is called without its other arguments
            return {}
        got, limit = record.outputs[layer], float(self.found.limits("output", layer)[0])
        if rows is None or out is None or out.shape != got.shape:
            return {}
        if float((out.double().cpu() - got).norm()) > limit * float(got.norm()):
            return {}
        text = (
            f"{int((rows.errors() > limit).sum())} of {len(rows.want)} rows of {layer} deviate: it "
            "is no attention, and runs on each rank's rows as if they were the sequence"
        )
        return {"mixes_rows": text}

    def _labels(self, loss_is_right: bool, losses: Sequence[float]) -> Facts:
        """Return what is wrong about labels, or by how much ranks' gradients are scaled if the loss
        is.

        Both from the last rows that have a gradient.
        """
        found, n = self.found, len(self.found.ranks)
        self.scales = [1.0] * n
        for name in reversed(found.whole.outputs):
            rows = found.rows("gradient", name)
            if rows is not None and len(torch.unique(rows.positions)) > 1:
                break
        else:
            return {}
        if evidence := _other_labels(rows, max(float(found.limits("gradient", name)[0]), 1e-3)):
            return {"border_rows": evidence}
        own = [rows.where(rows.ranks == rank) for rank in range(n)]
        self.scales = [float(x.ratios().nanmedian().nan_to_num(nan=1.0)) for x in own]
        silent = [r for r in range(n) if own[r].want.any() and not (losses[r] and self.scales[r])]
        if silent and len(silent) < n and not loss_is_right:
            text = f"what ranks {some(silent)} compute is not counted in the loss"
            return {"uncounted": f"{text}, or has no gradient: their shares are {_listed(losses)}"}
        limit = max(float(found.limits("gradient", name)[0]), 1e-3)
        off = rows.scaled(self.scales).errors() > (max(limit, 0.3) if loss_is_right else limit)
        off |= (rows.want.norm(dim=1) == 0) & (rows.got.norm(dim=1) > 0)
        bad = sorted(rows.positions[off].tolist())
        if bad and len(bad) <= BORDERS * len(rows.want):
            text = f"{len(bad)} of {len(rows.want)} rows have the gradient of another label, at"
            return {"border_rows": f"{text} positions {some(bad, 6)}"}
        if loss_is_right:
            return {}
        if not bad and all(abs(scale - 1) < SAME_SCALE for scale in self.scales):
            return {"loss_term": f"all that {name or 'the model'} gives has the right gradient"}
        return {"loss_ratio": _listed(self.scales)}

    def _gradients(self, layer: str) -> Facts:
        """Return which gradients of a layer's attention are wrong."""
        path = find_path(layer, self.found.whole, self.whole_run(None), len(self.found.counted))
        if path is None:
            return {}
        parts = {"dq": path.q, "dk": path.k, "dv": [path.v]}
        read = {name: [*filter(None, map(self._gradient, own))] for name, own in parts.items()}
        texts = {name: own[0] for name, own in read.items() if own}
        if set(texts) == {"dq", "dk"} and not any("times" in text for text in texts.values()):
            text = f"dv is right, dq is {texts['dq']} and dk {texts['dk']}"
            return {"lse_lost": f"{text}; this is likely, other faults of dq and dk look alike"}
        return texts

    def _gradient(self, part: PathPart) -> str | None:
        rows = self.found.rows("gradient", part.module)
        if rows is None:
            return None
        rows, columns = rows.scaled(self.scales), list(part.columns)
        limit = max(float(self.found.limits("gradient", part.module)[0]), 1e-3)
        return difference(rows.want[:, columns], rows.got[:, columns], limit)


def _head_order(want: np.ndarray, got: np.ndarray, tolerance: float) -> list[int] | None:
    """The heads whose weights each head has, if these are all heads in another order."""
    off = np.abs(got[:, None] - want[None]).max((2, 3))
    order = off.argmin(1).tolist()
    heads = list(range(len(want)))
    alike = off[heads, order] <= tolerance
    return order if alike.all() and sorted(order) == heads != order else None


def _other_labels(rows: MatchedRows, limit: float) -> str | None:
    """Words for rows whose gradient is that of another label; None if most others differ, too.

    Of a softmax the gradient of another label differs at two numbers, by as much up as down; that
    of no label is 0.
    """
    off = rows.errors() > limit
    off |= (rows.want.norm(dim=1) == 0) & (rows.got.norm(dim=1) > 0)
    if not off.any() or rows.want.shape[1] < LEAST_CLASSES:
        return None
    change = (rows.got - rows.want)[off]
    size, at = change.abs().sort(1, descending=True)
    two = size[:, :2].square().sum(1) >= MOSTLY_TWO * size.square().sum(1)
    first, second = change.gather(1, at[:, :1])[:, 0], change.gather(1, at[:, 1:2])[:, 0]
    two &= (first + second).abs() <= 0.1 * first.abs()
    silent = (rows.want[off].norm(dim=1) == 0) | (rows.got[off].norm(dim=1) == 0)
    if not two.any() or float((two | silent).double().mean()) < MOSTLY_LABELS:
        return None
    positions = sorted(rows.positions[off].tolist())
    text = f"{len(positions)} of {len(rows.want)} rows have the gradient of another label, at"
    return f"{text} positions {some(positions, 6)}"


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{x:.4g}" for x in numbers)

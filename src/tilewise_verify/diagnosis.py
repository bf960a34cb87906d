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
from tilewise_verify.attention_path import (
    Path,
    PathPart,
    Run,
    find_path,
    read_by,
)
from tilewise_verify.causes import Facts, classify
from tilewise_verify.choices import facts_of_choice
from tilewise_verify.comparison import (
    Comparison,
    MatchedRows,
    rows_of,
    step_errors,
)
from tilewise_verify.gradients import difference, multiple
from tilewise_verify.layer_order import LayerOrder
from tilewise_verify.ranks import RankRunner
from tilewise_verify.records import (
    LeafSetting,
    ModelRun,
    OutputSetting,
    first_rows,
    rows_of_one,
    run_whole,
)
from tilewise_verify.row_probe import RowProbe
from tilewise_verify.tables import facts_of_attention, some
from tilewise_verify.weights import UnreadableError, Weights, above, read_weights

LEAST_WEIGHT = 1e-30  # beside the row's largest: a model may have any scores
UNKNOWN: Facts = MappingProxyType({"unread": True})
SCALE_MARGIN = (
    0.1  # of what a loss ratio differs from 1, by which gradients may be scaled otherwise
)
SAME_SCALE = 0.02  # of gradients
LEAST_CLASSES = 8  # numbers of a row that may be the gradient of logits
MOSTLY_TWO = 0.98  # of a row's change that lies in two numbers, where a label is another one
MOSTLY_LABELS = 0.9  # of the rows that differ
CHANCE = 0.3  # cosine below which rows count as independent
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
    """The search for the first deviation: a comparison, and the two models to run again."""

    model: nn.Module
    inputs: Mapping[str, Any]
    world: RankRunner
    comparison: Comparison
    scales: list[float] = field(default_factory=list)  # of each rank's gradients

    def diagnosis(self) -> Diagnosis:
        """Diagnose outputs, the loss, then gradients: the first deviation explains the others."""
        stages = self.of_outputs, self.of_loss, self.of_layers, self.of_parameters
        return next(filter(None, (stage() for stage in stages)))

    def of_outputs(self) -> Diagnosis | None:
        """The first module whose output deviates although its inputs do not.

        A module that gets its rows in an order of its own, as an expert does, is no evidence: the
        module around it has to deviate too.
        """
        comparison = self.comparison
        names = [name for name in comparison.whole.outputs if comparison.error("output", name) > 1]
        names = [name for name in names if comparison.around(name) in (None, *names)]
        if not names:
            return None
        first_wrong = next((name for name in names if self._inputs_are_right(name)), names[0])
        layer = self._around_projection(first_wrong)
        finders = self._other_inputs, self._draws, self._foreign_inputs, self._choices
        for find_facts in finders:
            if facts := find_facts(layer):
                return Diagnosis(facts, layer)
        facts, allowed = self._attention(layer, first_wrong)
        inputs = comparison.whole.inputs(layer).values()
        is_made_within = not any(x.is_floating_point() for x in inputs)
        if not facts and is_made_within and (facts := self._foreign_inputs(names[0])):
            return Diagnosis(facts, names[0])
        if not facts and self._inputs_are_right(layer):
            with suppress(UnreadableError):
                facts = LayerOrder(self, layer).forward()
            facts = {**facts, **self._runs_alone(layer)}
        return Diagnosis(facts or UNKNOWN, layer, allowed)

    def of_loss(self) -> Diagnosis | None:
        """Return what is wrong about the loss or labels, if it is; or nothing at all."""
        comparison, facts = self.comparison, dict[str, Any]()
        whole_loss = comparison.whole.loss or 0.0
        losses = [r.loss for r in comparison.ranks if r.loss is not None]
        ranks_without_number = [rank for rank, x in enumerate(losses) if not math.isfinite(x)]
        if ranks_without_number:
            return Diagnosis({"nan_loss": ", ".join(map(str, ranks_without_number))})
        difference_text = comparison.loss_difference()
        if difference_text is not None:
            n, ratio = len(losses), sum(losses) / whole_loss if whole_loss else math.inf
            facts["loss_total"] = difference_text
            facts["loss_times"] = any(abs(ratio / x - 1) < 0.02 for x in (n, 1 / n, n * n))
        facts |= self._labels(difference_text is None, losses)
        parameters_are_right = all(error <= 1 for error in self.parameters.values())
        return Diagnosis(facts) if facts or parameters_are_right else None

    def of_layers(self) -> Diagnosis | None:
        """Find the module whose output has a right gradient, but whose input has a wrong one."""
        if max(self.scales) - min(self.scales) > UNEVEN * max(map(abs, self.scales)):
            scale_text = f"gradients are {_listed(self.scales)} times what is right on the ranks"
            return Diagnosis({"gradient_ratio": f"{scale_text}, before any layer"})
        whole_gradients = self.comparison.whole.tables["gradient"]
        outputs = self.comparison.whole.outputs
        wrong_modules = {
            name
            for name in whole_gradients
            if self.comparison.error("gradient", name, self.scales) > 1
        }
        layer = next((name for name in reversed(outputs) if name in wrong_modules), None)
        if layer is None:
            return None
        inner_layer = layer
        while layer in wrong_modules or layer not in outputs:
            outer_layer = layer.rpartition(".")[0]
            if not outer_layer or (outer_layer in outputs and outer_layer not in whole_gradients):
                break
            layer = outer_layer
        layer = self._around_projection(layer if layer in outputs else inner_layer)
        if facts := self._shared_gradient(wrong_modules):
            return Diagnosis(facts, layer)
        for find_facts in (self._gradients, lambda layer: LayerOrder(self, layer).backward()):
            with suppress(UnreadableError):
                if facts := find_facts(layer):
                    return Diagnosis(facts, layer)
        return Diagnosis(UNKNOWN, layer)

    def _shared_gradient(self, wrong_modules: set[str]) -> Facts:
        """Return whether gradients are wrong on rows that all ranks hold, and on these alone."""
        comparison, shared_positions = self.comparison, self.comparison.shared
        if not len(shared_positions):
            return {}
        for name in reversed([name for name in comparison.whole.outputs if name in wrong_modules]):
            rows = comparison.rows("gradient", name)
            assert rows is not None
            is_wrong = rows.scaled(self.scales).errors() > float(
                comparison.limits("gradient", name)[0]
            )
            is_shared = torch.isin(rows.positions, shared_positions)
            if is_wrong.any() and not (is_wrong & ~is_shared).any():
                count_text = (
                    f"{int(is_wrong.sum())} of {len(shared_positions)} rows that every rank holds"
                )
                return {
                    "shared_gradient": f"{count_text} have another gradient at {name}, summed over "
                    "ranks; all other rows are right"
                }
            break
        return {}

    def of_parameters(self) -> Diagnosis:
        """Find gradients that are not reduced where others are, or all multiplied by one number."""
        whole_gradients, errors = self.comparison.whole.parameters, self._step_errors
        wrong_names = [name for name, x in self.parameters.items() if x > 1]
        if len(wrong_names) > len(whole_gradients) / 2:
            reduced = self.parameters is errors.each
            gradients = self.comparison.ranks[0].parameters if reduced else errors.sums
            ratios = [
                multiple(
                    whole_gradients[name], gradients.get(name, 0 * whole_gradients[name]), 0.02
                )
                for name in wrong_names
            ]
            common_ratios = [x for x in ratios if x]
            if len(common_ratios) > len(wrong_names) / 2 and max(common_ratios) - min(
                common_ratios
            ) <= 0.02 * abs(max(common_ratios)):
                n = len(self.comparison.ranks)
                evidence = (
                    f"all gradients are {common_ratios[0]:.4g} times what is right, on {n} ranks"
                )
                return Diagnosis({"gradient_ratio": evidence})
        layer, facts = wrong_names[0].rpartition(".")[0], UNKNOWN
        if self.parameters is errors.each and all(errors.total[name] <= 1 for name in wrong_names):
            evidence = (
                f"{some(wrong_names, 3)}: each rank has its share only, while the gradients of "
                f"{len(whole_gradients) - len(wrong_names)} other parameters are summed over ranks"
            )
            facts = {"unreduced": evidence}
        return Diagnosis(facts, layer)

    @cached_property
    def parameters(self) -> dict[str, float]:
        """Errors of the parameters' gradients: each rank's own if they are reduced, else the sum's.

        Gradients with the same bits on all ranks are reduced already, because shares would differ.
        """
        if not any(record.parameters for record in self.comparison.ranks):
            return {}
        each, total = self._step_errors.each, self._step_errors.total
        reduced = sum(x <= 1 for x in each.values()) > sum(x <= 1 for x in total.values())
        return each if reduced or 2 * len(self._alike) > len(each) else total

    @cached_property
    def _alike(self) -> list[str]:
        """Parameters whose gradient is not zero, and has the same bits on all of several ranks."""
        first_rank, *other_ranks = [record.parameters for record in self.comparison.ranks]
        return [
            name
            for name, x in first_rank.items()
            if other_ranks
            and x.any()
            and all(torch.equal(x, y.get(name, 0 * x)) for y in other_ranks)
        ]

    @cached_property
    def _step_errors(self) -> Any:
        comparison, limits = self.comparison, {}
        whole_gradients = comparison.whole.parameters
        smallest_limit = (
            comparison.eps * max(float(x.norm()) for x in whole_gradients.values()) + 1e-300
        )
        for name, x in whole_gradients.items():
            noisy_gradients = [r.parameters[name] for r in comparison.noisy if name in r.parameters]
            limits[name] = 8 * max(
                smallest_limit, *(float((x - y).norm()) for y in noisy_gradients)
            )
        return step_errors(
            whole_gradients, [record.parameters for record in comparison.ranks], limits
        )

    def _inputs_are_right(self, name: str) -> bool:
        inputs = self.comparison.whole.inputs(name).items()
        return all(self.comparison.error(k, name) <= 1 for k, x in inputs if x.is_floating_point())

    def _around_projection(self, name: str) -> str:
        """The innermost module with a forward pass around a projection, "" for the model itself.

        A projection itself is never at fault, but its input may be. Other modules are returned as
        they are.
        """
        module = dict(self.model.named_modules()).get(name)
        if not isinstance(module, nn.Linear | None):
            return name
        outer_layer = name.rpartition(".")[0]
        while outer_layer and outer_layer not in self.comparison.whole.outputs:  # a ModuleList, say
            outer_layer = outer_layer.rpartition(".")[0]
        return outer_layer

    def _other_inputs(self, layer: str) -> Facts:
        """Find inputs of whole numbers, such as positions, that differ."""
        for kind, x in self.comparison.whole.inputs(layer).items():
            rows = None if x.is_floating_point() else self.comparison.rows(kind, layer)
            if rows is not None and not torch.equal(rows.want, rows.got):
                is_wrong = (rows.want != rows.got).any(1)
                row = int(is_wrong.nonzero()[0])
                right_value, split_value, position, rank = (int(x[row].flatten()[0]) for x in rows)
                evidence = (
                    f"{int(is_wrong.sum())} of {len(is_wrong)} rows get another value of {layer}'s "
                    f"{kind}: rank {rank} gives {split_value} to the token at {position}, not "
                    f"{right_value}"
                )
                return {"wrong_positions": evidence}
        return {}

    def _foreign_inputs(self, layer: str) -> Facts:
        """Find inputs of a module that are right on some ranks only and that no module made."""
        for kind, x in self.comparison.whole.inputs(layer).items():
            rows = self.comparison.rows(kind, layer) if x.is_floating_point() else None
            if rows is None or self.comparison.error(kind, layer) <= 1:
                continue
            is_wrong = rows.errors() > float(self.comparison.limits(kind, layer)[0])
            all_wrong_ranks = {
                int(r) for r in rows.ranks.unique() if is_wrong[rows.ranks == r].all()
            }
            other_ranks = {*rows.ranks.tolist()} - all_wrong_ranks
            distances = torch.cdist(rows.got[is_wrong], rows.want).min(1).values
            are_moved_rows = (distances <= 1e-4 * float(rows.want.norm(dim=1).max())).any()
            if (
                all_wrong_ranks
                and not are_moved_rows
                and not any(is_wrong[rows.ranks == r].any() for r in other_ranks)
                and (_look_drawn(rows.where(is_wrong)) or self._changes_by_run(kind, layer))
            ):
                wrong_ranks = some(sorted(all_wrong_ranks))
                evidence = f"{layer or 'the model'} gets rows on ranks {wrong_ranks} that are"
                return {
                    "foreign_inputs": f"{evidence} none of the unsplit model's, and no module made "
                    "them; draw noise from generators of one seed, or broadcast it"
                }
        return {}

    def _changes_by_run(self, kind: str, layer: str) -> bool:
        """Return whether a module's inputs of the split model are others with another seed."""
        jobs = [ModelRun(seed=1)] * self.world.size
        try:
            records = self.world.run(jobs)
        except RankError:
            return False
        tables = [
            (record.tables[kind].get(layer), again.tables[kind].get(layer))
            for record, again in zip(self.comparison.ranks, records, strict=True)
        ]
        return any(x is not None and y is not None and not torch.equal(x, y) for x, y in tables)

    def _choices(self, layer: str) -> Facts:
        """Return facts about an indexer in a layer whose inputs are right."""
        return facts_of_choice(self.comparison, layer) if self._inputs_are_right(layer) else {}

    def _draws(self, layer: str) -> Facts:
        other_output = run_whole(self.model, self.inputs, ModelRun(seed=1)).outputs.get(layer)
        if other_output is None or torch.equal(other_output, self.comparison.whole.outputs[layer]):
            return {}
        evidence = (
            "draws random numbers: another seed changes the unsplit model's output too; compare"
        )
        return {"random_layer": f"{layer} {evidence} with dropout off"}

    def _attention(
        self, layer: str, inner_module: str
    ) -> tuple[Facts, tuple[Tensor, Tensor] | None]:
        """Return facts about how a layer's attention differs, and the pairs that are attended.

        Args:
            inner_module: the module inside that deviates first.
        """
        comparison, facts, allowed = self.comparison, dict[str, Any](), None
        # What a coarse dtype hides shows in fp32, if the split runs in it and errs there too.
        is_coarse = comparison.eps > torch.finfo(torch.float32).eps
        for dtype in (torch.float32, None) if is_coarse else (None,):
            with suppress(UnreadableError):
                run, num_tokens = self.whole_run(dtype), len(comparison.counted)
                path = find_path(layer, comparison.whole, run, num_tokens, inner_module)
                if path is None:
                    break
                eps = comparison.eps if dtype is None else torch.finfo(dtype).eps
                width = len(path.weights.weights) * path.head_dim
                facts, allowed = self._weights(path, self.split_run(width, dtype), eps)
                if classify(facts):
                    return facts, allowed
        return facts, allowed

    def _weights(
        self, path: Path, run: Run, eps: float
    ) -> tuple[dict[str, Any], tuple[Tensor, Tensor]]:
        counted, n = self.comparison.counted, len(self.comparison.counted)
        whole_weights, reader = path.weights, read_by(path.v, path.read, run)
        split_weights = read_weights(reader, n, len(path.v.columns), path.head_dim)
        blocks = np.full(n, -1)
        for rank_rows in (x[x >= 0].numpy() for x in self.comparison.positions):
            blocks[rank_rows] = (
                blocks.max() + 1 + np.cumsum(np.diff(rank_rows, prepend=rank_rows[:1] - 1) != 1)
            )
        known_blocks = blocks if blocks.max() < n / 2 else None
        whole_table, split_table = (
            x.weights * above(x.weights, LEAST_WEIGHT) * counted[:, None]
            for x in (whole_weights, split_weights)
        )
        tolerance = max(eps**0.5, 1e-3)
        tables = whole_table.numpy(), split_table.numpy()
        if (head_order := _head_order(*tables, tolerance)) is not None:
            evidence = f"heads 0, 1, ... give what heads {some(head_order, 8)} should"
            return {"permuted_heads": evidence}, (split_table.any(0), whole_table.any(0))
        facts = facts_of_attention(*tables, tolerance, "the unsplit model", known_blocks)
        if (copied_heads := _copied_heads(*tables, tolerance)) is not None:
            return {"copied_heads": copied_heads}, (split_table.any(0), whole_table.any(0))
        if not facts.get("empty_heads"):
            facts |= self._foreign_heads(whole_weights, split_weights)
        facts["projected"] = True
        facts |= self._shared_keys(*tables)
        facts |= self._local_keys(split_table.any(0).numpy(), whole_table.any(0).numpy())
        return facts, (split_table.any(0), whole_table.any(0))

    def _foreign_heads(self, whole: Weights, split: Weights) -> Facts:
        """Return which heads read another KV head's values: on all ranks, or on one."""
        sources = [(whole.sources, split.sources, "")]
        for rank, positions in enumerate(self.comparison.positions):
            own = positions[positions >= 0]
            want, got = (x.row_sources[:, own].median(1).values for x in (whole, split))
            is_read = (want >= 0) & (got >= 0)
            sources.append((want.tolist(), got.where(is_read, want).tolist(), f", on rank {rank}"))
        for want, got, where in sources:
            foreign = [h for h, head in enumerate(want) if head != got[h]]
            if foreign:
                h = foreign[0]
                return {
                    "foreign_heads": f"{len(foreign)} of {len(want)} heads: head {h} reads the "
                    f"values of KV head {got[h]}, not {want[h]}{where}"
                }
        return {}

    def _shared_keys(self, whole_table: np.ndarray, split_table: np.ndarray) -> Facts:
        """Find keys that all ranks hold and whose weight is multiplied by the number of ranks."""
        shared, n = self.comparison.shared.numpy(), len(self.comparison.ranks)
        if not len(shared):
            return {}
        key_weights = np.ones(whole_table.shape[-1])
        key_weights[shared] = n
        expected = whole_table * key_weights
        expected /= expected.sum(-1, keepdims=True).clip(1e-300)
        if (
            np.abs(expected - split_table).max() > 1e-3
            or np.abs(whole_table - split_table).max() <= 1e-3
        ):
            return {}
        return {
            "shared_keys": f"the {len(shared)} keys that every rank holds weigh {n} times what is "
            "right beside the others"
        }

    def _local_keys(self, split_allowed: np.ndarray, whole_allowed: np.ndarray) -> Facts:
        """Find a mask that was applied to local row numbers, to the keys of each rank alike."""
        expected = np.zeros_like(split_allowed)
        ranks = [
            rank_positions[rank_positions >= 0].numpy()
            for rank_positions in self.comparison.positions
        ]
        for a, b in product(ranks, ranks):
            expected[np.ix_(a, b)] = np.tri(len(a), len(b), dtype=bool)
        if (
            len(ranks) < 2
            or (split_allowed == whole_allowed).all()
            or (split_allowed != expected)[whole_allowed.any(1)].any()
        ):
            return {}
        return {
            "local_keys": "row i of a rank sees keys 0 to i of every rank: each block is masked as "
            "the diagonal one"
        }

    def whole_run(self, dtype: torch.dtype | None) -> Run:
        def run(setting: OutputSetting | LeafSetting | RowProbe) -> Tensor:
            reading = run_whole(self.model, self.inputs, ModelRun(setting, dtype=dtype)).reading
            rows = None if reading is None else rows_of_one(reading, len(self.comparison.counted))
            if rows is None or self.world.seconds_left < 0:
                raise UnreadableError("the unsplit model shows nothing there, or the time is over")
            return rows

        return run

    def split_run(self, width: int, dtype: torch.dtype | None) -> Run:
        """Return a function that runs the split model with a setting and reads rows of `width`."""
        positions, n = self.comparison.positions, len(self.comparison.counted)
        template = torch.zeros(n, width).double()

        def run(setting: Any) -> Tensor:
            if self.world.seconds_left < 0:
                raise UnreadableError("the time is over")
            jobs = [
                ModelRun(setting._replace(positions=rank_positions), dtype=dtype)
                for rank_positions in positions
            ]
            try:
                readings = [record.reading for record in self.world.run(jobs)]
            except RankError as error:
                raise UnreadableError("the split model does not run so") from error
            parts = [
                x[:1] if x.ndim > 2 and x.shape[0] != n else x for x in readings if x is not None
            ]
            rows = rows_of(template, parts, positions, n) if len(parts) == len(readings) else None
            if rows is None:
                raise UnreadableError("the split model shows nothing there")
            return template.index_copy(0, rows.positions, rows.got)

        return run

    def _runs_alone(self, layer: str) -> Facts:
        """Find a module that computes a rank's output from that rank's rows alone."""
        rows = self.comparison.rows("output", layer)
        if rows is None or not len(rows.want):
            return {}
        # A rank whose rows are right says nothing: a layer of single rows gives these anywhere.
        record = self.comparison.ranks[int(rows.ranks[rows.errors().argmax()])]
        if layer not in record.outputs:  # the model itself, which gave no rows
            return {}
        module = dict(self.model.named_modules())[layer]
        kind = next((p.dtype for p in module.parameters()), torch.float64)
        arguments = {key[6:]: x for key, x in record.inputs(layer).items()}
        arguments = {
            key: x.to(kind) if x.is_floating_point() else x for key, x in arguments.items()
        }
        try:
            positional = [
                arguments.pop(str(i)) for i in range(sum(key.isdigit() for key in arguments))
            ]
            with torch.no_grad():
                out = first_rows(copy.deepcopy(module)(*positional, **arguments))
        except Exception:  # whatever a module raises that is called without its other arguments
            return {}
        split_output = record.outputs[layer]
        limit = float(self.comparison.limits("output", layer)[0])
        if out is None or out.shape != split_output.shape:
            return {}
        if float((out.double().cpu() - split_output).norm()) > limit * float(split_output.norm()):
            return {}
        evidence = (
            f"{int((rows.errors() > limit).sum())} of {len(rows.want)} rows of {layer} deviate: it "
            "is no attention, and runs on each rank's rows as if they were the sequence"
        )
        return {"mixes_rows": evidence}

    def _labels(self, loss_is_right: bool, losses: Sequence[float]) -> Facts:
        """Find wrong labels, or the scales of the ranks' gradients if the loss is wrong.

        Both are read from the last rows of the model that have a gradient.
        """
        comparison, n = self.comparison, len(self.comparison.ranks)
        self.scales = [1.0] * n
        for name in reversed(comparison.whole.outputs):
            rows = comparison.rows("gradient", name)
            if rows is not None and len(torch.unique(rows.positions)) > 1:
                break
        else:
            return {}
        if evidence := _other_labels(
            rows, max(float(comparison.limits("gradient", name)[0]), 1e-3)
        ):
            return {"border_rows": evidence}
        rows_by_rank = [rows.where(rows.ranks == rank) for rank in range(n)]
        self.scales = [float(x.ratios().nanmedian().nan_to_num(nan=1.0)) for x in rows_by_rank]
        uncounted_ranks = [
            r for r in range(n) if rows_by_rank[r].want.any() and not (losses[r] and self.scales[r])
        ]
        if uncounted_ranks and len(uncounted_ranks) < n and not loss_is_right:
            text = f"what ranks {some(uncounted_ranks)} compute is not counted in the loss"
            return {"uncounted": f"{text}, or has no gradient: their shares are {_listed(losses)}"}
        limit = max(float(comparison.limits("gradient", name)[0]), 1e-3)
        is_wrong = rows.scaled(self.scales).errors() > (max(limit, 0.3) if loss_is_right else limit)
        is_wrong |= (rows.want.norm(dim=1) == 0) & (rows.got.norm(dim=1) > 0)
        wrong_positions = sorted(rows.positions[is_wrong].tolist())
        if wrong_positions and self._are_borders(wrong_positions):
            text = f"{len(wrong_positions)} of {len(rows.want)} rows have the gradient of another"
            return {"border_rows": f"{text} label, at positions {some(wrong_positions, 6)}"}
        if loss_is_right:
            return {}
        if wrong_positions:
            text = f"{len(wrong_positions)} of {len(rows.want)} rows of {name or 'the model'}"
            return {"term_ratio": f"{text} have gradients that are no multiple of what is right"}
        ratio = sum(losses) / (comparison.whole.loss or math.nan)
        least, most = min(self.scales), max(self.scales)
        # A loss that is scaled as a whole is so by the same number as its gradient.
        margin = max(limit, SCALE_MARGIN * abs(ratio - 1))
        if least - margin <= ratio <= most + margin and most - least + abs(ratio - 1) > limit:
            return {"loss_ratio": _listed(self.scales)}
        if all(abs(scale - 1) < SAME_SCALE for scale in self.scales):
            return {"loss_term": f"all that {name or 'the model'} gives has the right gradient"}
        text = (
            f"the gradient at {name or 'the model'} is {_listed(self.scales)} times what is right"
        )
        return {"term_ratio": f"{text} on the ranks, so not all of the loss is scaled alike"}

    def _are_borders(self, wrong_positions: Sequence[int]) -> bool:
        """Return whether most of these rows are the last of a rank's run, and most such rows here.

        Their label is the first token of another rank's rows.
        """
        last_rows = set[int]()
        for rank_positions in self.comparison.positions:
            rows = rank_positions[rank_positions >= 0]
            next_rows = torch.cat([rows[1:], rows.new_tensor([-1])])
            last_rows |= {*rows[next_rows != rows + 1].tolist()}
        last_rows -= {len(self.comparison.counted) - 1}
        num_borders = len(last_rows.intersection(wrong_positions))
        return num_borders > max(len({*wrong_positions}), len(last_rows)) / 2

    def _gradients(self, layer: str) -> Facts:
        """Return which gradients of a layer's attention are wrong."""
        path = find_path(
            layer, self.comparison.whole, self.whole_run(None), len(self.comparison.counted)
        )
        if path is None:
            return {}
        parts = {"dq": path.q, "dk": path.k, "dv": [path.v]}
        differences = {
            name: [*filter(None, map(self._gradient, texts_of_part))]
            for name, texts_of_part in parts.items()
        }
        evidence = {
            name: texts_of_part[0] for name, texts_of_part in differences.items() if texts_of_part
        }
        if set(evidence) == {"dq", "dk"} and not any("times" in text for text in evidence.values()):
            text = f"dv is right, dq is {evidence['dq']} and dk {evidence['dk']}"
            return {"lse_lost": f"{text}; this is likely, other faults of dq and dk look alike"}
        return evidence

    def _gradient(self, part: PathPart) -> str | None:
        rows = self.comparison.rows("gradient", part.module)
        if rows is None:
            return None
        rows, columns = rows.scaled(self.scales), list(part.columns)
        limit = max(float(self.comparison.limits("gradient", part.module)[0]), 1e-3)
        return difference(rows.want[:, columns], rows.got[:, columns], limit)


def _look_drawn(rows: MatchedRows) -> bool:
    """Return whether wrong rows look like chance, not like a function of the right ones.

    Noise in place of rows does not go with the right rows, noise added to them differs from them
    without a pattern: neither with the right rows nor with the mean of all differences.
    """

    def cosine(x: Tensor, y: Tensor) -> float:
        return abs(float((x * y).sum() / (x.norm() * y.norm()).clamp(min=1e-300)))

    def look_drawn(want: Tensor, got: Tensor) -> bool:
        difference = got - want
        goes_with_rows = min(cosine(got, want), cosine(difference, want))
        goes_together = cosine(difference, difference.mean(0).expand_as(difference))
        return max(goes_with_rows, goes_together**2) < CHANCE

    by_rank = [rows.where(rows.ranks == rank) for rank in rows.ranks.unique()]
    return all(look_drawn(x.want, x.got) for x in by_rank)


def _head_order(
    right_weights: np.ndarray, split_weights: np.ndarray, tolerance: float
) -> list[int] | None:
    """The heads whose weights each head has, if these are all heads in another order."""
    difference = np.abs(split_weights[:, None] - right_weights[None]).max((2, 3))
    order = difference.argmin(1).tolist()
    heads = list(range(len(right_weights)))
    is_alike = difference[heads, order] <= tolerance
    return order if is_alike.all() and sorted(order) == heads != order else None


def _copied_heads(
    right_weights: np.ndarray, split_weights: np.ndarray, tolerance: float
) -> str | None:
    """Say which head gives what another one should, in all of its rows that are wrong."""
    for head, (want, got) in enumerate(zip(right_weights, split_weights, strict=True)):
        is_wrong = np.abs(got - want).max(1) > tolerance
        others = np.abs(got - right_weights)[:, is_wrong].max((1, 2), initial=0) <= tolerance
        if is_wrong.any() and others.any():
            return f"head {head} gives what head {int(others.argmax())} should"
    return None


def _other_labels(rows: MatchedRows, limit: float) -> str | None:
    """Describe rows whose gradient is that of another label; None if other rows differ as well.

    With another label the gradient of a softmax differs in two numbers, by as much up as down. With
    no label it is 0.
    """
    is_wrong = rows.errors() > limit
    is_wrong |= (rows.want.norm(dim=1) == 0) & (rows.got.norm(dim=1) > 0)
    if not is_wrong.any() or rows.want.shape[1] < LEAST_CLASSES:
        return None
    change = (rows.got - rows.want)[is_wrong]
    change_sizes, columns = change.abs().sort(1, descending=True)
    is_two_numbers = change_sizes[:, :2].square().sum(1) >= MOSTLY_TWO * change_sizes.square().sum(
        1
    )
    first_change = change.gather(1, columns[:, :1])[:, 0]
    second_change = change.gather(1, columns[:, 1:2])[:, 0]
    is_two_numbers &= (first_change + second_change).abs() <= 0.1 * first_change.abs()
    without_gradient = (rows.want[is_wrong].norm(dim=1) == 0) | (
        rows.got[is_wrong].norm(dim=1) == 0
    )
    if (
        not is_two_numbers.any()
        or float((is_two_numbers | without_gradient).double().mean()) < MOSTLY_LABELS
    ):
        return None
    positions = sorted(rows.positions[is_wrong].tolist())
    count_text = f"{len(positions)} of {len(rows.want)} rows have the gradient of another label, at"
    return f"{count_text} positions {some(positions, 6)}"


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{x:.4g}" for x in numbers)

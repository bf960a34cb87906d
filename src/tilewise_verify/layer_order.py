"""Differences of a layer that goes over tokens in order, found by probes of both models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tilewise_verify.attention_path import Run, projects
from tilewise_verify.causes import Facts
from tilewise_verify.comparison import Comparison
from tilewise_verify.order import (
    Changes,
    PieceStarts,
    facts_of_convolution,
    facts_of_first_rows,
    facts_of_gradient,
    facts_of_halo,
    facts_of_state,
    reach_of,
    short_columns,
    walk,
)
from tilewise_verify.records import (
    LeafSetting,
    ModelRun,
    OutputSetting,
    rows_of_one,
    run_whole,
)
from tilewise_verify.row_probe import RowProbe
from tilewise_verify.weights import UnreadableError


class BothModels(Protocol):
    """A comparison, and the whole and the split model to run again: an Examination."""

    model: nn.Module
    inputs: Mapping[str, Any]
    comparison: Comparison

    def whole_run(self, dtype: torch.dtype | None) -> Run: ...

    def split_run(self, width: int, dtype: torch.dtype | None) -> Run: ...


class LayerOrder:
    """Dependence of a layer's rows on earlier rows, in the whole and in the split model.

    Raises:
        UnreadableError: if it cannot be probed, or computes a softmax: attention is read otherwise.
    """

    def __init__(self, examination: BothModels, layer: str):
        self.examination, self.layer, self.comparison = examination, layer, examination.comparison
        starts = {0}
        for rank_positions in self.comparison.positions:
            rows = rank_positions[rank_positions >= 0]
            starts |= set(rows[torch.diff(rows, prepend=rows[:1] - 2) != 1].tolist())
        self.pieces = PieceStarts(tuple(sorted(starts - {0})), len(self.comparison.counted))
        self.everywhere = torch.arange(self.pieces.num_tokens)
        is_coarse = self.comparison.eps > torch.finfo(torch.float32).eps
        self.dtype = torch.float32 if is_coarse else None
        self.run = examination.whole_run(self.dtype)

    def forward(self) -> Facts:
        """Find wrong states and short convolutions, by changing rows of the input."""
        whole = self._changes(self.run, whole=True)
        split = self._changes(self._split(), whole=False)
        n = self.pieces.num_tokens
        reach = reach_of(whole, n)
        if reach == -1:
            return {}
        if reach is not None:
            return facts_of_convolution(whole, split, reach, self.pieces)
        walked = walk(whole, split, n)
        columns = self._short_columns(walked.borders)
        cut = walked.cuts[0] if walked.cuts else None
        passes = cut is not None and bool(split((cut - 1,))[cut] > 1)
        facts = facts_of_state(walked, passes, bool(columns), self.pieces)
        if walked.cuts or walked.state_leaks or walked.halo_leaks:
            return facts
        starts = [x for x in self.pieces.starts if x not in walked.borders]
        return self._halo(columns, starts) or self._prefixes(starts)

    def backward(self) -> Facts:
        """Find rows that get no gradient from other pieces."""
        rows = (0, *self.pieces.starts)
        probe = RowProbe(self.layer, rows, self.everywhere, backward=True)
        self._check_functions(probe)
        want = self.run(probe)
        got = self.examination.split_run(want.shape[1], self.dtype)(probe)
        return facts_of_gradient(want.double(), got.double(), self.pieces)

    def _changes(self, run: Run, *, whole: bool) -> Changes:
        """Return a function from changed rows of the input to the changes of the layer's output."""
        probe = RowProbe(self.layer, (), self.everywhere)
        if whole:
            self._check_functions(probe)
        unchanged = run(probe)
        return lambda rows: self._beside_rounding(run(probe._replace(rows=tuple(rows))), unchanged)

    def _beside_rounding(self, changed: Tensor, unchanged: Tensor) -> Tensor:
        eps = self.comparison.eps if self.dtype is None else torch.finfo(self.dtype).eps
        size = unchanged.double().norm(dim=1).median().clamp(min=1e-300)
        return ((changed - unchanged).double().norm(dim=1) / (4 * eps * size)).nan_to_num(
            nan=torch.inf
        )

    def _check_functions(self, probe: RowProbe) -> None:
        model, inputs = self.examination.model, self.examination.inputs
        called_names = run_whole(model, inputs, ModelRun(probe, dtype=self.dtype)).called
        attention_names = [
            name for name in called_names if "softmax" in name or "attention" in name
        ]
        if attention_names:
            raise UnreadableError(f"it calls {attention_names[0]}")

    def _split(self) -> Run:
        width = self.run(RowProbe(self.layer, (), self.everywhere)).shape[1]
        return self.examination.split_run(width, self.dtype)

    def _short_columns(self, borders: Sequence[int]) -> dict[str, list[int]]:
        """Columns of the layer's projections that a short convolution reads."""
        whole, n = self.comparison.whole, self.pieces.num_tokens
        inner_modules = [x for x in whole.outputs if x.startswith(f"{self.layer}.")]
        parts = [x for x in inner_modules if projects(x, whole, n)]
        edges = [0, *borders, n]
        longest = max(range(1, len(edges)), key=lambda i: edges[i] - edges[i - 1])
        for leaves in (parts[:-1], parts):  # the last one mostly takes the result
            setting = LeafSetting(leaves, f"{self.layer}()", 1.0)
            with suppress(UnreadableError, RuntimeError):
                result = self.run(setting)
                if found := short_columns(result, setting.leaves, edges[longest] - 1):
                    return found
        return {}

    def _halo(self, columns: Mapping[str, list[int]], starts: Sequence[int]) -> Facts:
        """Find pieces whose convolution does not read the rows before them."""
        for name, module_columns in columns.items():
            values = rows_of_one(self.comparison.whole.outputs[name], self.pieces.num_tokens)
            if values is None:
                continue
            changed = values[:, module_columns].clone()
            changed[[start - 1 for start in starts]] *= -1.5
            probe = OutputSetting(
                name, tuple(module_columns), values[:, module_columns], f"{self.layer}()"
            )
            width = self.run(probe).shape[1]
            runs = self.run, self.examination.split_run(width, self.dtype)
            want, got = (
                self._beside_rounding(run(probe._replace(values=changed)), run(probe))
                for run in runs
            )
            if facts := facts_of_halo(want, got, starts):
                return facts
        return {}

    def _prefixes(self, starts: Sequence[int]) -> Facts:
        """Find a first computation in the layer that is wrong in the first rows of pieces only."""
        for name in self.comparison.whole.outputs:
            rows = (
                self.comparison.rows("output", name) if name.startswith(f"{self.layer}.") else None
            )
            if rows is None or self.comparison.error("output", name) <= 1:
                continue
            is_wrong = rows.errors() > float(self.comparison.limits("output", name)[0])
            return facts_of_first_rows(rows.positions[is_wrong].tolist(), starts, self.pieces)
        return {}

"""How a layer that goes over tokens in order differs: the whole and the split model are probed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tilewise.verification.attention_path import Run, projects
from tilewise.verification.causes import Facts
from tilewise.verification.comparison import Comparison
from tilewise.verification.order import (
    Changes,
    Pieces,
    facts_of_convolution,
    facts_of_first_rows,
    facts_of_gradient,
    facts_of_halo,
    facts_of_state,
    reach_of,
    short_columns,
    walk,
)
from tilewise.verification.records import (
    LeafSetting,
    ModelRun,
    OutputSetting,
    rows_of_one,
    run_whole,
)
from tilewise.verification.row_probe import RowProbe
from tilewise.verification.weights import UnreadableError


class BothModels(Protocol):
    """A comparison, and the whole and the split model to run again: an Examination."""

    model: nn.Module
    inputs: Mapping[str, Any]
    found: Comparison

    def whole_run(self, dtype: torch.dtype | None) -> Run: ...

    def split_run(self, width: int, dtype: torch.dtype | None) -> Run: ...


class LayerOrder:
    """How rows of a layer that goes over tokens in order depend on others, in both models.

    Raises:
        UnreadableError: if it cannot be probed, or computes a softmax: attention is read otherwise.
    """

    def __init__(self, examination: BothModels, layer: str):
        self.examination, self.layer, self.found = examination, layer, examination.found
        starts = {0}
        for own in self.found.positions:
            rows = own[own >= 0]
            starts |= set(rows[torch.diff(rows, prepend=rows[:1] - 2) != 1].tolist())
        self.pieces = Pieces(tuple(sorted(starts - {0})), len(self.found.counted))
        self.everywhere = torch.arange(self.pieces.num_tokens)
        coarse = self.found.eps > torch.finfo(torch.float32).eps
        self.dtype = torch.float32 if coarse else None
        self.run = examination.whole_run(self.dtype)

    def forward(self) -> Facts:
        """What is wrong with states and short convolutions, from rows of the input."""
        whole, split = (
            self._changes(self.run, whole=True),
            self._changes(self._split(), whole=False),
        )
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
        """Rows that get no gradient of other pieces."""
        rows = (0, *self.pieces.starts)
        probe = RowProbe(self.layer, rows, self.everywhere, backward=True)
        self._check_functions(probe)
        want = self.run(probe)
        got = self.examination.split_run(want.shape[1], self.dtype)(probe)
        return facts_of_gradient(want.double(), got.double(), self.pieces)

    def _changes(self, run: Run, *, whole: bool) -> Changes:
        """Changes of the layer's output with rows of its input, beside the rounding of its rows."""
        probe = RowProbe(self.layer, (), self.everywhere)
        if whole:
            self._check_functions(probe)
        before = run(probe)
        return lambda rows: self._beside_rounding(run(probe._replace(rows=tuple(rows))), before)

    def _beside_rounding(self, after: Tensor, before: Tensor) -> Tensor:
        eps = self.found.eps if self.dtype is None else torch.finfo(self.dtype).eps
        size = before.double().norm(dim=1).median().clamp(min=1e-300)
        return ((after - before).double().norm(dim=1) / (4 * eps * size)).nan_to_num(nan=torch.inf)

    def _check_functions(self, probe: RowProbe) -> None:
        model, inputs = self.examination.model, self.examination.inputs
        called = run_whole(model, inputs, ModelRun(probe, dtype=self.dtype)).called
        found = [name for name in called if "softmax" in name or "attention" in name]
        if found:
            raise UnreadableError(f"it calls {found[0]}")

    def _split(self) -> Run:
        width = self.run(RowProbe(self.layer, (), self.everywhere)).shape[1]
        return self.examination.split_run(width, self.dtype)

    def _short_columns(self, borders: Sequence[int]) -> dict[str, list[int]]:
        """Columns of the layer's projections of which few tokens in a row are read together."""
        whole, n = self.found.whole, self.pieces.num_tokens
        inside = [x for x in whole.outputs if x.startswith(f"{self.layer}.")]
        parts = [x for x in inside if projects(x, whole, n)]
        edges = [0, *borders, n]
        last = max(range(1, len(edges)), key=lambda i: edges[i] - edges[i - 1])
        for leaves in (parts[:-1], parts):  # the last one mostly takes the result
            setting = LeafSetting(leaves, f"{self.layer}()", 1.0)
            with suppress(UnreadableError, RuntimeError):
                result = self.run(setting)
                if found := short_columns(result, setting.leaves, edges[last] - 1):
                    return found
        return {}

    def _halo(self, columns: Mapping[str, list[int]], starts: Sequence[int]) -> Facts:
        """Whether rows before the pieces are read by a convolution where a state passes."""
        for name, own in columns.items():
            values = rows_of_one(self.found.whole.outputs[name], self.pieces.num_tokens)
            if values is None:
                continue
            changed = values[:, own].clone()
            changed[[start - 1 for start in starts]] *= -1.5
            probe = OutputSetting(name, tuple(own), values[:, own], f"{self.layer}()")
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
        """Whether what is computed first in the layer is wrong in first rows of pieces alone."""
        for name in self.found.whole.outputs:
            rows = self.found.rows("output", name) if name.startswith(f"{self.layer}.") else None
            if rows is None or self.found.error("output", name) <= 1:
                continue
            off = rows.errors() > float(self.found.limits("output", name)[0])
            return facts_of_first_rows(rows.positions[off].tolist(), starts, self.pieces)
        return {}

"""The ranks' records beside the whole model's: rows by position, and how far apart they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.layouts.layout import contiguous, striped, zigzag
from tilewise.verification.records import Record, token_dim

FACTORS = 4.0, 1.5  # times what rounding does to the worst row, and to all: a deviation
MATCHED = 0.9  # of all tokens, at least, for matching by value to count


class MatchedRows(NamedTuple):
    """The same rows of both runs: [num_rows, numbers of a row], and their positions and ranks."""

    want: Tensor
    got: Tensor
    positions: Tensor
    ranks: Tensor

    def errors(self) -> Tensor:
        """Per row |got - want| / max(|want|, the median of |want|), in the 2-norm."""
        size = self.want.norm(dim=1)
        error = (self.got - self.want).norm(dim=1) / size.clamp(min=_middle(size))
        return error.nan_to_num(nan=torch.inf)

    def sizes(self) -> tuple[float, float]:
        """The error of the worst row, and the root mean square of all."""
        errors = self.errors()
        return float(errors.max()), float(errors.square().mean().sqrt())

    def ratios(self) -> Tensor:
        """Per row the number that got is want times, nan where want is nothing."""
        size = self.want.norm(dim=1)
        product = (self.got * self.want).sum(1) / size.square()
        return product.masked_fill(size < 1e-3 * _middle(size), torch.nan)

    def scaled(self, scales: Sequence[float]) -> MatchedRows:
        """What is wanted, times the scale of each row's rank."""
        factors = torch.tensor(scales, dtype=torch.float64)[self.ranks, None]
        return self._replace(want=self.want * factors)

    def where(self, kept: Tensor) -> MatchedRows:
        return MatchedRows(*(x[kept] for x in self))


def _middle(size: Tensor) -> float:
    some = size[size > 0]
    return float(some.median()) if len(some) else 1e-300


def rows_of(
    whole: Tensor, parts: Sequence[Tensor], positions: Sequence[Tensor], num_tokens: int
) -> MatchedRows | None:
    """Rows of a whole tensor and of its parts along the dimension of tokens; None without one.

    Parts that are as long as the whole are copies of it.
    """
    dim = token_dim(whole, num_tokens)
    if dim is None:
        return None
    want, got, at = whole.movedim(dim, 0).reshape(num_tokens, -1), [], []
    for part, own in zip(parts, positions, strict=True):
        for where in (own, torch.arange(num_tokens)):
            along = token_dim(part, len(where), dim)
            if along is not None and part.numel() == len(where) * want.shape[1]:
                got.append(part.movedim(along, 0).reshape(len(where), -1))
                at.append(where)
                break
    if len(at) < len(parts):
        return None
    where = torch.cat(at)
    ranks = torch.cat([torch.full_like(x, rank) for rank, x in enumerate(at)])
    kept = where >= 0
    return MatchedRows(want[where[kept]], torch.cat(got)[kept], where[kept], ranks[kept])


def loss_difference(whole: Record, ranks: Sequence[Record], tolerance: float) -> str | None:
    """What is wrong if the ranks' losses do not add up to the whole's, and are not all it."""
    want, shares = whole.loss, [record.loss for record in ranks]
    known = [x for x in shares if x is not None]
    if want is None or len(known) < len(shares):
        return None
    total = sum(known)
    if abs(total - want) <= tolerance or all(abs(x - want) <= tolerance for x in known):
        return None
    times = total / want if want else float("inf")
    return f"the ranks' losses add up to {total:.6g}, {times:.4g} times the whole loss {want:.6g}"


class StepErrors(NamedTuple):
    """By parameter: gradients summed over ranks; how far the sums, and the worst of the ranks'
    own, are from what is wanted, as multiples of a limit."""

    sums: dict[str, Tensor]
    total: dict[str, float]
    each: dict[str, float]


def step_errors(
    wanted: Mapping[str, Tensor],
    shares: Sequence[Mapping[str, Tensor]],
    limits: Mapping[str, float],
) -> StepErrors:
    """Compare the ranks' gradients of parameters with the whole's, in the 2-norm.

    Args:
        shares: by rank; a gradient that a rank has not is zero.
    """
    got = {name: [x.get(name, torch.zeros_like(w)) for x in shares] for name, w in wanted.items()}
    sums = {name: torch.stack(x).sum(0) for name, x in got.items()}

    def error(name: str, x: Tensor) -> float:
        off = float((x - wanted[name]).norm()) / limits[name]
        return off if off == off else float("inf")

    total = {name: error(name, x) for name, x in sums.items()}
    return StepErrors(sums, total, {n: max(error(n, x) for x in own) for n, own in got.items()})


class Comparison:
    """All records of one split.

    Args:
        noisy: of the unsplit model, disturbed by rounding.
        counted: bool [num_tokens], which rows mean something (are no padding).
        eps: of the model's dtype.
    """

    def __init__(
        self,
        whole: Record,
        ranks: list[Record],
        positions: list[Tensor],
        noisy: list[Record],
        counted: Tensor,
        eps: float,
    ):
        self.whole, self.ranks, self.positions = whole, ranks, positions
        self.noisy, self.counted, self.eps = noisy, counted, eps
        self.num_tokens = len(counted)

    def rows(
        self, kind: str, name: str, key: str | None = None, noisy: Record | None = None
    ) -> MatchedRows | None:
        """Rows of outputs, grads, or inputs (by key) of a module; None if they do not compare.

        Args:
            noisy: what is compared instead of the ranks.
        """
        records, positions = self.ranks, self.positions
        if noisy is not None:
            records, positions = [noisy], [torch.arange(self.num_tokens)]
        tables: list[Any] = [getattr(record, kind).get(name) for record in (self.whole, *records)]
        if key is not None:
            tables = [None if table is None else table.get(key) for table in tables]
        if any(table is None for table in tables):
            return None
        rows = rows_of(tables[0], tables[1:], positions, self.num_tokens)
        rows = rows and rows.where(self.counted[rows.positions])
        return rows if rows and len(rows.want) else None

    def tolerances(self, kind: str, name: str, key: str | None = None) -> tuple[float, float]:
        """What rounding explains: of the worst row, and of the root mean square of all."""
        found = [self.rows(kind, name, key, record) for record in self.noisy]
        sizes = [(self.eps, self.eps), *(rows.sizes() for rows in found if rows)]
        return tuple(f * max(x) for f, x in zip(FACTORS, zip(*sizes, strict=True), strict=True))  # pyright: ignore

    def error(self, kind: str, name: str, key: str | None = None) -> float:
        """How far a module is off, as a multiple of its tolerance; 0 if nothing compares."""
        rows = self.rows(kind, name, key)
        if rows is None:
            return 0.0
        limits = self.tolerances(kind, name, key)
        return max(x / y for x, y in zip(rows.sizes(), limits, strict=True))

    def forward_layer(self) -> str | None:
        """The first module whose output deviates although its inputs do not.

        A module that gets its rows in an order of its own, as an expert does, is no evidence: the
        module around it has to deviate too.
        """
        names = [name for name in self.whole.outputs if self.error("outputs", name) > 1]
        deviating = [name for name in names if self._around(name) in (None, *names)]
        for name in deviating:
            inputs = self.whole.inputs[name].items()
            if all(self.error("inputs", name, k) <= 1 for k, x in inputs if x.is_floating_point()):
                return name
        return deviating[0] if deviating else None

    def _around(self, name: str) -> str | None:
        """The innermost module around one whose rows compare."""
        while "." in name:
            name = name.rpartition(".")[0]
            if name in self.whole.outputs and self.rows("outputs", name) is not None:
                return name
        return None

    def other_inputs(self, name: str) -> Iterator[tuple[str, MatchedRows]]:
        """Inputs of whole numbers, such as positions, that differ."""
        for key, x in self.whole.inputs[name].items():
            rows = None if x.is_floating_point() else self.rows("inputs", name, key)
            if rows is not None and not torch.equal(rows.want, rows.got):
                yield key, rows


def matched_positions(
    whole: Record, ranks: Sequence[Record], num_tokens: int
) -> list[Tensor] | None:
    """Positions of every rank's rows, by their values at the first module that shows them."""
    if len(ranks) == 1:
        return [torch.arange(num_tokens)]
    for name, table in whole.outputs.items():
        parts = [record.outputs[name] for record in ranks if name in record.outputs]
        dim = token_dim(table, num_tokens)
        if dim is None or len(parts) < len(ranks) or any(x.ndim != table.ndim for x in parts):
            continue
        rows = [x.movedim(dim, 0).flatten(1) for x in (table, *parts)]
        copies = all(len(part) == num_tokens for part in rows)
        if not copies and all(part.shape[1] == rows[0].shape[1] for part in rows):
            found = _matched(rows[0], rows[1:])
            if found is not None:
                return found
    return None


def _matched(whole: Tensor, parts: Sequence[Tensor]) -> list[Tensor] | None:
    size = float(whole.abs().max())
    same = [torch.cdist(part, whole) <= 1e-5 * size for part in parts]
    for layout in (make(len(whole), len(parts)) for make in (contiguous, zigzag, striped)):
        usual = [layout.positions(rank) for rank in range(len(parts))]
        pairs = list(zip(same, usual, strict=True))
        if all(len(x) == len(at) and x[torch.arange(len(at)), at].all() for x, at in pairs):
            return usual
    positions = _in_runs(same)
    known = torch.cat(positions)
    return positions if len(torch.unique(known[known >= 0])) >= MATCHED * len(whole) else None


def _in_runs(same: Sequence[Tensor]) -> list[Tensor]:
    """Each rank's rows as few, long runs of positions; equal rows are told apart by neighbours.

    Args:
        same: which rows of a rank, downward, are equal to which of the whole.
    """
    n = same[0].shape[1]
    used = torch.zeros(n, dtype=torch.bool)
    positions = []
    for table in same:
        own, at = torch.full((len(table),), -1), 0
        while at < len(table):
            best = torch.arange(0)
            for start in torch.nonzero(table[at] & ~used).flatten().tolist():
                run = torch.arange(start, min(n, start + len(table) - at))
                fits = table[at + torch.arange(len(run)), run] & ~used[run]
                run = run[: int(fits.long().cumprod(0).sum())]
                best = run if len(run) > len(best) else best
            own[at : at + len(best)], used[best] = best, True
            at += max(len(best), 1)
        positions.append(own)
    return positions

"""The ranks' records beside the whole model's: rows by position, and how far apart they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.verification.records import Record

FACTORS = 4.0, 1.5  # times what rounding does to the worst row, and to all: a deviation
MATCHED = 0.9  # of all tokens, at least, for matching by value to count


class Rows(NamedTuple):
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

    def ratios(self) -> Tensor:
        """Per row the number that got is want times, nan where want is nothing."""
        product = (self.got * self.want).sum(1) / self.want.square().sum(1)
        return product.masked_fill(
            self.want.norm(dim=1) < 1e-3 * _middle(self.want.norm(dim=1)), torch.nan
        )

    def of_rank(self, rank: int) -> Rows:
        return Rows(*(x[self.ranks == rank] for x in self))


def _sizes(errors: Tensor) -> tuple[float, float]:
    return float(errors.max()), float(errors.square().mean().sqrt())


def _middle(size: Tensor) -> float:
    some = size[size > 0]
    return float(some.median()) if len(some) else 1e-300


def rows_of(
    whole: Tensor, parts: Sequence[Tensor], positions: Sequence[Tensor], num_tokens: int
) -> Rows | None:
    """Rows of a whole tensor and of its parts along the dimension of tokens; None without one.

    Parts that are as long as the whole are copies of it.
    """
    for dim in sorted(range(whole.ndim), key=lambda d: d != whole.ndim - 2):
        if whole.shape[dim] != num_tokens:
            continue
        at = []
        for part, own in zip(parts, positions, strict=True):
            rest = part.shape[:dim] + part.shape[dim + 1 :]
            if part.ndim != whole.ndim or rest != whole.shape[:dim] + whole.shape[dim + 1 :]:
                break
            if part.shape[dim] == len(own):
                at.append(own)
            elif part.shape[dim] == num_tokens:
                at.append(torch.arange(num_tokens))
        if len(at) == len(parts):
            table = whole.movedim(dim, 0).flatten(1) if whole.ndim > 1 else whole[:, None]
            got = [p.movedim(dim, 0).flatten(1) if p.ndim > 1 else p[:, None] for p in parts]
            where, ranks = (
                torch.cat(at),
                torch.cat([torch.full_like(x, r) for r, x in enumerate(at)]),
            )
            kept = where >= 0
            return Rows(table[where[kept]], torch.cat(got)[kept], where[kept], ranks[kept])
    return None


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
        self.everything = [torch.arange(self.num_tokens)]

    def rows(self, kind: str, name: str, key: str | None = None) -> Rows | None:
        """Rows of outputs, grads, or inputs (by key) of a module; None if they do not compare."""
        found = self._read([self.whole, *self.ranks], kind, name, key)
        if found is None:
            return None
        return self._counted(rows_of(found[0], found[1:], self.positions, self.num_tokens))

    def tolerance(self, kind: str, name: str, key: str | None = None) -> float:
        """The largest error of a row that rounding explains."""
        return self._tolerances(kind, name, key)[0]

    def _tolerances(self, kind: str, name: str, key: str | None) -> tuple[float, float]:
        """Of the worst row, and of the root mean square of all."""
        worst = self.eps, self.eps
        for record in self.noisy:
            found = self._read([self.whole, record], kind, name, key)
            if found is None:
                continue
            rows = self._counted(rows_of(found[0], found[1:], self.everything, self.num_tokens))
            if rows is not None and len(rows.want):
                worst = tuple(map(max, worst, _sizes(rows.errors())))
        return worst[0] * FACTORS[0], worst[1] * FACTORS[1]

    def error(self, kind: str, name: str, key: str | None = None) -> float:
        """How far a module is off, as a multiple of its tolerance; 0 if nothing compares."""
        rows = self.rows(kind, name, key)
        if rows is None or not len(rows.want):
            return 0.0
        tolerances = self._tolerances(kind, name, key)
        return max(x / y for x, y in zip(_sizes(rows.errors()), tolerances, strict=True))

    def forward_layer(self) -> str | None:
        """The first module whose output deviates although its inputs do not."""
        deviating = self.deviating("outputs")
        for name in deviating:
            inputs = self.whole.inputs[name]
            if all(
                self.error("inputs", name, key) <= 1
                for key, x in inputs.items()
                if x.is_floating_point()
            ):
                return name
        return deviating[0] if deviating else None

    def deviating(self, kind: str) -> list[str]:
        """Modules whose outputs, or gradients, deviate, and those of the module around them too.

        A module that gets its rows in an order of its own, as an expert does, is no evidence.
        """
        found = [name for name in self.whole.outputs if self.error(kind, name) > 1]
        return [name for name in found if self._around(kind, name) in (None, *found)]

    def _around(self, kind: str, name: str) -> str | None:
        """The innermost module around one whose rows compare."""
        while "." in name:
            name = name.rpartition(".")[0]
            if name in self.whole.outputs and self.rows(kind, name) is not None:
                return name
        return None

    def other_inputs(self, name: str) -> Iterator[tuple[str, Rows]]:
        """Inputs of whole numbers, such as positions, that differ."""
        for key, x in self.whole.inputs[name].items():
            rows = None if x.is_floating_point() else self.rows("inputs", name, key)
            if rows is not None and not torch.equal(rows.want, rows.got):
                yield key, rows

    def _read(
        self, records: Sequence[Record], kind: str, name: str, key: str | None
    ) -> list[Tensor] | None:
        tables: list[Any] = [getattr(record, kind).get(name) for record in records]
        if key is not None:
            tables = [None if table is None else table.get(key) for table in tables]
        return None if any(table is None for table in tables) else tables

    def _counted(self, rows: Rows | None) -> Rows | None:
        return rows and Rows(*(x[self.counted[rows.positions]] for x in rows))


def matched_positions(
    whole: Record, ranks: Sequence[Record], num_tokens: int
) -> list[Tensor] | None:
    """Positions of every rank's rows, by their values at the first module that shows them."""
    for name, table in whole.outputs.items():
        parts = [record.outputs[name] for record in ranks if name in record.outputs]
        if len(parts) < len(ranks) or any(part.ndim != table.ndim for part in parts):
            continue
        for dim in sorted(range(table.ndim), key=lambda d: d != table.ndim - 2):
            if table.shape[dim] != num_tokens or all(p.shape[dim] == num_tokens for p in parts):
                continue
            rows = [x.movedim(dim, 0).flatten(1) for x in (table, *parts)]
            if any(part.shape[1:] != rows[0].shape[1:] for part in rows):
                continue
            found = _matched(rows[0], rows[1:])
            if found is not None:
                return found
    return None


def _matched(whole: Tensor, parts: Sequence[Tensor]) -> list[Tensor] | None:
    size = float(whole.abs().max())
    same = [torch.cdist(part, whole) <= 1e-5 * size for part in parts]
    found = [_in_runs(same, stride) for stride in (1, len(parts))]
    positions, _ = min(found, key=lambda one: one[1])
    known = torch.cat(positions)
    return positions if len(torch.unique(known[known >= 0])) >= MATCHED * len(whole) else None


def _in_runs(same: Sequence[Tensor], stride: int) -> tuple[list[Tensor], int]:
    """Each rank's rows as few, long runs of positions; equal rows are told apart by neighbours."""
    used = torch.zeros(same[0].shape[1], dtype=torch.bool)
    positions, num_runs = [], 0
    for table in same:
        own = torch.full((len(table),), -1)
        at = 0
        while at < len(table):
            best, length = -1, 0
            for start in torch.nonzero(table[at] & ~used).flatten().tolist():
                reach = 0
                while (
                    at + reach < len(table)
                    and start + reach * stride < len(used)
                    and table[at + reach, start + reach * stride]
                    and not used[start + reach * stride]
                ):
                    reach += 1
                best, length = (start, reach) if reach > length else (best, length)
            if length:
                run = best + stride * torch.arange(length)
                own[at : at + length], used[run] = run, True
            num_runs += 1
            at += max(length, 1)
        positions.append(own)
    return positions, num_runs

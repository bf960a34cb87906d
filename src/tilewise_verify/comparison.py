"""Comparison of the ranks' records with the whole model's: rows by position, and their errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.layouts.layout import contiguous, striped, zigzag
from tilewise_verify.records import Record, token_dim

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

    def sizes(self) -> Tensor:
        """The error of the worst row, and the root mean square of all."""
        errors = self.errors()
        return torch.stack([errors.max(), errors.square().mean().sqrt()])

    def ratios(self) -> Tensor:
        """Per row the factor by which got is a multiple of want; nan where want is 0."""
        size = self.want.norm(dim=1)
        product = (self.got * self.want).sum(1) / size.square()
        return product.masked_fill(size < 1e-3 * _middle(size), torch.nan)

    def scaled(self, scales: Sequence[float]) -> MatchedRows:
        """Return the wanted rows, each times the scale of its rank."""
        factors = torch.tensor(scales, dtype=torch.float64)[self.ranks, None]
        return self._replace(want=self.want * factors)

    def shares_summed(self) -> MatchedRows:
        """Return each position once, with the sum of the gradient shares of all its ranks."""
        unique_positions, inverse = torch.unique(self.positions, return_inverse=True)
        summed = torch.zeros(len(unique_positions), self.got.shape[1], dtype=self.got.dtype)
        summed.index_add_(0, inverse, self.got)
        first_rows = torch.full((len(unique_positions),), len(inverse))
        first_rows = first_rows.scatter_reduce(0, inverse, torch.arange(len(inverse)), "amin")
        return MatchedRows(self.want[first_rows], summed, unique_positions, self.ranks[first_rows])

    def where(self, is_kept: Tensor) -> MatchedRows:
        return MatchedRows(*(x[is_kept] for x in self))


def _middle(size: Tensor) -> float:
    positive_sizes = size[size > 0]
    return float(positive_sizes.median()) if len(positive_sizes) else 1e-300


def rows_of(
    whole: Tensor, parts: Sequence[Tensor], positions: Sequence[Tensor], num_tokens: int
) -> MatchedRows | None:
    """Rows of a whole tensor and of its parts along the dimension of tokens; None without one.

    Parts that are as long as the whole are copies of it.
    """
    dim = token_dim(whole, num_tokens)
    if dim is None:
        return None
    want, parts_found = whole.movedim(dim, 0).reshape(num_tokens, -1), []
    for rank, (part, rank_positions) in enumerate(zip(parts, positions, strict=True)):
        for part_positions in (rank_positions, torch.arange(num_tokens)):
            part_dim = token_dim(part, len(part_positions), dim)
            if part_dim is not None and part.numel() == len(part_positions) * want.shape[1]:
                rows = part.movedim(part_dim, 0).reshape(len(part_positions), -1)
                parts_found.append((rows, part_positions, torch.full_like(part_positions, rank)))
                break
        else:
            return None
    got, part_positions, ranks = map(torch.cat, zip(*parts_found, strict=True))
    return MatchedRows(want[part_positions.clamp(min=0)], got, part_positions, ranks).where(
        part_positions >= 0
    )


def loss_tolerance(whole: Record, noisy: Sequence[Record], eps: float) -> float:
    """Return the difference between two losses that rounding explains.

    A number y of a module's output, rounded by a relative error of eps, moves the loss by eps y
    dloss/dy. Such errors have random signs, so they add up like the root of their squares. The
    disturbed runs measure the same as one draw, which may be small by chance. The loss itself adds
    up the products of the last module that has a gradient, in any order: its own error is relative
    to their magnitudes, which may be much larger than a sum that cancels.

    Args:
        noisy: records of the unsplit model, disturbed by rounding.
        eps: of the model's dtype.
    """
    gradients = whole.tables["gradient"]
    products = [
        output * gradients[name]
        for name, output in whole.outputs.items()
        if name in gradients and gradients[name].shape == output.shape
    ]
    expected = eps * sum(float(x.square().sum()) for x in products) ** 0.5
    loss = whole.loss or 0.0
    measured = max((abs((record.loss or 0.0) - loss) for record in noisy), default=0.0)
    magnitude = max(abs(loss), float(products[-1].abs().sum()) if products else 0.0)
    return 4 * max(expected, measured) + 2 * eps * magnitude


def loss_difference(whole: Record, ranks: Sequence[Record], tolerance: float) -> str | None:
    """Return what is wrong if the ranks' losses neither add up to the whole's nor all equal it."""
    whole_loss, losses = whole.loss, [record.loss for record in ranks if record.loss is not None]
    if whole_loss is None or len(losses) < len(ranks):
        return None
    total = sum(losses)
    if abs(total - whole_loss) <= tolerance or all(
        abs(x - whole_loss) <= tolerance for x in losses
    ):
        return None
    ratio = total / whole_loss if whole_loss else float("inf")
    text = f"the ranks' losses add up to {total:.6g}, {ratio:.4g} times the whole loss"
    return f"{text} {whole_loss:.6g}"


class StepErrors(NamedTuple):
    """Errors of a step's gradients by parameter, as multiples of a limit.

    Attributes:
        sums: the gradients, summed over ranks.
        total: errors of these sums.
        each: errors of the worst rank's own gradient.
    """

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
    shares_by_name = {
        name: [x.get(name, torch.zeros_like(w)) for x in shares] for name, w in wanted.items()
    }
    sums = {name: torch.stack(x).sum(0) for name, x in shares_by_name.items()}

    def error(name: str, x: Tensor) -> float:
        error_ratio = float((x - wanted[name]).norm()) / limits[name]
        return error_ratio if error_ratio == error_ratio else float("inf")

    total = {name: error(name, x) for name, x in sums.items()}
    return StepErrors(
        sums,
        total,
        {n: max(error(n, x) for x in rank_shares) for n, rank_shares in shares_by_name.items()},
    )


class Comparison(NamedTuple):
    """All records of one split.

    Attributes:
        noisy: records of the unsplit model, disturbed by rounding.
        counted: bool [num_tokens], True for rows that are no padding.
        eps: of the model's dtype.
    """

    whole: Record
    ranks: list[Record]
    positions: list[Tensor]
    noisy: list[Record]
    counted: Tensor
    eps: float

    def rows(self, kind: str, name: str, noisy: Record | None = None) -> MatchedRows | None:
        """Rows of a table of the records (Record.tables); None if they do not compare.

        Args:
            noisy: a record to compare in place of the ranks'.
        """
        num_tokens = len(self.counted)
        records = self.ranks if noisy is None else [noisy]
        positions = self.positions if noisy is None else [torch.arange(num_tokens)]
        parts: list[Any] = [record.tables[kind].get(name) for record in (self.whole, *records)]
        if any(part is None for part in parts):
            return None
        rows = rows_of(parts[0], parts[1:], positions, num_tokens)
        rows = rows and rows.where(self.counted[rows.positions])
        if rows and noisy is None and kind == "gradient" and len(self.shared):
            rows = rows.shares_summed()
        return rows if rows and len(rows.want) else None

    @property
    def shared(self) -> Tensor:
        """Positions of the tokens that every rank holds, if some are held by one alone."""
        count = torch.zeros(len(self.counted), dtype=torch.int64)
        for rank_positions in self.positions:
            count[rank_positions[rank_positions >= 0].unique()] += 1
        everywhere = (count == len(self.positions)).nonzero().flatten()
        return everywhere if len(self.positions) > 1 and (count == 1).any() else everywhere[:0]

    def limits(self, kind: str, name: str) -> Tensor:
        """Return the errors that rounding explains: of the worst row, and the root mean square."""
        noisy_rows = [self.rows(kind, name, record) for record in self.noisy]
        sizes = [
            torch.full((2,), self.eps).double(),
            *(rows.sizes() for rows in noisy_rows if rows),
        ]
        return torch.stack(sizes).amax(0) * torch.tensor(FACTORS)

    def error(self, kind: str, name: str, scales: Sequence[float] = ()) -> float:
        """Return a module's error as a multiple of its limit; 0 if nothing can be compared."""
        rows = self.rows(kind, name)
        if rows is None:
            return 0.0
        rows = rows.scaled(scales) if scales else rows
        return float((rows.sizes() / self.limits(kind, name)).max())

    def loss_difference(self) -> str | None:
        """Return what is wrong if the ranks' losses differ by more than rounding explains."""
        tolerance = loss_tolerance(self.whole, self.noisy, self.eps)
        return loss_difference(self.whole, self.ranks, tolerance)

    def around(self, name: str) -> str | None:
        """The innermost module around one whose rows compare."""
        while "." in name:
            name = name.rpartition(".")[0]
            if self.rows("output", name) is not None:
                return name
        return None


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
            positions = _matched(rows[0], rows[1:])
            if positions is not None:
                return positions
    return None


def _matched(whole: Tensor, parts: Sequence[Tensor]) -> list[Tensor] | None:
    size = float(whole.abs().max())
    is_equal = [torch.cdist(part, whole) <= 1e-5 * size for part in parts]
    for layout in (make(len(whole), len(parts)) for make in (contiguous, zigzag, striped)):
        layout_positions = [layout.positions(rank) for rank in range(len(parts))]
        pairs = list(zip(is_equal, layout_positions, strict=True))
        if all(
            len(x) == len(row_positions)
            and x[torch.arange(len(row_positions)), row_positions].all()
            for x, row_positions in pairs
        ):
            return layout_positions
    positions = _in_runs(is_equal)
    all_positions = torch.cat(positions)
    return (
        positions
        if len(torch.unique(all_positions[all_positions >= 0])) >= MATCHED * len(whole)
        else None
    )


def _in_runs(is_equal: Sequence[Tensor]) -> list[Tensor]:
    """Each rank's rows as few, long runs of positions; neighbours distinguish equal rows.

    Args:
        is_equal: for each rank a bool table: rows of the rank by rows of the whole.
    """
    n, positions = is_equal[0].shape[1], []
    is_taken = torch.zeros(n, dtype=torch.bool)
    for table in is_equal:
        rank_positions, next_row = torch.full((len(table),), -1), 0
        while next_row < len(table):
            best = torch.arange(0)
            for start in torch.nonzero(table[next_row] & ~is_taken).flatten().tolist():
                run = torch.arange(start, min(n, start + len(table) - next_row))
                matches = table[next_row + torch.arange(len(run)), run] & ~is_taken[run]
                run = run[: int(matches.long().cumprod(0).sum())]
                best = run if len(run) > len(best) else best
            rank_positions[next_row : next_row + len(best)], is_taken[best] = best, True
            next_row += max(len(best), 1)
        positions.append(rank_positions)
    return positions

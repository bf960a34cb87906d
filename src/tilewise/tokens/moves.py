"""The row moves of each verb, from layouts alone; they are made once and kept."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain, pairwise

import numpy as np

from tilewise.compiler.row_moves import FILL, RowMoves, Rows
from tilewise.layouts.cells import cells
from tilewise.layouts.layout import Layout, Run, runs_of_positions
from tilewise.masks.base import Mask
from tilewise.plan.kept import RecentValues
from tilewise.tokens.pieces import entries_of, few_pieces

_KEPT: RecentValues[Hashable, RowMoves] = RecentValues(64)


def _filled(num_rows: int) -> Run:
    return Run(FILL, num_rows, 0)


def halo_moves(layout: Layout, left: int, right: int, cu_seqlens: tuple[int, ...]) -> RowMoves:
    """For each piece of a rank the rows before it, the piece and the rows after it.

    Rows beyond the border of the piece's document are filled.
    """

    def make() -> RowMoves:
        wanted: list[list[Run]] = []
        for pieces in few_pieces(layout, cu_seqlens, "halo"):
            runs: list[Run] = []
            for start, stop in pieces:
                document = int(np.searchsorted(cu_seqlens, start, "right")) - 1
                first = max(start - left, cu_seqlens[document])
                last = min(stop + right, cu_seqlens[document + 1])
                runs += [_filled(left - (start - first)), Run(first, last - first)]
                runs.append(_filled(right - (last - stop)))
            wanted.append([run for run in runs if run.count])
        return RowMoves("halo", layout, wanted, left=left, right=right, cu_seqlens=cu_seqlens)

    return _KEPT.get(("halo", layout, left, right, cu_seqlens), make)


def relayout_moves(layout: Layout, to: Layout) -> RowMoves:
    """The rows of another layout of the same tokens: only rows that change owner travel."""
    return _KEPT.get(("relayout", layout, to), lambda: RowMoves("relayout", layout, to.runs, to=to))


def gather_moves(layout: Layout, mask: Mask | None) -> RowMoves:
    """All rows in order on every rank; with a mask those that the rank's queries see.

    Rows of replicated tokens come from their owners, of `layout.owned`.
    """

    def make() -> RowMoves:
        n, num_tokens, owned = layout.world_size, layout.num_tokens, layout.owned
        if mask is None:
            return RowMoves("gather", owned, [[Run(0, num_tokens)]] * n)
        seen = np.zeros((n, num_tokens), bool)
        for (reader, owner), cell in cells(mask, layout, owned).items():
            rows = owned.rows(owner)
            for start, stop in [(0, len(rows))] if cell.k_rows is None else cell.k_rows:
                seen[reader, rows[start:stop]] = True
        every = np.arange(num_tokens)
        wanted = [_runs_with_fill(np.where(mine, every, FILL)) for mine in seen]
        return RowMoves("gather", owned, wanted, mask=mask)

    return _KEPT.get(("gather", layout, mask), make)


def named_moves(layout: Layout, positions: Sequence[Rows]) -> RowMoves:
    """The rows that each rank names: those that travel in `gather_rows`, to count or simulate.

    Args:
        positions: of each rank any positions, in any order; each row is sent to a rank once.
    """
    wanted = [runs_of_positions(np.unique(mine)) for mine in positions]
    return RowMoves("gather_rows", layout, wanted)


def roll_moves(layout: Layout, shifts: int, cu_seqlens: tuple[int, ...], *, wrap: bool) -> RowMoves:
    """Row t of the result is row t - shifts of its document; filled, or wrapped within it."""

    def make() -> RowMoves:
        edges = np.array(cu_seqlens)
        wanted: list[list[Run]] = []
        for rank in range(layout.world_size):
            rows = layout.rows(rank)
            document = np.searchsorted(edges, rows, "right") - 1
            first, stop = edges[document], edges[document + 1]
            if wrap:  # any number of times around
                around = np.array([shifts % max(int(size), 1) for size in np.diff(edges)])[document]
                source = first + (rows - around - first) % (stop - first)
            else:
                source = rows - shifts
            inside = (first <= source) & (source < stop)
            wanted.append(_runs_with_fill(np.where(inside, source, FILL)))
        return RowMoves("roll", layout, wanted, shifts=shifts, cu_seqlens=cu_seqlens, wrap=wrap)

    return _KEPT.get(("roll", layout, shifts, cu_seqlens, wrap), make)


def _runs_with_fill(positions: np.ndarray) -> list[Run]:
    """Return the runs of positions in any order; positions that are FILL make runs of their own."""
    filled = positions == FILL
    edges = [0, *(np.flatnonzero(np.diff(filled)) + 1).tolist(), len(positions)]
    spans = [(a, b) for a, b in pairwise(edges) if a < b]
    return [
        *chain.from_iterable(
            (_filled(b - a),) if filled[a] else runs_of_positions(positions[a:b]) for a, b in spans
        )
    ]


def predecessor_moves(layout: Layout, first: tuple[int, ...], distance: int) -> RowMoves:
    """For each entry the entry `distance` places before it; filled if that belongs to another
    sequence.

    Args:
        layout: of entries, such as the pieces of all ranks in the order of their tokens.
        first: of each entry the first one of its sequence.
    """

    def make() -> RowMoves:
        beginnings, wanted = np.array(first), list[list[Run]]()
        for rank in range(layout.world_size):
            rows = layout.rows(rank)
            source = rows - distance
            wanted.append(_runs_with_fill(np.where(source >= beginnings[rows], source, FILL)))
        return RowMoves("scan", layout, wanted, first=first, distance=distance)

    return _KEPT.get(("scan", layout, first, distance), make)


_ROUNDS: RecentValues[Hashable, list[RowMoves]] = RecentValues(16)


def scan_moves(layout: Layout, cu_seqlens: tuple[int, ...]) -> list[RowMoves]:
    """The rounds of a scan; a row is the map and the state of a piece, whatever its length.

    First every piece gets the map of the one before it, then of those 1, 2, 4, ... places before.
    """

    def make() -> list[RowMoves]:
        entries = entries_of(few_pieces(layout, cu_seqlens, "scan"), cu_seqlens)
        distances = [1]
        while 2 ** (len(distances) - 1) < entries.most - 1:
            distances.append(2 ** (len(distances) - 1))
        return [predecessor_moves(entries.layout, entries.first, x) for x in distances]

    return _ROUNDS.get((layout, cu_seqlens), make)

"""The step x rank grid of a plan, from the words of its cells: whole, or around what is wrong."""

from collections.abc import Iterable, Sequence
from typing import Protocol


class GridRow(Protocol):
    """A step, as the grid sees it."""

    def cells(self) -> list[str]: ...


def grid(ranks: Iterable[int], rows: Iterable[tuple[int, Sequence[str]]]) -> list[str]:
    """The grid's lines: a header, and for each step its number and a cell per rank."""
    table = [
        ["step", *(f"rank {rank}" for rank in ranks)],
        *([str(number), *cells] for number, cells in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        " | ".join([line[0].rjust(widths[0]), *map(str.ljust, line[1:], widths[1:])]).rstrip()
        for line in table
    ]


REACH = 3
"""Steps and ranks that a marked grid shows on each side of its cell."""


def marked_grid(
    steps: Sequence[GridRow], world_size: int, step: int | None, rank: int | None
) -> str:
    """The part of a grid around a step and a rank, with their cell marked."""
    middle = 0 if rank is None else rank
    last = len(steps) if step is None else step + REACH
    ranks = range(max(0, middle - REACH), min(world_size, middle + REACH + 1))
    rows: list[tuple[int, list[str]]] = []
    for number in range(max(0, last - 2 * REACH), min(len(steps), last + 1)):
        cells = steps[number].cells()
        if number == step and rank is not None and 0 <= rank < len(cells):
            cells[rank] = f"-->{cells[rank]}<--"
        rows.append((number, [cells[r] if r < len(cells) else "?" for r in ranks]))
    return "\n".join(grid(ranks, rows))

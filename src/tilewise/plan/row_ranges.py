"""Sets of rows as ascending half-open ranges: union, cover, trim. None stands for all rows."""

from __future__ import annotations

from tilewise.plan.ir import Rows

ALL: Rows = ((0, 1 << 40),)


def union(*parts: Rows | None) -> Rows:
    """The rows in any of the parts, neighbouring ranges joined."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(r for part in parts for r in (ALL if part is None else part)):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return tuple(merged)


def covers(have: Rows | None, need: Rows | None) -> bool:
    """Whether every row needed is there."""
    if have is None or have == ALL:
        return True
    need = ALL if need is None else need
    return all(any(a <= start and stop <= b for a, b in have) for start, stop in need)


def whole_or(rows: Rows, size: int) -> Rows | None:
    """The rows, or None if they are all of a shard of this size."""
    return None if covers(rows, ((0, size),)) else rows


def count(rows: Rows | None, size: int) -> int:
    """Number of rows of a shard of this size."""
    return size if rows is None else sum(stop - start for start, stop in rows)

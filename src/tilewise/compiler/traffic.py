"""The bytes that each operation of a pass reads and writes in memory."""

from __future__ import annotations

from collections.abc import Callable

from tilewise.compiler.ops import (
    Attend,
    ComputeDelta,
    Expand,
    Merge,
    Op,
    Post,
    Pull,
    V,
    Wait,
    reads,
    writes,
)


def traffic_bytes(op: Op[V], num_bytes: Callable[[V], int]) -> int:
    """Return the bytes that an operation reads and writes beside what a kernel reads.

    A copy reads its source and writes its target; a merge reads both and writes one. A kernel
    writes its results. Where they are added, or converted to another dtype, they are read again,
    and what they go to is written; before that it is read if they are added.

    Args:
        num_bytes: of an operand.
    """
    match op:
        case Attend():
            total = 0
            for (view, adds), made in zip(op.results(), op.made_bytes, strict=True):
                there = num_bytes(view)
                total += made
                if adds:
                    total += made + 2 * there
                elif there != made:
                    total += made + there
            return total
        case Merge() if op.rows is not None:  # rows of the target alone: as many as the source has
            return _merged(op, num_bytes)
        case Post() | Wait() | Expand() | Pull() | ComputeDelta():
            return 0
        case _:
            return sum(map(num_bytes, reads(op))) + sum(map(num_bytes, writes(op)))


def _merged(op: Merge[V], num_bytes: Callable[[V], int]) -> int:
    """Bytes of a merge into rows that a table selects, through scratch where by log-sum-exp."""
    source = num_bytes(op.source)
    if not op.scratch:
        return 3 * source
    return source + 6 * sum(map(num_bytes, op.scratch))

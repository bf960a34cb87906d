"""The least time that any program takes for a mesh tile, on the simulator's terms.

OR-tools' CP-SAT bounds it from below (relaxed.py), programs found so far from above. Where they
differ, every program that could end in between is tried, act by act (prefix.py).
"""

from __future__ import annotations

from typing import NamedTuple

from tilewise.strategies.mesh_schedules.beam import least, search
from tilewise.strategies.mesh_schedules.model import ShardWeights
from tilewise.strategies.mesh_schedules.relaxed import relaxed

WIDTHS = (8, 128)
NEARLY = 1e-6


class Optimum(NamedTuple):
    """seconds: no program takes less; proven: and one takes just that."""

    seconds: float
    proven: bool


def optimum(
    shape: tuple[int, int], costs: ShardWeights, block: float, known: float, most: int = 20_000
) -> Optimum:
    """The least time of a tile whose blocks take so many seconds each.

    Args:
        shape: query and KV shards.
        costs: seconds of the port.
        block: seconds of a block.
        known: seconds that some program takes.
        most: programs of one length that are tried before the bound is returned instead.
    Raises:
        ImportError, ValueError: as relaxed does.
    """
    bound = relaxed(shape, costs, block).seconds
    for width in WIDTHS:
        if known > bound * (1 + NEARLY):
            found = search(shape, costs, block, width, known)
            known = found.seconds if found else known
    if known > bound * (1 + NEARLY):
        tried = least(shape, costs, block, known, most)
        if tried is None:
            return Optimum(bound, False)
        known = tried
    return Optimum(known, True)

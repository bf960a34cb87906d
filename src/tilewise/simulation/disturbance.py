"""Slow ranks and jitter: what a machine's ranks and links lose, the same with every plan and run.

Kernels and messages of a pass take longer by factors that a seed decides.
"""

import numpy as np

from tilewise.simulation.engine import Flow, RankOperation, Track
from tilewise.simulation.machine import Machine

KERNELS, MESSAGES = range(2)


def disturbed(
    tracks: tuple[Track, ...], flows: tuple[Flow, ...], machine: Machine
) -> tuple[tuple[Track, ...], tuple[Flow, ...]]:
    """The tracks and flows of a pass as they are on this machine.

    A kernel of a rank in slow_ranks takes slowness times as long. Each kernel and each message
    takes 1 + jitter x e times as long, e exponential with mean 1.
    """
    if not machine.is_disturbed:
        return tracks, flows
    slower = tuple(_slower(track, machine) for track in tracks)
    if not machine.jitter:
        return slower, flows
    factors = _factors(machine, MESSAGES, 0, len(flows))
    late = (flow._replace(seconds=flow.seconds * x) for flow, x in zip(flows, factors, strict=True))
    return slower, tuple(late)


def _slower(track: Track, machine: Machine) -> Track:
    own = machine.slowness if track.rank in machine.slow_ranks else 1.0
    factors = own * _factors(machine, KERNELS, track.rank, len(track.operations))
    operations: list[RankOperation] = [
        one._replace(kernel=one.kernel * factor) if one.kernel else one
        for one, factor in zip(track.operations, factors.tolist(), strict=True)
    ]
    return track._replace(operations=tuple(operations))


def _factors(machine: Machine, kind: int, rank: int, count: int) -> np.ndarray:
    rng = np.random.default_rng((machine.seed, kind, rank))
    return 1 + machine.jitter * rng.exponential(size=count)

"""Slow ranks and jitter: kernels and messages that take longer, by factors that a seed decides."""

import numpy as np

from tilewise.simulation.engine import Flow, PricedProgram, RankOperation
from tilewise.simulation.machine import Machine

KERNELS, MESSAGES = range(2)


def disturbed(
    programs: tuple[PricedProgram, ...], flows: tuple[Flow, ...], machine: Machine
) -> tuple[tuple[PricedProgram, ...], tuple[Flow, ...]]:
    """Return the programs and flows of a pass with this machine's slow ranks and jitter.

    A kernel of a rank in slow_ranks takes slowness times as long. Each kernel and each message
    takes 1 + jitter x e times as long, e exponential with mean 1.
    """
    slower = tuple(_slower(program, machine) for program in programs)
    if not machine.jitter:
        return slower, flows
    factors = _factors(machine, MESSAGES, 0, len(flows))
    delayed_flows = (
        flow._replace(seconds=flow.seconds * factor)
        for flow, factor in zip(flows, factors, strict=True)
    )
    return slower, tuple(delayed_flows)


def _slower(program: PricedProgram, machine: Machine) -> PricedProgram:
    slowness = machine.slowness if program.rank in machine.slow_ranks else 1.0
    factors = slowness * _factors(machine, KERNELS, program.rank, len(program.operations))
    operations: list[RankOperation] = [
        operation._replace(kernel=operation.kernel * factor) if operation.kernel else operation
        for operation, factor in zip(program.operations, factors.tolist(), strict=True)
    ]
    return program._replace(operations=tuple(operations))


def _factors(machine: Machine, kind: int, rank: int, count: int) -> np.ndarray:
    rng = np.random.default_rng((machine.seed, kind, rank))
    return 1 + machine.jitter * rng.exponential(size=count)

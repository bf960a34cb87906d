"""Choosing among strategies by the bytes that they move."""

from __future__ import annotations

from collections.abc import Iterator

from tilewise.payload import head_groups
from tilewise.plan import Plan
from tilewise.strategies.all_gather import all_gather
from tilewise.strategies.attention2d import attention2d
from tilewise.strategies.balanced_ring import balanced_ring
from tilewise.strategies.mesh import mesh
from tilewise.strategies.ring import ring
from tilewise.strategies.ulysses import ulysses
from tilewise.workload import Workload, volume


def candidates(work: Workload, world_size: int) -> Iterator[Plan]:
    """The strategies that these heads allow, the simplest first."""
    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    yield ring(world_size)
    for degree in reversed(divisors):
        try:
            head_groups(work.num_heads, work.num_kv_heads, degree)
        except ValueError:
            continue
        inner = world_size // degree
        for q_tile in (d for d in divisors if inner % d == 0):
            plan = mesh(inner, q_tile=q_tile, kv_bytes=2 * work.num_kv_heads / work.num_heads)
            yield plan if degree == 1 else ulysses(degree, inner=plan if inner > 1 else None)
    yield balanced_ring(world_size)
    yield all_gather(world_size)
    yield from (attention2d(d, world_size // d) for d in divisors)


def fewest_bytes(work: Workload, world_size: int) -> Plan:
    """The strategy that sends fewest bytes in forward and backward, all ranks together.

    Ties go to the first candidate, the ring.
    """

    def sent(plan: Plan) -> int:
        moved = volume(plan, work)
        return sum(moved.forward) + sum(moved.backward)

    return min(candidates(work, world_size), key=sent)

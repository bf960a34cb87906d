"""Choosing for those who do not: a layout that levels a mask's work, a strategy of few bytes."""

from __future__ import annotations

from collections.abc import Iterator

from tilewise.balancing import balanced
from tilewise.layout import Layout, contiguous, zigzag
from tilewise.mask import Causal, Full, Mask
from tilewise.payload import head_groups
from tilewise.plan import Plan
from tilewise.strategies.all_gather import all_gather
from tilewise.strategies.attention2d import attention2d
from tilewise.strategies.balanced_ring import balanced_ring
from tilewise.strategies.mesh import mesh
from tilewise.strategies.ring import ring
from tilewise.strategies.ulysses import ulysses
from tilewise.support import cells
from tilewise.workload import Workload, volume

LEVEL = 1.03
"""max / mean of the ranks' work up to which a layout counts as level."""


def default_layout(mask: Mask, num_tokens: int, world_size: int) -> Layout:
    """Contiguous for Full; zigzag for Causal, and where it is level; else balanced."""
    if isinstance(mask, Full):
        return contiguous(num_tokens, world_size)
    layout = zigzag(num_tokens, world_size)
    if isinstance(mask, Causal):
        return layout
    work = [0] * world_size
    for (rank, _), cell in cells(mask, layout, layout).items():
        work[rank] += cell.area
    if max(work) * world_size <= LEVEL * sum(work):
        return layout
    return balanced(mask, num_tokens, world_size, chunk=max(1, min(128, num_tokens // world_size)))


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

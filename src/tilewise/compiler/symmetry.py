"""Which ranks of a plan are alike: those that shifts of the digits of a rank's number map to each
other, such as rank -> rank + 1 in a ring or the two coordinates of a mesh.

A plan of 4096 ranks is then as good as that of one rank. Strategies declare their shifts; here
they are fitted to a machine, and said where a mask and a layout permit them.
"""

from tilewise.compiler.shards import everything_needed
from tilewise.layouts.layout import Layout, zigzag
from tilewise.masks.base import Causal, Mask
from tilewise.plan.ir import Plan
from tilewise.plan.shifts import Symmetry

MAX_CLASSES = 128
"""With more classes ranks are taken as unlike."""

EXACT_RANKS = 64
"""Up to so many ranks every one is simulated as pruned under a causal mask."""


def find_symmetry(plan: Plan, blocks: tuple[int, ...] = ()) -> Symmetry:
    """The symmetry that a plan declares; all ranks apart if it declares none.

    Args:
        blocks: sizes of groups of neighbouring ranks that must be mapped to one another (nodes,
            those who share a NIC, racks).
    """
    n = plan.world_size
    inside = [block for block in blocks if block < n]
    shifts = tuple(part for shift in plan.traits.shifts for part in shift.cut(inside))
    kept = tuple(power for shift in shifts for power in shift.respecting(inside))
    symmetry = Symmetry(n, shifts, kept)
    return symmetry if symmetry.num_classes <= min(n // 2, MAX_CLASSES) else Symmetry(n)


def all_alike(plan: Plan, mask: Mask, layouts: tuple[Layout, Layout]) -> bool | None:
    """Whether pairs of different shards all cost the same, by the mask and the layout alone.

    Returns:
        None if they do not; False if all cells are allowed; True if half of each pair's are:
        equal zigzag shards under a causal mask.
    """
    if plan.cuts is not None or plan.made_for is not None or plan.replicated_queries:
        return None
    n, tokens = plan.world_size, layouts[0].num_tokens
    if len({*layouts[0].sizes, *layouts[1].sizes}) > 1:
        return None
    if everything_needed(mask, *layouts):
        return False
    even = mask == Causal() and tokens % (2 * n) == 0
    return True if even and {*layouts} == {zigzag(tokens, n)} else None

"""Which ranks of a plan are alike: those that shifts of the digits of a rank's number map to each
other, such as rank -> rank + 1 in a ring or the two coordinates of a mesh.

A plan of 4096 ranks is then as good as that of one rank. Found by looking at the steps of a few
ranks: a strategy is one function of the rank, so ranks that differ show at the digits' edges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple, TypeVar

import numpy as np

from tilewise.layout import Layout, zigzag
from tilewise.mask import Causal, Mask
from tilewise.plan import Plan, Side, own_shards
from tilewise.table import everything_needed

Array = np.ndarray
Number = TypeVar("Number", int, Array)

FEW = 64  # up to so many ranks all are looked at
PROBES = 4  # ranks looked at in larger plans, beside the digits' edges
MAX_CLASSES = 128


class Shift(NamedTuple):
    """The digit rank // place % radix may be shifted cyclically."""

    place: int
    radix: int

    @property
    def span(self) -> int:
        return self.place * self.radix


class Symmetry(NamedTuple):
    """Ranks that shifts map to each other are alike, and so are all they do.

    Attributes:
        plan_shifts: those that map the plan to itself.
        shifts: those of them that map the machine to itself too.
    """

    world_size: int
    plan_shifts: tuple[Shift, ...] = ()
    shifts: tuple[Shift, ...] = ()

    @property
    def num_classes(self) -> int:
        return self.world_size // self.members

    @property
    def members(self) -> int:
        """Ranks per class."""
        return span(self.shifts)

    def first(self, rank: int) -> int:
        """The lowest rank of a rank's class, which stands for it."""
        return rank - moved_by(rank, self.shifts)

    def firsts(self) -> list[int]:
        """One rank of every class."""
        every = np.arange(self.world_size)
        return np.flatnonzero(moved_by(every, self.shifts) == 0).tolist()

    def written(self, rank: int) -> int:
        """The rank whose steps, relabelled, are this rank's."""
        return rank - moved_by(rank, self.plan_shifts)

    def together(self, block: int) -> int:
        """Ranks of one class in each block of so many neighbouring ranks."""
        return span(shift for shift in self.shifts if shift.span <= block)


def span(shifts: Iterable[Shift]) -> int:
    product = 1
    for shift in shifts:
        product *= shift.radix
    return product


def moved_by(rank: Number, shifts: tuple[Shift, ...]) -> Number:
    """What the shiftable digits of a rank amount to."""
    total = rank * 0
    for place, radix in shifts:
        total = total + rank // place % radix * place
    return total


def relative(rank: Number, to: int, shifts: tuple[Shift, ...]) -> Number:
    """A rank as seen by another: its digits less the other's."""
    for place, radix in shifts:
        digit = rank // place % radix
        rank = rank + ((digit - to // place) % radix - digit) * place
    return rank


def absolute(rank: Number, seen_by: int, shifts: tuple[Shift, ...]) -> Number:
    """The inverse of relative."""
    for place, radix in shifts:
        digit = rank // place % radix
        rank = rank + ((digit + seen_by // place) % radix - digit) * place
    return rank


def find_symmetry(plan: Plan, blocks: tuple[int, ...] = ()) -> Symmetry:
    """The symmetry that leaves the fewest classes; all ranks apart if there is none.

    Args:
        blocks: sizes of groups of neighbouring ranks that must be mapped to one another (nodes,
            those who share a NIC, racks).
    """
    n, alone = plan.world_size, Symmetry(plan.world_size)
    if n == 1 or plan.owners != own_shards(n) or plan.cuts is not None:
        return alone
    return plan.memo("symmetry", blocks, lambda: _search(plan, blocks)) or alone


def _search(plan: Plan, blocks: tuple[int, ...]) -> Symmetry | None:
    n = plan.world_size

    def classes(symmetry: Symmetry) -> tuple[int, int, int]:
        digits = len(symmetry.plan_shifts)
        return symmetry.num_classes, n // span(symmetry.plan_shifts), digits

    found = {Symmetry(n, chain, _respecting(chain, blocks, n)) for chain in _chains(n)}
    good = (s for s in found if s.num_classes <= min(n // 2, MAX_CLASSES))

    @cache
    def steps(rank: int) -> Array | None:
        return _written(plan, rank)

    return next((s for s in sorted(good, key=lambda s: (classes(s), s)) if _holds(s, steps)), None)


def _chains(n: int) -> Iterator[tuple[Shift, ...]]:
    """Up to three digits that make up a rank's number."""
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    for low in divisors:
        for high in (d for d in divisors if d % low == 0):
            digits = (Shift(1, low), Shift(low, high // low), Shift(high, n // high))
            yield tuple(shift for shift in digits if shift.radix > 1)


def _respecting(shifts: Iterable[Shift], blocks: Iterable[int], n: int) -> tuple[Shift, ...]:
    """The shifts, or powers of them, that map blocks to blocks."""
    kept = []
    for place, radix in shifts:
        end = place * radix
        for block in (b for b in blocks if b < n):
            if block % end == 0 or place % block == 0:
                continue
            if block % place or end % block:
                place = end  # no power of it does
                break
            place = block
        if end > place:
            kept.append(Shift(place, end // place))
    return tuple(kept)


def _holds(symmetry: Symmetry, steps) -> bool:
    """Whether the ranks looked at do what their class's first does, relabelled."""
    shifts = symmetry.plan_shifts
    return all(
        _same(steps(rank), rank, steps(symmetry.written(rank)), shifts)
        for rank in _probes(symmetry)
    )


def _probes(symmetry: Symmetry) -> list[int]:
    n = symmetry.world_size
    if n <= FEW:
        return [*range(n)]
    edges = [rank for s in symmetry.plan_shifts for rank in (s.place, s.span - s.place)]
    spread = [k * 2654435761 % n for k in range(1, PROBES + 1)]
    return list(dict.fromkeys([*edges, n - 1, *spread]))


def _same(mine: Array | None, rank: int, theirs: Array | None, shifts: tuple[Shift, ...]) -> bool:
    if mine is None or theirs is None or len(mine) != len(theirs):
        return False
    first = rank - moved_by(rank, shifts)
    return _digest(mine, rank, shifts) == _digest(theirs, first, shifts)


def _digest(rows: Array, rank: int, shifts: tuple[Shift, ...]) -> tuple[int, int]:
    """Numbers that are equal for the same rows in any order, as the rank sees them."""
    mixed = np.zeros(len(rows), np.uint64)
    columns = [*rows[:, :2].T, *(relative(column, rank, shifts) for column in rows[:, 2:].T)]
    for column in columns:
        mixed = (mixed ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return int(np.bitwise_xor.reduce(mixed)), int(mixed.sum())


def _written(plan: Plan, rank: int) -> Array | None:
    """A rank's steps as rows (step, kind, shard, peer); None if anything but whole shards moves.

    Tiles count from 0 within their step, so that their order and what each holds are seen.
    """
    rows: list[tuple[int, int, int, int]] = []
    for number, step in enumerate(plan.rank_steps(rank)):
        for index, tile in enumerate(step.tiles):
            for side, shards in zip(Side, tile[:2], strict=True):
                rows += [(number, 16 * index + 12 + side, shard, rank) for shard in shards]
        for kind, hops in ((0, step.sends), (6, step.recvs)):
            for (side, role, shard, _), src, dst, cut in hops:
                if cut is not None:
                    return None
                rows.append((number, kind + 3 * side + role, shard, src if kind else dst))
    return np.array(rows, np.int64).reshape(-1, 4)


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

"""Which ranks of a plan are alike: those that shifts of the digits of a rank's number map to each
other, such as rank -> rank + 1 in a ring or the two coordinates of a mesh.

A plan of 4096 ranks is then as good as that of one rank. Found by looking at the steps of a few
ranks: a strategy is one function of the rank, so ranks that differ show at the digits' edges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tilewise.compiler.shards import everything_needed
from tilewise.layouts.layout import Layout, zigzag
from tilewise.masks.base import Causal, Mask
from tilewise.plan.ir import Plan, Side, own_shards
from tilewise.plan.shifts import Shift, Symmetry, relative, span

Array = np.ndarray

FEW = 64  # up to so many ranks all are looked at
PROBES = 4  # ranks looked at in larger plans, beside the digits' edges
MAX_CLASSES = 128
FEW_CLASSES = 8  # so few are soon simulated: no more are looked for


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
    """The best chain of shifts, each of which maps the plan to itself."""
    n = plan.world_size
    known: dict[Shift, bool] = {}

    def holds(shift: Shift) -> bool:
        if shift not in known:
            known[shift] = any(_is_power(shift, k) for k in known if known[k]) or _holds(
                plan, shift
            )
        return known[shift]

    def plain(end: int) -> _Chain:
        """The best of digits below end that are shifted each by itself."""
        while True:
            bad = {shift for shift in known if not known[shift]}
            chain = _best_chain(end, n, blocks, bad)
            if all(map(holds, chain.shifts)):
                return chain

    found = [plain(n)]
    if n // found[0].members > FEW_CLASSES:
        below = cache(plain)
        for low, shifts in _linked(n, blocks):
            chain = below(low)
            for shift in filter(holds, shifts):
                chain = chain.extended(shift, n, blocks)
            found.append(chain)
    shifts = max(found).shifts
    symmetry = Symmetry(n, shifts, _respecting(shifts, blocks, n))
    return symmetry if symmetry.num_classes <= min(n // 2, MAX_CLASSES) else None


def _is_power(shift: Shift, of: Shift) -> bool:
    """Whether a shift is made of several of another."""
    plain = not shift.others and not of.others
    return plain and shift.span == of.span and shift.place % of.place == 0


class _Chain(NamedTuple):
    """Shifts of different digits; the better compares as greater.

    Attributes:
        members: ranks per class, if the machine's blocks are to be mapped to one another too.
        plan_members: if not.
        fewer: minus the number of shifts.
    """

    members: int
    plan_members: int
    fewer: int
    shifts: tuple[Shift, ...]

    def extended(self, shift: Shift, n: int, blocks: tuple[int, ...]) -> _Chain:
        return _Chain(
            self.members * span(_respecting((shift,), blocks, n)),
            self.plan_members * shift.radix,
            self.fewer - 1,
            (*self.shifts, shift),
        )


def _best_chain(end: int, n: int, blocks: tuple[int, ...], bad: set[Shift]) -> _Chain:
    """Of digits below end, each shifted by itself, by none of the bad shifts."""
    divisors = [d for d in range(1, end + 1) if end % d == 0]
    best = {1: _Chain(1, 1, 0, ())}
    for top in divisors[1:]:
        lower = [d for d in divisors if d < top and top % d == 0]
        shifts = {d: Shift(d, top // d) for d in lower}
        best[top] = max(
            best[d] if shifts[d] in bad else best[d].extended(shifts[d], n, blocks) for d in lower
        )
    return best[end]


def _linked(n: int, blocks: tuple[int, ...]) -> Iterator[tuple[int, list[Shift]]]:
    """Shifts of digits from a place on, each together with those so many times lower.

    A column number of attention2d is a remainder of the numbers of the KV shards that it gathers.
    Digits are cut at blocks, so that shifts map these to one another.
    """
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    for low in divisors:
        for times in (d for d in divisors if d > 1 and low * d < n and n % (low * d) == 0):
            cuts, new = set(), [low, n, *(b for b in blocks if low < b < n)]
            while new:
                cut = new.pop()
                if cut not in cuts and low <= cut <= n:
                    cuts.add(cut)
                    new += [cut * times] + [cut // times] * (cut % times == 0)
            ends = sorted(cuts)
            if not any(b % a for a, b in pairwise(ends)):
                digits = {a: b // a for a, b in pairwise(ends)}
                tops = (place for place in digits if place * times not in digits)
                yield low, [_joint(place, digits, times) for place in tops]


def _joint(place: int, digits: dict[int, int], times: int) -> Shift:
    others, lower = [], place // times
    while lower in digits and lower * times ** (len(others) + 1) == place:
        others.append(lower)
        lower //= times
    return Shift(place, digits[place], tuple(others))


def _respecting(shifts: Iterable[Shift], blocks: Iterable[int], n: int) -> tuple[Shift, ...]:
    """The shifts, or powers of them, that map blocks to blocks."""
    inside = [block for block in blocks if block < n]
    kept = []
    for shift in shifts:
        if not shift.others:
            shift = _power(shift, inside)
        ends = [(place, place * shift.radix) for place in shift.places]
        if shift.radix > 1 and all(b % end == 0 or p % b == 0 for p, end in ends for b in inside):
            kept.append(shift)
    return tuple(kept)


def _power(shift: Shift, blocks: Iterable[int]) -> Shift:
    """The shift of the part of a digit that numbers whole blocks."""
    place, end = shift.place, shift.span
    for block in blocks:
        if block % end and place % block:
            place = end if block % place or end % block else block
    return Shift(place, end // place)


def _holds(plan: Plan, shift: Shift) -> bool:
    """Whether the ranks looked at do what the first of their class does, relabelled.

    Those who trade shards for heads are alike in that, and do else what the inner plan's ranks do.
    """
    degree, inner = plan.head_split or (1, plan)
    if shift.span <= degree:
        return degree % shift.span == 0
    if any(place % degree for place in shift.places):
        return False
    places = [place // degree for place in shift.places]
    shift = Shift(places[0], shift.radix, tuple(places[1:]))
    return _seen_to_hold(inner, shift, plan.world_size <= FEW)


def _seen_to_hold(plan: Plan, shift: Shift, everywhere: bool) -> bool:
    def steps(rank: int) -> Array | None:
        return plan.memo("written", rank, lambda: _written(plan, rank), keep=FEW)

    def first(rank: int) -> int:
        return relative(rank, rank, (shift,))

    probes = [rank for rank in _probes(plan.world_size, shift, everywhere) if first(rank) != rank]
    return all(_same(steps(rank), rank, steps(first(rank)), (shift,)) for rank in probes)


def _probes(n: int, shift: Shift, everywhere: bool) -> list[int]:
    if everywhere:
        return [*range(n)]
    digits = [(place, place * shift.radix) for place in shift.places]
    edges = [rank for place, end in digits for rank in (place, end - place)]
    spread = [k * 2654435761 % n for k in range(1, PROBES + 1)]
    return list(dict.fromkeys([*edges, n - 1, *spread]))


def _same(mine: Array | None, rank: int, theirs: Array | None, shifts: tuple[Shift, ...]) -> bool:
    if mine is None or theirs is None or len(mine) != len(theirs):
        return False
    first = relative(rank, rank, shifts)
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

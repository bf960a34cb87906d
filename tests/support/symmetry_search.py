"""The symmetry of a plan found by trying: which shifts of digits map the whole plan to itself.

The oracle of the shifts that strategies declare. It looks at the steps of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tilewise.plan.ir import Plan, Side
from tilewise.plan.shifts import Shift, Symmetry, absolute, span

Array = np.ndarray

PEER, HEADS = 2, 3


def written(plan: Plan) -> Array:
    """The steps of all ranks as rows (rank, shard, peer, heads, step, kind).

    Tiles count from 0 within their step, so that their order and what each holds are seen.
    """
    rows: list[tuple[int, ...]] = []
    for rank in range(plan.world_size):
        for number, step in enumerate(plan.rank_steps(rank)):
            for index, tile in enumerate(step.tiles):
                for side, shards in zip(Side, tile[:2], strict=True):
                    kind = 16 * index + 12 + side
                    rows += [(rank, shard, rank, tile.heads, number, kind) for shard in shards]
            for kind, transfers in ((0, step.sends), (6, step.recvs)):
                for (side, role, shard, heads), src, dst, cut in transfers:
                    assert cut is None
                    peer = src if kind else dst
                    rows.append((rank, shard, peer, heads, number, kind + 3 * side + role))
    return np.array(rows, np.int64).reshape(-1, 6)


def maps_to_itself(plan: Plan, rows: Array, permutation: Array) -> bool:
    """Whether ranks and shards can be renamed so; heads follow the ranks that compute them.

    Args:
        rows: as written.
    """
    renamed = rows.copy()
    renamed[:, : PEER + 1] = permutation[rows[:, : PEER + 1]]
    renamed[:, HEADS] = permutation[rows[:, HEADS]] % plan.num_head_groups
    return np.array_equal(_sorted(renamed), _sorted(rows))


def _sorted(rows: Array) -> Array:
    return rows[np.lexsort(rows.T)]


def permutations(shift: Shift, n: int) -> Iterator[Array]:
    """Those of ranks that generate all that a shift says: the cycle, and if it is free a swap."""
    ranks = np.arange(n)
    yield absolute(ranks, shift.place, (shift,))
    if shift.free and shift.radix > 1:
        swap = np.array([1, 0, *range(2, shift.radix)])
        swapped = ranks
        for place in shift.places:
            digit = ranks // place % shift.radix
            swapped = swapped + (swap[digit] - digit) * place
        yield swapped


def searched(plan: Plan, rows: Array, blocks: tuple[int, ...]) -> Symmetry:
    """The symmetry that leaves the fewest classes.

    Args:
        plan: of whole shards, each owned by its rank.
        rows: as written.
        blocks: as for find_symmetry.
    """
    n, found = plan.world_size, []
    known: dict[Shift, bool] = {}

    def holds(shift: Shift) -> bool:
        if shift not in known:
            known[shift] = maps_to_itself(plan, rows, next(permutations(shift, n)))
        return known[shift]

    @cache
    def plain(end: int) -> _Chain:
        return _best_chain(end, n, blocks, holds)

    for low, shifts in ((n, []), *_linked(n, blocks)):
        chain = plain(low)
        for shift in filter(holds, shifts):
            chain = chain.extended(shift, n, blocks)
        found.append(chain)
    shifts = max(found).shifts
    return Symmetry(n, shifts, _respecting(shifts, blocks, n))


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


def _best_chain(
    end: int, n: int, blocks: tuple[int, ...], holds: Callable[[Shift], bool]
) -> _Chain:
    """Of digits below end, each shifted by itself."""
    divisors = [d for d in range(1, end + 1) if end % d == 0]
    best = {1: _Chain(1, 1, 0, ())}
    for top in divisors[1:]:
        lower = [d for d in divisors if d < top and top % d == 0]
        shifts = {d: Shift(d, top // d) for d in lower}
        best[top] = max(
            best[d].extended(shifts[d], n, blocks) if holds(shifts[d]) else best[d] for d in lower
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


def _respecting(shifts: tuple[Shift, ...], blocks: tuple[int, ...], n: int) -> tuple[Shift, ...]:
    """The shifts, or powers of them, that map blocks to blocks, as tried on all ranks."""
    powers = (next((p for p in _powers(shift) if respects(p, blocks, n)), None) for shift in shifts)
    return tuple(power for power in powers if power)


def _powers(shift: Shift) -> Iterator[Shift]:
    for times in range(1, shift.radix):
        if shift.radix % times == 0:
            yield shift.times(times)._replace(radix=shift.radix // times)


@cache
def respects(shift: Shift, blocks: tuple[int, ...], n: int) -> bool:
    """Whether ranks that are in one block before a shift are in one after it."""
    ranks = np.arange(n)
    shifted = absolute(ranks, shift.place, (shift,))
    return all(
        len({*zip((ranks // b).tolist(), (shifted // b).tolist(), strict=True)}) == -(-n // b)
        for b in blocks
    )

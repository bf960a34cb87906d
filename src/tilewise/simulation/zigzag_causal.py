"""Causal zigzag on many ranks, simulated exactly from one rank of each class."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tilewise.plan.ir import Item, Plan, RankStep, Role, Rows, Side, Transfer
from tilewise.plan.kept import kept_with_plan
from tilewise.plan.shifts import Shift, Symmetry, absolutes, relative

EXACT_RANKS = 64
"""Up to so many ranks every one is simulated as pruned under a causal mask."""

Array = np.ndarray


class _Place(NamedTuple):
    """What a rank that others are relabelled from holds; least is by the ranks of its class."""

    written: int
    side: Side
    shard: int


Least = dict[_Place, Array]
"""The lowest number of the shards that each shard meets."""


class Halves:
    """The rows of every transfer of a plan whose ranks are relabelled from a few.

    Args:
        shifts: those that map the plan to itself.
        size: rows of a shard.
    Attributes:
        symmetry: which rank each is relabelled from.
        half: the rows that are half a shard, by side.
        complete: whether all is right: nothing is dropped, and no rank only passes a value on.
    """

    def __init__(self, plan: Plan, shifts: tuple[Shift, ...], size: int):
        self._shifts, self.symmetry = shifts, Symmetry(plan.world_size, shifts)
        every = np.arange(plan.world_size)
        self._class = np.broadcast_to(relative(every, every, self._shifts), every.shape)
        self._members = {int(w): np.flatnonzero(self._class == w) for w in np.unique(self._class)}
        self._index = np.empty(plan.world_size, np.int64)
        for members in self._members.values():
            self._index[members] = np.arange(len(members))
        self.half: tuple[Rows, Rows] = ((size // 2, size),), ((0, size // 2),)
        steps = {written: plan.rank_steps(written) for written in self._members}
        self._whole: dict[tuple[int, Role, _Place], Array] = {}
        self.complete = all(map(_no_relay, steps.values()))
        self._follow(steps, Role.OPERAND)
        self._follow(steps, Role.PARTIAL)

    def members(self, written: int) -> Array:
        """The ranks that are relabelled from one, ascending."""
        return self._members[written]

    def whole(self, step: int, hop: Transfer, members: Array) -> Array:
        """Whether all rows travel, by rank, of a transfer as a rank writes it that others are
        relabelled from.

        Args:
            members: the ranks of its class.
        """
        rank, whole = self._decided(step, hop)
        return whole[self._index[absolutes(rank, members, self._shifts)]]

    def pruned(self, plan: Plan) -> Plan:
        """The plan with what the mask leaves of every transfer, written by rank as it is."""

        def left(step: int, hops: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
            return tuple(hop._replace(rows=self._rows(step, hop)) for hop in hops)

        def script(rank: int) -> tuple[RankStep, ...]:
            return tuple(
                RankStep(tiles, left(step, sends), left(step, recvs))
                for step, (tiles, sends, recvs) in enumerate(plan.rank_steps(rank))
            )

        return plan.changed(script=script)

    def _rows(self, step: int, hop: Transfer) -> Rows | None:
        rank, whole = self._decided(step, hop)
        return None if whole[self._index[rank]] else self.half[hop.item.side]

    def _decided(self, step: int, hop: Transfer) -> tuple[int, Array]:
        """The rank that decides a transfer's rows, and whether all travel, by rank of its class."""
        side, role, shard, _ = hop.item
        rank = hop.dst if role is Role.OPERAND else hop.src
        place = _Place(int(self._class[rank]), side, relative(shard, rank, self._shifts))
        return rank, self._whole[step, role, place]

    def _follow(self, steps: dict[int, tuple[RankStep, ...]], role: Role) -> None:
        """Operands from their readers back to their owners, partials from their first filler on."""
        met: Least = {}
        numbers = range(max(map(len, steps.values())))
        for number in reversed(numbers) if role is Role.OPERAND else numbers:
            parts = [(w, part[number]) for w, part in steps.items() if number < len(part)]
            passed: list[tuple[_Place, Array]] = []
            for written, step in parts:
                hops = step.recvs if role is Role.OPERAND else step.sends
                for hop in hops:
                    if hop.item.role is role:
                        passed += self._passed(met, number, written, hop)
            for written, step in parts:
                passed += self._tiles(written, step)
            for place, least in passed:
                met[place] = np.minimum(met.get(place, least), least)

    def _passed(
        self, met: Least, number: int, written: int, hop: Transfer
    ) -> Iterator[tuple[_Place, Array]]:
        """Note a transfer's rows at the end that decides them, and pass that on to the other."""
        side, role, shard, _ = hop.item
        place, members = _Place(written, side, shard), self._members[written]
        least = met.pop(place, None)
        if least is None:
            self.complete = False
            return
        self._whole[number, role, place] = least <= absolutes(shard, members, self._shifts)
        other = hop.src if role is Role.OPERAND else hop.dst
        others = absolutes(other, members, self._shifts)
        at_other = np.empty_like(least)
        at_other[self._index[others]] = least
        seen = relative(shard, other, self._shifts)
        yield _Place(int(self._class[other]), side, seen), at_other

    def _tiles(self, written: int, step: RankStep) -> Iterator[tuple[_Place, Array]]:
        members = self._members[written]
        for tile in step.tiles:
            for side, mine, theirs in ((Side.Q, tile.q, tile.kv), (Side.KV, tile.kv, tile.q)):
                met = [absolutes(shard, members, self._shifts) for shard in theirs]
                least = np.min(met, axis=0)
                for shard in mine:
                    yield _Place(written, side, shard), least


@kept_with_plan(2)
def halves_of(plan: Plan, shifts: tuple[Shift, ...], size: int) -> Halves:
    """The halves of a plan, kept with it."""
    return Halves(plan, shifts, size)


def _no_relay(steps: tuple[RankStep, ...]) -> bool:
    """Whether a rank reads what it receives and adds to what it sends."""
    tiles = [tile for step in steps for tile in step.tiles]
    used = {s for tile in tiles for s in tile.q}, {s for tile in tiles for s in tile.kv}
    moved: Iterator[Item] = (
        hop.item
        for step in steps
        for hops, role in ((step.recvs, Role.OPERAND), (step.sends, Role.PARTIAL))
        for hop in hops
        if hop.item.role is role
    )
    return all(item.shard in used[item.side] for item in moved)

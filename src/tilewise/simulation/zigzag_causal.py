"""Causal zigzag on many ranks, simulated exactly from one rank of each class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tilewise.compiler.program import Compute, Free, Instruction, Launch, Program
from tilewise.plan.ir import Item, Plan, RankStep, Role, Rows, Side, Tile, Transfer
from tilewise.plan.shifts import Shift, Symmetry, absolute, absolutes, relative

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
        side, role, shard, _ = hop.item
        rank = hop.dst if role is Role.OPERAND else hop.src
        place = _Place(int(self._class[rank]), side, relative(shard, rank, self._shifts))
        deciding = absolutes(rank, members, self._shifts)
        return self._whole[step, role, place][self._index[deciding]]

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


TELLING = 8
"""Ranks of a class that are looked at."""

Whole = dict[tuple[int, Transfer], np.ndarray]
"""(step, transfer as written) -> whether all its rows travel, by rank of the class."""


class Members:
    """The programs of all ranks that are relabelled from a program's.

    Args:
        program: as it is written.
    """

    def __init__(self, program: Program, halves: Halves):
        self.written, self.halves = program, halves
        self.members = halves.members(program.rank)
        self._whole: Whole = {}
        self._received = np.zeros(len(self.members), np.int64)
        for launch in program.instructions:
            if isinstance(launch, Launch):
                for hop in (*launch.sends, *launch.recvs):
                    self._whole[launch.step, hop] = halves.whole(launch.step, hop, self.members)
                for hop in launch.recvs:
                    if hop.item.role is Role.OPERAND:
                        self._received += self._whole[launch.step, hop]

    def telling(self) -> list[int]:
        """Some ranks that tell what all hold at most: from that which receives most operands to
        that which receives least, who may copy more."""
        order = self.members[np.argsort(-self._received, kind="stable")]
        places = np.linspace(0, len(order) - 1, min(TELLING, len(order))).round().astype(int)
        return order[places].tolist()

    def program(self, rank: int) -> Program:
        """That of one of them."""
        index = int(np.searchsorted(self.members, rank))
        instructions = tuple(self._instruction(x, rank, index) for x in self.written.instructions)
        arenas = tuple(
            tuple(self._item(item, rank) for item in arena) for arena in self.written.arenas
        )
        return Program(rank, self.written.world_size, instructions, arenas)

    def _instruction(self, instruction: Instruction, rank: int, index: int) -> Instruction:
        match instruction:
            case Compute(tile):
                q, kv = (tuple(self._label(shard, rank) for shard in side) for side in tile[:2])
                return Compute(Tile(q, kv, tile.heads))
            case Free(item):
                return Free(self._item(item, rank))
            case Launch():
                return self._launch(instruction, rank, index)
        return instruction

    def _launch(self, launch: Launch, rank: int, index: int) -> Launch:
        sends, recvs = (
            tuple(self._hop(launch.step, hop, rank, index) for hop in hops)
            for hops in (launch.sends, launch.recvs)
        )
        return launch._replace(sends=sends, recvs=recvs)

    def _hop(self, step: int, hop: Transfer, rank: int, index: int) -> Transfer:
        rows = None if self._whole[step, hop][index] else self.halves.half[hop.item.side]
        ends = self._label(hop.src, rank), self._label(hop.dst, rank)
        return Transfer(self._item(hop.item, rank), *ends, rows)

    def _item(self, item: Item, rank: int) -> Item:
        return item._replace(shard=self._label(item.shard, rank))

    def _label(self, number: int, rank: int) -> int:
        return int(absolute(number, rank, self.halves.symmetry.plan_shifts))

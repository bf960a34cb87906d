"""Programs of ranks that are relabelled from one, with the rows that they move.

They differ in which halves of their shards travel; see simulation/halves.py. It stands alone because the
footprint follows whole programs, of a few such ranks; simulation/relabelled.py prices all of them at once.
"""

from __future__ import annotations

import numpy as np

from tilewise.compiler.program import Collective, Free, Instruction, Launch, Program, Run
from tilewise.plan.ir import Tile
from tilewise.plan.items import Item, Role, Transfer
from tilewise.plan.shifts import absolute
from tilewise.simulation.halves import Halves

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
            if isinstance(launch, Launch | Collective):
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
            case Run(tile):
                q, kv = (tuple(self._label(shard, rank) for shard in side) for side in tile[:2])
                return Run(Tile(q, kv, tile.heads))
            case Free(item):
                return Free(self._item(item, rank))
            case Launch() | Collective():
                return self._launch(instruction, rank, index)
        return instruction

    def _launch(self, launch: Launch | Collective, rank: int, index: int) -> Launch | Collective:
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

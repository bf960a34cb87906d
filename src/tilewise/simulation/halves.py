"""Half shards: which rows of every transfer travel under a causal mask on zigzag shards.

Ranks whose programs are one program relabelled compute alike, but some send half of a shard where
others send all of it. This says which, for all ranks at once, faster than pruning rank by rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tilewise.plan.ir import Item, Plan, RankStep, Role, Rows, Side, Transfer
from tilewise.plan.kept import kept_with_plan
from tilewise.plan.shifts import Shift, absolutes, relative

EXACT_RANKS = 64
"""Up to this many ranks, every rank is simulated by its own operations as it is pruned under a
causal mask. Of more, one rank of each class is priced: ranks that are relabelled from one template,
and of whose transfers the same ones are whole. Their tiles may lie in another order, so that a
kernel call is cut otherwise: times were at most 1.1 % from those of own operations."""

Array = np.ndarray


class _ShardPlace(NamedTuple):
    """A shard as a template numbers it: the template is the rank that stands for its class."""

    template: int
    side: Side
    shard: int


LowestMet = dict[_ShardPlace, Array]
"""The lowest number of the shards that each shard meets, by rank of the template's class."""


class Halves:
    """The rows of every transfer of a causal plan whose ranks are relabelled from a few templates.

    Args:
        shifts: those that map the plan to itself.
        size: rows of a shard.
    Attributes:
        half: the rows that are half a shard, by side.
        complete: True if this description is exact: no transfer is dropped, and no rank passes a
            value on that it does not use.
    """

    def __init__(self, plan: Plan, shifts: tuple[Shift, ...], size: int):
        self._shifts = shifts
        ranks = np.arange(plan.world_size)
        self._class = np.broadcast_to(relative(ranks, ranks, self._shifts), ranks.shape)
        self._members = {int(w): np.flatnonzero(self._class == w) for w in np.unique(self._class)}
        self._index = np.empty(plan.world_size, np.int64)
        for members in self._members.values():
            self._index[members] = np.arange(len(members))
        self.half: tuple[Rows, Rows] = ((size // 2, size),), ((0, size // 2),)
        steps = {template: plan.rank_steps(template) for template in self._members}
        self._whole: dict[tuple[int, Role, _ShardPlace], Array] = {}
        self.complete = all(map(_no_relay, steps.values()))
        self._follow(steps, Role.OPERAND)
        self._follow(steps, Role.PARTIAL)

    def members(self, template: int) -> Array:
        """The ranks that are relabelled from a template, ascending."""
        return self._members[template]

    def models(self, plan: Plan) -> dict[int, int]:
        """Return for each rank the lowest rank that sends alike, whose simulation serves for both.

        Two ranks are alike if they are relabelled from the same template, and the same transfers
        carry whole shards.
        """
        models: dict[int, int] = {}
        for template, members in self._members.items():
            whole = [
                self._decided(number, transfer)
                for number, step in enumerate(plan.rank_steps(template))
                for transfer in (*step.sends, *step.recvs)
            ]
            columns = [
                all_rows[self._index[absolutes(rank, members, self._shifts)]]
                for rank, all_rows in whole
            ]
            table = np.array(columns, bool).reshape(len(columns), len(members)).T
            first: dict[bytes, int] = {}
            for rank, row in zip(members.tolist(), table, strict=True):
                models[rank] = first.setdefault(row.tobytes(), rank)
        return models

    def pruned(self, plan: Plan) -> Plan:
        """The plan with the rows that the mask leaves of every transfer."""

        def pruned_transfers(step: int, transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
            return tuple(
                transfer._replace(rows=self._rows(step, transfer)) for transfer in transfers
            )

        def script(rank: int) -> tuple[RankStep, ...]:
            return tuple(
                RankStep(tiles, pruned_transfers(step, sends), pruned_transfers(step, recvs))
                for step, (tiles, sends, recvs) in enumerate(plan.rank_steps(rank))
            )

        return plan.changed(script=script)

    def _rows(self, step: int, transfer: Transfer) -> Rows | None:
        deciding_rank, all_rows = self._decided(step, transfer)
        return None if all_rows[self._index[deciding_rank]] else self.half[transfer.item.side]

    def _decided(self, step: int, transfer: Transfer) -> tuple[int, Array]:
        """Return the rank whose needs decide the rows of a transfer, and which transfers are whole.

        Returns:
            the rank; and bool, for each rank of its class: all rows travel.
        """
        side, role, shard, _ = transfer.item
        rank = transfer.dst if role is Role.OPERAND else transfer.src
        if role is Role.RESULT:
            return rank, np.ones(len(self._members[int(self._class[rank])]), bool)
        shard_place = _ShardPlace(int(self._class[rank]), side, relative(shard, rank, self._shifts))
        return rank, self._whole[step, role, shard_place]

    def _follow(self, steps: dict[int, tuple[RankStep, ...]], role: Role) -> None:
        """Follow operands from their readers back to their owners, and partials from their first
        contributor on.
        """
        lowest_met: LowestMet = {}
        step_numbers = range(max(map(len, steps.values())))
        for number in reversed(step_numbers) if role is Role.OPERAND else step_numbers:
            rank_steps = [(w, part[number]) for w, part in steps.items() if number < len(part)]
            arrivals: list[tuple[_ShardPlace, Array]] = []
            for template, step in rank_steps:
                transfers = step.recvs if role is Role.OPERAND else step.sends
                for transfer in transfers:
                    if transfer.item.role is role:
                        arrivals += self._passed(lowest_met, number, template, transfer)
            for template, step in rank_steps:
                arrivals += self._tiles(template, step)
            for shard_place, lowest in arrivals:
                lowest_met[shard_place] = np.minimum(lowest_met.get(shard_place, lowest), lowest)

    def _passed(
        self, lowest_met: LowestMet, number: int, template: int, transfer: Transfer
    ) -> Iterator[tuple[_ShardPlace, Array]]:
        """Note a transfer's rows at the end that decides them; yield what the other end learns."""
        side, role, shard, _ = transfer.item
        shard_place, members = _ShardPlace(template, side, shard), self._members[template]
        lowest = lowest_met.pop(shard_place, None)
        if lowest is None:
            self.complete = False
            return
        self._whole[number, role, shard_place] = lowest <= absolutes(shard, members, self._shifts)
        other_rank = transfer.src if role is Role.OPERAND else transfer.dst
        other_ranks = absolutes(other_rank, members, self._shifts)
        lowest_at_other = np.empty_like(lowest)
        lowest_at_other[self._index[other_ranks]] = lowest
        relative_shard = relative(shard, other_rank, self._shifts)
        yield _ShardPlace(int(self._class[other_rank]), side, relative_shard), lowest_at_other

    def _tiles(self, template: int, step: RankStep) -> Iterator[tuple[_ShardPlace, Array]]:
        members = self._members[template]
        for tile in step.tiles:
            for side, shards, other_shards in (
                (Side.Q, tile.q, tile.kv),
                (Side.KV, tile.kv, tile.q),
            ):
                other_numbers = [absolutes(shard, members, self._shifts) for shard in other_shards]
                lowest = np.min(other_numbers, axis=0)
                for shard in shards:
                    yield _ShardPlace(template, side, shard), lowest


@kept_with_plan(2)
def halves_of(plan: Plan, shifts: tuple[Shift, ...], size: int) -> Halves:
    """The halves of a plan, kept with it."""
    return Halves(plan, shifts, size)


def _no_relay(steps: tuple[RankStep, ...]) -> bool:
    """Return whether a rank's tiles read all that it receives, and add to all that it sends."""
    tiles = [tile for step in steps for tile in step.tiles]
    tile_shards = {s for tile in tiles for s in tile.q}, {s for tile in tiles for s in tile.kv}
    moved_items: Iterator[Item] = (
        transfer.item
        for step in steps
        for transfers, role in ((step.recvs, Role.OPERAND), (step.sends, Role.PARTIAL))
        for transfer in transfers
        if transfer.item.role is role
    )
    return all(item.shard in tile_shards[item.side] for item in moved_items)

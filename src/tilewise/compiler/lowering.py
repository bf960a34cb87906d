"""Lowering: one rank's share of a plan becomes its program.

Waits stand at the first use of an arrival, not at the end of its step, and those of one tile in the
order of items, so that ranks that are alike wait for the same things in turn. Receives can be
posted some launches ahead. Only this rank's part of the plan is built, so that it costs the same in
any world.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from tilewise.arguments import checks_arguments
from tilewise.compiler.program import Await, Compute, Instruction, Launch, Program, Team
from tilewise.plan.builder import gc_paused, operand
from tilewise.plan.ir import Item, Plan, RankStep, Role, Side, TeamExchange, Tile, Transfer

Part = tuple[Side, Role]
Transfers = tuple[Transfer, ...]


@checks_arguments
def lower(
    plan: Plan,
    rank: int,
    *,
    node_size: int | None = None,
    ahead: int = 0,
    carries: frozenset[Part] | None = None,
    exchanges: Sequence[TeamExchange] = (),
) -> Program:
    """The program of one rank.

    Args:
        plan: any plan; pruned or not.
        rank: in 0..plan.world_size - 1.
        node_size: ranks per node: transfers inside a node take lane 0, between nodes lane 1;
            None: all take lane 0.
        ahead: receives are posted this many launches before their sends, at most before the first.
        carries: the sides and roles that have any bytes in the pass that this program is for
            (see plan/payload.py); None: all.
        exchanges: of the plan's, those that are launched by all of a team together.
    """
    with gc_paused():
        steps = plan.rank_steps(rank)
        arenas = _arenas(steps)
        if carries is not None:
            steps = tuple(_carrying(step, carries) for step in steps)
        together = {
            one.step % len(steps): Team(
                range(rank - rank % one.size, rank - rank % one.size + one.size), one.parts
            )
            for one in exchanges
            if carries is None or carries.intersection(one.parts)
        }
        writer = _ProgramWriter(rank, steps, node_size, together)
        for number, step in enumerate(steps):
            writer.step(step, number)
        writer.finish()
        instructions = writer.instructions
        if ahead:
            instructions = _post_ahead(instructions, writer.handles, ahead)
        return Program(rank, plan.world_size, tuple(instructions), arenas)


def read_together(plan: Plan, rank: int) -> tuple[tuple[Item, ...], ...]:
    """Return the operands that may lie side by side where kernels take calls of lists.

    These read rows among others that are not here yet, or not any more.
    """
    return _arenas(plan.rank_steps(rank), scattered=True)


class _ProgramWriter:
    """Writes instructions in order, remembering where each arrival waits to be used."""

    def __init__(
        self,
        rank: int,
        steps: tuple[RankStep, ...],
        node_size: int | None,
        together: Mapping[int, Team],
    ):
        self.rank, self.node_size, self.together = rank, node_size, together
        self.instructions: list[Instruction] = []
        self.pending: dict[Item, list[tuple[int, int]]] = {}
        self.handles = self.number = 0
        self.reads = [[tile_operands(tile) for tile in step.tiles] for step in steps]

    def step(self, step: RankStep, number: int) -> None:
        self.number = number
        for transfer in step.sends:
            if transfer.item in self.pending:
                self._wait(transfer.item)
            if transfer.item.role is Role.RESULT:
                self._wait(transfer.item._replace(role=Role.PARTIAL))
        if number in self.together:
            self._launch(step.sends, step.recvs, 0, self.together[number])
            lanes: set[int] = set()
        else:
            lanes = {self._lane(transfer) for transfer in (*step.sends, *step.recvs)}
        for lane in sorted(lanes):
            self._launch(*_chosen(step, lambda transfer, at=lane: self._lane(transfer) == at), lane)
        for tile, items in zip(step.tiles, self.reads[number], strict=True):
            for item in sorted(item for item in items if item in self.pending):
                self._wait(item)
            self.instructions.append(Compute(tile))

    def finish(self) -> None:
        for item in sorted(self.pending):
            self._wait(item)

    def _wait(self, item: Item) -> None:
        places = self.pending.pop(item, [])
        if len(places) == 1:
            self.instructions.append(Await(places[0][0], places[0][1:]))
            return
        for handle, arrivals in groupby(places, key=lambda place: place[0]):
            self.instructions.append(Await(handle, tuple(index for _, index in arrivals)))

    def _lane(self, transfer: Transfer) -> int:
        return int(
            self.node_size is not None
            and transfer.src // self.node_size != transfer.dst // self.node_size
        )

    def _launch(
        self, sends: Transfers, recvs: Transfers, lane: int, team: Team | None = None
    ) -> None:
        for index, transfer in enumerate(recvs):
            self.pending.setdefault(transfer.item, []).append((self.handles, index))
        self.instructions.append(Launch(self.handles, self.number, lane, sends, recvs, team))
        self.handles += 1


def _last_uses(
    steps: Sequence[RankStep], reads: Sequence[Sequence[Sequence[Item]]]
) -> dict[Item, int]:
    """The last step that sends or reads each operand; reads: by step and tile."""
    last_use: dict[Item, int] = {}
    for number, (step, tiles) in enumerate(zip(steps, reads, strict=True)):
        for transfer in step.sends:
            if transfer.item.role is Role.OPERAND:
                last_use[transfer.item] = number
        for items in tiles:
            last_use.update(dict.fromkeys(items, number))
    return last_use


def tile_operands(tile: Tile) -> list[Item]:
    """The operands that a tile reads, queries first."""
    q, kv, heads = tile
    return [operand(Side.Q, shard, heads) for shard in q] + [
        operand(Side.KV, shard, heads) for shard in kv
    ]


def _carrying(step: RankStep, carries: frozenset[Part]) -> RankStep:
    sends, recvs = _chosen(step, lambda transfer: _part(transfer) in carries)
    return step._replace(sends=sends, recvs=recvs)


def _chosen(step: RankStep, wanted: Callable[[Transfer], bool]) -> tuple[Transfers, Transfers]:
    return tuple(filter(wanted, step.sends)), tuple(filter(wanted, step.recvs))


def _part(transfer: Transfer) -> Part:
    return transfer.item.side, transfer.item.role


def _post_ahead(instructions: list[Instruction], handles: int, ahead: int) -> list[Instruction]:
    """Move the receives of every launch before its sends by some launches.

    Per pair of ranks the order of receives stays the order of sends.
    """
    early: dict[int, list[Instruction]] = defaultdict(list)
    moved: dict[int, Instruction] = {}
    places: list[int] = []
    for place, launch in enumerate(instructions):
        if not isinstance(launch, Launch):
            continue
        if launch.team is None and launch.recvs and (places or ahead > 1):
            before = places[-ahead] if len(places) >= ahead else -1 if ahead > 1 else places[0]
            early[before].append(launch._replace(sends=()))
            moved[place] = launch._replace(handle=handles + place, recvs=())
        places.append(place)
    written = early[-1]
    for index, step in enumerate(instructions):
        written += [moved.get(index, step), *early[index]]
    return [
        s for s in written if not isinstance(s, Launch) or s.sends or s.recvs or s.team is not None
    ]


def _arenas(
    steps: tuple[RankStep, ...], *, scattered: bool = False
) -> tuple[tuple[Item, ...], ...]:
    """Return groups of operands that may lie side by side: a tile reads them together.

    Both passes must find the same groups, so all transfers of the plan are looked at.
    """
    groups: dict[tuple[Side, int], dict[Item, None]] = {}
    for step in steps:
        for tile in step.tiles:
            for side, shards in ((Side.Q, tile.q), (Side.KV, tile.kv)):
                if len(shards) > 1:
                    items = dict.fromkeys(operand(side, shard, tile.heads) for shard in shards)
                    groups.setdefault((side, tile.heads), {}).update(items)
    if not groups:
        return ()
    arrived = {
        transfer.item: number for number, step in enumerate(steps) for transfer in step.recvs
    }
    reads = [[tile_operands(tile) for tile in step.tiles] for step in steps]
    last_use = _last_uses(steps, reads)
    arenas: list[tuple[Item, ...]] = []
    for items in groups.values():
        received = [item for item in items if item in arrived]
        if not received:
            continue
        if scattered or min(last_use[i] for i in received) > max(arrived[i] for i in received):
            arenas.append(tuple(items))
    return tuple(arenas)

"""A plan between groups of ranks, and another one inside each group."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, product
from typing import NamedTuple

from tilewise.arguments import checks_arguments, require_type
from tilewise.plan.builder import RankBuilder
from tilewise.plan.ir import (
    MHA,
    BackwardOrder,
    HeadTuning,
    Item,
    Plan,
    RankStep,
    Role,
    Side,
    Tile,
    Traits,
    Transfer,
    own_shards,
)

Shards = tuple[tuple[int, ...], ...]
"""Per side, shards of the outer plan."""

InnerStep = tuple[bool, frozenset[tuple[Side, Role]]]
"""Whether a step of the inner plan has tiles, and what moves in it."""


def check_nests(outer: Plan, inner: Plan) -> None:
    """Raise ValueError for plans that have no place in another."""
    for what, plan in (("outer", outer), ("inner", inner)):
        require_type(Plan, what, plan)
        if plan.num_head_groups > 1:
            raise ValueError(
                f"hierarchical splits no heads, but its {what} plan is {plan.name}; "
                "write ulysses(degree, inner=hierarchical(...))"
            )
        if plan.owners != own_shards(plan.world_size) or plan.cuts or plan.made_for:
            raise ValueError(
                f"hierarchical needs an {what} plan in which rank r owns shard r, for any mask, "
                f"not {plan.name}"
            )


class Round(NamedTuple):
    """One outer step of a node, in outer's shards."""

    tiles: tuple[Tile, ...]
    read: Shards  # that no tile read before
    filled: Shards  # that no tile adds to later


class Timetable(NamedTuple):
    """Steps at which things happen: the same on all ranks, so that both ends of a transfer agree.

    Kinds of outer steps, up to the last tiles: "rest" has no tiles; "move" are inner's steps; in
    "call" nothing moves in the node, and a rank's tiles are one call.
    """

    kinds: tuple[str, ...]
    starts: tuple[int, ...]  # the steps at which they begin and the last one ends
    tile_steps: tuple[InnerStep, ...]  # inner's
    first: int  # the inner step of the first tiles
    lags: tuple[int, ...]  # per side, so many steps later do partials leave the node that sums them

    def begin(self, number: int) -> int:
        """The step at which an outer step begins."""
        last = len(self.kinds)
        return self.starts[number] if number < last else self.starts[last] + number - last


def make_clock(outer: Plan, inner: Plan) -> Timetable:
    tile_steps = tile_steps_of(inner.rank_steps(0))
    kinds = kinds_of(rounds_of(outer.rank_steps(0)), tile_steps)
    computing = [number for number, (tiles, _) in enumerate(tile_steps) if tiles]
    first_computing, span = computing[0], computing[-1] - computing[0] + 1
    starts = accumulate((span if kind == "move" else 1 for kind in kinds), initial=0)

    def lag(side: Side) -> int:
        transfers = [i for i, (_, parts) in enumerate(tile_steps) if (side, Role.PARTIAL) in parts]
        return max([first_computing, *(number + 1 - span for number in transfers)])

    return Timetable(kinds, tuple(starts), tile_steps, first_computing, tuple(map(lag, Side)))


def tile_steps_of(steps: tuple[RankStep, ...]) -> tuple[InnerStep, ...]:
    return tuple(
        (bool(tiles), frozenset(transfer.item[:2] for transfer in (*sends, *recvs)))
        for tiles, sends, recvs in steps
    )


def kinds_of(rounds: list[Round], tile_steps: tuple[InnerStep, ...]) -> tuple[str, ...]:
    moving = {side for _, parts in tile_steps for side, _ in parts}

    def kind(work: Round) -> str:
        if not work.tiles:
            return "rest"
        return "move" if any(work.read[x] or work.filled[x] for x in moving) else "call"

    last = max(number for number, work in enumerate(rounds) if work.tiles)
    return tuple(kind(work) for work in rounds[: last + 1])


def rounds_of(steps: tuple[RankStep, ...]) -> list[Round]:
    shards_by_step = [
        tuple(tuple(dict.fromkeys(s for tile in tiles for s in tile[:2][x])) for x in Side)
        for tiles, _, _ in steps
    ]
    read, filled = _first_uses(shards_by_step), _first_uses(shards_by_step[::-1])[::-1]
    return [Round(step.tiles, r, f) for step, r, f in zip(steps, read, filled, strict=True)]


def _first_uses(shards_by_step: list[Shards]) -> list[Shards]:
    """For each step, the shards that no earlier step uses."""
    used_before: tuple[set[int], ...] = tuple(set() for _ in Side)
    first_uses = []
    for shards in shards_by_step:
        first_uses.append(
            tuple(tuple(s for s in shards[x] if s not in used_before[x]) for x in Side)
        )
        for side in Side:
            used_before[side].update(shards[side])
    return first_uses


def post(s: RankBuilder, transfer: Transfer, shard: int, place: tuple[int, int]) -> None:
    """Write this rank's end of a transfer of the outer or the inner plan.

    Args:
        shard: number of its shard in the whole plan.
        place: (factor, offset): the plan's rank r is rank factor * r + offset here.
    """
    factor, offset = place
    if transfer.rows is not None:
        raise ValueError("hierarchical needs plans that are not pruned; prune its result")
    src, dst = factor * transfer.src + offset, factor * transfer.dst + offset
    item = Item(transfer.item.side, transfer.item.role, shard)
    s.send(item, dst) if src == s.rank else s.recv(item, src)


def compute(s: RankBuilder, outer: Iterable[Tile], inner: Sequence[Tile], size: int) -> None:
    """Write the tiles of outer x inner: each inner tile, for the shards of every outer tile."""
    for outer_tile, inner_tile in product(outer, inner):
        q, kv = ([x * size + y for x in outer_tile[:2][i] for y in inner_tile[:2][i]] for i in Side)
        s.tile(q, kv)


def joined(steps: tuple[RankStep, ...]) -> list[Tile]:
    """All of a rank's tiles as few: query shards that meet the same KV shards together."""
    columns: dict[int, set[int]] = {}
    for step in steps:
        for tile in step.tiles:
            for q in tile.q:
                columns.setdefault(q, set()).update(tile.kv)
    rows: dict[tuple[int, ...], list[int]] = {}
    for q, kv in columns.items():
        rows.setdefault(tuple(sorted(kv)), []).append(q)
    return [Tile(tuple(sorted(q)), kv) for kv, q in rows.items()]


def check_reads_its_own(inner: Plan, local: int, steps: tuple[RankStep, ...]) -> None:
    """Raise ValueError unless a rank reads its own shards.

    Shards from other nodes arrive at the rank of the same local number, which must read them too.
    """
    tiles = [tile for step in steps for tile in step.tiles]
    for side in Side:
        if not any(local in (tile.q, tile.kv)[side] for tile in tiles):
            raise ValueError(
                f"hierarchical needs an inner plan in which every rank reads its own shards; in "
                f"{inner.name} rank {local} does not read {side.name.lower()}{local}"
            )


@checks_arguments
def hierarchical(outer: Plan, inner: Plan) -> Plan:
    """Run outer between nodes and inner in each of them; rank = node * inner.world_size + local.

    Bytes per rank: outer's transfers, which alone cross nodes, and inner's transfers once for every
    shard of outer that a node reads: a Q shards of an a x b tile, b KV shards.

    Args:
        outer: ring, all_gather, mesh, attention2d, double_ring or hierarchical.
        inner: any of these but attention2d.
    Raises:
        ValueError: if they do not nest. Heads are split outside, as in
            ulysses(degree, inner=hierarchical(...)).
    """
    check_nests(outer, inner)
    n = outer.world_size * inner.world_size
    name = f"hierarchical({outer.name}, {inner.name})"
    outer_shifts = (shift.times(inner.world_size) for shift in outer.traits.shifts)
    proven = outer.traits.proven and inner.traits.proven
    tuning = None
    if any(plan.traits.tuning for plan in (outer, inner)):
        tuning = HeadTuning(_for_heads, (outer, inner), MHA)
    order = None
    if any(plan.traits.backward_order for plan in (outer, inner)):
        order = BackwardOrder(_in_backward, (outer, inner))
    traits = Traits(
        (*inner.traits.shifts, *outer_shifts), tuning=tuning, backward_order=order, proven=proven
    )
    asked = [x.waiting_results for x in (outer, inner) if x.waiting_results is not None]
    return Plan(
        name,
        n,
        1,
        own_shards(n),
        script=_script(outer, inner),
        waiting_results=min(asked, default=None),
        traits=traits,
    )


def _in_backward(outer: Plan, inner: Plan) -> Plan:
    return hierarchical(outer.in_backward(), inner.in_backward())


def _for_heads(outer: Plan, inner: Plan, *heads: int) -> Plan:
    tunings = outer.traits.tuning, inner.traits.tuning
    plans = (x.plan(*heads) if x else plan for x, plan in zip(tunings, (outer, inner), strict=True))
    return hierarchical(*plans)


def _script(outer: Plan, inner: Plan) -> Callable[[int], tuple[RankStep, ...]]:
    if outer.world_size == 1 or inner.world_size == 1:
        return (outer if inner.world_size == 1 else inner).rank_steps
    clock = make_clock(outer, inner)

    def script(rank: int) -> tuple[RankStep, ...]:
        return _written(rank, outer, inner, clock)

    for rank in (inner.world_size + 1, outer.world_size * inner.world_size - 1):
        script(rank)  # so that plans that do not nest are refused at once
    return script


def _written(rank: int, outer: Plan, inner: Plan, clock: Timetable) -> tuple[RankStep, ...]:
    size = inner.world_size
    s, (node, local) = RankBuilder(rank), divmod(rank, size)
    outer_steps, inner_steps = outer.rank_steps(node), inner.rank_steps(local)
    rounds = rounds_of(outer_steps)
    check_reads_its_own(inner, local, inner_steps)
    uneven_plans = [inner] * (tile_steps_of(inner_steps) != clock.tile_steps)
    uneven_plans += [outer] * (kinds_of(rounds, clock.tile_steps) != clock.kinds)
    if uneven_plans:
        raise ValueError(
            f"hierarchical needs plans whose ranks all compute in the same steps, not "
            f"{uneven_plans[0].name}"
        )
    for number, step in enumerate(outer_steps):
        for transfer in (*step.sends, *step.recvs):
            lag = clock.lags[transfer.item.side] if transfer.item.role is Role.PARTIAL else 0
            s.at(clock.begin(number) + lag)
            post(s, transfer, transfer.item.shard * size + local, (size, local))
    call = joined(inner_steps)
    for begin, kind, work in zip(clock.starts, clock.kinds, rounds, strict=False):
        if kind == "call":
            s.at(begin + clock.first)
            compute(s, work.tiles, call, size)
        elif kind == "move":
            for step_number, step in enumerate(inner_steps, begin):
                s.at(step_number)
                compute(s, work.tiles, step.tiles, size)
                for transfer in (*step.sends, *step.recvs):
                    moved_shards = work.read if transfer.item.role is Role.OPERAND else work.filled
                    for shard in moved_shards[transfer.item.side]:
                        post(s, transfer, shard * size + transfer.item.shard, (1, node * size))
    return s.done()

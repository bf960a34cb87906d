"""A plan meets a mask and a layout: its shards are tokens, and what the mask makes needless goes.

Tiles without an allowed pair go; operands nobody reads and partials nobody filled do not travel;
those that do are trimmed to the rows that their destination or a later transfer still reads; a rank
that would only pass a value on is passed by.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import NamedTuple

from tilewise.arguments import checks_arguments
from tilewise.layouts.cells import Cell, cells
from tilewise.layouts.joint import on_every_rank
from tilewise.layouts.layout import Layout, zigzag
from tilewise.masks.base import Causal, Mask
from tilewise.plan.builder import operand, partial
from tilewise.plan.ir import (
    NO_TRAITS,
    Item,
    Plan,
    PlanError,
    Role,
    Rows,
    Side,
    Step,
    Tile,
    Transfer,
)
from tilewise.plan.kept import kept_with_plan
from tilewise.plan.row_ranges import ALL, count_rows, union, whole_or


def shard_layouts(
    plan: Plan, layout: Layout, kv_layout: Layout | None = None
) -> tuple[Layout, Layout]:
    """The query and the KV shards' tokens.

    Tokens that every rank holds are those of the rank that owns them, but for queries of a plan
    that computes them on every rank.

    Args:
        layout: of the queries, and without kv_layout of k and v.
        kv_layout: None: layout, of whose tokens replicated queries are the last.
    Raises:
        ValueError: if the layout's ranks are not the plan's.
    """
    in_place = plan.replicated_queries
    if kv_layout is None:
        kv_layout = layout
        layout = on_every_rank([layout.num_tokens - 1], layout) if in_place else layout
    layout, kv_layout = layout if in_place else layout.owned, kv_layout.owned
    for what, given in (("layout", layout), ("kv_layout", kv_layout)):
        if given.world_size != plan.world_size:
            raise ValueError(
                f"{what} is for {given.world_size} ranks, but {plan.name} for {plan.world_size}; "
                "make both for the same number"
            )
    if plan.cuts is None:
        return _by_home(plan, layout, Side.Q), _by_home(plan, kv_layout, Side.KV)
    q_homes, kv_homes = ([holders[0] for holders in side] for side in plan.owners)
    return layout.cut(q_homes, plan.cuts), kv_layout.cut(kv_homes, plan.cuts)


def _by_home(plan: Plan, layout: Layout, side: Side) -> Layout:
    """Return a layout of a plan's shards, each with the rows of the rank that is its home."""
    homes, ranks = [holders[0] for holders in plan.owners[side]], range(plan.world_size)
    if homes == [*ranks]:
        return layout
    in_place = plan.replicated_queries and side is Side.Q
    if sorted(homes) != [*ranks] and not in_place:
        rank = next(
            rank for rank in (*homes, *ranks) if rank not in ranks or homes.count(rank) != 1
        )
        shard = homes.index(rank) if rank in homes else 0
        message = (
            f"{plan.name}: rank {rank} of {plan.world_size} is home to {homes.count(rank)} "
            f"{side.name.lower()} shards; in a plan without cuts every rank is home to one"
        )
        raise PlanError(message, 0, rank, operand(side, shard))
    return Layout(layout.num_tokens, [layout.runs[home] for home in homes], layout.name)


def check_made_for(plan: Plan, mask: Mask, layout: Layout) -> None:
    """Raise ValueError if a mask-aware plan is used with another mask or layout than its own."""
    if plan.made_for not in (None, (mask, layout.owned)):
        theirs = " on ".join(map(repr, plan.made_for or ()))
        raise ValueError(
            f"{plan.name.split('(')[0]} is a plan for {theirs}, not for {mask!r} on {layout!r}; "
            "make it for these"
        )


def everything_needed(mask: Mask, q_layout: Layout, kv_layout: Layout) -> bool:
    """Return whether a mask allows all pairs and no shard is empty: then there is nothing
    to prune.
    """
    edges = [0, q_layout.num_tokens], [0, kv_layout.num_tokens]
    return min(*q_layout.sizes, *kv_layout.sizes) > 0 and int(mask.coverage(*edges)[0, 0]) == 2


def all_alike(plan: Plan, mask: Mask, layouts: tuple[Layout, Layout]) -> bool | None:
    """Return whether pairs of different shards all cost the same, by the mask and the layout alone.

    Returns:
        None if they do not; False if all cells are allowed; True if half of each pair's are:
        equal zigzag shards under a causal mask.
    """
    if plan.cuts is not None or plan.made_for is not None or plan.replicated_queries:
        return None
    n, tokens = plan.world_size, layouts[0].num_tokens
    if len({*layouts[0].sizes, *layouts[1].sizes}) > 1:
        return None
    if isinstance(mask, Causal) and tokens % (2 * n) == 0 and {*layouts} == {zigzag(tokens, n)}:
        return True
    return False if everything_needed(mask, *layouts) else None


@kept_with_plan(2)
def table_cells(
    plan: Plan, mask: Mask, q_layout: Layout, kv_layout: Layout
) -> Mapping[tuple[int, int], Cell]:
    """The non-empty (query shard, KV shard) cells, kept with the plan."""
    return cells(mask, q_layout, kv_layout)


@kept_with_plan(2)
def every_row_meets(plan: Plan, mask: Mask, q_layout: Layout, kv_layout: Layout) -> bool:
    """Return whether each query sees some key, and some query sees each key."""
    if everything_needed(mask, q_layout, kv_layout):
        return True
    table = table_cells(plan, mask, q_layout, kv_layout)
    rows: tuple[dict[int, Rows], dict[int, Rows]] = ({}, {})
    for (q, kv), cell in table.items():
        rows[0][q] = union(rows[0].get(q, ()), cell.q_rows)
        rows[1][kv] = union(rows[1].get(kv, ()), cell.k_rows)
    return all(
        count_rows(of_side.get(shard, ())) == size
        for of_side, layout in zip(rows, (q_layout, kv_layout), strict=True)
        for shard, size in enumerate(layout.sizes)
    )


Reads = Callable[[tuple[int, int]], tuple[Rows, Rows] | None]
"""(q shard, kv shard) -> the rows of each that the cell reads, None if it is empty."""


class StepTransfer(NamedTuple):
    """A transfer and the step it starts at."""

    step: int
    transfer: Transfer


@checks_arguments
def prune(plan: Plan, mask: Mask, layout: Layout) -> Plan:
    """The plan without what the mask makes needless under this layout."""
    check_made_for(plan, mask, layout)
    return prune_shards(plan, mask, shard_layouts(plan, layout))


def prune_shards(plan: Plan, mask: Mask, layouts: tuple[Layout, Layout]) -> Plan:
    """Prune a plan as `prune` does, with checked shards; mask-aware plans stay as they are."""
    return _without_needless(plan, mask, layouts) or plan


@kept_with_plan()
def _without_needless(plan: Plan, mask: Mask, layouts: tuple[Layout, Layout]) -> Plan | None:
    """Return the pruned plan, or None if there is nothing to prune.

    It does not return the plan itself: the result is kept with the plan, which would never be
    freed.
    """
    if plan.made_for is not None or everything_needed(mask, *layouts):
        return None
    return _pruned(plan, mask, layouts)


def _pruned(plan: Plan, mask: Mask, layouts: tuple[Layout, Layout]) -> Plan:
    cells = table_cells(plan, mask, *layouts)
    rows = {pair: (cell.q_rows, cell.k_rows) for pair, cell in cells.items()}
    return _reduced(plan, rows.get, (layouts[0].sizes, layouts[1].sizes))


@checks_arguments
def droppable(
    plan: Plan, mask: Mask | None = None, layout: Layout | None = None
) -> tuple[StepTransfer, ...]:
    """The transfers that a plan could do without; of a strategy's plan there are none.

    Operands nobody reads, empty partials, detours through ranks that add nothing, and an owner's
    own share leaving home. With mask and layout those that they make needless count too, trimmed
    rows included.
    """
    if mask is not None and layout is not None:
        check_made_for(plan, mask, layout)
        kept = _pruned(plan, mask, shard_layouts(plan, layout))
    else:
        sizes = [tuple(ALL[0][1] for _ in side) for side in plan.owners]
        kept = _reduced(plan, lambda _: (ALL, ALL), (sizes[0], sizes[1]))
    left = {transfer for step in kept.steps for transfer in step.transfers}
    return tuple(
        StepTransfer(number, transfer)
        for number, step in enumerate(plan.steps)
        for transfer in step.transfers
        if transfer not in left or _leaves_home(plan, transfer)
    )


def _leaves_home(plan: Plan, transfer: Transfer) -> bool:
    side, role, shard, _ = transfer.item
    return role is Role.PARTIAL and transfer.src == plan.home(side, shard)


def _reduced(plan: Plan, reads: Reads, sizes: tuple[tuple[int, ...], tuple[int, ...]]) -> Plan:
    tiles = [tuple(tuple(_shrunk(mine, reads)) for mine in step.tiles) for step in plan.steps]
    operands = _read_operands(plan, tiles, reads)
    partials = _filled_partials(plan, tiles, reads)
    uses = _uses(tiles)
    transfers = _without_relays(operands, uses) + _without_relays(partials, uses, moved=True)
    by_step: list[list[Transfer]] = [[] for _ in plan.steps]
    for step, transfer in transfers:
        size = sizes[transfer.item.side][transfer.item.shard]
        by_step[step].append(
            transfer._replace(rows=None if transfer.rows is None else whole_or(transfer.rows, size))
        )
    steps = [Step(t, tuple(x)) for t, x in zip(tiles, by_step, strict=True) if x or any(t)]
    exchanges = plan.traits.exchanges if len(steps) == len(plan.steps) else ()
    exchanges = tuple(
        one._replace(
            by_head=one.by_head and plan.steps[one.step].transfers == steps[one.step].transfers
        )
        for one in exchanges
        # of a relay that is left out, the first sender reaches another team at once
        if all(
            transfer.src // one.size == transfer.dst // one.size
            for transfer in steps[one.step].transfers
        )
    )
    return plan.changed(
        name=f"{plan.name}, pruned",
        steps=steps,
        script=None,
        traits=NO_TRAITS._replace(exchanges=exchanges),
    )


def _shrunk(tiles: tuple[Tile, ...], reads: Reads) -> Iterator[Tile]:
    """Yield the tiles without shards of which no pair is allowed; a tile without any goes."""
    for tile in tiles:
        met = [pair for pair in product(tile.q, tile.kv) if reads(pair)]
        if len(met) == len(tile.q) * len(tile.kv):
            yield tile
        elif met:
            q, kv = map(set, zip(*met, strict=True))
            kept = tuple(i for i in tile.q if i in q), tuple(j for j in tile.kv if j in kv)
            yield Tile(*kept, tile.heads)


def _cell_rows(
    tile: Tile, reads: Reads, item: Callable[[Side, int, int], Item]
) -> Iterator[tuple[Item, Rows]]:
    """The items of a tile's cells, each cell on its own, and which rows of them it reads."""
    kvs = [(kv, item(Side.KV, kv, tile.heads)) for kv in tile.kv]
    for q in tile.q:
        mine = item(Side.Q, q, tile.heads)
        for kv, other in kvs:
            rows = reads((q, kv))
            if rows:
                yield mine, rows[0]
                yield other, rows[1]


def _add(found: dict[Item, Rows], item: Item, rows: Rows) -> None:
    had = found.get(item, rows)
    found[item] = rows if had == rows else union(had, rows)


def _read_operands(
    plan: Plan, tiles: list[tuple[tuple[Tile, ...], ...]], reads: Reads
) -> list[StepTransfer]:
    """Backwards in time: what each transfer's destination still reads after it."""
    later: list[dict[Item, Rows]] = [{} for _ in range(plan.world_size)]
    transfers: list[StepTransfer] = []
    for number in reversed(range(len(plan.steps))):
        wanted: list[tuple[int, Item, Rows]] = []
        for transfer in plan.steps[number].transfers:
            rows = (
                later[transfer.dst].pop(transfer.item, None)
                if transfer.item.role is Role.OPERAND
                else None
            )
            if rows:
                transfers.append(StepTransfer(number, transfer._replace(rows=rows)))
                wanted.append((transfer.src, transfer.item, rows))
        for rank, mine in enumerate(tiles[number]):
            for tile in mine:
                wanted += [(rank, *read) for read in _cell_rows(tile, reads, operand)]
        for rank, item, rows in wanted:
            _add(later[rank], item, rows)
    return transfers


def _filled_partials(
    plan: Plan, tiles: list[tuple[tuple[Tile, ...], ...]], reads: Reads
) -> list[StepTransfer]:
    """Forwards in time: what each partial has been filled with when it leaves."""
    filled: list[dict[Item, Rows]] = [{} for _ in range(plan.world_size)]
    transfers: list[StepTransfer] = []
    for number, step in enumerate(plan.steps):
        arrivals: list[tuple[int, Item, Rows]] = []
        for transfer in step.transfers:
            if transfer.item.role is Role.PARTIAL:
                rows = filled[transfer.src].pop(transfer.item, None)
                if rows:
                    transfers.append(StepTransfer(number, transfer._replace(rows=rows)))
                    arrivals.append((transfer.dst, transfer.item, rows))
            elif transfer.item.role is Role.RESULT:
                source = partial(transfer.item.side, transfer.item.shard, transfer.item.heads)
                if filled[transfer.src].get(source):
                    transfers.append(StepTransfer(number, transfer))
                    arrivals.append((transfer.dst, source, filled[transfer.src][source]))
        for rank, mine in enumerate(tiles[number]):
            for tile in mine:
                arrivals += [(rank, *read) for read in _cell_rows(tile, reads, partial)]
        for rank, item, rows in arrivals:
            _add(filled[rank], item, rows)
    return transfers


Uses = dict[tuple[int, Side, int, int], list[int]]
"""(rank, side, shard, heads) -> the steps of the tiles that read it, and fill its partial."""


def _uses(tiles: list[tuple[tuple[Tile, ...], ...]]) -> Uses:
    uses: Uses = defaultdict(list)
    for number, row in enumerate(tiles):
        for rank, mine in enumerate(row):
            for tile in mine:
                for side, shards in zip(Side, (tile.q, tile.kv), strict=True):
                    for shard in shards:
                        uses[rank, side, shard, tile.heads].append(number)
    return uses


ByPlace = dict[tuple[int, Item], list[StepTransfer]]
"""(rank, item) -> transfers there, or from there."""


def _without_relays(
    transfers: list[StepTransfer], uses: Uses, moved: bool = False
) -> list[StepTransfer]:
    """Join a transfer to a rank that only passes the value on with the transfer by which it does.

    The joined transfer starts when the second did, so the receiver notices nothing; a moved value
    must rest undisturbed at its source until then.
    """
    into: ByPlace = defaultdict(list)
    out_of: ByPlace = defaultdict(list)
    ordered = sorted(transfers, key=lambda transfer: transfer.step)
    for transfer in ordered:
        into[transfer.transfer.dst, transfer.transfer.item].append(transfer)
        out_of[transfer.transfer.src, transfer.transfer.item].append(transfer)
    for onward in ordered:
        item, relay, dst, _ = onward.transfer
        arrivals, departures = into[relay, item], out_of[relay, item]
        if (
            item.role is Role.RESULT
            or uses.get((relay, item.side, item.shard, item.heads))
            or len(arrivals) != 1
            or len(departures) != 1
        ):
            continue
        (first,) = arrivals
        source = first.transfer.src
        if source == dst or (moved and not _rests(first, onward, into, out_of, uses)):
            continue
        joined = StepTransfer(onward.step, onward.transfer._replace(src=source))
        arrivals.clear()
        departures.clear()
        out_of[source, item].remove(first)
        out_of[source, item].append(joined)
        into[dst, item].remove(onward)
        into[dst, item].append(joined)
    return [transfer for arrivals in into.values() for transfer in arrivals]


def _rests(
    first: StepTransfer, onward: StepTransfer, into: ByPlace, out_of: ByPlace, uses: Uses
) -> bool:
    """Return whether nothing is added to or taken from a partial at its source between two
    transfers.
    """
    place, item = (first.transfer.src, first.transfer.item), first.transfer.item
    used = uses.get((place[0], item.side, item.shard, item.heads), ())
    added = [*used, *(transfer.step for transfer in into[place])]
    taken = [transfer.step for transfer in out_of[place] if transfer is not first]
    return not any(first.step <= step < onward.step for step in added) and not any(
        first.step <= step <= onward.step for step in taken
    )

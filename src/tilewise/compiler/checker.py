"""Symbolic execution of a plan: is every pair computed once, and every contribution home once?

Values are sets of contributors: a query shard's partial is the set of KV shards already in it, and
the other way round, kept as the bits of an integer. No tensor is needed to know a plan is right.
"""

from collections import defaultdict
from collections.abc import Mapping

from tilewise.arguments import checks_arguments, require_type
from tilewise.compiler.pruning import everything_needed, shard_layouts, table_cells
from tilewise.layouts.cells import Cell
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Mask
from tilewise.plan.builder import operand, partial
from tilewise.plan.ir import Item, Plan, PlanError, Role, Rows, Side, Step, Tile, Transfer
from tilewise.plan.kept import kept_with_plan
from tilewise.plan.numbers import check_numbers
from tilewise.plan.row_ranges import ALL, covers, union


@checks_arguments
def check(plan: Plan, mask: Mask | None = None, layout: Layout | None = None) -> None:
    """Return None if a plan computes exact attention, and its gradients.

    Every pair of shards (with mask and layout: every pair with an allowed entry) is computed
    exactly once, operands are present where they are read, and every contribution reaches its
    home exactly once, results every holder.

    Raises:
        PlanError: with .step, .rank and .item of the first thing that is wrong.
        ValueError: if only one of mask and layout is given, or they do not fit the plan.
    """
    require_type(Plan, "plan", plan)
    if (mask is None) != (layout is None):
        raise ValueError("check takes mask and layout together, or neither")
    if mask is None or layout is None:
        _check(plan, None)
    else:
        require_type(Mask, "mask", mask)
        require_type(Layout, "layout", layout)
        check_shards(plan, mask, *shard_layouts(plan, layout))


def check_shards(plan: Plan, mask: Mask, q_layout: Layout, kv_layout: Layout) -> None:
    """Check a plan as `check` does, with the layout of each side's shards given."""
    everything = everything_needed(mask, q_layout, kv_layout)
    cells = None if everything else table_cells(plan, mask, q_layout, kv_layout)
    _check(plan, cells, (q_layout.sizes, kv_layout.sizes))


def check_before_run(plan: Plan, mask: Mask, layouts: tuple[Layout, Layout]) -> None:
    """Check a plan with `check_shards`, at most once for each mask and layout.

    A strategy that is right for every mask and layout is not checked.
    """
    if not _computes_all(plan):
        _check_once(plan, mask, *layouts)


_check_once = kept_with_plan()(check_shards)


@kept_with_plan(1)
def _computes_all(plan: Plan) -> bool:
    """Return whether a plan is right for every mask and layout."""
    try:
        _check(plan, None)
    except PlanError:
        return False
    return not any(transfer.rows for step in plan.steps for transfer in step.transfers)


Cells = Mapping[tuple[int, int], Cell]
Sizes = tuple[tuple[int, ...], tuple[int, ...]]


def _check(plan: Plan, cells: Cells | None, sizes: Sizes | None = None) -> None:
    steps = plan.steps
    try:
        check_numbers(plan, steps)
        _Execution(plan, cells, sizes).all_steps()
    except PlanError as error:
        raise error.in_grid(plan.name, steps, plan.world_size) from None


class _Execution:
    """The state of all ranks while a plan is executed on sets."""

    def __init__(self, plan: Plan, cells: Cells | None, sizes: Sizes | None):
        self.plan, self.cells, self.sizes = plan, cells, sizes
        self.groups = range(plan.num_head_groups)
        self.held: list[dict[Item, Rows]] = [{} for _ in range(plan.world_size)]
        self.parts: list[dict[Item, int]] = [defaultdict(int) for _ in range(plan.world_size)]
        self.computed: dict[Tile, tuple[int, int]] = {}
        for side in Side:
            for shard, holders in enumerate(plan.owners[side]):
                for rank in holders:
                    for heads in self.groups:
                        self.held[rank][operand(side, shard, heads)] = ALL

    def all_steps(self) -> None:
        for number, step in enumerate(self.plan.steps):
            self._step(number, step)
        self._finish(max(len(self.plan.steps) - 1, 0))

    def _step(self, number: int, step: Step) -> None:
        arrivals = [(transfer, self._leave(number, transfer)) for transfer in step.transfers]
        for transfer, _ in arrivals:
            if transfer.item.role is Role.PARTIAL and not self.parts[transfer.src].pop(
                transfer.item, 0
            ):
                message = (
                    f"step {number}: {transfer.item} leaves rank {transfer.src} twice; "
                    "a partial moves"
                )
                raise PlanError(message, number, transfer.src, transfer.item)
        for rank, tiles in enumerate(step.tiles):
            for tile in tiles:
                self._tile(number, rank, tile)
        for transfer, value in arrivals:
            self._arrive(number, transfer, value)

    def _leave(self, number: int, transfer: Transfer) -> int:
        """The contributions that a transfer carries (0 for operands), as the step begins."""

        def fail(reason: str) -> PlanError:
            ends = f"from rank {transfer.src} to rank {transfer.dst}"
            message = f"step {number}: {transfer.item} {ends}: {reason}"
            return PlanError(message, number, transfer.src, transfer.item)

        side, role, shard, heads = transfer.item
        if transfer.src == transfer.dst:
            raise fail("a rank does not send to itself")
        if transfer.rows is not None and transfer.rows[-1][1] > self._size(side, shard):
            raise fail(f"rows {transfer.rows} are not ascending ranges of its own")
        if role is Role.OPERAND:
            if transfer.item not in self.held[transfer.src]:
                raise fail(f"rank {transfer.src} does not hold it when the step begins")
            if not covers(self.held[transfer.src][transfer.item], transfer.rows):
                raise fail(
                    f"rank {transfer.src} holds only rows {self.held[transfer.src][transfer.item]}"
                )
            return 0
        stored = self.parts[transfer.src].get(partial(side, shard, heads), 0)
        if not stored:
            raise fail(f"rank {transfer.src} has nothing of it when the step begins")
        if role is Role.RESULT:
            if (
                transfer.src != self.plan.home(side, shard)
                and transfer.item not in self.held[transfer.src]
            ):
                raise fail(f"rank {transfer.src} does not have the result")
            wanted = self._wanted(side, shard)
            if stored & wanted != wanted or transfer.rows is not None:
                raise fail("the result is not complete")
            if transfer.dst not in self.plan.owners[side][shard]:
                raise fail(f"rank {transfer.dst} is not a holder of the shard")
        elif not covers(transfer.rows, self._filled(side, shard, stored)):
            raise fail(f"rows {transfer.rows} leave some of its contributions behind")
        return stored

    def _size(self, side: Side, shard: int) -> int:
        return ALL[-1][1] if self.sizes is None else self.sizes[side][shard]

    def _tile(self, number: int, rank: int, tile: Tile) -> None:
        for q in tile.q:
            for kv in tile.kv:
                items = operand(Side.Q, q, tile.heads), operand(Side.KV, kv, tile.heads)
                for item, cell_rows in zip(items, self._reads(q, kv), strict=True):
                    # Also where no row is read: unless pruned, the executor looks the item up.
                    held = self.held[rank].get(item)
                    if held is None or not covers(held, cell_rows):
                        reason = self._absent(number, rank, item)
                        tile_name = f"step {number}, rank {rank}: tile q{q} x kv{kv}"
                        message = f"{tile_name} reads {item}: {reason}"
                        raise PlanError(message, number, rank, item)
                self._once(number, rank, Tile((q,), (kv,), tile.heads))
                self.parts[rank][partial(Side.Q, q, tile.heads)] |= 1 << kv
                self.parts[rank][partial(Side.KV, kv, tile.heads)] |= 1 << q

    def _absent(self, number: int, rank: int, item: Item) -> str:
        """Why an operand that a tile reads cannot be read."""
        if item in self.held[rank]:
            return f"rank {rank} has only rows {self.held[rank][item]} of it"
        for later, step in enumerate(self.plan.steps[number:], number):
            if any(transfer.item == item and transfer.dst == rank for transfer in step.transfers):
                return f"it arrives in step {later}, and can be read from step {later + 1} on"
        return f"it is not there, and nobody sends it to rank {rank}"

    def _once(self, number: int, rank: int, cell: Tile) -> None:
        if cell in self.computed:
            (before, other), (q,), (kv,) = self.computed[cell], cell.q, cell.kv
            message = f"step {number}, rank {rank}: q{q} x kv{kv} was computed already"
            where = f", at step {before} on rank {other}"
            raise PlanError(message + where, number, rank, operand(Side.Q, q, cell.heads))
        self.computed[cell] = number, rank

    def _arrive(self, number: int, transfer: Transfer, value: int) -> None:
        """Let a transfer arrive after the tiles of its step; later steps can use it.

        Args:
            number: of the step.
            value: the contributions that it carries, as bits.
        Raises:
            PlanError: if the rank has the operand already.
        """
        here, stored = self.held[transfer.dst], self.parts[transfer.dst]
        if transfer.item.role is Role.OPERAND:
            if transfer.item in here:
                message = (
                    f"step {number}: {transfer.item} from rank {transfer.src} arrives at rank "
                    f"{transfer.dst}, which has it already"
                )
                raise PlanError(message, number, transfer.dst, transfer.item)
            here[transfer.item] = ALL if transfer.rows is None else transfer.rows
        elif transfer.item.role is Role.RESULT:
            here[transfer.item] = ALL
            stored[transfer.item._replace(role=Role.PARTIAL)] = value
        else:
            stored[transfer.item] |= value

    def _finish(self, last: int) -> None:
        """Raise PlanError unless every pair was computed and all results are at their homes alone.

        Args:
            last: number of the last step, which the error names.
        """
        for q in range(self.plan.num_shards(Side.Q)):
            for kv in range(self.plan.num_shards(Side.KV)):
                if self.cells is not None and (q, kv) not in self.cells:
                    continue
                for heads in self.groups:
                    if Tile((q,), (kv,), heads) not in self.computed:
                        item = operand(Side.Q, q, heads)
                        raise PlanError(
                            f"q{q} x kv{kv}, head group {heads}, is never computed",
                            last,
                            self.plan.home(Side.Q, q),
                            item,
                        )
        for rank, stored in enumerate(self.parts):
            for item, value in stored.items():
                if value and rank not in self.plan.owners[item.side][item.shard]:
                    home = f"away from its home, rank {self.plan.home(item.side, item.shard)}"
                    message = f"{item} is left on rank {rank}, {home}"
                    raise PlanError(message, last, rank, item)
        for side in Side:
            for shard, holders in enumerate(self.plan.owners[side]):
                for heads in self.groups:
                    item, wanted = partial(side, shard, heads), self._wanted(side, shard)
                    for rank in holders:
                        if self.parts[rank].get(item, 0) & wanted != wanted:
                            message = f"{item} on rank {rank} lacks contributions at the end"
                            raise PlanError(message, last, rank, item)

    def _reads(self, q: int, kv: int) -> tuple[Rows, Rows]:
        if self.cells is None:
            return ALL, ALL
        cell = self.cells.get((q, kv))
        return ((), ()) if cell is None else (cell.q_rows, cell.k_rows)

    def _wanted(self, side: Side, shard: int) -> int:
        others = range(self.plan.num_shards(Side(1 - side)))
        if self.cells is None:
            return (1 << len(others)) - 1
        pairs = ((shard, other) if side is Side.Q else (other, shard) for other in others)
        return sum(1 << pair[1 - side] for pair in pairs if pair in self.cells)

    def _filled(self, side: Side, shard: int, value: int) -> Rows:
        """The rows of a partial that its contributions reach."""
        if self.cells is None:
            return ALL
        others = [o for o in range(self.plan.num_shards(Side(1 - side))) if value >> o & 1]
        pairs = [(shard, o) if side is Side.Q else (o, shard) for o in others]
        return union(*(self._reads(*pair)[side] for pair in pairs))

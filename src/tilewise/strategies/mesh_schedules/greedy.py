"""Greedy schedules of a mesh tile: the best of many that are tried.

Shards arrive and partials leave in an order, with all shards held or few.
A rank that holds all its shards receives first and sends afterwards. One that may hold fewer keeps
all shards of one side and lets those of the other pass through: each leaves once its blocks are
done, before another comes. No shard of either side can be let go before all of the other have been
there, so nothing below one whole side, the rank's own two and the two that pass can be enough.
"""

import heapq
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain, islice, product
from math import inf
from typing import NamedTuple

import numpy as np

from tilewise.plan.payload import ShardWeights
from tilewise.strategies.mesh_schedules.model import (
    Block,
    Line,
    Move,
    Need,
    Order,
    Port,
    TileStep,
    rectangles,
    seconds_at,
    tile_steps_of,
    transfer_bytes,
)


def stepwise_tile_steps(rows: int, columns: int, order: str, costs: ShardWeights) -> list[TileStep]:
    """The steps of a tile that computes every block as soon as it can.

    Args:
        order: "eager" receives what unlocks most blocks per byte, "kv_first" KV first.
    """
    x = y = 1
    rows_sent = columns_sent = 0
    ready_blocks: list[Block] = [(0, 0)]
    done_blocks: set[Block] = set()
    unlock_q, unlock_kv = costs.q + costs.q_partial, costs.kv + costs.kv_partial
    tile_steps: list[TileStep] = []
    while len(done_blocks) < rows * columns or rows_sent < rows - 1 or columns_sent < columns - 1:
        q = kv = q_partial = kv_partial = 0
        if y < columns and (x == rows or order == "kv_first" or x * unlock_q >= y * unlock_kv):
            kv = y
        elif x < rows:
            q = x
        if rows_sent < rows - 1 and all((rows_sent + 1, c) in done_blocks for c in range(columns)):
            q_partial = rows_sent + 1
        if columns_sent < columns - 1 and all(
            (k, columns_sent + 1) in done_blocks for k in range(rows)
        ):
            kv_partial = columns_sent + 1
        tile_steps.append(TileStep(tuple(rectangles(ready_blocks)), q, kv, q_partial, kv_partial))
        done_blocks.update(ready_blocks)
        ready_blocks = [(q, c) for c in range(y if q else 0)] + [
            (k, kv) for k in range(x if kv else 0)
        ]
        x, y = x + (q > 0), y + (kv > 0)
        rows_sent, columns_sent = rows_sent + (q_partial > 0), columns_sent + (kv_partial > 0)
    return tile_steps


NEVER = 1 << 60


class Pace(NamedTuple):
    """Rules by which a rank posts transfers, waits and computes.

    Attributes:
        block: seconds of a block, where one of ShardWeights is one second of the port.
        early: the next transfer is posted once those under way end within so many blocks.
        patience: the rank waits for up to this many blocks' time before it lets the port idle
            while it computes.
        saved: number of blocks, among those that no partial awaits, that are computed last: they
            fill the time in which the last partials leave.
        both: the first transfers of both sides are posted at once, whatever `early` says.
    """

    block: float
    early: float = 0.0
    patience: float = 0.0
    saved: int = 0
    both: bool = False


class Pacer:
    """List scheduling: writes the steps of one order at one pace, in one pass, for any tile.

    Blocks that the next moves need come first.
    """

    def __init__(self, rows: int, columns: int, order: Order, costs: ShardWeights, pace: Pace):
        self.costs, self.pace = costs, pace
        self.moves = [*reversed(order.receives)], [*reversed(order.sends)]
        self.port, self.shape = Port(), (rows, columns)
        self.blocks_left = [columns] * rows, [rows] * columns
        self.move_positions: tuple[list[int], ...] = ([NEVER] * rows, [NEVER] * columns)
        for position, (_, line) in reversed([*enumerate((*order.receives, *order.sends))]):
            if line is not None:
                self.move_positions[line[0]][line[1]] = position
        own_rows, own_columns = (side.count(NEVER) for side in self.move_positions)
        self.unawaited = own_rows * own_columns  # blocks left that no transfer waits for
        self.held: tuple[list[int], ...] = ([0], [0])
        self.ready: list[tuple[int, bool, int, int, float]] = []
        self._unlock([(0, 0)])
        self.run_start = 0.0  # when the last run of blocks did, which takes only what was there
        self.steps: list[tuple[list[list[Block]], list[int]]] = [([], [0, 0, 0, 0])]

    def tile_steps(self) -> list[TileStep]:
        blocks = self.shape[0] * self.shape[1]
        receives, sends = self.moves
        while blocks or receives or sends:
            if self._post(receives) or self._post(sends):
                continue
            waits = self._saves() or self._rather_waits(receives) or self._rather_waits(sends)
            if self.ready and not waits:
                self._compute()
                blocks -= 1
            else:
                self.port.advance(self.port.next_end())
            self._take_in()
        return tile_steps_of(self.steps)

    def _begin_step(self) -> None:
        self.steps.append(([], [0, 0, 0, 0]))

    def _possible(self, moves: list[Need]) -> bool:
        line = moves[-1][1] if moves else None
        return bool(moves) and (line is None or not self.blocks_left[line[0]][line[1]])

    def _post(self, moves: list[Need]) -> bool:
        if not self._possible(moves):
            return False
        kind, index = moves[-1][0]
        seconds_left = self.port.seconds_left()
        is_first = self.pace.both and not self.port.now
        too_early = seconds_left and seconds_left >= self.pace.block * self.pace.early
        if self.port.queues[kind % 2] or (too_early and not is_first):
            return False
        if self.steps[-1][0] or self.steps[-1][1][kind]:
            self._begin_step()
        self.steps[-1][1][kind] = index
        self.port.post((kind, index), self.costs[kind])
        self._take_in()
        moves.pop()
        return True

    def _rather_waits(self, moves: list[Need]) -> bool:
        """Return whether to post a transfer later, because one on the same way ends soon."""
        if not self._possible(moves):
            return False
        ends_soon = self.port.seconds_left() <= self.pace.block * self.pace.patience
        return bool(ends_soon and self.port.queues[moves[-1][0][0] % 2])

    def _saves(self) -> bool:
        """Return whether to compute the next block later: no partial awaits it, and shards still
        arrive.
        """
        arriving = any(kind < 2 for queue in self.port.queues for (kind, _), _ in queue)
        few_unawaited = self.unawaited <= self.pace.saved
        return bool(arriving and few_unawaited and self.ready and self.ready[0][0] == NEVER)

    def _compute(self) -> None:
        move_position, _, k, c, unlocked = heapq.heappop(self.ready)
        self.unawaited -= move_position == NEVER
        if self.steps[-1][1][0] == k > 0 or self.steps[-1][1][1] == c > 0:
            self._begin_step()  # arrivals count from the next step
        runs = self.steps[-1][0]
        if not runs or unlocked > self.run_start:
            runs.append([])
            self.run_start = self.port.now
        runs[-1].append((k, c))
        self.blocks_left[0][k] -= 1
        self.blocks_left[1][c] -= 1
        self.port.advance(self.pace.block)

    def _take_in(self) -> None:
        for kind, index in self.port.arrived:
            if kind < 2:
                other_shards = self.held[1 - kind]
                self._unlock((o, index) if kind else (index, o) for o in other_shards)
                self.held[kind].append(index)
        self.port.arrived.clear()

    def _unlock(self, blocks: Iterable[Block]) -> None:
        for k, c in blocks:
            move_position = min(self.move_positions[0][k], self.move_positions[1][c])
            heapq.heappush(self.ready, (move_position, k == 0, k, c, self.port.now))


KV_PRIORITY_FACTORS = (1.0, 0.5, 2.0, 0.25, 4.0, 0.75, 1.5, 0.125, 8.0)
"""Weights of a KV shard relative to its bytes, in the order in which they are tried."""


def least_held(rows: int, columns: int) -> int:
    """The fewest shards that a rank can hold at once, its own and those arriving included.

    All of one side, the rank's own of the other, and two: one leaves while the next arrives.
    """
    return min(rows + min(columns, 3), columns + min(rows, 3))


def orders(
    rows: int, columns: int, costs: ShardWeights, max_shards: int | None = None
) -> Iterator[Order]:
    """Orders to try, the likeliest first; none holds more than max_shards shards."""
    if max_shards is None or max_shards >= rows + columns:
        receive_orders = _receives(rows, columns, costs)
        for sends in _send_orders((rows, columns), costs):
            for receives in receive_orders:
                yield Order(tuple((move, None) for move in receives), sends)
        return
    slots_by_side = {1: max_shards - rows - 1, 0: max_shards - columns - 1}
    for leaning in range(len(KV_PRIORITY_FACTORS)):
        for side, slots in slots_by_side.items():
            if slots >= min((rows, columns)[side] - 1, 2):
                order = _passing((rows, columns), costs, side, slots, leaning)
                if order is not None:
                    yield order


def _passing(
    shape: tuple[int, int], costs: ShardWeights, side: int, slots: int, leaning: int
) -> Order | None:
    """Return an order that holds few shards of one side; all shards of the other side stay.

    Args:
        side: the side whose shards pass through.
        slots: how many shards of that side may be held beside the rank's own.
        leaning: index of the order of receives to start from; None is returned if there is none.
    """
    length = shape[side]
    slots = min(slots, length - 1)
    first_shape = (slots + 1, shape[1]) if side == 0 else (shape[0], slots + 1)
    receive_orders = _receives(*first_shape, costs)
    if leaning >= len(receive_orders):
        return None
    receives: list[Need] = [(move, None) for move in receive_orders[leaning]]
    receives += [((side, index), (side, index - slots)) for index in range(slots + 1, length)]
    num_passed = length - 1 - slots
    passed_sends = [_send(side, index) for index in range(1, num_passed + 1) if costs[2 + side]]
    other_sends = [
        _send(move[0] - 2, move[1] + num_passed * (line is not None and line[0] == side))
        for move, line in next(_send_orders(first_shape, costs))
    ]
    return Order(tuple(receives), (*passed_sends, *other_sends))


def _send(side: int, index: int) -> Need:
    line: Line = (side, index)
    return (2 + side, index), line


def _receives(rows: int, columns: int, costs: ShardWeights) -> list[list[Move]]:
    """Different ways to receive everything, the likeliest first."""
    receive_orders = {
        tuple(_grown(rows, columns, costs.q, costs.kv * x)): None for x in KV_PRIORITY_FACTORS
    }
    return [list(receive_order) for receive_order in receive_orders]


def _grown(rows: int, columns: int, q: float, kv: float) -> Iterator[Move]:
    """Grow the rectangle of what is there by whatever unlocks most blocks per cost."""
    x = y = 1
    while x < rows or y < columns:
        if y < columns and (x == rows or x * q >= y * kv):
            yield 1, y
            y += 1
        else:
            yield 0, x
            x += 1


def _send_orders(shape: tuple[int, int], costs: ShardWeights) -> Iterator[tuple[Need, ...]]:
    """Yield orders in which to send all partials, the likeliest first.

    If only one side has partials there is one order. With partials of both sides it yields the
    orders of receiving in reverse, for several weights of KV; then one side without a break, with
    the other side before, after or around it.

    Args:
        shape: query and KV shards of the tile.
    """
    rows, columns = shape[0] - 1, shape[1] - 1
    if not (costs.q_partial and costs.kv_partial):
        yield _sends([0] * rows * (costs.q_partial > 0) + [1] * columns * (costs.kv_partial > 0))
        return
    grown = (
        [side for side, _ in _grown(*shape, costs.q_partial, costs.kv_partial * x)][::-1]
        for x in KV_PRIORITY_FACTORS
    )
    around_q = ([1] * k + [0] * rows + [1] * (columns - k) for k in range(columns + 1))
    around_kv = ([0] * k + [1] * columns + [0] * (rows - k) for k in range(1, rows))
    tried_sides: set[tuple[int, ...]] = set()
    for sides in map(tuple, chain(grown, around_q, around_kv)):
        if sides not in tried_sides:
            tried_sides.add(sides)
            yield _sends(sides)


def _sends(sides: Iterable[int]) -> tuple[Need, ...]:
    """Return the partials to send, one of each side named in `sides`, in local order."""
    num_sent, needs = [0, 0], list[Need]()
    for side in sides:
        num_sent[side] += 1
        needs.append(_send(side, num_sent[side]))
    return tuple(needs)


TileSteps = tuple[TileStep, ...]

RATIOS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
"""Seconds of all blocks per second of all transfers at which schedules are compared."""
PACES = (
    Pace(1.0, early=1, patience=0.5),
    Pace(1.0, early=inf, patience=0.5, saved=1),
    Pace(1.0, early=0.5, patience=0.5, saved=1, both=True),
    Pace(1.0, early=1, saved=3, both=True),
    Pace(1.0, early=0.5),
    Pace(1.0, early=1),
    Pace(1.0, early=inf),
    Pace(1.0),
)
"""Paces to try, the likeliest first. All blocks together take as long as all transfers."""
TRIED, TRIED_BLOCKS = 150, 3072
"""Programs tried, and blocks of all of them: large tiles take no longer than small."""


@lru_cache(maxsize=256)
def greedy_tile_steps(
    shape: tuple[int, int], costs: ShardWeights, held: int | None = None, pace: float | None = None
) -> TileSteps:
    """Return the best schedule of a tile among many candidates.

    It is the one whose time is least above the best candidate's, in the worst case over several
    ratios of compute to communication (pace), or at one pace if that is given.

    Args:
        shape: query and KV shards of the tile.
        costs: relative bytes of what travels.
        held: shards that a rank may hold at once; None: all.
        pace: seconds of all blocks per second of all messages; None: any.
    """
    if min(shape) == 1 and held is None:
        return tuple(stepwise_tile_steps(*shape, "eager", costs))  # a ring has no choice
    ratios = RATIOS if pace is None else (pace,)
    candidates = [*dict.fromkeys(_candidates(shape, costs, held, pace))]
    unit = transfer_bytes(shape, costs) / (shape[0] * shape[1])
    blocks = [ratio * unit for ratio in ratios]
    times = np.array([seconds_at(x, costs, blocks) for x in candidates])
    worst_ratios = (-np.sort(-times / times.min(0))).tolist()
    best = candidates[worst_ratios.index(min(worst_ratios))]
    return best if costs.kv_partial else tuple(with_kv_partials(best, *shape))


def _candidates(
    shape: tuple[int, int], costs: ShardWeights, held: int | None, pace: float | None
) -> Iterator[TileSteps]:
    """Programs to choose from, for one pace or any: paced, eager, kv_first."""
    blocks = shape[0] * shape[1]
    if pace is not None:
        yield greedy_tile_steps(shape, costs, held)
    if held is None:
        for name in ("eager", "kv_first"):
            yield tuple(stepwise_tile_steps(*shape, name, costs))
    block = (pace or 1.0) * transfer_bytes(shape, costs) / blocks
    num_orders = min(TRIED, max(1, TRIED_BLOCKS // blocks))
    pairs_to_try = product(PACES, islice(orders(*shape, costs, held), num_orders))
    for style, order in islice(pairs_to_try, num_orders):
        yield tuple(Pacer(*shape, order, costs, style._replace(block=block)).tile_steps())


def with_kv_partials(tile_steps: Iterable[TileStep], rows: int, columns: int) -> list[TileStep]:
    """Add KV partials to a pass in which they take no time: each leaves when its column is done."""
    blocks_left, num_sent, tile_steps_written = [rows] * columns, 0, []
    for tile_step in [*tile_steps, *[TileStep(())] * columns]:
        if num_sent < columns - 1 and not blocks_left[num_sent + 1]:
            num_sent += 1
            tile_step = tile_step._replace(kv_partial=num_sent)
        for tile_rows, tile_columns in tile_step.tiles:
            for c in tile_columns:
                blocks_left[c] -= len(tile_rows)
        if any(tile_step):
            tile_steps_written.append(tile_step)
    return tile_steps_written

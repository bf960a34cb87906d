"""Greedy schedules of a mesh tile: step by step, as the Mesh-Attention paper has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice, product
from math import inf

from tilewise.strategies.mesh_schedules.beam import search
from tilewise.strategies.mesh_schedules.list_scheduling import Pace, Pacer
from tilewise.strategies.mesh_schedules.model import (
    Block,
    ShardWeights,
    TileStep,
    moved,
    rectangles,
    seconds_of,
)
from tilewise.strategies.mesh_schedules.orders import orders


def stepwise_beats(rows: int, columns: int, order: str, costs: ShardWeights) -> list[TileStep]:
    """The steps of a tile that computes every block as soon as it can.

    Args:
        order: "eager" receives what unlocks most blocks per byte, "kv_first" KV first.
    """
    x = y = 1
    rows_sent = columns_sent = 0
    waiting: list[Block] = [(0, 0)]
    done: set[Block] = set()
    unlock_q, unlock_kv = costs.q + costs.q_partial, costs.kv + costs.kv_partial
    beats: list[TileStep] = []
    while len(done) < rows * columns or rows_sent < rows - 1 or columns_sent < columns - 1:
        q = kv = q_partial = kv_partial = 0
        if y < columns and (x == rows or order == "kv_first" or x * unlock_q >= y * unlock_kv):
            kv = y
        elif x < rows:
            q = x
        if rows_sent < rows - 1 and all((rows_sent + 1, c) in done for c in range(columns)):
            q_partial = rows_sent + 1
        if columns_sent < columns - 1 and all((k, columns_sent + 1) in done for k in range(rows)):
            kv_partial = columns_sent + 1
        beats.append(TileStep(tuple(rectangles(waiting)), q, kv, q_partial, kv_partial))
        done.update(waiting)
        waiting = [*_unlocked(x, y, q, kv)]
        x, y = x + (q > 0), y + (kv > 0)
        rows_sent, columns_sent = rows_sent + (q_partial > 0), columns_sent + (kv_partial > 0)
    return beats


def _unlocked(x: int, y: int, q: int, kv: int) -> Iterator[Block]:
    if q:
        yield from ((q, c) for c in range(y))
    if kv:
        yield from ((k, kv) for k in range(x))


Beats = tuple[TileStep, ...]

RATIOS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
"""Seconds of all blocks per second of all messages at which schedules are compared."""
SEARCHED, MIDDLE, SMALL = 32, 16, 8
"""Blocks of tiles whose programs are searched: at MADE_FOR, at every other of RATIOS, at all."""
NARROW, WIDE = (8,), (8, 64)
"""Widths of a search, one after the other."""
MADE_FOR = (1.0, 0.5, 2.0)
"""Ratios that the steps of larger tiles are made for, likeliest first."""
STYLES = ((0.0, 0.0), (1e9, 0.0), (1.0, 0.0), (0.0, 0.5), (1.0, 0.5), (0.0, 1.0), (1.0, 1.0))
"""(early, patience) of a Pace, the likeliest first."""
TRIED, FEW = 60, 20
TRIED_BLOCKS = 4096
"""Paces tried, beside a search few, and blocks of all: large tiles take no longer than small."""


@lru_cache(maxsize=256)
def greedy_beats(
    shape: tuple[int, int], costs: ShardWeights, held: int | None = None, pace: float | None = None
) -> Beats:
    """The steps of a tile that are nowhere far from the best, or the best found for one pace.

    Args:
        shape: query and KV shards of the tile.
        costs: relative bytes of what travels.
        held: shards that a rank may hold at once; None: all.
        pace: seconds of all blocks per second of all messages; None: any.
    """
    if min(shape) == 1 and held is None:
        return tuple(stepwise_beats(*shape, "eager", costs))  # a ring has no choice
    ratios = RATIOS if pace is None else (pace,)
    found = [*dict.fromkeys(_candidates(shape, costs, held, pace))]
    unit = moved(shape, costs) / (shape[0] * shape[1])
    times = [[seconds_of(beats, costs, ratio * unit) for ratio in ratios] for beats in found]
    least = [min(column) for column in zip(*times, strict=True)]
    over = [
        sorted((time / best for time, best in zip(row, least, strict=True)), reverse=True)
        for row in times
    ]
    best = found[over.index(min(over))]
    return best if costs.kv_partial else tuple(_with_kv_partials(best, *shape))


def _candidates(
    shape: tuple[int, int], costs: ShardWeights, held: int | None, pace: float | None
) -> Iterator[Beats]:
    blocks = shape[0] * shape[1]
    unit = moved(shape, costs) / blocks
    if pace is not None:
        yield greedy_beats(shape, costs, held)
    searched = blocks <= SEARCHED and held is None
    if searched:
        yield from (tuple(stepwise_beats(*shape, name, costs)) for name in ("eager", "kv_first"))
        ratios = RATIOS if blocks <= SMALL else RATIOS[1::2] if blocks <= MIDDLE else MADE_FOR
        for ratio in ratios if pace is None else (pace,):
            wide = pace is not None or blocks <= MIDDLE
            yield from _searched(shape, costs, ratio * unit, WIDE if wide else NARROW)
    tried = FEW if searched else min(TRIED, max(1, TRIED_BLOCKS // blocks))
    ways = product(STYLES, MADE_FOR if pace is None else (pace,), orders(*shape, costs, held))
    for style, ratio, order in islice(ways, tried):
        yield tuple(Pacer(*shape, order, costs, Pace(ratio * unit, *style)).beats())


def _searched(
    shape: tuple[int, int], costs: ShardWeights, block: float, widths: Iterable[int]
) -> Iterator[Beats]:
    seconds = inf
    for width in widths:
        found = search(shape, costs, block, width, seconds)
        if found is not None:
            seconds = found.seconds
            yield found.beats


def _with_kv_partials(beats: Iterable[TileStep], rows: int, columns: int) -> list[TileStep]:
    """Partials that take no time in the pass at hand leave as soon as their column is done."""
    left, sent, written = [rows] * columns, 0, []
    for beat in [*beats, *[TileStep(())] * columns]:
        if sent < columns - 1 and not left[sent + 1]:
            sent += 1
            beat = beat._replace(kv_partial=sent)
        for tile_rows, tile_columns in beat.tiles:
            for c in tile_columns:
                left[c] -= len(tile_rows)
        if any(beat):
            written.append(beat)
    return written

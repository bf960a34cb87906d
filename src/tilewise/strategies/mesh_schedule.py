"""When a mesh tile's shards arrive, its blocks are computed and its partials leave.

Every rank runs one schedule in local indices, so each hop is matched everywhere: block (k, c) is
the k-th query shard against the c-th KV shard to arrive, row 0 and column 0 are the rank's own.
Source: Mesh-Attention (arXiv 2512.20968), section 4; sends of row 0 and column 0 are left out.
Departs from it: many orders are paced and timed by the model of mesh_pacing.py, the best is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, product

from tilewise.strategies.mesh_orders import orders
from tilewise.strategies.mesh_pacing import Beat, Block, Costs, Pace, Pacer, rectangles, seconds_of

MADE_FOR = (1.0, 0.5, 2.0)
"""Seconds of all blocks per second of all messages that steps are paced for, likeliest first."""
RATIOS = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)
"""Those at which a schedule is judged."""
STYLES = ((0.0, 0.0), (1e9, 0.0), (1.0, 0.0), (0.0, 0.5), (1.0, 0.5), (0.0, 1.0), (1.0, 1.0))
"""(early, patience) of a Pace, the likeliest first."""
TRIED = 60
TRIED_BLOCKS = 4096
"""Schedules tried, and blocks of all of them: large tiles take no longer than small ones."""


def paced_beats(rows: int, columns: int, costs: Costs, held: int | None = None) -> list[Beat]:
    """The steps of a rows x columns tile that are never far from the best, whatever the ratio.

    Args:
        rows, columns: query and KV shards of the tile.
        costs: relative bytes of what travels.
        held: shards that a rank may hold at once; None: all.
    """
    if min(rows, columns) == 1 and held is None:
        return stepwise_beats(rows, columns, "eager", costs)  # a ring has no choice
    moved = (rows - 1) * (costs.q + costs.q_partial)
    moved += (columns - 1) * (costs.kv + costs.kv_partial)
    unit = (moved or 1.0) / (rows * columns)

    def slowness(beats: Iterable[Beat]) -> float:
        """The worst of its times beside what computing or moving alone would take."""
        return max(
            seconds_of(beats, costs, ratio * unit) / (max(moved, ratio * moved) or 1.0)
            for ratio in RATIOS
        )

    tried = min(TRIED, max(1, TRIED_BLOCKS // (rows * columns)))
    ways = product(STYLES, MADE_FOR, orders(rows, columns, costs, held))
    found = {
        tuple(Pacer(rows, columns, order, costs, Pace(ratio * unit, *style)).beats()): None
        for style, ratio, order in islice(ways, tried)
    }
    best = min(found, key=slowness) if len(found) > 1 else next(iter(found))
    return list(best) if costs.kv_partial else _with_kv_partials(best, rows, columns)


def _with_kv_partials(beats: Iterable[Beat], rows: int, columns: int) -> list[Beat]:
    """Partials that take no time in the pass at hand leave as soon as their column is done."""
    left, sent, written = [rows] * columns, 0, []
    for beat in [*beats, *[Beat(())] * columns]:
        if sent < columns - 1 and not left[sent + 1]:
            sent += 1
            beat = beat._replace(kv_partial=sent)
        for tile_rows, tile_columns in beat.tiles:
            for c in tile_columns:
                left[c] -= len(tile_rows)
        if any(beat):
            written.append(beat)
    return written


def stepwise_beats(rows: int, columns: int, order: str, costs: Costs) -> list[Beat]:
    """The steps of a tile that computes every block as soon as it can.

    Args:
        order: "eager" receives what unlocks most blocks per byte, "kv_first" KV first.
    """
    x = y = 1
    rows_sent = columns_sent = 0
    waiting: list[Block] = [(0, 0)]
    done: set[Block] = set()
    unlock_q, unlock_kv = costs.q + costs.q_partial, costs.kv + costs.kv_partial
    beats: list[Beat] = []
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
        beats.append(Beat(tuple(rectangles(waiting)), q, kv, q_partial, kv_partial))
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

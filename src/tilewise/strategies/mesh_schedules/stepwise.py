"""A mesh tile's steps one after the other, every block as soon as it can."""

from __future__ import annotations

from collections.abc import Iterator

from tilewise.strategies.mesh_schedules.model import Beat, Block, Costs, rectangles


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

"""In which order a mesh tile's shards arrive, its blocks are computed and its partials leave.

Every rank runs one schedule in local indices, so each hop is matched everywhere: block (k, c) is
the k-th query shard against the c-th KV shard to arrive, row 0 and column 0 are the rank's own.
Source: Mesh-Attention (arXiv 2512.20968), section 4; sends of row 0 and column 0 are left out.
"""

from __future__ import annotations

from typing import NamedTuple

Block = tuple[int, int]


class Costs(NamedTuple):
    """Relative bytes: a query shard, a KV shard, a query partial, a KV partial."""

    q: float
    kv: float
    q_partial: float
    kv_partial: float


class Beat(NamedTuple):
    """One step: the blocks computed, and the local index that moves on each chain (0: none)."""

    blocks: tuple[Block, ...]
    q: int = 0
    kv: int = 0
    q_partial: int = 0
    kv_partial: int = 0


def schedule_beats(rows: int, columns: int, order: str, costs: Costs) -> list[Beat]:
    """The steps of a rows x columns tile.

    Args:
        rows, columns: query and KV shards of the tile.
        order: "greedy" receives what unlocks most blocks per byte and keeps blocks back to cover
            later transfers; "eager" is greedy without keeping back; "kv_first" receives KV first.
        costs: relative bytes of what travels.
    """
    x = y = 1
    rows_sent = columns_sent = 0
    waiting = [(0, 0)]
    done: set[Block] = set()
    unlock_q, unlock_kv = costs.q + costs.q_partial, costs.kv + costs.kv_partial
    total_cost = (rows - 1) * unlock_q + (columns - 1) * unlock_kv
    budget, beats = 0.0, []
    while len(done) < rows * columns or rows_sent < rows - 1 or columns_sent < columns - 1:
        beat = Beat(())
        if y < columns and (x == rows or order == "kv_first" or x * unlock_q >= y * unlock_kv):
            beat = beat._replace(kv=y)
        elif x < rows:
            beat = beat._replace(q=x)
        if rows_sent < rows - 1 and all((rows_sent + 1, c) in done for c in range(columns)):
            beat = beat._replace(q_partial=rows_sent + 1)
        if columns_sent < columns - 1 and all((k, columns_sent + 1) in done for k in range(rows)):
            beat = beat._replace(kv_partial=columns_sent + 1)
        moved = sum(cost for cost, index in zip(costs, beat[1:], strict=True) if index)
        budget += rows * columns * moved / total_cost if total_cost else 1
        if order == "greedy" and any(beat[1:]):
            count = min(len(waiting), max(1, round(budget)))
        else:
            count = len(waiting)
        waiting.sort(key=lambda block: _urgency(block, rows_sent, columns_sent))
        now, waiting = waiting[:count], waiting[count:]
        budget -= count
        beats.append(beat._replace(blocks=tuple(now)))
        done.update(now)
        if beat.q:
            waiting += [(x, c) for c in range(y)]
            x += 1
        if beat.kv:
            waiting += [(k, y) for k in range(x)]
            y += 1
        rows_sent += beat.q_partial > 0
        columns_sent += beat.kv_partial > 0
    return beats


def _urgency(block: Block, rows_sent: int, columns_sent: int) -> tuple:
    """Blocks that the next partials wait for come first; those that nobody waits for last."""
    k, c = block
    own = (k == 0) + (c == 0)
    return own == 2, k == 0, k, c

r"""Tile the causal triangle for n ranks that own contiguous shards.

Equal area on every rank, and on every rank about 0.71 of the bytes of the best zigzag mesh. Rows
are queries, columns keys, in shards:

    0      n/2      n
    |\                  Bottom ranks work in a row strip: s neighbouring shards hold each other's Q
    | \   column        and deal the strip's columns among themselves. The strip's own triangle is
    |  \  strips        free: there every rank takes the column of its own KV.
    |___\               Top ranks mirror that in the antidiagonal: in a column strip s neighbouring
    |  /|\              shards hold each other's KV and deal the strip's rows.
    | / | \  row        The antidiagonal cuts the square: row p has columns [0, n - p) and [n/2, p],
    |/__|__\ strips     column k has rows [k, n/2) and [n - k, n). That is n/2 each: all ranks are
                        equally loaded, however the strips are cut.

A rank holds s shards of one side and n / 2s - 1/2 of the other, its own free: best with
s^2 = (kv_cost / q_cost) n / 2 in row strips and s^2 = (q_cost / kv_cost) n / 2 in column strips.
Stands alone because it needs no mask, layout or plan: it is pure geometry.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from tilewise.strategies.tiling.causal.dealing import cut_columns, deal
from tilewise.strategies.tiling.causal.rects import Blocks, Rect, areas, foreign

SNAP = 0.005  # of a rank's area: a cut this near a chunk's edge moves there and saves a transfer
FEW = 32  # ranks up to which the formula is rough: more numbers of strips are tried
LATE = 1.02  # area max / mean above which a tiling is scored as worse: at 1.03 by a sixth


def causal_blocks(
    n: int, chunks_per_shard: int = 4, q_cost: float = 2.0, kv_cost: float = 2.0
) -> Blocks:
    """Deal the causal triangle of n contiguous shards to their owners.

    Args:
        n: ranks; shard i = chunks [i C, (i + 1) C), owned by rank i. C = chunks_per_shard.
        q_cost, kv_cost: bytes that one more Q (KV) shard costs a rank, its partial included; only
            the ratio counts. For a plan of both passes, their sum.
    """
    if n < 1 or chunks_per_shard < 1:
        raise ValueError(f"n ({n}) and chunks_per_shard ({chunks_per_shard}) must be at least 1")
    tried = (
        _blocks(n, chunks_per_shard, rows, cols)
        for rows in _num_strips(n - n // 2, n, q_cost, kv_cost)
        for cols in _num_strips(n // 2, n, kv_cost, q_cost)
    )
    return min(tried, key=lambda blocks: score(blocks, chunks_per_shard, q_cost, kv_cost))


def score(blocks: Blocks, chunks_per_shard: int, q_cost: float, kv_cost: float) -> float:
    """Bytes of the mean and of the busiest rank, more if areas are unequal; least is best."""
    held = q_cost * foreign(blocks, chunks_per_shard, 0)
    held += kv_cost * foreign(blocks, chunks_per_shard, 1)
    area = areas(blocks)
    late = max(0.0, float(area.max() / area.mean()) - LATE)
    return float(held.mean() + held.max()) * (1 + (40 * late) ** 2)


def _num_strips(ranks: int, n: int, held_cost: float, dealt_cost: float) -> list[int]:
    """Numbers of strips worth trying: those next to the best size by the formula."""
    if ranks == 0:
        return [0]
    best = ranks / max(1.0, min(ranks, (dealt_cost * n / (2 * held_cost)) ** 0.5))
    spread = 3 if n <= FEW else 1
    low = max(1, int(best) - spread)
    return list(range(low, min(ranks, int(best) + 1 + spread) + 1))


def _blocks(n: int, c: int, num_rows: int, num_cols: int) -> Blocks:
    """So many row and column strips; mirror images of each other where their numbers are equal."""
    chunks, top = n * c, (n // 2) * c
    rows = [top + e * c for e in _even(n - n // 2, num_rows)]
    cols = [top - e * c for e in reversed(_even(n // 2, num_cols))]
    row_pieces, col_pieces = _halves(chunks, rows, cols, SNAP * n * c * c / 2)
    blocks: list[list[Rect]] = [[] for _ in range(n)]
    for (q0, q1), pieces in zip(pairwise(rows), row_pieces, strict=True):
        dealt = deal(q0, q1, c, [*pieces, Rect(q0, q1, top, q0)])
        blocks[q0 // c : q1 // c] = dealt
    for (k0, k1), pieces in zip(pairwise(cols), col_pieces, strict=True):
        flipped = [p.mirror(chunks) for p in reversed([Rect(k1, top, k0, k1), *pieces])]
        dealt = reversed(deal(chunks - k1, chunks - k0, c, flipped))
        blocks[k0 // c : k1 // c] = [[p.mirror(chunks) for p in share] for share in dealt]
    return tuple(tuple(share) for share in blocks)


def _even(total: int, parts: int) -> tuple[int, ...]:
    return tuple(total * i // parts for i in range(parts + 1)) if parts else (0,)


def _halves(
    chunks: int, rows: list[int], cols: list[int], snap: float
) -> tuple[list[list[Rect]], list[list[Rect]]]:
    """The square below the diagonal, cut by its antidiagonal: what row and column strips get."""
    row_pieces: list[list[Rect]] = [[] for _ in rows[1:]]
    col_pieces: list[list[Rect]] = [[] for _ in cols[1:]]
    shares = _above_antidiagonal(chunks, rows, cols)
    for g, (q0, q1) in enumerate(pairwise(rows)):
        for h, (k0, k1) in enumerate(pairwise(cols)):
            left, right = cut_columns(Rect(q0, q1, k0, k1), int(shares[g, h]), snap)
            row_pieces[g] += left
            col_pieces[h] += right
    return row_pieces, col_pieces


def _above_antidiagonal(chunks: int, rows: list[int], cols: list[int]) -> np.ndarray:
    """Cells of each block of the square that are the row strips'; those on the line go in turn."""
    if len(cols) < 2:
        return np.zeros((len(rows) - 1, 0), np.int64)
    i = np.arange(rows[0], rows[-1])[:, None] - rows[0]
    twice = 2 * (i + np.arange(cols[-1])[None, :] + 1)
    ours = (twice < chunks) | ((twice == chunks) & (i % 2 == 0))
    down = np.add.reduceat(ours, np.array(rows[:-1]) - rows[0], axis=0, dtype=np.int64)
    return np.add.reduceat(down, np.array(cols[:-1]), axis=1)

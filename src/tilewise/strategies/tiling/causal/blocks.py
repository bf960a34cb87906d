"""Blocks of the causal triangle, and their ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np


class Rect(NamedTuple):
    """Query chunks [q0, q1) by key/value chunks [k0, k1), less what lies above the diagonal."""

    q0: int
    q1: int
    k0: int
    k1: int

    @property
    def height(self) -> int:
        return self.q1 - self.q0

    @property
    def width(self) -> int:
        return self.k1 - self.k0

    @property
    def size(self) -> int:
        return self.height * self.width

    def mirror(self, num_chunks: int) -> Rect:
        """Reflect in the antidiagonal: rows become columns, the triangle stays itself."""
        q0, q1, k0, k1 = (num_chunks - x for x in self)
        return Rect(k1, k0, q1, q0)


Blocks = tuple[tuple[Rect, ...], ...]
"""For each rank its rectangles, disjoint; all ranks' cover each cell up to the diagonal once."""


def cells(q0: np.ndarray, q1: np.ndarray, k0: np.ndarray, k1: np.ndarray) -> np.ndarray:
    """Areas of rectangles in chunks squared; a cell on the diagonal counts one half."""

    def below(q: np.ndarray, k: np.ndarray) -> np.ndarray:
        steps = np.maximum(0, q - k)
        return steps * (steps - 1) // 2

    diagonal = np.maximum(0, np.minimum(q1, k1) - np.maximum(q0, k0))
    return below(q1, k0) - below(q0, k0) - below(q1, k1) + below(q0, k1) + diagonal / 2


def areas(shares: Sequence[Sequence[Rect]]) -> np.ndarray:
    """Cells of each share of the triangle."""
    rects = np.array([rect for share in shares for rect in share], np.int64).reshape(-1, 4)
    who = np.repeat(np.arange(len(shares)), [len(share) for share in shares])
    return np.bincount(who, cells(*rects.T), len(shares))


def foreign(blocks: Blocks, chunks_per_shard: int, side: int) -> np.ndarray:
    """Shards that each rank reads and does not own: of side 0, Q, or 1, KV."""
    read = np.zeros((len(blocks), len(blocks) * chunks_per_shard), bool)
    for rank, share in enumerate(blocks):
        for rect in share:
            read[rank, rect[2 * side] : rect[2 * side + 1]] = True
        read[rank, rank * chunks_per_shard : (rank + 1) * chunks_per_shard] = False
    return read.sum(1) / chunks_per_shard


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
    row_pieces, col_pieces = [[] for _ in rows[1:]], [[] for _ in cols[1:]]
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


SNAP_DEALT = 0.012  # the same where a strip is dealt to its ranks


def deal(q0: int, q1: int, c: int, pieces: list[Rect]) -> list[list[Rect]]:
    """Deal a row strip's rectangles to its ranks, c chunks of rows each, in equal areas.

    Each rank first takes its own column of the strip's triangle (it has that KV), then two runs of
    the short columns, a tall and a low one, and last a run of the full ones up to its share.
    """
    size, pieces = (q1 - q0) // c, [p for p in pieces if p.size]
    shares = [[Rect(k, q1, k, k + c)] for k in range(q0, q1, c)]
    short = sorted((p for p in pieces if p.height < q1 - q0), key=lambda p: -p.height)
    full = [p for p in pieces if p.height == q1 - q0]
    counts = _short_counts(areas(shares), short, full, q1 - q0)
    both = np.concatenate([(counts + 1) // 2, (counts // 2)[::-1]])
    for i, run in enumerate(_take(short, (0, *np.cumsum(both).tolist()))):
        shares[min(i, 2 * size - 1 - i)] += run
    taken = areas(shares)
    each = (taken.sum() + sum(p.size for p in full)) / size
    runs = _fill(full, np.cumsum(each - taken), SNAP_DEALT * each)
    return [share + run for share, run in zip(shares, runs, strict=True)]


def cut_columns(rect: Rect, cells: int, snap: float) -> tuple[list[Rect], list[Rect]]:
    """Give the left columns of a rectangle, so many cells, to one side, the rest to the other.

    Args:
        snap: cells by which the cut may be wrong if that saves cutting a column.
    """
    width, rest = divmod(cells, rect.height)
    if rest <= snap:
        rest = 0
    elif rect.height - rest <= snap:
        width, rest = width + 1, 0
    mid, end = rect.k0 + width, rect.k0 + width + (rest > 0)
    split = rect.q0 + rest
    left = [rect._replace(k1=mid), Rect(rect.q0, split, mid, end)]
    right = [Rect(split, rect.q1, mid, end), rect._replace(k0=end)]
    return [p for p in left if p.size], [p for p in right if p.size]


def _short_counts(own: np.ndarray, short: list[Rect], full: list[Rect], height: int) -> np.ndarray:
    """How many short columns each rank takes so that all hold equal areas in as many columns.

    own + low * short + height * full = share of the area and short + full = share of the columns
    give short; what is out of reach is cut off, and the rest shared out anew.
    """
    num_short = sum(p.width for p in short)
    if not num_short:
        return np.zeros(len(own), np.int64)
    num = num_short + sum(p.width for p in full)
    low = sum(p.size for p in short) / num_short
    each = (own.sum() + low * num_short + height * (num - num_short)) / len(own)
    want = np.clip((own + height * num / len(own) - each) / (height - low), 0, (each - own) / low)
    if not want.any():
        want = np.ones(len(own))
    edges = np.rint(np.cumsum(want) * num_short / want.sum()).astype(np.int64)
    return np.diff(edges, prepend=0)


def _take(pieces: list[Rect], edges: tuple[int, ...]) -> list[list[Rect]]:
    """Cut a row of rectangles into runs of whole columns; edges count columns from the start."""
    runs: list[list[Rect]] = [[] for _ in edges[1:]]
    start = 0
    for p in pieces:
        stop = start + p.width
        for run, (lo, hi) in zip(runs, pairwise(edges), strict=True):
            k0, k1 = max(lo, start), min(hi, stop)
            if k0 < k1:
                run.append(p._replace(k0=p.k0 + k0 - start, k1=p.k0 + k1 - start))
        start = stop
    return runs


def _fill(full: list[Rect], bounds: np.ndarray, snap: float) -> list[list[Rect]]:
    """Cut a row of rectangles of one height into runs that end at the given areas."""
    runs: list[list[Rect]] = [[] for _ in bounds]
    rank, done = 0, 0.0
    queue = list(reversed(full))
    while queue:
        left, right = [queue.pop()], []
        cut = rank < len(bounds) - 1 and done + left[0].size > bounds[rank] + 1e-9
        if cut:
            left, right = cut_columns(left[0], max(0, round(bounds[rank] - done)), snap)
        runs[rank] += left
        done += sum(p.size for p in left)
        queue += reversed(right)
        rank += cut
    return runs

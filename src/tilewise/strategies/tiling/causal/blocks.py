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
    rank_of_rect = np.repeat(np.arange(len(shares)), [len(share) for share in shares])
    return np.bincount(rank_of_rect, cells(*rects.T), len(shares))


def foreign(blocks: Blocks, chunks_per_shard: int, side: int) -> np.ndarray:
    """Shards that each rank reads and does not own: of side 0, Q, or 1, KV."""
    is_read = np.zeros((len(blocks), len(blocks) * chunks_per_shard), bool)
    for rank, share in enumerate(blocks):
        for rect in share:
            is_read[rank, rect[2 * side] : rect[2 * side + 1]] = True
        is_read[rank, rank * chunks_per_shard : (rank + 1) * chunks_per_shard] = False
    return is_read.sum(1) / chunks_per_shard


SNAP = 0.005  # of a rank's area: a cut this near a chunk's edge moves there and saves a transfer
FEW = 32  # ranks up to which the formula is rough: more numbers of strips are tried
LATE = 1.02  # area max / mean above which a tiling is scored as worse: at 1.03 by a sixth


def causal_blocks(
    n: int, chunks_per_shard: int = 4, q_cost: float = 2.0, kv_cost: float = 2.0
) -> Blocks:
    """Assign the blocks of the causal triangle of n contiguous shards to the shards' owners.

    Args:
        n: ranks; shard i = chunks [i C, (i + 1) C), owned by rank i. C = chunks_per_shard.
        q_cost, kv_cost: bytes that one more Q (KV) shard costs a rank, its partial included; only
            the ratio counts. For a plan of both passes, their sum.
    """
    if n < 1 or chunks_per_shard < 1:
        raise ValueError(f"n ({n}) and chunks_per_shard ({chunks_per_shard}) must be at least 1")
    candidates = (
        _blocks(n, chunks_per_shard, rows, cols)
        for rows in _num_strips(n - n // 2, n, q_cost, kv_cost)
        for cols in _num_strips(n // 2, n, kv_cost, q_cost)
    )
    return min(candidates, key=lambda blocks: score(blocks, chunks_per_shard, q_cost, kv_cost))


def score(blocks: Blocks, chunks_per_shard: int, q_cost: float, kv_cost: float) -> float:
    """Bytes of the mean and of the busiest rank, more if areas are unequal; least is best."""
    foreign_bytes = q_cost * foreign(blocks, chunks_per_shard, 0)
    foreign_bytes += kv_cost * foreign(blocks, chunks_per_shard, 1)
    area = areas(blocks)
    excess = max(0.0, float(area.max() / area.mean()) - LATE)
    return float(foreign_bytes.mean() + foreign_bytes.max()) * (1 + (40 * excess) ** 2)


def _num_strips(ranks: int, n: int, kept_cost: float, assigned_cost: float) -> list[int]:
    """Numbers of strips worth trying: those next to the best size by the formula."""
    if ranks == 0:
        return [0]
    best = ranks / max(1.0, min(ranks, (assigned_cost * n / (2 * kept_cost)) ** 0.5))
    num_beside = 3 if n <= FEW else 1
    low = max(1, int(best) - num_beside)
    return list(range(low, min(ranks, int(best) + 1 + num_beside) + 1))


def _blocks(n: int, c: int, num_rows: int, num_cols: int) -> Blocks:
    """Blocks from num_rows row strips and num_cols column strips.

    Where both numbers are equal, they are mirror images of each other.
    """
    chunks, square_start = n * c, (n // 2) * c
    rows = [square_start + e * c for e in _even(n - n // 2, num_rows)]
    cols = [square_start - e * c for e in reversed(_even(n // 2, num_cols))]
    row_pieces, col_pieces = _halves(chunks, rows, cols, SNAP * n * c * c / 2)
    blocks: list[list[Rect]] = [[] for _ in range(n)]
    for (q0, q1), pieces in zip(pairwise(rows), row_pieces, strict=True):
        shares = assign_strip(q0, q1, c, [*pieces, Rect(q0, q1, square_start, q0)])
        blocks[q0 // c : q1 // c] = shares
    for (k0, k1), pieces in zip(pairwise(cols), col_pieces, strict=True):
        mirrored_pieces = [
            p.mirror(chunks) for p in reversed([Rect(k1, square_start, k0, k1), *pieces])
        ]
        shares = reversed(assign_strip(chunks - k1, chunks - k0, c, mirrored_pieces))
        blocks[k0 // c : k1 // c] = [[p.mirror(chunks) for p in share] for share in shares]
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
    """Count the cells of each block (row strip x column strip) that lie above the antidiagonal.

    Cells on the line are given in turn to the row strips and to the column strips.
    """
    if len(cols) < 2:
        return np.zeros((len(rows) - 1, 0), np.int64)
    i = np.arange(rows[0], rows[-1])[:, None] - rows[0]
    twice = 2 * (i + np.arange(cols[-1])[None, :] + 1)
    is_of_rows = (twice < chunks) | ((twice == chunks) & (i % 2 == 0))
    rows_of_blocks = np.add.reduceat(
        is_of_rows, np.array(rows[:-1]) - rows[0], axis=0, dtype=np.int64
    )
    return np.add.reduceat(rows_of_blocks, np.array(cols[:-1]), axis=1)


SNAP_IN_STRIP = 0.012  # the same where a strip is divided among its ranks


def assign_strip(q0: int, q1: int, c: int, pieces: list[Rect]) -> list[list[Rect]]:
    """Assign a row strip's rectangles to its ranks, c chunks of rows each, in equal areas.

    Each rank first takes its own column of the strip's triangle (it has that KV), then two runs of
    the short columns, a tall and a low one, and last a run of the full ones up to its share.
    """
    size, pieces = (q1 - q0) // c, [p for p in pieces if p.size]
    shares = [[Rect(k, q1, k, k + c)] for k in range(q0, q1, c)]
    short = sorted((p for p in pieces if p.height < q1 - q0), key=lambda p: -p.height)
    full = [p for p in pieces if p.height == q1 - q0]
    counts = _short_counts(areas(shares), short, full, q1 - q0)
    column_counts = np.concatenate([(counts + 1) // 2, (counts // 2)[::-1]])
    for i, run in enumerate(_take(short, (0, *np.cumsum(column_counts).tolist()))):
        shares[min(i, 2 * size - 1 - i)] += run
    taken_areas = areas(shares)
    area_per_rank = (taken_areas.sum() + sum(p.size for p in full)) / size
    runs = _fill(full, np.cumsum(area_per_rank - taken_areas), SNAP_IN_STRIP * area_per_rank)
    return [share + run for share, run in zip(shares, runs, strict=True)]


def cut_columns(rect: Rect, cells: int, snap: float) -> tuple[list[Rect], list[Rect]]:
    """Cut a rectangle into left columns with a given number of cells, and the other columns.

    Args:
        snap: cells by which the cut may be wrong if that saves cutting a column.
    """
    width, rest_cells = divmod(cells, rect.height)
    if rest_cells <= snap:
        rest_cells = 0
    elif rect.height - rest_cells <= snap:
        width, rest_cells = width + 1, 0
    mid, end = rect.k0 + width, rect.k0 + width + (rest_cells > 0)
    split = rect.q0 + rest_cells
    left = [rect._replace(k1=mid), Rect(rect.q0, split, mid, end)]
    right = [Rect(split, rect.q1, mid, end), rect._replace(k0=end)]
    return [p for p in left if p.size], [p for p in right if p.size]


def _short_counts(
    own_areas: np.ndarray, short: list[Rect], full: list[Rect], height: int
) -> np.ndarray:
    """Number of short columns for each rank, so that all have equal areas in equally many columns.

    own + low * short + height * full = share of the area and short + full = share of the columns
    give short; what is out of reach is cut off, and the rest shared out anew.
    """
    num_short = sum(p.width for p in short)
    if not num_short:
        return np.zeros(len(own_areas), np.int64)
    num = num_short + sum(p.width for p in full)
    mean_height = sum(p.size for p in short) / num_short
    area_per_rank = (own_areas.sum() + mean_height * num_short + height * (num - num_short)) / len(
        own_areas
    )
    wanted_columns = np.clip(
        (own_areas + height * num / len(own_areas) - area_per_rank) / (height - mean_height),
        0,
        (area_per_rank - own_areas) / mean_height,
    )
    if not wanted_columns.any():
        wanted_columns = np.ones(len(own_areas))
    edges = np.rint(np.cumsum(wanted_columns) * num_short / wanted_columns.sum()).astype(np.int64)
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
    """Cut a row of rectangles of one height into one run of rectangles for each rank.

    Args:
        bounds: area at which each run ends, counted from the start of the row.
        snap: area by which a cut may be wrong if that saves cutting a column, as in `cut_columns`.
    """
    runs: list[list[Rect]] = [[] for _ in bounds]
    rank, area_so_far = 0, 0.0
    queue = list(reversed(full))
    while queue:
        left_pieces, right_pieces = [queue.pop()], []
        is_cut = rank < len(bounds) - 1 and area_so_far + left_pieces[0].size > bounds[rank] + 1e-9
        if is_cut:
            left_pieces, right_pieces = cut_columns(
                left_pieces[0], max(0, round(bounds[rank] - area_so_far)), snap
            )
        runs[rank] += left_pieces
        area_so_far += sum(p.size for p in left_pieces)
        queue += reversed(right_pieces)
        rank += is_cut
    return runs

"""Deal a strip of the causal triangle to the ranks whose queries it spans, in equal areas.

Full columns span all rows of the strip; short ones, left over where the antidiagonal crosses, are
poor value and so are spread: all ranks get equal areas and equally many columns.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from tilewise.strategies.tiling.causal.rects import Rect, areas

SNAP = 0.012  # of a rank's area: a cut this near a chunk's edge moves there and saves a transfer


def deal(q0: int, q1: int, c: int, pieces: list[Rect]) -> list[list[Rect]]:
    """Deal a row strip's rectangles to its ranks, c chunks of rows each, in equal areas.

    Each rank first takes its own column of the strip's triangle (it has that KV), then two runs of
    the short columns, a tall and a low one, and last a run of the full ones up to its share.
    """
    size, pieces = (q1 - q0) // c, [p for p in pieces if _nonempty(p)]
    shares = [[Rect(k, q1, k, k + c)] for k in range(q0, q1, c)]
    short = sorted((p for p in pieces if p.height < q1 - q0), key=lambda p: -p.height)
    full = [p for p in pieces if p.height == q1 - q0]
    counts = _short_counts(areas(shares), short, full, q1 - q0)
    both = np.concatenate([(counts + 1) // 2, (counts // 2)[::-1]])
    for i, run in enumerate(_take(short, (0, *np.cumsum(both).tolist()))):
        shares[min(i, 2 * size - 1 - i)] += run
    taken = areas(shares)
    each = (taken.sum() + sum(p.height * p.width for p in full)) / size
    for share, run in zip(shares, _fill(full, np.cumsum(each - taken), SNAP * each), strict=True):
        share += run
    return shares


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
    return [p for p in left if _nonempty(p)], [p for p in right if _nonempty(p)]


def _nonempty(rect: Rect) -> bool:
    return rect.q0 < rect.q1 and rect.k0 < rect.k1


def _short_counts(own: np.ndarray, short: list[Rect], full: list[Rect], height: int) -> np.ndarray:
    """How many short columns each rank takes so that all hold equal areas in as many columns.

    own + low * short + height * full = share of the area and short + full = share of the columns
    give short; what is out of reach is cut off, and the rest shared out anew.
    """
    num_short = sum(p.width for p in short)
    if not num_short:
        return np.zeros(len(own), np.int64)
    num = num_short + sum(p.width for p in full)
    low = sum(p.height * p.width for p in short) / num_short
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
        piece = queue.pop()
        area = piece.height * piece.width
        if rank == len(bounds) - 1 or done + area <= bounds[rank] + 1e-9:
            runs[rank].append(piece)
            done += area
            continue
        left, right = cut_columns(piece, max(0, round(bounds[rank] - done)), snap)
        runs[rank] += left
        done += sum(p.height * p.width for p in left)
        queue += reversed(right)
        rank += 1
    return runs

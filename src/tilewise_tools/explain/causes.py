"""Causes that make a step long, each with the seconds that it costs: a slow rank, a slow link, more
work on one rank than on others, and the document that makes it so.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise, product
from math import ceil
from typing import NamedTuple

import numpy as np

from tilewise.masks.base import And, Document, Mask
from tilewise.plan.ir import Plan
from tilewise.workload import Workload
from tilewise_tools.explain.rates import KernelRates, Link, LinkRate
from tilewise_tools.explain.rows import Run
from tilewise_tools.report.words import quantity

SLOW_RANK = 1.25
"""Least number of times as long as others' that a slow rank's kernels take."""
SPREADS = 3
"""Times the distance of most other ranks from the usual rank, that a slow rank is beyond."""
SLOW_LINK = 1.6
ALIKE = 0.25
"""Slow links are named together if each costs at least this part of what the dearest one does."""
UNEVEN = 1.1
"""Work of the busiest rank over the mean, from which it is worth a word."""
LEAST_SHARE = 0.02
"""Of the step, that a cause must cost."""


class Finding(NamedTuple):
    """A cause.

    Attributes:
        kind: "slow rank", "slow link" or "uneven work".
        seconds: of a step, that it costs.
        ranks: the rank; of a link its ends; of several links of one rank that rank.
        document: (number, start, stop), if one makes the work uneven.
    """

    kind: str
    seconds: float
    text: str
    ranks: tuple[int, ...]
    document: tuple[int, int, int] | None = None


def findings(
    run: Run,
    step_seconds: float,
    kernels: KernelRates,
    links: dict[Link, LinkRate],
    work: Workload | None,
    plan: Plan | None,
) -> list[Finding]:
    """Return the causes that cost enough to be named, the dearest first.

    Args:
        work, plan: what was computed; None: it is not known, and no document is named.
    """
    found = [
        *_slow_ranks(run, kernels),
        *_slow_links(run, links),
        *_uneven_work(kernels, work, plan),
    ]
    found = [one for one in found if one.seconds >= LEAST_SHARE * step_seconds]
    return sorted(found, key=lambda one: -one.seconds)


def _slow_ranks(run: Run, kernels: KernelRates) -> list[Finding]:
    """Ranks whose kernels take longer than the others' for the same calls."""
    found = []
    for rank, (slowness, taken) in enumerate(zip(kernels.slowness, kernels.taken, strict=True)):
        others = sorted(abs(x - 1) for r, x in enumerate(kernels.slowness) if r != rank)
        spread = others[ceil(0.75 * len(others)) - 1]
        if slowness >= max(SLOW_RANK, 1 + SPREADS * spread):
            seconds = taken * (1 - 1 / slowness)
            text = (
                f"rank {rank}{_host(run, rank)} is slow: its kernels take {slowness:.2g} times as "
                f"long as other ranks' for the same work, {_time(seconds)} more a step"
            )
            found.append(Finding("slow rank", seconds, text, (rank,)))
    return found


def _slow_links(run: Run, links: dict[Link, LinkRate]) -> list[Finding]:
    """Find links that carry less than others: one link, or all links of one rank."""
    lost = {
        link: rate.waited * (1 - 1 / rate.slowness)
        for link, rate in links.items()
        if rate.slowness >= SLOW_LINK
    }
    slow = {link: links[link] for link in lost if lost[link] >= ALIKE * max(lost.values())}
    if not slow:
        return []
    by_receiver: dict[int, float] = {}
    for link in slow:
        by_receiver[link[1]] = by_receiver.get(link[1], 0.0) + lost[link]
    seconds = max(by_receiver.values())
    slowest = max(slow.values(), key=lambda rate: rate.slowness)
    usual = slowest.bandwidth * slowest.slowness
    carries = (
        f"{quantity(slowest.bandwidth, 'B/s')}, the median {quantity(usual, 'B/s')}; ranks "
        f"wait {_time(seconds)} more a step"
    )
    shared = set.intersection(*({*link} for link in slow))
    if len(slow) > 1 and len(shared) == 1:
        (rank,) = shared
        names = " and ".join(f"{src} to {dst}" for src, dst in sorted(slow)[:4])
        text = f"the links of rank {rank}{_host(run, rank)} are slow ({names}): {carries}"
        return [Finding("slow link", seconds, text, (rank,))]
    src, dst = slowest.src, slowest.dst
    text = f"the link from rank {src}{_host(run, src)} to rank {dst} is slow: it carries {carries}"
    return [Finding("slow link", seconds, text, (src, dst))]


def _uneven_work(kernels: KernelRates, work: Workload | None, plan: Plan | None) -> list[Finding]:
    """The rank with most work, and the document that is most of it."""
    mean, most = sum(kernels.work) / len(kernels.work), max(kernels.work)
    if not mean or most < UNEVEN * mean:
        return []
    rank = kernels.work.index(most)
    seconds, times = most - mean, f"{most / mean:.2g}"
    longest = None if work is None or plan is None else longest_document(work, plan, rank)
    if longest is None:
        layout = "" if work is None else f" under {work.layout_for(len(kernels.work))!r}"
        text = f"rank {rank} has {times} times the mean work{layout}, {_time(seconds)} more a step"
        return [Finding("uneven work", seconds, text, (rank,))]
    number, start, stop = longest
    text = (
        f"document {number} (tokens {start} to {stop}, {stop - start} long) gives rank {rank} "
        f"{times} times the mean work, {_time(seconds)} more a step"
    )
    return [Finding("uneven work", seconds, text, (rank,), longest)]


def longest_document(work: Workload, plan: Plan, rank: int) -> tuple[int, int, int] | None:
    """The document of which a rank computes most pairs: its number from 0, its first token and the
    one after its last; None: the mask has no documents, or one alone.
    """
    edges = _documents(work.mask)
    if edges is None or len(edges) < 3:
        return None
    resolved = work.resolve(plan)[0]
    cells = {
        (q, kv)
        for step in resolved.pruned.rank_steps(rank)
        for tile in step.tiles
        for q in tile.q
        for kv in tile.kv
    }
    pieces = [
        (_pieces(resolved.layouts[0].rows(q)), _pieces(resolved.layouts[1].rows(kv)))
        for q, kv in cells
    ]
    areas = np.zeros(len(edges) - 1, np.int64)
    for q_pieces, k_pieces in pieces:
        for q, k in product(q_pieces, k_pieces):
            # Of the pairs that the mask allows, both ends are in one document.
            first, last = bisect_right(edges, max(q[0], k[0])), bisect_left(edges, min(q[1], k[1]))
            for number in range(max(first - 1, 0), last):
                start, stop = edges[number], edges[number + 1]
                rows, keys = (_cut(piece, start, stop) for piece in (q, k))
                if rows[0] < rows[1] and keys[0] < keys[1]:
                    areas[number] += work.mask.area(rows, keys)
    number = int(areas.argmax())
    return number, edges[number], edges[number + 1]


def _pieces(rows: np.ndarray) -> list[tuple[int, int]]:
    """Rows as ranges."""
    if not len(rows):
        return []
    cuts = [0, *((np.diff(rows) != 1).nonzero()[0] + 1).tolist(), len(rows)]
    return [(int(rows[a]), int(rows[b - 1]) + 1) for a, b in pairwise(cuts)]


def _cut(piece: tuple[int, int], start: int, stop: int) -> tuple[int, int]:
    return max(piece[0], start), min(piece[1], stop)


def _documents(mask: Mask) -> tuple[int, ...] | None:
    """The borders of a mask's documents."""
    if isinstance(mask, Document):
        return mask.cu_seqlens
    if isinstance(mask, And):
        return _documents(mask.a) or _documents(mask.b)
    return None


def _host(run: Run, rank: int) -> str:
    hosts = {rows.head["host"] for rows in run.ranks}
    return f" (host {run.ranks[rank].head['host']})" if len(hosts) > 1 else ""


def _time(seconds: float) -> str:
    return quantity(seconds, "s")

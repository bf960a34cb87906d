"""What makes a step long, each cause with the seconds that it costs: a slow rank, a slow link, more
work on one rank than on others, and the document that makes it so.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil
from typing import NamedTuple

from tilewise.layouts.layout import Layout
from tilewise.masks.base import And, Document, Mask
from tilewise.workload import Workload
from tilewise_tools.explain.rates import KernelRates, Link, LinkRate
from tilewise_tools.explain.rows import Run
from tilewise_tools.report.words import quantity

SLOW_RANK = 1.25
"""Least number of times as long as others' that a slow rank's kernels take."""
SPREADS = 2
"""Times the distance of most other ranks from the usual rank, that a slow rank is beyond."""
SLOW_LINK = 1.6
ALIKE = 0.25
"""Slow links are named together if each costs at least this part of what the dearest one does."""
UNEVEN = 1.1
"""Work of the busiest rank over the mean, from which it is worth a word."""
LEAST_SHARE = 0.02
"""Of the step, that a cause must cost."""
MOST_PIECES = 4096


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
) -> list[Finding]:
    """Return the causes that cost enough to be named, the dearest first.

    Args:
        work: what was computed; None: it is not known, and no document is named.
    """
    found = [
        *_slow_ranks(run, kernels),
        *_slow_links(run, links),
        *_uneven_work(kernels, work),
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
    """A link that carries less than others, or all slow links as those of the rank they share."""
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
        f"{quantity(slowest.bandwidth, 'B/s')}, others {quantity(usual, 'B/s')}; ranks wait "
        f"{_time(seconds)} more a step"
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


def _uneven_work(kernels: KernelRates, work: Workload | None) -> list[Finding]:
    """The rank with most work, and the document that is most of it."""
    mean, most = sum(kernels.work) / len(kernels.work), max(kernels.work)
    if not mean or most < UNEVEN * mean:
        return []
    rank = kernels.work.index(most)
    seconds, times = most - mean, f"{most / mean:.2g}"
    longest = None if work is None else longest_document(work, len(kernels.work), rank)
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


def longest_document(work: Workload, n: int, rank: int) -> tuple[int, int, int] | None:
    """The document that has most pairs of a rank's queries: its number from 0, its first token and
    the one after its last; None: the mask has no documents, or one alone.
    """
    edges = _documents(work.mask)
    if edges is None or len(edges) < 3:
        return None
    layout = work.layout_for(n)
    areas = [
        (_own_area(work.mask, layout, rank, (start, stop)), number, start, stop)
        for number, (start, stop) in enumerate(pairwise(edges))
        if stop > start
    ]
    _, *longest = max(areas, key=lambda one: one[0])
    return longest[0], longest[1], longest[2]


def _documents(mask: Mask) -> tuple[int, ...] | None:
    """The borders of a mask's documents."""
    if isinstance(mask, Document):
        return mask.cu_seqlens
    if isinstance(mask, And):
        return _documents(mask.a) or _documents(mask.b)
    return None


def _own_area(mask: Mask, layout: Layout, rank: int, document: tuple[int, int]) -> float:
    """Pairs of a rank's queries in a document. Of rows that do not lie side by side: of the
    document's pairs as large a part as of its rows.
    """
    start, stop = document
    rows = layout.rows(rank)
    mine = rows[(rows >= start) & (rows < stop)]
    if not len(mine):
        return 0.0
    cuts = [0, *((mine[1:] - mine[:-1] != 1).nonzero()[0] + 1).tolist(), len(mine)]
    if len(cuts) > MOST_PIECES:
        return mask.area(document, document) * len(mine) / (stop - start)
    pieces = ((int(mine[a]), int(mine[b - 1]) + 1) for a, b in pairwise(cuts))
    return float(sum(mask.area(piece, document) for piece in pieces))


def _host(run: Run, rank: int) -> str:
    hosts = {rows.head["host"] for rows in run.ranks}
    return f" (host {run.ranks[rank].head['host']})" if len(hosts) > 1 else ""


def _time(seconds: float) -> str:
    return quantity(seconds, "s")

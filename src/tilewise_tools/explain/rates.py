"""Rates that a recorded run shows: of kernels, rank by rank, and of links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from statistics import median, median_low
from typing import NamedTuple, TypeAlias

import numpy as np

from tilewise_tools.explain.rows import OpRow, Run
from tilewise_tools.explain.waiting import KERNEL, RecordedStep

LARGE = 0.25
"""Messages of at least this part of the largest one's bytes say how fast a link is: latency and the
buffers on the way make short ones slower, or faster."""
EXPOSED = 0.2
"""Least part of a message's way for which a rank waited: of others their arrival is not known."""
ROUNDS = 8
Link: TypeAlias = tuple[int, int]


class KernelFit(NamedTuple):
    """Seconds of a kernel call of one pass: launch + pairs * pair_seconds + vain * vain_seconds.

    pairs are the allowed pairs of all heads, vain those of the call's rectangle that are not.
    """

    launch: float
    pair_seconds: float
    vain_seconds: float

    def seconds(self, op: OpRow) -> float:
        return float(np.dot(self, _features(op)))


class KernelRates(NamedTuple):
    """Speed of the kernels of all ranks.

    Attributes:
        fits: of forward and backward calls, at the speed of the usual rank when nothing disturbs
            it; None: there are none.
        slowness: of each rank: its kernels take so many times as long as the usual rank's for the
            same calls.
        work: of each rank, seconds of a step's kernels at the usual rank's speed.
        taken: of each rank, seconds of a step's kernels.
    """

    fits: tuple[KernelFit | None, KernelFit | None]
    slowness: tuple[float, ...]
    work: tuple[float, ...]
    taken: tuple[float, ...]


def kernel_rates(run: Run, steps: Sequence[RecordedStep]) -> KernelRates:
    """Fit the kernels' speed over the calls of all ranks, and each rank's beside it."""
    calls: dict[tuple[int, bool, OpRow], list[float]] = defaultdict(list)
    for step in steps:
        for rank, pieces in enumerate(step.pieces):
            passes = run.ranks[rank].steps[step.number].passes
            for piece in pieces:
                place, number = piece.place
                if piece.kind == KERNEL and place >= 0:
                    case = passes[place].case
                    if case.ops[number].kind == "Attend":
                        calls[rank, case.backward, case.ops[number]].append(piece.seconds)
    n = len(run.ranks)
    slowness = [1.0] * n
    fits: list[KernelFit | None] = [None, None]
    work, taken = [0.0] * n, [0.0] * n
    for _ in range(ROUNDS):
        for backward in (False, True):
            some = [
                (_features(op), _undisturbed(seconds) / slowness[rank])
                for (rank, back, op), seconds in calls.items()
                if back == backward and seconds
            ]
            fits[backward] = _fit(some) if some else None
        work, taken, least = [0.0] * n, [0.0] * n, [0.0] * n
        for (rank, backward, op), seconds in calls.items():
            fit, count = fits[backward], len(seconds) / len(steps)
            assert fit is not None
            work[rank] += fit.seconds(op) * count
            taken[rank] += sum(seconds) / len(steps)
            least[rank] += _undisturbed(seconds) * count
        found = [a / b if b else 1.0 for a, b in zip(least, work, strict=True)]
        usual = median_low(found) or 1.0  # of two ranks the faster one
        slowness = [x / usual for x in found]
    return KernelRates((fits[0], fits[1]), tuple(slowness), tuple(work), tuple(taken))


def _undisturbed(seconds: Sequence[float]) -> float:
    """The lower quartile: what else a host does makes some calls longer, none shorter."""
    return sorted(seconds)[len(seconds) // 4]


def _features(op: OpRow) -> tuple[float, float, float]:
    return 1.0, float(op.area * op.heads), float((op.q * op.k - op.area) * op.heads)


def _fit(calls: Sequence[tuple[tuple[float, float, float], float]]) -> KernelFit:
    """The best fit without negative terms, by relative errors, in which outliers count little.

    With three terms all subsets of those that are not 0 are few.
    """
    x = np.array([features for features, _ in calls])
    y = np.maximum([seconds for _, seconds in calls], 1e-9)
    scale = np.maximum(x.max(0), 1.0)
    best, least = np.array([float(np.median(y)), 0.0, 0.0]), np.inf
    for used in product((False, True), repeat=3):
        places = [place for place, is_used in enumerate(used) if is_used and x[:, place].any()]
        if not places:
            continue
        some, weights = x[:, places] / scale[places], 1 / y
        solved = np.zeros(len(places))
        for _ in range(ROUNDS):
            solved = np.linalg.lstsq(some * weights[:, None], y * weights, rcond=None)[0]
            errors = np.abs(some @ solved / y - 1)
            weights = 1 / (y * np.sqrt(np.maximum(errors, 1e-3)))
        error = float(np.abs(some @ solved / y - 1).sum())
        if (solved >= 0).all() and error < least - 1e-9:
            best, least = np.zeros(3), error
            best[places] = solved / scale[places]
    return KernelFit(*map(float, best))


class LinkRate(NamedTuple):
    """A link, as it carried the messages that ranks waited for.

    Attributes:
        bandwidth: bytes a second of large messages.
        waited: seconds of a step for which its receiver waited for it.
        slowness: the usual link's bandwidth over this one's, of links of its kind.
    """

    src: int
    dst: int
    bandwidth: float
    waited: float
    slowness: float


def link_rates(run: Run, steps: Sequence[RecordedStep]) -> dict[Link, LinkRate]:
    """Return the links for which ranks waited. Links within a host are one kind, others another."""
    transits = [transit for step in steps for transit in step.transits]
    most = max((transit.num_bytes for transit in transits), default=0)
    moved: dict[Link, list[float]] = {}
    waited: dict[Link, float] = defaultdict(float)
    for transit in transits:
        link = transit.src, transit.dst
        waited[link] += transit.waited / len(steps)
        is_large = transit.num_bytes >= LARGE * most
        if is_large and transit.waited >= EXPOSED * transit.seconds > 0:
            sums = moved.setdefault(link, [0.0, 0.0])
            sums[0] += transit.num_bytes
            sums[1] += transit.seconds
    speeds = {link: num_bytes / seconds for link, (num_bytes, seconds) in moved.items()}
    found: dict[Link, LinkRate] = {}
    for link, speed in speeds.items():
        alike = [x for other, x in speeds.items() if _inside(run, other) == _inside(run, link)]
        found[link] = LinkRate(*link, speed, waited[link], median(alike) / speed)
    return found


def _inside(run: Run, link: Link) -> bool:
    """True if both ends are on one host."""
    src, dst = (run.ranks[rank].head["host"] for rank in link)
    return src == dst


def usual_bandwidth(run: Run, rates: dict[Link, LinkRate], *, inside: bool) -> float | None:
    """Bytes a second of the median link within hosts, or between them; None: nobody waited."""
    speeds = [x.bandwidth for link, x in rates.items() if _inside(run, link) == inside]
    return median(speeds) if speeds else None


def node_size(run: Run) -> int:
    """Neighbouring ranks on one host, if all hosts have equally many; else 1."""
    hosts = [rows.head["host"] for rows in run.ranks]
    size = hosts.count(hosts[0])
    blocks = [{*hosts[i : i + size]} for i in range(0, len(hosts), size)]
    alike = len(hosts) % size == 0 and all(len(block) == 1 for block in blocks)
    return size if alike and len({*hosts}) == len(blocks) else 1

"""Strategies side by side on one network: interleaved, repeated, each against the first.

What two runs have in common, such as what else the machine does, cancels in the ratio of a repeat.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tilewise.plan.ir import Plan
from tilewise.workload import Workload
from tilewise_tools.bench.case import BenchCase, Timing
from tilewise_tools.bench.inputs import write_inputs
from tilewise_tools.bench.measure import Figures, Job
from tilewise_tools.bench.our_strategies import Strategy
from tilewise_tools.bench.worlds import World
from tilewise_tools.lab.rate_limited import LINE_SHARE, RATE_LIMITED

NAMESPACES = "network namespaces"


class ContestRow(NamedTuple):
    """Summary of all runs of one strategy.

    Attributes:
        formula_bytes, counted_bytes: sent by all NICs together, by tw.volume and by the switch:
            TCP's payload, which also holds gloo's headers, the agreement of the ranks and two
            barriers. Of one run that is not timed; None without a switch.
    """

    strategy: str
    network: str
    seconds: tuple[float, ...]  # of each repeat, of its slowest rank
    ratios: tuple[float, ...]  # the first strategy's seconds over this one's, by repeat
    byte_ratio: float  # the first strategy's bytes on the busiest NIC over this one's, by tw.volume
    formula_bytes: int
    counted_bytes: int | None
    line_share: float  # of the time that the busiest NIC needs at line rate, in the median time

    @property
    def ratio(self) -> float:
        return median(self.ratios)


def compete(
    world: World,
    case: BenchCase,
    strategies: Sequence[Strategy],
    timing: Timing,
    progress: Callable[[int], object] = lambda _: None,
) -> list[ContestRow]:
    """Run strategies in turn within each repeat, there and back; the others against the first.

    Args:
        world: on the case's network.
        progress: called with the strategy whose turn it is: once, and for every repeat.
    Raises:
        Blamed: when a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "inputs"
        write_inputs(case, case.make_mask(), timing.truth_pairs, path)
        answers = world.run(Job(case, timing, tuple(strategies), str(path)), progress)
    return rows_of(case, strategies, answers)


def rows_of(
    case: BenchCase,
    strategies: Sequence[Strategy],
    figures_by_strategy: Sequence[Sequence[Figures]],
) -> list[ContestRow]:
    """One row per strategy, of what all ranks found about each."""
    times = [
        tuple(max(both for _, _, both in run) for run in zip(*seconds, strict=True))
        for seconds in ([rank.seconds for rank in ranks] for ranks in figures_by_strategy)
    ]
    sent_by_host = [_sent(case, strategy) for strategy in strategies]
    bits = 8e-6 / (case.network.mbit * LINE_SHARE)
    return [
        ContestRow(
            strategy.name,
            RATE_LIMITED if case.network.name == "limited" else NAMESPACES,
            seconds,
            tuple(a / b for a, b in zip(times[0], seconds, strict=True)),
            max(sent_by_host[0]) / max(by_host) if any(by_host) else 1.0,
            sum(by_host),
            sum(nic.sent_payload for nic in ranks[0].nics) or None,
            max(by_host) * bits / median(seconds),
        )
        for strategy, ranks, seconds, by_host in zip(
            strategies, figures_by_strategy, times, sent_by_host, strict=True
        )
    ]


def _sent(case: BenchCase, strategy: Strategy) -> list[int]:
    """Bytes of each host in the passes that the case runs."""
    (plan, _, backward_plan), work = strategy.asked(case)
    return case.timed(
        *(
            nic_bytes(
                one, work, case.network.ranks_per_host, backward=backward, prune=strategy.prune
            )
            for backward, one in ((False, plan), (True, backward_plan or plan))
        )
    )


def nic_bytes(
    plan: Plan, work: Workload, ranks_per_host: int, *, backward: bool, prune: bool = True
) -> tuple[int, ...]:
    """Bytes sent by each host in one pass; for one rank a host, and pruned, as tw.volume.

    Args:
        ranks_per_host: rank r is on host r // ranks_per_host; must divide the world size.
    """
    if plan.world_size % ranks_per_host:
        raise ValueError(
            f"world_size ({plan.world_size}) must be a multiple of "
            f"ranks_per_host ({ranks_per_host})"
        )
    resolved = work.resolve(plan)[backward]
    plan = resolved.pruned if prune else resolved.plan
    bytes_by_host = [0] * (plan.world_size // ranks_per_host)
    for rank in range(plan.world_size):
        host = rank // ranks_per_host
        for transfer in (transfer for step in plan.rank_steps(rank) for transfer in step.sends):
            if transfer.dst // ranks_per_host != host:
                bytes_by_host[host] += resolved.transfer_bytes(transfer)
    return tuple(bytes_by_host)

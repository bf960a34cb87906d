"""Strategies side by side on one network: interleaved, repeated, each against the first.

What two runs have in common, such as what else the machine does, cancels in the ratio of a repeat.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.expressions import read_plan, read_wire
from tilewise.functional import attention
from tilewise.plan.ir import Plan
from tilewise.strategies.catalog import MASK_AWARE
from tilewise.tools.lab.lab import Lab
from tilewise.tools.lab.rate_limited import LINE_SHARE, RATE_LIMITED, Nics, RateLimited, nics
from tilewise.tools.lab.site import Site
from tilewise.transport.process_group import DistTransport
from tilewise.transport.processes import gather_yields
from tilewise.workload import Workload

NAMESPACES = "network namespaces"

# When a rank began and ended a lap; on rank 0 also what each NIC sent meanwhile.
RankLap = tuple[float, float, tuple[int, ...]]


class Contest(NamedTuple):
    """What is compared.

    Attributes:
        strategies: as people write them, the first is what the others are compared with.
        work: of all, but for the wire.
        wires: one for each strategy, as read_wire reads it; empty: the work's.
    """

    strategies: tuple[str, ...]
    work: Workload
    backward: bool = False  # forward and backward pass, timed together; else forward alone
    prune: bool = True
    repeats: int = 5  # timed rounds, after one that is not
    wires: tuple[str, ...] = ()

    def work_of(self, strategy: int) -> Workload:
        """What a strategy runs."""
        if not self.wires:
            return self.work
        return replace(self.work, wire_dtype=None, wire=read_wire(self.wires[strategy]))

    @property
    def names(self) -> tuple[str, ...]:
        """The strategies with their wires."""
        if not self.wires:
            return self.strategies
        pairs = zip(self.strategies, self.wires, strict=True)
        return tuple(f"{strategy}, wire {wire}" for strategy, wire in pairs)


class Limited(NamedTuple):
    """Hosts whose NICs only a transport knows of: what is left where a lab cannot be made."""

    hosts: int
    ranks_per_host: int
    mbit: float

    @property
    def world_size(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def payload_mbit(self) -> float:
        return self.mbit * LINE_SHARE


class Lap(NamedTuple):
    """One strategy once.

    Attributes:
        sent: payload that each host's NIC sent, as the switch counted it; empty without a switch.
    """

    repeat: int
    strategy: int
    seconds: float  # from the first rank's start to the last rank's end
    sent: tuple[int, ...]


class ContestRow(NamedTuple):
    """What all laps of one strategy come to.

    Attributes:
        formula_bytes, counted_bytes: sent by all NICs together, by tw.volume and by the switch:
            TCP's payload, which also holds gloo's headers, the agreement of the ranks and two
            barriers. Median of the repeats; None without a switch.
    """

    strategy: str
    network: str
    seconds: tuple[float, ...]  # of each repeat
    ratios: tuple[float, ...]  # the first strategy's seconds over this one's, by repeat
    byte_ratio: float  # the first strategy's bytes on the busiest NIC over this one's, by tw.volume
    formula_bytes: int
    counted_bytes: float | None
    line_share: float  # of the time that the busiest NIC needs at line rate, in the median time

    @property
    def ratio(self) -> float:
        return median(self.ratios)


def compete(
    network: Lab | Limited, contest: Contest, timeout_seconds: float = 120.0
) -> Iterator[Lap]:
    """Run a contest's laps on a network, one after another, without the untimed ones.

    Args:
        network: a lab that is there, or the speeds that a transport keeps to instead.
        timeout_seconds: for one lap.
    """
    for text in contest.strategies:
        plan_for(text, contest.work, network.world_size)
    if isinstance(network, Limited):
        with nics(network.hosts, network.ranks_per_host, network.payload_mbit) as speeds:
            args = contest, None, speeds
            n = network.world_size
            yield from _timed(
                contest, gather_yields(n, run_laps, args, timeout_seconds=timeout_seconds)
            )
    else:
        args = contest, network.site, None
        yield from _timed(
            contest, network.gather_yields(run_laps, *args, timeout_seconds=timeout_seconds)
        )


def plan_for(text: str, work: Workload, world_size: int) -> Plan:
    """As read_plan; needed and tiled are made for the mask and the layout of the workload."""
    for entry in MASK_AWARE:
        if entry.name == text:
            return entry.plan(work.mask, work.layout_for(world_size), work.kv_bytes())
    return read_plan(text, world_size)


def _timed(contest: Contest, laps: Iterator[tuple[RankLap, ...]]) -> Iterator[Lap]:
    for repeat, strategy in schedule(contest):
        ranks = next(laps)
        if repeat >= 0:
            seconds = max(stop for _, stop, _ in ranks) - min(start for start, _, _ in ranks)
            yield Lap(repeat, strategy, seconds, ranks[0][2])
    next(laps, None)


def schedule(contest: Contest) -> Iterator[tuple[int, int]]:
    """(repeat, strategy) in the order they run: there, then back, so that no place is favoured."""
    order = range(len(contest.strategies))
    for repeat in range(-1, contest.repeats):
        for strategy in reversed(order) if repeat % 2 else order:
            yield repeat, strategy


def run_laps(
    rank: int, contest: Contest, site: Site | None, speeds: Nics | None
) -> Iterator[RankLap]:
    """One rank's laps.

    Args:
        site: whose counters rank 0 reads.
        speeds: what the transport keeps to; None: the wire does.
    """
    world = dist.group.WORLD
    assert world is not None, "a lab's ranks have a default group"
    transport = RateLimited(world, speeds) if speeds else DistTransport(world)
    work = contest.work
    plans = [plan_for(text, work, transport.world_size) for text in contest.strategies]
    layout = work.layout_for(transport.world_size)
    q, k, v, dout = _operands(rank, work, layout.size(rank), contest.backward)
    for _, strategy in schedule(contest):
        before = _sent(rank, site)
        dist.barrier()
        start = time.perf_counter()
        out = attention(
            *(q, k, v),
            plan=plans[strategy],
            layout=layout,
            mask=work.mask,
            group=transport,
            wire=contest.work_of(strategy).wires,
            save=work.save,
            prune=contest.prune,
        )
        if contest.backward:
            torch.autograd.grad(out, (q, k, v), dout)
        stop = time.perf_counter()
        dist.barrier()
        after = _sent(rank, site)
        yield start, stop, tuple(b - a for a, b in zip(before, after, strict=True))


def rows_of(contest: Contest, laps: list[Lap], network: Lab | Limited) -> list[ContestRow]:
    """One row per strategy, of the laps of a whole contest on this network."""
    times = [
        tuple(lap.seconds for lap in laps if lap.strategy == number)
        for number in range(len(contest.strategies))
    ]
    passes = (False, True)[: 1 + contest.backward]
    rows: list[ContestRow] = []
    busiest: list[int] = []
    for number, text in enumerate(contest.strategies):
        work = contest.work_of(number)
        plan = plan_for(text, work, network.world_size)
        moved = [
            nic_bytes(plan, work, network.ranks_per_host, backward=backward, prune=contest.prune)
            for backward in passes
        ]
        by_host = [sum(one) for one in zip(*moved, strict=True)]
        busiest.append(max(by_host))
        counted = [sum(lap.sent) for lap in laps if lap.strategy == number and lap.sent]
        at_line_rate = 8 * busiest[-1] / (network.mbit * 1e6 * LINE_SHARE)
        row = ContestRow(
            contest.names[number],
            RATE_LIMITED if isinstance(network, Limited) else NAMESPACES,
            times[number],
            tuple(a / b for a, b in zip(times[0], times[number], strict=True)),
            busiest[0] / busiest[-1] if busiest[-1] else 1.0,
            sum(by_host),
            median(counted) if counted else None,
            at_line_rate / median(times[number]),
        )
        rows.append(row)
    return rows


def _operands(rank: int, work: Workload, num_tokens: int, needs_grad: bool) -> list[Tensor]:
    """q, k, v and dout of one rank, at random."""
    make = torch.Generator().manual_seed(rank)
    heads = work.num_heads, work.num_kv_heads, work.num_kv_heads, work.num_heads
    made = [
        torch.randn((num_tokens, h, work.head_dim), generator=make).to(getattr(torch, work.dtype))
        for h in heads
    ]
    return [x.requires_grad_(needs_grad) for x in made[:3]] + made[3:]


def _sent(rank: int, site: Site | None) -> tuple[int, ...]:
    if rank or site is None:
        return ()
    return tuple(traffic.sent_payload for traffic in site.counters())


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
    sent = [0] * (plan.world_size // ranks_per_host)
    for rank in range(plan.world_size):
        host = rank // ranks_per_host
        for hop in (hop for step in plan.rank_steps(rank) for hop in step.sends):
            if hop.dst // ranks_per_host != host:
                sent[host] += resolved.hop_bytes(hop)
    return tuple(sent)

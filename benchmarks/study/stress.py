"""What a slow rank, jitter and short messages do to each method."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import tilewise as tw
from benchmarks.study.against import EXPLAINED, UNITS, control_of, every_method, gains
from benchmarks.study.parts import RowsOf, at_once
from benchmarks.study.table import Row, StudyTable, bar_chart
from tilewise.planning.staged import staged_all_gather
from tilewise.simulation import Simulation
from tilewise.simulation.machine import Machine
from tilewise_tools.report.page import Figure
from tilewise_tools.report.words import short

DEVICES, TOKENS = 32, 1 << 18
SLOWNESS, JITTER, HALF_BYTES = 1.5, 0.2, 4 << 20
SLOW = "a slow rank"
MOST_DISTURBED = 128
"""Devices up to which a claim is tried with these two: all ranks are simulated then, one by one."""


def disturbances(machine: Machine, n: int) -> dict[str, Machine]:
    """The machine of n devices as it is, and with each of the three."""
    half = HALF_BYTES / machine.nic_bandwidth
    return {
        "as described": machine,
        SLOW: replace(machine, slow_ranks=(n // 2,), slowness=SLOWNESS),
        "jitter": replace(machine, jitter=JITTER),
        "short messages": replace(machine, carry_seconds=machine.carry_seconds + half),
    }


def stress(
    work: tw.Workload, machine: Machine, rows_of: RowsOf = at_once, *, n: int = DEVICES
) -> Iterator[StudyTable]:
    """Every method on machines that are disturbed."""
    work = replace(work, num_tokens=TOKENS, mask=tw.Causal())
    names = list(disturbances(machine, n))
    units = {"strategy": "", "plan": "", "time": "s"}
    for name in names[1:]:
        units |= {name: "x", f"over ring, {name}": "x"}
    units |= UNITS
    every = every_method(n, work, machine.node_size)
    parts = {name: partial(_disturbed, work, machine, name, plan) for name, plan in every.items()}
    taken = {str(method): seconds for method, *seconds in rows_of("stress", parts)}
    took = {x: [float(y or 0) for y in seconds] for x, seconds in taken.items() if seconds[0]}
    over = gains({method: seconds[0] for method, seconds in took.items()})
    rows: list[Row] = []
    for method, plan in every.items():
        if isinstance(plan, str):
            rows.append((method, plan, *(None,) * (len(units) - 2)))
            continue
        mine, ring = took[method], took["ring"]
        pairs = ((x / mine[0], y / x) for x, y in zip(mine[1:], ring[1:], strict=True))
        figures = (figure for pair in pairs for figure in pair)
        rows.append((method, short(plan.name), mine[0], *figures, *over[method]))
    about = (
        f"{n} devices, {TOKENS >> 10}K tokens, causal, zigzag, {work.num_heads}:"
        f"{work.num_kv_heads} heads of {work.head_dim}, on {machine.name}, both passes. A slow "
        f"rank: kernels of one take {SLOWNESS} times as long. Jitter: each kernel and message "
        f"takes longer by {100 * JITTER:.0f} % on average, exponentially, seed {machine.seed}. "
        f"Short messages: each keeps its link busy as much longer as {HALF_BYTES >> 20} MiB "
        "take on a NIC, which halves the bandwidth of one of this size. Times longer than "
        f"undisturbed, and how much faster than a ring that is disturbed alike. Undisturbed: "
        f"{EXPLAINED}"
    )
    figures = tuple(
        bar_chart(
            f"stress-{i}", f"Time undisturbed, and with {name}", "s",
            {"as described": {method: x[0] for method, x in took.items()},
             name: {method: max(0.0, x[i] - x[0]) for method, x in took.items()}},
        )
        for i, name in enumerate(names) if i
    )  # fmt: skip
    yield StudyTable("stress", "Disturbed machines", about, units, rows, figures=figures)
    yield _assumptions(work, machine, rows_of)


def _disturbed(
    work: tw.Workload, machine: Machine, name: str, plan: tw.Plan | str
) -> Iterator[Row]:
    """A method's seconds on each machine."""
    if isinstance(plan, str):
        yield (name, None)
        return
    machines = disturbances(machine, plan.world_size).values()
    yield (name, *(tw.simulate(plan, work, on).seconds for on in machines))


CLAIMS = (
    ("mesh 8 x 32 over ring, 256 devices, 1M tokens", 3.4, 256, 1 << 20),
    ("ring waits, 128 devices, 1M tokens, per cent", 91.5, 128, 1 << 20),
    ("attention2d(8, 8) over ring, 64 nodes of 1, 16K tokens", 9.4, 64, 1 << 14),
)


def assumptions(machine: Machine, n: int) -> dict[str, Machine]:
    """Machines of n devices on which a claim might hold."""
    disturbed = disturbances(machine, n)
    found = {
        "as described": machine,
        "links at half speed": slowed(machine, 0.5),
        "links at a fifth": slowed(machine, 0.2),
        "links at a tenth": slowed(machine, 0.1),
        "kernels twice as fast": faster(machine, 2),
        "half bandwidth at 4 MiB": disturbed["short messages"],
    }
    if n <= MOST_DISTURBED:
        found |= {name: disturbed[name] for name in (SLOW, "jitter")}
    if machine.nics > 1:
        found["one NIC a node"] = replace(machine, nics=1)
    return found


def slowed(machine: Machine, factor: float) -> Machine:
    link = replace(machine.between, bandwidth=machine.between.bandwidth * factor)
    return replace(machine, between=link)


def faster(machine: Machine, factor: float) -> Machine:
    kernels = tuple(
        replace(kernel, flops=tuple(tuple(x * factor for x in row) for row in kernel.flops))
        for kernel in machine.kernels
    )
    return replace(machine, kernels=kernels)


def _assumptions(work: tw.Workload, machine: Machine, rows_of: RowsOf) -> StudyTable:
    """The papers' three figures on each of these machines, and a double ring's."""
    units = {"claim": "", "paper": "", "assumption": "", "found": "", "of which topology": "",
             "of which bytes": ""}  # fmt: skip
    parts = {
        f"{claim[0]}, {name}": partial(_claimed, work, machine, claim, name)
        for claim in CLAIMS
        for name in assumptions(_alone(machine, claim[0]), claim[2])
    }
    rows = rows_of("assumptions", parts)
    about = (
        f"Causal, {work.num_heads}:{work.num_kv_heads} heads of {work.head_dim}, kernels of "
        f"{machine.name}, both passes. Which assumption about the cluster would make each figure "
        "true. Of which topology: what a double ring has there, which sends a ring's bytes on more "
        f"links. A slow rank and jitter as above, up to {MOST_DISTURBED} devices, as each rank is "
        "simulated then. Of which bytes: the time of the fastest of ring, double ring and "
        "all-gather over the plan's; of waiting per cent, points beyond a ring's bytes."
    )
    titles = [claim[0] for claim in CLAIMS]
    figures = tuple(_claim_bars(f"assumptions-{i}", name, rows) for i, name in enumerate(titles))
    return StudyTable(
        "assumptions", "What would make the claims true", about, units, rows, figures=figures
    )


def _claim_bars(name: str, claim: str, rows: list[Row]) -> Figure:
    mine = [row for row in rows if row[0] == claim]
    found = {"the paper": float(mine[0][1] or 0)}
    found |= {str(row[2]): float(row[3] or 0) for row in mine}
    return bar_chart(name, claim, "", {"found": found})


def _alone(machine: Machine, claim: str) -> Machine:
    """The machine of a claim: with one device a node where it says so."""
    return replace(machine, node_size=1, nics=1) if "nodes of 1" in claim else machine


def _claimed(
    work: tw.Workload, machine: Machine, claim: tuple[str, float, int, int], name: str
) -> Iterator[Row]:
    """A claim on one of the machines."""
    title, stated, n, tokens = claim
    own, base = replace(work, num_tokens=tokens), _alone(machine, title)
    here = assumptions(base, n)[name]

    def run(plan: tw.Plan, layout: str = "zigzag") -> Simulation:
        return tw.simulate(plan, replace(own, layout=layout), here, exact=False)

    ring, control = run(tw.ring(n)), run(control_of(n, base))
    if "waits" in title:
        waits, other = (100 * x.exposed_seconds / x.seconds for x in (ring, control))
        yield (title, stated, name, waits, other, 0.0)
        return
    one = run(tw.attention2d(8, 8), "striped") if base is not machine else run(tw.mesh(n, 8))
    gathered = run(staged_all_gather(n, base.node_size))
    found = {"ring": ring, "double_ring": control, "all_gather": gathered, "claimed": one}
    yield (title, stated, name, *gains({x: y.seconds for x, y in found.items()})["claimed"])

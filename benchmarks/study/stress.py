"""What a slow rank, jitter and short messages do to each method."""

from collections.abc import Iterator
from dataclasses import replace

import tilewise as tw
from benchmarks.study.table import StudyTable, Value
from tilewise.simulation.machine import Machine
from tilewise.tools.report.studies import methods
from tilewise.tools.report.words import short

DEVICES, TOKENS = 32, 1 << 18
SLOWNESS, JITTER, HALF_BYTES = 1.5, 0.2, 4 << 20
SLOW = "a slow rank"


def disturbances(machine: Machine) -> dict[str, Machine]:
    """The machine as it is, and with each of the three."""
    half = HALF_BYTES / machine.nic_bandwidth
    return {
        "as described": machine,
        SLOW: replace(machine, slow_ranks=(DEVICES // 2,), slowness=SLOWNESS),
        "jitter": replace(machine, jitter=JITTER),
        "short messages": replace(machine, carry_seconds=machine.carry_seconds + half),
    }


def stress(work: tw.Workload, machine: Machine, n: int = DEVICES) -> Iterator[StudyTable]:
    """Every method on machines that are disturbed."""
    work = replace(work, num_tokens=TOKENS, mask=tw.Causal())
    machines = disturbances(machine)
    units = {"strategy": "", "plan": "", "time": "s"}
    for name in list(machines)[1:]:
        units |= {name: "x", f"over ring, {name}": "x"}
    units = {**units, "over ring": "x"}
    rows: list[tuple[Value, ...]] = []
    rings: dict[str, float] = {}
    for method, make in methods(n, work, machine.node_size).items():
        plan = make()
        taken = {name: tw.simulate(plan, work, on).seconds for name, on in machines.items()}
        rings = rings or taken
        plain = taken["as described"]
        pairs = [(taken[x] / plain, rings[x] / taken[x]) for x in list(machines)[1:]]
        figures = (figure for pair in pairs for figure in pair)
        rows.append((method, short(plan.name), plain, *figures, rings["as described"] / plain))
    about = (
        f"{n} devices, {TOKENS >> 10}K tokens, causal, zigzag, {work.num_heads}:"
        f"{work.num_kv_heads} heads of {work.head_dim}, on {machine.name}, both passes. A slow "
        f"rank: kernels of one take {SLOWNESS} times as long. Jitter: each kernel and message "
        f"takes longer by {JITTER:.0%} on average, exponentially, seed {machine.seed}. Short "
        f"messages: each keeps its link busy as much longer as {HALF_BYTES >> 20} MiB take on a "
        "NIC, which halves the bandwidth of one of this size. Times longer than undisturbed, and "
        "how much faster than a ring that is disturbed alike."
    )
    yield StudyTable("stress", "Disturbed machines", about, units, rows)
    yield _assumptions(work, machine)


CLAIMS = (
    ("mesh 8 x 32 over ring, 256 devices, 1M tokens", 3.4, 256, 1 << 20),
    ("ring waits, 128 devices, 1M tokens, per cent", 91.5, 128, 1 << 20),
    ("attention2d(8, 8) over ring, 64 nodes of 1, 16K tokens", 9.4, 64, 1 << 14),
)


def assumptions(machine: Machine) -> dict[str, Machine]:
    """Machines on which a claim might hold."""
    half = HALF_BYTES / machine.nic_bandwidth
    found = {
        "as described": machine,
        "links at half speed": slowed(machine, 0.5),
        "links at a fifth": slowed(machine, 0.2),
        "links at a tenth": slowed(machine, 0.1),
        "kernels twice as fast": faster(machine, 2),
        "half bandwidth at 4 MiB": replace(machine, carry_seconds=machine.carry_seconds + half),
    }
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


def _assumptions(work: tw.Workload, machine: Machine) -> StudyTable:
    """The papers' three figures on each of these machines, and a double ring's."""
    units = {"claim": "", "paper": "", "assumption": "", "found": "", "double ring": ""}
    rows: list[tuple[Value, ...]] = []
    for claim, stated, n, tokens in CLAIMS:
        own, alone = replace(work, num_tokens=tokens), "nodes of 1" in claim
        base = replace(machine, node_size=1, nics=1) if alone else machine
        for name, here in assumptions(base).items():
            inside = 8 if alone else machine.node_size
            ring, control = (
                tw.simulate(plan, own, here, exact=False)
                for plan in (tw.ring(n), tw.double_ring(n // inside, inside))
            )
            if "waits" in claim:
                figures = [100 * x.exposed_seconds / x.seconds for x in (ring, control)]
            else:
                at = replace(own, layout="striped") if alone else own
                plan = tw.attention2d(8, 8) if alone else tw.mesh(n, 8)
                one = tw.simulate(plan, at, here, exact=False)
                figures = [ring.seconds / x.seconds for x in (one, control)]
            rows.append((claim, stated, name, *figures))
    about = (
        f"Causal, {work.num_heads}:{work.num_kv_heads} heads of {work.head_dim}, kernels of "
        f"{machine.name}, both passes. Which assumption about the cluster would make each figure "
        "true, and what a double ring has there."
    )
    return StudyTable("assumptions", "What would make the claims true", about, units, rows)

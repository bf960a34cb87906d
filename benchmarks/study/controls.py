"""What a mesh gains over a ring, beside what a double ring gains: topology apart from bytes."""

from collections.abc import Iterator
from dataclasses import replace

import tilewise as tw
from benchmarks.study.simulated import control_of
from benchmarks.study.table import StudyTable, Value
from tilewise.simulation import Simulation
from tilewise.simulation.machine import Machine
from tilewise.strategies.catalog import tile_sizes
from tilewise.tools.report.words import count, short

DEVICES = 256
LENGTHS = (1 << 18, 1 << 20)


def machines(machine: Machine) -> tuple[Machine, ...]:
    """The machine with a NIC for every device, for two of them, with one, and one device a node."""
    size = machine.node_size
    shared = (
        replace(machine, nics=nics, name=f"{machine.name}, nodes of {size} with {nics} NICs")
        for nics in sorted({size, max(1, size // 2), 1}, reverse=True)
    )
    alone = replace(machine, node_size=1, nics=1, name=f"{machine.name}, nodes of 1 with a NIC")
    return (*shared, alone)


def controls(work: tw.Workload, machine: Machine, n: int = DEVICES) -> Iterator[StudyTable]:
    """Ring, double ring, all-gather, meshes and hybrids on machines with more and fewer NICs."""
    units = {"machine": "", "tokens": "", "plan": "", "time": "s", "waiting": "s", "over ring": "x",
             "of which topology": "x", "of which bytes": "x"}  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    for here in machines(machine):
        for tokens in LENGTHS:
            at = replace(work, num_tokens=tokens, mask=tw.Causal())
            rows += _rows(at, here, n)
    about = (
        f"{n} devices, causal, zigzag tokens, {work.num_heads}:{work.num_kv_heads} heads of "
        f"{work.head_dim}, {work.dtype}, both passes. Of which topology: a double ring's time over "
        "a ring's, a ring's bytes on more links. Of which bytes: this plan over the fastest of "
        "ring, double ring and all-gather, which all send a ring's bytes."
    )
    yield StudyTable("controls", "Topology and bytes", about, units, rows)


def _rows(work: tw.Workload, machine: Machine, n: int) -> Iterator[tuple[Value, ...]]:
    def run(plan: tw.Plan) -> tuple[str, Simulation]:
        return short(plan.name), tw.simulate(plan, work, machine, exact=False)

    alike = [run(x) for x in (tw.ring(n), tw.all_gather(n), control_of(n, machine))]
    ring, _, double = (one.seconds for _, one in alike)
    least = min(one.seconds for _, one in alike)
    tiles = {a: run(tw.mesh(n, a)) for a in tile_sizes(n)}
    best = min(tiles, key=lambda a: tiles[a][1].seconds)
    meshes = [tiles[a] for a in dict.fromkeys((min(tiles, key=lambda a: abs(a - 8)), best))]
    degree = max(d for d in (8, 4, 2, 1) if not work.num_heads % d and not n % d)
    hybrid = run(tw.ulysses(degree, tw.mesh(n // degree)))
    for name, one in (*alike, *meshes, hybrid):
        times = one.seconds, one.exposed_seconds, ring / one.seconds
        yield (machine.name, count(work.num_tokens), name, *times, ring / double,
               least / one.seconds)  # fmt: skip

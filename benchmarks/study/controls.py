"""What a mesh gains over a ring, beside what a double ring gains: topology apart from bytes."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import tilewise as tw
from benchmarks.study.against import EXPLAINED, UNITS, control_of, gains
from benchmarks.study.parts import RowsOf, at_once
from benchmarks.study.table import Row, StudyTable
from tilewise.simulation import Simulation
from tilewise.simulation.machine import Machine
from tilewise.strategies.catalog import tile_sizes
from tilewise_tools.report.bench_charts import waiting_bars
from tilewise_tools.report.page import Figure
from tilewise_tools.report.words import count, short

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


def controls(
    work: tw.Workload, machine: Machine, rows_of: RowsOf = at_once, *, n: int = DEVICES
) -> Iterator[StudyTable]:
    """Ring, double ring, all-gather, meshes and hybrids on machines with more and fewer NICs."""
    units = {"machine": "", "tokens": "", "plan": "", "time": "s", "waiting": "s", **UNITS}
    every = product(machines(machine), LENGTHS)
    parts = {
        f"{here.name}, {count(tokens)} tokens": partial(
            _rows, replace(work, num_tokens=tokens, mask=tw.Causal()), here, n
        )
        for here, tokens in every
    }
    rows = rows_of("controls", parts)
    about = (
        f"{n} devices, causal, zigzag tokens, {work.num_heads}:{work.num_kv_heads} heads of "
        f"{work.head_dim}, {work.dtype}, both passes. {EXPLAINED}"
    )
    figures = tuple(_bars(f"controls-{i}", rows, here) for i, here in enumerate(machines(machine)))
    yield StudyTable("controls", "Topology and bytes", about, units, rows, figures=figures)


def _bars(name: str, rows: list[Row], machine: Machine) -> Figure:
    """Computing and waiting at the shortest length."""
    here = (row for row in rows if row[:2] == (machine.name, count(LENGTHS[0])))
    parts = [
        (str(plan), float(seconds or 0) - float(waits or 0), float(waits or 0))
        for _, _, plan, seconds, waits, *_ in here
    ]
    title = f"Computing and waiting, {count(LENGTHS[0])} tokens: {machine.name}"
    return waiting_bars(name, title, parts, "Waiting of the rank that waits longest, both passes.")


def _rows(work: tw.Workload, machine: Machine, n: int) -> Iterator[Row]:
    def run(plan: tw.Plan) -> tuple[str, Simulation]:
        return short(plan.name), tw.simulate(plan, work, machine, exact=False)

    found = {"ring": run(tw.ring(n)), "all_gather": run(tw.all_gather(n)),
             "double_ring": run(control_of(n, machine))}  # fmt: skip
    tiles = {a: run(tw.mesh(n, a)) for a in tile_sizes(n)}
    best = min(tiles, key=lambda a: tiles[a][1].seconds)
    near = min(tiles, key=lambda a: abs(a - 8))
    found |= {f"mesh {a}": tiles[a] for a in dict.fromkeys((near, best))}
    degree = max(d for d in (8, 4, 2, 1) if not work.num_heads % d and not n % d)
    found["hybrid"] = run(tw.ulysses(degree, tw.mesh(n // degree)))
    over = gains({key: one.seconds for key, (_, one) in found.items()})
    for key, (name, one) in found.items():
        yield (machine.name, count(work.num_tokens), name, one.seconds, one.exposed_seconds,
               *over[key])  # fmt: skip

"""What a mesh gains over a ring, beside the plans that people run: topology apart from bytes."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import tilewise as tw
from benchmarks.study.against import EXPLAINED, UNITS, control_of, gains
from benchmarks.study.parts import RowsOf, at_once
from benchmarks.study.table import Row, StudyTable
from tilewise.planning.staged import staged_all_gather
from tilewise.simulation import Simulation
from tilewise.simulation.machine import Machine
from tilewise.strategies.catalog import degrees, near_square, tile_sizes
from tilewise.strategies.mesh_schedules.greedy import least_held
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
    """Rings, gathers, meshes, USP and hybrids on machines with more and fewer NICs."""
    units = {"machine": "", "tokens": "", "method": "", "plan": "", "time": "s", "waiting": "s",
             **UNITS, "memory": "B", "fits": ""}  # fmt: skip
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
        f"{work.head_dim}, {work.dtype}, both passes, each in its own order. {EXPLAINED} Staged: a "
        "shard is sent once to each node, as collective libraries do. Held: the mesh that holds as "
        "few shards at once as it can. Memory: what attention needs of a rank, of q, k and v on; "
        "fits: whether the device has as much."
    )
    figures = tuple(_bars(f"controls-{i}", rows, here) for i, here in enumerate(machines(machine)))
    yield StudyTable("controls", "Topology and bytes", about, units, rows, figures=figures)


def _bars(name: str, rows: list[Row], machine: Machine) -> Figure:
    """Computing and waiting at the shortest length."""
    here = (row for row in rows if row[:2] == (machine.name, count(LENGTHS[0])))
    parts = [
        (str(method), float(seconds or 0) - float(waits or 0), float(waits or 0))
        for _, _, method, _, seconds, waits, *_ in here
    ]
    title = f"Computing and waiting, {count(LENGTHS[0])} tokens: {machine.name}"
    return waiting_bars(name, title, parts, "Waiting of the rank that waits longest, both passes.")


def _rows(work: tw.Workload, machine: Machine, n: int) -> Iterator[Row]:
    def run(plan: tw.Plan) -> Simulation:
        return tw.simulate(plan, work, machine, exact=False)

    def fastest(made: dict[int, tw.Plan]) -> tuple[int, Simulation]:
        found = {key: run(plan) for key, plan in made.items()}
        key = min(found, key=lambda key: found[key].seconds)
        return key, found[key]

    node = machine.node_size
    found = {
        "ring": run(tw.ring(n)),
        "all-gather": run(tw.all_gather(n)),
        "all-gather, staged": run(staged_all_gather(n, node)),
        "double ring": run(control_of(n, machine)),
    }
    tiles = {a: tw.mesh(n, a) for a in tile_sizes(n)}
    near = min(tiles, key=lambda a: abs(a - 8))
    found[f"mesh {near} x {n // near}"] = run(tiles[near])
    held = tw.mesh(n, near, held=least_held(near, n // near))
    found[f"mesh {near} x {n // near}, held"] = run(held)
    found["mesh, best tile"] = fastest(tiles)[1]
    allowed = [d for d in degrees(n, work.num_heads, work.num_kv_heads) if 1 < d < n]
    for degree in allowed:
        found[f"USP, {degree} x {n // degree}"] = run(tw.ulysses(degree, tw.ring(n // degree)))
    hybrids = {
        degree: tw.ulysses(degree, tw.mesh(n // degree, near_square(n // degree)[0]))
        for degree in allowed
        if n // degree > 3
    }
    if hybrids:
        degree, best = fastest(hybrids)
        found["ulysses x mesh, best degree"] = best
    over = gains({_control(name): one.seconds for name, one in found.items()})
    for name, one in found.items():
        memory = one.peak_bytes
        yield (machine.name, count(work.num_tokens), name, short(one.plans[0].name), one.seconds,
               one.exposed_seconds, *over[_control(name)], memory,
               "yes" if memory <= machine.memory_bytes else "no")  # fmt: skip


def _control(name: str) -> str:
    """The method's name among the controls."""
    known = {"all-gather, staged": "all_gather", "double ring": "double_ring"}
    return known.get(name, name)

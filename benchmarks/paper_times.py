"""The Mesh-Attention paper's times, simulated on stated machines, and what all such claims share.

Machines are presets. One is fitted, and says so: its links are slowed until a ring waits as long as
the paper says, so that its speed-ups follow from one figure of the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import NamedTuple

import tilewise as tw
from benchmarks.paper_claims import Claim, Paper, Row
from tilewise.planning import Candidate
from tilewise.planning.staged import staged_all_gather
from tilewise.simulation import Simulation
from tilewise.strategies.catalog import near_square, tile_sizes
from tilewise.strategies.mesh_schedules.greedy import least_held

K = 1 << 10
MESH_TOKENS = (256 * K, 512 * K, 1024 * K, 2048 * K)
WAITS = 91.5

COMMON = (
    "bfloat16, and so on the wire; head_dim 128; causal masks on zigzag tokens unless said",
    "kernels at 65 % (forward) and 55 % (backward) of the data sheet's peak for large tiles, half "
    "of that at 256 rows of 32 heads; copies and merges at seven eighths of the memory's speed; "
    "links at line rate; transfers overlap with kernels and do not slow them",
    "forward + backward of one layer's attention, no batch, q, k, v sent again in backward",
)


def size(num_tokens: int) -> str:
    return f"{num_tokens // K}K" if num_tokens < K * K else f"{num_tokens // K**2}M"


def run(
    plan: tw.Plan, work: tw.Workload, machine: tw.Machine, back: tw.Plan | None = None
) -> Simulation:
    """Ranks that are alike once, at every number of ranks: above 64 that is the default."""
    return tw.simulate(plan, work, machine, backward_plan=back, exact=False)


def best(work: tw.Workload, machine: tw.Machine, n: int) -> Candidate:
    return tw.search(work, machine, world_size=n)[0]


def again(found: Candidate, work: tw.Workload, machine: tw.Machine) -> Simulation:
    """A candidate for another workload."""
    back = None if found.save == "gathered" else found.backward_plan
    return run(found.plan, replace(work, save=found.save), machine, back)


def waiting(found: Simulation | Candidate) -> float:
    """Per cent of its time for which the rank that waits longest waits for messages."""
    return 100 * found.exposed_seconds / found.seconds


# Mesh-Attention


N = 256
USP_DEGREES = (2, 4, 8, 16, 32)
USP = "USP, best degree"
HELD = "mesh 8 x 32, held"
BYTES_ALONE = "mesh 8 x 32 over the best of a ring's bytes"


def mesh_work(num_tokens: int) -> tw.Workload:
    return tw.Workload(num_tokens, 32, 32, 128, mask=tw.Causal(), layout="zigzag")


def slowed(machine: tw.Machine, factor: float) -> tw.Machine:
    between = replace(machine.between, bandwidth=machine.between.bandwidth * factor)
    return replace(machine, between=between, name=f"{machine.name}, links x {factor:.2f}")


def slowing(machine: tw.Machine) -> float:
    """The factor of the bandwidth between nodes at which a ring of 128 waits WAITS per cent."""
    low, high = 0.01, 1.0
    for _ in range(8):
        middle = (low * high) ** 0.5
        share = waiting(run(tw.ring(128), mesh_work(1024 * K), slowed(machine, middle)))
        low, high = (middle, high) if share > WAITS else (low, middle)
    return (low * high) ** 0.5


def double_ring(n: int, machine: tw.Machine) -> tw.Plan:
    """The control: nodes x their devices; where a node has one device, two equal factors."""
    inside = machine.node_size if machine.node_size > 1 else near_square(n)[1]
    return tw.double_ring(n // inside, inside)


class Mesh(NamedTuple):
    """A machine's rows, and per cent of the ring's waiting that is gone, at most.

    Attributes:
        tile: of the 8 x 32 mesh, each pass in its own order; cut: its waiting.
        control: of the double ring; control_cut: its waiting.
        bytes_alone: of the 8 x 32 mesh over the best plan of a ring's bytes.
        top: of our best plan; top_cut: its waiting.
    """

    rows: tuple[Row, ...]
    cut: float
    control_cut: float
    top_cut: float

    @property
    def tile(self) -> Row:
        return self.rows[0]

    @property
    def control(self) -> Row:
        return self.rows[1]

    @property
    def bytes_alone(self) -> Row:
        return self.rows[-2]

    @property
    def top(self) -> Row:
        return self.rows[-1]


def on_machine(machine: tw.Machine) -> Mesh:
    """Speed-ups over a ring of 256; our best plan is searched at each length."""
    control = double_ring(N, machine)
    names = ("mesh 8 x 32", control.name, "all-gather, staged", USP, "best tile of mesh", HELD)
    ups: dict[str, list[float]] = {name: [] for name in (*names, BYTES_ALONE)}
    cuts: list[list[float]] = []
    top: list[Candidate] = []
    top_ups: list[float] = []
    for num_tokens in MESH_TOKENS:
        work = mesh_work(num_tokens)
        ring = run(tw.ring(N), work, machine)
        tiles = {a: run(tw.mesh(N, a), work, machine) for a in tile_sizes(N)}
        split = [run(tw.ulysses(d, tw.ring(N // d)), work, machine) for d in USP_DEGREES]
        first, double = tiles[8], run(control, work, machine)
        gathered = run(staged_all_gather(N, machine.node_size), work, machine)
        held = run(tw.mesh(N, 8, held=least_held(8, N // 8)), work, machine)
        usp, tile = (min(x, key=lambda x: x.seconds) for x in (split, tiles.values()))
        for name, time in zip(names, (first, double, gathered, usp, tile, held), strict=True):
            ups[name].append(ring.seconds / time.seconds)
        alike = min(x.seconds for x in (ring, double, gathered))
        ups[BYTES_ALONE].append(alike / first.seconds)
        top.append(best(work, machine, N))
        top_ups.append(ring.seconds / top[-1].seconds)
        waits = (first, double, top[-1])
        cuts.append([100 * (1 - x.exposed_seconds / ring.exposed_seconds) for x in waits])
    ups[f"our best: {', '.join(dict.fromkeys(x.strategy for x in top))}"] = top_ups
    rows = (Row(machine.name, name, over_sizes(MESH_TOKENS, up)) for name, up in ups.items())
    return Mesh(tuple(rows), *map(max, zip(*cuts, strict=True)))


def over_sizes(sizes: Sequence[int], figures: Sequence[float]) -> dict[str, float]:
    named = {size(x): figure for x, figure in zip(sizes, figures, strict=True)}
    return {**named, "mean": mean(figures), "max": max(figures)}


def mesh_times() -> Paper:
    eight, four, one = (tw.Machine.preset(f"h100x8{nics}") for nics in ("", "-4nic", "-1nic"))
    alone = replace(eight, node_size=1, nics=1, name="256 nodes of 1 H100")
    machines = [eight, four, one, alone, slowed(four, slowing(four))]
    tables = [on_machine(machine) for machine in machines]
    ring = waiting(run(tw.ring(128), mesh_work(1024 * K), eight))
    claims = (*_speeds(tables), _waits(ring, eight), _cut(tables))
    rows = tuple(row for table in tables for row in table.rows)
    return Paper(
        "Mesh-Attention: time",
        "arXiv 2512.20968",
        "times faster than ring, 256 devices, by number of tokens",
        claims,
        rows,
        (
            "known: 256 devices and the figures; not known to us: devices, links, heads, lengths, "
            "mask",
            "32 query and 32 KV heads (a ratio of times hardly depends on their number), "
            f"{size(MESH_TOKENS[0])} to {size(MESH_TOKENS[-1])} tokens, 8 H100 a node; h100x8 has "
            "8 NICs of 50 GB/s a node, others 4 and 1; 256 nodes of 1 have a NIC of 50 GB/s each",
            "control: a double ring, nodes x the devices of each (16 x 16 where a node has one); "
            "all-gather sends a shard once to each node, USP is ulysses(d) x ring of the best d",
            f"fitted: the machine whose links are slowed until a ring of 128 waits {WAITS} % at 1M "
            "tokens",
            "held: the mesh that holds as few shards at once as it can, 11 of 40",
            *COMMON,
        ),
    )


def _speeds(tables: list[Mesh]) -> list[Claim]:
    tile, top = tables[0].tile, tables[0].top
    peak = max((size(x) for x in MESH_TOKENS), key=lambda x: tile.figures[x])
    others = "; ".join(
        f"{mesh.tile.machine}: {mesh.tile.figures['max']:.1f} at most, "
        f"{mesh.tile.figures['mean']:.1f} on average"
        for mesh in tables[1:]
    )
    why = (
        "NICs: the KV rings of a node's 8 devices share them, a plain ring uses one of them "
        f"({others}). And lengths: at longer ones a ring hides its messages too"
    )
    return [
        Claim(f"speed-up, {what}", claimed, tile.figures[name], "x",
              f"{tile.plan}, {tile.machine}", top.figures[name], plan_of(top), why,
              tables[0].control.figures[at], tables[0].bytes_alone.figures[at])
        for what, name, claimed, at in (
            ("largest", "max", 3.4, peak), ("mean", "mean", 2.9, "mean"))
    ]  # fmt: skip


def _waits(ring: float, machine: tw.Machine) -> Claim:
    top = best(mesh_work(1024 * K), machine, 128)
    share = 100 * slowing(machine)
    why = (
        f"a ring's transfer that gets {share:.0f} % of the line rate of 50 GB/s beside kernels at "
        "full speed; half of that if there was no causal mask"
    )
    control = waiting(run(double_ring(128, machine), mesh_work(1024 * K), machine))
    return Claim(
        *("ring waits, 128 devices, 1M tokens", WAITS, ring, "%", f"ring, {machine.name}"),
        *(waiting(top), top.strategy, why, control, 0.0),
    )


def _cut(tables: list[Mesh]) -> Claim:
    first, others = tables[0], tables[1:]
    listed = "; ".join(f"{mesh.tile.machine}: {mesh.cut:.1f}" for mesh in others)
    why = f"NICs, as above ({listed})"
    return Claim(
        *("waiting less than a ring's, at most", 74.9, first.cut, "%"),
        *(f"{first.tile.plan}, {first.tile.machine}", first.top_cut, plan_of(first.top), why),
        *(first.control_cut, first.cut - first.control_cut),
    )


def plan_of(row: Row) -> str:
    return row.plan.removeprefix("our best: ")

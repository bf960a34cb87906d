"""Attention of image and video models on 8 and 72 devices, and TensorRT-LLM's published table."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import tilewise as tw
from benchmarks.study.parts import RowsOf, at_once
from benchmarks.study.table import Chart, Row, StudyTable
from tilewise.simulation.machine import LARGE_TILE, Machine
from tilewise.strategies.catalog import degrees, near_square
from tilewise_tools.report.studies import methods
from tilewise_tools.report.words import count, short

SHAPES = ("wan", "flux")
RACK = "nvl72"
PUBLISHED = (
    # GPUs, streams at once, degree of Ulysses, of the ring, seconds of 40 steps
    (1, 1, 1, 1, 348.40),
    (2, 2, 1, 1, 174.00),
    (4, 2, 2, 1, 95.89),
    (8, 2, 4, 1, 48.06),
    (16, 2, 4, 2, 25.60),
    (24, 2, 4, 3, 18.46),
    (32, 2, 8, 2, 14.12),
    (64, 2, 8, 4, 8.48),
)
"""Wan 2.2 14B on GB200, NVIDIA/TensorRT-LLM pull request 13821."""
STEPS, LAYERS, PARAMETERS = 40, 40, 14e9
TOKENS = 20 * 45 * 80
"""Of 80 frames of 1280 x 720."""
BEHIND = (
    # GPUs, degree of Ulysses, rows and columns of the grid, a ring's loop over Attention2D's
    (32, 8, (2, 1), 1.03),
    (64, 8, (2, 2), 1.13),
    (72, 4, (3, 3), 1.83),
)
"""The same, of NVIDIA/TensorRT-LLM's page on a rack of GB200 (pull request 15420)."""
LINKS = (900e9, 100e9, 50e9, 25e9)


def video(work: tw.Workload, machine: Machine, rows_of: RowsOf = at_once) -> Iterator[StudyTable]:
    """Methods on a Wan-like and a Flux-like layer, and what was published of Wan."""
    rack = Machine.preset(RACK)
    yield _shapes(((8, machine), (72, rack)), rows_of)
    yield _published(rack, rows_of)
    yield _behind(rack, rows_of)


def _plans(n: int, work: tw.Workload, machine: Machine) -> dict[str, tw.Plan]:
    found = {name: make() for name, make in methods(n, work, machine.node_size).items()}
    most = max(d for d in degrees(n, work.num_heads, work.num_kv_heads) if d <= machine.node_size)
    for degree in (most, most // 2 if most % 2 == 0 else 1):
        if 1 < degree < n:
            grid, name = near_square(n // degree), f"ulysses({degree}) x "
            found[f"{name}ring"] = tw.ulysses(degree, tw.ring(n // degree))
            found[f"{name}attention2d"] = tw.ulysses(degree, tw.attention2d(*grid))
            found[f"{name}mesh"] = tw.ulysses(degree, tw.mesh(n // degree))
    alike = {"ulysses_ring", "ulysses_mesh"}
    return {name: plan for name, plan in found.items() if name not in alike}


def _shapes(places: tuple[tuple[int, Machine], ...], rows_of: RowsOf) -> StudyTable:
    units = {"shape": "", "machine": "", "devices": "", "strategy": "", "plan": "", "forward": "s",
             "both": "s", "waiting": "s", "sent": "B", "over ring": "x"}  # fmt: skip

    def rows(shape: str, n: int, machine: Machine) -> Iterator[Row]:
        work = tw.Workload.preset(shape, n)
        best = tw.search(work, machine, world_size=n)[0]
        chosen = tw.simulate(best.plan, work, machine, backward_plan=best.backward_plan)
        plans = _plans(n, work, machine)
        found = {name: (plan, tw.simulate(plan, work, machine)) for name, plan in plans.items()}
        found["the planner's"] = best.plan, chosen
        ring = found["ring"][1].seconds
        for name, (plan, one) in found.items():
            at = (shape, machine.name, n, name, short(plan.name))
            times = one.forward_seconds, one.seconds, one.exposed_seconds
            yield (*at, *times, one.sent_bytes, ring / one.seconds)

    parts = {
        f"{shape} on {n} devices": partial(rows, shape, n, machine)
        for shape in SHAPES
        for n, machine in places
    }
    about = (
        "One layer, bfloat16, all tokens to all. wan: 75,600 tokens, 40 heads of 128; flux: 4,096 "
        "tokens of an image and 512 of a text that every device holds, 24 heads of 128. Waiting "
        "and sent of both passes; over ring: a ring's time of both over this one."
    )
    charts = tuple(Chart("devices", "both", "strategy", {"shape": shape}) for shape in SHAPES)
    return StudyTable(
        "video", "Image and video models", about, units, rows_of("video", parts), charts
    )


def loop_seconds(plan: tw.Plan, machine: Machine, streams: int) -> float:
    """Seconds of Wan's 40 steps, where guidance's two streams run at once or in turn."""
    heads, head_dim = 40, 128
    work = tw.Workload(TOKENS, heads, heads, head_dim, layout="contiguous")
    speed = machine.kernel(work.dtype, False, head_dim).speed(LARGE_TILE, LARGE_TILE)
    linear = 2 * PARAMETERS * TOKENS / plan.world_size / speed
    attention = tw.simulate(plan, work, machine).forward_seconds
    return STEPS * 2 / streams * (LAYERS * attention + linear)


def _published(machine: Machine, rows_of: RowsOf) -> StudyTable:
    units = {"GPUs": "", "split": "", "published": "s", "simulated": "s",
             "published over simulated": "x", "efficiency, published": "%",
             "efficiency, simulated": "%"}  # fmt: skip

    def rows() -> Iterator[Row]:
        alone: tuple[float, float] | None = None
        for gpus, streams, heads, rings, seconds in PUBLISHED:
            plan = tw.ulysses(heads, tw.ring(rings)) if heads > 1 else tw.ring(rings)
            taken = loop_seconds(plan, machine, streams)
            alone = alone or (seconds, taken)
            shares = (100 * one / x / gpus for one, x in zip(alone, (seconds, taken), strict=True))
            stream = "a stream" if streams == 1 else "two streams"
            split = f"{stream}, ulysses {heads} x ring {rings}"
            yield (gpus, split, seconds, taken, seconds / taken, *shares)

    about = (
        f"Wan 2.2 14B, {count(TOKENS)} tokens, 40 steps of guidance's two streams, forward alone. "
        f"Simulated on {machine.name} as described: 40 layers of attention, and 2 FLOP a parameter "
        "and token at the speed of attention on large tiles; nothing else of the loop."
    )
    found = rows_of("published", {"all": rows})
    return StudyTable("published", "TensorRT-LLM's table", about, units, found)


def _behind(machine: Machine, rows_of: RowsOf) -> StudyTable:
    units = {"GPUs": "", "split": "", "links": "", "published": "x", "ring over attention2d": "x",
             "ring over mesh": "x"}  # fmt: skip

    def rows(bandwidth: float) -> Iterator[Row]:
        here = replace(machine, inside=replace(machine.inside, bandwidth=bandwidth))
        for gpus, heads, grid, behind in BEHIND:
            inner = gpus // 2 // heads
            ring, gathered, mesh = (
                loop_seconds(tw.ulysses(heads, plan), here, streams=2)
                for plan in (tw.ring(inner), tw.attention2d(*grid), tw.mesh(inner))
            )
            split = f"ulysses {heads} x {grid[0]} x {grid[1]}"
            link = f"{bandwidth / 1e9:g} GB/s"
            yield (gpus, split, link, behind, ring / gathered, ring / mesh)

    parts = {f"links of {x / 1e9:g} GB/s": partial(rows, x) for x in LINKS}
    about = (
        "The same loop with two streams at once: how much longer it takes with a ring in place of "
        "attention2d, which gathers before it computes, and of a mesh, which overlaps; on links "
        "of 900 GB/s, as described, and on slower ones."
    )
    found = rows_of("behind", parts)
    return StudyTable("behind", "A ring behind Attention2D", about, units, found)

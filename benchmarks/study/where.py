"""Where a plan pays: the family of the best one, and its gain over what everybody has."""

import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from os import cpu_count
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import tilewise as tw
from benchmarks.study.parts import appended, read_rows
from benchmarks.study.table import StudyTable, Value
from tilewise.layouts.balanced import default_layout
from tilewise.planning.staged import staged_all_gather
from tilewise.simulation.machine import Machine
from tilewise.strategies.catalog import degrees, near_square, tile_sizes
from tilewise.strategies.mesh_schedules.greedy import least_held
from tilewise.strategies.tiled import tiled_layout
from tilewise_tools.cli.output import counted
from tilewise_tools.mask_report.named import drawn
from tilewise_tools.report.drawing import heat_map
from tilewise_tools.report.page import Figure
from tilewise_tools.report.words import count, short
from tilewise_verify.palette import NEUTRAL, SERIES, chart_style, ink_on, paler, rgb

DEVICES = MappingProxyType({"causal": 64, "causal_document": 16})
LINKS = MappingProxyType({"causal": (25, 50, 100, 200, 400), "causal_document": (25, 100, 400)})
"""Gbit/s of a device between nodes."""
NODES = (1, 8)
TOKENS = MappingProxyType({"causal": (1 << 10, 1 << 12, 1 << 13, 1 << 14, 1 << 16),
                           "causal_document": (1 << 10, 1 << 12, 1 << 13, 1 << 14)})  # fmt: skip
"""Of a device."""
HEADS = ((32, 32), (64, 8))
LEFT_HEADS = ((4, 4), (8, 1), (5, 5), (2, 1))
"""Heads that tensor parallelism of 8 leaves a device, its node being used up: nodes of one."""
MASKS = ("causal", "causal_document")
DRAWS = 3
"""Of the documents, each searched by itself: a cell shows the one whose gain is the median."""
ROWS = Path(__file__).parents[1] / "results" / "where.jsonl"
SHORT = MappingProxyType({"mesh": "mesh", "ulysses x mesh": "u x mesh", "hierarchical": "hier.",
                          "tiled or needed": "for mask"})  # fmt: skip
EQUAL = 1.05  # times faster, up to which nothing is gained
KNOWN = ("ring", "all-gather", "double ring", "ulysses", "usp")
FAMILIES = ("nothing gained", "mesh", "ulysses x mesh", "hierarchical", "tiled or needed")
LEVELS = tuple(zip(FAMILIES, (NEUTRAL, *(light for light, _ in SERIES)), strict=False))
"""What a cell says, with its colour."""
COLOURS = MappingProxyType({name: i for i, name in enumerate(FAMILIES)})


def on(machine: Machine, gbit: int, node_size: int) -> Machine:
    """The machine with nodes of another size, and a NIC of this speed for every device."""
    link = replace(machine.between, bandwidth=gbit * 1e9 / 8)
    name = f"{gbit} Gbit/s a device, nodes of {node_size}"
    return replace(machine, node_size=node_size, nics=node_size, between=link, name=name)


def plans(
    n: int, work: tw.Workload, node: int, few: bool
) -> Iterator[tuple[str, Callable[[], tw.Plan]]]:
    """Plans that see no mask, with their families; of a family the fastest counts.

    Args:
        few: of degrees the largest and 8, of tiles the one near the best for a full mask.
    """
    allowed = [d for d in degrees(n, work.num_heads, work.num_kv_heads) if d > 1]
    if few:
        allowed = [d for d in allowed if d in (8, n)]
    inside = node if node > 1 else near_square(n)[1]
    yield "ring", lambda: tw.ring(n)
    yield "all-gather", lambda: staged_all_gather(n, node)
    yield "double ring", lambda: tw.double_ring(n // inside, inside)
    if n in allowed:
        yield "ulysses", lambda: tw.ulysses(n)
    for a in tile_sizes(n) if not few else (None,):
        yield "mesh", lambda a=a: tw.mesh(n, a)
        if a is not None:
            yield "mesh", lambda a=a: tw.mesh(n, a, held=least_held(a, n // a))
    if node > 1:
        yield "hierarchical", lambda: tw.hierarchical(tw.mesh(n // node), tw.ring(node))
    for d in allowed:
        if d == n:
            continue
        yield "usp", lambda d=d: tw.ulysses(d, tw.ring(n // d))
        for a in tile_sizes(n // d) if not few else (near_square(n // d)[1],):
            if 1 < a < n // d:
                yield "ulysses x mesh", lambda d=d, a=a: tw.ulysses(d, tw.mesh(n // d, a))


class Task(NamedTuple):
    """One mask, shape of heads, node and length; all links."""

    mask: str
    heads: tuple[int, int]
    node: int
    tokens: int  # of a device
    work: tw.Workload
    machine: Machine

    @property
    def key(self) -> list[Value]:
        work = self.work
        shape = f"{self.heads[0]}:{self.heads[1]}"
        about = self.machine.name, work.head_dim, work.dtype, DEVICES[self.mask]
        draws = [DRAWS] * (self.mask != "causal")
        return [self.mask, shape, self.node, self.tokens, *about, *draws]


def where(work: tw.Workload, machine: Machine, *, path: Path = ROWS) -> Iterator[StudyTable]:
    """The map: links and nodes x tokens a device x heads x mask. Rows are kept in a file."""
    units = {"mask": "", "heads": "", "node": "", "Gbit/s": "", "tokens a device": "", "best": "",
             "plan": "", "time": "s", "best of the known": "", "gain": "x",
             "over ring": "x"}  # fmt: skip
    tasks = [
        Task(mask, *at, work, machine)
        for mask in MASKS
        for at in product(HEADS, NODES, TOKENS[mask])
    ]
    left = product(LEFT_HEADS, TOKENS["causal"])
    tasks += [Task("causal", heads, 1, tokens, work, machine) for heads, tokens in left]
    known = {json.dumps(row["case"]): row["rows"] for row in read_rows(path) if "case" in row}
    todo = [task for task in tasks if json.dumps(task.key) not in known]
    names = [", ".join(map(str, task.key[:4])) for task in todo]
    if todo:
        with appended(path) as file, ProcessPoolExecutor(min(2, cpu_count() or 1)) as pool:
            for task, found in zip(todo, counted(pool.map(rows_of, todo), names), strict=True):
                file.write(json.dumps({"case": task.key, "rows": found}) + "\n")
                file.flush()
                known[json.dumps(task.key)] = found
    rows = [tuple(row) for task in tasks for row in known[json.dumps(task.key)]]
    about = (
        f"{DEVICES['causal']} devices (documents: {DEVICES['causal_document']}, whose ranks are "
        f"simulated one by one), kernels of {machine.name}, both passes; head_dim {work.head_dim}, "
        f"{work.dtype}. Gain: time of the fastest of ring, all-gather, double ring, Ulysses "
        f"and USP of any degree over that of the best plan; up to {EQUAL} nothing is gained. Over "
        "ring: a ring's time over the best plan's. All-gather sends a shard once to each node. "
        "4:4, 8:1, 5:5 and 2:1 heads are what tensor parallelism of 8 leaves, on nodes of one. "
        "All on zigzag tokens. Documents of prolong512k, the longest a quarter of the sequence, "
        f"drawn {DRAWS} times: of each cell the draw of the median gain; degrees 8 and all, one "
        "shape of a tile. On zigzag_documents every document has pieces on all ranks, and the best "
        "of the known was slower in each of eight cells tried."
    )
    figures = tuple(_map(*shown, rows) for shown in _maps(rows))
    yield StudyTable("where", "Where it pays", about, units, rows, figures=figures)


def rows_of(task: Task) -> list[list[Value]]:
    """A row for each speed of the links."""
    n, (num_heads, num_kv_heads) = DEVICES[task.mask], task.heads
    work = replace(
        task.work, num_tokens=n * task.tokens, num_heads=num_heads, num_kv_heads=num_kv_heads
    )
    made = [(family, make()) for family, make in plans(n, work, task.node, task.mask != "causal")]
    draws = [
        _cases(work, task.mask, n, made, draw)
        for draw in range(1 if task.mask == "causal" else DRAWS)
    ]
    rows: list[list[Value]] = []
    for gbit in LINKS[task.mask]:
        machine = on(task.machine, gbit, task.node)
        about = task.mask, f"{num_heads}:{num_kv_heads}", task.node, gbit, task.tokens
        found = sorted((_best(_fastest(cases, machine)) for cases in draws), key=_gain)
        rows.append([*about, *found[len(found) // 2]])
    return rows


def _gain(row: list[Value]) -> float:
    return float(row[4] or 0)


def _best(found: dict[str, tuple[float, str]]) -> list[Value]:
    """The columns of a row from "best" on."""
    known = min((x for x in KNOWN if x in found), key=lambda x: found[x][0])
    best = min(found, key=lambda x: found[x][0])
    seconds, name = found[best]
    gain = found[known][0] / seconds
    shown = "nothing gained" if gain <= EQUAL else best
    return [shown, name, seconds, known, gain, found["ring"][0] / seconds]


Case = tuple[str, tw.Plan, tw.Workload]


def _cases(
    work: tw.Workload, name: str, n: int, made: list[tuple[str, tw.Plan]], draw: int
) -> list[Case]:
    """Plans on layouts, under the mask; and those that are made for it."""
    if name == "causal":
        at = replace(work, mask=tw.Causal(), layout="zigzag")
        return [(family, plan, at) for family, plan in made]
    mask, kv_bytes = drawn(name, work.num_tokens, draw), 2 * work.num_kv_heads / work.num_heads
    zigzag = replace(work, mask=mask, layout="zigzag")
    cases = [(family, plan, zigzag) for family, plan in made]
    own = tiled_layout(mask, work.num_tokens, n, kv_bytes=kv_bytes)
    level = default_layout(mask, work.num_tokens, n)
    for layout, plan in (
        (own, tw.tiled(mask, own, kv_bytes=kv_bytes)),
        (level, tw.needed(mask, level)),
    ):
        cases.append(("tiled or needed", plan, replace(work, mask=mask, layout=layout)))
    return cases


def _fastest(cases: list[Case], machine: Machine) -> dict[str, tuple[float, str]]:
    """Seconds and the plan of each family."""
    found: dict[str, tuple[float, str]] = {}
    for family, plan, work in cases:
        exact = work.mask != tw.Causal()
        seconds = tw.simulate(plan, work, machine, exact=exact).seconds
        if family not in found or seconds < found[family][0]:
            made_for = "needed" if plan.name.startswith("needed") else "tiled"
            found[family] = seconds, made_for if plan.made_for else short(plan.name)
    return found


def _maps(rows: list[tuple[Value, ...]]) -> list[tuple[str, str]]:
    """The masks and heads that there are rows of."""
    return list(dict.fromkeys((str(mask), str(heads)) for mask, heads, *_ in rows))


def _map(mask: str, shape: str, rows: list[tuple[Value, ...]]) -> Figure:
    """Links and nodes downward, tokens to the right."""
    mine = {
        (f"{gbit} Gbit/s, node {node}", count(int(tokens or 0))): (shown, plan, known, gain, over)
        for at, head, node, gbit, tokens, shown, plan, _, known, gain, over in rows
        if (at, head) == (mask, shape)
    }

    def cell(row: str, column: str) -> tuple[int, str, str]:
        family, plan, known, gain, over = mine[row, column]
        note = f"{plan}: {gain:.2f} times faster than {known}, {over:.2f} than a ring"
        gained = family != FAMILIES[0]
        return COLOURS[str(family)], f"{gain:.2f}" if gained else str(known), note

    down, right = (list(dict.fromkeys(key[i] for key in mine)) for i in (0, 1))
    title = f"{mask.replace('_', ' ')}, {shape} heads"
    return Figure(
        f"where-{mask}-{shape.replace(':', '-')}", title, "", heat_map(down, right, LEVELS, cell)
    )


STRONGEST = 3.0  # times faster: the end of the picture's scale


def _fill(gain: float, gained: bool) -> str:
    """Return a cell's colour: grey where nothing is gained, else from pale to full blue."""
    share = min(1.0, math.log(max(gain, 1.0)) / math.log(STRONGEST))
    return paler(SERIES[0][0], 0.85 * (1 - share)) if gained else NEUTRAL


def picture(rows: list[tuple[Value, ...]], path: Path) -> None:
    """Write the maps as one PNG."""
    from matplotlib import rc_context
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, LogNorm
    from matplotlib.figure import Figure as Canvas

    maps = _maps(rows)
    with rc_context(chart_style()):
        canvas = Canvas(figsize=(12, 4 * len(maps) / 2), layout="constrained")
        panels = canvas.subplots(-(-len(maps) // 2), 2)
        for axes, (mask, shape) in zip(panels.flat, maps, strict=False):
            mine = [row for row in rows if row[:2] == (mask, shape)]
            down = list(dict.fromkeys(row[2:4] for row in mine))
            right = TOKENS[mask]
            cells = [[next(x for x in mine if x[2:5] == (*at, t)) for t in right] for at in down]
            fills = [
                [_fill(float(row[9] or 1), row[5] != FAMILIES[0]) for row in line] for line in cells
            ]
            axes.imshow([[rgb(fill) for fill in line] for line in fills], aspect="auto")
            for y, line in enumerate(cells):
                for x, row in enumerate(line):
                    gained = row[5] != FAMILIES[0]
                    first = f"{row[9]:.2f} {SHORT[str(row[5])]}" if gained else str(row[8])
                    axes.text(x, y, f"{first}\nring {row[10]:.2f}", ha="center", va="center",
                              size=6.5, color=ink_on(fills[y][x]))  # fmt: skip
            axes.set_xticks(range(len(right)), [f"{t >> 10}K" for t in right])
            axes.set_yticks(
                range(len(down)), [f"nodes of {node}, {gbit} Gbit/s" for node, gbit in down]
            )
            title = f"{mask.replace('_', ' ')}, {shape} heads, {DEVICES[mask]} devices"
            axes.set_title(title, size=9)
            axes.set_xlabel("tokens a device")
            axes.grid(visible=False)
        steps = [_fill(STRONGEST ** (i / 255), True) for i in range(256)]
        scale = ScalarMappable(LogNorm(1, STRONGEST), ListedColormap(steps))
        label = "times faster than the best of ring, all-gather, double ring, Ulysses, USP"
        label += "; grey: no gain"
        ticks = (1, 1.25, 1.5, 2, 2.5, 3)
        bar = canvas.colorbar(scale, ax=panels, label=label, ticks=ticks, extend="max")
        bar.ax.set_yticklabels([f"{tick:g}" for tick in ticks])
        bar.ax.minorticks_off()
        canvas.savefig(path, dpi=110, metadata={"Software": None}, pil_kwargs={"optimize": True})

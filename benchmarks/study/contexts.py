"""Distributed attention as the Long-Context Attention Benchmark measures it, simulated.

Four masks, up to 96 devices, both passes, several draws of the documents. A row of every draw is
written to a file as it is made, so that a run that was stopped goes on where it was.
"""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from os import cpu_count
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

import numpy as np

import tilewise as tw
from benchmarks.study.table import StudyTable, Value
from tilewise.simulation.machine import Machine
from tilewise.strategies.catalog import near_square
from tilewise.strategies.tiled import tiled_layout
from tilewise.tools.cli.output import counted
from tilewise.tools.report.words import short

DEVICES = (8, 16, 32, 64, 96)
TOKENS_PER_DEVICE = 8192
CORPUS, MIX = "prolong512k", 0.6
LONGEST_SHARE = 4  # the longest document is this part of the sequence
NODE = 8  # ranks that split heads, and of a double ring inside a node
MASKS = ("full", "causal", "full_document", "causal_document")
METHODS = MappingProxyType(
    {
        "ulysses": "Ulysses",
        "ring": "ring P2P",
        "all_gather": "ring all-gather",
        "usp": "USP, 8 x n/8",
        "loongtrain": "LoongTrain, 8 x double ring",
        "double_ring": "double ring, nodes x 8",
        "mesh": "mesh",
        "ulysses_mesh": "ulysses(8) x mesh",
        "tiled": "tiled, its own layout",
    }
)
"""The benchmark's five, the double ring alone, and three of ours."""
OWN_USUAL = MappingProxyType({"heads": "64:8", "num_tokens": "768K"})
"""Instead of what other studies have; tokens are those of 96 devices."""

ROWS = Path(__file__).parents[1] / "results" / "contexts.jsonl"
Row = dict[str, Any]


class Task(NamedTuple):
    """One draw of a mask for a number of devices, under all methods that it lacks."""

    mask: str
    devices: int
    draw: int
    methods: tuple[str, ...]
    tokens_per_device: int
    work: tw.Workload  # heads, widths and dtype
    machine: Machine

    @property
    def case(self) -> Row:
        """What a row is of, besides its method."""
        work, machine = self.work, self.machine
        return {
            "mask": self.mask,
            "devices": self.devices,
            "draw": self.draw,
            "tokens_per_device": self.tokens_per_device,
            "heads": f"{work.num_heads}:{work.num_kv_heads}",
            "head_dim": work.head_dim,
            "dtype": work.dtype,
            "machine": machine.name,
            "corpus": CORPUS,
            "mix": MIX,
        }


def plan_of(method: str, n: int, work: tw.Workload, mask: tw.masks.Mask) -> tw.Plan | None:
    """The plan of a method on n devices; None where there is none.

    Args:
        work: heads, and the layout that tiled is made for.
    """
    kv_bytes, inner = 2 * work.num_kv_heads / work.num_heads, n // NODE
    match method:
        case "ulysses":
            return tw.ulysses(n) if work.num_heads % n == 0 else None
        case "ring":
            return tw.ring(n)
        case "all_gather":
            return tw.all_gather(n)
        case "usp":
            return tw.ulysses(NODE, tw.ring(inner))
        case "loongtrain":
            window, outer = near_square(inner)
            return tw.ulysses(NODE, tw.double_ring(outer, window))
        case "double_ring":
            return tw.double_ring(inner, NODE)
        case "mesh":
            return tw.mesh(n, kv_bytes=kv_bytes)
        case "ulysses_mesh":
            split = max(kv_bytes, 2 * NODE / work.num_heads)
            return tw.ulysses(NODE, tw.mesh(inner, kv_bytes=split))
    assert isinstance(work.layout, tw.Layout)
    return tw.tiled(mask, work.layout, kv_bytes=kv_bytes)


def drawn(mask: str, num_tokens: int, draw: int) -> tuple[tw.masks.Mask, tuple[int, ...]]:
    """A mask and its documents' boundaries."""
    longest = num_tokens // LONGEST_SHARE
    cu = tw.lengths.sample(CORPUS, num_tokens, seed=draw, cap=longest, mix=MIX)
    simple = {"full": tw.Full(), "causal": tw.Causal()}
    documents = {"full_document": tw.Document(cu), "causal_document": tw.Document(cu) & tw.Causal()}
    return (simple | documents)[mask], cu


def rows_of(task: Task) -> list[Row]:
    """A row for each method of a task; a plan that two of them share is simulated once."""
    n = task.devices
    num_tokens = n * task.tokens_per_device
    mask, cu = drawn(task.mask, num_tokens, task.draw)
    usual = tw.zigzag(num_tokens, n)
    if "document" in task.mask:
        usual = tw.zigzag_documents(cu, n)
    known: dict[tw.Plan, Row] = {}
    rows: list[Row] = []
    for method in task.methods:
        layout = usual
        if method == "tiled":
            kv_bytes = 2 * task.work.num_kv_heads / task.work.num_heads
            layout = tiled_layout(mask, num_tokens, n, kv_bytes=kv_bytes)
        work = replace(task.work, num_tokens=num_tokens, mask=mask, layout=layout)
        plan = plan_of(method, n, work, mask)
        if plan is None:
            rows.append({**task.case, "method": method, "plan": None})
            continue
        if plan not in known:
            known[plan] = _simulated(task, plan, work)
        rows.append({**task.case, "method": method, **known[plan]})
    return rows


def _simulated(task: Task, plan: tw.Plan, work: tw.Workload) -> Row:
    found = tw.simulate(plan, work, task.machine, exact="document" in task.mask or None)
    tokens = 0, work.num_tokens
    flop = 4 * work.mask.area(tokens, tokens) * work.num_heads * work.head_dim / task.devices
    forward, backward = found.forward_seconds, found.backward_seconds
    return {
        "plan": "tiled" if plan.made_for else short(plan.name),
        "forward_tflops": round(flop / forward / 1e12, 2),
        "backward_tflops": round(2.5 * flop / backward / 1e12, 2),
        "waiting_share": round(found.exposed_seconds / found.seconds, 4),
        "peak_bytes": found.rank_peak_bytes(0) if task.draw == 0 else None,
    }


def contexts(
    work: tw.Workload, machine: Machine, *, draws: int = 10, path: Path = ROWS
) -> Iterator[StudyTable]:
    """The benchmark's table: what is missing in the file of rows is simulated, and added to it."""
    per_device = work.num_tokens // DEVICES[-1]
    if per_device < 2:
        raise ValueError(
            f"--num-tokens ({work.num_tokens}) must be at least {2 * DEVICES[-1]}: the tokens of "
            f"{DEVICES[-1]} devices, shared by all"
        )
    if work.num_heads % NODE:
        raise ValueError(
            f"--heads ({work.num_heads}) must be a multiple of {NODE}, which split them"
        )
    work = replace(work, layout="zigzag", mask=tw.Full())
    tasks = [
        Task(mask, n, draw, tuple(METHODS), per_device, work, machine)
        for n, draw, mask in product(DEVICES, range(draws), MASKS)
        if draw == 0 or "document" in mask
    ]
    wanted = {_key({**task.case, "method": x}) for task in tasks for x in METHODS}
    rows = {key: row for row in read_rows(path) if (key := _key(row)) in wanted}
    for row in _run(tasks, rows, path):
        rows[_key(row)] = row
    yield from (_table(mask, rows.values(), work, machine) for mask in MASKS)


def _run(tasks: list[Task], known: Mapping[str, Row], path: Path) -> Iterator[Row]:
    """Rows that are not known yet, written to the file as they come; the longest tasks first."""
    todo: list[Task] = []
    for task in tasks:
        lacks = tuple(x for x in task.methods if _key({**task.case, "method": x}) not in known)
        if lacks:
            todo.append(task._replace(methods=lacks))
    if not todo:
        return
    names = [f"{x.mask}, {x.devices} devices, draw {x.draw}" for x in todo]
    with appended(path) as file, ProcessPoolExecutor(min(2, cpu_count() or 1)) as pool:
        for found in counted(pool.map(rows_of, todo), names):
            file.write("".join(json.dumps(row) + "\n" for row in found))
            file.flush()
            yield from found


def appended(path: Path) -> IO[str]:
    """The file, to add lines to; a last one that was cut is ended."""
    cut = path.exists() and not path.read_text(encoding="utf-8").endswith("\n")
    file = path.open("a", encoding="utf-8")
    file.write("\n" if cut and path.stat().st_size else "")
    return file


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; a last line that was cut is left out."""
    if not path.exists():
        return []
    rows: list[Row] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


CASE = ("mask", "devices", "draw", "tokens_per_device", "heads", "head_dim", "dtype", "machine",
        "corpus", "mix", "method")  # fmt: skip


def _key(row: Row) -> str:
    return json.dumps([row.get(name) for name in CASE])


def _table(mask: str, rows: Any, work: tw.Workload, machine: Machine) -> StudyTable:
    units = {"devices": "", "method": "", "plan": "", "draws": ""}
    for which in ("forward", "backward"):
        spread = ("least", "0.2", "median", "0.8", "most")
        units |= {which: "", **{f"{which} {x}": "" for x in spread}}
    units |= {"waiting": "%", "memory": "B"}
    shown: list[tuple[Value, ...]] = []
    for n, method in product(DEVICES, METHODS):
        mine = [x for x in rows if (x["mask"], x["devices"], x["method"]) == (mask, n, method)]
        mine = [x for x in mine if x["plan"] is not None]
        if not mine:
            continue
        figures: list[Value] = []
        for which in ("forward", "backward"):
            speeds = [row[f"{which}_tflops"] for row in mine]
            quantiles = np.quantile(speeds, (0, 0.2, 0.5, 0.8, 1)).tolist()
            figures += [float(np.mean(speeds)), *quantiles]
        waiting = 100 * float(np.mean([row["waiting_share"] for row in mine]))
        memory = next((row["peak_bytes"] for row in mine if row["peak_bytes"]), None)
        head = n, METHODS[method], mine[0]["plan"], len(mine)
        shown.append((*head, *figures, waiting, memory))
    about = (
        f"{work.num_heads}:{work.num_kv_heads} heads of {work.head_dim}, {work.dtype}, "
        f"{work.num_tokens // DEVICES[-1]} tokens a device, on {machine.name}, simulated. TFLOP/s "
        "a device of allowed pairs (4 head_dim a pair and head forward, 10 backward): mean of the "
        "draws, least, quantiles 0.2, 0.5 and 0.8, most. Waiting of the rank that waits longest, "
        f"both passes. Memory of rank 0, first draw. Documents: {CORPUS} with {MIX:.0%} of the "
        "tokens in documents of 8K to 30K, on tw.zigzag_documents; other masks on zigzag; tiled "
        "on its own layout. Ulysses on 96 devices is not there where 96 divides no heads."
    )
    title = f"{mask.replace('_', ' ').capitalize()}: methods by devices"
    return StudyTable(
        f"contexts-{mask}", title, about, units, shown, "devices", "method", "forward"
    )

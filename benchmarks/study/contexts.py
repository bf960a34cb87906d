"""Distributed attention as the Long-Context Attention Benchmark measures it, simulated.

Four masks, up to 96 devices, both passes, several draws of the documents. A row of every draw is
written to a file as it is made, so that a run that was stopped goes on where it was.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from os import cpu_count
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

import tilewise as tw
from benchmarks.study.parts import appended, read_rows
from benchmarks.study.table import Chart, StudyTable, Value
from tilewise.masks.lengths import corpus_for
from tilewise.planning.staged import staged_all_gather
from tilewise.simulation.machine import Machine
from tilewise.strategies.catalog import near_square
from tilewise.strategies.tiled import tiled_layout
from tilewise_tools.cli.output import counted, print_error
from tilewise_tools.report.words import short
from tilewise_verify.palette import chart_style

DRAWS = MappingProxyType({8: 10, 16: 10, 32: 5, 64: 2, 96: 0})
"""Of documents, by devices: few where one takes a core a quarter of an hour, none where an hour."""
DEVICES = tuple(DRAWS)
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
    sampler: str  # of the documents: "tilewise" or "longca"
    methods: tuple[str, ...]
    tokens_per_device: int
    work: tw.Workload  # heads, widths and dtype
    machine: Machine

    @property
    def case(self) -> Row:
        """What a row is of, besides its method."""
        work, machine = self.work, self.machine
        ours = self.sampler == "tilewise"
        tokens = self.devices * self.tokens_per_device
        return {
            "mask": self.mask,
            "devices": self.devices,
            "draw": self.draw,
            "tokens_per_device": self.tokens_per_device,
            "heads": f"{work.num_heads}:{work.num_kv_heads}",
            "head_dim": work.head_dim,
            "dtype": work.dtype,
            "machine": machine.name,
            "corpus": CORPUS if ours else corpus_for(tokens),
            "mix": MIX,
            **({} if ours else {"sampler": self.sampler}),
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
            return staged_all_gather(n, NODE)
        case "usp":
            return tw.ulysses(NODE, tw.ring(inner))
        case "loongtrain":
            window, outer = near_square(inner)
            return tw.ulysses(NODE, tw.double_ring(outer, window))
        case "double_ring":
            return tw.double_ring(inner, NODE)
        case "mesh":
            return tw.mesh(n)
        case "ulysses_mesh":
            return tw.ulysses(NODE, tw.mesh(inner))
    assert isinstance(work.layout, tw.Layout)
    return tw.tiled(mask, work.layout, kv_bytes=kv_bytes)


def drawn(
    mask: str, num_tokens: int, draw: int, sampler: str = "tilewise"
) -> tuple[tw.masks.Mask, tuple[int, ...]]:
    """A mask and its documents' boundaries."""
    if sampler == "longca":
        corpus = corpus_for(num_tokens)
        cu = tw.lengths.sample(corpus, num_tokens, seed=draw, mix=MIX, draw=sampler)
    else:
        longest = num_tokens // LONGEST_SHARE
        cu = tw.lengths.sample(CORPUS, num_tokens, seed=draw, cap=longest, mix=MIX)
    simple = {"full": tw.Full(), "causal": tw.Causal()}
    documents = {"full_document": tw.Document(cu), "causal_document": tw.Document(cu) & tw.Causal()}
    return (simple | documents)[mask], cu


def rows_of(task: Task) -> list[Row]:
    """A row for each method of a task; a plan that two of them share is simulated once."""
    n = task.devices
    num_tokens = n * task.tokens_per_device
    mask, cu = drawn(task.mask, num_tokens, task.draw, task.sampler)
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
    found = tw.simulate(plan, work, task.machine, exact=False if "document" in task.mask else None)
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
    work: tw.Workload,
    machine: Machine,
    *,
    draws: int | None = None,
    sampler: str = "tilewise",
    methods: Sequence[str] = (),
    path: Path = ROWS,
) -> Iterator[StudyTable]:
    """The benchmark's table: what is missing in the file of rows is simulated, and added to it.

    Args:
        draws: of documents on any number of devices; None: DRAWS.
        sampler: of the documents, as draw of tw.lengths.sample.
        methods: some of METHODS; none: all.
    """
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
    if unknown := [name for name in methods if name not in METHODS]:
        raise ValueError(f"--method ({unknown[0]}) must be one of {', '.join(METHODS)}")
    chosen = tuple(name for name in METHODS if name in methods or not methods)
    work = replace(work, layout="zigzag", mask=tw.Full())
    drawing = [mask for mask in MASKS if "document" in mask]
    most_draws = {n: DRAWS[n] if draws is None else draws for n in DEVICES}
    tasks = [
        Task(mask, n, draw, sampler, chosen, per_device, work, machine)
        for n, most in most_draws.items()
        for draw, mask in product(range(max(1, most)), MASKS)
        if (draw < most if mask in drawing else draw == 0 and sampler == "tilewise")
    ]
    wanted = {_key({**task.case, "method": x}) for task in tasks for x in chosen}
    rows = {key: row for row in read_rows(path) if (key := _key(row)) in wanted}
    for row in _run(tasks, rows, path):
        rows[_key(row)] = row
    for mask in MASKS if sampler == "tilewise" else drawing:
        yield _table(mask, [*rows.values()], work, machine, chosen, sampler)


SECONDS = 0.15
"""Of one core, for all methods of a draw of documents, over the square of the devices."""


def minutes_of(tasks: Sequence[Task]) -> float:
    """About how long two cores need."""
    shares = (x.devices**2 * len(x.methods) / len(METHODS) for x in tasks if "document" in x.mask)
    return SECONDS * sum(shares) / 2 / 60


def _run(tasks: list[Task], known: Mapping[str, Row], path: Path) -> Iterator[Row]:
    """Rows that are not known yet, written to the file as they come; the longest tasks last."""
    todo: list[Task] = []
    for task in tasks:
        lacks = tuple(x for x in task.methods if _key({**task.case, "method": x}) not in known)
        if lacks:
            todo.append(task._replace(methods=lacks))
    if not todo:
        return
    if (minutes := minutes_of(todo)) > 1:
        print_error(
            f"contexts: {sum(len(x.methods) for x in todo)} rows are not in {path}; about "
            f"{minutes:.0f} minutes of two cores. What is done is kept there, and the same command "
            "goes on. Fewer --draws or some --method take less"
        )
    names = [f"{x.mask}, {x.devices} devices, draw {x.draw}" for x in todo]
    with appended(path) as file, ProcessPoolExecutor(min(2, cpu_count() or 1)) as pool:
        for found in counted(pool.map(rows_of, todo), names):
            file.write("".join(json.dumps(row) + "\n" for row in found))
            file.flush()
            yield from found


CASE = ("mask", "devices", "draw", "tokens_per_device", "heads", "head_dim", "dtype", "machine",
        "corpus", "mix", "sampler", "method")  # fmt: skip


def _key(row: Row) -> str:
    return json.dumps([row.get(name) for name in CASE])


def _table(
    mask: str,
    rows: Sequence[Row],
    work: tw.Workload,
    machine: Machine,
    methods: Sequence[str],
    sampler: str,
) -> StudyTable:
    units = {"devices": "", "method": "", "plan": "", "draws": ""}
    for which in ("forward", "backward"):
        spread = ("least", "0.2", "median", "0.8", "most")
        units |= {which: "", **{f"{which} {x}": "" for x in spread}}
    units |= {"waiting": "%", "memory": "B", "0.8 over 0.2": "x"}
    shown: list[tuple[Value, ...]] = []
    for n, method in product(DEVICES, methods):
        mine = [x for x in rows if (x["mask"], x["devices"], x["method"]) == (mask, n, method)]
        if not mine:
            continue
        run = [x for x in mine if x["plan"] is not None]
        if not run:
            why = f"none: {work.num_heads} heads on {n} devices"
            shown.append((n, METHODS[method], why, *(None,) * (len(units) - 3)))
            continue
        figures: list[Value] = []
        for which in ("forward", "backward"):
            speeds = [row[f"{which}_tflops"] for row in run]
            quantiles = np.quantile(speeds, (0, 0.2, 0.5, 0.8, 1)).tolist()
            figures += [float(np.mean(speeds)), *quantiles]
        waiting = 100 * float(np.mean([row["waiting_share"] for row in run]))
        memory = next((row["peak_bytes"] for row in run if row["peak_bytes"]), None)
        head = n, METHODS[method], run[0]["plan"], len(run)
        stable = float(figures[4] or 0) / float(figures[2] or 1)
        shown.append((*head, *figures, waiting, memory, stable))
    documents = (
        f"{CORPUS}, the longest a quarter of the sequence,"
        if sampler == "tilewise"
        else "the corpora that the benchmark's own sampler takes, drawn as it draws them,"
    )
    about = (
        f"{work.num_heads}:{work.num_kv_heads} heads of {work.head_dim}, {work.dtype}, "
        f"{work.num_tokens // DEVICES[-1]} tokens a device, on {machine.name}, simulated. TFLOP/s "
        "a device of allowed pairs (4 head_dim a pair and head forward, 10 backward): mean of the "
        "draws, least, quantiles 0.2, 0.5 and 0.8, most. Waiting of the rank that waits longest, "
        "both passes. Memory of rank 0, first draw. 0.8 over 0.2: of forward's quantiles, how far "
        f"draws are apart. Documents: {documents} with {100 * MIX:.0f} % of the tokens in "
        "documents of 8K to 30K, on tw.zigzag_documents; other masks on zigzag; tiled on its own "
        "layout."
    )
    title = f"{mask.replace('_', ' ').capitalize()}: methods by devices"
    charts = [Chart("devices", f"{x} median", "method") for x in ("forward", "backward")]
    if "document" in mask:
        charts.append(Chart("devices", "0.8 over 0.2", "method"))
    return StudyTable(f"contexts-{mask}", title, about, units, shown, tuple(charts))


def picture(tables: Sequence[StudyTable], path: Path) -> None:
    """Write a chart of each mask as one PNG: medians of forward, and bands of quantiles."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams.update(chart_style())
    canvas = Figure(figsize=(11, 7.5), layout="constrained")
    panels = canvas.subplots(2, -(-len(tables) // 2), squeeze=False)
    for axes, table in zip(panels.flat, tables, strict=False):
        rows = [dict(table.records(row)) for row in table.rows]
        for number, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
            mine = [row for row in rows if row["method"] == method and row["draws"]]
            low, middle, high = (
                [float(row[f"forward {x}"] or 0) for row in mine] for x in ("0.2", "median", "0.8")
            )
            places = [int(row["devices"] or 0) for row in mine]
            style = ("-", "--", ":")[number % 3]  # of lines that lie on each other all are seen
            (line,) = axes.plot(places, middle, style, marker="o", ms=3, lw=1.2, label=method)
            axes.fill_between(places, low, high, alpha=0.15, color=line.get_color())
        axes.set_xscale("log", base=2)
        axes.set_xticks(DEVICES, [str(n) for n in DEVICES])
        axes.set_ylim(bottom=0)
        axes.set_title(table.title.partition(":")[0], size=9)
        axes.set_xlabel("devices")
        axes.set_ylabel("TFLOP/s a device, forward")
    canvas.legend(*panels.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=5,
                  fontsize=8)  # fmt: skip
    canvas.savefig(path, dpi=110, metadata={"Software": None}, pil_kwargs={"optimize": True})

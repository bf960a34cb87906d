"""Published measurements of context parallelism and of kernels on H100, beside what is simulated.

Nothing of the machine is fitted to them: h100x8 is of data sheets and of one H200's memory.
"""

import csv
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path

import tilewise as tw
from benchmarks.study.contexts import MASKS, TOKENS_PER_DEVICE, drawn, plan_of
from benchmarks.study.parts import RowsOf, at_once
from benchmarks.study.table import Row, StudyTable
from tilewise.simulation.machine import Machine

FOLDER = Path(__file__).parents[1] / "cases" / "published"
GPUS = 8, 64
METHODS = ("ulysses", "all_gather", "usp", "loongtrain", "ring")
PASSES = ("forward", "backward")
KERNEL_TOKENS = 1 << 15
APART = 1.05
"""Methods whose published figures differ by less are taken to be alike."""


def published(
    work: tw.Workload, machine: Machine, rows_of: RowsOf = at_once, *, folder: Path = FOLDER
) -> Iterator[StudyTable]:
    """Five methods under four masks on 8 and 64 GPUs, whether they are in order, and kernels.

    Args:
        work: not used: the published workload is 64:8 heads of 128, bfloat16.
    """
    measured = {
        (row["mask"], row["pass"], row["method"], gpus): float(row[f"gpus_{gpus}"])
        for row in _read(folder / "context_parallel_h100.csv")
        if row["method"] in METHODS
        for gpus in GPUS
    }
    theirs = replace(machine, device="cpu")  # others add each result at once, as we do on CPUs
    parts = {
        f"{mask}, {gpus} GPUs": partial(_speeds, theirs, mask, gpus)
        for mask in MASKS
        for gpus in GPUS
    }
    simulated = {row[:4]: float(row[4] or 0) for row in rows_of("published", parts)}
    units = {"mask": "", "GPUs": "", "pass": "", "method": "", "published": "", "simulated": "",
             "off": "%"}  # fmt: skip
    rows: list[Row] = [
        (mask, gpus, which, method, value, simulated[mask, gpus, which, method],
         100 * (simulated[mask, gpus, which, method] / value - 1))
        for (mask, which, method, gpus), value in measured.items()
    ]  # fmt: skip
    about = (
        f"TFLOP/s a GPU, {TOKENS_PER_DEVICE} tokens a GPU, 64:8 heads of 128, bfloat16, on "
        f"{machine.name}. Documents: one draw of prolong512k, the longest a quarter of the "
        "sequence, as in theirs, which are of another corpus. "
        "all_gather is staged. Source: benchmarks/cases/published."
    )
    title = "Published measurements, beside simulations"
    yield StudyTable("published_methods", title, about, units, rows)
    yield _orders(rows)
    yield _kernels(machine, folder)


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return [*csv.DictReader(file)]


def _work(mask: tw.masks.Mask, num_tokens: int, layout: tw.Layout | str) -> tw.Workload:
    return tw.Workload(num_tokens, 64, 8, 128, dtype="bfloat16", mask=mask, layout=layout)


def _tflops(work: tw.Workload, devices: int, found: tw.Simulation) -> tuple[float, float]:
    """TFLOP/s of a device in each pass, counted as is usual: 2.5 times as many in backward."""
    tokens = 0, work.num_tokens
    flop = 4 * work.mask.area(tokens, tokens) * work.num_heads * work.head_dim / devices / 1e12
    return flop / found.forward_seconds, 2.5 * flop / found.backward_seconds


def _speeds(machine: Machine, name: str, gpus: int) -> Iterator[Row]:
    """A row for each method and pass; methods whose plans are equal share a simulation."""
    num_tokens = gpus * TOKENS_PER_DEVICE
    mask, documents = drawn(name, num_tokens, 0)
    has_documents = "document" in name
    layout = tw.zigzag_documents(documents, gpus) if has_documents else tw.zigzag(num_tokens, gpus)
    work = _work(mask, num_tokens, layout)
    known: dict[tw.Plan, tuple[float, float]] = {}
    for method in METHODS:
        plan = plan_of(method, gpus, work, mask)
        assert plan is not None, "64 heads are enough"
        if plan not in known:
            found = tw.simulate(plan, work, machine, exact=has_documents or None)
            known[plan] = _tflops(work, gpus, found)
        for which, speed in zip(PASSES, known[plan], strict=True):
            yield name, gpus, which, method, speed


def _orders(rows: list[Row]) -> StudyTable:
    """Of each mask, number of GPUs and pass: the pairs of methods that are in the same order."""
    columns: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
    for mask, gpus, which, _, value, ours, _ in rows:
        columns.setdefault((mask, gpus, which), []).append((value, ours))  # pyright: ignore
    judged: list[Row] = []
    for key, figures in columns.items():
        pairs = [
            sorted(pair) for pair in combinations(figures, 2) if max(pair)[0] > APART * min(pair)[0]
        ]
        kept = sum(APART * high[1] > low[1] for low, high in pairs)
        judged.append((*key, len(pairs), kept, "yes" if kept == len(pairs) else "no"))
    units = dict.fromkeys(("mask", "GPUs", "pass", "pairs", "in order", "all in order"), "")
    about = (
        "Pairs of methods whose published figures differ by more than 5 %, and those of them that "
        "simulation does not turn round by more than that."
    )
    return StudyTable("published_orders", "The order of methods", about, units, judged)


def _kernels(machine: Machine, folder: Path) -> StudyTable:
    """What one device computes alone, beside the fastest kernel of the charts and torch's."""
    charts: dict[tuple[str, str], dict[str, float]] = {}
    for row in _read(folder / "kernels_h100.csv"):
        charts.setdefault((row["mask"], row["pass"]), {})[row["kernel"]] = float(row["tflops"])
    rows: list[Row] = []
    for name in MASKS:
        mask, _ = drawn(name, KERNEL_TOKENS, 0)
        work = _work(mask, KERNEL_TOKENS, "contiguous")
        ours = _tflops(work, 1, tw.simulate(tw.ring(1), work, machine))
        for which, speed in zip(PASSES, ours, strict=True):
            if chart := charts.get((name, which)):
                kernel = max(chart, key=chart.__getitem__)
                off = 100 * (speed / chart[kernel] - 1)
                rows.append((name, which, kernel, chart[kernel], chart.get("FA2"), speed, off))
    units = {"mask": "", "pass": "", "fastest": "", "published": "", "FA2": "", "priced": "",
             "off": "%"}  # fmt: skip
    about = (
        f"TFLOP/s of one device, {KERNEL_TOKENS} tokens, 64:8 heads of 128. Priced: a call for "
        "each document, as tilewise makes them; the kernels take all documents in one call."
    )
    return StudyTable("published_kernels", "Kernels", about, units, rows)

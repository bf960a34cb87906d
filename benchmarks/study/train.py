"""A small GPT trained by every strategy, over gloo and in the lab, beside the unsplit one."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist

import tilewise as tw
from benchmarks.study.against import METHODS, every_method
from benchmarks.study.parts import RowsOf, at_once
from benchmarks.study.table import Row, StudyTable
from examples.train_lm import Batch, Config, Llama, Split, Way, Whole, batches, train_step
from tilewise.simulation.machine import Machine
from tilewise.transport.processes import run_ranks
from tilewise.transport.resolve import transport_for
from tilewise_tools.bench.environment import peak_bytes
from tilewise_tools.bench.traffic import WatchedTransport
from tilewise_tools.lab import Lab, LabError
from tilewise_tools.report.bench_charts import waiting_bars
from tilewise_tools.report.page import Figure
from tilewise_tools.report.words import short

RANKS, NODE, TOKENS, MBIT = 4, 2, 2048, 100
CONFIG = Config(width=128, num_layers=2, num_heads=8, num_kv_heads=8, hidden=256)
LOSS_TOLERANCE = 1e-5
"""Relative, of fp32 losses; a study that finds more ends in an error."""


@dataclass(frozen=True)
class Sizes:
    """A training run."""

    num_tokens: int = TOKENS  # of a step, the whole sequence
    steps: int = 5  # timed, after one that is not


class Trained(NamedTuple):
    """One rank's figures of one strategy; lists have a value a step."""

    seconds: list[float]
    waited: list[float]  # seconds that attention stood still for messages
    losses: list[float]
    peak_bytes: int  # allocated at once in a step, beside parameters and the optimizer's state


class _Watched(Split):
    """A split whose messages and waits are counted."""

    def __init__(self, plan: tw.Plan, num_tokens: int):
        super().__init__(num_tokens, "auto")
        self.transport = WatchedTransport(transport_for())
        self.cp = tw.ContextParallel(
            self.transport, num_tokens=num_tokens, mask=tw.Causal(), strategy=plan
        )


class _Run:
    """One strategy's model, and what its steps took so far."""

    def __init__(self, way: Way):
        torch.manual_seed(0)
        self.way, self.model = way, Llama(CONFIG)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.found = Trained([], [], [], 0)

    def step(self, batch: Batch) -> None:
        transport = getattr(self.way, "transport", None)
        before = transport.waited_seconds if transport else 0.0
        start = perf_counter()
        loss = train_step(self.model, self.optimizer, self.way, batch)
        self.found.seconds.append(perf_counter() - start)
        self.found.waited.append(transport.waited_seconds - before if transport else 0.0)
        self.found.losses.append(loss)


def _trained(rank: int, plans: tuple[tw.Plan, ...], sizes: Sizes) -> list[Trained]:
    """Every strategy's steps in turn, then rank 0's unsplit ones."""
    torch.set_num_threads(1)
    made = islice(batches(sizes.num_tokens, 0), sizes.steps + 2)
    steps = [replace(batch, mask=tw.Causal()) for batch in made]
    runs = [_Run(_Watched(plan, sizes.num_tokens)) for plan in plans]
    for batch in steps[:-1]:
        for run in runs:
            dist.barrier()
            run.step(batch)
    found = [
        run.found._replace(peak_bytes=peak_bytes(lambda run=run: run.step(steps[-1]), "cpu"))
        for run in runs
    ]
    if rank == 0:
        whole = _Run(Whole())
        for batch in steps[:-1]:
            whole.step(batch)
        peak = peak_bytes(lambda: whole.step(steps[-1]), "cpu")
        found.append(whole.found._replace(peak_bytes=peak))
    dist.barrier()
    return found


def strategies() -> dict[str, tw.Plan]:
    """All methods on RANKS ranks, as two nodes where they know nodes, and balanced_ring.

    Two ranks have no tile that is not a ring's, so plans with a mesh inside another are left out.
    """
    work = tw.Workload(TOKENS, CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim)
    every = every_method(RANKS, work, NODE)
    found = {name: plan for name, plan in every.items() if isinstance(plan, tw.Plan)}
    found["balanced_ring"] = tw.balanced_ring(RANKS)
    found.pop("ulysses_mesh", None)
    return found


def train(work: tw.Workload, machine: Machine, rows_of: RowsOf = at_once) -> Iterator[StudyTable]:
    """End to end, measured; neither the workload nor the machine of the other studies is asked."""
    yield _table("train", "over loopback", None, rows_of=rows_of)
    yield _table("train-lab", f"on {RANKS} hosts at {MBIT} Mbit/s", MBIT, rows_of=rows_of)


def _table(
    name: str,
    where: str,
    mbit: float | None,
    sizes: Sizes | None = None,
    rows_of: RowsOf = at_once,
) -> StudyTable:
    """One network's table; mbit: of the lab's NICs, None: processes of this host."""
    sizes = sizes or Sizes()
    plans = strategies()
    missing = ""
    try:
        rows = rows_of(name, {where: partial(_run_all, plans, sizes, mbit)})
    except LabError as error:
        rows, missing = [], f" Not run here: {error}"
    units = {"strategy": "", "plan": "", "tokens a second": "", "over ring": "x", "step": "s",
             "waiting": "s", "waiting share": "%", "memory": "B",
             "loss, off": ""}  # fmt: skip
    absent = ", ".join(method for method in METHODS if method not in plans)
    c = CONFIG
    about = (
        f"{RANKS} ranks {where}, one thread each; a Llama of {c.num_layers} layers, width {c.width}"
        f", {c.num_heads} heads, {sizes.num_tokens} tokens a step in fp32, causal, on text; "
        f"medians of {sizes.steps} steps, the strategies in turn. A step has forward, backward, "
        "the sum of gradients over ranks and the optimizer. Waiting: for attention's messages, of "
        "the rank that waits longest. Loss, off: the largest relative difference from the unsplit "
        f"model's losses. No plan on {RANKS} ranks in nodes of {NODE}: {absent or 'none'}.{missing}"
    )
    return StudyTable(name, f"A small GPT trained {where}", about, units, rows,
                      figures=(_bars(name, rows),) if rows else ())  # fmt: skip


def _run_all(plans: dict[str, tw.Plan], sizes: Sizes, mbit: float | None) -> Iterator[Row]:
    """The rows of one network."""
    every = tuple(plans.values()), sizes
    if mbit is None:
        return _rows(plans, run_ranks(RANKS, _trained, *every, timeout_seconds=300), sizes)
    with Lab(RANKS, mbit=mbit) as lab:
        return _rows(plans, lab.run(_trained, *every, timeout_seconds=300), sizes)


def _rows(plans: dict[str, tw.Plan], by_rank: list[list[Trained]], sizes: Sizes) -> Iterator[Row]:
    whole = by_rank[0][-1]
    split = [[found[i] for found in by_rank] for i in range(len(plans))]
    ring = _step_seconds(split[0])
    every = *plans.items(), ("unsplit", None)
    for (name, plan), ranks in zip(every, (*split, [whole]), strict=True):
        step, off = _step_seconds(ranks), max(_off(ranks[0].losses, whole.losses))
        if off > LOSS_TOLERANCE:
            raise RuntimeError(f"{name}: its losses are {off:.1e} off those of the unsplit model")
        waited = max(median(found.waited[1:]) for found in ranks)
        tokens = sizes.num_tokens / step
        yield (name, short(plan.name) if plan else "one rank, dense attention", round(tokens),
               ring / step, step, waited, 100 * waited / step,
               max(found.peak_bytes for found in ranks), f"{off:.1e}")  # fmt: skip


def _step_seconds(ranks: list[Trained]) -> float:
    """The median of the slowest rank's steps, without the first."""
    return median(map(max, zip(*(found.seconds[1:] for found in ranks), strict=True)))


def _off(losses: list[float], true: list[float]) -> Iterator[float]:
    return (abs(a / b - 1) for a, b in zip(losses, true, strict=True))


def _bars(name: str, rows: list[Row]) -> Figure:
    parts = [
        (str(row[0]), float(row[4] or 0) - float(row[5] or 0), float(row[5] or 0)) for row in rows
    ]
    caption = "A step; waiting is for attention's messages, the rest is all else."
    return waiting_bars(f"{name}-waits", "Computing and waiting", parts, caption)

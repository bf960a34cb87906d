"""Predicted beside measured times of forward + backward, over gloo processes on this machine.

Strategies are run in turn, again and again, so that a slow moment strikes all of them; a time is
the median over the turns of the slowest rank's. The machine, measured by `tilewise calibrate` or
loaded, is calibrated in the same turns: two rings of other sizes run beside each case's strategies,
and the factors that they tell, on kernels and on all else, are those of the load at that time. With
--once one machine, as it was measured, predicts everything.

    python benchmarks/prediction.py [--machine machine.toml] [--ranks 2,4,8] [--repeats 7]
                                    [--cases NAME,NAME] [--once] [--json]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import tilewise as tw
from tilewise.arguments import require_range
from tilewise.expressions import read_plan
from tilewise.transport.processes import gather_yields
from tilewise_tools.calibration.measure import MOST_RANKS, calibrate_here, fitted, last, trials
from tilewise_tools.naming import Parser, run_script, some_of, whole_number, whole_numbers

APART = 1.15
"""Measured times that differ by more count when orders are compared."""


class Case(NamedTuple):
    """A workload in fp32, on zigzag shards."""

    name: str
    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool

    def workload(self) -> tw.Workload:
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        mask = tw.Causal() if self.causal else tw.Full()
        return tw.Workload(self.num_tokens, *heads, "float32", mask=mask, layout="zigzag")


CASES = (
    Case("small", 512, 4, 4, 32, False),
    Case("wide", 1024, 16, 16, 128, True),
    Case("grouped", 2048, 16, 4, 64, True),
    Case("square", 2048, 8, 8, 64, False),
    Case("long", 3072, 4, 4, 64, True),
    Case("narrow", 1024, 8, 2, 32, False),
)


class Row(NamedTuple):
    """One strategy on one workload, in seconds."""

    case: str
    world_size: int
    plan: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def plans(n: int) -> list[str]:
    """Strategies for n ranks, as `tilewise` reads them."""
    found = [f"ring({n})", f"ring({n}, moves='q')", f"all_gather({n})", f"ulysses({n})"]
    if n > 2:
        found += [f"double_ring(2, {n // 2})", f"attention2d(2, {n // 2})"]
        found += [f"ulysses(2, inner=ring({n // 2}))"]
        for tile in (2, n // 2) if n > 4 else (2,):
            found += [f"mesh({n}, q_tile={tile})"]
        found += [f"mesh({n}, q_tile=2, schedule='gather')"]
    return found


def runnable(case: Case, n: int) -> list[str]:
    """The strategies whose head groups the heads allow."""
    wanted = []
    for text in plans(n):
        groups = read_plan(text).num_head_groups
        kv = case.num_kv_heads
        if case.num_heads % groups == 0 and (kv % groups == 0 or groups % kv == 0):
            wanted.append(text)
    return wanted


def on_rank(rank: int, cases: list[Case], repeats: int) -> Iterator[list[float]]:
    """Seconds of every repeat, case by case: of its strategies, then of the trials."""
    n = dist.get_world_size()
    for case in cases:
        made = [(read_plan(text), case.workload()) for text in runnable(case, n)]
        made += [(trial.plan, trial.work) for trial in trials(n, "float32")]
        seconds: list[list[float]] = [[] for _ in made]
        for turn in range(repeats + 1):
            for (plan, work), found in zip(made, seconds, strict=True):
                elapsed = run_once(rank, plan, work)
                if turn:
                    found.append(elapsed)
        yield from seconds


def run_once(rank: int, plan: tw.Plan, work: tw.Workload) -> float:
    """Seconds of one forward and backward, of the slowest rank."""
    layout = work.layout_for(plan.world_size)
    rows = layout.size(rank)
    q = torch.randn(rows, work.num_heads, work.head_dim, requires_grad=True)
    k, v = (
        torch.randn(rows, work.num_kv_heads, work.head_dim, requires_grad=True) for _ in range(2)
    )
    dout = torch.randn_like(q)
    dist.barrier()
    start = time.perf_counter()
    out = tw.attention(q, k, v, plan=plan, layout=layout, mask=work.mask)
    out.backward(dout)
    elapsed = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return float(elapsed)


def measure(
    machine: tw.Machine, n: int, cases: list[Case], repeats: int, *, once: bool = False
) -> Iterator[Row]:
    """The rows of a world size.

    Args:
        once: predict with the machine as it is, not as the trials of each case tell.
    """
    # All of them first: simulating beside the ranks would slow them down.
    found = iter(list(gather_yields(n, on_rank, (cases, repeats), timeout_seconds=600)))
    for case in cases:
        texts, told = runnable(case, n), trials(n, "float32")
        medians = [statistics.median(next(found)[0]) for _ in range(len(texts) + len(told))]
        as_told = list(zip(told, medians[len(texts) :], strict=True))
        here = machine if once else fitted(machine, as_told)
        for text, seconds in zip(texts, medians, strict=False):
            predicted = tw.simulate(read_plan(text), case.workload(), here).seconds
            yield Row(case.name, n, text, predicted, seconds)


def agreement(rows: list[Row]) -> float | None:
    """Kendall's tau of predicted and measured times, over pairs that are measurably apart."""
    signs = [
        (1 if (a.predicted - b.predicted) * (a.measured - b.measured) > 0 else -1)
        for a, b in combinations(rows, 2)
        if max(a.measured, b.measured) > APART * min(a.measured, b.measured)
    ]
    return sum(signs) / len(signs) if signs else None


def summary(rows: list[Row]) -> dict[str, float | int | None]:
    groups = {(row.case, row.world_size) for row in rows}
    by_group = [[r for r in rows if (r.case, r.world_size) == group] for group in sorted(groups)]
    taus = [tau for tau in map(agreement, by_group) if tau is not None]
    return {
        "num_rows": len(rows),
        "median_error": statistics.median(abs(row.error) for row in rows),
        "largest_error": max(abs(row.error) for row in rows),
        "mean_tau": statistics.fmean(taus) if taus else None,
        "least_tau": min(taus, default=None),
    }


def table(rows: list[Row]) -> Iterator[str]:
    yield f"{'case':8} {'n':>2} {'strategy':30} {'predicted':>10} {'measured':>9} {'error':>6}"
    for case, n, plan, predicted, measured in rows:
        error = predicted / measured - 1
        yield (
            f"{case:8} {n:2} {plan:30} {1e3 * predicted:7.1f} ms {1e3 * measured:6.1f} ms "
            f"{100 * error:4.0f} %"
        )


def calibrated() -> tw.Machine:
    return last(calibrate_here(), lambda what: print(f"calibrating: {what}", file=sys.stderr))


def main() -> None:
    parser = Parser()
    parser.add_argument("--machine", type=Path)
    parser.add_argument("--ranks", type=whole_numbers, default="2,4,8")
    parser.add_argument("--repeats", type=whole_number, default=7)
    names = [case.name for case in CASES]
    parser.add_argument("--cases", type=some_of(names), default=",".join(names))
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for n in args.ranks:
        require_range("--ranks", n, 2, MOST_RANKS)
    machine = tw.Machine.load(args.machine) if args.machine else calibrated()
    cases = [case for case in CASES if case.name in args.cases]
    rows = [
        row for n in args.ranks for row in measure(machine, n, cases, args.repeats, once=args.once)
    ]
    if args.json:
        print(json.dumps({"rows": [row._asdict() for row in rows], **summary(rows)}))
        return
    print("\n".join(table(rows)))
    for n in sorted({row.world_size for row in rows}):
        print(n, "ranks:", summary([row for row in rows if row.world_size == n]))


if __name__ == "__main__":
    run_script(main)

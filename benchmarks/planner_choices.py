"""Choices of the planner on 45 described cases, beside choices that were stored before.

A choice may take 1 % longer, by simulation, than the one in benchmarks/cases/planner_choices.csv.

    python benchmarks/planner_choices.py [--only 0,5,23] [--json] [--write FILE.csv]
"""

from __future__ import annotations

import csv
import gc
import json
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

import tilewise as tw
from tilewise.layouts.balanced import default_layout
from tilewise.workload import LAYOUTS
from tilewise_tools.naming import Parser, new_file, run_script, some_of

STORED = Path(__file__).parent / "cases" / "planner_choices.csv"

LONGER = 1.01
"""A choice that takes so many times as long as the stored one is a worse one."""

COLUMNS = (
    *("machine", "ranks", "heads", "mask", "before, ms", "now, ms", "change"),
    *("search before, s", "search now, s", "choice"),
)

ROWS = {"cpu-gloo": 512}
"""Tokens a rank; of all other machines 8192."""


class Case(NamedTuple):
    """A search; heads are num_heads:num_kv_heads, of 128 each.

    Attributes:
        layout: "" is the one that gives every rank the same work under the mask.
    """

    machine: str
    ranks: int
    heads: str
    mask: str
    layout: str = ""

    def workload(self) -> tw.Workload:
        tokens = self.ranks * ROWS.get(self.machine, 8192)
        mask = _mask(self.mask, tokens)
        num_heads, num_kv_heads = map(int, self.heads.split(":"))
        named = dict(LAYOUTS).get(self.layout)
        layout = (named or partial(default_layout, mask))(tokens, self.ranks)
        return tw.Workload(tokens, num_heads, num_kv_heads, 128, mask=mask, layout=layout)


class Choice(NamedTuple):
    """The first row of a search, and the seconds of processor time that the search took."""

    seconds: float
    save: str
    plan: str
    backward_plan: str
    search_seconds: float


def _mask(name: str, tokens: int) -> tw.masks.Mask:
    if name == "documents":  # of 1/64 to 1/4 of the tokens
        lengths = np.random.default_rng(0).integers(tokens // 64, tokens // 4, 64)
        edges = np.minimum(np.cumsum(lengths), tokens)
        return tw.masks.causal_document([0, *map(int, dict.fromkeys(edges))])
    if name == "window":
        return tw.Causal() & tw.Window(tokens // 16, 0)
    return {"full": tw.Full(), "causal": tw.Causal()}[name]


CASES = [
    Case(machine, int(ranks), heads, mask)
    for mask, lines in (
        (
            "full",
            "cpu-gloo 4 8:2, h100x8 8 32:8, h100x8 16 32:8, h100x8-1nic 32 32:8,"
            "a100x8-4nic 48 40:8, h100x8 64 32:32, nvl72 72 32:8, b200x8-1nic 128 128:128,"
            "nvl72 144 64:8, h100x8 256 32:8, h100x8-1nic 256 64:8, h100x8 1024 32:8,"
            "h100x8 4096 64:8",
        ),
        (
            "causal",
            "h100x8 4 32:8, cpu-gloo 6 4:4, h100x8 8 32:32, h100x8-1nic 16 32:8, h200x8 24 12:4,"
            "h100x8 32 64:8, h100x8-1nic 64 32:8, nvl72 80 32:8, h100x8 96 32:8, h100x8 128 32:8,"
            "h100x8-1nic 128 32:4, h100x8 256 32:8, h100x8-1nic 256 32:32, nvl72 288 64:8,"
            "a100x8-1nic 512 32:8, h100x8 1024 32:8, h100x8-1nic 4096 64:8",
        ),
        (
            "documents",
            "cpu-gloo 8 8:8, h100x8 8 32:8, h100x8-1nic 16 32:8, h100x8-1nic 32 32:8,"
            "h100x8 64 32:8, h100x8 128 32:8",
        ),
        ("window", "h100x8 8 32:8, h100x8-1nic 16 32:8, h100x8 32 32:8, h100x8-1nic 64 32:8"),
    )
    for machine, ranks, heads in (line.split() for line in lines.split(","))
]
# Few heads, slow links and layouts of one's own, where plans win that no other case chooses.
CASES += [
    Case("h100x8-1nic", 32, "8:1", "documents"),
    Case("h100x8-1nic", 16, "3:3", "documents"),
    Case("h100x8", 8, "3:3", "causal", "contiguous"),
    Case("h100x8", 32, "2:1", "causal", "contiguous"),
    Case("cpu-gloo", 16, "3:3", "causal", "contiguous"),
]


def choice(case: Case) -> Choice:
    work, machine = case.workload(), tw.Machine.preset(case.machine)
    gc.collect()
    start = time.process_time()
    best = tw.search(work, machine, world_size=case.ranks)[0]
    took = time.process_time() - start
    return Choice(best.seconds, best.save, best.plan.name, best.backward_plan.name, took)


def read(path: Path) -> dict[Case, Choice]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    stored = {}
    for row in rows:
        case = Case(row["machine"], int(row["ranks"]), row["heads"], row["mask"], row["layout"])
        took = float(row["search_seconds"])
        names = row["save"], row["plan"], row["backward_plan"]
        stored[case] = Choice(float(row["seconds"]), *names, took)
    return stored


def write(path: Path, cases: Iterable[Case]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(Case._fields + Choice._fields)
        for case in cases:
            made = choice(case)
            rows.writerow([*case, *made[:-1], f"{made.search_seconds:.2f}"])
            file.flush()


def line(case: Case, now: Choice, then: Choice) -> str:
    """A row of the table."""
    names = now.plan if now.plan == now.backward_plan else f"{now.plan} / {now.backward_plan}"
    times = [f"{1e3 * made.seconds:.4g}" for made in (then, now)]
    change = f"{100 * (now.seconds / then.seconds - 1):+.2f} %"
    took = [f"{made.search_seconds:.1f}" for made in (then, now)]
    mask = f"{case.mask}, {case.layout}" if case.layout else case.mask
    about = case.machine, str(case.ranks), case.heads, mask
    return "| " + " | ".join([*about, *times, change, *took, names]) + " |"


def main() -> int:
    parser = Parser(description=__doc__.splitlines()[0] if __doc__ else None)
    numbers = some_of(map(str, range(len(CASES))))
    parser.add_argument("--only", type=numbers, help="numbers of cases, from 0, such as 0,5,23")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--json", action="store_true", help="a line of JSON a case")
    either.add_argument("--write", type=new_file, help="store the choices, compare none")
    args = parser.parse_args()
    cases = [CASES[int(number)] for number in args.only] if args.only else CASES
    if args.write:
        write(args.write, cases)
        return 0
    stored, worse = read(STORED), 0
    if not args.json:
        print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for case in cases:
        now, then = choice(case), stored[case]
        worse += now.seconds > LONGER * then.seconds
        if args.json:
            print(json.dumps({**case._asdict(), "before": then._asdict(), "now": now._asdict()}))
        else:
            print(line(case, now, then), flush=True)
    print(f"{worse} of {len(cases)} take more than 1 % longer than before", file=sys.stderr)
    return worse > 0


if __name__ == "__main__":
    run_script(main)

"""All that is to be measured on a GPU, in one command and nine minutes.

    python -m benchmarks.gpu [--minutes 9] [--part executor ...] [--out FILE]
    python -m benchmarks.gpu --plan             # the cases and what each is expected to take
    python -m benchmarks.gpu --dry-run          # the same code, tiny, on the CPU
    python -m benchmarks.gpu --summary FILE     # the page of rows that are there
    python -m benchmarks.gpu --table FILE       # those rows into kernels/measured.toml

Rows go to benchmarks/results/gpu_<date>.jsonl as they come, those of a dry run to a temporary
folder; what processes print goes to .log beside them. The exit code is 1 if a result is wrong or
missing, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from importlib.resources import files
from pathlib import Path
from types import FrameType

from benchmarks.gpu_parts import cases
from benchmarks.gpu_parts.case import Case, Row
from benchmarks.gpu_parts.clocks import Clocks
from benchmarks.gpu_parts.runner import Runner
from benchmarks.gpu_parts.summary import summary
from benchmarks.kernel_table import from_benchmark, write
from tilewise.arguments import require_range
from tilewise_tools.naming import Parser, naming, new_file, run_script

BEFORE = 0.35  # of the time, at most, for what is not timed
CORES = 16  # of the machine that estimates are for
RESULTS = Path(__file__).parent / "results"
ANSWER = "benchmarks.gpu_parts.bodies:answer"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--part", choices=cases.PARTS, action="append", help="default: all")
    parser.add_argument("--out", type=new_file, help="where the rows go")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--plan", action="store_true", help="print the cases and leave")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="print its page")
    parser.add_argument("--table", type=Path, metavar="FILE", help="into measured.toml")
    given = parser.parse_args(arguments)
    require_range("--minutes", given.minutes, 1, 24 * 60)
    if given.plan:
        print("\n".join(_plan(["cpu"] if given.dry_run else cases.EXPECTED, given)))
        return 0
    if given.summary:
        with naming("--summary"):
            print("\n".join(summary(_rows(given.summary))))
        return 0
    if given.table:
        with naming("--table"):
            return _tabled(given.table)
    signal.signal(signal.SIGTERM, interrupt)  # so that processes end and the page is printed
    return _measure(given)


def _measure(given: argparse.Namespace) -> int:
    device = "cpu" if given.dry_run else "cuda"
    folder = Path(tempfile.mkdtemp()) if given.dry_run else RESULTS
    path = given.out or folder / f"gpu_{time.strftime('%Y%m%d_%H%M%S')}.jsonl"
    question = {"device": device, "tiny": given.dry_run}
    with closing(Runner(ANSWER, path, given.minutes * 60, question)) as runner:
        where = runner.ask(Case("environment", {}, 30.0, "environment"))
        if "error" in where:
            path.unlink()
            print(
                f"{where['error']}: run this on a machine with a GPU, or try the code with "
                f"--dry-run; what was printed is in {path.with_suffix('.log')}",
                file=sys.stderr,
            )
            return 2
        runner.clocks = Clocks(where["uuid"]) if "uuid" in where else None
        whole = False
        try:
            _all_cases(runner, where["able"], given)
            whole = True
        except KeyboardInterrupt:
            print("interrupted: what follows is of a part", file=sys.stderr)
    print("\n".join([f"{where['device_name']}, rows in {path}", *summary(runner.rows)]))
    return 0 if whole and all(_is_right(row) for row in runner.rows) else 1


def _all_cases(runner: Runner, able: Sequence[str], given: argparse.Namespace) -> None:
    before, timed = _chosen(able, given)
    runner.run(before, cases.lanes_at_once(os.cpu_count()), BEFORE)
    runner.run(timed)


def _chosen(able: Sequence[str], given: argparse.Namespace) -> tuple[list[Case], list[Case]]:
    """Cases of the parts asked for; whatever is timed is also compiled ahead."""
    parts = given.part or cases.PARTS
    timed = [c for c in cases.timed(able, given.dry_run) if c.part in parts]
    before = cases.before(able, given.dry_run)
    before = [c for c in before if c.part in parts or (timed and c.part.startswith("ahead"))]
    return before, timed


def _is_right(row: Row) -> bool:
    return row.get("right") is not False and not (row["part"] == "correctness" and "error" in row)


def _plan(able: Sequence[str], given: argparse.Namespace) -> list[str]:
    before, timed = _chosen(able, given)
    at_once = cases.lanes_at_once(CORES)
    lanes: dict[str, float] = {}
    for case in before:
        lanes[case.lane] = lanes.get(case.lane, cases.START) + case.seconds
    side_by_side = max(sum(lanes.values()) / at_once, max(lanes.values(), default=0.0))
    lines = [f"before: {len(before)} cases in {len(lanes)} lanes, {at_once} at once"]
    lines += [f"  {seconds:6.0f} s  {lane}" for lane, seconds in lanes.items()]
    total, lane = cases.START + side_by_side, None
    lines.append(f"timed, one after another, from {total:.0f} s on")
    for case in timed:
        total += case.seconds + (cases.START if case.lane != lane else 0.0)
        lane = case.lane
        lines.append(f"  {case.seconds:6.0f} s, to {total:4.0f} s  {case.title}")
    return [*lines, f"{total:.0f} s in all"]


def _tabled(path: Path) -> int:
    table = Path(str(files("tilewise.kernels") / "measured.toml"))
    found = from_benchmark(_rows(path))
    write(found, table)
    print(f"{len(found)} rows in {table}")
    return 0


def _rows(path: Path) -> list[Row]:
    """A line that a cut-off run left unfinished does not count."""
    lines = path.read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    if not rows or any("part" not in row for row in rows):
        raise ValueError(f"{path} holds no rows of this script; give a file that --out wrote")
    return rows


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    run_script(main)

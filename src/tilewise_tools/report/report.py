"""Reports from files: find the kind of a file, make its page and write it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tilewise.plan.ir import Plan
from tilewise.planning.candidate import Candidate, load_plan
from tilewise.simulation.machine import Machine
from tilewise.workload import Workload
from tilewise_tools.report import bench_report, plan_report
from tilewise_tools.report.bench_cases import Row
from tilewise_tools.report.page import Page, written

RESULTS = ".jsonl"


class Report(NamedTuple):
    """A page that is ready to be written."""

    page: Page
    rows: Sequence[Row] = ()  # of a benchmark
    num_lost: int = 0  # lines that were no whole row

    def write(self, page: Path, csv: Path | None = None) -> list[Path]:
        """Write the page, and its rows where csv says; give what was written."""
        page.write_text(written(self.page), encoding="utf-8")
        if csv:
            bench_report.write_csv(self.rows, csv)
        return [page, csv] if csv else [page]


def read(
    paths: Sequence[Path],
    with_rows: bool = False,
    *,
    full: bool = False,
    progress: Callable[[str], object] = str,
    about: Callable[[Plan, Candidate | None], tuple[Workload, Machine]],
    replaces: bool = False,
) -> Report:
    """The report of one plan file, or of one or more files of results.

    Args:
        with_rows: whether rows are wanted, which a plan file has none of.
        full, progress: as for plan_report.page_of.
        about: the workload and machine of a plan; of a candidate's, its own with what replaces it.
        replaces: whether a candidate's plan is to be shown for another workload or machine than
            the file's.
    """
    if all(map(_holds_results, paths)):
        if replaces:
            raise ValueError(
                f"{paths[0]} holds results, which say their workload; options such as "
                "--num-tokens and --machine are for plan files"
            )
        rows = bench_report.read_rows(paths)
        return Report(bench_report.page_of(rows), rows.rows, rows.num_lost)
    if len(paths) > 1:
        raise ValueError(
            f"{len(paths)} files were given; give one plan file, or results alone ({RESULTS})"
        )
    if with_rows:
        raise ValueError(f"--csv writes a benchmark's rows, but {paths[0]} is a plan file")
    try:
        loaded = load_plan(paths[0])
    except ValueError as error:
        raise ValueError(
            f"{error}; a report is of a file of plan.to_json() or tilewise plan, or of results "
            f"({RESULTS}) of tilewise bench"
        ) from None
    if isinstance(loaded, Plan):
        subject = plan_report.ReportedPlan(loaded, *about(loaded, None))
    elif replaces:  # its table and its reason are of another workload
        shown = about(loaded.plan, loaded)
        subject = plan_report.ReportedPlan(loaded.plan, *shown, loaded.backward_plan)
    else:
        subject = plan_report.subject_of(loaded)
    return Report(plan_report.page_of(subject, full=full, progress=progress))


def _holds_results(path: Path) -> bool:
    """Return whether a file holds results, by its name; of other names by the first line, since a
    plan file's is no whole row.
    """
    if path.suffix == RESULTS:
        return True
    try:
        with path.open(encoding="utf-8") as file:
            first = json.loads(file.readline())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and "contender" in first

"""The page of a benchmark: who wins where, what fails, and the rows behind every chart."""

import csv
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tilewise_tools.bench.results import read_results
from tilewise_tools.report import bench_charts
from tilewise_tools.report.bench_cases import (
    ReportCase,
    Row,
    cases,
    contenders,
    cost,
    facets,
    is_whole,
)
from tilewise_tools.report.page import Fact, Figure, Page, Section, TextTable

FACETS = 2
WINNERS = (
    "Of each mask, who is fastest in most of its cases (lengths, passes, numbers of ranks). A tie "
    "is within 5 % of the winner, by the geometric mean over the cases. Rows with wrong results do "
    "not count."
)
ABOUT = ("cpu", "gpu", "cores", "threads", "torch_version", "python_version", "os", "commit")
FINDINGS = ("error_out", "error_dq", "error_dk", "error_dv", "tolerance")


class Rows(NamedTuple):
    """Everything that was read."""

    rows: list[Row]
    num_lost: int  # lines that were no whole row
    sources: tuple[str, ...]  # names of the files


def read_rows(paths: Sequence[Path]) -> Rows:
    """Return the rows of results files (.jsonl)."""
    rows: list[Row] = []
    num_lost = 0
    for path in paths:
        results, lost = read_results(path)
        whole_rows = [row for row in results if is_whole(row)]
        rows += whole_rows
        num_lost += lost + len(results) - len(whole_rows)
    if not rows:
        raise ValueError(f"{', '.join(map(str, paths))}: no whole row; run tilewise bench first")
    return Rows(rows, num_lost, tuple(path.name for path in paths))


def write_csv(rows: Iterable[Row], path: Path) -> None:
    """All fields of all rows, lists and tables as JSON."""
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: _flat(value) for name, value in row.items()})


def _flat(value: object) -> object:
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, list | dict | bool) else value


def page_of(results: Rows) -> Page:
    """All figures and tables of a benchmark."""
    rows, every = results.rows, cases(results.rows)
    colours = {name: place for place, name in enumerate(contenders(rows))}
    by_kind: dict[str, list[ReportCase]] = {}
    for case in every:
        by_kind.setdefault(case.fields["kind"], []).append(case)
    kinds = by_kind.items()
    figures: dict[tuple[str, str], list[Figure | None]] = {
        ("support", "Supported, slow, failed"): [
            bench_charts.support(*kind_and_cases, colours) for kind_and_cases in kinds
        ],
        ("scaling", "Scaling"): [
            bench_charts.along(field, facet, number, colours)
            for field in ("num_tokens", "world_size")
            for cases_of_kind in by_kind.values()
            for number, facet in enumerate(
                facets([row for case in cases_of_kind for row in case.rows], field, FACETS)
            )
        ],
        ("sparse", "Speed and memory by length, density and block"): [
            bench_charts.along(field, facet, number, colours, measure)
            for cases_of_kind in [by_kind.get("kernels", [])]
            for field in ("num_tokens", "density", "block")
            for number, facet in enumerate(
                facets([row for case in cases_of_kind for row in case.rows], field, FACETS)
            )
            for measure in (bench_charts.SPEED, bench_charts.MEMORY)
        ],
        ("speed", "Speed per mask"): [
            bench_charts.speeds(*kind_and_cases, colours) for kind_and_cases in kinds
        ],
        ("waiting-section", "Computing and waiting"): [
            bench_charts.waiting(kind, cases_of_kind)
            for kind, cases_of_kind in kinds
            if kind != "kernels"
        ],
        ("traffic-section", "Traffic"): [bench_charts.bytes_against_time(rows, colours)],
        ("memory-section", "Memory"): [bench_charts.memory(rows, colours)],
        ("prediction", "Prediction"): [bench_charts.predictions(rows, colours)],
    }
    sections = [
        Section(
            name, title, figures=tuple(filter(None, drawn)), narrow=name in ("scaling", "sparse")
        )
        for (name, title), drawn in figures.items()
        if any(drawn)
    ]
    won = bench_charts.winners(by_kind)
    if won.rows:
        sections.insert(0, Section("winners", "Who wins", WINNERS, table=won))
    if wrong := [row for row in rows if row.get("is_exact") is False]:
        names = ("contender", "library", "mask", "pass", "num_tokens", "world_size", *FINDINGS)
        intro = "Compared with fp64 attention on sampled queries: largest error over the tolerance."
        table = bench_charts.row_table(wrong, names)
        sections.append(Section("wrong", "Wrong results", intro, table=table))
    sections.append(Section("conditions", "Measured on", table=_conditions(rows)))
    lost = f"{results.num_lost} lines were" if results.num_lost > 1 else "1 line was"
    return Page(
        "Benchmark",
        " and ".join(by_kind).capitalize() + ", side by side",
        f"{len(rows):,} rows of {len(every):,} cases, from {', '.join(results.sources)}.",
        tuple(_facts(rows, len(every), len(wrong))),
        tuple(sections),
        f"{lost} not whole and left out: the file was cut off or damaged there."
        if results.num_lost
        else "",
        bench_charts.verdict(by_kind),
    )


def _facts(rows: list[Row], num_cases: int, num_wrong: int) -> Iterator[Fact]:
    num_masks = len({row["mask"] for row in rows})
    yield Fact("Cases", f"{num_cases:,}", f"of {num_masks} mask{'s' * (num_masks > 1)}")
    yield Fact("Contenders", f"{len(contenders(rows))}")
    num_measured = sum(cost(row) is not None for row in rows)
    yield Fact("Measured", f"{num_measured:,}", f"of {len(rows):,} rows")
    ends = Counter(row["outcome"] for row in rows)
    for outcome in ("unsupported", "out_of_memory", "timed_out", "failed"):
        if ends[outcome]:
            yield Fact(outcome.replace("_", " ").capitalize(), f"{ends[outcome]:,}", "rows")
    if num_wrong:
        yield Fact("Wrong results", f"{num_wrong:,}", "rows beyond their tolerance")


def _conditions(rows: list[Row]) -> TextTable:
    values_by_name = {
        name: sorted({str(row[name]) for row in rows if row.get(name)}) for name in ABOUT
    }
    values_by_name["libraries"] = sorted(
        {
            f"{row['library']} {row.get('library_version') or ''}".strip()
            for row in rows
            if row.get("library")
        }
    )
    lines = tuple((name, ", ".join(values)) for name, values in values_by_name.items() if values)
    return TextTable(("field", "value"), lines)

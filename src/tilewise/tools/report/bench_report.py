"""The page of a benchmark: who wins where, what fails, and the rows behind every chart."""

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tilewise.tools.bench.results import read_results
from tilewise.tools.report import bench_charts
from tilewise.tools.report.bench_cases import (
    Facet,
    ReportCase,
    Row,
    cases,
    contenders,
    cost,
    facets,
    is_whole,
)
from tilewise.tools.report.chart import Figure, Section
from tilewise.tools.report.longca import read_csv
from tilewise.tools.report.page import Fact, Page

FACETS = 2
ABOUT = ("cpu", "gpu", "cores", "threads", "torch_version", "python_version", "os", "commit")
FINDINGS = ("error_out", "error_dq", "error_dk", "error_dv", "tolerance")


class Rows(NamedTuple):
    """Everything that was read."""

    rows: list[Row]
    num_lost: int  # lines that were no whole row
    sources: tuple[str, ...]  # names of the files


def read_rows(paths: Sequence[Path]) -> Rows:
    """Rows of results files (.jsonl), and of LongCA-bench's (.csv)."""
    rows: list[Row] = []
    num_lost = 0
    for path in paths:
        found, lost = read_csv(path) if path.suffix == ".csv" else read_results(path)
        whole = [row for row in found if is_whole(row)]
        rows += whole
        num_lost += lost + len(found) - len(whole)
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


def page_of(found: Rows) -> Page:
    """All figures and tables of a benchmark."""
    rows, every = found.rows, cases(found.rows)
    colours = {name: place for place, name in enumerate(contenders(rows))}
    kinds = list(dict.fromkeys(str(row.get("kind")) for row in rows))
    by_kind = {kind: [c for c in every if dict(c.fields)["kind"] == kind] for kind in kinds}
    sections = (
        _winners(by_kind, colours),
        _section(
            "support",
            "Supported, slow, failed",
            [bench_charts.heat_map(kind, mine, colours) for kind, mine in by_kind.items()],
        ),
        _section(
            "scaling",
            "Scaling",
            [
                bench_charts.along(field, shown, number, colours)
                for field in ("num_tokens", "world_size")
                for kind in kinds
                for number, shown in enumerate(_facets(by_kind[kind], field))
            ],
        ),
        _section(
            "speed",
            "Speed per mask",
            [bench_charts.speeds(kind, mine, colours) for kind, mine in by_kind.items()],
        ),
        _section("traffic-section", "Traffic", [bench_charts.bytes_against_time(rows, colours)]),
        _section("memory-section", "Memory", [bench_charts.memory(rows, colours)]),
        _section("prediction", "Prediction", [bench_charts.predictions(rows, colours)]),
        _wrong(rows),
        _conditions(rows),
    )
    return Page(
        "Benchmark",
        " and ".join(kinds).capitalize() + ", side by side",
        f"{len(rows):,} rows of {len(every):,} cases, from {', '.join(found.sources)}.",
        _facts(rows, every),
        tuple(section for section in sections if section),
        _lost(found.num_lost),
    )


def _facets(every: Iterable[ReportCase], field: str) -> list[Facet]:
    return facets((row for case in every for row in case.rows), field, FACETS)


def _lost(number: int) -> str:
    if not number:
        return ""
    said = "1 line was" if number == 1 else f"{number} lines were"
    return f"{said} not whole and left out: the file was cut off or damaged there."


def _facts(rows: Sequence[Row], every: Sequence[ReportCase]) -> tuple[Fact, ...]:
    done = sum(cost(row) is not None for row in rows)
    wrong = sum(row.get("is_exact") is False for row in rows)
    ended = {
        name: sum(row.get("outcome") == outcome for row in rows)
        for name, outcome in (
            ("Unsupported", "unsupported"),
            ("Out of memory", "out_of_memory"),
            ("Timed out", "timed_out"),
            ("Failed", "failed"),
        )
    }
    facts = [
        Fact("Cases", f"{len(every):,}", f"of {len({row.get('mask') for row in rows})} masks"),
        Fact("Contenders", f"{len(contenders(rows))}"),
        Fact("Measured", f"{done:,}", f"of {len(rows):,} rows"),
        *(Fact(name, f"{number:,}", "rows") for name, number in ended.items() if number),
    ]
    if wrong:
        facts.append(Fact("Wrong results", f"{wrong:,}", "rows beyond their tolerance"))
    return tuple(facts)


def _section(name: str, title: str, figures: Iterable[Figure | None]) -> Section | None:
    drawn = tuple(figure for figure in figures if figure)
    return Section(name, title, figures=drawn, narrow=name == "scaling") if drawn else None


def _winners(by_kind: dict[str, list[ReportCase]], colours: dict[str, int]) -> Section | None:
    won = [(kind, mine) for kind, mine in by_kind.items() if any(case.done for case in mine)]
    return _section(
        "winners", "Winners", [bench_charts.winners(kind, mine, colours) for kind, mine in won]
    )


def _wrong(rows: Sequence[Row]) -> Section | None:
    wrong = [row for row in rows if row.get("is_exact") is False]
    if not wrong:
        return None
    names = ("contender", "library", "mask", "pass", "num_tokens", "world_size", *FINDINGS)
    intro = "Compared with fp64 attention on sampled queries: largest error over the tolerance."
    return Section("wrong", "Wrong results", intro, table=bench_charts.row_table(wrong, names))


def _conditions(rows: Sequence[Row]) -> Section:
    seen = {name: sorted({str(row[name]) for row in rows if row.get(name)}) for name in ABOUT}
    lines = [{"field": name, "value": ", ".join(v)} for name, v in seen.items() if v]
    sources = sorted(
        {
            f"{r['library']} {r.get('library_version') or ''}".strip()
            for r in rows
            if r.get("library")
        }
    )
    lines.append({"field": "libraries", "value": ", ".join(sources)})
    return Section(
        "conditions", "Measured on", table=bench_charts.row_table(lines, ("field", "value"))
    )

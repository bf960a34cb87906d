"""A mesh beside a ring over real sockets: speed, waiting and bytes, from rows of the lab."""

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import tilewise as tw
from benchmarks.study.parts import RowsOf, at_once, read_rows
from benchmarks.study.table import Row, StudyTable
from tilewise.simulation.machine import Machine

ROWS = Path(__file__).parents[1] / "results" / "network_measured.jsonl"
METHODS = ("mesh", "double_ring")


def measured(
    work: tw.Workload, machine: Machine, rows_of: RowsOf = at_once, *, path: Path = ROWS
) -> Iterator[StudyTable]:
    """What `tilewise bench network --cases benchmarks/cases/network_measured.toml` measured.

    Args:
        work, machine: not used: rows say what was run, and on which hosts.
    """
    cases: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in read_rows(path):
        case = row["world_size"], row["ranks_per_host"], row["mbit"], row["pass"]
        cases.setdefault(case, {})[row["contender"]] = row
    rows = [
        line
        for case, found in sorted(cases.items())
        for name in METHODS
        if name in found
        for line in [_against_ring(case, name, found[name], found["ring"])]
    ]
    units = {"ranks": "", "a host": "", "Mbit/s a host": "", "pass": "", "plan": "",
             "over ring": "x", "lowest": "x", "highest": "x", "ring waits": "%", "waits": "%",
             "waits less": "%", "bytes less": "%"}  # fmt: skip
    about = (
        "Hosts are network namespaces of one machine, whose NICs have the speed named. Over ring: "
        "medians of interleaved runs, and the least and the most of the ratios within one run. "
        "Waiting: the share of its time for which the rank that waits longest waits; waits less: "
        "than a ring's rank, in seconds. Bytes of the busiest rank."
    )
    yield StudyTable("measured", "Measured over sockets", about, units, rows)


def _against_ring(
    case: tuple[Any, ...], name: str, row: dict[str, Any], ring: dict[str, Any]
) -> Row:
    ratios = [a / b for a, b in zip(ring["seconds"], row["seconds"], strict=True)]
    share, ring_share = (100 * x["exposed_seconds"] / median(x["seconds"]) for x in (row, ring))
    waits_less = 100 * (1 - row["exposed_seconds"] / ring["exposed_seconds"])
    bytes_less = 100 * (1 - row["bytes_max_rank"] / ring["bytes_max_rank"])
    over = ring["median_seconds"] / row["median_seconds"]
    return (*case, row["plan"].partition(", schedule")[0] + ")" * (name == "mesh"), over,
            min(ratios), max(ratios), ring_share, share, waits_less, bytes_less)  # fmt: skip

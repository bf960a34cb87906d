"""Rows of a benchmark sorted into cases: what was run by several contenders and may be compared."""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tilewise_tools.bench.case import KINDS
from tilewise_tools.report.words import count

Row = Mapping[str, Any]
AXES = ("block", "density", "window", "cap", "corpus")
IDENTITY = (
    *("kind", "mask", "seed", "num_tokens", "sparsity_ratio", "num_heads", "num_kv_heads"),
    *("head_dim", "dtype", "pass", "world_size", "layout", "device"),
    *("network", "hosts", "ranks_per_host", "mbit"),
    *AXES,
)
"""Fields that make a case; rows that differ in another one are of different contenders."""
FAVOURITES = ("causal", "full", "both")
PASSES = MappingProxyType(
    {"both": "forward and backward", "forward": "forward", "backward": "backward"}
)
TEXTS = ("contender", "mask", "pass", "outcome")
MORE_TEXTS = ("library", "dtype", "layout", "device", "network", "corpus")
NUMBERS = (
    *("seed", "num_tokens", "tokens_per_rank", "num_heads", "num_kv_heads", "head_dim", "mbit"),
    *("world_size", "hosts", "ranks_per_host", "sparsity_ratio", "median_seconds", "tflops"),
    "total_tflops",
    *("bytes_max_rank", "predicted_seconds", "peak_bytes", "predicted_peak_bytes"),
    "exposed_seconds",
    *AXES[:-1],
)


def is_whole(row: Row) -> bool:
    """Return whether all that charts read of a row is there, and of its kind: a damaged file's may
    not be.
    """
    numbers = [row[name] for name in NUMBERS if row.get(name) is not None]
    return (
        row.get("kind") in KINDS  # figures are named after it
        and all(isinstance(row.get(name), str) for name in TEXTS)
        and all(isinstance(row.get(name), str | None) for name in MORE_TEXTS)
        and all(isinstance(x, int | float) and abs(x) <= sys.float_info.max for x in numbers)
    )


class ReportCase(NamedTuple):
    """Rows of the same problem, by contender."""

    rows: list[Row]

    @property
    def fields(self) -> Row:
        """The fields that make the case."""
        return {name: self.rows[0].get(name) for name in IDENTITY}

    @property
    def done(self) -> list[Row]:
        """Return the rows that have a figure, the fastest first."""
        return sorted((row for row in self.rows if cost(row)), key=lambda row: cost(row) or 0.0)


def is_timed(row: Row) -> bool:
    """Return whether a row says seconds; published ones may say TFLOP/s alone."""
    return row.get("median_seconds") is not None


def cost(row: Row) -> float | None:
    """Seconds; or what a FLOP takes, where only the speed is known. None: no figure."""
    figure = row["median_seconds"] if is_timed(row) else row.get("tflops")
    if row["outcome"] != "ok" or figure is None or figure <= 0:
        return None
    return figure if is_timed(row) else 1 / figure


def speed(row: Row) -> float | None:
    """TFLOP/s of a device: the work of all, over the time of the slowest and their number.

    A published row says only the mean of its devices.
    """
    total = row.get("total_tflops")
    return row.get("tflops") if total is None else total / (row.get("world_size") or 1)


def is_right(row: Row) -> bool:
    """Return whether a row's results were not found wrong."""
    return row.get("is_exact") is not False


def cases(rows: Iterable[Row]) -> list[ReportCase]:
    """All cases in the order of their first rows; seconds and speeds are kept apart."""
    rows_by_case: dict[tuple, list[Row]] = {}
    for row in rows:
        published = row.get("library") == "LongCA-bench"
        rows_by_case.setdefault((published, *map(row.get, IDENTITY)), []).append(row)
    return [ReportCase(case_rows) for case_rows in rows_by_case.values()]


def contenders(rows: Iterable[Row]) -> list[str]:
    """Return the contenders' names, those with most rows first; colours are given in this order."""
    return [name for name, _ in Counter(row["contender"] for row in rows).most_common()]


def slowdowns(every: Iterable[ReportCase]) -> dict[str, list[float]]:
    """Per contender: its time over the fastest's in each case where it has one.

    The fastest is one with right results, if there is one.
    """
    ratios_by_contender: dict[str, list[float]] = {}
    for done_rows in (case.done for case in every):
        for row in done_rows:
            fastest = next(filter(is_right, done_rows), done_rows[0])
            ratio = (cost(row) or 0.0) / (cost(fastest) or 1.0)
            ratios_by_contender.setdefault(row["contender"], []).append(ratio)
    return ratios_by_contender


class Facet(NamedTuple):
    """Rows that differ in one field, and in contender."""

    about: str
    rows: list[Row]


def facets(rows: Iterable[Row], along: str, max_facets: int) -> list[Facet]:
    """Return the groups of rows that show best how figures change along a field.

    Args:
        along: "num_tokens"; "world_size", with the tokens of a rank or of all fixed; "density" or
            "block".
        max_facets: groups.
    """
    free, fixed = {along}, [()]
    if along in ("num_tokens", "world_size"):
        free |= {"num_tokens", "tokens_per_rank"}
    if along == "world_size":
        free |= {"hosts", "ranks_per_host"}
        fixed = [("tokens_per_rank",), ("num_tokens",)]
    rows_by_facet: dict[tuple, list[Row]] = {}
    for further_names in fixed:
        names = *(name for name in IDENTITY if name not in free), *further_names
        for row in rows:
            if cost(row) and row.get(along):
                rows_by_facet.setdefault((is_timed(row), names, *map(row.get, names)), []).append(
                    row
                )

    def interest(facet_rows: list[Row]) -> tuple[int, ...]:
        values_along, contenders_here = (
            {row[name] for row in facet_rows} for name in (along, "contender")
        )
        liked = sum(facet_rows[0].get(name) in FAVOURITES for name in IDENTITY)
        return len(values_along), len(contenders_here), liked, len(facet_rows)

    good = [
        (names, facet_rows)
        for (_, names, *_), facet_rows in rows_by_facet.items()
        if interest(facet_rows)[0] > 1
    ]
    good.sort(key=lambda one: interest(one[1]), reverse=True)
    return [
        Facet(described({name: facet_rows[0].get(name) for name in names}), facet_rows)
        for names, facet_rows in good[:max_facets]
    ]


def described(fields: Row) -> str:
    """A case, or what is the same in several, in words."""
    get = fields.get
    network = "" if get("network") in ("none", "loopback") else get("network")
    speed = f" at {get('mbit'):g} Mbit/s" if get("mbit") else ""
    words = [
        f"{get('mask')} mask" if get("mask") else "",
        *(f"{axis} {get(axis)}" for axis in AXES if get(axis) is not None),
        PASSES.get(get("pass") or "", get("pass")),
        f"{count(int(get('num_tokens') or 0))} tokens" if get("num_tokens") else "",
        f"{count(int(tokens))} tokens a rank" if (tokens := get("tokens_per_rank")) else "",
        f"{get('world_size')} ranks" if (get("world_size") or 1) > 1 else "",
        f"{get('num_heads')}:{get('num_kv_heads')} heads of {get('head_dim')}"
        if get("num_heads")
        else "",
        get("dtype"),
        f"{network} network{speed}" if network else "",
    ]
    return ", ".join(part for part in words if part)

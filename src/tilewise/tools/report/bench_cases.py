"""Rows of a benchmark sorted into cases: what was run by several contenders and may be compared."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tilewise.tools.report.chart import count

Row = Mapping[str, Any]
IDENTITY = (
    *("kind", "mask", "seed", "num_tokens", "sparsity_ratio", "num_heads", "num_kv_heads"),
    *("head_dim", "dtype", "pass", "world_size", "layout", "device"),
    *("network", "hosts", "ranks_per_host", "mbit"),
    *("block", "density", "window", "cap", "corpus"),
)
"""Fields that make a case; rows that differ in another one are of different contenders."""
FAVOURITES = ("causal", "full", "both")
PASSES = MappingProxyType(
    {"both": "forward and backward", "forward": "forward", "backward": "backward"}
)


TEXTS = ("kind", "contender", "mask", "pass", "outcome")
NUMBERS = (
    *("seed", "num_tokens", "tokens_per_rank", "num_heads", "num_kv_heads", "head_dim", "mbit"),
    *("world_size", "hosts", "ranks_per_host", "sparsity_ratio", "median_seconds", "tflops"),
    *("bytes_max_rank", "predicted_seconds", "peak_bytes", "predicted_peak_bytes"),
    *("block", "density", "window", "cap"),
)


def is_whole(row: Row) -> bool:
    """Whether what charts read of a row is there, and of its kind: a damaged file's may not be."""
    numbers = [row[name] for name in NUMBERS if row.get(name) is not None]
    return (
        all(isinstance(row.get(name), str) for name in TEXTS)
        and all(isinstance(x, int | float) and math.isfinite(x) for x in numbers)
        and not any(isinstance(row.get(name), list | dict) for name in (*IDENTITY, "library"))
    )


class ReportCase(NamedTuple):
    """Rows of the same problem, by contender."""

    fields: tuple[tuple[str, Any], ...]
    rows: tuple[Row, ...]

    @property
    def done(self) -> list[Row]:
        """Those with a figure, fastest first."""
        return sorted((row for row in self.rows if cost(row) is not None), key=_cost)


def is_timed(row: Row) -> bool:
    """Whether a row says seconds; published ones may say TFLOP/s alone."""
    return isinstance(row.get("median_seconds"), int | float)


def cost(row: Row) -> float | None:
    """Seconds; or what a FLOP takes, where only the speed is known. None: no figure."""
    if row.get("outcome") != "ok":
        return None
    if is_timed(row):
        return float(row["median_seconds"])
    speed = row.get("tflops")
    return 1 / float(speed) if isinstance(speed, int | float) and speed > 0 else None


def _cost(row: Row) -> float:
    return cost(row) or math.inf


def cases(rows: Iterable[Row]) -> list[ReportCase]:
    """All cases in the order of their first rows; seconds and speeds are kept apart."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        library = row.get("library") if row.get("library") == "LongCA-bench" else None
        key = (*((name, row.get(name)) for name in IDENTITY), ("source", library))
        found.setdefault(key, []).append(row)
    return [ReportCase(key, tuple(mine)) for key, mine in found.items()]


def contenders(rows: Iterable[Row]) -> list[str]:
    """Names by how many rows they have; a colour goes with each place."""
    return [name for name, _ in Counter(str(row.get("contender")) for row in rows).most_common()]


def slowdowns(every: Iterable[ReportCase]) -> dict[str, list[float]]:
    """Per contender: its time over the fastest's in each case where it has one."""
    found: dict[str, list[float]] = {}
    for case in every:
        for row in case.done:
            found.setdefault(str(row["contender"]), []).append(_cost(row) / _cost(case.done[0]))
    return found


class Facet(NamedTuple):
    """Rows that differ in one field, and in contender."""

    about: str
    rows: tuple[Row, ...]


def facets(rows: Iterable[Row], along: str, most: int) -> list[Facet]:
    """Those groups of rows that show best how figures change along a field.

    Args:
        along: "num_tokens" or "world_size", with the tokens of a rank or of all fixed.
        most: groups.
    """
    free = {"num_tokens", "tokens_per_rank"}
    fixed = [()] if along == "num_tokens" else [("tokens_per_rank",), ("num_tokens",)]
    if along == "world_size":
        free |= {"world_size", "hosts", "ranks_per_host"}
    names = [name for name in IDENTITY if name not in free]
    done = [row for row in rows if cost(row) is not None and row.get(along)]
    found: dict[tuple, list[Row]] = {}
    for more in fixed:
        for row in done:
            about = tuple((name, row.get(name)) for name in (*names, *more))
            found.setdefault((is_timed(row), about), []).append(row)
    good = [(key, mine) for key, mine in found.items() if _places(mine, along) > 1]
    good.sort(key=lambda one: _interest(one[0][1], one[1], along), reverse=True)
    return [Facet(described(dict(key[1])), tuple(mine)) for key, mine in good[:most]]


def _places(rows: list[Row], along: str) -> int:
    return len({row[along] for row in rows})


def _interest(about: tuple[tuple[str, Any], ...], rows: list[Row], along: str) -> tuple[int, ...]:
    liked = sum(value in FAVOURITES for _, value in about)
    return _places(rows, along), len({row["contender"] for row in rows}), liked, len(rows)


def described(fields: Mapping[str, Any]) -> str:
    """A case, or what is the same in several, in words."""
    said = [
        f"{fields['mask']} mask" if fields.get("mask") else "",
        *(f"{axis} {fields[axis]}" for axis in IDENTITY[-5:] if fields.get(axis) is not None),
        PASSES.get(fields.get("pass") or "", str(fields.get("pass") or "")),
        f"{count(int(fields['num_tokens']))} tokens" if fields.get("num_tokens") else "",
        f"{count(int(tokens))} tokens a rank" if (tokens := fields.get("tokens_per_rank")) else "",
        f"{fields['world_size']} ranks" if (fields.get("world_size") or 1) > 1 else "",
        _heads(fields),
        str(fields.get("dtype") or ""),
        _network(fields),
    ]
    return ", ".join(part for part in said if part)


def _heads(fields: Mapping[str, Any]) -> str:
    names = "num_heads", "num_kv_heads", "head_dim"
    heads, kv_heads, dim = (fields.get(name) for name in names)
    return f"{heads}:{kv_heads} heads of {dim}" if heads else ""


def _network(fields: Mapping[str, Any]) -> str:
    name, mbit = fields.get("network"), fields.get("mbit")
    if name in (None, "none", "loopback"):
        return ""
    return f"{name} network" + (f" at {mbit:g} Mbit/s" if mbit else "")

"""From a preset, a TOML file and filters to the cases of a run, and who takes part in each."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tilewise import masks
from tilewise.expressions import read_heads
from tilewise.kernels.registry import PROVIDERS
from tilewise.tools.bench.case import KINDS, BenchCase, LabNetwork, Timing, known_fields
from tilewise.tools.bench.contender import Contender
from tilewise.tools.bench.our_kernels import DENSE, kernel
from tilewise.tools.bench.our_strategies import STRATEGIES, strategy

Values = tuple[Any, ...]
FIELDS: Mapping[str, type] = MappingProxyType(
    {
        "mask": str,
        "contender": str,
        "num_tokens": int,
        "tokens_per_rank": int,
        "world_size": int,
        "hosts": int,
        "ranks_per_host": int,
        "mbit": float,
        "network": str,
        "heads": str,
        "head_dim": int,
        "dtype": str,
        "pass": str,
        "layout": str,
        "seed": int,
        "device": str,
    }
)
"""What a grid may list; each is a list of this type in TOML."""
SIZES: Mapping[str, str] = MappingProxyType(
    {"num_tokens": "tokens_per_rank", "tokens_per_rank": "num_tokens"}
)
"""Each says how long the sequence is, so one given takes the place of the other."""


@dataclass(frozen=True)
class BenchRun:
    """What one command measures."""

    kind: str
    timing: Timing
    grids: tuple[Mapping[str, Values], ...]  # each the lists of one [[grid]]

    def narrowed(self, given: Mapping[str, Sequence[Any]]) -> BenchRun:
        """With lists in place of all grids' own."""
        chosen = {name: tuple(values) for name, values in given.items() if values}
        dropped = {SIZES[name] for name in chosen if name in SIZES}
        grids = ({k: v for k, v in grid.items() if k not in dropped} for grid in self.grids)
        return replace(self, grids=tuple({**grid, **chosen} for grid in grids))

    def cases(self) -> Iterator[tuple[BenchCase, tuple[str, ...]]]:
        """Every case once, with the names of its contenders; none named: all there are."""
        wanted: dict[BenchCase, dict[str, None]] = {}
        for grid in self.grids:
            lists = dict(grid)
            names = lists.pop("contender", ())
            for case in _cases(self.kind, lists):
                wanted.setdefault(case, {}).update(dict.fromkeys(names))
        yield from ((case, tuple(names)) for case, names in wanted.items())


def preset(kind: str, name: str) -> BenchRun:
    """One of the runs that come with the library: "quick" or "standard"."""
    text = (
        resources.files("tilewise.tools.bench").joinpath("cases", f"{kind}_{name}.toml").read_text()
    )
    return _run(tomllib.loads(text), f"preset {name}", kind)


def read_cases(path: Path, kind: str) -> BenchRun:
    """The run that a TOML file describes."""
    try:
        return _run(tomllib.loads(path.read_text()), str(path), kind)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML: {error}") from None


def _run(table: Mapping[str, Any], where: str, kind: str) -> BenchRun:
    _known(table, ("kind", "timing", "grid"), where)
    if table.get("kind") != kind:
        raise ValueError(
            f"{where}: kind is {table.get('kind')!r}, this command wants {kind!r}; "
            f"kinds are {', '.join(KINDS)}"
        )
    grids = table.get("grid") or []
    if not grids or not all(isinstance(grid, dict) for grid in grids):
        raise ValueError(f"{where}: there must be at least one [[grid]] table")
    timing = table.get("timing", {})
    _known(timing, known_fields(Timing), f"{where}, timing")
    try:
        made = Timing(**timing)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}, timing: {error}") from None
    return BenchRun(kind, made, tuple(_grid(grid, where) for grid in grids))


def _grid(grid: Mapping[str, Any], where: str) -> dict[str, Values]:
    _known(grid, FIELDS, f"{where}, grid")
    lists: dict[str, Values] = {}
    for name, values in grid.items():
        values = tuple(values) if isinstance(values, list) else (values,)
        wanted = (int, float) if FIELDS[name] is float else FIELDS[name]
        if not values or not all(isinstance(v, wanted) and v is not True for v in values):
            raise ValueError(
                f"{where}, grid: {name} ({list(values)}) must be a list of {FIELDS[name].__name__}"
            )
        lists[name] = values
    return lists


def _known(table: Mapping[str, Any], names: Any, where: str) -> None:
    for name in table:
        if name not in names:
            raise ValueError(f"{where}: {name!r} is not known; take one of {', '.join(names)}")


def _cases(kind: str, lists: dict[str, Values]) -> Iterator[BenchCase]:
    """All combinations, the mask changing slowest so that a stopped run has whole masks."""
    lists = {"mask": masks.NAMES, **lists}
    if kind == "network":
        lists = {"hosts": (4,), "ranks_per_host": (1,), "mbit": (50.0,), **lists}
    names = sorted(lists, key=lambda name: (name != "mask", name))
    for values in product(*(lists[name] for name in names)):
        yield _case(kind, dict(zip(names, values, strict=True)))


def _case(kind: str, words: dict[str, Any]) -> BenchCase:
    """One combination of a grid's words as a case."""
    fields: dict[str, Any] = {"kind": kind}
    if kind == "network":
        sizes = words.pop("hosts"), words.pop("ranks_per_host"), float(words.pop("mbit"))
        network = LabNetwork(words.pop("network", "lab"), *sizes)
        fields |= {"network": network, "world_size": network.hosts * network.ranks_per_host}
    elif kind == "strategies":
        n = words.pop("world_size", 4)
        fields |= {"world_size": n, "network": LabNetwork("loopback", 1, n)}
    per_rank = words.pop("tokens_per_rank", None)
    if per_rank is not None:
        fields["num_tokens"] = per_rank * fields.get("world_size", 1)
    heads = words.pop("heads", None)
    if heads is not None:
        fields["num_heads"], fields["num_kv_heads"] = read_heads(heads)
    if "pass" in words:
        fields["which"] = words.pop("pass")
    unused = [name for name in words if name not in known_fields(BenchCase)]
    if unused:
        raise ValueError(f"{', '.join(unused)}: not of {kind}; leave it out")
    if "num_tokens" not in fields and "num_tokens" not in words:
        raise ValueError("a grid needs num_tokens or tokens_per_rank")
    return BenchCase(**{**words, **fields})


Plan = list[tuple[BenchCase, tuple[Contender, ...]]]


def contenders_of(module: str) -> tuple[Contender, ...]:
    """What a module's contenders() returns; modules of the working directory are found too."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        found = tuple(importlib.import_module(module).contenders())
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{module} is no module with a function contenders(): {error}") from None
    strange = [type(one).__name__ for one in found if not isinstance(one, Contender)]
    if strange:
        raise ValueError(f"{module}: {', '.join(strange)} is not a tilewise.bench Contender")
    return found


def entered(run: BenchRun, others: Sequence[Contender] = ()) -> Plan:
    """The cases of a run with their contenders: those named, or all that there are.

    Args:
        others: take part too; where some of them are named, only those.
    """
    by_name = {one.name: one for one in others}
    everyone = [*PROVIDERS, *DENSE] if run.kind == "kernels" else [*STRATEGIES]

    def enter(name: str) -> Contender:
        if name in by_name:
            return by_name[name]
        try:
            return kernel(name) if run.kind == "kernels" else strategy(name)
        except ValueError as error:
            others_too = f"; and {', '.join(by_name)}" if by_name else ""
            raise ValueError(f"{error}{others_too}") from None

    def chosen(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(names) if by_name.keys() & set(names) else (*names, *by_name)

    return [
        (case, tuple(enter(name) for name in chosen(names or everyone)))
        for case, names in run.cases()
    ]

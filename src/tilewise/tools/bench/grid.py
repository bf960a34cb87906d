"""From a preset, a TOML file and filters to the cases of a run, and who takes part in each."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from tilewise.tools.bench.our_kernels import DENSE, OTHERS, kernel
from tilewise.tools.bench.our_strategies import STRATEGIES, strategy
from tilewise.tools.mask_report.named import HAVE, Axes
from tilewise.tools.outside import module_of

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
        "kernel": str,
        "wire": str,
        "block": int,
        "density": float,
        "window": int,
        "cap": int,
        "corpus": str,
    }
)
"""What a grid may list; each is a list of this type in TOML."""
SIZES: Mapping[str, str] = MappingProxyType(
    {"num_tokens": "tokens_per_rank", "tokens_per_rank": "num_tokens"}
)
"""Each says how long the sequence is, so one given takes the place of the other."""


Who = tuple[str, str, str]
"""A contender's name, the kernel that it computes with and the wire; "": its own, and none."""


@dataclass(frozen=True)
class Place:
    """Where a grid stands in its file, for messages.

    Args:
        lines: of its fields that no option has replaced.
    """

    file: str
    lines: Mapping[str, int]

    @contextmanager
    def named(self) -> Iterator[None]:
        """Errors of the block name the line of the field that they are about."""
        try:
            yield
        except ValueError as error:
            words = re.findall(r"\w+", str(error).replace("num_kv_heads", "heads"))
            line = next((self.lines[word] for word in words if word in self.lines), None)
            where = "" if line is None else f"{self.file}, line {line}: "
            raise ValueError(f"{where}{error}") from None


@dataclass(frozen=True)
class BenchRun:
    """What one command measures."""

    kind: str
    timing: Timing
    grids: tuple[Mapping[str, Values], ...]  # each the lists of one [[grid]]
    places: tuple[Place, ...]  # of the grids

    def narrowed(self, given: Mapping[str, Sequence[Any]]) -> BenchRun:
        """With lists in place of all grids' own."""
        chosen = {name: tuple(values) for name, values in given.items() if values}
        dropped = {SIZES[name] for name in chosen if name in SIZES}
        grids = ({k: v for k, v in grid.items() if k not in dropped} for grid in self.grids)
        places = (
            replace(place, lines={k: v for k, v in place.lines.items() if k not in chosen})
            for place in self.places
        )
        grids = tuple({**grid, **chosen} for grid in grids)
        return replace(self, grids=grids, places=tuple(places))

    def cases(self) -> Iterator[tuple[BenchCase, tuple[Who, ...], Place]]:
        """Every case once, with its contenders as named; none named: all there are."""
        wanted: dict[BenchCase, dict[Who, None]] = {}
        places: dict[BenchCase, Place] = {}
        for grid, place in zip(self.grids, self.places, strict=True):
            lists = dict(grid)
            kernels = lists.pop("kernel", ("",))
            names = lists.pop("contender", ("",))
            # A kernel on one rank sends nothing: a wire is refused there.
            wires = lists.pop("wire", ("",)) if self.kind != "kernels" else ("",)
            if self.kind == "kernels":  # a kernel is a contender there
                names = (*filter(None, names), *filter(None, kernels)) or ("",)
                kernels = ("",)
            with place.named():
                for case in _cases(self.kind, lists):
                    who = product(names, kernels, wires)
                    wanted.setdefault(case, {}).update(dict.fromkeys(who))
                    places.setdefault(case, place)
        yield from ((case, tuple(who), places[case]) for case, who in wanted.items())


def preset(kind: str, name: str) -> BenchRun:
    """One of the runs that come with the library: "quick" or "standard"."""
    text = (
        resources.files("tilewise.tools.bench").joinpath("cases", f"{kind}_{name}.toml").read_text()
    )
    return _run(text, f"preset {name}", kind)


def read_cases(path: Path, kind: str) -> BenchRun:
    """The run that a TOML file describes."""
    try:
        return _run(path.read_text(encoding="utf-8"), str(path), kind)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML: {error}") from None


def _run(text: str, where: str, kind: str) -> BenchRun:
    table = tomllib.loads(text)
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
    places = _places(text, where, len(grids))
    lists = tuple(_grid(grid, place) for grid, place in zip(grids, places, strict=True))
    return BenchRun(kind, made, lists, places)


def _places(text: str, where: str, count: int) -> tuple[Place, ...]:
    """Where each [[grid]] and its fields begin; tomllib does not tell."""
    found: list[dict[str, int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*\[\[\s*grid", line):
            found.append({})
        elif found and (field := re.match(r"\s*[\"']?([\w-]+)[\"']?\s*=", line)):
            found[-1].setdefault(field[1], number)
    found += [{}] * (count - len(found))  # grids that are written inline
    return tuple(Place(where, lines) for lines in found[:count])


def _grid(grid: Mapping[str, Any], place: Place) -> dict[str, Values]:
    lists: dict[str, Values] = {}
    for name in grid:
        at = f"{place.file}, line {place.lines.get(name, '?')}"
        _known([name], FIELDS, f"{at}, grid")
    for name, values in grid.items():
        values = tuple(values) if isinstance(values, list) else (values,)
        wanted = (int, float) if FIELDS[name] is float else FIELDS[name]
        if not values or not all(isinstance(v, wanted) and v is not True for v in values):
            at = f"{place.file}, line {place.lines.get(name, '?')}"
            raise ValueError(
                f"{at}, grid: {name} ({list(values)}) must be a list of {FIELDS[name].__name__}"
            )
        lists[name] = values
    return lists


def _known(table: Iterable[str], names: Iterable[str], where: str) -> None:
    for name in table:
        if name not in names:
            raise ValueError(f"{where}: {name!r} is not known; take one of {', '.join(names)}")


def _cases(kind: str, lists: dict[str, Values]) -> Iterator[BenchCase]:
    """All combinations, the mask changing slowest so that a stopped run has whole masks."""
    lists = {"mask": masks.NAMES, **lists}
    if kind == "network":
        lists = {"hosts": (4,), "ranks_per_host": (1,), "mbit": (50.0,), **lists}
    for axis in lists.keys() & HAVE.keys():
        if not any(set(re.findall(r"\w+", text)) & set(HAVE[axis]) for text in lists["mask"]):
            raise ValueError(
                f"{axis} is of {', '.join(HAVE[axis])}; mask ({', '.join(lists['mask'])}) names "
                f"none of them: add one, or leave {axis} out"
            )
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
    axes = Axes(**{axis: words.pop(axis) for axis in HAVE if axis in words})
    axes.check()
    fields["axes"] = axes.of(words["mask"])
    unused = [name for name in words if name not in known_fields(BenchCase)]
    if unused:
        raise ValueError(f"{', '.join(unused)}: not of {kind}; leave it out")
    if "num_tokens" not in fields and "num_tokens" not in words:
        raise ValueError("a grid needs num_tokens or tokens_per_rank")
    return BenchCase(**{**words, **fields})


Plan = list[tuple[BenchCase, tuple[Contender, ...]]]


def contenders_of(module: str) -> tuple[Contender, ...]:
    """What the contenders() of a module, or of a file that ends in .py, returns."""
    found = getattr(module_of(module), "contenders", None)
    if not callable(found):
        raise ValueError(f"{module} is no module with a function contenders()")
    listed: Any = found()
    strange = [type(one).__name__ for one in listed if not isinstance(one, Contender)]
    if strange:
        raise ValueError(f"{module}: {', '.join(strange)} is not a tilewise.bench Contender")
    return tuple(listed)


def entered(run: BenchRun, others: Sequence[Contender] = ()) -> Plan:
    """The cases of a run with their contenders: those named, or all that there are.

    Kernels and strategies of files outside the package are checked here, once for each kind of
    case, before anything runs.

    Args:
        others: take part too; where some of them are named, only those.
    """
    by_name = {one.name: one for one in others}
    everyone = [*PROVIDERS, *DENSE, *OTHERS] if run.kind == "kernels" else [*STRATEGIES]

    def enter(who: Who, case: BenchCase) -> Contender:
        name, *way = who
        if name in by_name:
            return by_name[name]
        try:
            found = kernel(name) if run.kind == "kernels" else strategy(name, *way)
        except ValueError as error:
            others_too = f"; and {', '.join(by_name)}" if by_name else ""
            raise ValueError(f"{error}{others_too}") from None
        found.check(case)
        return found

    def chosen(names: Sequence[Who]) -> tuple[Who, ...]:
        ways = dict.fromkeys(who[1:] for who in names)
        if any(not name for name, *_ in names):
            names = tuple((name, *way) for name, way in product(everyone, ways))
        if by_name.keys() & {name for name, *_ in names}:
            return tuple(names)
        return (*names, *((name, "", "") for name in by_name))

    plan: Plan = []
    for case, names, place in run.cases():
        with place.named():
            plan.append((case, tuple(enter(who, case) for who in chosen(names))))
    return plan

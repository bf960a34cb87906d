"""Cases of a run, and who takes part in each, from a preset, a TOML file and filters."""

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
from typing import Any, NamedTuple

from tilewise import masks
from tilewise.arguments import require_known, require_range
from tilewise.expressions import WIRE, read_heads, read_plan
from tilewise.kernels.registry import PROVIDERS
from tilewise_tools.bench.case import KINDS, LAYOUTS, BenchCase, LabNetwork, Timing, known_fields
from tilewise_tools.bench.contender import Contender
from tilewise_tools.bench.our_kernels import DENSE, kernel
from tilewise_tools.bench.our_strategies import HYBRIDS, STRATEGIES, Strategy, strategy
from tilewise_tools.mask_report.named import HAVE, Axes
from tilewise_tools.outside import module_of

Values = tuple[Any, ...]


class GridField(NamedTuple):
    """A list that a grid may have: in TOML of this type, as an option of this help."""

    of: type
    about: str


FIELDS: Mapping[str, GridField] = MappingProxyType(
    {
        "mask": GridField(
            str, "A pattern, 'causal & window(63, 0)' or FILE.py:name; may be repeated."
        ),
        "contender": GridField(str, "A name, a call, plan.json or FILE.py:name."),
        "kernel": GridField(str, "A name of tilewise doctor, module:name or FILE.py:name."),
        "wire": GridField(str, WIRE),
        "ulysses_degree": GridField(int, "Of hierarchical and ulysses_...; else a node's ranks."),
        "num_tokens": GridField(int, "Of the whole sequence; as an option also 4K or 1M."),
        "tokens_per_rank": GridField(int, "Instead of --num-tokens; as an option also 4K."),
        "world_size": GridField(int, "Ranks: local processes."),
        "hosts": GridField(int, "Hosts of the network lab."),
        "ranks_per_host": GridField(int, "Ranks on each."),
        "mbit": GridField(float, "Of a host's NIC, each way."),
        "network": GridField(str, "lab or limited."),
        "heads": GridField(str, "Query and KV heads, as in 32:8."),
        "head_dim": GridField(int, "Elements of a head."),
        "dtype": GridField(str, "float64, float32, bfloat16 or float16."),
        "pass": GridField(str, "forward, backward or both."),
        "layout": GridField(str, f"{', '.join(LAYOUTS)}."),
        "seed": GridField(int, "Of masks and inputs."),
        "device": GridField(str, "cpu or cuda."),
        "block": GridField(int, "Tokens of a block, of block patterns."),
        "density": GridField(float, "Of block-sparse patterns, up to 1."),
        "window": GridField(int, "Tokens, of sliding windows."),
        "cap": GridField(int, "Tokens of the longest document."),
        "corpus": GridField(str, "Of document lengths, or a CSV."),
        "mix": GridField(float, "Share of tokens in documents of 8K to 30K."),
        "block_mean": GridField(int, "Mean tokens of variable blocks."),
        "draw": GridField(str, "tilewise, or longca: its sampler's documents."),
    }
)
LENGTHS = "num_tokens", "tokens_per_rank"
"""Each says how long the sequence is, so one given takes the place of the other."""


ContenderKey = tuple[str, str, str, int]
"""A contender's name, its kernel, its wire and its Ulysses degree. "" and 0 stand for the
contender's own, or none.
"""


@dataclass(frozen=True)
class Grid:
    """The lists of one [[grid]], and where they stand in its file, for messages.

    Args:
        lines: of its fields that no option has replaced.
    """

    lists: Mapping[str, Values]
    file: str
    lines: Mapping[str, int]

    @contextmanager
    def named(self) -> Iterator[None]:
        """Add to errors of the block the line of the field that they are about."""
        try:
            yield
        except ValueError as error:
            said = re.sub(r"\bnum_(kv_)?heads\b", "heads", str(error))
            words_of_error = re.findall(r"^\w+|\w+(?= \()", said)
            line = next((self.lines[word] for word in words_of_error if word in self.lines), None)
            place = "" if line is None else f"{self.file}, line {line}: "
            raise ValueError(f"{place}{error}") from None

    def narrowed(self, chosen: Mapping[str, Values]) -> Grid:
        """Return this grid with these lists in place of its own."""
        replaced = {*chosen, *(LENGTHS if chosen.keys() & LENGTHS else ())}
        kept_lists = {name: values for name, values in self.lists.items() if name not in replaced}
        lines = {name: line for name, line in self.lines.items() if name not in chosen}
        return Grid({**kept_lists, **chosen}, self.file, lines)


@dataclass(frozen=True)
class BenchRun:
    """The cases that one command measures."""

    kind: str
    timing: Timing
    grids: tuple[Grid, ...]

    def narrowed(self, lists: Mapping[str, Sequence[Any] | None]) -> BenchRun:
        """Return the run with lists in place of all grids' own; empty ones leave them as
        they are.
        """
        chosen = {name: tuple(values) for name, values in lists.items() if values}
        return replace(self, grids=tuple(grid.narrowed(chosen) for grid in self.grids))

    def cases(self) -> Iterator[tuple[BenchCase, tuple[ContenderKey, ...], Grid]]:
        """Every case once, with its contenders as named; none named: all there are."""
        contenders_by_case: dict[BenchCase, tuple[dict[ContenderKey, None], Grid]] = {}
        for grid in self.grids:
            lists = dict(grid.lists)
            kernels, names = lists.pop("kernel", ("",)), lists.pop("contender", ("",))
            wires: Values = ("",)
            degrees: Values = ()
            if self.kind == "kernels":  # a kernel is a contender there, and a wire no field
                names = (*filter(None, names), *filter(None, kernels)) or ("",)
                kernels = ("",)
            else:
                wires, degrees = lists.pop("wire", wires), lists.pop("ulysses_degree", degrees)
            with grid.named():
                _check_degrees(degrees, names)
                for case in _cases(self.kind, lists):
                    keys = product(names, kernels, wires, degrees or (0,))
                    contenders_by_case.setdefault(case, ({}, grid))[0].update(dict.fromkeys(keys))
        yield from ((case, tuple(keys), grid) for case, (keys, grid) in contenders_by_case.items())


def _check_degrees(degrees: Sequence[int], names: Sequence[str]) -> None:
    """Refuse degrees that are none, or that no contender has."""
    for degree in degrees:
        require_range("ulysses_degree", degree, 2)
    if degrees and all(name and name not in HYBRIDS for name in names):
        raise ValueError(
            f"ulysses_degree is of {', '.join(HYBRIDS)}; strategy ({', '.join(names)}) names none "
            "of them: add one, or leave ulysses_degree out"
        )


def preset(kind: str, name: str) -> BenchRun:
    """One of the runs that come with the library: "quick" or "standard"."""
    text = (
        resources.files("tilewise_tools.bench").joinpath("cases", f"{kind}_{name}.toml").read_text()
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
        run_timing = Timing(**timing)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}, timing: {error}") from None
    lines = _lines(text)
    lines += [{}] * (len(grids) - len(lines))  # grids that are written inline
    run_grids = (
        _grid(grid, where, field_lines) for grid, field_lines in zip(grids, lines, strict=False)
    )
    return BenchRun(kind, run_timing, tuple(run_grids))


def _lines(text: str) -> list[dict[str, int]]:
    """Return the lines on which the fields of each [[grid]] stand, which tomllib does not tell."""
    lines_by_grid: list[dict[str, int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*\[\[\s*grid", line):
            lines_by_grid.append({})
        elif lines_by_grid and (field := re.match(r"\s*[\"']?([\w-]+)[\"']?\s*=", line)):
            lines_by_grid[-1].setdefault(field[1], number)
    return lines_by_grid


def _grid(grid: Mapping[str, Any], file: str, lines: Mapping[str, int]) -> Grid:
    lists: dict[str, Values] = {}
    for name, values in grid.items():
        place = f"{file}, line {lines.get(name, '?')}, grid"
        _known([name], FIELDS, place)
        value_type = FIELDS[name].of
        values = tuple(values) if isinstance(values, list) else (values,)
        accepted_types = (int, float) if value_type is float else value_type
        if not values or not all(isinstance(v, accepted_types) and v is not True for v in values):
            raise ValueError(
                f"{place}: {name} ({list(values)}) must be a list of {value_type.__name__}"
            )
        lists[name] = values
    return Grid(lists, file, lines)


def _known(table: Iterable[str], names: Iterable[str], where: str) -> None:
    for name in table:
        require_known(f"{where}:", name, names)


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
    network = LabNetwork()
    if kind == "network":
        sizes = words.pop("hosts"), words.pop("ranks_per_host"), float(words.pop("mbit"))
        network = LabNetwork(words.pop("network", "lab"), *sizes)
    elif kind == "strategies":
        require_range("world_size", world_size := words.pop("world_size", 4))
        network = LabNetwork("loopback", 1, world_size)
    if (per_rank := words.pop("tokens_per_rank", None)) is not None:
        words["num_tokens"] = per_rank * network.world_size
    if (heads := words.pop("heads", None)) is not None:
        words["num_heads"], words["num_kv_heads"] = read_heads(heads)
    if "pass" in words:
        words["which"] = words.pop("pass")
    axes = Axes(**{axis: words.pop(axis) for axis in HAVE if axis in words})
    axes.check()
    run_fields = {"kind": kind, "network": network, "world_size": network.world_size}
    unused = [name for name in words if name in run_fields or name not in known_fields(BenchCase)]
    if unused:
        raise ValueError(f"{', '.join(unused)}: not of {kind}; leave it out")
    if "num_tokens" not in words:
        raise ValueError("a grid needs num_tokens or tokens_per_rank")
    return BenchCase(**run_fields, **words, axes=axes.of(words["mask"]))


Plan = list[tuple[BenchCase, tuple[Contender, ...]]]


def contenders_of(module: str) -> tuple[Contender, ...]:
    """Return what contenders() of a module, or of a file that ends in .py, returns."""
    contenders_function = getattr(module_of(module), "contenders", None)
    if not callable(contenders_function):
        raise ValueError(f"{module} is no module with a function contenders()")
    contenders: Any = contenders_function()
    wrong_types = [
        type(contender).__name__ for contender in contenders if not isinstance(contender, Contender)
    ]
    if wrong_types:
        raise ValueError(f"{module}: {', '.join(wrong_types)} is not a tilewise.bench Contender")
    return tuple(contenders)


def entered(run: BenchRun, others: Sequence[Contender] = ()) -> Plan:
    """The cases of a run with their contenders: those named, or all that there are.

    Kernels and strategies of files outside the package are checked here, once for each kind of
    case, before anything runs.

    Args:
        others: take part too; where some of them are named, only those.
    """
    by_name = {contender.name: contender for contender in others}
    all_names = [*PROVIDERS, *DENSE] if run.kind == "kernels" else [*STRATEGIES]

    def enter(key: ContenderKey, case: BenchCase) -> Contender:
        name, own_kernel, wire, degree = key
        if name in by_name:
            return by_name[name]
        try:
            entered_contender = (
                kernel(name) if run.kind == "kernels" else strategy(name, own_kernel, wire, degree)
            )
        except ValueError as error:
            others_too = f"; and {', '.join(by_name)}" if by_name else ""
            raise ValueError(f"{error}{others_too}") from None
        entered_contender.check(case)
        return entered_contender

    def chosen(names: Sequence[ContenderKey]) -> tuple[ContenderKey, ...]:
        kernels_and_wires = dict.fromkeys(who[1:] for who in names)
        if any(not name for name, *_ in names):
            names = [
                (name, *kernel_and_wire)
                for name, kernel_and_wire in product(all_names, kernels_and_wires)
            ]
        if by_name.keys() & {name for name, *_ in names}:
            return tuple(names)
        return (*names, *((name, "", "", 0) for name in by_name))

    plan: Plan = []
    for case, names, grid in run.cases():
        with grid.named():
            contenders = [enter(who, case) for who in chosen(names)]
            unique_contenders = (
                contender
                for i, contender in enumerate(contenders)
                if contender not in contenders[:i]
            )
            plan.append((case, tuple(unique_contenders)))
    _check_ranks(plan)
    return plan


def _check_ranks(plan: Plan) -> None:
    """Refuse a strategy written as a call for a number of ranks that none of its cases has."""
    sizes_by_text: dict[str, set[int]] = {}
    for case, contenders in plan:
        for contender in contenders:
            if isinstance(contender, Strategy) and "(" in contender.text:
                sizes_by_text.setdefault(contender.text, set()).add(case.world_size)
    for text, sizes in sizes_by_text.items():
        if (ranks := read_plan(text).world_size) not in sizes:
            raise ValueError(
                f"strategy {text} is for {ranks} ranks, but world_size is "
                f"{', '.join(map(str, sorted(sizes)))}; write it for as many"
            )

"""Who takes part in a run: names become contenders, other modules may add theirs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from tilewise.kernels.registry import PROVIDERS
from tilewise.tools.bench.case import BenchCase
from tilewise.tools.bench.contender import Contender
from tilewise.tools.bench.grid import BenchRun
from tilewise.tools.bench.our_kernels import DENSE, kernel
from tilewise.tools.bench.our_strategies import STRATEGIES, strategy

Plan = list[tuple[BenchCase, tuple[Contender, ...]]]


def contenders_of(module: str) -> tuple[Contender, ...]:
    """What a module's contenders() returns; modules of the working directory are found too.

    Raises:
        ValueError: if there is no such module or function, or something else comes back.
    """
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
    Raises:
        ValueError: if a name is not known; it lists those that are.
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

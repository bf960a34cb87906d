"""The names of the package: functions and classes, modules beside them, and the old names."""

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import tilewise as tw
from tilewise import lazy, plan_methods

MODULES = ("kernels", "layouts", "lengths", "masks", "plan", "strategies", "transport", "wire")
OLD_NAMES = dict(lazy.MOVED)


def test_the_listed_names_are_functions_and_classes():
    assert len(tw.__all__) == len(set(tw.__all__)) <= 40
    assert all(callable(getattr(tw, name)) for name in tw.__all__)
    assert {*tw.__all__, *MODULES} <= {*dir(tw)}
    assert all(isinstance(getattr(tw, name), ModuleType) for name in MODULES)


def test_type_checkers_see_the_names_that_are_found_later():
    tree = ast.parse(Path(tw.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and len(node.body) > 2)
    seen = {
        (alias.name, node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    seen.remove(("planning", "tilewise"))
    assert seen == {*lazy.LATER} and dict(seen).keys() <= {*tw.__all__}
    assert all(getattr(tw, name).__module__ == module for name, module in seen)


def test_methods_of_plan_are_the_functions():
    plan, mask, layout = tw.ring(4), tw.Causal(), tw.zigzag(16, 4)
    pruned = plan.pruned(mask, layout)
    assert pruned == plan_methods.prune(plan, mask, layout) != plan
    assert pruned.check(mask, layout) is None and plan.check() is None
    assert str(plan.program(1)) == str(plan_methods.lower(plan, 1))
    assert str(plan) == plan_methods.show(plan) and tw.plan.parse(str(plan)) == plan
    assert tw.Plan.from_json(plan.to_json()) == plan.from_json(plan.to_json()) == plan
    with pytest.raises(tw.plan.PlanError):
        plan.replaced("half a ring", plan.steps[:2]).check()


def test_names_that_have_moved_are_found_and_others_are_not():
    for name, module in OLD_NAMES.items():
        assert name not in tw.__all__ and getattr(tw, name) is not None, module
    assert tw.show is plan_methods.show and tw.kernel is tw.kernels.kernel
    with pytest.raises(AttributeError, match="has no attribute 'atention'"):
        _ = tw.atention
    with pytest.raises(ImportError):
        from tilewise import atention  # noqa: F401


@pytest.mark.parametrize("module", ["plan", "kernels", "transport", "planning", "compiler"])
def test_each_module_can_be_imported_first(module: str):
    command = f"from tilewise.{module} import *; import tilewise; tilewise.ring(2).check()"
    subprocess.run([sys.executable, "-c", command], check=True, timeout=120)


LATER = (
    *("batches", "context_parallel", "decoding", "exact", "integrations", "planning"),
    *("simulation", "tools", "verification"),
)
MOST_MODULES = 110


def test_import_brings_in_no_more_than_a_call_needs():
    """Beside `import torch`: the package without what is asked for later, numpy, nothing else."""
    program = """
import sys, torch
before = {*sys.modules}
import tilewise
print(*sorted({*sys.modules} - before))
"""
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    added = ran.stdout.split()
    of_others = {name for name in added if name.partition(".")[0] not in sys.stdlib_module_names}
    of_others -= {name for name in of_others if "cython" in name}  # numpy's, of no file
    assert {name.partition(".")[0] for name in of_others} <= {"numpy", "tilewise"}
    own = [name for name in added if name.partition(".")[0] == "tilewise"]
    assert 50 < len(own) <= MOST_MODULES
    later = {f"tilewise.{package}" for package in LATER}
    assert not {".".join(name.split(".")[:2]) for name in added} & later

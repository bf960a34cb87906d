"""Module paths that users import, and those that have moved: all give the same objects."""

import subprocess
import sys
from importlib import import_module

import pytest

MOVED = {
    "tilewise.tools": "tilewise_tools",
    "tilewise.tools.bench.contender": "tilewise_tools.bench.contender",
    "tilewise.tools.bench.results": "tilewise_tools.bench.results",
    "tilewise.tools.calibration.measure": "tilewise_tools.calibration.measure",
    "tilewise.tools.cli": "tilewise_tools.cli",
    "tilewise.tools.lab": "tilewise_tools.lab",
    "tilewise.tools.lab.comparison": "tilewise_tools.lab.comparison",
    "tilewise.tools.mask_report.figures": "tilewise_tools.mask_report.figures",
    "tilewise.tools.report.bench_report": "tilewise_tools.report.bench_report",
    "tilewise.tools.report.page": "tilewise_tools.report.page",
    "tilewise.tools.report.plan_report": "tilewise_tools.report.plan_report",
    "tilewise.verification": "tilewise_verify",
    "tilewise.verification.effective_mask": "tilewise_verify.effective_mask",
    "tilewise.verification.parity": "tilewise_verify.parity",
}


@pytest.mark.parametrize("old", MOVED)
def test_a_path_that_has_moved_gives_the_same_module(old: str):
    module = import_module(old)
    assert module is import_module(MOVED[old]) is sys.modules[old]
    assert module.__name__ == MOVED[old] and module.__spec__ is not None
    assert module.__spec__.name == MOVED[old]


def test_an_old_path_can_be_imported_first_and_finds_its_files():
    program = """
import tilewise.tools.report.page, tilewise.verification
from tilewise.tools.bench.grid import preset
import tilewise_tools.bench.grid, tilewise_tools.report.page, tilewise_verify
assert preset is tilewise_tools.bench.grid.preset
assert tilewise.tools is tilewise_tools and tilewise.verification is tilewise_verify
assert tilewise.tools.report.page is tilewise_tools.report.page
assert tilewise_tools.report.page.files("tilewise_tools.report").joinpath("page.css").is_file()
assert tilewise_tools.bench.grid.preset("kernels", "quick")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_module_that_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"tilewise_tools\.nothing"):
        import_module("tilewise.tools.nothing")

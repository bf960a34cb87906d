"""Module paths that users import, and those that have moved: all give the same objects."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INTEGRATIONS = {  # below tilewise.integrations
    "accelerate": "transformers.accelerate",
    "automodel": "slots.automodel",
    "hf": "transformers.hf",
    "megatron": "slots.megatron",
    "positions": "data.positions",
    "torchtitan": "slots.torchtitan",
    "transformer_engine": "slots.transformer_engine",
}
RING_FLASH_ATTN = ("", ".adapters", ".adapters.hf_adapter", ".functions", ".utils")
TOOLS = (
    *("", ".bench.contender", ".bench.results", ".calibration.measure", ".cli", ".lab"),
    *(".lab.comparison", ".mask_report.figures", ".report.bench_report", ".report.page"),
    ".report.plan_report",
)
VERIFICATION = ("", ".effective_mask", ".parity")
MOVED = {
    **{f"tilewise.integrations.{a}": f"tilewise.integrations.{b}" for a, b in INTEGRATIONS.items()},
    **{
        f"tilewise.compat.ring_flash_attn{x}": f"tilewise.integrations.slots.ring_flash_attn{x}"
        for x in RING_FLASH_ATTN
    },
    **{f"tilewise.tools{x}": f"tilewise_tools{x}" for x in TOOLS},
    **{f"tilewise.verification{x}": f"tilewise_verify{x}" for x in VERIFICATION},
}


STAYED = ("tilewise.integrations.data", "tilewise.integrations.diffusers")


@pytest.mark.parametrize("path", STAYED)
def test_a_path_of_a_folder_is_the_folder(path: str):
    module = import_module(path)
    assert module.__name__ == path and hasattr(module, "__path__")


@pytest.mark.parametrize("old", MOVED)
def test_a_path_that_has_moved_gives_the_same_module(old: str):
    module = import_module(old)
    assert module is import_module(MOVED[old]) is sys.modules[old]
    parent, _, name = old.rpartition(".")
    assert getattr(import_module(parent), name) is module
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


@pytest.mark.parametrize("page", ["README.md", *(str(p) for p in ROOT.glob("docs/**/*.md"))])
def test_pages_name_only_modules_that_there_are(page: str):
    named = set(re.findall(r"\b(?:from|import) (tilewise[\w.]*)", (ROOT / page).read_text()))
    for name in named:
        assert import_module(name), f"{page}: {name}"


def test_a_module_that_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"tilewise_tools\.nothing"):
        import_module("tilewise.tools.nothing")

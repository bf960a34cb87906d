"""axolotl finds tilewise where it looks for ring-flash-attn, by a plugin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

BASE = """
class BasePlugin:
    def register(self, cfg): raise AssertionError("the plugin's own is called")
    def pre_model_load(self, cfg): return "inherited"
"""
# A plugin is loaded and registered, and modules are imported, as axolotl 0.19 does.
PROGRAM = """
import importlib, inspect
module, _, name = "tilewise.integrations.axolotl.TilewisePlugin".rpartition(".")
plugin = getattr(importlib.import_module(module), name)()
plugin.register({"context_parallel_size": 2})
import ring_flash_attn.adapters.hf_adapter
from ring_flash_attn import (
    llama3_flash_attn_varlen_func, ring_flash_attn_func, update_ring_flash_attn_params
)
from ring_flash_attn.adapters.hf_adapter import (
    DATA_PARAMS, check_params, create_ring_flash_attention_forward, flash_attention_forward,
    substitute_hf_flash_attn
)
assert inspect.getmodule(ring_flash_attn_func).__name__.startswith("tilewise.")
ring_flash_attn.adapters.hf_adapter.create_ring_flash_attention_forward = None
from ring_flash_attn.adapters.hf_adapter import create_ring_flash_attention_forward as replaced
assert replaced is None
print(plugin.pre_model_load(None) if hasattr(plugin, "pre_model_load") else "alone")
"""


def run(program: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    paths = [str(x) for x in folders] + [x for x in sys.path if x]
    code = f"import sys; sys.path[:0] = {paths!r}\n{program}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_axolotls_imports_resolve_once_the_plugin_is_registered(tmp_path: Path):
    package = tmp_path / "axolotl" / "integrations"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "base.py").write_text(BASE)
    done = run(PROGRAM, tmp_path)
    assert done.stdout == "inherited\n", done.stderr


def test_the_module_can_be_imported_without_axolotl():
    done = run(PROGRAM)
    assert done.stdout == "alone\n", done.stderr


def test_a_plugin_that_comes_too_late_says_so(tmp_path: Path):
    (tmp_path / "ring_flash_attn.py").touch()
    done = run(f"import ring_flash_attn\n{PROGRAM}", tmp_path)
    assert "ValueError: ring_flash_attn itself has been imported already" in done.stderr

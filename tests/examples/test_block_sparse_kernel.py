"""The plug-in of a block-sparse kernel: exact, and it works on the blocks that a mask has."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tilewise as tw
from examples.block_sparse_kernel import BlockSparse, blocks_of, blocks_of_64
from tilewise.kernels.self_check import check_kernel
from tilewise.tiles.cover import tile_calls
from tilewise_tools.cli import app

EXAMPLE = Path(__file__).parents[2] / "examples" / "block_sparse_kernel.py"


@pytest.mark.parametrize("block", [2, 4, 64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_is_a_kernel(block: int, dtype: torch.dtype):
    check_kernel(BlockSparse(block), "cpu", dtype, 16)


def test_it_works_on_the_blocks_that_the_mask_has_and_no_others():
    table = torch.rand(6, 6, generator=torch.Generator().manual_seed(0)) < 0.3
    mask, rows = tw.masks.block_sparse(table, 64), torch.arange(6 * 64).numpy()
    (call,) = tile_calls(rows, rows, mask, whole_tile=True)
    worked = sum(allowed.numel() for _, _, allowed in blocks_of_64.block_rows(call))
    assert worked == int(table.sum()) * 64 * 64
    partly = torch.ones(5, 7, dtype=torch.bool).tril()
    assert blocks_of(partly, 4).tolist() == [[True, False], [True, True]]


def test_it_runs_as_a_program_and_in_the_benchmark(tmp_path: Path, capsys, monkeypatch):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert float(capsys.readouterr().out.split()[-1]) < 1e-12
    monkeypatch.setattr(sys, "path", [*sys.path])
    out = tmp_path / "rows.jsonl"
    words = "--mask block_sparse_uniform --block 64 --density 0.3 --num-tokens 256 --heads 4:2"
    words += (
        f" --head-dim 8 --dtype float64 --pass both --repeats 1 --kernel {EXAMPLE}:blocks_of_64"
    )
    ended = CliRunner().invoke(app, ["bench", "kernels", *words.split(), "-o", str(out)])
    sys.modules.pop(EXAMPLE.stem, None)
    assert ended.exit_code == 0, ended.output
    (row,) = map(json.loads, out.read_text().splitlines())
    assert (row["outcome"], row["is_exact"]) == ("ok", True)

"""The Trainer example: split training is unsplit training."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

EXAMPLE = Path(__file__).parents[2] / "examples" / "hf_trainer.py"
LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_the_trainers_losses_are_the_unsplit_ones(num_ranks: int, tmp_path: Path):
    command = [sys.executable, *LAUNCH, str(num_ranks), str(EXAMPLE), "--steps", "6"]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=280, check=True, cwd=tmp_path
    )
    pairs = re.findall(r"loss ([\d.]+) split, ([\d.]+) whole", ran.stdout)
    assert len(pairs) == 6
    assert all(float(a) == pytest.approx(float(b), rel=1e-5) for a, b in pairs)
    assert float(pairs[-1][0]) < float(pairs[0][0])

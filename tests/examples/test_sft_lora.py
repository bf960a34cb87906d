"""The example of TRL's SFT with packing and LoRA has the same losses at any cp_size."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="needs trl")
pytest.importorskip("peft", reason="needs peft")

ROOT = Path(__file__).resolve().parents[2]


def losses(folder: Path, *command: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"^losses (.*)$", done.stdout, re.MULTILINE)
    assert found, done.stdout
    return [float(x) for x in found[1].split()]


@pytest.mark.slow
def test_two_ranks_have_the_losses_of_one_process(tmp_path: Path):
    example = str(ROOT / "examples" / "sft_lora.py")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    want = losses(tmp_path, example)
    got = losses(tmp_path, *launch, example, "--cp-size", "2")
    assert want[0] > want[-1]
    assert got == pytest.approx(want, rel=1e-4)

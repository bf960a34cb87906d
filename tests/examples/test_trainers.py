"""The examples of TRL's SFT and GRPO have the same losses and rewards at any cp_size."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="needs trl")
pytest.importorskip("peft", reason="needs peft")

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def numbers(folder: Path, *command: str | Path, env: dict[str, str] | None = None) -> list[float]:
    """What an example prints last: losses or rewards."""
    options = {"cwd": folder, "env": os.environ | (env or {}), "timeout": 240}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"^(?:losses|rewards) (.*)$", done.stdout, re.MULTILINE)
    assert found, done.stdout
    return [float(x) for x in found[1].split()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft_lora.py", "grpo.py"])
def test_two_ranks_have_the_numbers_of_one_process(name: str, tmp_path: Path):
    want = numbers(tmp_path, EXAMPLES / name)
    got = numbers(tmp_path, *TORCHRUN, "2", EXAMPLES / name, "--cp-size", "2")
    assert len(set(want)) > 1
    assert got == pytest.approx(want, rel=1e-4)


def launched(config: Path) -> dict[str, str]:
    """The environment that `accelerate launch` makes of a file, for processes without a GPU."""
    before = dict(os.environ)
    parsed = launch_command_parser().parse_args(["--config_file", str(config), "script.py"])
    made = prepare_multi_gpu_env(_validate_launch_command(parsed)[0])
    changed = {name: value for name, value in made.items() if before.get(name) != value}
    return changed | {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}


@pytest.mark.slow
def test_sizes_are_read_from_what_accelerate_launch_makes_of_the_file(tmp_path: Path):
    env = launched(EXAMPLES / "context_parallel.yaml")
    assert (env["PARALLELISM_CONFIG_CP_SIZE"], env["ACCELERATE_USE_FSDP"]) == ("2", "true")
    want = numbers(tmp_path, *TORCHRUN, "2", EXAMPLES / "sft_lora.py")  # two data-parallel ranks
    got = numbers(tmp_path, *TORCHRUN, "4", EXAMPLES / "sft_lora.py", env=env)
    assert got == pytest.approx(want, rel=1e-4)

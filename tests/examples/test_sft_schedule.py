"""The example of scheduled fine-tuning: it trains, stops and resumes on the unsplit curve."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes.launcher import run_processes

from examples import sft_schedule

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--tokens-per-rank", "48"]


def stop_and_resume(rank: int, folder: str) -> list[dict]:
    written = []
    for flags in (["--steps", "2"], ["--steps", "4", "--resume"]):
        sft_schedule.main([*SMALL, "--workers", "0", "--out", folder, *flags])
        written.append(json.loads((Path(folder) / "losses.json").read_text()))
    return written


def test_it_stops_and_resumes_on_the_curve_of_unsplit_training(tmp_path: Path):
    stopped, resumed = run_processes(2, stop_and_resume, str(tmp_path))[0]
    assert (stopped["steps"], resumed["steps"]) == ([0, 2], [2, 4])
    for written in (stopped, resumed):
        assert len(written["split"]) == 2
        assert written["split"] == pytest.approx(written["whole"], rel=1e-12)
    assert stopped["split"][0] > resumed["split"][-1]


@pytest.mark.slow
def test_workers_plan_under_torchrun_on_an_odd_number_of_ranks(tmp_path: Path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    example = [*launch, str(ROOT / "examples" / "sft_schedule.py"), *SMALL, "--out", str(tmp_path)]
    subprocess.run([*example, "--steps", "3"], check=True, timeout=400)
    subprocess.run([*example, "--steps", "5", "--resume"], check=True, timeout=400)
    written = json.loads((tmp_path / "losses.json").read_text())
    assert written["steps"] == [3, 5]
    assert written["split"] == pytest.approx(written["whole"], rel=1e-12)

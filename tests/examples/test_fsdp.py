"""The FSDP2 x context parallel example: it trains, stops and resumes on the unsplit curve."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes.launcher import run_processes

from examples import fsdp_cp

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--num-tokens", "131"]


def curve(folder: Path, steps: list[int]) -> dict:
    """What the last run wrote, which must be that of these steps."""
    written = json.loads((folder / "losses.json").read_text())
    assert written["steps"] == steps
    assert len(written["split"]) == len(written["whole"]) == steps[1] - steps[0]
    assert written["split"] == pytest.approx(written["whole"], rel=1e-12)
    assert written["largest_parameter_difference"] < 1e-9
    return written


def stop_and_resume(rank: int, folder: str) -> tuple[dict, dict]:
    args = [*SMALL, "--out", folder]
    fsdp_cp.main([*args, "--steps", "2"])
    stopped = curve(Path(folder), [0, 2])
    fsdp_cp.main([*args, "--steps", "4", "--resume"])
    return stopped, curve(Path(folder), [2, 4])


def test_it_stops_and_resumes_on_the_curve_of_unsplit_training(tmp_path: Path):
    stopped, resumed = run_processes(4, stop_and_resume, str(tmp_path))[0]
    assert stopped["split"][0] > stopped["split"][1] > resumed["split"][-1]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_curve_tells_whether_the_optimizer_was_restored(tmp_path: Path):
    way, flags = fsdp_cp.Unsplit(), [*SMALL, "--out", str(tmp_path), "--no-compare"]
    fsdp_cp.main([*flags, "--steps", "2"])
    args = fsdp_cp.arguments(flags)
    whole = fsdp_cp.train(*fsdp_cp.start(way, args), way, range(4), args)[2:]
    curves = {}
    for forgets in (False, True):
        model, optimizer = fsdp_cp.start(way, args)
        assert fsdp_cp.resume(model, optimizer, tmp_path) == 2
        if forgets:
            optimizer.state.clear()
        curves[forgets] = fsdp_cp.train(model, optimizer, way, range(2, 4), args)
    assert curves[False] == whole
    assert curves[True][0] == whole[0] and abs(curves[True][1] - whole[1]) > 1e-4


@pytest.mark.slow
def test_it_resumes_on_another_mesh_under_torchrun(tmp_path: Path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    example = [*launch, str(ROOT / "examples" / "fsdp_cp.py"), *SMALL, "--out", str(tmp_path)]
    runs = {(0, 2): ["--cp", "2"], (2, 4): ["--cp", "4", "--resume"]}
    for (start, stop), options in runs.items():
        command = [*example, "--steps", str(stop), *options]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
        curve(tmp_path, [start, stop])


def test_resuming_without_a_checkpoint_is_refused(tmp_path: Path):
    with pytest.raises(SystemExit, match="no checkpoint in"):
        fsdp_cp.main(["--resume", "--out", str(tmp_path)])

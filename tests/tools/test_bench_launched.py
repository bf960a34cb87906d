"""The benchmark in a world that torchrun made: on hosts of the lab, else two agents here."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tilewise_tools.bench.results import read_results
from tilewise_tools.lab import Lab
from tilewise_tools.lab.site import missing

ROOT = Path(__file__).resolve().parents[2]
HAS_LAB = missing() is None
BENCH = [
    *("bench", "strategies", "--quick", "--num-tokens", "96", "--heads", "4:2", "--head-dim", "8"),
    *(
        "--dtype",
        "float64",
        "--repeats",
        "1",
        "--mask",
        "causal",
        "--mask",
        "causal & window(9, 0)",
    ),
    *("--strategy", "ring", "--strategy", "all_gather"),
]
SAME = (
    *("contender", "mask", "num_tokens", "world_size", "pass", "outcome", "layout_used", "plan"),
    *("bytes_by_link", "messages_by_rank", "volume_bytes_max_rank", "pairs", "is_exact"),
)


def launched(words: list[str], *, hosts: int = 2, ranks: int = 1) -> list[subprocess.Popen[str]]:
    """One torchrun on each host, ended."""
    environment = dict(os.environ, PYTHONPATH=f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}")
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(hosts, ranks, mbit=400)) if HAS_LAB else None
        address = "10.77.0.1" if lab else "127.0.0.1"
        started = []
        for host in range(hosts):
            where = ["ip", "netns", "exec", lab.site.host(host)] if lab else []
            run = [*(sys.executable, "-m", "torch.distributed.run"), f"--nnodes={hosts}"]
            run += [f"--node-rank={host}", f"--nproc-per-node={ranks}", "-m", "tilewise", *words]
            run[3:3] = [f"--master-addr={address}", "--master-port=29571"]
            nic = {"GLOO_SOCKET_IFNAME": "eth0" if lab else "lo"}
            started.append(
                subprocess.Popen(
                    [*where, *run],
                    env=environment | nic,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        for process in started:
            process.communicate(timeout=240)
        return started


@pytest.mark.slow
def test_two_hosts_give_the_rows_of_a_local_run_and_resume(tmp_path: Path):
    path, local = tmp_path / "r.jsonl", tmp_path / "local.jsonl"
    bad = ["--also", "support.bench_contenders"]
    dying = [*BENCH, "--strategy", "dies", *bad, "-o", str(path)]
    assert [process.returncode for process in launched(dying)] == [0, 0]
    rows = read_results(path).rows
    assert [(row["network"], row["hosts"]) for row in rows] == [("cluster", 2)] * 6
    dead = [row for row in rows if row["contender"] == "dies"]
    assert {(row["outcome"], row["message"]) for row in dead} == {
        ("failed", "rank 1: the process ended without an answer")
    }
    before = path.read_bytes()
    assert [process.returncode for process in launched(dying)] == [0, 0]
    assert path.read_bytes() == before

    run = [sys.executable, "-m", "tilewise", *BENCH, "--world-size", "2", "-o", str(local)]
    subprocess.run([*run, "--json"], check=True, capture_output=True, timeout=200)
    wanted = {json.dumps([row[name] for name in SAME]) for row in read_results(local).rows}
    assert {json.dumps([row[name] for name in SAME]) for row in rows if row not in dead} == wanted
    assert all(row["is_exact"] for row in rows if row not in dead)


@pytest.mark.slow
def test_bad_input_in_a_launched_world_ends_all_ranks():
    ended = launched([*BENCH, "--world-size", "3", "-o", os.devnull], hosts=1, ranks=2)
    assert ended[0].returncode != 0

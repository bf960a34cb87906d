"""The network lab: what it makes, counts and removes. Where it cannot be made, the reason."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tilewise.transport.nodes import host_digest
from tilewise.transport.processes import RankError
from tilewise_tools.lab import Lab, LabError, clean, site
from tilewise_tools.lab.lab import RECORDS
from tilewise_tools.lab.site import missing

REASON = missing()
needs_lab = pytest.mark.skipif(REASON is not None, reason=f"no network lab: {REASON}")
NAMESPACES = Path("/run/netns")


def made_by(pid: int) -> set[str]:
    """The namespaces and records of a process's labs."""
    places = [*NAMESPACES.glob(f"tilewise-{pid}-*"), *RECORDS.glob(f"tilewise-{pid}-*")]
    return {path.name for path in places}


def send_to_the_next(rank: int, num_bytes: int) -> tuple[int, int]:
    n = dist.get_world_size()
    received = torch.empty(num_bytes, dtype=torch.uint8)
    work = dist.irecv(received, (rank - 1) % n)
    dist.send(torch.full_like(received, rank), (rank + 1) % n)
    assert work is not None
    work.wait()
    return int(received[0]), int(received[-1])


@needs_lab
def test_what_ranks_send_is_counted_at_their_hosts_ports():
    with Lab(3, mbit=400) as lab:
        before = lab.counters()
        assert lab.run(send_to_the_next, 2_000_000) == [(2, 2), (0, 0), (1, 1)]
        after = lab.counters()
        for host in range(3):
            sent = after[host].sent_bytes - before[host].sent_bytes
            received = after[host].received_bytes - before[host].received_bytes
            assert 2_000_000 < sent < 2_040_000
            assert 2_000_000 < received < 2_040_000
        assert len(made_by(os.getpid())) == 5  # three hosts, the switch, the record
    assert not made_by(os.getpid())


@needs_lab
def test_ranks_of_one_host_do_not_use_its_nic():
    with Lab(2, 2, mbit=400) as lab:
        before = lab.counters()
        assert lab.run(send_to_the_next, 2_000_000) == [(3, 3), (0, 0), (1, 1), (2, 2)]
        after = lab.counters()
    # Of four messages two cross: from rank 1 to 2 and from 3 to 0.
    sent = [b.sent_bytes - a.sent_bytes for a, b in zip(before, after, strict=True)]
    assert all(2_000_000 < num_bytes < 2_040_000 for num_bytes in sent)


def send_and_time(rank: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    send_to_the_next(rank, 1_000_000)
    return time.perf_counter() - start


def host_of(rank: int) -> str:
    return host_digest().hex()


@needs_lab
def test_ranks_know_who_shares_their_host():
    with Lab(2, 2) as lab:
        first, second, third, fourth = lab.run(host_of)
    assert first == second != third == fourth


@needs_lab
def test_a_nic_is_no_faster_than_it_should_be():
    with Lab(2, mbit=40) as lab:
        seconds = lab.run(send_and_time)
    # A full bucket lets 160 kB pass at once.
    assert min(seconds) >= 0.95 * 8 * (1_000_000 - 160_000) / 40e6


def fail_on_one(rank: int) -> None:
    if rank == 1:
        raise KeyError("rank one has lost its key")
    dist.barrier()


@needs_lab
def test_an_exception_on_a_rank_is_raised_here_and_the_lab_goes_on():
    with Lab(2, mbit=400) as lab:
        with pytest.raises(RankError, match=r"rank 1: (.|\n)*rank one has lost its key"):
            lab.run(fail_on_one, timeout_seconds=30)
        assert lab.run(send_to_the_next, 10) == [(1, 1), (0, 0)]


def die_on_one(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@needs_lab
def test_a_rank_that_dies_holds_nobody_up():
    expected = "rank 1: the process ended without an answer"
    with Lab(2, mbit=400) as lab, pytest.raises(RankError, match=expected):
        lab.run(die_on_one, timeout_seconds=30)


KILLED = """
import os, signal, sys
from tilewise_tools.lab import Lab
with Lab(2) as lab:
    print(lab.site.name, flush=True)
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()
"""


@needs_lab
def test_what_a_killed_process_left_is_removed_and_nothing_else():
    alive = subprocess.Popen(
        [sys.executable, "-c", KILLED, "stay"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    bystander = f"tilewise-{os.getpid()}-bystander"
    subprocess.run(["ip", "netns", "add", bystander], check=True)
    try:
        assert alive.stdin is not None and alive.stdout is not None
        kept = alive.stdout.readline().strip()
        killed = subprocess.run(
            [sys.executable, "-c", KILLED, "kill"], capture_output=True, text=True
        )
        name = killed.stdout.strip()
        assert killed.returncode == -signal.SIGKILL
        assert (NAMESPACES / f"{name}-switch").exists()
        assert name in clean()
        assert not (NAMESPACES / f"{name}-switch").exists()
        assert not (RECORDS / f"{name}.json").exists()
        assert (NAMESPACES / f"{kept}-switch").exists()
        assert (NAMESPACES / bystander).exists()
        alive.communicate("")
        assert not (NAMESPACES / f"{kept}-switch").exists()
    finally:
        alive.kill()
        alive.wait()
        subprocess.run(["ip", "netns", "delete", bystander], check=True)


@needs_lab
def test_names_that_somebody_else_has_taken_are_left_alone():
    taken = f"tilewise-{os.getpid()}-0-host1"
    subprocess.run(["ip", "netns", "add", taken], check=True)
    try:
        with Lab(2) as lab:
            assert taken not in lab.site.namespaces
        assert made_by(os.getpid()) == {taken}
    finally:
        subprocess.run(["ip", "netns", "delete", taken], check=True)


@needs_lab
def test_a_lab_that_cannot_be_finished_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(site, "BURST", "no size")
    with pytest.raises(LabError, match="tc in tilewise-"), Lab(2):
        pass
    assert not made_by(os.getpid())


def test_a_lab_outside_its_block_is_refused():
    lab = Lab(2)
    with pytest.raises(ValueError, match="use it inside 'with Lab"):
        lab.counters()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"hosts": 0}, r"hosts \(0\) must be from 1 to 250"),
        ({"hosts": 2, "ranks_per_host": 0}, r"ranks_per_host \(0\) must be at least 1"),
        ({"hosts": 2, "mbit": 0.5}, r"mbit \(0.5\) must be from 1 to 100000"),
    ],
)
def test_numbers_out_of_range_are_refused(words: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        Lab(**words)  # pyright: ignore[reportArgumentType]


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(LabError, match="need root"), Lab(2):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LabError, match="'ip' is missing; install iproute2"), Lab(2):
        pass


@needs_lab
def test_a_record_names_its_owner_and_all_its_namespaces():
    with Lab(2) as lab:
        record = json.loads((RECORDS / f"{lab.site.name}.json").read_text())
        assert record["pid"] == os.getpid()
        assert set(record["namespaces"]) == {
            f"{lab.site.name}-{part}" for part in ("switch", "host0", "host1")
        }

"""The races that test_races.py looks for are found: each seed changes one line."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import pytest
from cuda_model.played_cuda import PlayedDevice, play
from cuda_model.race_cases import ONE_WAY, Case, keep_results, over_nccl, run

import tilewise as tw
from tilewise.compiler import placement
from tilewise.execution import run as running
from tilewise.execution import workspace
from tilewise.transport import loopback, posted, streams
from tilewise.transport.process_group import DistTransport


@pytest.fixture
def device(monkeypatch) -> PlayedDevice:
    return play(monkeypatch)


def seeded(monkeypatch: Any, owner: Any, name: str, old: str, new: str = "pass") -> None:
    """Let a function do something else in one place."""
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert old in source
    module = inspect.getmodule(function)
    assert module is not None
    scope: dict[str, Any] = {}
    exec(source.replace(old, new), module.__dict__, scope)
    monkeypatch.setattr(owner, name, scope[name])


LOOPBACK_SEEDS = {
    "a copy does not wait for the sender": (loopback._World, "post", "follow(send.posted)"),
    "a copy does not wait for the receiver": (loopback._World, "post", "follow(receive.posted)"),
    "nobody waits for a copy": (loopback._Outstanding, "wait", "follow(copied)"),
    "ranks do not wait for the caller": (streams, "forked", "follow(before)"),
    "the caller does not wait for ranks": (streams, "forked", "follow(end)"),
    "a workspace is not waited for": (
        workspace.Workspace,
        "enter",
        "follow(self._left, buffer)",
    ),
    "a workspace is left before its pass": (
        workspace.Workspace,
        "leave",
        "self._left = ",
        "moment = ",
    ),
    "a workspace's memory is not recorded": (streams, "follow", "x.record_stream", "str"),
    "an arrival is not waited for": (running.BoundCode, "_wait", ".wait()", ""),
}
NCCL_SEEDS = {
    "a batch is not waited for": (posted, "wait_for", "work.wait()"),
    "an arrival is not waited for": (running.BoundCode, "_wait", ".wait()", ""),
    "earlier sends are not waited for": (DistTransport, "_reap", "posted.wait()"),
    "the last sends are not waited for": (DistTransport, "finish", "self._reap(lane, 0)"),
    "what is sent is given back at once": (
        placement,
        "_departures",
        "yield (last if op.team is not None else left.get(op.handle, last)), ref",
        "yield 0, ref",
    ),
    "what is sent is given back too early": (
        placement,
        "_departures",
        "len(waiting) > departs.in_flight",
        "waiting",
    ),
}


def plant(monkeypatch: Any, seed: tuple[Any, ...]) -> None:
    keep_results(monkeypatch, "write")
    seeded(monkeypatch, *seed)
    monkeypatch.setattr(loopback, "forked", streams.forked)
    for module in (loopback, workspace):
        monkeypatch.setattr(module, "follow", streams.follow)


@pytest.mark.parametrize("seed", LOOPBACK_SEEDS)
def test_a_seeded_race_of_loopback_is_found(seed, device, monkeypatch):
    plant(monkeypatch, LOOPBACK_SEEDS[seed])
    run(Case(tw.ring(3), tw.Causal()), device)
    assert device.races


@pytest.mark.parametrize("seed", NCCL_SEEDS)
def test_a_seeded_race_of_nccl_is_found(seed, device, monkeypatch):
    plant(monkeypatch, NCCL_SEEDS[seed])
    transport = over_nccl(monkeypatch, device, None, blocking=False)
    ring = Case(tw.double_ring(2, 2), tw.Causal())
    run(Case(*ONE_WAY) if "sends" in seed else ring, device, transport)
    assert device.races

"""Real processes under any fault: what is right comes out right, all else ends on every rank alike.

A rank is stopped for a while, comes late, refuses its input, is in another call, or is killed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from conformance.oracle import dense, draw, error
from hypothesis import given
from hypothesis import strategies as st
from processes.launcher import TIMEOUT_SECONDS, run_processes
from support.fuzzing import examples

import tilewise as tw
from tilewise.transport import watch
from tilewise.transport.process_group import DistTransport
from tilewise.transport.processes import RankError, run_ranks

PATIENCE, HEADS, WIDTH = 0.3, 6, 4
WAITS = ("late", "stop")
ERRORS = ("input", "other call", "one call less")


class Scenario(NamedTuple):
    """Calls that ranks make together, and what one of them does meanwhile.

    Attributes:
        calls: numbers of known calls, one after the other.
        at: the call before which the fault is.
        moment: the message of that call, counted, at which a rank is stopped or killed.
        known: whether all calls were made before, so that ranks do not compare them again.
    """

    calls: list[int]
    fault: str
    rank: int
    at: int
    moment: int
    known: bool


def known_calls(n: int) -> list[tuple[tw.Plan, tw.Mask, tw.Layout]]:
    """Calls of one number of ranks: no two of them send the same."""
    tokens = 4 * n + 1
    return [
        (tw.ring(n), tw.Full(), tw.contiguous(tokens, n)),
        (tw.ring(n, moves="q"), tw.Causal(), tw.zigzag(tokens, n)),
        (tw.ulysses(n), tw.Causal(), tw.contiguous(tokens, n)),
        (tw.all_gather(n), tw.Causal() & tw.Window(9, 0), tw.striped(2 * tokens, n)),
        (tw.tiled(tw.Causal(), tw.zigzag(tokens, n)), tw.Causal(), tw.zigzag(tokens, n)),
    ]


NUM_CALLS = len(known_calls(2))


@st.composite
def scenarios(draw: st.DrawFn, n: int, faults: tuple[str, ...]) -> Scenario:
    calls = draw(st.lists(st.integers(0, NUM_CALLS - 1), min_size=1, max_size=3))
    return Scenario(
        calls,
        draw(st.sampled_from(faults)),
        draw(st.integers(0, n - 1)),
        draw(st.integers(0, len(calls) - 1)),
        draw(st.integers(1, 4)),
        draw(st.booleans()),
    )


def attend(group: Any, rank: int, n: int, number: int, wrong: bool = False) -> float:
    """The largest error of a call's out and gradients; wrong: its queries are a row too many."""
    plan, mask, layout = known_calls(n)[number]
    shape = layout.num_tokens, HEADS, WIDTH
    x = draw(shape, shape, number)
    x = x._replace(dlse=x.dlse * 0)
    want = dense(x, mask)
    operands = [layout.shard(t, rank, dim=0).clone() for t in x[:3]]
    more = x.q.new_zeros(int(wrong), HEADS, WIDTH)
    operands = [torch.cat([t, more]).requires_grad_() for t in operands]
    out = tw.attention(*operands, plan=plan, layout=layout, mask=mask, group=group)
    out.backward(layout.shard(x.dout, rank, dim=0))
    wants = [layout.shard(t, rank, dim=0) for t in (want.out, *want[2:])]
    return max(map(error, (out.detach(), *(t.grad for t in operands)), wants))


class At:
    """Something that a rank does just before its so-and-so-many-th message is posted."""

    def __init__(self, moment: int, act: Any):
        self._left, self._act = moment, act

    def __enter__(self) -> None:
        post, posted = DistTransport._post_each, count(1)

        def acting(transport: DistTransport, *messages: Any) -> Any:
            if next(posted) == self._left:
                self._act()
            return post(transport, *messages)

        self._patch = mock.patch.object(DistTransport, "_post_each", acting)
        self._patch.start()

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


def stop_for_a_while() -> None:
    """Be stopped by a signal, and continued by another process."""
    after = f"sleep {3 * PATIENCE}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", after])
    os.kill(os.getpid(), signal.SIGSTOP)


def play(rank: int, n: int, all_of_them: list[Scenario]) -> list[str]:
    """What comes of each scenario, in a group of its own: "right", or the error."""
    told = []
    with mock.patch.object(watch, "PATIENCE_SECONDS", PATIENCE):
        for scenario in all_of_them:
            group = dist.new_group()
            if scenario.known:
                for number in sorted({*scenario.calls, *range(2)}):
                    assert attend(group, rank, n, number) < 1e-12
            dist.barrier()
            told.append(play_one(scenario, group, rank, n))
            dist.barrier()
    return told


def play_one(scenario: Scenario, group: Any, rank: int, n: int) -> str:
    faulty, worst = rank == scenario.rank, 0.0
    try:
        for place, number in enumerate(scenario.calls):
            here = faulty and place == scenario.at
            if here and scenario.fault == "one call less":
                continue
            if here and scenario.fault == "late":
                time.sleep(3 * PATIENCE)
            act = stop_for_a_while if here and scenario.fault == "stop" else int
            with At(scenario.moment, act):
                other = (number + 1) % 2 if here and scenario.fault == "other call" else number
                wrong = here and scenario.fault == "input"
                worst = max(worst, attend(group, rank, n, other, wrong))
        if scenario.fault == "one call less":  # all make a last call, which comes too early for one
            worst = max(worst, attend(group, rank, n, (scenario.calls[-1] + 1) % NUM_CALLS))
    except ValueError as raised:
        return str(raised)
    return "right" if worst < 1e-12 else f"an error of {worst}"


@examples(0.05)
@given(data=st.data(), n=st.integers(2, 3))
def test_ranks_wait_for_each_other_or_end_alike(data: st.DataObject, n: int):
    """Each fault in a group of its own: what was wrong in one is not in the next."""
    every = st.tuples(*(scenarios(n, (fault,)) for fault in WAITS + ERRORS))
    drawn = data.draw(every.flatmap(st.permutations), "scenarios")
    first, *others = run_processes(n, play, n, drawn)
    assert others == [first] * (n - 1)
    for scenario, said in zip(drawn, first, strict=True):
        if scenario.fault in WAITS:
            assert said == "right", (scenario, said)
        elif scenario.fault == "input":
            assert f"rank {scenario.rank}: q has " in said, (scenario, said)
        else:
            assert ("rank" in said and said != "right") or harmless(scenario), (scenario, said)


def harmless(scenario: Scenario) -> bool:
    """Whether the other call is the same, for one rank alone."""
    return (
        scenario.fault == "other call"
        and (scenario.calls[scenario.at] + 1) % 2 == (scenario.calls[scenario.at])
    )


def be_killed(rank: int, n: int, scenario: Scenario, folder: str) -> None:
    """Calls until a rank is killed in one; the others write down what they hear."""

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        for place in count():
            if rank == scenario.rank and place == scenario.at + 3:
                kill()  # between calls: none of those sent so many messages
            number = scenario.calls[place % len(scenario.calls)]
            act = kill if rank == scenario.rank and place >= scenario.at else int
            with At(scenario.moment, act):
                attend(None, rank, n, number)
    except RuntimeError as raised:
        (Path(folder) / str(rank)).write_text(str(raised))
        until = time.monotonic() + TIMEOUT_SECONDS / 4
        while len([*Path(folder).iterdir()]) < n - 1:  # one that ended would end others' waits
            assert time.monotonic() < until, "another rank still waits"
            time.sleep(0.02)
        raise


@examples(0.05)
@given(data=st.data(), n=st.integers(2, 4))
def test_a_rank_that_is_killed_is_named_by_all(data: st.DataObject, n: int):
    scenario = data.draw(scenarios(n, ("kill",)), "scenario")
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_ranks(n, be_killed, n, scenario, folder, timeout_seconds=TIMEOUT_SECONDS)
        except RankError as raised:
            assert f"rank {scenario.rank}" in str(raised)
        told = {path.name: path.read_text() for path in Path(folder).iterdir()}
    assert len(told) == n - 1
    # "receiving from rank 2 failed; rank 1 failed before": the last one named failed first.
    # Of a first exchange of a team some ranks name all peers of the message.
    for said in told.values():
        named = re.findall(r"ranks? ([\d, ]+) failed", said)
        assert named and str(scenario.rank) in named[-1].split(", "), said

"""Recording a run: the times of every operation of attention's passes, a file of rows a rank.

    tw.record(cp, every=100)        # on every rank, before training; then `tilewise explain run`

A recorded pass notes the time before its first operation, after each one, and after its last send
has left: by the host's clock for CPU tensors, by CUDA events on the current stream for CUDA
tensors. A pass that is not recorded costs one question. `tilewise_tools.explain` reads the rows.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from os import urandom
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from tilewise.arguments import require_type, shown, whole_number
from tilewise.compiler import ops
from tilewise.compiler.code import Code, Refs
from tilewise.compiler.rank_plan import RankPlan
from tilewise.context_parallel import ContextParallel
from tilewise.execution.call import ResolvedCall
from tilewise.execution.run import Label
from tilewise.planning.candidate_format import write_layout, write_plan, write_workload
from tilewise.transport.agreement import PASS, agree, agreement_of, settled
from tilewise.transport.posted import SENDING
from tilewise.transport.protocol import Message, TeamMessages, Transport
from tilewise.transport.resolve import transport_for
from tilewise.transport.streams import STREAMED, is_capturing
from tilewise.workload import Workload

FORMAT = "tilewise record 1"
"""Raised whenever rows of before mean something else."""
FOLDER = "run"
CLOCK_ROUNDS = 32
"""Exchanges of nothing by which ranks' clocks are compared; their number bounds the error."""


class Clock(Protocol):
    """Notes moments, and says later when they were."""

    def now(self) -> Any: ...
    def nanoseconds(self, moments: list[Any]) -> list[int]: ...


class HostClock:
    """The host's monotonic clock: operations on CPU tensors have ended when they return."""

    now = staticmethod(time.perf_counter_ns)

    def nanoseconds(self, moments: list[int]) -> list[int]:
        return moments


class DeviceClock:
    """Events on the current stream, read against the host's clock once all have happened."""

    def __init__(self, device: torch.device):
        self._device = device

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def nanoseconds(self, moments: list[torch.cuda.Event]) -> list[int]:
        """Return when events happened; the host waits until they have."""
        anchor = self.now()
        anchor.synchronize()
        read = time.perf_counter_ns()
        return [read - round(1e6 * event.elapsed_time(anchor)) for event in moments]


class RecordedPass(NamedTuple):
    """A pass under way, or one whose times are not read yet.

    Attributes:
        number: of its case.
        step: of training, in which it ran.
        moments: before the pass was set up; before its first operation, after each, after the last
            send.
        waits: for messages that were waited for one by one: whether they are sent, [peer, what] of
            each, and the moments at which the wait began and ended.
    """

    number: int
    step: int
    backward: bool
    num_ops: int
    clock: Clock
    moments: list[Any]
    waits: list[tuple[bool, list[list[Any]], int, int]]

    @property
    def is_whole(self) -> bool:
        return len(self.moments) == self.num_ops + 3


class Recorder:
    """Writes the rows of one rank; see `record`.

        with tw.record(cp) as recorder:
            for batch in batches:
                recorder.step()     # a step begins
                train_on(batch)

    Attributes:
        path: of this rank's rows.
    """

    def __init__(self, transport: Transport, path: Path, every: int):
        self.path = path
        self._every, self._transport = every, transport
        self._steps_are_told = False
        self._step = -1
        self._saw_backward = False
        self._recording = False
        self._cases: dict[tuple[int, torch.device], int] = {}
        self._codes: list[Code] = []  # alive, so that no other gets the id of one
        self._waiting: list[RecordedPass] = []

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self) -> None:
        """Say that a step of training begins here, and the one before it ends.

        Without it a step begins with a forward pass that follows a backward pass, or of which no
        gradient is asked, and it is timed up to the end of its last pass.
        """
        self._steps_are_told = True
        self._begin_step()

    def close(self) -> None:
        """Write what is left, and record nothing from here on."""
        agreement = agreement_of(self._transport)
        if agreement.recorder is self:
            agreement.recorder = None
        self._end_step()

    def begin(
        self,
        problem: ResolvedCall,
        code: Code,
        transport: Transport,
        device: torch.device,
        keep: bool,
    ) -> Callable[[], object] | None:
        """Return what the executor calls at each moment of a pass; None: it is not recorded.

        Args:
            keep: a backward pass follows, or this is one.
        """
        starts = self._step < 0 or (not code.backward and (self._saw_backward or not keep))
        # A forward pass within autograd's backward is one that a checkpoint runs again.
        if starts and not self._steps_are_told and torch._C._current_graph_task_id() == -1:
            self._begin_step()
        self._saw_backward |= code.backward
        if not self._recording or is_capturing(device):
            return None
        self._write_whole()
        clock = DeviceClock(device) if device.type in STREAMED else HostClock()
        number = self._case(problem, code, transport, device)
        moments = [clock.now()]
        row = RecordedPass(number, self._step, code.backward, len(code.ops), clock, moments, [])
        self._waiting.append(row)
        now, note = clock.now, moments.append
        if isinstance(clock, DeviceClock):
            return lambda: note(now())
        last = len(code.ops) + 3

        def mark() -> None:
            note(now())
            if len(moments) == last:
                self._write_whole()

        return mark

    def waited(self, messages: Sequence[Message] | TeamMessages, verb: str, seconds: float) -> None:
        """Note that messages of a process group have left or arrived.

        Args:
            verb: the transport's word for what was waited for.
            seconds: for which the transport has waited.
        """
        if not self._waiting or isinstance(messages, TeamMessages) or not messages:
            return
        row = self._waiting[-1]
        if isinstance(row.clock, HostClock):
            whats = [[one.peer, str(one.label)] for one in messages]
            now, took = time.perf_counter_ns(), round(1e9 * seconds)
            row.waits.append((verb == SENDING, whats, now - took, now))

    def _begin_step(self) -> None:
        self._end_step()
        self._step += 1
        self._saw_backward = False
        # The second step and not the first, which makes plans and codes.
        self._recording = self._step % self._every == 1 % self._every
        if self._recording and self._steps_are_told:
            self._write({"kind": "step", "step": self._step, "ns": time.perf_counter_ns()})

    def _end_step(self) -> None:
        if self._recording:
            self._write_whole(at_last=True)
            if self._steps_are_told:
                self._write({"kind": "end", "step": self._step, "ns": time.perf_counter_ns()})
        self._recording = False

    def _write_whole(self, at_last: bool = False) -> None:
        """Write passes that have ended; those on a device at the end of their step."""
        left = []
        for row in self._waiting:
            if isinstance(row.clock, DeviceClock) and not at_last:
                left.append(row)
            elif row.is_whole:  # of one that an error ended nothing is known
                first, *others = row.clock.nanoseconds(row.moments)
                self._write(
                    {
                        "kind": "pass",
                        "case": row.number,
                        "step": row.step,
                        "begin": first,
                        "after": [moment - first for moment in others],
                        "waits": [[*x, a - first, b - first] for *x, a, b in row.waits],
                    }
                )
        self._waiting = left

    def _case(
        self, problem: ResolvedCall, code: Code, transport: Transport, device: torch.device
    ) -> int:
        """The number of a pass's case, which is written when it is first seen."""
        key = id(code), device
        number = self._cases.get(key)
        if number is None:
            number = self._cases[key] = len(self._cases)
            self._codes.append(code)
            self._write(
                {
                    "kind": "case",
                    "case": number,
                    "backward": code.backward,
                    "ahead": transport.receives_ahead,
                    "kernel": _kernel_name(problem.kernel),
                    "device": _device_name(device),
                    **_problem_entries(problem, transport.rank, code.batch),
                    "ops": [*_op_entries(code)],
                }
            )
        return number

    def _write(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


def record(cp: ContextParallel, every: int = 100, folder: str | Path = FOLDER) -> Recorder:
    """Time the operations of attention in one of `every` steps, and write a file of rows a rank.

        tw.record(cp, every=100)        # then train; then: tilewise explain run

    All ranks call it. It records every call of attention on cp's group from here on, by whatever
    object, in the second step, and in each `every` steps after it. Rows of an earlier run are
    replaced. The result's `step()` says where steps begin, its `close()` ends the recording.

    Args:
        every: steps of which one is recorded; 1: all of them, the first too.
        folder: made if it is missing; rank r writes rank{r}.jsonl. On several hosts each has its
            own, unless it is shared: bring the files together before they are explained.
    Raises:
        ValueError: the same on every rank, if one rank cannot write, or there is only one.
    """
    require_type(ContextParallel, "cp", cp)
    transport = transport_for(cp.group)
    name = f"rank{transport.rank}.jsonl"

    def check() -> None:
        whole_number("every", every)
        if not isinstance(folder, str | Path) or not str(folder):
            raise ValueError(f"folder ({shown(folder)}) must be the name of a folder, or its Path")
        if transport.world_size == 1:
            raise ValueError(
                "a run of one rank waits for nobody, and there is nothing to record; look at it "
                "with torch.profiler, which shows the same operations"
            )
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / name).write_text("", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"folder ({shown(str(folder))}): {error}") from None

    settled(transport, check)
    agree(transport, {PASS: "record", "every": str(every)}, None)
    clock = []
    drawn, run = torch.frombuffer(bytearray(urandom(8)), dtype=torch.uint8), ""
    for _ in range(CLOCK_ROUNDS):
        begin = time.perf_counter_ns()
        first, *_ = transport.gather_records(drawn)
        clock.append([begin, time.perf_counter_ns()])
        run = first.numpy().tobytes().hex()
    recorder = Recorder(transport, Path(folder) / name, every)
    machine = cp.machine
    recorder._write(
        {
            "kind": "run",
            "format": FORMAT,
            "version": version("tilewise"),
            "run": run,
            "rank": transport.rank,
            "world_size": transport.world_size,
            "every": every,
            "host": socket.gethostname(),
            "kernel": _running_kernel(),
            "machine": None if machine is None else machine.to_toml().splitlines(),
            "clock": clock,
        }
    )
    earlier = agreement_of(transport).recorder
    if earlier is not None:
        earlier.close()
    agreement_of(transport).recorder = recorder
    return recorder


def _running_kernel() -> str:
    """A text that processes share whose monotonic clock is the same; hosts' names may differ."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _kernel_name(kernel: object) -> str:
    return str(getattr(kernel, "name", None) or type(kernel).__name__)


def _problem_entries(problem: ResolvedCall, rank: int, batch: int) -> dict[str, Any]:
    """The plans and the workload of a call, written in full by rank 0; by others as digests."""
    forward, backward = problem.passes
    plans = [forward.plan, backward.plan]
    entries: dict[str, Any] = {
        "plans": [plan.name for plan in plans],
        "digests": [plan.fingerprint for plan in plans],
        "layout_digest": forward.layouts[0].fingerprint,
        "mask": str(forward.mask)[:200],
        "batch": batch,
    }
    if rank:
        return entries
    try:
        work = _workload(problem)
        written = {"workload": write_workload(work), "layout": write_layout(forward.layouts[0])}
        return entries | written | {"written": [*map(write_plan, plans)]}
    except (ValueError, TypeError) as error:  # of a mask or plan that no file holds
        return entries | {"unwritten": str(error)}


def _workload(problem: ResolvedCall) -> Workload:
    """The workload of a call, all heads."""
    (plan, mask, layouts, groups, payload, _), backward = problem.passes
    if layouts[0] != layouts[1]:
        raise ValueError(f"queries of {plan.name} have a layout of their own, which no file says")
    if isinstance(plan, RankPlan) or isinstance(backward.plan, RankPlan):
        raise ValueError(f"{plan.name} is one rank's share of a plan")
    if payload.whole_rows:
        raise ValueError("a canonical call is computed by plans of its own")
    work = Workload(
        layouts[0].num_tokens,
        groups.num_heads,
        groups.num_kv_heads,
        payload.head_dim,
        dtype=payload.dtype,  # pyright: ignore
        mask=mask,
        layout=layouts[0],
        save="gathered" if backward.payload.saved else "replay",
        v_head_dim=payload.v_head_dim,
        max_logit=payload.max_logit,
    )
    return replace(work, wire=payload.wires) if payload.wires.latent is None else work


def _op_entries(code: Code) -> Iterator[dict[str, Any]]:
    """The operations of a pass with what their times are explained by."""
    for op in code.ops:
        entry: dict[str, Any] = {"op": type(op).__name__, "label": op.label}
        match op:
            case ops.Attend():
                heads = code.shape(op.operands[0][0])[2]
                sizes = {"q": op.call.num_q, "k": op.call.num_k, "area": op.call.area}
                entry |= {**sizes, "heads": heads}
            case ops.Post():
                entry |= _post_entries(code, op)
            case ops.Wait():
                entry["arrivals"] = op.arrivals
            case _:
                entry["bytes"] = _num_bytes(code, op)
        yield entry


def _num_bytes(code: Code, op: ops.Op[Refs]) -> int:
    return sum(map(code.num_bytes_of, (*ops.reads(op), *ops.writes(op))))


def _post_entries(code: Code, op: ops.Post[Refs]) -> dict[str, Any]:
    """Messages of an exchange as [peer, what, bytes], of a team one for each other rank; and groups
    of receives that are awaited together, as [arrivals, places among the receives].
    """
    if op.team is not None:
        peers, label, sizes = op.team.team.ranks, op.team.label, op.team.sizes
        sends, recvs = (
            [[x, label, n] for x, n in zip(peers, side, strict=True) if x != code.rank]
            for side in sizes
        )
        groups = [[[*op.arrivals], [*range(len(recvs))]]]
    else:
        sends, recvs = (
            [
                [one.peer, str(Label(one.step, one.item)), code.num_bytes_of(refs)]
                for one, refs in zip(messages, parts, strict=True)
            ]
            for messages, parts in ((op.sends, op.leaving), (op.recvs, op.arriving))
        )
        left = {*range(len(recvs))} - {index for indices in op.apart for index in indices}
        groups = [[[op.arrivals[i] for i in one], [*one]] for one in (*op.apart, sorted(left))]
    known = {"sends": sends, "recvs": recvs, "groups": [x for x in groups if x[0]]}
    return known if op.team is None else known | {"team": True}

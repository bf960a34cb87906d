"""What a code's run costs beside a hand-written loop: microseconds per ring step, and per call.

Both run one rank's forward ring over the same tensors, kernel, merges and a transport whose
messages arrive at once, so that what differs is only what runs the code: its steps, workspace and
merges. CPU time of the thread, interleaved, median of many runs.

    python benchmarks/overhead.py [--json]
"""

from __future__ import annotations

import json
import statistics
import time
from collections import deque
from collections.abc import Callable

import torch

import tilewise as tw
from tilewise.execution.call import Call
from tilewise.execution.forward_backward import bound_code, forward_pass
from tilewise.execution.resolve import resolve_once
from tilewise.execution.run import Pass
from tilewise.kernels.merge import merge_into
from tilewise.kernels.registry import kernel_for
from tilewise.tiles.calls import KernelCall as KernelCall
from tilewise.tiles.calls import Kind
from tilewise.transport.protocol import Message
from tilewise_tools.naming import Parser, run_script

WORLD, TOKENS, HEADS, WIDTH, REPEATS = 64, 16, 4, 32, 200


class Instant:
    """A transport on which every message has arrived already."""

    rank, world_size, receives_ahead, sends_in_flight, node_size = 0, WORLD, 1, 0, None
    bytes_sent, messages_sent = 0, 0

    def exchange(self, sends, recvs, lane=0):
        return self

    def wait(self) -> None:
        pass

    finish = wait


def by_hand(q, k, v, transport: Instant, scale: float):
    """A plain ring loop with the same kernel, merge and transport calls, receives posted ahead."""
    kernel = kernel_for("cpu", q.dtype, WIDTH)
    call = KernelCall(((0, TOKENS),), ((0, TOKENS),), Kind.FULL)
    held = torch.cat([k.flatten(2), v.flatten(2)], -1).view(torch.uint8)
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
    posted: deque = deque()
    for step in range(WORLD):
        while len(posted) < 2 and step + len(posted) < WORLD - 1:
            coming = torch.empty_like(held)
            posted.append((transport.exchange((), (Message(coming, 1, ""),)), coming))
        if step < WORLD - 1:
            transport.exchange((Message(held, WORLD - 1, ""),), ())
        key, value = held.view(q.dtype).view(TOKENS, 1, 2, HEADS, WIDTH).unbind(2)
        merge_into(out, lse, *kernel.forward(q, key, value, call, scale))
        if posted:
            handle, held = posted.popleft()
            handle.wait()
    return out


def microseconds(run: Callable[[], object]) -> float:
    start = time.thread_time()
    run()
    return (time.thread_time() - start) * 1e6


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    torch.set_num_threads(1)
    q, k, v = (torch.randn(TOKENS, 1, HEADS, WIDTH) for _ in range(3))
    layout = tw.contiguous(WORLD * TOKENS, WORLD)
    call = Call(plan=tw.ring(WORLD), layout=layout, mask=tw.Full())
    problem = resolve_once(q[:, 0], k[:, 0], v[:, 0], call, 0, WORLD)
    transport = Instant()
    times: dict[str, list[float]] = {"by hand": [], "code": [], "call": []}
    with torch.no_grad():
        bound = bound_code(problem, transport, q, backward=False)
        given = {
            "q": q,
            "k": k,
            "v": v,
            "out": torch.empty_like(q),
            "lse": torch.empty_like(q[..., 0]),
        }
        own = q[:, 0], k[:, 0], v[:, 0]
        for _ in range(REPEATS):
            for name, part in (
                ("by hand", lambda: by_hand(q, k, v, transport, problem.scores.scale)),
                ("code", lambda: bound.run(given, Pass(transport, problem.scores))),
                ("call", lambda: forward_pass(problem, transport, *own, keep=False)),
            ):
                times[name].append(microseconds(part))
    median = {name: statistics.median(values) for name, values in times.items()}
    steps = zip(times["by hand"], times["code"], strict=True)
    calls = zip(times["code"], times["call"], strict=True)
    row = {
        "by_hand_us_per_step": round(median["by hand"] / WORLD, 1),
        "code_us_per_step": round(median["code"] / WORLD, 1),
        "overhead_us_per_step": round(statistics.median(b - a for a, b in steps) / WORLD, 1),
        "overhead_us_per_call": round(statistics.median(b - a for a, b in calls), 1),
    }
    print(json.dumps(row) if as_json else row)


if __name__ == "__main__":
    run_script(main)

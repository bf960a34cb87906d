"""Processor time of a call at small sizes, ours beside other libraries': ms a rank, both passes.

Four gloo processes on this machine, causal, few tokens: what is left is the fixed cost of a call,
its messages and its bookkeeping. All threads of a process count, gloo's too. Contenders run in
turn, forth and back, several calls in a row; a figure is the mean over ranks, then the median and
the quartiles over rounds.

    python -m benchmarks.call_cost [--rounds 15] [--tokens 64] [--only NAME ...] [--json]
    python -m benchmarks.call_cost --counts

With --counts what one call of rank 0 does instead, which no other work changes: calls of Python
functions, and of torch's operators from outside of others.

Without --only the peers named in BESIDE; --only "" takes all that can run.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import tilewise as tw
from benchmarks.bare_ulysses import bare_ulysses
from benchmarks.peers import contenders
from tilewise.layouts.layout import Layout
from tilewise_tools.bench.case import BenchCase
from tilewise_tools.naming import Parser, run_script, whole_number

WORLD, HEADS, HEAD_DIM, CALLS = 4, 8, 32, 20

BESIDE = (
    "yunchang ulysses",
    "ringmaster ulysses",
    "ring-flash-attn ring",
    "ringmaster ring allgather",
)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(case: BenchCase) -> dict[str, tuple[Attend, Layout]]:
    """Each strategy where each kind of call is compared once, each call, and none.

    all_gather keeps what it gathered for backward, as its peer does, which takes memory for the
    keys of all ranks; "replayed" gathers them again, which is our default. The floor under Ulysses
    stands beside it.
    """
    n, num_tokens = case.world_size, case.num_tokens
    found = {}
    for name, plan, split in (
        ("ulysses", tw.ulysses(n), tw.contiguous),
        ("ring", tw.ring(n), tw.zigzag),
        ("all_gather", tw.all_gather(n), tw.contiguous),
    ):
        layout = split(num_tokens, n)
        attend = partial(tw.attention, plan=plan, layout=layout, mask=tw.Causal())
        if name == "all_gather":
            found["all_gather, replayed"] = attend, layout
            attend = partial(attend, save="gathered")
        found[name] = attend, layout
        found[f"{name}, each call compared"] = partial(attend, validate="always"), layout
        found[f"{name}, never validated"] = partial(attend, validate="never"), layout
    found["bare ulysses"] = bare_ulysses, tw.contiguous(num_tokens, n)
    return found


def entrants(case: BenchCase, rank: int, only: list[str]) -> dict[str, tuple[Attend, Layout]]:
    """All that can run the case, by name."""
    found = ours(case)
    for one in contenders():
        if (only or one.name in BESIDE) and one.supports(case) is None:
            ready = one.prepare(case, rank, dist.group.WORLD)
            found[one.name] = ready.attend, ready.layout
    return {name: x for name, x in found.items() if not only or any(part in name for part in only)}


def operands(layout: Layout, rank: int) -> list[Tensor]:
    """q, k, v that require gradients, and dout: of this rank."""
    seeded = torch.Generator().manual_seed(0)
    whole = torch.randn(4, layout.num_tokens, HEADS, HEAD_DIM, generator=seeded)
    q, k, v, dout = (layout.shard(x, rank).clone() for x in whole)
    return [*(x.requires_grad_() for x in (q, k, v)), dout]


def one_call(attend: Attend, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
    torch.autograd.grad(attend(q, k, v), (q, k, v), dout)


def counts(call: Callable[[], None]) -> tuple[int, int]:
    """Calls of Python functions and of torch's operators."""
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    call()
    sys.setprofile(None)
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    operators = [
        event
        for event in profile.events()
        if event.name.startswith("aten::")
        and not (event.cpu_parent and event.cpu_parent.name.startswith("aten::"))
    ]
    return events.count("call"), len(operators)


def measure(rank: int, port: int, options: argparse.Namespace, results: Any) -> None:
    """Rank 0 puts ms a call by contender and round."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    case = BenchCase(
        "strategies", "causal", WORLD * options.tokens, HEADS, HEADS, HEAD_DIM, world_size=WORLD
    )
    running = [
        (name, partial(one_call, attend, *operands(layout, rank)))
        for name, (attend, layout) in entrants(case, rank, options.only).items()
    ]
    if options.counts:
        for _, call in running * 5:  # what is made once
            call()
        found = {name: counts(call) for name, call in running}
        if rank == 0:
            results.put(found)
        dist.destroy_process_group()
        return
    times: dict[str, list[float]] = {name: [] for name, _ in running}
    for turn in range(-2, options.rounds):
        for name, call in running if turn % 2 else reversed(running):
            dist.barrier()
            start = time.process_time()
            for _ in range(CALLS):
                call()
            spent = torch.tensor((time.process_time() - start) * 1e3 / CALLS)
            dist.all_reduce(spent)
            if turn >= 0:  # the rounds before warm up
                times[name].append(spent.item() / WORLD)
    if rank == 0:
        results.put(times)
    dist.destroy_process_group()


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--rounds", type=whole_number, default=15)
    parser.add_argument("--tokens", type=whole_number, default=64, help="of a rank")
    parser.add_argument("--only", nargs="*", default=[], help="parts of contenders' names")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--counts", action="store_true")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds ({options.rounds}) must be at least 2, for quartiles")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(measure, (port, options, results), WORLD)  # pyright: ignore[reportPrivateImportUsage]
    found = results.get()
    if not found:
        parser.error(f"--only: no contender has {' or '.join(options.only)} in its name")
    if options.counts:
        for name, (functions, operators) in found.items():
            print(f"{name:28} {functions:5} functions, {operators:4} operators")
        return
    rows = {}
    for name, times in found.items():
        low, middle, high = statistics.quantiles(times, n=4)
        rows[name] = {"ms": round(middle, 2), "quartiles": [round(low, 2), round(high, 2)]}
    if options.json:
        print(json.dumps(rows))
        return
    for name, row in rows.items():
        print(
            f"{name:28} {row['ms']:7.2f}   {row['quartiles'][0]:.2f} to {row['quartiles'][1]:.2f}"
        )


if __name__ == "__main__":
    run_script(main, num_tokens="--tokens")

"""Many training steps, each with a mask of its own: do memory and the time of a step stay level?

gloo ranks train a layer on packed documents; every step has another mask, and so its own plan
where one is made for it. Printed are resident memory, how many calls, plans and programs live, and
the median and the longest step (its time, and the processor time of rank 0), at equal intervals.
It fails if memory after the first fifth grows by more than 3 %, or if more values live at the end
than after that fifth.

    python benchmarks/soak.py [--steps 20000] [--tokens 64] [--ranks 2]
"""

import argparse
import ctypes
import gc
import os
import socket
import statistics
import sys
import time
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tilewise as tw
from tilewise.compiler.code import Code
from tilewise.execution.call import Call
from tilewise_tools.naming import Parser, run_script, whole_number

LOOKS, WARM, GROWTH = 10, 2, 1.03
KINDS = Call, tw.Plan, Code


def resident_mb() -> float:
    """Resident memory, once circles are collected and the heap has given back what nothing uses."""
    gc.collect()
    with suppress(AttributeError):  # of glibc
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def live() -> dict[str, int]:
    gc.collect()
    found = Counter(kind.__name__ for x in gc.get_objects() for kind in KINDS if type(x) is kind)
    return {kind.__name__: found[kind.__name__] for kind in KINDS}


def step(number: int, layout: tw.Layout, weights: list[torch.Tensor], plans: list[tw.Plan]) -> None:
    """One step; every second one has a plan made for its mask."""
    tokens, rank = layout.num_tokens, dist.get_rank()
    generator = np.random.default_rng(number)
    edges = np.unique(generator.integers(1, tokens, 4))
    mask = tw.Document([0, *map(int, edges), tokens]) & tw.Causal()
    plan = tw.needed(mask, layout) if number % 2 else plans[number // 2 % len(plans)]
    x = layout.shard(torch.randn(tokens, 4, 16), rank)
    q, k, v = (x * weight for weight in weights)
    tw.attention(q, k, v, plan=plan, layout=layout, mask=mask).square().mean().backward()
    with torch.no_grad():
        for weight in weights:
            weight -= 1e-3 * weight.grad
            weight.grad = None


def train(rank: int, port: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    layout = tw.zigzag(options.tokens, options.ranks)
    weights = [torch.ones(4, 16, requires_grad=True) for _ in range(3)]
    plans = [make(options.ranks) for make in (tw.ring, tw.ulysses, tw.all_gather)]
    levels = []
    for look in range(LOOKS):
        clocks = [(time.perf_counter(), time.process_time())]
        for number in range(options.steps // LOOKS):
            step(look * options.steps // LOOKS + number, layout, weights, plans)
            clocks.append((time.perf_counter(), time.process_time()))
        levels.append((resident_mb(), live()))
        if rank == 0:
            done = (look + 1) * options.steps // LOOKS
            print(f"{done:7} steps  {levels[-1][0]:7.1f} MB  {levels[-1][1]}", end="")
            for what, times in zip(("step", "processor"), zip(*clocks, strict=True), strict=True):
                spent = sorted(1e3 * (b - a) for a, b in pairwise(times))
                longest = ", ".join(f"{x:.1f}" for x in spent[:-4:-1])
                print(f"  {what} {statistics.median(spent):.1f} ms, longest {longest}", end="")
            print(flush=True)
    dist.destroy_process_group()
    (least, before), (most, after) = levels[WARM - 1], levels[-1]
    grown = [name for name in before if after[name] > before[name]]
    if most > GROWTH * least or grown:
        sys.exit(f"rank {rank}: {least:.1f} MB became {most:.1f} MB; more live of {grown}")


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--steps", type=whole_number, default=20_000)
    parser.add_argument("--tokens", type=whole_number, default=64, help="of all ranks")
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2, 4), help="of four heads")
    options = parser.parse_args()
    if options.tokens % options.ranks:
        parser.error(f"--tokens ({options.tokens}) must be a multiple of --ranks ({options.ranks})")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(train, (port, options), options.ranks)  # pyright: ignore[reportPrivateImportUsage]


if __name__ == "__main__":
    run_script(main, world_size="--ranks", num_tokens="--tokens")

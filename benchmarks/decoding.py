"""What a decoding step costs before and after its kernel: microseconds per layer.

One rank of a tree of four, over a transport whose messages arrive at once. Beside it the kernel
alone, and tw.attention with the tree over a layout that grows by a token a step. CPU time of the
thread, median of many steps.

    python benchmarks/decoding.py [--json]
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tilewise as tw
from tilewise.decoding.chunk import Chunk
from tilewise.kernels.registry import kernel_for
from tilewise.tiles.calls import KernelCall, Kind
from tilewise_tools.naming import Parser, run_script

WORLD, HEADS, KV_HEADS, WIDTH, STEPS = 4, 8, 2, 64, 200
CASES = (([1024], "always"), ([1024], "never"), ([1024, 333, 50], "always"), ([16384], "always"))


class Instant:
    """Rank 0's end of a transport on which every message has arrived already."""

    rank, world_size, receives_ahead, bytes_sent, messages_sent = 0, WORLD, 1, 0, 0
    node_size = None

    def exchange(self, sends: Any, recvs: Any, lane: int = 0) -> Instant:
        return self

    def gather_records(self, record: Tensor) -> list[Tensor]:
        return [record] * WORLD

    def wait(self) -> None:
        pass

    finish = wait


def drawn(batch: int, heads: int, tokens: int = 1) -> Tensor:
    return torch.randn(batch, tokens, heads, WIDTH)


def microseconds(run: Callable[[], object], steps: int = STEPS) -> float:
    times = []
    for _ in range(steps):
        start = time.thread_time()
        run()
        times.append((time.thread_time() - start) * 1e6)
    return statistics.median(times)


def step(lengths: list[int], validate: str) -> float:
    """cache.decode of one token of each sequence."""
    batch = len(lengths)
    cache = tw.KVCache(
        max(lengths) + STEPS,
        num_kv_heads=KV_HEADS,
        head_dim=WIDTH,
        batch=batch,
        group=Instant(),
        validate=validate,
    )
    kv = drawn(batch, KV_HEADS, max(lengths))
    cache.append(kv, kv, counts=lengths)
    q, k = drawn(batch, HEADS), drawn(batch, KV_HEADS)
    return microseconds(lambda: cache.decode(q, k, k))


def kernels(lengths: list[int]) -> float:
    """The kernel calls of one rank's share alone."""
    kernel, q = kernel_for("cpu", torch.float32, WIDTH), drawn(1, HEADS)
    calls = []
    for length in lengths:
        n = length // WORLD
        k, v = (drawn(1, KV_HEADS, n).transpose(0, 1) for _ in "kv")
        calls.append((k, v, KernelCall(((0, 1),), ((0, n),), Kind.FULL)))
    return microseconds(lambda: [kernel.forward(q, k, v, c, 0.1) for k, v, c in calls])


def growing(lengths: list[int], steps: int = 20) -> float:
    """tw.attention of one token against a layout that is another at every step."""
    plan, mask, q = tw.tree(WORLD), tw.Causal(), drawn(1, HEADS)[0]
    layouts = iter([Chunk((0,), (max(lengths) + i,), WORLD).layout for i in range(steps)])
    kv = drawn(1, KV_HEADS, max(lengths) + steps)[0]
    options = {"plan": plan, "mask": mask, "group": Instant()}

    def run() -> None:
        layout = next(layouts)
        k = kv[: layout.size(0)]
        tw.attention(q, k, k, layout=layout, **options)

    return microseconds(run, steps)


def row(lengths: list[int], validate: str) -> dict[str, Any]:
    measured = {"lengths": lengths, "validate": validate, "step_us": step(lengths, validate)}
    measured["kernels_us"] = kernels(lengths)
    measured["overhead_us"] = measured["step_us"] - measured["kernels_us"]
    if len(lengths) == 1:
        measured["growing_layout_us"] = growing(lengths)
    return {k: round(v, 1) if isinstance(v, float) else v for k, v in measured.items()}


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    torch.set_num_threads(1)
    with torch.no_grad():
        rows = [row(*case) for case in CASES]
    print(json.dumps(rows, indent=2) if as_json else "\n".join(map(str, rows)))


if __name__ == "__main__":
    run_script(main)

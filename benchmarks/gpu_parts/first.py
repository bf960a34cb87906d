"""What the first minutes on a GPU measure beside the executor: memory work, short calls, whole
tiles, which kernels cut differently, and sends beside memory work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_parts.case import Row
from benchmarks.gpu_parts.correctness import num_heads
from benchmarks.gpu_parts.executor import call_passes, single
from benchmarks.gpu_parts.session import Run, Session, captured
from benchmarks.gpu_parts.sizes import mask_named
from benchmarks.gpu_parts.summary import PASSES
from benchmarks.gpu_smoke import hidden, senders
from tilewise.kernels import merge
from tilewise.kernels.delta import out_for_delta
from tilewise.kernels.registry import kernel_named
from tilewise.tiles.calls import Kind
from tilewise.tiles.cover import tile_calls

SHAPE, TINY_SHAPE = (2048, 32, 128), (16, 2, 16)  # rows, heads and head_dim of half a shard
SETS, TINY_SETS = 16, 2  # of operands, more than an L2 cache holds; one launch for each
SENT_BYTES, TINY_SENT_BYTES = 1 << 29, 1 << 12
SOURCES = (1, 2, 4, 8)  # partial results that are combined


class Work(NamedTuple):
    """A launch, and the bytes that it reads and writes."""

    run: Run
    num_bytes: int


def copy_rows(k: Tensor, target: Tensor) -> Work:
    return Work(lambda: target.copy_(k), 2 * k.nbytes)


def memory_work(session: Session, what: str, sources: int = 1) -> Work:
    """One of the works that a pass does in memory, on tensors of its own."""
    rows, heads, width = TINY_SHAPE if session.tiny else SHAPE
    shape = rows, 1, heads, width
    x, target = session.normal(2, *shape)
    wide = target.float()
    lse = wide[..., 0].contiguous()
    match what:
        case "copy of keys":
            kv = session.normal(
                rows, 1, 2, heads, width
            )  # a row has its key and value side by side
            return copy_rows(kv[:, :, 0], target)
        case "copy of keys, 16 bytes a number":
            kv = session.normal(rows, 1, 2, heads, width)
            return copy_rows(kv[:, :, 0].view(torch.complex128), target.view(torch.complex128))
        case "merge":
            run = partial(merge.merge_into, wide, lse, x, lse.clone())
            return Work(run, 2 * wide.nbytes + x.nbytes + 3 * lse.nbytes)
        case "add":
            return Work(lambda: wide.add_(x), 2 * wide.nbytes + x.nbytes)
        case "combine":
            partials = [(session.normal(*shape), lse.clone()) for _ in range(sources)]
            run = partial(merge.combine, partials, (target, lse))
            return Work(run, (sources + 1) * (x.nbytes + lse.nbytes))
        case "out_for_delta":
            return Work(partial(out_for_delta, x, lse), 3 * x.nbytes + lse.nbytes)
    raise ValueError(f"there is no memory work {what!r}")


def repeated(session: Session, make: Callable[[], Work]) -> Work:
    """A work on several sets of operands, one after another, without the host's part."""
    works = [make() for _ in range(TINY_SETS if session.tiny else SETS)]

    def run() -> None:
        for work in works:
            work.run()

    return Work(captured(run, session.device), sum(work.num_bytes for work in works))


def bandwidth(session: Session, options: Row) -> Row:
    """TB/s of a memory work, in turns with a plain copy of as many bytes."""
    work = repeated(session, lambda: memory_work(session, **options))
    half = work.num_bytes // (TINY_SETS if session.tiny else SETS) // 2

    def plain() -> Work:
        x, y = torch.empty(2, half, dtype=torch.uint8, device=session.device)
        return copy_rows(x, y)

    copy = repeated(session, plain)
    times = session.compare({"work": work.run, "copy": copy.run})
    row = times["work"].row("work") | times["copy"].row("copy")
    row |= times["work"].share("work", times["copy"])
    for name, one in (("work", work), ("copy", copy)):
        row[f"{name}_tbps"] = round(one.num_bytes / times[name].median / 1e12, 4)
    return row


def short_calls(session: Session, options: Row) -> Row:
    """TFLOP/s of both passes of one call of few rows and keys."""
    kernel, heads = kernel_named(options["kernel"]), num_heads(options)
    rows, keys, width = (options[x] for x in ("rows", "keys", "head_dim"))
    passes = single(session, kernel, (rows, keys), Kind.FULL, heads, width)
    flops, row = 4 * rows * keys * heads[0] * width, Row()
    for what, run, work in zip(PASSES, passes, (flops, 2.5 * flops), strict=True):
        times = session.seconds(run)
        row |= times.row(what) | {f"{what}_tflops": times.tflops(work)}
    return row


def whole_tiles(session: Session, options: Row) -> Row:
    """TFLOP/s of both passes of all calls that a kernel makes of a tile, without merging them."""
    kernel, heads = kernel_named(options["kernel"]), num_heads(options)
    tokens, width = options["num_tokens"], options["head_dim"]
    reason = kernel.supports(session.device.type, torch.bfloat16, width)
    if reason is not None:
        return {"skipped": reason}
    rows, mask = np.arange(tokens), mask_named(options["mask"], tokens)
    cut = {"square_causal": kernel.square_causal, "whole_tile": kernel.whole_tile}
    calls = tile_calls(rows, rows, mask, **cut)
    pairs = [call_passes(session, kernel, call, heads, width) for call in calls]
    area = mask.area((0, tokens), (0, tokens))
    flops, row = 4 * area * heads[0] * width, Row(calls=len(calls))
    passes = zip(*pairs, strict=True)
    for what, runs, work in zip(PASSES, passes, (flops, 2.5 * flops), strict=True):
        times = session.seconds(partial(_one_after_another, runs))
        row |= times.row(what) | {f"{what}_tflops": times.tflops(work)}
    return row


def _one_after_another(runs: Sequence[Run]) -> None:
    for run in runs:
        run()


def sends(session: Session, options: Row) -> Row:
    """The share of a send to itself that memory work beside it hides, on each lane."""
    work = repeated(session, lambda: memory_work(session, **options))
    row: Row = {}
    for way, post in senders(
        session.device, TINY_SENT_BYTES if session.tiny else SENT_BYTES
    ).items():
        found = hidden(lambda run: session.seconds(run).median, work.run, post)
        row |= {
            f"{way}, work_ms": round(1e3 * found.alone, 4),
            f"{way}, send_ms": round(1e3 * found.sent, 4),
            f"{way}, hidden_share": round(found.share, 4),
        }
    return row

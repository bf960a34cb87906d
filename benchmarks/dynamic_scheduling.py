"""Work and bytes of a batch of documents: tiled at some slack, needed, and Megatron's dynamic CP.

64 ranks of 8,192 tokens, lengths of real corpora, an 8B model's layer. A rank's work is its allowed
pairs and 30,518 more for each of its tokens (8e9 / 32 parameters a layer, 32 heads of 128): what is
given is the sum over sub-batches of the busiest rank's work, over the even share, in the mean over
batches (and the worst), and megabytes sent by a rank in a layer's forward (8 KV heads, bfloat16;
Megatron's ring sends all of a document round its group). Seconds are processor time of
planning a global batch, one rank's program included.

    python benchmarks/dynamic_scheduling.py [--batches 20] [--microbatches 1] [--json]

The decisions of Megatron Core's BalancedCPScheduler are rewritten here from the reading of
NVIDIA/Megatron-LM, megatron/core/pipeline_parallel/hybrid_cp_schedule.py, commit 00caa53.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import ceil, log2
from typing import Any, NamedTuple

import numpy as np

import tilewise as tw
from tilewise.masks.base import Mask
from tilewise_tools.mask_report.figures import moved
from tilewise_tools.naming import Parser, run_script, whole_number

RANKS, TOKENS, CAP = 64, 8192, 131072  # tokens of a rank; longest document
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
KV_BYTES, ROW_BYTES = 2 * KV_HEADS / HEADS, 2 * KV_HEADS * HEAD_DIM * 2  # k and v, bfloat16
LINEAR = tw.Machine.preset("h100x8").linear_pairs(8e9 / 32, HEADS, HEAD_DIM)
WORKLOADS = {  # corpus, mix
    "pile": ("pile", 0.0),
    "prolong64k": ("prolong64k", 0.0),
    "prolong512k": ("prolong512k", 0.0),
    "prolong512k, 60 % of 8-30K": ("prolong512k", 0.6),
}
SLACKS = (0.03, 0.1, 0.2, 0.3)


Make = Callable[[Mask], tuple[tw.Plan, tw.Layout]]


class Sharing(NamedTuple):
    """What ranks do in one sub-batch, by rank."""

    pairs: np.ndarray
    tokens: np.ndarray
    sent: np.ndarray
    calls: int  # of the rank with most documents
    seconds: float  # of planning


class Group:
    """Ranks that share documents, each of them cut evenly."""

    def __init__(self, size: int) -> None:
        self.size, self.load, self.documents = size, 0.0, list[int]()

    def add(self, length: int, sign: int = 1) -> None:
        self.load += sign * length * length / self.size


def megatron(lengths: Sequence[int], n: int, cap: int) -> Iterator[list[Group]]:
    """The groups of one sub-batch after the other, all ranks in some group."""
    left = sorted(lengths, reverse=True)
    while left:
        groups, left = _sub_batch(left, n, cap)
        left += _trimmed(groups, n)
        free = n - sum(group.size for group in groups)
        while free > 0:  # the first of the smallest groups is doubled
            group = min(groups, key=lambda group: group.size)
            more = min(2 * group.size, n) - group.size
            group.size, free = group.size + more, free - more
        yield groups


def _needed_ranks(length: int, cap: int) -> int:
    return max(1, 2 ** ceil(log2(length / cap)))


def _buckets(lengths: Sequence[int], cap: int) -> list[list[int]]:
    """Documents in order, cut where the estimated work of a bucket is reached."""
    sizes = [_needed_ranks(length, cap) for length in lengths]
    work = [length * length / size for length, size in zip(lengths, sizes, strict=True)]
    num_buckets, found = len(set(sizes)), [list[int]()]
    target, so_far = sum(work) / num_buckets, 0.0
    for i, (length, size) in enumerate(zip(lengths, work, strict=True)):
        closed = len(found) - 1
        last_ones = len(lengths) - i <= num_buckets - 2 * closed
        if found[-1] and (so_far + size > 1.1 * target or last_ones):
            found.append([])
            so_far = 0.0
        found[-1].append(length)
        so_far += size
    return found


def _sub_batch(lengths: Sequence[int], n: int, cap: int) -> tuple[list[Group], list[int]]:
    buckets, groups, first = _buckets(lengths, cap), list[Group](), 0
    while buckets:
        free = n - sum(group.size for group in groups)
        for bucket in buckets:
            size = _needed_ranks(bucket[0], cap) if bucket else 0
            alike = [group for group in groups if group.size == size]
            if bucket and (alike or free >= size):
                break
        else:
            break
        if free >= size:
            groups.append(Group(size))
            alike = groups[-1:]
        group = min(alike, key=lambda group: group.load)
        group.add(bucket[0])
        group.documents.append(bucket.pop(0))
        while buckets and not buckets[0]:
            buckets.pop(0)
        first = first or size
        most, least = _extremes(groups, n)
        if size < first and buckets and most - least <= 0.05 * most:
            break
    return groups, [length for bucket in buckets for length in bucket]


def _extremes(groups: Sequence[Group], n: int) -> tuple[float, float]:
    loads = [group.load for group in groups]
    return max(loads), min(loads) if sum(group.size for group in groups) == n else 0.0


def _trimmed(groups: Sequence[Group], n: int) -> list[int]:
    """Last documents of the busiest groups, taken back as long as that levels."""
    back = []
    while True:
        most, least = _extremes(groups, n)
        group = max(groups, key=lambda group: group.load)
        if most - least <= 0.05 * most or least == 0 or len(group.documents) <= 1:
            return back
        group.add(group.documents[-1], -1)
        now = _extremes(groups, n)
        if now[0] - now[1] >= most - least:
            group.add(group.documents[-1])
            return back
        back.append(group.documents.pop())


def dynamic(batches: Sequence[Sequence[int]]) -> list[Sharing]:
    """One global batch, as Megatron's scheduler shares it."""
    lengths = [int(length) for cu in batches for length in np.diff(cu)]
    found, start = [], time.process_time()
    sub_batches = list(megatron(lengths, RANKS, TOKENS))
    seconds = (time.process_time() - start) / len(sub_batches)
    for groups in sub_batches:
        rows = []
        for group in groups:
            own = np.array(group.documents, float)
            pairs = (own * (own + 1) / 2).sum() / group.size
            sent = own.sum() * (group.size - 1) / group.size * ROW_BYTES
            rows += [(pairs, own.sum() / group.size, sent)] * group.size
        calls = max(len(group.documents) for group in groups)
        pairs, tokens, sent = np.array(rows).T
        found.append(Sharing(pairs, tokens, sent, calls, seconds))
    return found


def planned(make: Make, cu: Sequence[int]) -> Sharing:
    mask, start = tw.masks.causal_document(cu), time.process_time()
    plan, layout = make(mask)
    plan.program(0)
    seconds = time.process_time() - start
    work = tw.Workload(
        num_tokens=layout.num_tokens,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        mask=mask,
        layout=layout,
    )
    figures = moved(plan, work)
    return Sharing(
        *(np.array(x, float) for x in (figures.areas, layout.sizes, figures.sent)), 1, seconds
    )


def all_planned(make: Make, batches: Sequence[Sequence[int]]) -> list[Sharing]:
    return [planned(make, cu) for cu in batches]


def tiled(slack: float, mask: Mask) -> tuple[tw.Plan, tw.Layout]:
    options = {"kv_bytes": KV_BYTES, "slack": slack, "linear": LINEAR}
    layout = tw.tiled_layout(mask, RANKS * TOKENS, RANKS, **options)
    return tw.tiled(mask, layout, **options), layout


def needed(split: Callable[..., tw.Layout], mask: Mask) -> tuple[tw.Plan, tw.Layout]:
    layout = split(mask)
    return tw.needed(mask, layout), layout


def contenders() -> dict[str, Make]:
    size = RANKS * TOKENS, RANKS
    return {
        **{f"tiled, slack {slack}": partial(tiled, slack) for slack in SLACKS},
        "needed, balanced": partial(needed, lambda mask: tw.balanced(mask, *size)),
        "needed, contiguous": partial(needed, lambda _: tw.contiguous(*size)),
    }


def figures(shared: Sequence[Sharing]) -> dict[str, float]:
    def level(linear: float) -> float:
        busy = [one.pairs + linear * one.tokens for one in shared]
        return sum(x.max() for x in busy) / sum(x.mean() for x in busy)

    sent = sum(one.sent for one in shared)
    return {
        "attention": level(0.0),
        "layer": level(LINEAR),
        "mean": float(np.mean(sent)) / 1e6,
        "busiest": float(np.max(sent)) / 1e6,
        "tokens": float(np.max(sum(one.tokens for one in shared))),
        "calls": sum(one.calls for one in shared),
        "seconds": sum(one.seconds for one in shared),
    }


def rows(workload: str, batches: int, microbatches: int) -> Iterator[dict[str, Any]]:
    """Figures of every contender: over all batches the mean, and the worst layer."""
    corpus, mix = WORKLOADS[workload]
    drawn = [
        [
            tw.lengths.sample(
                corpus, RANKS * TOKENS, seed=seed * microbatches + i, cap=CAP, mix=mix
            )
            for i in range(microbatches)
        ]
        for seed in range(batches)
    ]
    made: dict[str, Callable[..., list[Sharing]]] = {"Megatron dynamic": dynamic}
    for name, make in contenders().items():
        made[name] = partial(all_planned, make)
    for name, share in made.items():
        found = [figures(share(cus)) for cus in drawn]
        means = {key: float(np.mean([one[key] for one in found])) for key in found[0]}
        worst = max(one["layer"] for one in found)
        yield {"documents": workload, "who": name, **means, "worst": worst}


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--batches", type=whole_number, default=20)
    parser.add_argument("--microbatches", type=whole_number, default=1, help="of a global batch")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.json:
        print(
            "| documents | | attention | layer (worst) | MB mean, max | tokens | calls | seconds |"
        )
        print("|---|---|---|---|---|---|---|---|")
    for workload in WORKLOADS:
        for row in rows(workload, options.batches, options.microbatches):
            if options.json:
                print(json.dumps(row))
                continue
            cells = [workload, row["who"], f"{row['attention']:.2f}"]
            cells += [f"{row['layer']:.2f} ({row['worst']:.2f})"]
            cells += [f"{row['mean']:.0f}, {row['busiest']:.0f}", f"{row['tokens']:,.0f}"]
            cells += [f"{row['calls']:.0f}", f"{row['seconds']:.2f}"]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    run_script(main)

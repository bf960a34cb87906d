"""tw.schedule beside Megatron's dynamic context parallelism and static context parallelism.

An 8B model's layer on h100x8, 8,192 tokens a rank, documents of four mixes. The three share the
same documents, those of the first steps of a long stream:

    schedule      tw.schedule's steps: balanced layouts, needed plans by nodes, over all ranks
    dynamic       BalancedCPScheduler of Megatron Core (see dynamic_scheduling.py): groups of a
                  power of two ranks; all wait for the slowest before the next sub-batch
    static        groups of as many ranks as the longest document needs, a power of two; documents
                  packed into sequences (best fit), sequences dealt to the group that is done first

In both baselines a group is a ring (tw.ring) over documents that are each cut in zigzag, in
sequence order, simulated as if its ranks were neighbours. Seconds are those of attention, forward
and backward, by tw.simulate, and of the layer's matrix products (6 FLOP a parameter and token, at
attention's own best speed), summed over steps, sub-batches or sequences: of the slowest rank. Work
is a rank's allowed pairs and its tokens' matrix products; max / mean is weighed over steps. Wasted
are tokens of padding. Planning is processor time of a step, the longest: choice of documents,
layout, plan and one rank's share (prepare).

    python -m benchmarks.schedules [--ranks 64,256] [--steps 3] [--json]
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np

import tilewise as tw
from benchmarks.dynamic_scheduling import HEAD_DIM, HEADS, KV_HEADS, LINEAR, TOKENS, Group, megatron
from tilewise.batches.schedule import BatchStep
from tilewise.integrations.data import pack
from tilewise.layouts.layout import Run
from tilewise_tools.mask_report.figures import moved
from tilewise_tools.naming import Parser, naming, run_script, some_of, whole_number, whole_numbers

MACHINE = tw.Machine.preset("h100x8")
PARAMETERS = 8e9 / 32
LONGEST = 262144


def sft(tokens: int, seed: int) -> list[int]:
    """Conversations of about 600 tokens, and one in a hundred of 32K to 256K."""
    rng = np.random.default_rng(seed)

    def draw(count: int) -> np.ndarray:
        short = np.exp(rng.normal(np.log(600), 1.0, count))
        long = np.exp(rng.uniform(np.log(32768), np.log(LONGEST), count))
        return np.where(rng.random(count) < 0.01, long, short)

    return filled(draw, tokens, LONGEST)


def video(tokens: int, seed: int) -> list[int]:
    """Clips of 5 s to 10 min at 2 frames a second, 98 tokens a frame, log-uniform."""
    rng = np.random.default_rng(seed)

    def draw(count: int) -> np.ndarray:
        return 98 * 2 * np.exp(rng.uniform(np.log(5), np.log(600), count))

    return filled(draw, tokens, 131072)


def corpus(name: str) -> Callable[[int, int], list[int]]:
    return lambda tokens, seed: np.diff(
        tw.lengths.sample(name, tokens, seed=seed, cap=131072)
    ).tolist()


def filled(draw: Callable[[int], np.ndarray], tokens: int, longest: int) -> list[int]:
    found: list[int] = []
    while sum(found) < tokens:
        found += np.clip(draw(1024), 16, longest).astype(int).tolist()
    return found


MIXES: dict[str, Callable[[int, int], list[int]]] = {
    "prolong64k": corpus("prolong64k"),
    "prolong512k, to 128K": corpus("prolong512k"),
    "SFT, tail to 256K": sft,
    "video": video,
}


class Share(NamedTuple):
    """What ranks do together until all wait for the slowest, by rank."""

    work: np.ndarray  # allowed pairs, and those that a token's matrix products are worth
    sent: np.ndarray  # bytes, both passes
    seconds: float
    room: int  # tokens that the ranks hold, used or not


@lru_cache(maxsize=1)
def linear_seconds() -> float:
    """Of one token's matrix products in a layer, both passes."""
    return 6 * PARAMETERS / MACHINE.kernel("bfloat16", False, HEAD_DIM).speed(1 << 20, 1 << 20)


def workload(cu: Sequence[int], layout: tw.Layout) -> tw.Workload:
    return tw.Workload(
        num_tokens=cu[-1],
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        mask=tw.masks.causal_document(cu),
        layout=layout,
    )


def measured(plan: tw.Plan, work: tw.Workload, seconds: float) -> Share:
    """A plan's ranks; seconds: of its attention."""
    tokens = np.array(work.layout_for(plan.world_size).sizes, float)
    figures = moved(plan, work)
    pairs, volume = np.array(figures.areas, float), tw.volume(plan, work)
    sent = np.array(volume.forward, float) + volume.backward
    seconds += float(tokens.max()) * linear_seconds()
    return Share(pairs + LINEAR * tokens, sent, seconds, int(tokens.sum()))


def ring_group(documents: Sequence[int], size: int) -> Share:
    """A ring over documents that are each cut in zigzag."""
    cu = np.cumsum([0, *documents]).tolist()
    runs: list[list[Run]] = [[] for _ in range(size)]
    for start, length in zip(cu, documents, strict=False):
        cuts = [start + i * length // (2 * size) for i in range(2 * size + 1)]
        parts = [Run(a, b - a) for a, b in pairwise(cuts)]
        for rank, mine in enumerate(runs):
            mine += [parts[rank], parts[2 * size - 1 - rank]]
    layout = tw.Layout(cu[-1], runs, "zigzag of documents")
    plan, work = tw.ring(size), workload(cu, layout)
    return measured(plan, work, tw.simulate(plan, work, MACHINE, exact=True).seconds)


def together(groups: Sequence[tuple[Sequence[Share], int]]) -> Share:
    """Groups of so many ranks, each of which does its shares one after the other."""
    work = [sum(s.work for s in mine) if mine else np.zeros(size) for mine, size in groups]
    sent = [sum(s.sent for s in mine) if mine else np.zeros(size) for mine, size in groups]
    seconds = max(sum(s.seconds for s in mine) for mine, _ in groups)
    tokens = sum(s.room for mine, _ in groups for s in mine)
    return Share(np.concatenate(work), np.concatenate(sent), seconds, tokens)


def dynamic(lengths: Sequence[int], n: int) -> list[Share]:
    def share(group: Group) -> Sequence[Share]:
        return [ring_group(group.documents, group.size)]

    sub_batches = megatron(lengths, n, TOKENS)
    return [together([(share(g), g.size) for g in groups]) for groups in sub_batches]


def static(lengths: Sequence[int], n: int) -> list[Share]:
    size = 1
    while size * TOKENS < max(lengths):
        size *= 2
    order = sorted(lengths, reverse=True)  # best fit, longest first: little is padded
    sequences = [[order[i] for i in some] for some in pack(order, size * TOKENS)]
    groups: list[list[Share]] = [[] for _ in range(n // size)]
    for share in sorted((ring_group(one, size) for one in sequences), key=lambda s: -s.seconds):
        min(groups, key=lambda mine: sum(s.seconds for s in mine)).append(share)
    rounds = max(map(len, groups))  # a group that has fewer sequences is given one of padding
    return [together([(mine, size) for mine in groups])._replace(room=rounds * n * TOKENS)]


def row(who: str, shares: Sequence[Share], useful: int, steps: int) -> dict[str, Any]:
    sent = sum(share.sent for share in shares)
    return {
        "who": who,
        "seconds": sum(share.seconds for share in shares) / steps,
        "imbalance": sum(s.work.max() for s in shares) / sum(s.work.mean() for s in shares),
        "megabytes": float(np.mean(sent)) / steps / 1e6,
        "busiest_megabytes": float(np.max(sent)) / steps / 1e6,
        "wasted": 1 - useful / sum(share.room for share in shares),
    }


def stream(lengths: Sequence[int], n: int) -> Iterator[BatchStep]:
    return iter(
        tw.schedule(
            lengths,
            world_size=n,
            tokens_per_rank=TOKENS,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
        )
    )


def rows(mix: str, n: int, num_steps: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    lengths = MIXES[mix]((num_steps + 6) * n * TOKENS, seed)
    steps = stream(lengths, n)
    shares, planning, documents = [], [], []
    for _ in range(num_steps):
        start = time.process_time()
        for step in islice(steps, 1):
            step.prepare(0)
            planning.append(time.process_time() - start)
            shares.append(measured(step.plan, step.workload, step.seconds))
            documents += [lengths[i] for i in step.documents]
    found = {"schedule": shares, "dynamic": dynamic(documents, n), "static": static(documents, n)}
    for who, mine in found.items():
        yield {
            "documents": mix,
            "ranks": n,
            **row(who, mine, sum(documents), num_steps),
            "planning_seconds": max(planning) if who == "schedule" else None,
        }


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--ranks", type=whole_numbers, default="64,256")
    parser.add_argument("--steps", type=whole_number, default=3)
    mixes = {"type": some_of(MIXES, ";"), "default": ";".join(MIXES)}
    parser.add_argument("--mixes", **mixes, help="separated by ;")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    next(stream([100], 8)).prepare(0)  # what torch makes once
    if not options.json:
        print("| documents | ranks | | ms a step | max / mean | MB mean, max | wasted | planning |")
        print("|---|---|---|---|---|---|---|---|")
    for mix in options.mixes:
        for n in options.ranks:
            with naming("--ranks"):
                found = list(rows(mix, n, options.steps))
            for one in found:
                if options.json:
                    print(json.dumps(one), flush=True)
                    continue
                cells = [mix, str(n), one["who"], f"{1e3 * one['seconds']:.1f}"]
                cells += [f"{one['imbalance']:.3f}"]
                cells += [f"{one['megabytes']:.0f}, {one['busiest_megabytes']:.0f}"]
                cells += [f"{100 * one['wasted']:.1f} %"]
                planning = one["planning_seconds"]
                cells += ["" if planning is None else f"{planning:.2f} s"]
                print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    run_script(main)

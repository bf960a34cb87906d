"""A simulated trace has every rank's operations, by the labels and in the order of its own code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from conformance.table import KV_BYTES, plans
from support.described import MACHINES, workload
from support.thinned import thinned

import tilewise as tw
from tilewise.plan.ir import Plan
from tilewise.simulation.machine import Machine
from tilewise.simulation.simulator import Simulation
from tilewise.simulation.timeline import Timeline
from tilewise.strategies.catalog import MASK_AWARE

BUSY = replace(
    MACHINES["cores"],
    call_seconds=(1e-5, 2e-5),
    agree_seconds=1e-6,
    message_seconds=1e-7,
    pack_bandwidth=5e9,
    merge_seconds=1e-6,
    merge_bandwidth=1e10,
)
"""A machine on which all operations take time."""

MASKS = {
    "full": lambda _: tw.Full(),
    "causal": lambda _: tw.Causal(),
    "documents": lambda tokens: tw.Document([0, tokens // 5, tokens // 2, tokens]) & tw.Causal(),
}


def labels(plan: Plan, work: tw.Workload, backward: bool, rank: int) -> list[str]:
    """Of the operations of a rank's own code."""
    return list(plan.code(work, rank, backward).labels)


def named(timeline: Timeline) -> dict[int, list[str]]:
    """The names in the lanes compute, copy and wait, in the order in which they begin, by rank."""
    names: dict[int, list[str]] = {use.rank: [] for use in timeline.ranks}
    for span in sorted(timeline.spans, key=lambda span: span.start):
        if span.lane in ("compute", "copy", "wait"):
            names[span.rank].append(span.name)
    return names


def check(plan: Plan, work: tw.Workload, machine: Machine) -> Simulation:
    found = tw.simulate(plan, work, machine)
    for backward, timeline in enumerate((found.forward, found.backward)):
        for rank, names in named(timeline).items():
            assert names == labels(plan, work, bool(backward), rank), (plan, backward, rank)
    return found


def works(n: int) -> Iterator[tw.Workload]:
    for make in MASKS.values():
        for num_kv_heads, dtype in ((4 * n, "float32"), (n, "bfloat16")):
            heads = {"num_heads": 4 * n, "num_kv_heads": num_kv_heads}
            yield workload(n, mask=make(16 * n), dtype=dtype, **heads)


CASES = [(n, place) for n in (2, 4, 6, 8) for place in range(6)]


@pytest.mark.parametrize(("n", "place"), thinned(CASES, 8))
def test_every_strategys_trace_has_the_labels_of_each_ranks_own_operations(n: int, place: int):
    work = list(works(n))[place]
    made = [(plan, work) for plan in plans(n)]
    for strategy in MASK_AWARE:
        layout = strategy.layout(work.mask, 16 * n, n, KV_BYTES)
        made.append((strategy.plan(work.mask, layout, KV_BYTES), replace(work, layout=layout)))
    for index, (plan, of) in enumerate(made):
        check(plan, of, (MACHINES["nodes"], BUSY)[index % 2])


@pytest.mark.parametrize(
    "plan",
    (
        tw.all_gather(24),
        tw.mesh(24, q_tile=4, schedule="gather"),
        tw.ulysses(4, inner=tw.mesh(6, q_tile=3)),
    ),
    ids=lambda plan: plan.name,
)
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_relabelled_programs_take_the_time_of_every_ranks_own(plan: Plan, dtype: str):
    """Where half shards travel under a causal mask: the same labels, each at the same time."""
    work = workload(24, mask=tw.Causal(), dtype=dtype)
    fast = check(plan, work, BUSY)
    slow = tw.simulate(plan, work, BUSY, exact=True)
    assert any("[" in span.name for span in fast.forward.spans)
    for mine, theirs in ((fast.forward, slow.forward), (fast.backward, slow.backward)):
        for rank in (0, 5, 23):
            for a, b in zip(mine.rank_spans(rank), theirs.rank_spans(rank), strict=True):
                assert (*a[:3], *a[5:]) == (*b[:3], *b[5:])
                assert a[3:5] == pytest.approx(b[3:5], rel=1e-7, abs=1e-9 * mine.seconds)


def test_lanes_hold_operations_alone_and_what_is_around_them_has_its_own(tmp_path: Path):
    """A rank is in one lane of its own at a time, and spans fill its time until it is done."""
    found = check(tw.ring(4), workload(4), BUSY)
    for timeline in (found.forward, found.backward):
        for use in timeline.ranks:
            spans = list(timeline.rank_spans(use.rank))
            assert {span.lane for span in spans} == {"compute", "copy", "wait", "call"}
            assert spans[0][:4] == (use.rank, "call", "call", 0.0)
            for before, after in pairwise(spans):
                assert before.start + before.seconds == pytest.approx(after.start)
            end = spans[-1].start + spans[-1].seconds
            assert end == pytest.approx(sum(use[2:5]))
    found.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [e["name"] for e in events if (e["pid"], e.get("cat")) == (1, "forward")]
    assert set(labels(tw.ring(4), workload(4), False, 1)) < set(names)


def test_a_tiles_time_has_its_merging_and_only_kernels_count_as_computing():
    slow = replace(MACHINES["flat"], merge_seconds=1.0)
    found = tw.simulate(tw.ring(3), workload(3), slow)
    tiles = [span.seconds for span in found.forward.spans if span.lane == "compute"]
    assert sum(second > 1 for second in tiles) == 2 * len(found.forward.ranks)
    assert found.compute_seconds < 0.1 and found.exposed_seconds < 0.1
    assert found.forward.ranks[0].overhead_seconds == pytest.approx(2)

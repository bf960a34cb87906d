"""tiled with slack and linear: the layer's work is level within the slack, and bytes fewer."""

import pickle
from itertools import pairwise

import numpy as np
import pytest
from conformance.oracle import assert_close, dense, draw, split
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drawn_masks import layouts, masks

import tilewise as tw
from benchmarks.dynamic_scheduling import dynamic, figures, megatron, planned
from benchmarks.dynamic_scheduling import tiled as tiled_with
from tilewise.masks.base import Mask
from tilewise_tools.mask_report.figures import moved

N, RANKS = 1 << 14, 16


def documents(seed: int = 0) -> Mask:
    return tw.masks.causal_document(tw.lengths.sample("pile", N, seed=seed, cap=N // 4))


def workload(mask: Mask, layout: tw.Layout) -> tw.Workload:
    return tw.Workload(layout.num_tokens, 32, 8, 128, mask=mask, layout=layout)


def imbalance(plan: tw.Plan, mask: Mask, layout: tw.Layout, linear: float) -> float:
    work = np.array(moved(plan, workload(mask, layout)).areas) + linear * np.array(layout.sizes)
    return float(work.max() / work.mean())


@pytest.mark.parametrize("kind", ["own", "contiguous"])
@pytest.mark.parametrize(("slack", "linear"), [(0.0, 0.0), (0.1, 50.0), (0.5, 1000.0)])
@pytest.mark.parametrize("name", ["causal_document", "sliding_window"])
def test_both_passes_are_exact(name, kind, slack, linear):
    n, num_tokens, options = 5, 101, {"slack": slack, "linear": linear}
    mask = tw.masks.random(name, num_tokens, seed=3)
    split_up = {"contiguous": tw.contiguous, "zigzag": tw.zigzag}.get(kind)
    if split_up is None:
        layout = tw.tiled_layout(mask, num_tokens, n, **options)
    else:
        layout = split_up(num_tokens, n)
    plan = tw.tiled(mask, layout, **options)
    tw.check(plan, mask, layout)
    x = draw((num_tokens, 4, 4), (num_tokens, 2, 4), seed=1)
    assert_close(split(x, plan, layout, mask), dense(x, mask))


@settings(max_examples=25)
@given(
    mask=masks(),
    layout=layouts(),
    slack=st.floats(0, 2),
    linear=st.floats(0, 1e4),
    kv_bytes=st.sampled_from([0.25, 2.0]),
)
def test_any_mask_is_planned_on_any_layout(mask, layout, slack, linear, kv_bytes):
    tw.check(tw.tiled(mask, layout, kv_bytes=kv_bytes, slack=slack, linear=linear), mask, layout)


@pytest.mark.parametrize("seed", range(3))
def test_slack_is_kept_and_saves_bytes(seed):
    mask, linear, sent = documents(seed), 4000.0, []
    for slack in (0.03, 0.15, 0.4):
        options = {"kv_bytes": 0.5, "slack": slack, "linear": linear}
        layout = tw.tiled_layout(mask, N, RANKS, **options)
        plan = tw.tiled(mask, layout, **options)
        assert max(layout.sizes) == min(layout.sizes)
        assert imbalance(plan, mask, layout, linear) <= 1 + slack + 1e-3
        figured = moved(plan, workload(mask, layout))
        assert figured.sent == tw.volume(plan, workload(mask, layout)).forward
        sent.append(sum(figured.sent))
    level = tw.tiled_layout(mask, N, RANKS, kv_bytes=0.5)
    plain = moved(tw.tiled(mask, level, kv_bytes=0.5), workload(mask, level))
    assert sum(plain.sent) > sent[0] > sent[1] > sent[2]


def test_a_given_layout_is_level_by_work_and_rows_count():
    mask, linear = documents(), 3000.0
    contiguous = tw.contiguous(N, RANKS)
    for slack in (0.1, 0.5):
        plan = tw.tiled(mask, contiguous, kv_bytes=0.5, slack=slack, linear=linear)
        assert imbalance(plan, mask, contiguous, linear) <= 1 + slack + 0.05
    # a rank with twice the rows of the others does less of the attention
    edges = [0, 1024, *range(1536, 4097, 512)]
    uneven = tw.Layout(4096, [[tw.Run(a, b - a)] for a, b in pairwise(edges)])
    window = tw.Window(200, 0)
    plan = tw.tiled(window, uneven, kv_bytes=2.0, slack=0.02, linear=100.0)
    pairs = moved(plan, workload(window, uneven)).areas
    assert pairs[0] < 0.7 * max(pairs)
    assert imbalance(plan, window, uneven, 100.0) <= 1.07


def test_a_plan_takes_the_slack_of_its_layout():
    mask = documents()
    layout = tw.tiled_layout(mask, N, RANKS, kv_bytes=0.5, slack=0.3, linear=4000.0)
    given_again = tw.tiled(mask, layout, kv_bytes=0.5, slack=0.3, linear=4000.0)
    plan = tw.tiled(mask, layout, kv_bytes=0.5)
    assert plan == given_again and "slack=0.3, linear=4000.0" in plan.name
    tighter = tw.tiled(mask, layout, kv_bytes=0.5, slack=0.05)
    assert imbalance(tighter, mask, layout, 4000.0) < imbalance(plan, mask, layout, 4000.0)


def test_plans_survive_files_processes_and_other_heads():
    mask, options = documents(), {"slack": 0.3, "linear": 4000.0}
    layout = tw.tiled_layout(mask, N, RANKS, **options)
    plan = tw.tiled(mask, layout, **options)
    assert tw.from_json(tw.to_json(plan)) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert tw.tiled(mask, pickle.loads(pickle.dumps(layout))) == plan
    tuned = plan.tuned(32, 8)
    assert tuned == tw.tiled(mask, layout, kv_bytes=0.5, **options)
    assert imbalance(tuned, mask, layout, 4000.0) <= 1.3 + 1e-3


def test_a_causal_mask_never_moves_more_than_the_level_plan():
    for n, kv_bytes in ((4, 0.25), (8, 2.0), (32, 0.5)):
        layout = tw.contiguous(64 * n, n)
        work = workload(tw.Causal(), layout)
        level = tw.tiled(tw.Causal(), layout, kv_bytes=kv_bytes)
        loose = tw.tiled(tw.Causal(), layout, kv_bytes=kv_bytes, slack=1.0)
        assert sum(moved(loose, work).sent) <= 1.05 * sum(moved(level, work).sent)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slack": -0.1}, r"slack \(-0.1\) must be at least 0"),
        ({"slack": float("nan")}, r"slack \(nan\) must be a number"),
        ({"slack": float("inf")}, r"slack \(inf\) must be at least 0 and finite"),
        ({"linear": -1.0}, r"linear \(-1.0\) must be at least 0"),
        ({"slack": 0.1, "linear": float("nan")}, r"linear \(nan\) must be a number"),
    ],
)
def test_bad_numbers_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        tw.tiled(tw.Causal(), tw.contiguous(64, 4), **options)
    with pytest.raises(ValueError, match=message):
        tw.tiled_layout(tw.Causal(), 64, 4, **options)


@pytest.mark.parametrize("corpus", ["pile", "prolong64k"])
def test_less_is_sent_than_by_dynamic_context_parallelism_and_work_is_more_level(corpus):
    cu = tw.lengths.sample(corpus, 64 * 8192, seed=1, cap=131072)
    theirs = figures(dynamic([cu]))
    ours = figures([planned(lambda mask: tiled_with(0.3, mask), cu)])
    assert ours["mean"] < theirs["mean"] and ours["layer"] < theirs["layer"]
    assert ours["layer"] <= 1.3 + 1e-3 and ours["tokens"] == 8192


@given(st.lists(st.integers(1, 400), min_size=1, max_size=60))
def test_the_dynamic_baseline_runs_every_document_once_on_all_ranks(lengths):
    done = []
    for groups in megatron(lengths, 8, 50):
        assert sum(group.size for group in groups) == 8
        for group in groups:
            assert group.documents and all(x <= 50 * group.size for x in group.documents)
            done += group.documents
    assert sorted(done) == sorted(lengths)

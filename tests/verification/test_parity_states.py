"""Parity names faults of layers that carry a state or convolve, and finds none in right splits."""

from __future__ import annotations

from functools import partial

import pytest
from support.thinned import thinned
from verification.state_zoo import PACKED, STATE_CASES, made, share

import tilewise as tw


@pytest.mark.parametrize(
    "case",
    thinned(STATE_CASES, 3),
    ids=lambda case: f"{case.thread or case.kind}, {case.fault}",
)
def test_a_fault_of_a_layer_with_a_state_is_named(case):
    model, inputs = made(case.kind, case.cu_seqlens)
    options = {"world_size": case.world_size, "backend": "loopback"}
    report = tw.parity(model, inputs, case.split, **options)
    assert (report.equal, report.layer, report.cause) == (False, case.layer, case.cause), str(
        report
    )


def test_a_conv_reset_at_a_shard_and_a_state_carried_over_documents_are_both_told():
    """prime-rl #3003 had both: a state over documents, and shards taken for documents."""
    case = next(case for case in STATE_CASES if case.fault == "divided borders")
    report = tw.parity(*made(case.kind, case.cu_seqlens), case.split, backend="loopback")
    assert {"borders_invented", "documents_ignored"} <= {x.cause for x in report.findings}


@pytest.mark.parametrize("kind", ["delta", "decay", "early", "conv"])
@pytest.mark.parametrize("layout", [tw.contiguous, tw.zigzag])
def test_right_splits_of_a_hybrid_model_raise_no_alarm(kind, layout):
    report = tw.parity(*made(kind, PACKED), partial(share, layout=layout), backend="loopback")
    assert report.equal and report.compared > 50, str(report)


def test_a_hybrid_model_of_transformers(monkeypatch):
    pytest.importorskip("transformers", reason="needs transformers, of the extra hf")
    from support.hf_models import case
    from support.hybrid_models import build

    ids = case((0, 40)).input_ids
    inputs = {"input_ids": ids, "labels": ids}
    model = build("Qwen3Next")
    report = tw.parity(model, inputs)
    assert report.equal and report.compared > 60, str(report)
    scan = tw.ContextParallel.scan
    with monkeypatch.context() as change:
        change.setattr(tw.ContextParallel, "scan", lambda *a, **k: 0 * scan(*a, **k))
        report = tw.parity(model, inputs)
    assert report.cause == "state_restarts" and "linear_attn" in str(report.layer), str(report)
    with monkeypatch.context() as change:
        change.setattr(tw.ContextParallel, "scan", lambda *a, **k: scan(*a, **k).detach())
        report = tw.parity(model, inputs)
    assert report.cause == "state_gradient_lost", str(report)
    convolve = tw.ContextParallel.conv1d
    borders = tuple(range(0, 41, 5))  # of the zigzag pieces of 4 ranks

    def without_halo(cp, *args):
        return convolve(cp, *args[:-1], borders)  # pyright: ignore

    with monkeypatch.context() as change:
        change.setattr(tw.ContextParallel, "conv1d", without_halo)
        report = tw.parity(model, inputs)
    assert report.cause == "halo_missing", str(report)

"""Parity names what is wrong with a split, and where; and does not cry out at what is right."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from support.thinned import thinned
from torch import nn
from verification.state_zoo import STATE_CASES
from verification.zoo import CASES, EDGES, VARIANTS, WINDOW, Settings, T, joint, made, share

import tilewise as tw
from tilewise_verify.causes import CAUSES
from tilewise_verify.comparison import matched_positions
from tilewise_verify.palette import FORBIDDEN
from tilewise_verify.records import Record


@pytest.mark.parametrize("case", thinned(CASES), ids=lambda case: f"{case.fault} in {case.layer}")
def test_a_fault_of_the_zoo_is_found_and_named(case):
    model, inputs = made(case.settings)
    report = tw.parity(model, inputs, case.split, backend="loopback")
    assert (report.equal, report.layer, report.cause) == (False, case.layer, case.fault), str(
        report
    )
    assert case.fault in str(report) and report.to_json()["cause"] == case.fault
    assert all(parameter.grad is None for parameter in model.parameters())


QUICK = (
    *("mean_of_ranks", "labels_rolled", "own_key_seen", "sink_larger", "loss_dropped"),
    *("scale_on_one", "own_values_of_another", "first_key_lost", "other_gelu"),
    *("loss_per_token", "factor", "rows_silent", "wrong_derivative"),
)


@pytest.mark.parametrize(
    "case, cause",
    [
        pytest.param(
            *pair, id=pair[0].fault, marks=[pytest.mark.slow] * (pair[0].fault not in QUICK)
        )
        for pair in VARIANTS
    ],
)
def test_a_fault_that_differs_a_little_is_named(case, cause):
    report = tw.parity(*made(case.settings), case.split, backend="loopback")
    assert (report.equal, report.layer, report.cause) == (False, case.layer, cause), str(report)


def test_tokens_that_every_rank_holds_are_compared_by_their_sums():
    report = tw.parity(*made(), partial(share, layout=joint, given=True), backend="loopback")
    assert report.equal, str(report)


def test_the_zoo_has_every_cause():
    # effective_mask is told whether a sink or a cap is wanted; here padding looks like a sink.
    told = {"sink_added", "softcap_added"}
    of_indexers = {"index_restarts", "index_ties"}  # test_parity_indexers.py
    found = {case.fault for case in CASES} | {case.cause for case in STATE_CASES}
    assert found == set(CAUSES) - {"unknown"} - told - of_indexers


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        pytest.param(kind, fault, marks=[pytest.mark.slow] * (i != k))
        for i, kind in enumerate(("mla", "mha", "grouped"))
        for k, fault in enumerate(("window_ignored", "gqa_shifted", "dk_wrong"))
    ],
)
def test_attention_is_read_behind_other_projections(kind, fault):
    settings = Settings(kind=kind, window=WINDOW, learned=kind == "mha")
    report = tw.parity(*made(settings), partial(share, fault=fault), backend="loopback")
    layer = "layers.1.attention" if fault == "dk_wrong" else "layers.0.attention"
    assert report.cause == fault and str(report.layer).removesuffix(".mha") == layer, str(report)


@pytest.mark.parametrize("cap", [2.0, 10.0])
def test_a_softcap_that_is_weak_in_bf16_is_named(cap):
    settings = Settings(softcap=cap, dtype=torch.bfloat16)
    report = tw.parity(*made(settings), partial(share, fault="softcap_dropped"), backend="loopback")
    assert report.cause == "softcap_dropped", str(report)


DTYPES = torch.float64, torch.float32, torch.bfloat16
RIGHT = (
    (Settings(), {}),
    (Settings(window=5), {"layout": tw.contiguous, "given": True}),
    (Settings(documents=EDGES, sink=True), {"layout": tw.striped}),
    (Settings(kind="fused", softcap=2.0), {"fault": "reduced"}),
    (Settings(learned=True), {"fault": "right merge"}),
)


@pytest.mark.parametrize(("right", "dtype"), thinned(product(RIGHT, DTYPES)))
def test_a_right_split_raises_no_alarm(right, dtype):
    settings, options = right
    model, inputs = made(settings._replace(dtype=dtype))
    report = tw.parity(model, inputs, partial(share, **options), backend="loopback")
    assert report.equal and report.cause is None and report.layer is None, str(report)
    assert report.compared > 50 and str(report).startswith("equal")


def nested(fault: str) -> Callable[..., Any]:
    def split(model: Any, inputs: Any, rank: int, group: Any) -> Any:
        return share(model, inputs, rank, group, fault=fault)

    return split


def test_processes_run_nested_functions_of_a_file():
    model, inputs = made(Settings(window=5))
    report = tw.parity(model, inputs, nested("window_ignored"))
    assert (report.layer, report.cause) == ("layers.0.attention", "window_ignored"), str(report)
    svg = report.svg()
    assert svg is not None and FORBIDDEN in svg
    assert tw.parity(model, inputs, nested("")).equal


@pytest.mark.parametrize("fault", ["", "window_ignored", "shard_only", "gqa_shifted"])
def test_a_batch_of_several_sequences_is_read(fault):
    model, inputs = made(Settings(window=5, kind="fused"), batch=2)
    report = tw.parity(model, inputs, partial(share, fault=fault), backend="loopback")
    assert (report.cause or "") == fault and report.equal == (not fault), str(report)


def test_rows_of_usual_layouts_are_matched_though_tokens_recur():
    """Of zigzag ranks a run of equal tokens may go on, by chance, where the next chunk begins."""
    same = torch.randint(0, 3, (49, 1), generator=torch.Generator().manual_seed(0)).double()
    for make in (tw.contiguous, tw.zigzag, tw.striped):
        layout = make(49, 4)
        ranks = [
            Record({"output": {"embed": layout.shard(same, rank, dim=0)}}) for rank in range(4)
        ]
        found = matched_positions(Record({"output": {"embed": same}}), ranks, 49)
        assert found is not None
        assert all(torch.equal(x, layout.positions(rank)) for rank, x in enumerate(found))


def one_rank_without_heads(model: Any, inputs: Any, rank: int, group: Any) -> Any:
    return share(model, inputs, rank, group, fault="heads_missing" if rank == 3 else "")


def test_heads_that_one_rank_leaves_out_are_missing():
    report = tw.parity(*made(), one_rank_without_heads, backend="loopback")
    assert (report.layer, report.cause) == ("layers.0.attention", "heads_missing"), str(report)


@pytest.mark.parametrize("name", ["mistral", "gpt2"])
def test_a_model_of_transformers_through_tilewise_is_equal(name):
    pytest.importorskip("transformers", reason="needs transformers, of the extra hf")
    from support.hf_models import build, case

    ids = case((0, 40)).input_ids
    inputs = {"input_ids": ids, "labels": ids}
    report = tw.parity(build(name), inputs)
    assert report.equal and report.compared > 60, str(report)
    with pytest.raises(ValueError, match="inputs has input_ids, labels, position_ids"):
        tw.parity(build(name), inputs | {"position_ids": torch.arange(40)[None]})


def broken(model: Any, inputs: Any, rank: int, group: Any) -> Any:
    if rank == 1:
        raise KeyError("no such shard")
    return share(model, inputs, rank, group)


def hanging(model: Any, inputs: Any, rank: int, group: Any) -> Any:
    if rank == 2:
        time.sleep(100)
    return share(model, inputs, rank, group)


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.slow), "loopback"])
def test_a_rank_that_raises_is_named(backend):
    report = tw.parity(*made(), broken, backend=backend)
    assert not report.equal and report.cause == "unknown"
    assert "rank 1 raised KeyError: 'no such shard'" in str(report)


@pytest.mark.parametrize(
    "backend, timeout", [pytest.param("gloo", 6, marks=pytest.mark.slow), ("loopback", 2)]
)
def test_a_rank_that_hangs_is_named_within_the_timeout(backend, timeout):
    report = tw.parity(*made(), hanging, timeout=timeout, backend=backend)
    assert not report.equal and "rank 2 gave no answer in time" in str(report)
    assert backend == "gloo" or "rank 1" not in str(report)
    compiled: Any = torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")
    assert compiled(torch.ones(1, 2)).shape == (1, 2)  # though the rank hangs on in this process


def test_ranks_that_are_late_leave_the_seed_of_the_process_alone():
    """One that woke up after the time set torch's seed in the midst of what came later."""
    woken, ended, begun = threading.Event(), threading.Event(), []

    def late(model: Any, inputs: Any, rank: int, group: Any) -> Any:
        begun.append(rank)
        if rank == 1:
            woken.wait()
            threading.Timer(0.2, ended.set).start()
        return share(model, inputs, rank, group)

    report = tw.parity(*made(), late, timeout=5, backend="loopback")
    assert "rank 1 gave no answer in time" in str(report)
    before = torch.get_rng_state()
    woken.set()
    ended.wait()
    assert begun == [0, 1] and torch.equal(torch.get_rng_state(), before)


def test_one_rank_has_all_rows():
    report = tw.parity(*made(), share, world_size=1, backend="loopback")
    assert report.equal and not report.notes


class NoLoss(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return super().forward(x)


SAYS_NOTHING = {
    "no loss on ranks 0, 1, 2, 3": lambda *given: None,
    "positions of 5, 5, 5, 5 rows": lambda *given: (share(*given), torch.arange(5)),
    r"positions \[90, .* below num_tokens": lambda *given: (share(*given), 90 + torch.arange(8)),
}


def test_what_cannot_be_compared_is_an_error():
    x = torch.randn(1, T, 4)
    with pytest.raises(ValueError, match="returned no loss; pass labels"):
        tw.parity(NoLoss(4, 4), {"x": x}, share)
    with pytest.raises(ValueError, match=r"is no model of transformers .* pass split"):
        tw.parity(NoLoss(4, 4), {"x": x})
    with pytest.raises(ValueError, match=r"backend 'mpi'"):
        tw.parity(*made(), share, backend="mpi")
    with pytest.raises(ValueError, match=r"world_size \(0\)"):
        tw.parity(*made(), share, world_size=0)
    with pytest.raises(ValueError, match=r"inputs \(list\) must be a dict"):
        tw.parity(*made()[:1], [x], share)  # pyright: ignore
    for text, split in SAYS_NOTHING.items():
        with pytest.raises(ValueError, match=text):
            tw.parity(*made(), split, backend="loopback")
    with pytest.raises(ValueError, match="holds no tensor"):
        tw.parity(NoLoss(4, 4), {}, share)

"""No race on a device: every strategy, both passes, on played streams and a played NCCL.

See played_cuda.py for what is a race; test_race_seeds.py shows that races are found.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from cuda_model.played_cuda import PlayedDevice, play
from cuda_model.race_cases import (
    MASKS,
    NODES,
    PLANS,
    RESULTS,
    TOKENS,
    WIDTH,
    Case,
    case_of,
    keep_results,
    over_nccl,
    run,
)
from cuda_model.watched import Watch, WatchedKernel
from support.list_kernel import ListKernel

import tilewise as tw
from tilewise.transport import streams
from tilewise.transport.loopback import LoopbackGroup

CUDA = torch.device("cuda")
ENDS = "loopback", "one lane", "two lanes"
OFTEN = ("loopback", "double ring"), ("loopback", "one way"), ("two lanes", "mesh")


def crossed() -> Iterator[Any]:
    """All there is; of loopback and of adopted results a part is enough for every day."""
    for number, plan in enumerate((*PLANS, "one way")):
        yield from crossed_with(plan, number % 2 == 0)


def crossed_with(plan: str, often_alone: bool) -> Iterator[Any]:
    for where, how in product(ENDS, RESULTS):
        often = (where, plan) in OFTEN or (how == "wait" and where == "one lane" and often_alone)
        yield pytest.param(plan, where, how, marks=[] if often else [pytest.mark.slow])


@pytest.fixture
def device(monkeypatch) -> PlayedDevice:
    return play(monkeypatch)


@pytest.mark.parametrize(("plan", "where", "how"), [*crossed()])
def test_no_strategy_has_a_race(plan, where, how, device, monkeypatch):
    keep_results(monkeypatch, how)
    run(case_of(plan), device, transports(where, plan, device, monkeypatch))
    assert device.races == [] and device.operations > 100


def transports(where: str, plan: str, device: PlayedDevice, monkeypatch: Any) -> Any:
    """None: loopback."""
    if where == "loopback":
        return None
    node_size = NODES.get(plan, 2) if where == "two lanes" else None
    return over_nccl(monkeypatch, device, node_size, blocking=False)


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("plan", PLANS)
def test_nccl_gives_what_loopback_gives(plan, mask, device, monkeypatch):
    """Also where the host waits for every batch, as when NCCL connects two ranks."""
    keep_results(monkeypatch, "wait")
    case = Case(PLANS[plan], MASKS[mask])
    want = run(case, device)
    for node_size in {None, NODES.get(plan)}:
        for blocking in (False, True):
            transport = over_nccl(monkeypatch, device, node_size, blocking=blocking)
            for ours, theirs in zip(run(case, device, transport), want, strict=True):
                for x, y in zip(ours, theirs, strict=True):
                    # on two lanes gradients may be added in another order
                    assert (x - y).abs().max() < 1e-6 if node_size else torch.equal(x, y)
    assert device.races == []


VARIANTS: dict[str, dict[str, Any]] = {
    "gathered": {"save": "gathered"},
    "narrow": {"wire_dtype": "bfloat16"},
    "two plans": {"backward_plan": tw.mesh(4, q_tile=2)},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_options_have_no_race(variant, device, monkeypatch):
    keep_results(monkeypatch, "wait")
    case = Case(tw.mesh(4, q_tile=4), MASKS["by head"], options=VARIANTS[variant])
    run(case, device, over_nccl(monkeypatch, device, 2, blocking=False))
    assert device.races == [] and device.operations > 100


def test_kernels_that_take_whole_tiles_have_no_race(device, monkeypatch):
    keep_results(monkeypatch, "write")
    kernel = WatchedKernel(tw.kernel("reference"), device, whole_tile=True)
    run(Case(tw.mesh(4, q_tile=2), MASKS["documents"]), device, kernel=kernel)
    assert device.races == []


@pytest.mark.parametrize("mask", ["causal", "documents", "by head"])
@pytest.mark.parametrize("plan", ["ring", "mesh", "mesh eager", "mesh gather", "ulysses"])
def test_kernels_that_read_rows_where_they_lie_have_no_race(plan, mask, device, monkeypatch):
    keep_results(monkeypatch, "wait")
    kernel = ListKernel()
    transport = over_nccl(monkeypatch, device, NODES.get(plan), blocking=False)
    run(Case(PLANS[plan], MASKS[mask]), device, transport, WatchedKernel(kernel, device))
    assert device.races == [] and kernel.calls


@pytest.mark.parametrize("nccl", [False, True], ids=["loopback", "nccl"])
def test_a_graph_takes_in_all_streams_and_nothing_from_before(nccl, device, monkeypatch):
    keep_results(monkeypatch, "wait")
    transport = over_nccl(monkeypatch, device, 2, blocking=False) if nccl else None
    case = Case(PLANS["double ring"], MASKS["documents"], passes=3)
    kernel = WatchedKernel(tw.kernel("cpu"), device)
    run(case, device, transport, kernel)
    known = {*kernel.ways}
    with device.capturing():
        assert streams.is_capturing(CUDA)
        run(case, device, transport, kernel)
    assert kernel.ways == known  # nothing is compiled in a capture
    run(case, device, transport, kernel)
    assert device.races == []


def test_what_is_wrong_with_a_capture_is_found(device):
    early = streams.current_moment(CUDA)
    device.launch("before", [], [])
    moment = streams.current_moment(CUDA)
    with device.capturing():
        streams.follow(early)
        assert not device.races
        streams.follow(moment)
        assert device.races.pop().startswith("a captured stream waits for an event outside")
        inside = streams.current_moment(CUDA)
        with streams.on_stream(streams.new_stream(CUDA)):
            streams.follow(inside)
            device.launch("lost", [], [])
    assert device.races.pop() == "a captured stream does not come back to the one it began on"
    streams.follow(inside)
    assert device.races == ["a stream waits for an event of a capture that is over"]


@pytest.mark.parametrize("nccl", [False, True], ids=["loopback", "nccl"])
def test_decoding_has_no_race(nccl, device, monkeypatch):
    kernel = WatchedKernel(tw.kernel("cpu"), device)
    transport = over_nccl(monkeypatch, device, None, blocking=False) if nccl else None

    def on_rank(rank: int, group: LoopbackGroup) -> None:
        with Watch(device), torch.no_grad():
            end = transport(rank, group) if transport else group
            options = {"num_kv_heads": 2, "head_dim": WIDTH, "batch": 2, "group": end}
            made = tw.KVCache(TOKENS, validate="never", kernel=kernel, **options)
            for tokens in (5, 1, 1, 2):
                q = torch.ones(2, tokens, 4, WIDTH)
                k, v = torch.ones(2, 2, tokens, 2, WIDTH).unbind()
                out = made.decode(q, k, v)
                for x in (q, k, v, out):
                    x.mul_(2.0)

    tw.loopback(3, on_rank)
    assert device.races == [] and device.operations > 100

"""Other libraries beside ours: the kernel they are lent is right, their errors are their own."""

import pickle
import re
from importlib.util import find_spec

import pytest
import torch

import tilewise as tw
from benchmarks.peers import contenders
from benchmarks.peers.adapter import CannotRunError, Words, words
from tilewise.simulation.machine import Machine
from tilewise_tools.bench.case import BenchCase, LabNetwork, Timing
from tilewise_tools.bench.contender import Contender
from tilewise_tools.bench.engine import planned_rows, run_cases
from tilewise_tools.bench.grid import contenders_of
from tilewise_tools.bench.our_strategies import strategy

RING, LLAMA3, USP, *WHOLE, TORCH_GATHERS, TORCH_EXCHANGES = contenders()
TORCH = TORCH_GATHERS, TORCH_EXCHANGES
ERRORS = ("error_out", "error_dq", "error_dk", "error_dv")
installed = pytest.mark.skipif(
    not (find_spec("ring_flash_attn") and find_spec("yunchang")),
    reason="the peers are not installed: pip install 'tilewise[peers]'",
)


def case(mask: str, **fields) -> BenchCase:
    chosen = {"num_tokens": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, **fields}
    n = chosen.setdefault("world_size", 4)
    network = LabNetwork("loopback", 1, n)
    return BenchCase("strategies", mask, **{"dtype": "float32", "network": network, **chosen})


def test_masks_become_the_peers_arguments():
    assert words(tw.Full()) == Words()
    assert words(tw.Causal()) == words(tw.Window(None, 0)) == Words(causal=True)
    assert words(tw.Window(9, 0)) == Words(causal=True, left=9, right=0)
    assert words(tw.Window(9, 4)) == Words(left=9, right=4)
    assert words(tw.Causal() & tw.Document([0, 3, 8])) == Words(causal=True, cu_seqlens=(0, 3, 8))
    for mask in (tw.Causal() | tw.Document([0, 8]), tw.Window(1, 2) & tw.Window(2, 1)):
        with pytest.raises(CannotRunError, match="cannot say the mask"):
            words(mask)


def test_peers_are_contenders_that_a_run_can_name():
    found = contenders_of("benchmarks.peers")
    assert {one.name for one in found} >= {
        *("ringmaster ulysses", "ringmaster ring p2p", "ringmaster ring allgather"),
        *("yunchang ulysses", "ring-flash-attn llama3 all heads"),
    }
    assert [one.name for one in found] == [one.name for one in contenders()]
    for one in found:
        assert isinstance(one, Contender) and pickle.loads(pickle.dumps(one)) == one
    # packages from an index are named without the "+cu130" of the build
    assert torch.__version__.startswith(TORCH[0].version)


@installed
@pytest.mark.parametrize(
    "peer, asked, reason",
    [
        (RING, case("causal", num_tokens=260), r"num_tokens \(260\) must be a multiple of 8"),
        (RING, case("full_document"), "no argument for documents"),
        (LLAMA3, case("prefix_lm_causal"), "cannot say the mask"),
        (LLAMA3, case("causal", layout="zigzag"), "lie contiguous, not zigzag"),
        (USP, case("causal", num_kv_heads=1), r"num_kv_heads \(1\) must be a multiple"),
        (USP, case("causal", world_size=3), r"world_size \(3\) must be a multiple"),
        (TORCH[0], case("sliding_window"), "full or causal only"),
        (TORCH[1], case("causal", world_size=1), r"world_size \(1\) must be at least 2"),
        (WHOLE[0], case("causal"), r"num_kv_heads \(2\) must be a multiple of world_size"),
        (WHOLE[0], case("causal_document"), "no argument for documents"),
        (WHOLE[2], case("sliding_window"), "its windows are causal"),
        (WHOLE[3], case("causal_document"), "gathers where there are documents"),
        (RING, case("causal", device="cuda"), "run on cpu"),
        (RING, case("causal", network=LabNetwork("limited", 4, 1, 50.0)), "limited transport"),
    ],
)
def test_a_peer_says_why_it_cannot(peer, asked, reason):
    assert re.search(reason, str(peer.supports(asked)))


def test_a_missing_package_is_said(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'tilewise[peers]'" in str(RING.supports(case("causal")))
    assert RING.version == "not installed"


def rows(*cases: BenchCase) -> dict[tuple[str, str, str], dict]:
    """What a run of our ring and all peers says, by mask, dtype and contender."""
    everyone = (strategy("ring"), *contenders())
    plan = [(one, everyone) for one in cases]
    timing, machine = Timing(repeats=1, warmups=0), Machine.preset("cpu-gloo")
    found = run_cases(planned_rows(plan, timing, machine))
    return {(row["mask"], row["dtype"], row["contender"]): row for row in found}


@installed
@pytest.mark.slow
def test_errors_of_peers_show_and_ours_has_none():
    masks = "causal", "full", "sliding_window_causal", "causal_document"
    asked = [case(mask) for mask in masks]
    found = rows(*asked, case("causal", dtype="bfloat16"))
    for (_, _, name), row in found.items():
        assert row["outcome"] in ("ok", "unsupported"), row["message"]
        if name == "ring":
            assert row["is_exact"], row
    # the gradients of a ring's fp32 buffers are the buffers themselves: overwritten, added twice
    for name in (RING.name, USP.name):
        assert found["causal", "bfloat16", name]["is_exact"]
        for mask in ("causal", "full"):
            row = found[mask, "float32", name]
            assert row["error_out"] < row["tolerance"]
            assert all(row[error] > 0.01 for error in ERRORS[1:]), row
        # a window is applied to each step's block as if it stood at the block's end
        row = found["sliding_window_causal", "float32", name]
        assert row["error_out"] is None or row["error_out"] > 0.01
    for mask in masks:
        assert found[mask, "float32", LLAMA3.name]["is_exact"]
    for one in WHOLE:
        for mask in masks:
            row = found[mask, "float32", one.name]
            assert row["outcome"] == "unsupported" or row["is_exact"], row
    for peer in TORCH:
        assert found["causal", "float32", peer.name]["is_exact"]
        assert found["full", "float32", peer.name]["is_exact"]


@installed
@pytest.mark.slow
def test_bytes_of_peers_are_counted_alike():
    """In shares of keys and values: of fp32 gradients two to a half-precision one."""
    found = rows(case("full"), case("full", dtype="bfloat16"))
    share = 2 * 64 * 2 * 8 * 4
    for dtype, wide in (("float32", 1), ("bfloat16", 2)):
        unit = share / wide
        row = {name: found["full", dtype, name] for name in (RING.name, LLAMA3.name, "ring")}
        assert row[RING.name]["bytes_by_rank"] == [(3 + 3 + 4 * wide) * unit] * 4
        assert row[LLAMA3.name]["bytes_by_rank"] == [(3 + 3 + 3) * unit] * 4
        assert row["ring"]["bytes_by_rank"] == [(3 + 3 + 3) * unit] * 4
        for peer in TORCH:
            sent = found["full", dtype, peer.name]["bytes_by_rank"]
            assert sent == [(3 + 3 + 4 * wide) * unit] * 4

"""Other libraries beside ours: the kernel they are lent is right, their errors are their own."""

import pickle
import re
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

import tilewise as tw
from benchmarks.peers import contenders, flash_attn_shim
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


def dense(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, allowed: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """out, lse and gradients of [tokens, heads, head_dim] under any mask."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    ratio = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(ratio, 1) for x in leaves[1:])
    scores = torch.einsum("mhd,nhd->hmn", leaves[0], keys) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~allowed, -torch.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    out = torch.einsum("hmn,nhd->mhd", p, values)
    return out.detach(), lse.detach(), list(torch.autograd.grad(out, leaves, dout))


def normal(*shapes: tuple[int, ...]) -> list[Tensor]:
    make = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=make, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize(
    "num_q, num_k, causal, window",
    [
        (24, 24, True, (-1, -1)),
        (24, 40, True, (-1, -1)),
        (40, 24, True, (-1, -1)),
        (24, 40, False, (-1, -1)),
        (24, 24, True, (5, -1)),
        (24, 40, False, (6, 3)),
        (40, 24, False, (2, 0)),
    ],
)
def test_the_shim_means_what_flash_attn_means(num_q, num_k, causal, window):
    queries, keys = (num_q, 4, 8), (num_k, 2, 8)
    q, k, v, dout = normal(queries, keys, keys, queries)
    offset = np.arange(num_k) - (np.arange(num_q)[:, None] + num_k - num_q)
    left, right = window[0], 0 if causal else window[1]
    allowed = (offset >= -left if left >= 0 else offset == offset) & (
        offset <= right if right >= 0 else offset == offset
    )
    want_out, want_lse, want = dense(q, k, v, dout, torch.from_numpy(allowed))
    options = {"causal": causal, "window_size_left": window[0], "window_size_right": window[1]}
    out, lse, *_ = flash_attn_shim.forward(q[None], k[None], v[None], **options)
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    flash_attn_shim.backward(
        *(x[None] for x in (dout, q, k, v)), out, lse, *(x[None] for x in grads), **options
    )
    assert torch.allclose(out[0], want_out, rtol=0, atol=1e-13)
    nobody = want_lse == -torch.inf
    assert torch.equal(lse[0] == torch.inf, nobody), "flash_attn says +inf where no key is seen"
    assert torch.allclose(lse[0][~nobody], want_lse[~nobody], rtol=0, atol=1e-13)
    for got, grad in zip(grads, want, strict=True):
        assert torch.allclose(got, grad, rtol=0, atol=1e-13)


def test_the_shim_computes_documents_of_other_lengths_of_queries_and_keys():
    q, k, v, dout = normal((20, 4, 8), (33, 2, 8), (33, 2, 8), (20, 4, 8))
    edges = {"cu_seqlens_q": torch.tensor([0, 7, 20]), "cu_seqlens_k": torch.tensor([0, 12, 33])}
    allowed = torch.zeros(20, 33, dtype=torch.bool)
    allowed[:7, :12] = torch.ones(7, 12).tril(5).bool()
    allowed[7:, 12:] = torch.ones(13, 21).tril(8).bool()
    want_out, want_lse, want = dense(q, k, v, dout, allowed)
    out, lse, *_ = flash_attn_shim.varlen_forward(q=q, k=k, v=v, causal=True, **edges)
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    saved = {"dout": dout, "out": out, "softmax_lse": lse, "dq": dq, "dk": dk, "dv": dv}
    flash_attn_shim.varlen_backward(q=q, k=k, v=v, causal=True, **saved, **edges)
    pairs = zip((out, lse, dq, dk, dv), (want_out, want_lse, *want), strict=True)
    assert all(torch.allclose(got, right, rtol=0, atol=1e-13) for got, right in pairs)


def test_the_shims_differentiable_function_is_its_two_passes():
    q, k, v, dout = normal((24, 4, 8), (40, 2, 8), (40, 2, 8), (24, 4, 8))
    leaves = [x[None].requires_grad_() for x in (q, k, v)]
    out, lse, _ = flash_attn_shim.flash_attn_func(*leaves, causal=True, return_attn_probs=True)
    allowed = torch.ones(24, 40, dtype=torch.bool).tril(16)
    want_out, want_lse, want = dense(q, k, v, dout, allowed)
    found = out[0], lse[0], *torch.autograd.grad(out[0], leaves, dout)
    for got, right in zip(found, (want_out, want_lse, *want), strict=True):
        assert torch.allclose(got.squeeze(0), right, rtol=0, atol=1e-13)


def test_the_shims_packed_function_differentiates_documents():
    q, k, v, dout = normal((20, 4, 8), (33, 2, 8), (33, 2, 8), (20, 4, 8))
    edges = torch.tensor([0, 7, 20]), torch.tensor([0, 12, 33])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn_shim.flash_attn_varlen_func(*leaves, *edges, 13, 21, causal=True)
    allowed = torch.zeros(20, 33, dtype=torch.bool)
    allowed[:7, :12] = torch.ones(7, 12).tril(5).bool()
    allowed[7:, 12:] = torch.ones(13, 21).tril(8).bool()
    want_out, _, want = dense(q, k, v, dout, allowed)
    for got, right in zip(
        (out, *torch.autograd.grad(out, leaves, dout)), (want_out, *want), strict=True
    ):
        assert torch.allclose(got, right, rtol=0, atol=1e-13)


def test_what_the_shim_cannot_compute_is_an_error():
    (q,) = normal((8, 2, 8))
    with pytest.raises(NotImplementedError, match="dropout"):
        flash_attn_shim.forward(q[None], q[None], q[None], dropout_p=0.5)


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

"""tilewise.compat.ring_flash_attn computes what the unsplit sequence gives, in theirs' layouts."""

import inspect
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.exc import Unsupported

import tilewise as tw
from tilewise.compat import ring_flash_attn as rfa
from tilewise.compat.ring_flash_attn import utils

N, CU = 3, (0, 12, 12, 54, 60)
ROWS = CU[-1] // N
HEADS, KV_HEADS, DIM = 4, 2, 8
LAYOUTS = ("ring", "zigzag_ring", "stripe", "ring_varlen", "zigzag_ring_varlen", "llama3_varlen")
OPTIONS = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1),
    "alibi_slopes": None, "deterministic": False, "return_attn_probs": False, "group": None,
}  # fmt: skip
LENGTHS = {
    "ring_varlen": ["cu_seqlens", "max_seqlen"],
    "zigzag_ring_varlen": ["cu_seqlens", "max_seqlen"],
    "llama3_varlen": [
        "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "heads_k_stride",
        "local_k_slice",
    ],
}  # fmt: skip
PACKINGS = {"": ["q", "k", "v"], "_kvpacked": ["q", "kv"], "_qkvpacked": ["qkv"]}


def function_of(layout: str, packing: str = ""):
    name, varlen, _ = layout.partition("_varlen")
    return getattr(rfa, f"{name}_flash_attn{varlen}{packing}_func")


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_signatures_are_those_of_ring_flash_attn(layout: str, packing: str):
    function = function_of(layout, packing)
    parameters = inspect.signature(function).parameters
    tensors = [*PACKINGS[packing], *LENGTHS.get(layout, [])]
    assert [*parameters] == [*tensors, *OPTIONS]
    assert {name: parameters[name].default for name in OPTIONS} == OPTIONS
    assert all(parameters[name].default is inspect.Parameter.empty for name in tensors)


def local(x: Tensor, layout: str, rank: int) -> Tensor:
    """This rank's rows of [tokens, ...], as ring-flash-attn's own tests take them."""
    if layout == "stripe":
        return x[rank::N]
    if layout in ("ring", "llama3_varlen"):
        return x.chunk(N)[rank]
    if layout == "zigzag_ring":
        parts = x.chunk(2 * N)
        return torch.cat([parts[rank], parts[2 * N - 1 - rank]])
    inner = layout.removesuffix("_varlen")
    documents = [x[a:b] for a, b in pairwise(CU) if a < b]
    return torch.cat([local(document, inner, rank) for document in documents])


def seen(layout: str, causal: bool, window: tuple[int, int]) -> Tensor:
    """bool [tokens, tokens]: which keys a query sees."""
    token = torch.arange(CU[-1])
    offset = token[None] - token[:, None]
    allowed = torch.ones(CU[-1], CU[-1], dtype=torch.bool)
    if layout.endswith("_varlen"):
        document = torch.bucketize(token, torch.tensor(CU[1:]), right=True)
        allowed &= document[None] == document[:, None]
    if causal:
        allowed &= offset <= 0
    left, right = window
    allowed &= (offset >= -left) if left >= 0 else True
    return allowed & (offset <= right if right >= 0 else True)


def dense(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5
    scores = scores.masked_fill(~allowed, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def call(layout: str, rank: int, group, q, k, v, stride: int = KV_HEADS, **options):
    """The function of a layout on this rank's rows [rows, heads, head_dim]."""
    if not layout.endswith("_varlen"):
        out, lse, none = function_of(layout)(
            q[None], k[None], v[None], group=group, return_attn_probs=True, **options
        )
        return out[0], lse[0], none
    if layout == "llama3_varlen":
        cu = torch.tensor(CU, dtype=torch.int32)
        causal = options.get("causal", False)
        *lengths, local_k_slice = rfa.llama3_flash_attn_prepare_cu_seqlens(cu, causal, rank, N)
        lengths = *lengths, stride, local_k_slice
    else:
        lengths = torch.tensor(CU, dtype=torch.int32) // N, max(CU) // N
    return function_of(layout)(q, k, v, *lengths, group=group, return_attn_probs=True, **options)


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(CU[-1], heads, DIM, dtype=dtype) for heads in shapes]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal, window", [(True, (-1, -1)), (False, (-1, -1)), (True, (5, 0)),
                                            (False, (7, 3))])  # fmt: skip
def test_outputs_and_each_gradient_are_those_of_dense_attention(layout, causal, window):
    *qkv, dout = inputs()
    whole = [x.clone().requires_grad_() for x in qkv]
    out, lse = dense(*whole, seen(layout, causal, window))
    dlse = torch.randn_like(lse)
    torch.autograd.backward([out, lse], [dout, dlse])

    def main(rank: int, group):
        mine = [local(x, layout, rank).clone().requires_grad_() for x in qkv]
        got, got_lse, none = call(layout, rank, group, *mine, causal=causal, window_size=window)
        assert none is None
        grads = [local(dout, layout, rank), local(dlse.T, layout, rank).T]
        torch.autograd.backward([got, got_lse], grads)
        wanted = [out, lse.T, *(x.grad for x in whole)]
        return [
            float((x - local(y, layout, rank)).detach().abs().max())
            for x, y in zip([got, got_lse.T, *(x.grad for x in mine)], wanted, strict=True)
        ]

    assert max(map(max, tw.loopback(N, main))) < 1e-12


@pytest.mark.parametrize("layout", ["zigzag_ring", "ring_varlen", "llama3_varlen"])
def test_packed_forms_give_the_same(layout: str):
    q, k, v, _ = inputs(torch.float32)
    q = q[:, :KV_HEADS]

    def main(rank: int, group):
        mine = [local(x, layout, rank) for x in (q, k, v)]
        dim = 0 if layout.endswith("_varlen") else 1
        mine = [x if dim == 0 else x[None] for x in mine]
        lengths = ()
        if layout == "ring_varlen":
            lengths = torch.tensor(CU) // N, max(CU)
        elif layout == "llama3_varlen":
            *four, keys = rfa.llama3_flash_attn_prepare_cu_seqlens(torch.tensor(CU), True, rank, N)
            lengths = *four, 1, keys
        more = {"causal": True, "group": group}
        plain = function_of(layout)(*mine, *lengths, **more)
        kv = torch.stack(mine[1:], dim + 1)
        assert torch.equal(function_of(layout, "_kvpacked")(mine[0], kv, *lengths, **more), plain)
        qkv = torch.stack(mine, dim + 1)
        packed = function_of(layout, "_qkvpacked")(qkv, *lengths, 0.0, None, True, group=group)
        assert torch.equal(packed, plain)
        return plain.dtype

    assert tw.loopback(N, main) == [torch.float32] * N


def test_boundaries_that_no_rank_was_told_are_asked_of_all():
    *qkv, _ = inputs()
    wanted, _ = dense(*qkv, seen("llama3_varlen", True, (-1, -1)))

    def main(rank: int, group):
        lengths = rfa.llama3_flash_attn_prepare_cu_seqlens(torch.tensor(CU), True, rank, N)
        cu_q, cu_k, max_q, max_k, keys = (x.clone() if torch.is_tensor(x) else x for x in lengths)
        mine = [local(x, "llama3_varlen", rank) for x in qkv]
        given = *mine, cu_q, cu_k, max_q, max_k, 1
        out = rfa.llama3_flash_attn_varlen_func(*given, keys, causal=True, group=group)
        with pytest.raises(ValueError, match="rank 0: cu_seqlens_k and local_k_slice"):
            rfa.llama3_flash_attn_varlen_func(*given, slice(0, 1), causal=True, group=group)
        return out

    assert (torch.cat(tw.loopback(N, main)) - wanted).abs().max() < 1e-12


def test_the_slices_of_a_rank_are_those_that_ring_flash_attn_gives():
    # What llama3_flash_attn_prepare_cu_seqlens of ring-flash-attn 0.1.8 returned.
    wanted = [([0, 2], [0, 4], slice(0, 4)), ([0, 2], [0, 6], slice(0, 6)),
              ([0, 1, 2], [0, 7, 8], slice(0, 8)), ([0, 2], [0, 7], slice(7, 14))]  # fmt: skip
    cu = torch.tensor([0, 7, 14, 16], dtype=torch.int32)
    for (rank, causal), (q, k, keys) in zip(
        [(1, True), (2, True), (3, True), (5, False)], wanted, strict=True
    ):
        found = rfa.llama3_flash_attn_prepare_cu_seqlens(cu, causal, rank, 8)
        assert (found[0].tolist(), found[1].tolist(), found[4]) == (q, k, keys)
        assert found[0].dtype == torch.int32
        assert found[2:4] == (max(torch.tensor(q).diff()), max(torch.tensor(k).diff()))


def test_dropout_has_the_gradient_of_what_it_dropped():
    q, k, v, dout = inputs()

    def main(rank: int, group):
        torch.manual_seed(3 + rank)
        given = {"dropout_p": 0.4, "causal": True}
        mine = [local(x, "zigzag_ring", rank).clone().requires_grad_() for x in (q, k, v)]
        out, *_ = call("zigzag_ring", rank, group, *mine, **given)
        out.backward(local(dout, "zigzag_ring", rank))
        # Dropout is linear in v: the output is what its gradient says.
        return float((out.detach() * local(dout, "zigzag_ring", rank)).sum()), mine[2].grad

    results = tw.loopback(N, main)
    total = sum(value for value, _ in results)
    grads = [grad for _, grad in results]
    paired = sum(float((g * local(v, "zigzag_ring", r)).sum()) for r, g in enumerate(grads))
    assert total == pytest.approx(paired, rel=1e-12)
    without, _ = dense(q, k, v, seen("zigzag_ring", True, (-1, -1)))
    assert abs(total - float((without * dout).sum())) > 1e-3


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_alibi_is_that_of_flash_attn_and_refused_for_packed_sequences(layout: str, causal: bool):
    (q, k, v, dout), slopes = inputs(), torch.linspace(0.1, 1, HEADS)

    def main(rank: int, group):
        mine = [local(x, layout, rank).clone().requires_grad_() for x in (q, k, v)]
        out, lse, _ = call(layout, rank, group, *mine, causal=causal, alibi_slopes=slopes)
        out.backward(local(dout, layout, rank))
        return out.detach(), lse.detach(), *(x.grad for x in mine)

    if layout.endswith("_varlen"):
        with pytest.raises(ValueError, match=r"alibi_slopes .* not supported for packed sequences"):
            tw.loopback(N, main)
        return
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in whole[1:])
    at = torch.arange(CU[-1])
    scores = torch.einsum("qhd,khd->hqk", whole[0], keys) * DIM**-0.5
    scores = scores - slopes.double()[:, None, None] * (at[:, None] - at).abs()
    scores = scores.masked_fill(~seen(layout, causal, (-1, -1)), -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    grads = torch.autograd.grad(out, whole, dout)
    for rank, (got, lse, *found) in enumerate(tw.loopback(N, main)):
        own_lse = local(scores.logsumexp(-1).T, layout, rank).T
        for x, y in zip((got, *found), (out, *grads), strict=True):
            torch.testing.assert_close(x, local(y.detach(), layout, rank), rtol=0, atol=1e-12)
        torch.testing.assert_close(lse, own_lse.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"alibi_slopes": torch.ones(2, HEADS)}, r"rank 1: slopes is \[2, "),
        ({"deterministic": True}, "rank 1: deterministic=True of ring-flash-attn"),
        ({"rows": 19}, r"rank 1: this rank has 19 rows of each sequence, .* 2 x the number of"),
        ({"rows": 18}, "ranks disagree on"),
    ],
)
def test_what_one_rank_asks_and_cannot_have_is_refused_on_all(options: dict, message: str):
    def main(rank: int, group):
        given = dict(options) if rank == 1 else {}
        mine = [local(x, "zigzag_ring", rank)[: given.pop("rows", ROWS)] for x in inputs()[:3]]
        with pytest.raises(ValueError, match=message):
            call("zigzag_ring", rank, group, *mine, **given)
        return True

    assert all(tw.loopback(N, main))


@pytest.mark.parametrize(
    "cu, message",
    [
        ([0, 4, 19], "cu_seqlens ends at 19, but there are 20 rows"),
        ([0, 5, 20], "this rank has 5 rows of sequence 0"),
    ],
)
def test_boundaries_that_do_not_fit_are_refused_with_both_numbers(cu: list[int], message: str):
    def main(rank: int, group):
        mine = [local(x, "zigzag_ring", rank) for x in inputs()[:3]]
        with pytest.raises(ValueError, match=message):
            rfa.zigzag_ring_flash_attn_varlen_func(*mine, torch.tensor(cu), 20, group=group)
        return True

    assert all(tw.loopback(N, main))


def test_keys_of_another_length_are_all_seen_or_refused():
    q, *_ = inputs()
    k, v = torch.randn(2, 2 * N, KV_HEADS, DIM, dtype=torch.float64)
    wanted, _ = dense(q, k, v, torch.ones(len(q), len(k), dtype=torch.bool))

    def main(rank: int, group):
        mine = [x.chunk(N)[rank][None] for x in (q, k, v)]
        with pytest.raises(ValueError, match="k has 2 rows, but q has 20"):
            rfa.ring_flash_attn_func(*mine, causal=True, group=group)
        return rfa.ring_flash_attn_func(*mine, group=group)[0]

    assert (torch.cat(tw.loopback(N, main)) - wanted).abs().max() < 1e-12


def test_installed_it_is_found_under_the_librarys_names(monkeypatch: pytest.MonkeyPatch):
    # A page of docs that ran in this process may have installed it.
    others = {k: x for k, x in sys.modules.items() if k.partition(".")[0] != "ring_flash_attn"}
    monkeypatch.setattr(sys, "modules", others)
    rfa.install()
    exec(
        "from ring_flash_attn import llama3_flash_attn_varlen_func as a, substitute_hf_flash_attn\n"
        "from ring_flash_attn.adapters.hf_adapter import DATA_PARAMS, use_ring_attn, check_params\n"
        "from ring_flash_attn.zigzag_ring_flash_attn_varlen import *\n"
        "from ring_flash_attn.adapters import update_ring_flash_attn_params\n"
        "from ring_flash_attn.utils import flatten_varlen_lse, unflatten_varlen_lse\n"
        "import ring_flash_attn.ring_flash_attn as ring, ring_flash_attn.triton_utils as triton\n"
        "import ring_flash_attn.llama3_flash_attn_varlen as llama3, ring_flash_attn.adapters as b\n"
        "import ring_flash_attn.adapters.hf_adapter as adapter\n"
        "import ring_flash_attn.adapters.hf_adapter\n"
        "assert ring.ring_flash_attn_func is rfa.ring_flash_attn_func\n"
        "assert llama3.llama3_flash_attn_varlen_func is a is rfa.llama3_flash_attn_varlen_func\n"
        "assert ring_flash_attn.adapters.hf_adapter is adapter is b.hf_adapter\n"
        "forward = adapter.create_ring_flash_attention_forward(None, 1)[0]\n"
        "assert check_params(lambda a, b: 0, forward) and check_params(lambda a: 0, lambda b: 0)\n"
        "assert not check_params(lambda a, b: 0, lambda a: 0)",
        {"rfa": rfa},
    )
    rfa.install()
    sys.modules["ring_flash_attn"] = inspect
    with pytest.raises(ValueError, match="imported already"):
        rfa.install()


def test_lse_of_packed_sequences_goes_to_one_row_each_and_back():
    lse, edges = torch.rand(9, 2, 1), torch.tensor([0, 4, 6, 9])
    padded = utils.unflatten_varlen_lse(lse, edges, 5)
    assert padded.shape == (3, 2, 5)
    assert torch.equal(padded[1, :, :2], lse[4:6, :, 0].T)
    assert torch.equal(utils.flatten_varlen_lse(padded, edges), lse[..., 0].T)


@pytest.mark.parametrize("name", ["ring_flash_attn_func", "llama3_flash_attn_varlen_func"])
def test_compiled_functions_are_the_plain_ones(name: str):
    """Of a group of processes, which is no constant of a graph."""
    shape = (1, 12, 2, 8) if name == "ring_flash_attn_func" else (12, 2, 8)
    q, k, v = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    lengths: tuple[Any, ...] = ()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        if "llama3" in name:
            edges = torch.tensor([0, 5, 12])
            *four, part = rfa.llama3_flash_attn_prepare_cu_seqlens(edges, True, 0, 1)
            lengths = (*four, 1, part)
        plain = getattr(rfa, name)
        group = dist.group.WORLD
        want = plain(q, k, v, *lengths, causal=True, group=group)
        given = {"causal": True, "group": group, "deterministic": None}  # as axolotl passes it
        got = torch.compile(plain, backend="eager")(q, k, v, *lengths, **given)
        torch._dynamo.reset()
        with pytest.raises(Unsupported, match=r"ranks agree .*fullgraph=False"):
            torch.compile(plain, backend="eager", fullgraph=True)(q, k, v, *lengths, **given)
    finally:
        dist.destroy_process_group()
    assert torch.equal(got, want)

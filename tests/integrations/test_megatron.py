"""TransformerEngine's and Megatron's signatures, on tilewise: as dense attention, and a GPT."""

import copy

import pytest
import torch
from processes.launcher import run_processes
from torch import Tensor

import tilewise as tw
from tilewise.integrations.megatron import CoreAttention, DotProductAttention
from tilewise.integrations.positions import layout_of_positions

N, HEADS, KV, DIM = 2, 4, 2, 8
PADDED, LENGTHS = (0, 8, 24, 32), (0, 5, 21, 28)


def tokens_of(total: int, v_dim: int = DIM, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (HEADS, DIM), (KV, DIM), (KV, v_dim)
    return [torch.randn(total, *shape, dtype=dtype) for shape in shapes]


def dense(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, sink: Tensor | None = None) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // KV, 1) for x in (k, v))
    scores = (torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5).masked_fill(~allowed, -torch.inf)
    if sink is not None:
        column = sink[:, None, None].expand(-1, len(q), 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1).nan_to_num()
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def allowed(mask: tw.masks.Mask, total: int) -> Tensor:
    return torch.from_numpy(mask.dense(range(total), range(total)))


def compare(layout, qkv, wanted, make, **given):
    """Largest error of out, dq, dk and dv of every rank."""
    whole = [x.clone().requires_grad_() for x in qkv]
    out = wanted(*whole)
    dout = torch.randn_like(out)
    out.backward(dout)

    def main(rank: int, group):
        mine = [layout.shard(x, rank).clone().requires_grad_() for x in qkv]
        got = make(group)(*mine, **given)
        got.backward(layout.shard(dout, rank))
        pairs = [(got, out), *((x.grad, y.grad) for x, y in zip(mine, whole, strict=True))]
        return max(float((x - layout.shard(y, rank)).detach().abs().max()) for x, y in pairs)

    return max(tw.loopback(N, main))


@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a", "auto"])
@pytest.mark.parametrize("kind, window", [("no_mask", None), ("causal", None), ("causal", (5, 0)),
                                          ("no_mask", (4, 2))])  # fmt: skip
def test_a_sequence_is_split_as_transformer_engine_splits_it(comm, kind, window):
    total, qkv = 24, tokens_of(24, v_dim=6)
    mask = tw.Causal() if kind == "causal" else tw.Full()
    if window:
        mask = mask & tw.Window(window[0], None if kind == "causal" else window[1])

    def make(group):
        attend = DotProductAttention(
            HEADS, (DIM, 6), num_gqa_groups=KV, attn_mask_type=kind, window_size=window,
            cp_group=group, cp_comm_type=comm,
        )  # fmt: skip
        return lambda q, k, v: attend(q[:, None], k[:, None], v[:, None])[:, 0]

    error = compare(tw.zigzag(total, N), qkv, lambda *x: dense(*x, allowed(mask, total)), make)
    assert error < 1e-12


@pytest.mark.parametrize("padded", [False, True])
def test_packed_documents_are_split_each_and_padding_is_not_seen(padded: bool):
    total, edges = PADDED[-1], torch.tensor(LENGTHS if padded else PADDED)
    qkv, seen = tokens_of(total), torch.zeros(total, total, dtype=torch.bool)
    for start, size in zip(PADDED, edges.diff().tolist(), strict=False):
        seen[start : start + size, start : start + size] = True
    seen &= allowed(tw.Causal(), total)

    def make(group):
        return DotProductAttention(HEADS, DIM, KV, qkv_format="thd", cp_group=group)

    given = {"cu_seqlens_q": edges, "cu_seqlens_kv": edges}
    if padded:
        given |= {"cu_seqlens_q_padded": torch.tensor(PADDED)}
    layout = tw.zigzag_documents(PADDED, N)
    wanted = lambda *x: dense(*x, seen)  # noqa: E731
    assert compare(layout, qkv, wanted, make, attn_mask_type="padding_causal", **given) < 1e-12


def test_a_loader_of_another_order_says_its_positions():
    layout = tw.Layout.from_positions([[3, 0, 7, 1, 2, 9], [4, 5, 6, 8]])
    qkv = tokens_of(10)

    def make(group):
        found = layout_of_positions(layout.positions(group.rank), group)
        attend = DotProductAttention(HEADS, DIM, KV, cp_group=group)
        return lambda q, k, v: attend(q[:, None], k[:, None], v[:, None], layout=found)[:, 0]

    assert compare(layout, qkv, lambda *x: dense(*x, allowed(tw.Causal(), 10)), make) < 1e-12


def test_positions_that_are_no_permutation_are_named_on_every_rank():
    def main(rank: int, group):
        given = [[0, 1, 5], [1, 3, 4]][rank]
        with pytest.raises(ValueError, match="lacks 2, has 1 twice"):
            layout_of_positions(given, group)
        return True

    assert all(tw.loopback(N, main))


@pytest.mark.parametrize("kind", ["learnable", "off-by-one"])
def test_sinks_and_the_largest_score(kind: str):
    q, k, v = tokens_of(24)
    mask = allowed(tw.Causal(), 24)
    sink = torch.linspace(-1, 2, HEADS).double() if kind == "learnable" else torch.zeros(HEADS)
    wanted = dense(q, k, v, mask, sink.double())
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * DIM**-0.5
    largest = scores.masked_fill(~mask, -torch.inf).amax((1, 2))
    layout = tw.zigzag(24, N)

    def main(rank: int, group):
        attend = DotProductAttention(
            HEADS, DIM, KV, softmax_type=kind, return_max_logit=True, cp_group=group
        ).double()
        if kind == "learnable":
            attend.load_state_dict({"softmax_offset": sink})
        out, logits = attend(*(layout.shard(x, rank)[:, None] for x in (q, k, v)))
        assert torch.allclose(logits.double(), largest, atol=1e-6)
        return float((out[:, 0] - layout.shard(wanted, rank)).detach().abs().max())

    assert max(tw.loopback(N, main)) < 1e-12


SCALED = {"core_attention_bias_type": "post_scale_bias"}
LINEAR = {"core_attention_bias_type": "alibi"}


@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize("kind", ["no_mask", "causal"])
@pytest.mark.parametrize("slopes", [None, "their own", "given"])
def test_a_bias_is_added_as_transformer_engine_adds_it(comm, kind, slopes):
    total, layout = 24, tw.zigzag(24, N)
    q, k, v = (x.requires_grad_() for x in tokens_of(total))
    values = torch.tensor([2 ** (-8 * (head + 1) / HEADS) for head in range(HEADS)]).double()
    if slopes == "given":
        values = torch.linspace(0, 1, HEADS, dtype=torch.float64)
    at = torch.arange(total)
    bias = -values[:, None, None] * (at[:, None] - at).abs()
    if slopes is None:
        bias = torch.randn(HEADS, total, total, dtype=torch.float64)
    bias.requires_grad_()
    repeated = (x.repeat_interleave(HEADS // KV, 1) for x in (k, v))
    keys, wide = repeated
    scores = torch.einsum("qhd,khd->hqk", q, keys) * DIM**-0.5 + bias
    seen = allowed(tw.Causal() if kind == "causal" else tw.Full(), total)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", weights, wide).flatten(1)
    dout = torch.randn_like(out)
    wanted = [out.detach(), *torch.autograd.grad(out, (q, k, v, bias), dout)]

    def main(rank: int, group) -> float:
        attend = DotProductAttention(
            HEADS, DIM, KV, attn_mask_type=kind, cp_group=group, cp_comm_type=comm
        )
        mine = [layout.shard(x.detach(), rank, dim=0).requires_grad_() for x in (q, k, v)]
        own = layout.shard(bias.detach(), rank, dim=1).clone().requires_grad_()
        given = LINEAR | ({"alibi_slopes": values} if slopes == "given" else {})
        if slopes is None:
            given = {**SCALED, "core_attention_bias": own[None]}
        got = attend(*(x[:, None] for x in mine), **given)[:, 0]
        leaves = [*mine, own] if slopes is None else mine
        found = got, *torch.autograd.grad(got, leaves, layout.shard(dout, rank))
        own_wanted = [layout.shard(x, rank, dim=0) for x in wanted[:4]]
        own_wanted.append(layout.shard(wanted[4], rank, dim=1))
        return max(
            float((x - y).detach().abs().max()) for x, y in zip(found, own_wanted, strict=False)
        )

    if comm == "a2a" and slopes is None:
        with pytest.raises(ValueError, match="not supported with cp_comm_type 'a2a'"):
            tw.loopback(N, main)
        return
    assert max(tw.loopback(N, main)) < 1e-12


@pytest.mark.parametrize("shape", [(3, 1, 24, 24), (3, HEADS, 24, 24), (1, 1, 1, 24)])
def test_a_bias_of_each_batch_entry_or_one_for_all_heads_is_as_written_out(shape):
    total, layout, batch = 24, tw.zigzag(24, N), 3
    q, k, v = (torch.stack([x] * batch, 1) * torch.arange(1, 4).view(-1, 1, 1) for x in
               tokens_of(total))  # fmt: skip
    bias = torch.randn(shape, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v, bias)]
    keys, wide = (x.repeat_interleave(HEADS // KV, 2) for x in (k, v))
    scores = torch.einsum("qbhd,kbhd->bhqk", q, keys) * DIM**-0.5 + bias
    seen = allowed(tw.Causal(), total)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    out = torch.einsum("bhqk,kbhd->qbhd", weights, wide).flatten(2)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)

    def main(rank: int, group):
        attend = DotProductAttention(HEADS, DIM, KV, cp_group=group)
        mine = [layout.shard(x.detach(), rank, dim=0).requires_grad_() for x in (q, k, v)]
        own = bias.detach() if shape[2] == 1 else layout.shard(bias.detach(), rank, dim=2)
        own.requires_grad_()
        got = attend(*mine, **SCALED, core_attention_bias=own)
        found = got, *torch.autograd.grad(got, [*mine, own], layout.shard(dout, rank, dim=0))
        pairs = zip(found[:4], (out, *grads[:3]), strict=True)
        apart = [float((x - layout.shard(y, rank, dim=0)).detach().abs().max()) for x, y in pairs]
        return max(apart), found[4]

    errors, dbias = zip(*tw.loopback(N, main), strict=True)
    whole = torch.stack(dbias).sum(0) if shape[2] == 1 else layout.unshard(dbias, dim=2)
    assert max(*errors, float((whole - grads[3]).abs().max())) < 1e-11


@pytest.mark.parametrize(
    "given, message",
    [
        ({"core_attention_bias": torch.zeros(1, HEADS, 24, 24)}, "rank 1: core_attention_bias of"),
        (
            {"core_attention_bias": torch.zeros(1, HEADS, 24, 24), **SCALED},
            r"rank 1: core_attention_bias is .*24, 24\], but must be .*12, 24\]",
        ),
        ({"core_attention_bias_type": "pre_scale_bias"}, "rank 1: core_attention_bias_type"),
        ({"alibi_slopes": torch.ones(2, HEADS), **LINEAR}, r"rank 1: slopes is \[2, "),
        ({"alibi_slopes": torch.ones(HEADS)}, "rank 1: alibi_slopes of TransformerEngine"),
        ({"score_mod": abs}, "rank 1: score_mod of TransformerEngine"),
        ({"attn_mask_type": "arbitrary"}, r"rank 1: attn_mask_type 'arbitrary' is not known"),
        ({"qkv_format": "thd"}, "rank 1: qkv_format .* needs cu_seqlens_q"),
    ],
)
def test_what_one_rank_asks_and_cannot_have_is_refused_on_all(given: dict, message: str):
    def main(rank: int, group):
        attend = DotProductAttention(HEADS, DIM, KV, cp_group=group)
        mine = [x[:12, None] for x in tokens_of(24)]
        with pytest.raises(ValueError, match=message):
            attend(*mine, **(given if rank == 1 else {}))
        return True

    assert all(tw.loopback(N, main))


def gpt(rank: int, cp_size: int, comm: str) -> tuple[float, dict[str, Tensor]]:
    """Megatron's loss, and an fp64 loss's gradients, summed over ranks, of a GPT of 2 layers."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.utils import get_batch_on_this_cp_rank

    # Their RoPE puts its tables on the GPU; all else runs on CPU as it is.
    make = torch.tensor
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.Tensor.cuda = lambda x, *_, **__: x
    torch.tensor = lambda data, pin_memory=False, **given: make(data, **given)
    parallel_state.initialize_model_parallel(context_parallel_size=cp_size)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=64,
        use_cpu_initialization=True, context_parallel_size=cp_size, cp_comm_type=comm,
        attention_dropout=0.0, hidden_dropout=0.0, window_size=(9, 0), window_attn_skip_freq=2,
        params_dtype=torch.float64,
    )  # fmt: skip
    spec = copy.deepcopy(get_gpt_layer_local_spec())
    spec.submodules.self_attention.submodules.core_attention = CoreAttention
    torch.manual_seed(0)
    model = GPTModel(
        config, spec, vocab_size=64, max_sequence_length=32, position_embedding_type="rope"
    ).double()
    tokens = torch.arange(64).mul(37).remainder(61).view(2, 32)
    positions = torch.arange(32).expand(2, 32)
    batch = {"tokens": tokens, "labels": tokens.roll(-1, 1), "positions": positions}
    batch = get_batch_on_this_cp_rank(batch)
    given = batch["tokens"], batch["positions"], None
    logits = model(*given).flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, batch["labels"].flatten(), reduction="sum").backward()
    loss = model(*given, labels=batch["labels"]).sum()  # which is fp32
    total = loss.detach().clone()
    grads = {name: x.grad for name, x in model.named_parameters()}
    for x in (total, *grads.values()):
        dist.all_reduce(x, group=parallel_state.get_context_parallel_group())
    return float(total), grads


@pytest.mark.parametrize("comm", ["p2p", "a2a"])
def test_a_gpt_of_megatron_core_on_two_ranks_is_the_unsplit_one(comm: str):
    pytest.importorskip("megatron.core")
    [(loss, grads)] = run_processes(1, gpt, 1, "p2p")
    for split_loss, split in run_processes(2, gpt, 2, comm):
        assert split_loss == pytest.approx(loss, rel=1e-6)
        assert max(float((split[name] - grads[name]).abs().max()) for name in grads) < 1e-12

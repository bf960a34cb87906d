"""Attention under torch.autocast: operands are cast as SDPA casts them, and nothing else is."""

import pytest
import torch

import tilewise as tw

NUM_TOKENS, NUM_RANKS = 24, 2
LAYOUT = tw.zigzag(NUM_TOKENS, NUM_RANKS)
HALVES = torch.float16, torch.bfloat16


def _operands(dtypes, seed=0):
    """q of 4 heads, k and v of 2, and dout, each whole."""
    make = torch.Generator().manual_seed(seed)
    shapes = (NUM_TOKENS, 4, 8), (NUM_TOKENS, 2, 8), (NUM_TOKENS, 2, 8)
    qkv = [torch.randn(s, generator=make).to(d) for s, d in zip(shapes, dtypes, strict=True)]
    return *qkv, torch.randn(shapes[0], generator=make)


def _run(whole, autocast, *, backward_inside=False, plan=None, sink=None):
    """out, lse, dq, dk and dv, whole; autocast: a dtype or None."""

    def on_rank(rank, group):
        q, k, v = leaves = [LAYOUT.shard(x, rank).clone().requires_grad_() for x in whole[:3]]
        own_sink = None if sink is None else sink.clone().requires_grad_()
        dout = LAYOUT.shard(whole[3], rank)
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            out, lse = tw.attention(
                q,
                k,
                v,
                plan=plan or tw.ring(NUM_RANKS),
                layout=LAYOUT,
                mask=tw.Causal(),
                group=group,
                return_lse=True,
                sink=own_sink,
            )
            loss = (out * dout).sum() + lse.sum()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        return out.detach(), lse.detach(), *(x.grad for x in leaves)

    shards = zip(*tw.loopback(NUM_RANKS, on_rank), strict=True)
    return [LAYOUT.unshard(list(x)) for x in shards]


@pytest.mark.parametrize("autocast", HALVES)
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32,) * 3,
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.float16,) * 3,
    ],
)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("make_plan", [tw.ring, tw.ulysses])
def test_operands_are_cast_as_sdpa_casts_them(autocast, dtypes, inside, make_plan):
    plan = make_plan(NUM_RANKS)
    out, lse, *grads = _run(_operands(dtypes), autocast, backward_inside=inside, plan=plan)
    with torch.autocast("cpu", dtype=autocast):
        q, k, v, _ = (x.movedim(0, 1)[None] for x in _operands(dtypes))
        theirs = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
    assert (out.dtype, lse.dtype) == (theirs.dtype, torch.float32)
    assert (out - theirs[0].movedim(1, 0)).abs().max() <= 4 * torch.finfo(autocast).eps

    # The same bits as of operands that were cast before; gradients have their leaves' dtypes.
    cast = [x.to(autocast) for x in _operands(dtypes)[:3]] + [_operands(dtypes)[3]]
    cast_out, cast_lse, *cast_grads = _run(cast, None, plan=plan)
    assert torch.equal(out, cast_out)
    assert torch.equal(lse, cast_lse)
    for grad, dtype, cast_grad in zip(grads, dtypes, cast_grads, strict=True):
        assert grad.dtype == dtype
        assert torch.equal(grad, cast_grad.to(dtype))


@pytest.mark.parametrize("inside", [False, True])
def test_fp64_is_left_alone_and_exact(inside):
    operands = _operands((torch.float64,) * 3)
    exact = _run(operands, None)
    under = _run(operands, torch.bfloat16, backward_inside=inside)
    for x, y in zip(exact, under, strict=True):
        assert x.dtype == y.dtype == torch.float64
        assert torch.equal(x, y)


@pytest.mark.parametrize("autocast", HALVES)
@pytest.mark.parametrize("sink_dtype", [torch.float32, *HALVES])
def test_a_sink_of_any_half_is_taken(autocast, sink_dtype):
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0]).to(sink_dtype)
    out, lse, *_ = _run(_operands((torch.float32,) * 3), autocast, sink=sink)
    cast, cast_lse, *_ = _run(_operands((autocast,) * 3), None, sink=sink.float())
    assert out.dtype == cast.dtype == autocast
    assert (out - cast).abs().max() <= 4 * torch.finfo(autocast).eps
    assert (lse - cast_lse).abs().max() < 0.05


def test_the_planner_plans_for_the_dtype_that_is_computed_in():
    def on_rank(rank, group):
        cp = tw.ContextParallel(group, num_tokens=NUM_TOKENS, mask=tw.Causal())
        q, k, v, _ = (cp.shard(x) for x in _operands((torch.float32,) * 3))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            work = cp._workload((q, k, v), cp.mask, None)
            return work.dtype, cp.attention(q, k, v).dtype

    assert set(tw.loopback(NUM_RANKS, on_rank)) == {("bfloat16", torch.bfloat16)}


def test_latents_expand_under_the_callers_autocast():
    torch.manual_seed(0)
    weight = torch.randn(6, 2 * 8 * 2) / 3

    def expand(rows, positions):
        assert torch.is_autocast_enabled("cpu")
        k, v = (rows @ weight).chunk(2, -1)
        return k.unflatten(-1, (2, 8)), v.unflatten(-1, (2, 8))

    wire = tw.wire.Latent(expand, num_kv_heads=2, head_dim=8, v_head_dim=8)
    q, latents = torch.randn(NUM_TOKENS, 4, 8), torch.randn(NUM_TOKENS, 6)

    def on_rank(rank, group):
        mine = [LAYOUT.shard(x, rank, 0).clone().requires_grad_() for x in (q, latents)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            options = {"plan": tw.ring(2), "layout": LAYOUT, "group": group, "wire": wire}
            out = tw.attention(*mine, None, mask=tw.Causal(), **options)
        out.float().sum().backward()
        return out.detach(), *(x.grad for x in mine)

    out, dq, dx = (LAYOUT.unshard(list(x), 0) for x in zip(*tw.loopback(2, on_rank), strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        k, v = expand(latents, None)
        dense = torch.nn.functional.scaled_dot_product_attention(
            *(x.movedim(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
        )
    assert out.dtype == torch.bfloat16
    assert (dq.dtype, dx.dtype) == (torch.float32, torch.float32)
    assert (out - dense[0].movedim(1, 0)).abs().max() < 0.05

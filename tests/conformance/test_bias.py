"""Biases, several sinks and a mask for each batch entry are exact in every strategy: fp64, to
1e-12, each gradient apart.
"""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import tilewise as tw
from conformance.oracle import assert_close, draw
from conformance.table import STRATEGIES
from tilewise.plan.ir import Plan
from tilewise_verify import error_bound

TOKENS, WIDTH = 13, 4
LAYOUTS = (
    tw.contiguous,
    tw.zigzag,
    tw.striped,
    lambda num_tokens, n: tw.balanced(tw.Causal(), num_tokens, n, chunk=2),
    lambda num_tokens, n: tw.zigzag_documents([0, 5, num_tokens], n),
)
MASKS = (
    tw.Full(),
    tw.Causal(),
    tw.Causal() & tw.Document([0, 3, 3, 8, TOKENS]),
    tw.Window(2, 0) & tw.Slices([((5, TOKENS), (0, 9), "full")]),  # rows without keys
)


class Result(NamedTuple):
    """Outputs and gradients of the whole sequence; those of bias and sink are sums over ranks."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor
    dsink: Tensor


class Case(NamedTuple):
    plan: Plan
    layout: tw.Layout
    mask: tw.masks.Mask | list[tw.masks.Mask]
    heads: tuple[int, int]
    batch: tuple[int, ...]
    slopes: list[float] | None
    sinks: tuple[int, ...]
    softcap: float | None
    bias: tuple[int, ...] = (8, TOKENS, TOKENS)

    @property
    def positions(self) -> Tensor:
        """Of the queries: a tree's are the last two tokens."""
        return torch.arange(TOKENS - 2 if self.plan.replicated_queries else 0, TOKENS)


def drawn_case(plan: Plan, random: Random) -> Case:
    heads = (8, 8 if "ulysses" in plan.name else random.choice([1, 2, 8]))
    batch = random.choice([(), (2,)])
    slopes = random.choice([None, [random.random() for _ in range(8)]])
    shapes = [(8,), (1, 8), (3, 8), *([(2, 3, 8)] if batch else [])]
    softcap, mask = random.choice([None, 1.5]), random.choice(MASKS)
    layout = random.choice(LAYOUTS)(TOKENS, plan.world_size)
    case = Case(plan, layout, mask, heads, batch, slopes, random.choice(shapes), softcap)
    bias = random.choice([1, 8]), random.choice([1, TOKENS]), TOKENS
    entries = [(), (1,), (2,)] if batch else [(), (1,)]
    return case._replace(bias=(*random.choice(entries), *bias))


def dense(x: Any, case: Case, bias: Tensor, sinks: Tensor) -> Result:
    """Plain attention with everything written out over the whole table of scores."""
    leaves = [t.detach().clone().requires_grad_() for t in (*x[:3], bias, sinks)]
    q, k, v, bias, sinks = leaves
    ratio, positions = case.heads[0] // case.heads[1], case.positions
    k, v = (t.repeat_interleave(ratio, -2).transpose(-2, -3) for t in (k, v))
    scores = q.transpose(-2, -3) @ k.transpose(-1, -2) * WIDTH**-0.5
    if case.softcap is not None:
        scores = case.softcap * (scores / case.softcap).tanh()
    masks = case.mask if isinstance(case.mask, list) else [case.mask]
    tables = [torch.as_tensor(mask.dense(positions, torch.arange(TOKENS))) for mask in masks]
    allowed = tables[0] if len(tables) == 1 else torch.stack(tables)[:, None]
    every = bias.expand(*bias.shape[:-3], 8, TOKENS, TOKENS)
    every = every[0] if every.ndim > 3 and not case.batch else every
    scores = (scores + every[..., positions, :]).masked_fill(~allowed, -torch.inf)
    extra = sinks[None] if sinks.ndim == 1 else sinks
    columns = extra.transpose(-1, -2).unsqueeze(-2).expand(*scores.shape[:-1], extra.shape[-2])
    lse = torch.cat([scores, columns], -1).logsumexp(-1)
    out = ((scores - lse[..., None]).exp() @ v).transpose(-2, -3)
    lse = lse.transpose(-1, -2)
    grads = torch.autograd.grad((out * x.dout).sum() + (lse * x.dlse).sum(), leaves)
    return Result(out.detach(), lse.detach(), *grads)


def split(x: Any, case: Case, bias: Tensor, sinks: Tensor) -> Result:
    """The same through tw.attention on every rank of a loopback."""
    layout, dim, shared = case.layout, x.q.ndim - 3, case.plan.replicated_queries

    def on_rank(rank: int, group: Any) -> tuple[Tensor, ...]:
        def rows(t: Tensor) -> Tensor:
            return t if shared else layout.shard(t, rank, dim=dim)

        q = rows(x.q).clone().requires_grad_()
        k, v = (layout.shard(t, rank, dim=dim).clone().requires_grad_() for t in x[1:3])
        own_sinks, own = (t.clone().requires_grad_() for t in (sinks, bias))
        out, lse = tw.attention(
            *(q, k, v),
            plan=case.plan,
            layout=layout,
            mask=case.mask,
            group=group,
            softcap=case.softcap,
            sink=own_sinks,
            bias=own if case.slopes is None else tw.alibi(case.slopes),
            return_lse=True,
        )
        ((out * rows(x.dout)).sum() + (lse * rows(x.dlse)).sum()).backward()
        found = out.detach(), lse.detach(), q.grad, k.grad, v.grad, own_sinks.grad, own.grad
        return tuple(torch.zeros_like(bias) if t is None else t for t in found)

    *whole, dk, dv, dsinks, dbias = zip(*tw.loopback(case.plan.world_size, on_rank), strict=True)
    whole = [t[0] if shared else layout.unshard(t, dim=dim) for t in whole]
    dsink = dsinks[0] if shared else torch.stack(dsinks).sum(0)
    dkv = (layout.unshard(t, dim=dim) for t in (dk, dv))
    return Result(*whole, *dkv, torch.stack(dbias).sum(0), dsink)


def compare(case: Case, seed: int) -> None:
    shapes = [(*case.batch, n, h, WIDTH) for n, h in zip((TOKENS, TOKENS), case.heads, strict=True)]
    shapes[0] = (*case.batch, len(case.positions), case.heads[0], WIDTH)
    x, make = draw(*shapes, seed), torch.Generator().manual_seed(seed)
    bias = torch.randn(case.bias, generator=make, dtype=torch.float64)
    sinks = torch.randn(case.sinks, generator=make, dtype=torch.float64)
    if case.slopes is not None:
        at = torch.arange(TOKENS)
        slopes = torch.tensor(case.slopes, dtype=torch.float64)
        bias = -slopes[:, None, None] * (at[:, None] - at).abs()
    want = dense(x, case, bias, sinks)
    if case.slopes is not None:
        want = want._replace(dbias=torch.zeros_like(bias))
    assert_close(split(x, case, bias, sinks), want)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_every_strategy(strategy: Any):
    random = Random(strategy.name)
    plans = [plan for n in (1, 2, 3, 4, 8) for plan in strategy.plans(n)]
    for seed in range(6):
        case = drawn_case(random.choice(plans), random)
        if case.batch and seed % 3:  # a mask for each batch entry
            case = case._replace(mask=[MASKS[seed % len(MASKS)], case.mask])
        compare(case, seed)


def call(**options: Any) -> dict[str, Any]:
    shared = {"plan": tw.ring(1), "layout": tw.contiguous(TOKENS, 1), "mask": tw.Full()}
    return shared | options


def test_minus_infinity_in_a_bias_hides_a_pair_and_a_whole_row():
    q, k, v = torch.randn(3, TOKENS, 2, WIDTH, dtype=torch.float64)
    hidden = torch.rand(TOKENS, TOKENS) < 0.4
    hidden[3] = True
    bias = torch.zeros(2, TOKENS, TOKENS).masked_fill(hidden, -torch.inf)
    mask = tw.Slices([((i, i + 1), (j, j + 1), "full") for i, j in (~hidden).nonzero().tolist()])
    for n in (1, 3):
        layout, results = tw.zigzag(TOKENS, n), []
        for options in ({"bias": bias, "mask": tw.Full()}, {"mask": mask}):

            def on_rank(rank: int, group: Any, layout=layout, options=options, n=n) -> Any:
                rows = [layout.shard(x, rank, dim=0).clone().requires_grad_() for x in (q, k, v)]
                shared = {"plan": tw.ring(n), "layout": layout, "group": group}
                out = tw.attention(*rows, **shared, **options)
                return out.detach(), *torch.autograd.grad(out.square().sum(), rows)

            results.append([*zip(*tw.loopback(n, on_rank), strict=True)])
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(torch.cat(got), torch.cat(want), rtol=0, atol=1e-12)


def test_a_bias_of_half_precision_is_added_as_it_is_and_gets_its_gradient():
    q, k, v = torch.randn(3, TOKENS, 2, WIDTH).bfloat16()
    bias = torch.full((2, TOKENS, TOKENS), 1e4).half().requires_grad_()
    shifted = tw.attention(q, k, v, **call(bias=bias))
    torch.testing.assert_close(shifted, tw.attention(q, k, v, **call()), atol=0.02, rtol=0.02)
    (grad,) = torch.autograd.grad(shifted.float().square().sum(), bias)
    assert grad.dtype == torch.float16 and bool(grad.any())
    assert float(grad.float().sum(-1).abs().max()) < 0.02  # a row's weights sum to 1


def test_biases_of_an_expanded_tensor_add_their_gradients():
    q, k, v = torch.randn(3, TOKENS, 2, WIDTH, dtype=torch.float64)
    one = torch.randn(1, TOKENS, TOKENS, dtype=torch.float64, requires_grad=True)
    two = one.detach().repeat(2, 1, 1).requires_grad_()
    for bias in (one.expand(2, -1, -1), two):
        tw.attention(q, k, v, **call(bias=bias)).square().sum().backward()
    assert one.grad is not None and two.grad is not None
    torch.testing.assert_close(one.grad, two.grad.sum(0, keepdim=True))


def test_calls_hold_no_bias_when_they_are_over():
    import gc
    import weakref

    q, k, v = torch.randn(3, TOKENS, 2, WIDTH)
    bias = torch.zeros(2, TOKENS, TOKENS)
    end, shared = weakref.ref(bias), call()
    tw.attention(q, k, v, **shared, bias=bias)
    del bias
    gc.collect()
    assert end() is None
    # Another bias of the same kind is found by the same resolved call.
    other = torch.randn(2, TOKENS, TOKENS)
    scores = torch.einsum("mhd,nhd->hmn", q, k) / WIDTH**0.5 + other
    want = torch.einsum("hmn,nhd->mhd", scores.softmax(-1), v)
    torch.testing.assert_close(tw.attention(q, k, v, **shared, bias=other), want)


def test_a_kernel_without_bias_is_refused_by_name():
    q, k, v = torch.randn(3, TOKENS, 2, WIDTH)
    with pytest.raises(ValueError, match="kernel 'cpu' cannot serve this: it has no bias"):
        tw.attention(q, k, v, **call(bias=tw.alibi([1, 2]), kernel="cpu"))


@pytest.mark.parametrize(
    ("slopes", "message"),
    [
        (torch.zeros(2, 4), r"slopes is \[2, 4\], but must be \[num_heads\]"),
        (torch.zeros(4, requires_grad=True), "slopes require a gradient"),
        ([1.0, float("nan")], r"slopes\[1\] \(nan\) must be finite"),
        (1.0, "must be a list of numbers"),
        (["1"], r"slopes \('1'\) must be a number"),
    ],
)
def test_slopes_that_are_refused(slopes: Any, message: str):
    with pytest.raises(ValueError, match=message):
        tw.alibi(slopes)


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled_code_takes_alibi_and_refuses_a_tensor(backend: str):
    q, k, v = (torch.randn(TOKENS, 2, WIDTH, requires_grad=True) for _ in range(3))
    shared, slopes = call(), tw.alibi([0.5, 0.25])

    def attend(*rows: Tensor) -> Tensor:
        return tw.attention(*rows, **shared, bias=slopes)

    out = torch.compile(attend, fullgraph=True, backend=backend)(q, k, v)
    torch.testing.assert_close(out, attend(q, k, v))
    for got, want in zip(
        torch.autograd.grad(out.sum(), (q, k, v)),
        torch.autograd.grad(attend(q, k, v).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(got, want)
    bias = torch.zeros(2, TOKENS, TOKENS)
    with pytest.raises(Exception, match="not supported in compiled code"):
        torch.compile(
            lambda *x: tw.attention(*x, **shared, bias=bias), fullgraph=True, backend=backend
        )(q, k, v)


def test_where_operators_are_followed_a_tensor_is_refused_and_alibi_is_not():
    q, k, v = torch.randn(3, TOKENS, 2, WIDTH)
    slopes = torch.tensor([0.5, 0.25])
    at = torch.arange(TOKENS)
    table = -slopes[:, None, None] * (at[:, None] - at).abs()
    with FlopCounterMode(display=False):
        out = tw.attention(q, k, v, **call(bias=tw.alibi(slopes)))
        with pytest.raises(ValueError, match="operators are followed"):
            tw.attention(q, k, v, **call(bias=table))
    torch.testing.assert_close(out, tw.attention(q, k, v, **call(bias=table)))


def test_no_gradient_bound_is_claimed_with_a_bias():
    q, k, v, dout = torch.randn(4, TOKENS, 2, WIDTH)
    with pytest.raises(ValueError, match="bias is not supported"):
        error_bound(q, k, v, dout, **call(bias=tw.alibi([1, 1])))


ENTRIES = [tw.Causal(), tw.Window(2, 1), tw.Causal()]


def on_two_ranks(masks: Any, **options: Any) -> list[Any]:
    q, k, v = draw(*[(3, TOKENS, 4, WIDTH)] * 2, 5)[:3]
    layout = tw.zigzag(TOKENS, 2)

    def on_rank(rank: int, group: Any) -> Any:
        own = masks[rank] if isinstance(masks, dict) else masks
        rows = [layout.shard(x, rank, dim=1) for x in (q, k, v)]
        shared = {"plan": tw.ring(2), "layout": layout, "group": group, "mask": own}
        return tw.attention(*rows, **shared, **options)

    return tw.loopback(2, on_rank)


def test_entries_with_the_same_mask_share_a_call_and_dropout_differs_between_masks():
    out = torch.cat(on_two_ranks(ENTRIES, dropout_p=0.4, dropout_seed=7), 1)
    again = torch.cat(on_two_ranks(ENTRIES, dropout_p=0.4, dropout_seed=7), 1)
    alike = torch.cat(on_two_ranks([tw.Causal()] * 3, dropout_p=0.4, dropout_seed=7), 1)
    causal = torch.cat(on_two_ranks(tw.Causal(), dropout_p=0.4, dropout_seed=7), 1)
    assert torch.equal(out, again) and torch.equal(alike, causal)
    assert torch.equal(out[0], causal[0]) and not torch.equal(out[2], causal[2])


def test_the_largest_score_is_that_of_all_entries():
    results = on_two_ranks(ENTRIES, return_max_logit=True)
    alone = [on_two_ranks(mask, return_max_logit=True) for mask in ENTRIES[:2]]
    for (_, largest), *others in zip(results, *alone, strict=True):
        assert (largest <= torch.stack([x for _, x in others]).amax(0)).all()
        assert largest.shape == (4,) and largest.isfinite().all()


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ([], "rank 0: mask is an empty list"),
        (ENTRIES[:2], r"rank 0: mask has 2 masks, one for each batch entry, but q is \[3, "),
        ({0: ENTRIES, 1: ENTRIES[:2]}, "rank 1: mask has 2 masks"),
        ({0: ENTRIES, 1: ENTRIES[::-1][1:] + ENTRIES[:1]}, "ranks disagree on masks"),
        ([tw.Causal(), "causal", tw.Full()], r"rank 0: mask\[1\] \('causal'\) must be a Mask"),
    ],
)
def test_masks_that_do_not_fit_are_refused_on_every_rank(masks: Any, message: str):
    with pytest.raises(ValueError, match=message):
        on_two_ranks(masks)


def test_one_mask_is_asked_for_in_compiled_code():
    q = torch.randn(2, TOKENS, 2, WIDTH)

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x: Tensor) -> Tensor:
        return tw.attention(x, x, x, **call(mask=[tw.Full(), tw.Causal()]))

    with pytest.raises(Exception, match="must be one mask in compiled code"):
        compiled(q)

"""What is read from a black box is what it computes: masks, weights, heads, scale, gradients."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conformance.table import MASK_AWARE, STRATEGIES
from support.hf_models import cache_name
from support.thinned import thinned
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import tilewise as tw
from tilewise_verify.causes import CAUSES, RULES
from tilewise_verify.palette import FORBIDDEN

T, HEADS, KV_HEADS, DIM = 48, 4, 2, 16
SIZES = {"num_tokens": T, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
CAUSAL = tw.Causal()
WINDOW = CAUSAL & tw.Window(5, 0)
PACKED = CAUSAL & tw.Document([0, 20, T])
THREE = CAUSAL & tw.Document([0, 20, 31, T])
AT = torch.arange(T)
ORDER = torch.cat([tw.zigzag(T, 4).positions(rank) for rank in range(4)])


class Fault(NamedTuple):
    """Dense attention with parts that may be wrong."""

    mask: tw.Mask | Tensor = CAUSAL
    scale: float = DIM**-0.5
    softcap: float | None = None
    sink: float | None = None
    times: Tensor | None = None  # weight of each key
    shift: int = 0  # of KV heads
    drop: int = 0  # heads that give nothing
    least: float = -torch.inf  # what scores of other pairs are

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ratio = q.shape[1] // k.shape[1]
        heads = (torch.arange(q.shape[1]) // ratio + self.shift) % k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, k[:, heads]) * self.scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~dense(self.mask), self.least)
        if self.times is not None:
            scores = scores + self.times.log()
        sink = torch.full_like(scores[..., :1], -torch.inf if self.sink is None else self.sink)
        p = torch.cat([scores, sink], -1).softmax(-1).nan_to_num()[..., :-1]
        out = torch.einsum("hqk,khd->qhd", p, v[:, heads])
        return out * (torch.arange(q.shape[1]) >= self.drop)[:, None]


def dense(mask: tw.Mask | Tensor) -> Tensor:
    return mask if isinstance(mask, Tensor) else torch.as_tensor(mask.dense(AT, AT))


def merged(detach: bool) -> Callable[..., Tensor]:
    """Four parts of the keys, merged by their log-sum-exps."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ratio, parts = q.shape[1] // k.shape[1], []
        for some in AT.chunk(4):
            keys, values = (x[some].repeat_interleave(ratio, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, keys) * DIM**-0.5
            scores = scores.masked_fill(some > AT[:, None], -1e30)
            lse = scores.logsumexp(-1)
            out = torch.einsum("hqk,khd->hqd", scores.softmax(-1), values)
            parts.append((out, lse.detach() if detach else lse))
        outs, lses = map(torch.stack, zip(*parts, strict=True))
        return (outs * lses.softmax(0)[..., None]).sum(0).transpose(0, 1)

    return attend


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return grad * ctx.factor, None


def gradient_scaled(which: int, factor: float) -> Callable[..., Tensor]:
    def attend(*operands: Tensor) -> Tensor:
        changed = [Scaled.apply(x, factor if i == which else 1.0) for i, x in enumerate(operands)]
        return Fault()(*changed)

    return attend


SHARD = AT * 4 // T
SAME = SHARD[:, None] == SHARD
TWICE = torch.where((AT >= 8) & (AT < 20), 2.0, 1.0)
OFF = AT[:, None] - AT
FAULTS = {
    "right": (Fault(), CAUSAL, []),
    "right merge": (merged(False), CAUSAL, []),
    "right window": (Fault(WINDOW), WINDOW, []),
    "a sink": (Fault(sink=0.3), CAUSAL, ["sink_added"]),
    "softmax off by one": (Fault(sink=0.0), CAUSAL, ["sink_added"]),
    "a sink and no window": (Fault(sink=0.3), WINDOW, ["window_ignored", "sink_added"]),
    "a cap": (Fault(softcap=3.0), CAUSAL, ["softcap_added"]),
    "right, in bf16": (lambda *x: Fault()(*(t.bfloat16() for t in x)).float(), CAUSAL, []),
    "mask": (Fault(tw.Full()), CAUSAL, ["mask_ignored"]),
    "prefix": (Fault(), CAUSAL | tw.Slices([((0, 9), (0, 9), "full")]), ["mask_ignored"]),
    "window": (Fault(), WINDOW, ["window_ignored"]),
    "window of documents": (Fault(PACKED), PACKED & tw.Window(5, 0), ["window_ignored"]),
    "window off by one": (Fault(CAUSAL & tw.Window(6, 0)), WINDOW, ["window_ignored"]),
    "window that looks ahead": (Fault(tw.Window(5, 5)), WINDOW, ["mask_ignored"]),
    "window of another layer": (Fault(WINDOW), CAUSAL, ["window_ignored"]),
    "window in blocks": (
        Fault((OFF >= 0) & ((AT % 12)[:, None] - AT % 12 <= 5)),
        WINDOW,
        ["window_per_block"],
    ),
    "documents": (Fault(), PACKED, ["documents_ignored"]),
    "documents of windows": (Fault(WINDOW), WINDOW & PACKED, ["documents_ignored"]),
    "one border": (Fault(PACKED), THREE, ["documents_ignored"]),
    "order of ranks": (Fault(dense(CAUSAL)[ORDER][:, ORDER]), CAUSAL, ["positions_wrong"]),
    "mean of ranks": (lambda *x: Fault()(*x) / 4, CAUSAL, ["unknown"]),
    "scale": (Fault(scale=0.3), CAUSAL, ["scale_wrong"]),
    "shard": (Fault(dense(CAUSAL) & SAME), CAUSAL, ["shard_only"]),
    "shard of a window": (Fault(dense(WINDOW) & SAME), WINDOW, ["shard_only"]),
    "twice": (Fault(times=TWICE), CAUSAL, ["counted_twice"]),
    "sum of parts": (lambda *x: 2 * Fault()(*x), CAUSAL, ["counted_twice"]),
    "groups": (Fault(shift=1), CAUSAL, ["gqa_shifted"]),
    "strict": (Fault(OFF > 0), OFF > 0, []),
    "strict of window": (Fault(OFF > 0), (OFF > 0) & (OFF < 6), ["window_ignored"]),
    "strict of own keys": (Fault(), OFF > 0, ["mask_ignored"]),
    "strict of least number": (Fault(OFF > 0, least=-1e38), CAUSAL, ["mask_ignored"]),
    "query without keys": (Fault(OFF > 0, least=-1e38), OFF > 0, ["mask_ignored"]),
    "heads": (Fault(drop=1), CAUSAL, ["heads_missing"]),
    "padding": (Fault(), dense(CAUSAL) & (AT < 40) & (AT[:, None] < 40), ["padding_attended"]),
    "dq": (gradient_scaled(0, 0.5), CAUSAL, ["dq_wrong"]),
    "dk": (gradient_scaled(1, 2.0), CAUSAL, ["dk_wrong"]),
    "dv": (gradient_scaled(2, 0.0), CAUSAL, ["dv_wrong"]),
    "lse": (merged(True), CAUSAL, ["lse_gradient_lost"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name):
    attend, asked, causes = FAULTS[name]
    seen = tw.effective_mask(attend, **SIZES)
    assert seen.causes(asked) == causes, seen.explain(asked)
    assert all(cause in seen.explain(asked) for cause in causes)


def test_weights_are_those_of_dense_attention():
    for fault in (Fault(), Fault(sink=0.5), Fault(PACKED, softcap=2.0)):
        seen = tw.effective_mask(fault, **SIZES)
        v = torch.eye(T)[:, None].expand(T, KV_HEADS, T)
        want = fault(seen._probe.q, seen._probe.k, v).permute(1, 0, 2)
        assert torch.allclose(seen.weights.float(), want, rtol=1e-5, atol=1e-7)
        assert seen.matches(fault.mask)
        assert (seen.softcap is None) == (fault.softcap is None)
        assert seen.softcap is None or abs(seen.softcap - 2) < 0.05


def through_tilewise(plan: tw.Plan, layout: tw.Layout, mask: tw.Mask) -> Callable[..., Tensor]:
    def attend(*operands: Tensor) -> Tensor:
        def on_rank(rank: int, group: Any) -> Tensor:
            rows = (layout.shard(x, rank) for x in operands)
            return tw.attention(*rows, plan=plan, layout=layout, mask=mask, group=group)

        return layout.unshard(tw.loopback(plan.world_size, on_rank))

    return attend


@pytest.mark.parametrize("pattern", thinned(tw.masks.NAMES))
@pytest.mark.parametrize("seed", [0, pytest.param(range(1, 40), marks=pytest.mark.slow)])
def test_our_strategies_attend_to_exactly_the_mask(pattern, seed):
    for one in (seed,) if isinstance(seed, int) else seed:
        choose = random.Random(f"{pattern} {one}")
        n = choose.choice((2, 3, 4, 6))
        layout = choose.choice((tw.contiguous, tw.zigzag, tw.striped))(37, n)
        mask = tw.masks.random(pattern, 37, seed=one)
        plans = [p for s in STRATEGIES for p in s.plans(n) if not p.replicated_queries]
        plans += [build(mask, layout) for _, build in MASK_AWARE]
        for plan in choose.sample(plans, 2):
            kv_heads = max(2, plan.num_head_groups)
            attend = through_tilewise(plan, layout, mask)
            seen = tw.effective_mask(attend, num_tokens=37, num_heads=kv_heads, head_dim=40)
            assert np.array_equal(
                seen.allowed.numpy(),
                np.broadcast_to(mask.dense(*2 * [range(37)]), (kv_heads, 37, 37)),
            )
            assert seen.matches(mask) and seen.causes(mask) == []
            assert "not read" in str(seen)


def test_an_eager_layer_of_hugging_face_is_read():
    from transformers import MistralConfig
    from transformers.masking_utils import create_sliding_window_causal_mask
    from transformers.models.mistral.modeling_mistral import eager_attention_forward

    sizes = {"hidden_size": HEADS * DIM, "num_attention_heads": HEADS}
    config = MistralConfig(sliding_window=6, num_key_value_heads=KV_HEADS, head_dim=DIM, **sizes)
    config._attn_implementation = "eager"
    layer = torch.nn.Module()
    layer.num_key_value_groups = HEADS // KV_HEADS  # pyright: ignore

    def attend(*operands: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in operands)
        embeds = torch.zeros(1, T, HEADS * DIM)
        cache = cache_name(create_sliding_window_causal_mask)
        given = {"attention_mask": None, cache: None, "position_ids": AT[None]}
        mask = create_sliding_window_causal_mask(config, inputs_embeds=embeds, **given)
        return eager_attention_forward(layer, q, k, v, mask, scaling=DIM**-0.5)[0][0]

    seen = tw.effective_mask(attend, **SIZES)
    assert seen.matches(WINDOW) and seen.causes(WINDOW) == []
    assert seen.causes(CAUSAL & tw.Window(6, 0))


@pytest.mark.parametrize(
    "attend, message",
    [
        (lambda q, k, v: q, "does not depend on v"),
        (lambda q, k, v: torch.rand_like(q), "different results"),
        (lambda q, k, v: v, "not the shape of q"),
        (lambda q, k, v: (q, k), "returned tuple, not the shape of q"),
        (lambda q, k, v: Fault()(q, k, v) + q, "linear in v"),
        (lambda q, k, v: q.cuda(), "failed on fp32 CPU tensors.*GPU"),
        (lambda q, k, v: v.repeat(1, 2, 1) * torch.nan, "not finite"),
    ],
)
def test_what_cannot_be_read_is_an_error(attend, message):
    with pytest.raises(ValueError, match=message):
        tw.effective_mask(attend, **SIZES)


def test_a_function_without_a_backward_pass_is_read_forward_alone():
    def refuses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.requires_grad:
            raise NotImplementedError("there is no backward pass on this device")
        return Fault()(q, k, v)

    def leaves_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return Fault()(*(torch.from_numpy(x.numpy()) for x in (q, k, v)))

    for attend in (refuses, leaves_torch):
        seen = tw.effective_mask(attend, **SIZES)
        assert seen.matches(Fault().mask) and "gradients: not read" in str(seen)


def test_bad_sizes_are_errors():
    with pytest.raises(
        ValueError, match=r"num_heads \(3\) must be a multiple of num_kv_heads \(2\)"
    ):
        tw.effective_mask(Fault(), num_tokens=4, num_heads=3, num_kv_heads=2)
    with pytest.raises(ValueError, match=r"softmax_scale \(0\) must be"):
        tw.effective_mask(Fault(), num_tokens=4, num_heads=2, softmax_scale=0)
    with pytest.raises(ValueError, match=r"num_tokens \(0\) must be"):
        tw.effective_mask(Fault(), num_tokens=0, num_heads=3)
    with pytest.raises(ValueError, match="48 tokens were read"):
        tw.effective_mask(Fault(), **SIZES).matches(torch.ones(3, 3, dtype=torch.bool))


def test_text_and_picture_show_what_is_attended():
    attend = lambda *x: scaled_dot_product_attention(  # noqa: E731
        *(t.transpose(0, 1) for t in x), is_causal=True, enable_gqa=True
    ).transpose(0, 1)
    seen = tw.effective_mask(attend, **SIZES)
    text = str(seen)
    assert f"{T * (T + 1) // 2:,}" in text and "gradients: as they must be" in text
    svg = seen.svg(WINDOW)
    assert svg.startswith("<svg") and "attended, but forbidden" in svg
    assert FORBIDDEN in svg and FORBIDDEN not in seen.svg()


def test_every_rule_names_a_cause():
    assert {cause for cause, *_ in RULES} == set(CAUSES)


CAPS = 0.3, 0.5, 0.9, 1.0, 2.0, 5.0, 50.0


@pytest.mark.parametrize("sink", [None, -1.5, 0.0, 2.0, 5.0])
@pytest.mark.parametrize("cap", [None, *CAPS])
def test_scores_that_are_as_asked_are_no_cause(cap: float | None, sink: float | None):
    sinks = None if sink is None else [sink] * HEADS
    seen = tw.effective_mask(Fault(softcap=cap, sink=sink), **SIZES, softcap=cap, sink=sinks)
    assert seen.causes(CAUSAL) == [], seen.explain(CAUSAL)
    told = "no softcap" if cap is None else f"cap {cap}"
    assert f"{told}, {'no sink' if sink is None else 'the sink given'}" in seen.explain(CAUSAL)


@pytest.mark.parametrize(
    ("fault", "asked", "causes"),
    [
        (Fault(), {"softcap": 20.0}, ["softcap_dropped"]),
        (Fault(softcap=5.0), {"softcap": 20.0}, ["softcap_dropped"]),
        (Fault(softcap=0.5), {}, ["softcap_added"]),
        (Fault(), {"sink": torch.zeros(4)}, ["sink_dropped"]),
        (Fault(sink=1.0), {"sink": torch.full((4,), 2.0)}, ["sink_dropped"]),
        (Fault(sink=1.0), {"sink": [1.0, 1.0, 3.0, 1.0]}, ["sink_dropped"]),
        (Fault(sink=1.0), {}, ["sink_added"]),
        (Fault(softcap=2.0), {"sink": [1.0] * 4}, ["sink_dropped", "softcap_added"]),
        (Fault(sink=1.0), {"softcap": 9.0}, ["sink_added", "softcap_dropped"]),
        (Fault(scale=0.2, softcap=2.0), {"softcap": 2.0}, ["scale_wrong"]),
        (Fault(scale=0.2, sink=1.0), {"sink": [1.0] * 4}, ["scale_wrong"]),
    ],
)
def test_scores_that_are_not_as_asked_are_named(fault: Fault, asked: dict, causes: list[str]):
    seen = tw.effective_mask(fault, **SIZES, **asked)
    assert seen.causes(CAUSAL) == causes, seen.explain(CAUSAL)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"softcap": 0.0}, r"softcap \(0.0\) must be finite and above 0"),
        ({"softcap": "20"}, r"softcap \('20'\)"),
        ({"sink": [0.0, 1.0]}, r"sink \(2,\) must be one logit for each of num_heads \(4\)"),
        ({"sink": torch.zeros(4, 1)}, r"sink \(4, 1\)"),
        ({"sink": "none"}, "sink"),
    ],
)
def test_what_cannot_be_asked_for(asked: dict, message: str):
    with pytest.raises(ValueError, match=message):
        tw.effective_mask(Fault(), **SIZES, **asked)

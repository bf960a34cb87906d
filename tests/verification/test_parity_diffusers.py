"""Parity of models of diffusers: right splits, and the faults that public threads tell of."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from verification.zoo import Wrong

pytest.importorskip("diffusers", reason="needs diffusers, of the extra diffusers")

from support.diffusers_models import (
    flux,
    flux_inputs,
    helios,
    helios_inputs,
    hunyuan_video,
    hunyuan_video_inputs,
    wan,
    wan_inputs,
)

import tilewise as tw
from tilewise.integrations.diffusers import enable_parallelism
from tilewise.integrations.diffusers.internals import processors
from tilewise_verify.image_models import image_share


def made(make: Any) -> Any:
    torch.manual_seed(0)
    return make().train()


@pytest.mark.parametrize(
    "make, inputs",
    [
        pytest.param(hunyuan_video, hunyuan_video_inputs, marks=pytest.mark.slow),
        (flux, flux_inputs),
        pytest.param(wan, wan_inputs, marks=pytest.mark.slow),
    ],
)
def test_a_model_of_diffusers_through_tilewise_is_equal(make: Any, inputs: Any) -> None:
    report = tw.parity(made(make), inputs(Random(3)), world_size=3)
    assert report.equal and report.compared > 60 and not report.notes, str(report)


class Faulty:
    """Attention to the gathered keys of all ranks, with a fault in its backward pass."""

    def __init__(self, says: str, group: Any, num_tokens: int):
        self.says = says
        self.cp = tw.ContextParallel(group, num_tokens=num_tokens)

    def attention(self, call: dict[str, Any], backend: Any) -> Tensor:
        q, k, v = (call[name] for name in ("query", "key", "value"))
        keys, values = (self.cp.unshard(x, 1) for x in (k, v))

        def attend(keys: Tensor, values: Tensor) -> Tensor:
            p = torch.einsum("bqhd,bkhd->bhqk", q, keys) * q.shape[-1] ** -0.5
            return torch.einsum("bhqk,bkhd->bqhd", p.softmax(-1), values)

        out, here, n = attend(keys, values), self.cp.position_ids, self.cp.world_size
        if self.says == "first keys":  # every step of the ring goes back through those of the first
            first = (x[:, here].repeat(1, n, 1, 1) for x in (keys, values))
            wrong = attend(*first)
            out = out.detach() + wrong - wrong.detach()
        if self.says == "own lse":  # each chunk's own out, weighed by what it is of the whole
            scores = torch.einsum("bqhd,bkhd->bqhk", q, keys) * q.shape[-1] ** -0.5
            chunks = [self.cp.layout.positions(rank) for rank in range(n)]
            sums = [scores[..., x].logsumexp(-1, keepdim=True) for x in chunks]
            parts = torch.stack([attend(keys[:, x], values[:, x]) for x in chunks])
            wrong = (torch.stack(sums).softmax(0).detach() * parts).sum(0)
            out = out.detach() + wrong - wrong.detach()
        return out


def share(says: str, model: Any, inputs: Any, rank: int, group: Any) -> Any:
    """One rank's share of a Wan, with one fault."""
    if says == "averaged":
        loss, rows = image_share(model, inputs, rank, group)
        return Wrong.apply(loss, 1 / 2), rows  # the mean over 2 ranks
    enable_parallelism(model, group, validate="never")
    if says == "noise":
        draw = torch.Generator().manual_seed(rank)
        noise = torch.randn(inputs["hidden_states"].shape, generator=draw)
        inputs = {**inputs, "hidden_states": inputs["hidden_states"] + noise}
    else:
        num_tokens = inputs["hidden_states"][0, 0].numel() // 4
        for layer, processor in processors(model):
            if "attn1" in layer:
                processor._parallel_config = Faulty(says, group, num_tokens)
    loss = model(**inputs)
    return loss, tw.contiguous(inputs["hidden_states"][0, 0].numel() // 4, 2).positions(rank)


@pytest.mark.parametrize(
    "says, causes, layer",
    [
        ("noise", {"noise_per_rank"}, None),
        ("averaged", {"gradient_scaled"}, None),
        ("first keys", {"dv_wrong", "dk_wrong", "dq_wrong"}, "blocks.1.attn1"),
        ("own lse", {"lse_gradient_lost"}, "blocks.1.attn1"),
    ],
)
def test_a_fault_told_of_diffusers_is_named(says: str, causes: set[str], layer: str) -> None:
    report = tw.parity(
        made(wan), wan_inputs(Random(0)), partial(share, says), world_size=2, backend="loopback"
    )
    assert report.cause in causes and (report.layer or "").startswith(layer or ""), str(report)


def test_what_has_no_rows_on_each_rank_is_named() -> None:
    with pytest.raises(ValueError, match="computes whole rows on every rank"):
        tw.parity(made(helios), helios_inputs(Random(0)))

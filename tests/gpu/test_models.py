"""On a GPU: models of transformers, and the verbs of their layers, over loopback's ranks.

Each is beside the same model, unsplit, on the same GPU. Layers with a state call the kernels of fla
where that is installed, and transformers' torch code otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

from support import hf_models, hybrid_models
from support.hf_models import VOCABULARY, Case, errors

import tilewise as tw

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240, method="thread")]

DEVICE = "cuda"
DOCUMENTS = (0, 70, 71, 200, 300)
LAYOUTS = {"contiguous": tw.contiguous(300, 3), "zigzag": tw.zigzag(300, 4)}
WIDE = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}  # what fla's kernels can load
HYBRIDS: dict[str, dict[str, Any]] = {
    "Qwen3Next": WIDE,
    "OlmoHybrid": WIDE,
    "KimiLinear": {"linear_head_dim": 32},
    "Bamba": {},
    "Lfm2": {},
}


@pytest.fixture(scope="module")
def given() -> Case:
    make = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCABULARY, (1, DOCUMENTS[-1]), generator=make)
    return Case(ids.to(DEVICE), DOCUMENTS)


def check(whole: Any, given: Case, layout: tw.Layout, bound: float) -> None:
    whole = whole.to(DEVICE)
    got = hybrid_models.split_in_threads(whole, given, layout)
    found = errors(got, hybrid_models.run_apart(copy.deepcopy(whole), given))
    wrong = {what: x for what, x in found.items() if not x < bound}
    assert not wrong


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "gemma2", "llama4"])
def test_a_split_transformer_is_the_whole_one(name, layout, given):
    check(hf_models.build(name), given, LAYOUTS[layout], 5e-3)  # products may be of TF32


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_split_hybrid_is_the_whole_one(name, layout, given):
    check(hybrid_models.build(name, **HYBRIDS[name]), given, LAYOUTS[layout], 5e-3)


@pytest.mark.parametrize("name", ["llama", "OlmoHybrid"])
def test_a_split_model_in_bf16_is_as_near_as_bf16_is(name, given):
    """Without experts: which of them a token gets may change by rounding."""
    build = hf_models.build if name == "llama" else hybrid_models.build
    model = build(name, dtype=torch.bfloat16, **HYBRIDS.get(name, {}))
    check(model, given, LAYOUTS["zigzag"], 6e-2)


VERBS: dict[str, Callable[[tw.ContextParallel, Tensor, Tensor], Tensor]] = {
    "relayout": lambda cp, x, w: cp.relayout(x, cp.layout) * x,
    "roll": lambda cp, x, w: cp.roll(x, -1, 0, cu_seqlens=DOCUMENTS),
    "gather": lambda cp, x, w: cp.gather(x, mask=tw.Causal() & tw.Window(9, 0)).sum(0) * x,
    "conv1d": lambda cp, x, w: cp.conv1d(x, w, cu_seqlens=DOCUMENTS),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("verb", VERBS)
def test_verbs_are_those_of_the_cpu(verb, layout):
    """What a verb gives and its gradients are the same numbers as on the CPU."""
    split = LAYOUTS[layout]
    make = torch.Generator().manual_seed(0)
    x, out = (torch.randn(300, 6, generator=make, dtype=torch.float64) for _ in range(2))
    weight = torch.randn(6, 4, generator=make, dtype=torch.float64)

    def results(device: str) -> list[Tensor]:
        def on_rank(rank: int, group: Any) -> list[Tensor]:
            cp = tw.ContextParallel(group, num_tokens=300, layout=split)
            mine = split.shard(x.to(device), rank).requires_grad_()
            w = weight.to(device).requires_grad_()
            found = VERBS[verb](cp, mine, w)
            dx, dw = torch.autograd.grad(
                found, (mine, w), split.shard(out.to(device), rank), materialize_grads=True
            )
            return [found.detach().cpu(), dx.cpu(), dw.cpu()]

        ranks = tw.loopback(split.world_size, on_rank)
        return [*chain(*ranks)]

    for got, want in zip(results(DEVICE), results("cpu"), strict=True):
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)

"""The loss that levels the work of experts counts the tokens of all ranks."""

from __future__ import annotations

import copy
from itertools import cycle
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

from support.hf_models import SIZES, VOCABULARY
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DogeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

import tilewise as tw
from tilewise.integrations import hf
from tilewise.integrations.transformers.forward import split_forward

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
SHARED = {"shared_expert_intermediate_size": 16}
STATES: dict[str, Any] = {f"linear_num_{x}_heads": 2 for x in ("key", "value")}
STATES |= {f"linear_{x}_head_dim": 8 for x in ("key", "value")}
STATES["layer_types"] = ["linear_attention", "full_attention", "linear_attention"]
CONFIGS = {
    "mixtral": (MixtralConfig, LOCAL),
    "qwen2_moe": (Qwen2MoeConfig, EXPERTS | SHARED),
    "qwen3_moe": (Qwen3MoeConfig, EXPERTS | {"head_dim": 8, "mlp_only_layers": [1]}),
    "olmoe": (OlmoeConfig, EXPERTS),
    "gpt_oss": (GptOssConfig, LOCAL | {"head_dim": 8, "sliding_window": 5}),
    "granitemoe": (GraniteMoeConfig, LOCAL),
    "phimoe": (PhimoeConfig, LOCAL | {"sliding_window": 6, "router_jitter_noise": 0.0}),
    "qwen3_next": (Qwen3NextConfig, EXPERTS | SHARED | STATES | {"head_dim": 8}),
}
COEFFICIENT = 0.5
"""So large that a wrong loss shows."""


def routed(name: str, **changes: Any) -> Any:
    make, sizes = CONFIGS[name]
    loss = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(make(**SIZES | sizes | loss | changes)).float()
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(x + 0.1 * torch.randn(x.shape))
    return model.train()


def padded_rows() -> dict[str, Tensor]:
    """Three rows, two of them padded on the right."""
    ids = torch.randint(3, VOCABULARY, (3, 17), generator=torch.Generator().manual_seed(1))
    seen = (torch.arange(17) < torch.tensor([[17], [9], [4]])).long()
    return {
        "input_ids": ids * seen,
        "attention_mask": seen,
        "labels": ids.masked_fill(seen == 0, -100),
    }


def stepped(model: Any, given: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    out = model(**given)
    out.loss.backward()
    return out, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_equal(got: dict[str, Any], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert (got[name] - x).abs().max() < 1e-5 * max(1, float(x.abs().max())), name


@pytest.mark.parametrize(("name", "world_size"), [*zip(CONFIGS, cycle((2, 3)), strict=False)])
def test_whole_rows_have_the_loss_and_gradients_of_the_unsplit_model(name: str, world_size: int):
    whole, given = routed(name), padded_rows()
    want, grads = stepped(copy.deepcopy(whole), given)
    assert float(want.aux_loss.detach()) > 0.9  # 1 is level work

    def on_rank(rank: int, group: Any) -> tuple[Any, dict[str, Tensor]]:
        model = copy.deepcopy(whole)
        split_forward(model, group)
        return stepped(model, given)

    ranks = tw.loopback(world_size, on_rank)
    for out, _ in ranks:
        for name_of, tolerance in (("loss", 1e-5), ("aux_loss", 1e-6)):
            assert abs(float((out[name_of] - want[name_of]).detach())) < tolerance, name_of
    mean = {n: sum(own[n] for _, own in ranks) / world_size for n in grads}
    assert_equal(mean, grads)


@pytest.mark.parametrize("tokens", [23, 2])  # of 2 tokens a rank has none
def test_shares_of_a_loop_of_ones_own_add_up(tokens: int):
    whole = routed("mixtral")
    ids = torch.randint(3, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(1))
    want, grads = stepped(copy.deepcopy(whole), {"input_ids": ids, "labels": ids})

    def on_rank(rank: int, group: Any) -> tuple[Any, dict[str, Tensor]]:
        cp = tw.ContextParallel(group, num_tokens=tokens, mask=tw.Causal())
        model = hf.parallelize(copy.deepcopy(whole), cp, f"experts_{rank}")
        return stepped(model, hf.shard(cp, ids, labels=ids))

    ranks = tw.loopback(3, on_rank)
    for name in ("loss", "aux_loss"):
        share = sum(out[name].detach() for out, _ in ranks)
        assert abs(float(share - want[name].detach())) < 1e-5, name
    assert_equal({n: sum(own[n] for _, own in ranks if n in own) for n in grads}, grads)


def test_a_call_may_ask_for_the_loss_and_gets_whole_results():
    whole = routed("qwen3_moe", output_router_logits=False)
    rows = padded_rows()
    seen = rows["attention_mask"].bool().flatten()
    given = {"output_router_logits": True, **rows, "labels": None}
    want = whole(**given)

    def on_rank(rank: int, group: Any) -> Any:
        model = copy.deepcopy(whole)
        split_forward(model, group)
        with torch.no_grad():
            out = model(**given)
        return out.aux_loss, [torch.as_tensor(x[seen]) for x in out.router_logits]

    for aux_loss, router_logits in tw.loopback(2, on_rank):
        assert abs(float((aux_loss - want.aux_loss).detach())) < 1e-6
        assert len(router_logits) == len(want.router_logits) == 2
        for got, layer in zip(router_logits, want.router_logits, strict=True):
            assert (got - layer[seen]).abs().max() < 1e-5


def test_calls_of_others_count_their_own_tokens_while_a_call_is_split():
    whole, given = routed("mixtral"), padded_rows()
    want = float(whole(**given).aux_loss.detach())

    def on_rank(rank: int, group: Any) -> tuple[float, float]:
        model = copy.deepcopy(whole)
        split_forward(model, group)
        split = float(model(**given).aux_loss.detach())
        with hf.unsplit(model):
            return split, float(model(**given).aux_loss.detach())

    for split, unsplit in tw.loopback(2, on_rank):
        assert abs(split - want) < 1e-6 and abs(unsplit - want) < 1e-6


def test_a_loss_of_routers_that_is_not_known_is_refused_by_name():
    doge = DogeConfig(
        **SIZES, is_moe=True, num_experts=16, num_experts_per_tok=2, output_router_logits=True
    )
    model = AutoModelForCausalLM.from_config(doge)
    with pytest.raises(ValueError, match="output_router_logits"):
        hf.check_model(model)
    with pytest.raises(ValueError, match=r"has no load_balancing_loss_func\(gate_logits"):
        tw.loopback(1, lambda rank, group: split_forward(model, group))


def test_canonical_sums_are_refused_on_every_rank():
    whole, given = routed("mixtral"), padded_rows()

    def on_rank(rank: int, group: Any) -> str:
        model = copy.deepcopy(whole)
        split_forward(model, group, reduction="canonical")
        with pytest.raises(ValueError, match="the bits of the routers' sums depend on the split"):
            model(**given)
        return "refused"

    assert tw.loopback(2, on_rank) == ["refused"] * 2


def test_a_registered_name_alone_does_not_split_the_loss():
    whole = routed("mixtral", output_router_logits=False)
    cp = tw.ContextParallel(num_tokens=22, mask=tw.Causal())
    whole.set_attn_implementation(hf.register(cp, "experts_alone"))
    ids = torch.randint(3, VOCABULARY, (1, 22))
    with pytest.raises(ValueError, match="output_router_logits=True"):
        whole(**hf.shard(cp, ids), output_router_logits=True)

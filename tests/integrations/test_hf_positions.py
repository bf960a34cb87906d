"""Models that count positions from padding_idx + 1 on (RoBERTa and its kin), beside the unsplit
model: rows with padding, documents, and what is refused.
"""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    RobertaConfig,
    RobertaForCausalLM,
    RobertaForMaskedLM,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

import tilewise as tw
from tilewise.integrations import hf
from tilewise.integrations.transformers.forward import split_forward

PADDING, VOCABULARY, TOKENS = 1, 60, 22
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "attn_implementation": "eager",
}


def made(model_class: Any = RobertaForMaskedLM, config: Any = RobertaConfig) -> Any:
    torch.manual_seed(3)
    decodes = {"is_decoder": True} if model_class is RobertaForCausalLM else {}
    return model_class(config(**SIZES, pad_token_id=PADDING, **decodes)).double()


def drawn(*shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(4))


def weighed(logits: Tensor, weights: Tensor, model: Any) -> dict[str, Tensor]:
    """Gradients of a weighted sum of logits."""
    model.zero_grad()
    (logits * weights).sum().backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def summed(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: sum(own[name] for own in ranks if name in own) for name in ranks[0]}  # type: ignore[misc]


def assert_near(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert found.keys() == want.keys() and len(want) > 20
    for name, x in want.items():
        torch.testing.assert_close(found[name], x, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (RobertaForMaskedLM, RobertaConfig),
        (RobertaForCausalLM, RobertaConfig),
        (XLMRobertaForMaskedLM, XLMRobertaConfig),
    ],
)
def test_documents_of_a_loop_of_ones_own(model_class: Any, config: Any, world_size: int):
    whole, ids = made(model_class, config), drawn(1, TOKENS)
    edges = 0, 9, TOKENS
    weights = torch.randn(1, TOKENS, VOCABULARY, dtype=torch.float64)
    apart = [whole(ids[:, a:b]).logits for a, b in pairwise(edges)]
    want = weighed(torch.cat(apart, 1), weights, whole)

    def on_rank(rank: int, group: Any) -> tuple[Tensor, dict[str, Tensor]]:
        mask = tw.Causal() if model_class is RobertaForCausalLM else tw.Full()
        cp = tw.ContextParallel(group, num_tokens=TOKENS, mask=mask)
        model = hf.parallelize(copy.deepcopy(whole), cp, f"positions_{rank}")
        out = model(**hf.shard(cp, ids, cu_seqlens=edges)).logits
        return hf.unshard(cp, out).detach(), weighed(out, cp.shard(weights, 1), model)

    ranks = tw.loopback(world_size, on_rank)
    torch.testing.assert_close(ranks[0][0], torch.cat(apart, 1).detach(), rtol=0, atol=1e-10)
    assert_near(summed([grads for _, grads in ranks]), want)


@pytest.mark.parametrize("side", ["left", "right"])
def test_whole_rows_with_padding_on_either_side(side: str):
    whole, ids = made(), drawn(3, 12)
    seen = torch.ones_like(ids)
    for row, length in enumerate((12, 7, 9)):
        seen[row, slice(length, None) if side == "right" else slice(0, 12 - length)] = 0
    ids = ids.where(seen == 1, PADDING)
    weights = torch.randn(3, 12, VOCABULARY, dtype=torch.float64) * seen[..., None]
    out = whole(ids, attention_mask=seen).logits
    want = weighed(out, weights, whole)

    def on_rank(rank: int, group: Any) -> tuple[Tensor, dict[str, Tensor]]:
        model = copy.deepcopy(whole)
        split_forward(model, group)
        found = model(ids, attention_mask=seen).logits
        logits = torch.as_tensor(found[...])
        return logits.detach(), weighed(logits, weights, model)

    ranks = tw.loopback(3, on_rank)
    for logits, _ in ranks:
        difference = (logits - out.detach()) * seen[..., None]
        assert float(difference.abs().max()) < 1e-10
    grads = summed([own for _, own in ranks])
    assert_near({name: x / 3 for name, x in grads.items()}, want)


def test_padding_of_a_loop_of_ones_own_is_left_out_by_its_mask():
    whole, ids = made(), drawn(2, 11)
    seen = torch.ones_like(ids)
    seen[1, 7:] = 0
    ids = ids.where(seen == 1, PADDING)
    want = whole(ids, attention_mask=seen).logits[seen.bool()].detach()

    def on_rank(rank: int, group: Any) -> Tensor:
        cp = tw.ContextParallel(group, num_tokens=int(seen.sum()), mask=tw.Full())
        model = hf.parallelize(copy.deepcopy(whole), cp, f"padded_{rank}")
        with torch.no_grad():
            out = model(**hf.shard(cp, ids, attention_mask=seen)).logits
        return hf.unshard(cp, out)[0]

    for found in tw.loopback(2, on_rank):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-10)


def test_calls_outside_are_the_models_own():
    whole, ids = made(), drawn(1, TOKENS)
    want = whole(ids).logits.detach()

    def on_rank(rank: int, group: Any) -> Tensor:
        cp = tw.ContextParallel(group, num_tokens=TOKENS, mask=tw.Full())
        model = hf.parallelize(copy.deepcopy(whole), cp, f"outside_{rank}")
        with torch.no_grad(), hf.unsplit(model):
            return model(ids).logits

    for found in tw.loopback(2, on_rank):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("fault", ["padding", "no positions"])
def test_what_no_rank_can_count_is_refused_on_every_rank(fault: str):
    whole, ids = made(), drawn(1, TOKENS)
    if fault == "padding":
        ids[0, 3] = PADDING

    def on_rank(rank: int, group: Any) -> str:
        cp = tw.ContextParallel(group, num_tokens=TOKENS, mask=tw.Full())
        model = hf.parallelize(copy.deepcopy(whole), cp, f"refused_{rank}")
        inputs = hf.shard(cp, ids)
        if fault == "no positions" and rank == 1:
            del inputs["position_ids"]
        with pytest.raises(ValueError) as refused:
            model(**inputs)
        return str(refused.value)

    for message in tw.loopback(2, on_rank):
        assert {
            "padding": "input_ids hold 1, the id of padding",
            "no positions": "counts positions from padding_idx + 1 (2) on",
        }[fault] in message

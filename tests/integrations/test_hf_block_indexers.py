"""Qwen4-Exp split: its indexer chooses blocks of tokens, its other layers carry a state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

from support.indexer_models import CU_SEQLENS, alone, compare, ids, model_class

import tilewise as tw
from tilewise.integrations import hf
from tilewise.integrations.transformers.check import refusal
from tilewise.integrations.transformers.forward import split_forward
from tilewise_verify.hf_proof import tiny_model

N_GRAMS = {"ple_layer_ids": [2], "eos_token_id": int(ids()[0, 12])}
LAYOUTS = (tw.contiguous(40, 2), tw.zigzag(40, 3), tw.zigzag(40, 4))


def configuration(**fields: Any) -> Any:
    indexer = {
        "indexer_n_heads": 32,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 16,
    }
    return model_class("Qwen4Exp").config_class(**indexer | fields)


def build(rate: int = 3, blocks: int = 2, **fields: Any) -> Any:
    model = tiny_model(model_class("Qwen4Exp"), configuration(**fields))
    for module in model.modules():
        if hasattr(module, "compress_ratio"):
            module.compress_ratio, module.block_topk = rate, blocks
            module.token_budget = rate * blocks
    return model


def trained(
    whole: Any, layout: tw.Layout, checkpoints: bool = False, **columns: Any
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Losses and gradients of all ranks of a split step."""

    def on_rank(rank: int, group: Any) -> tuple[float, dict[str, Tensor]]:
        n = layout.num_tokens
        cp = tw.ContextParallel(group, num_tokens=n, mask=tw.Causal(), layout=layout)
        model = copy.deepcopy(whole)
        model.zero_grad()
        hf.parallelize(model, cp, f"blocks_{rank}")
        if checkpoints:
            model.activation_checkpointing_enable({"use_reentrant": False})
        out = model(**hf.shard(cp, ids()[:, :n], labels=ids()[:, :n], **columns))
        out.loss.backward()
        grads = {n: x.grad for n, x in model.named_parameters() if x.grad is not None}
        return float(out.loss.detach()), grads

    losses, grads = zip(*tw.loopback(layout.world_size, on_rank), strict=True)
    return [*losses], [*grads]


@pytest.mark.parametrize("cu_seqlens", [CU_SEQLENS, (0, 40), (0, 2, 4, 39, 40)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_loss_and_gradients_are_those_of_the_documents_alone(
    layout: tw.Layout, cu_seqlens: tuple[int, ...]
):
    whole, tokens = build(), ids()
    want = alone(whole, tokens[0], cu_seqlens)
    want.backward()
    found = trained(whole, layout, cu_seqlens=cu_seqlens)
    compare(whole, *found, want.detach(), needed="self_attn.k_proj")


def test_the_choice_matters():
    """Else the test above would prove nothing: with every block chosen, rows are others."""
    few, all_blocks = (build(blocks=x).eval()(ids(), use_cache=False).logits for x in (2, 14))
    assert (few - all_blocks).abs().max() > 1e-2


def test_recomputed_layers_and_ranks_without_tokens():
    whole, tokens = build(), ids()[:, :12]
    want = alone(whole, tokens[0], (0, 12))
    want.backward()
    layout = tw.Layout.from_positions([[0, 1], [], [2, 3, 4, 8, 9], [5, 6, 7, 10, 11]])
    found = trained(whole, layout, checkpoints=True)
    compare(whole, *found, want.detach(), needed="self_attn.k_proj")


@pytest.mark.parametrize("n_grams", [{}, N_GRAMS])
def test_check_model_takes_it(n_grams: dict[str, Any]):
    assert refusal(model_class("Qwen4Exp"), configuration(**n_grams)) is None


@pytest.mark.parametrize("cu_seqlens", [CU_SEQLENS, (0, 40), (0, 2, 4, 39, 40)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_layers_that_look_up_n_grams(layout: tw.Layout, cu_seqlens: tuple[int, ...]):
    """With the end-of-text id among the tokens, at which n-grams begin anew."""
    whole, tokens = build(**N_GRAMS), ids()
    assert (tokens == N_GRAMS["eos_token_id"]).any()
    want = alone(whole, tokens[0], cu_seqlens)
    want.backward()
    found = trained(whole, layout, cu_seqlens=cu_seqlens)
    compare(whole, *found, want.detach(), needed="ple.conv1d")
    compare(whole, *found, want.detach(), needed="ngram_embedding")


def test_n_grams_of_recomputed_layers_and_ranks_without_tokens():
    whole, tokens = build(**N_GRAMS), ids()[:, :12]
    want = alone(whole, tokens[0], (0, 12))
    want.backward()
    layout = tw.Layout.from_positions([[0, 1], [], [2, 3, 4, 8, 9], [5, 6, 7, 10, 11]])
    found = trained(whole, layout, checkpoints=True)
    compare(whole, *found, want.detach(), needed="ple.conv1d")


def test_whole_rows_go_in():
    """The split in a model's forward, with layouts of the planner's."""
    whole, tokens = build(**N_GRAMS).eval(), ids(2)
    want = whole(tokens, use_cache=False).logits.detach()

    def on_rank(rank: int, group: Any) -> Tensor:
        model = copy.deepcopy(whole)
        split_forward(model, group)
        return model(tokens).logits.detach()

    for found in tw.loopback(3, on_rank):
        assert (found - want).abs().max() < 1e-5


def test_what_was_chosen_is_recorded_and_replayed():
    whole, tokens = build().eval(), ids()

    def run(group: Any, layout: tw.Layout, blocks: int, choices: Any) -> Any:
        cp = tw.ContextParallel(group, num_tokens=40, mask=tw.Causal(), layout=layout)
        model = hf.parallelize(copy.deepcopy(whole), cp, f"recorded_{cp.rank}")
        for module in model.modules():
            if hasattr(module, "block_topk"):
                module.block_topk = blocks
        with torch.no_grad(), hf.record_indices() as found:
            out = model(**hf.shard(cp, tokens, cu_seqlens=CU_SEQLENS, indices=choices)).logits
        return hf.unshard(cp, out), [hf.unshard(cp, x) for x in found]

    want, choices = tw.loopback(2, lambda _, group: run(group, tw.zigzag(40, 2), 2, None))[0]
    assert [x.shape for x in choices] == [(1, 40, 3 * 2 + 2)]
    layout = tw.contiguous(40, 3)
    for out, _ in tw.loopback(3, lambda _, group: run(group, layout, 1, choices)):
        assert (out - want).abs().max() < 1e-5
    for out, _ in tw.loopback(3, lambda _, group: run(group, layout, 1, None)):
        assert (out - want).abs().max() > 1e-3

"""Models whose indexer chooses keys, split: loss and gradients of each document alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

from support.indexer_models import (
    CU_SEQLENS,
    NAMES,
    WITH_SHARED,
    alone,
    build,
    compare,
    ids,
    model_class,
    rows_with_documents,
)

import tilewise as tw
from tilewise.integrations import hf
from tilewise.integrations.transformers import indexers
from tilewise.integrations.transformers.check import refusal
from tilewise.integrations.transformers.forward import split_forward

LAYOUTS = (tw.contiguous(40, 2), tw.zigzag(40, 3), tw.zigzag(40, 4), tw.striped(40, 2))


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize(("name", "fields"), WITH_SHARED)
def test_loss_and_gradients_are_those_of_the_documents_alone(
    name: str, fields: dict[str, Any], layout: tw.Layout
):
    whole, tokens = build(name, **fields), ids()
    want = alone(whole, tokens[0], CU_SEQLENS)
    want.backward()

    def on_rank(rank: int, group: Any) -> tuple[float, dict[str, Tensor]]:
        cp = tw.ContextParallel(group, num_tokens=40, mask=tw.Causal(), layout=layout)
        model = copy.deepcopy(whole)
        model.zero_grad()
        hf.parallelize(model, cp, f"indexers_{rank}")
        out = model(**hf.shard(cp, tokens, labels=tokens, cu_seqlens=CU_SEQLENS))
        out.loss.backward()
        grads = {n: x.grad for n, x in model.named_parameters() if x.grad is not None}
        return float(out.loss.detach()), grads

    losses, grads = zip(*tw.loopback(layout.world_size, on_rank), strict=True)
    compare(whole, [*losses], [*grads], want.detach())


@pytest.mark.parametrize("name", NAMES)
def test_the_choice_matters_to_these_models(name: str):
    """Else the test above would prove nothing: with every key chosen the loss is another."""
    tokens = ids()
    models = [build(name, top_k).eval() for top_k in (5, 40)]
    losses = [float(alone(model, tokens[0], (0, 40)).detach()) for model in models]
    assert abs(losses[0] - losses[1]) > 1e-3


@pytest.mark.parametrize("name", ["DeepseekV32", "GlmMoeDsa"])
def test_whole_rows_go_in_and_each_row_has_documents_of_its_own(name: str):
    """The split of a Trainer, in a model's forward: rows that begin their documents elsewhere."""
    whole = build(name).eval()
    tokens, positions, want = rows_with_documents(whole)

    def on_rank(rank: int, group: Any) -> Tensor:
        model = copy.deepcopy(whole)
        split_forward(model, group)
        found = model(tokens, position_ids=positions).logits.detach()
        assert (model.generate(tokens[:, :6], max_new_tokens=2)[:, :6] == tokens[:, :6]).all()
        return found

    for found in tw.loopback(3, on_rank):
        assert (found - want).abs().max() < 1e-5


def test_a_batch_of_rows_with_documents_of_their_own():
    """Of parallelize: a mask for each row of the batch."""
    whole = build("DeepseekV32").eval()
    tokens, positions, want = rows_with_documents(whole)

    def on_rank(rank: int, group: Any) -> Tensor:
        cp = tw.ContextParallel(group, num_tokens=40, mask=tw.Causal(), layout=tw.zigzag(40, 2))
        model = hf.parallelize(copy.deepcopy(whole), cp, f"rows_{rank}")
        given = {"input_ids": cp.shard(tokens, 1), "position_ids": cp.shard(positions, 1)}
        return hf.unshard(cp, model(**given, use_cache=False).logits.detach())

    for found in tw.loopback(2, on_rank):
        assert (found - want).abs().max() < 1e-5


def test_latents_travel_and_not_the_keys_of_all_heads():
    whole, tokens = build("DeepseekV32").eval(), ids()
    text = whole.config

    def on_rank(rank: int, group: Any) -> int:
        cp = tw.ContextParallel(group, num_tokens=40, mask=tw.Causal(), layout=tw.contiguous(40, 2))
        model = hf.parallelize(copy.deepcopy(whole), cp, f"latents_{rank}")
        before = group.bytes_sent
        with torch.no_grad():
            model(**hf.shard(cp, tokens))
        return group.bytes_sent - before

    index = 4 * text.index_head_dim
    latent = 4 * (text.kv_lora_rank + text.qk_rope_head_dim) + 4
    most = text.num_hidden_layers * (20 * (index + latent) + 8 * 2)
    heads = text.num_hidden_layers * 20 * 4 * text.num_attention_heads * text.v_head_dim
    assert max(tw.loopback(2, on_rank)) <= most < heads + most


def test_a_rank_without_tokens():
    whole, tokens = build("GlmMoeDsa").eval(), ids()[:, :5]
    want = whole(tokens, use_cache=False).logits.detach()
    layout = tw.Layout.from_positions([[0, 1, 2], [], [3, 4]])

    def on_rank(rank: int, group: Any) -> Tensor:
        cp = tw.ContextParallel(group, num_tokens=5, mask=tw.Causal(), layout=layout)
        model = hf.parallelize(copy.deepcopy(whole), cp, f"empty_{rank}")
        return hf.unshard(cp, model(**hf.shard(cp, tokens)).logits.detach())

    for found in tw.loopback(3, on_rank):
        assert (found - want).abs().max() < 1e-5


def test_checkpoints_run_layers_again():
    whole, tokens = build("GlmMoeDsa"), ids()
    want = alone(whole, tokens[0], CU_SEQLENS)
    want.backward()

    def on_rank(rank: int, group: Any) -> tuple[float, dict[str, Tensor]]:
        cp = tw.ContextParallel(group, num_tokens=40, mask=tw.Causal(), layout=tw.zigzag(40, 2))
        model = copy.deepcopy(whole)
        model.zero_grad()
        hf.parallelize(model, cp, f"checkpoints_{rank}")
        model.activation_checkpointing_enable({"use_reentrant": False})
        out = model(**hf.shard(cp, tokens, labels=tokens, cu_seqlens=CU_SEQLENS))
        out.loss.backward()
        grads = {n: x.grad for n, x in model.named_parameters() if x.grad is not None}
        return float(out.loss.detach()), grads

    losses, grads = zip(*tw.loopback(2, on_rank), strict=True)
    compare(whole, [*losses], [*grads], want.detach())


def test_under_autocast():
    """As a Trainer with bf16=True runs it: weights of fp32, keys expanded in bf16."""
    whole, tokens = build("DeepseekV32").eval(), ids()
    with torch.no_grad():
        want = whole(tokens, use_cache=False).logits

    def on_rank(rank: int, group: Any) -> Tensor:
        cp = tw.ContextParallel(group, num_tokens=40, mask=tw.Causal(), layout=tw.zigzag(40, 2))
        model = hf.parallelize(copy.deepcopy(whole), cp, f"autocast_{rank}")
        with torch.autocast("cpu", torch.bfloat16):
            out = model(**hf.shard(cp, tokens, labels=tokens))
        out.loss.backward()
        assert all(x.grad.isfinite().all() for x in model.parameters() if x.grad is not None)
        return hf.unshard(cp, out.logits.detach()).float()

    for found in tw.loopback(2, on_rank):
        # a choice that differs in bf16 changes a row; most rows are those of fp32
        apart = (found - want).abs().amax(-1) / want.abs().amax()
        assert (apart[0] < 0.05).float().mean() > 0.7


@pytest.mark.parametrize("name", NAMES)
def test_check_model_takes_them(name: str):
    assert refusal(model_class(name), model_class(name).config_class()) is None


@pytest.mark.parametrize(
    "forward",
    [
        lambda q, k, w, mask: (torch.matmul(q, k) + 1.0).topk(3),
        lambda q, k, w, mask: torch.sigmoid(torch.matmul(q, k)),
        lambda q, k, w, mask: torch.matmul(w, torch.matmul(q, k)),
        lambda q, k, w, mask: torch.matmul(w, torch.relu(torch.matmul(q, k))).topk(3),
        lambda q, k, w, mask: torch.matmul(q, k) * -1.0,
        lambda q, k, w, mask: k.norm(),
        lambda q, k, w, mask: mask.sum(),
    ],
)
def test_an_indexer_that_does_something_else_is_refused(forward: Any):
    def on_rank(rank: int, group: Any) -> None:
        cp = tw.ContextParallel(group, num_tokens=8, mask=tw.Causal(), layout=tw.contiguous(8, 2))
        mask = indexers.IndexMask(hf.LayerMask(cp, tw.Causal(), packs=True), 0)
        q, weights = torch.randn(1, 4, 2, 3), torch.randn(1, 4, 1, 2)
        k = indexers._KeysOfAllRanks(mask).update_indexer(torch.randn(1, 4, 3), 0)
        with pytest.raises(ValueError, match=r"an indexer of the model .* does not know"):
            forward(q, k.transpose(-1, -2).unsqueeze(1), weights, mask)

    tw.loopback(2, on_rank)

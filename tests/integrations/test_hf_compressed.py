"""DeepSeek V4, whose layers compress windows of keys, split: loss and gradients of each document
alone.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

from support.indexer_models import (
    CU_SEQLENS,
    alone,
    compare,
    ids,
    model_class,
    rows_with_documents,
)

import tilewise as tw
from tilewise.integrations import hf
from tilewise.integrations.transformers.check import refusal
from tilewise.integrations.transformers.forward import split_forward
from tilewise_verify.hf_proof import tiny_model

HCA, CSA, SLIDING = (
    "heavily_compressed_attention",
    "compressed_sparse_attention",
    "sliding_attention",
)
LAYOUTS = (tw.contiguous(40, 2), tw.zigzag(40, 3), tw.zigzag(40, 4), tw.striped(40, 2))


def build(csa: int = 3, hca: int = 4, top_k: int = 3) -> Any:
    """A tiny model with a layer of each kind; windows of tokens are so short that documents have
    several.
    """
    config = model_class("DeepseekV4").config_class()
    config.layer_types[:3] = [HCA, CSA, SLIDING]
    config.compress_rates = {CSA: csa, HCA: hca}
    model = tiny_model(model_class("DeepseekV4"), config)
    assert {x.layer_type for x in model.modules() if hasattr(x, "layer_type")} == {
        HCA,
        CSA,
        SLIDING,
    }
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = top_k
        if hasattr(module, "tid2eid"):
            module.tid2eid.random_(0, 2)
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
        hf.parallelize(model, cp, f"compressed_{rank}")
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
    compare(whole, *found, want.detach(), needed="compressor.kv_proj")


def test_check_model_takes_it():
    of = model_class("DeepseekV4")
    assert refusal(of, of.config_class()) is None


def test_recomputed_layers_and_ranks_without_tokens_or_keys():
    """Rank 1 has no tokens; rank 0 has those before any window is full."""
    whole, tokens = build(), ids()[:, :12]
    want = alone(whole, tokens[0], (0, 12))
    want.backward()
    layout = tw.Layout.from_positions([[0, 1], [], [2, 3, 4, 8, 9], [5, 6, 7, 10, 11]])
    found = trained(whole, layout, checkpoints=True)
    compare(whole, *found, want.detach(), needed="compressor.kv_proj")


def test_whole_rows_go_in_and_each_row_has_documents_of_its_own():
    whole = build().eval()
    tokens, positions, want = rows_with_documents(whole)

    def on_rank(rank: int, group: Any) -> Tensor:
        model = copy.deepcopy(whole)
        split_forward(model, group)
        return model(tokens, position_ids=positions).logits.detach()

    for found in tw.loopback(3, on_rank):
        assert (found - want).abs().max() < 1e-5


def test_a_batch_of_rows_with_documents_of_their_own():
    whole = build().eval()
    tokens, positions, want = rows_with_documents(whole)

    def on_rank(rank: int, group: Any) -> Tensor:
        cp = tw.ContextParallel(group, num_tokens=40, mask=tw.Causal(), layout=tw.zigzag(40, 2))
        model = hf.parallelize(copy.deepcopy(whole), cp, f"rows_{rank}")
        given = {"input_ids": cp.shard(tokens, 1), "position_ids": cp.shard(positions, 1)}
        return hf.unshard(cp, model(**given, use_cache=False).logits.detach())

    for found in tw.loopback(2, on_rank):
        assert (found - want).abs().max() < 1e-5


def test_what_was_chosen_is_recorded_and_replayed():
    """Of two ranks, on three, whose top-k would choose others."""
    whole, tokens = build().eval(), ids()

    def run(group: Any, layout: tw.Layout, top_k: int, choices: Any) -> tuple[Tensor, list[Tensor]]:
        cp = tw.ContextParallel(group, num_tokens=40, mask=tw.Causal(), layout=layout)
        model = hf.parallelize(copy.deepcopy(whole), cp, f"recorded_{cp.rank}")
        for module in model.modules():
            if hasattr(module, "index_topk"):
                module.index_topk = top_k
        with torch.no_grad(), hf.record_indices() as found:
            out = model(**hf.shard(cp, tokens, cu_seqlens=CU_SEQLENS, indices=choices)).logits
        return hf.unshard(cp, out), [hf.unshard(cp, x) for x in found]

    want, choices = tw.loopback(2, lambda _, group: run(group, tw.zigzag(40, 2), 3, None))[0]
    assert [x.shape for x in choices] == [(1, 40, 3)] * 2
    assert choices[0].max() == 3 + 7 + 3 - 1  # entries are numbered over all documents
    layout = tw.contiguous(40, 3)
    for out, _ in tw.loopback(3, lambda _, group: run(group, layout, 1, choices)):
        assert (out - want).abs().max() < 1e-5
    for out, _ in tw.loopback(3, lambda _, group: run(group, layout, 1, None)):
        assert (out - want).abs().max() > 1e-3
    for row, entry, message in (
        (8, 3, "position 8 chooses compressed key 3, which is hidden from it: it sees 0 to 2"),
        (9, 0, "position 9 chooses compressed key 0, but sees none"),
        (30, 4, "position 30 chooses compressed key 4, which it names twice"),
    ):
        wrong = choices[0].clone()
        wrong[0, row] = torch.tensor([entry, -1, entry if row == 30 else -1])
        with pytest.raises(ValueError, match=message):
            tw.loopback(3, lambda _, group, x=wrong: run(group, layout, 1, [x, choices[1]]))


def test_a_tree_is_refused():
    whole, tokens = build().eval(), ids()
    tree = tw.Slices([((0, 40), (0, 40), "causal")])

    def on_rank(rank: int, group: Any) -> None:
        cp = tw.ContextParallel(group, num_tokens=40, mask=tree, layout=tw.contiguous(40, 2))
        model = hf.parallelize(copy.deepcopy(whole), cp, f"tree_{rank}")
        rows = {"input_ids": cp.shard(tokens, 1), "position_ids": cp.position_ids[None]}
        with pytest.raises(ValueError, match=r"compresses windows .* Slices \(a tree, say\)"):
            model(**rows, use_cache=False)

    tw.loopback(2, on_rank)

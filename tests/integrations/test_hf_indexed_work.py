"""hf.hybrid_work of models whose layers choose keys."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

from support.indexer_models import SHARED, build, model_class

import tilewise as tw
from tilewise.integrations import hf
from tilewise.planning import IndexedLayer, search_hybrid


def on_meta(name: str, **fields: object) -> torch.nn.Module:
    with torch.device("meta"):
        return model_class(name)(model_class(name).config_class(**fields)).to(torch.bfloat16)


def test_deepseek_v32_sends_index_keys_and_latents():
    """As published: 61 layers of 128 heads, latents of 512 + 64, 2048 keys by 64 heads of 128."""
    work = hf.hybrid_work(on_meta("DeepseekV32", num_hidden_layers=3), 1 << 16)
    layer = IndexedLayer(128, 192, 128, 576, 64, 128, 2048)
    assert work.indexed == (layer,) * 3
    assert work.num_attention_layers == 0 and work.states == ()
    by_name = {x.name: x for x in search_hybrid(work, tw.Machine.preset("h100x8"), world_size=8)}
    assert all(x.parts.indexed > 0 and x.parts.attention == 0 for x in by_name.values())
    rows = (1 << 16) // 8
    backward_of_first = rows * 7 * 2 * 576  # the rank whose rows all others name, or half of them
    assert by_name["contiguous"].sent_bytes[-1] >= 3 * backward_of_first


def test_layers_that_share_a_choice_have_no_indexer():
    work = hf.hybrid_work(build("GlmMoeDsa", **SHARED), 4096)
    assert {layer.index_heads for layer in work.indexed} == {0, 16}


def test_qwen4_exp_has_both_kinds():
    """An index key stands for 16 tokens, and a query sees 15 after the last full block."""
    work = hf.hybrid_work(
        on_meta(
            "Qwen4Exp",
            num_hidden_layers=4,
            num_experts=2,
            num_experts_per_tok=1,
            indexer_n_heads=32,
            indexer_kv_heads=1,
            indexer_head_dim=256,
            indexer_budget=2048,
            indexer_compress_ratio=16,
        ),
        1 << 16,
    )
    (layer,) = work.indexed
    assert (layer.index_heads, layer.index_dim) == (32, 256)
    assert (layer.top_k, layer.tokens_of_index_key) == (2063, 16)
    assert len(work.states) == 3 and work.num_attention_layers == 0


def test_compressed_keys_are_refused_by_name():
    with pytest.raises(ValueError, match="layers of attention to compressed keys"):
        hf.hybrid_work(on_meta("DeepseekV4", num_hidden_layers=4), 4096)

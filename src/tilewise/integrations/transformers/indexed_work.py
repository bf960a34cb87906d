"""Layers of transformers whose indexer chooses keys, as the planner prices them."""

from __future__ import annotations

from typing import Any

import tilewise as tw
from tilewise.integrations.transformers.block_indexers import chooses_blocks
from tilewise.integrations.transformers.chosen_keys import EXPANDS

WITHOUT_INDEXER = (0, 0, 1)
"""Heads, width and tokens of an index key of a layer that uses the choice of another one."""


def indexed_layer(
    module: Any, text: Any, sizes: tuple[int, int, int, int | None]
) -> tw.planning.IndexedLayer:
    """A layer of attention that attends to chosen keys alone.

    Args:
        text: the model's configuration.
        sizes: num_heads, num_kv_heads, head_dim and v_head_dim of its attention.
    """
    num_heads, num_kv_heads, head_dim, v_head_dim = sizes
    v_head_dim = v_head_dim or head_dim
    row_width = num_kv_heads * (head_dim + v_head_dim)
    if hasattr(module, EXPANDS):  # latents travel
        row_width = text.kv_lora_rank + text.qk_rope_head_dim
    indexer: Any = module.indexer
    index: tuple[int, int, int] = WITHOUT_INDEXER
    if chooses_blocks(module):
        index = indexer.index_n_heads, indexer.index_head_dim, indexer.compress_ratio
        top_k = indexer.token_budget + indexer.compress_ratio - 1
    else:
        top_k = text.index_topk
        if indexer is not None:
            index = indexer.n_heads, indexer.head_dim, 1
    heads, width, tokens = index
    return tw.planning.IndexedLayer(
        *(num_heads, head_dim, v_head_dim, row_width, heads, width, top_k),
        tokens_of_index_key=tokens,
    )

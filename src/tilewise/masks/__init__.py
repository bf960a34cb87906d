"""Masks: which queries see which keys. The patterns are `tw.masks`.

base: masks made by a rule; tables: by a table; sequences: for caches that grow; patterns: named
masks; strips: the normal form, and the allowed pairs counted in it; components: parts that no
allowed pair connects; lengths: lengths of documents.
"""

from tilewise.masks.base import Mask
from tilewise.masks.patterns import (
    ALL_NAMES,
    BLOCK,
    BLOCK_NAMES,
    DENSITIES,
    NAMES,
    WINDOW,
    block_causal_document,
    block_sparse,
    block_sparse_variable,
    causal,
    causal_blockwise,
    causal_document,
    causal_with_blocks,
    chunked_causal,
    full,
    full_document,
    global_sliding_window,
    prefix_lm_causal,
    prefix_lm_document,
    random,
    share_question,
    sliding_window,
    sliding_window_causal,
)

__all__ = [
    "ALL_NAMES",
    "BLOCK",
    "BLOCK_NAMES",
    "DENSITIES",
    "NAMES",
    "WINDOW",
    "Mask",
    "block_causal_document",
    "block_sparse",
    "block_sparse_variable",
    "causal",
    "causal_blockwise",
    "causal_document",
    "causal_with_blocks",
    "chunked_causal",
    "full",
    "full_document",
    "global_sliding_window",
    "prefix_lm_causal",
    "prefix_lm_document",
    "random",
    "share_question",
    "sliding_window",
    "sliding_window_causal",
]

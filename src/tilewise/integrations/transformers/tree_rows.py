"""Rows of a split call that are trees: tokens that several samples share stand in them once.

TRL's TreeRow packs samples into such a row. Its async GRPO tells the model by arguments of the call
what each segment of the row sees, and its own attention reads them. In split calls the row's mask
is that of tw.Tree, and layers get none of these arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import tilewise as tw

SEGMENTS = ("tree_cu_seqlens_q", "tree_cu_seqlens_k", "tree_kv_index")
"""Arguments of a call, in the order of `tw.Tree.from_segments`."""
OF_TREES = frozenset((*SEGMENTS, "tree_max_seqlen_q", "tree_max_seqlen_k"))
CANNOT = ("_tilewise_states", "_tilewise_compressor", "_tilewise_blocks", "_tilewise_ngrams")
"""Marks of layers that split calls run in another way than by their mask alone."""


def tree_of_call(model: nn.Module, given: Mapping[str, Any], tokens: Tensor) -> tw.Tree | None:
    """Return the tree that a call's row is; None if the call has no arguments of trees.

    Args:
        model: of transformers.
        given: arguments of the call.
        tokens: [rows, columns, ...] of the call.
    Raises:
        ValueError: for arguments that are no tree, or not the row's, and models whose layers see
            tokens by more than a mask.
    """
    missing = [name for name in SEGMENTS if given.get(name) is None]
    if len(missing) == len(SEGMENTS):
        return None
    if missing or not isinstance(given.get("position_ids"), Tensor):
        names = ", ".join(missing or ("position_ids",))
        raise ValueError(
            f"a row that is a tree needs {names} too; pass all that TreeRow.pack() has"
        )
    if given.get("labels") is not None:
        raise ValueError(
            "labels of a row that is a tree cannot be shifted: several tokens may follow one; pass "
            "shift_labels, as TreeRow.pack() has them"
        )
    for module in model.modules():
        if any(hasattr(module, name) for name in CANNOT) or _has_indexer(module):
            raise ValueError(
                f"{type(model).__name__} cannot run on a row that is a tree: its "
                f"{type(module).__name__} sees other tokens by more than a mask; give each sample "
                "a row, or a document of a row, of its own"
            )
    tree = tw.Tree.from_segments(*(given[name].cpu() for name in SEGMENTS))
    if tuple(tokens.shape[:2]) != (1, tree.num_tokens):
        raise ValueError(
            f"the batch has {tokens.shape[0]} rows of {tokens.shape[1]} tokens, but the tree is "
            f"one row of {tree.num_tokens}; pass each row in a call of its own"
        )
    if not torch.equal(given["position_ids"].cpu(), tree.position_ids[None]):
        raise ValueError(
            f"position_ids of the {tree.num_tokens} tokens are not their places in the tree's "
            "sequences; pass those of TreeRow.pack()"
        )
    return tree


def _has_indexer(module: nn.Module) -> bool:
    number: Any = getattr(module, "_tilewise_indexer", -1)
    return number >= 0

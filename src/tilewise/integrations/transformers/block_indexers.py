"""Layers of Qwen4-Exp, whose indexer chooses blocks of tokens by the mean of their keys, run split.

    index keys   -> mean of each full window of a document -> norm, rotation: one key a window
    a query      -> its best windows, and the tokens after the last full one: keys that it sees

The model's indexer goes over queries one by one. In a split call the same is computed of its own
projections and norms for all queries at once: a window's key by the rank that has its last token,
the choice as `cp.index` makes it. Attention is that to chosen keys.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise as tw
from tilewise.indexed import entries as of_entries
from tilewise.integrations.transformers.attention import LayerMask, refuse
from tilewise.integrations.transformers.replay import record
from tilewise.integrations.transformers.saved import not_compiled


def chooses_blocks(module: Any) -> bool:
    """Return whether an attention module has an indexer of blocks."""
    return isinstance(getattr(module, "indexer", None), nn.Module) and hasattr(
        module.indexer, "compress_ratio"
    )


def wire_block_indexers(base: nn.Module) -> None:
    """Hook the layers of a model that have an indexer of blocks."""
    for module in base.modules():
        if chooses_blocks(module) and not hasattr(module, "_tilewise_blocks"):
            module._tilewise_blocks = True  # pyright: ignore[reportArgumentType]
            module.register_forward_pre_hook(_before_attention, with_kwargs=True)
            module.register_forward_hook(_after_attention, always_call=True)


class _WithChoice:
    """The mask of a layer, which combines with its indexer's choice."""

    dtype = torch.bool

    def __init__(self, mask: LayerMask) -> None:
        self.mask = mask

    def __and__(self, _: Any) -> LayerMask:
        return self.mask


@not_compiled
def _before_attention(module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    mask = next((x for x in (*args, *given.values()) if isinstance(x, LayerMask)), None)
    if mask is None:
        return None
    hidden = args[0] if args else given["hidden_states"]
    mask.whole(len(hidden), given)  # an indexer is not told of documents
    if isinstance(mask.cp.mask, tw.Slices):
        refuse(
            mask.cp,
            f"{type(module).__name__} chooses blocks of a document's tokens, which cp.mask of "
            "Slices (a tree, say) does not tell; make cp with tw.Causal()",
        )
    vars(module.indexer)["forward"] = partial(_choose, module, mask)
    combines = {id(mask): _WithChoice(mask)}
    swapped = tuple(combines.get(id(x), x) for x in args)
    return swapped, {name: combines.get(id(x), x) for name, x in given.items()}


@not_compiled
def _after_attention(module: Any, *_: Any) -> None:
    vars(module.indexer).pop("forward", None)


@torch.no_grad()
def _choose(
    module: Any,
    mask: LayerMask,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *_: Any,
) -> None:
    """In place of an indexer's forward: the positions that it chooses are noted on the mask."""
    indexer, cp, number = module.indexer, mask.cp, module._tilewise_indexer
    if mask.handed is not None:
        mask.chosen = chosen = mask.handed[number]
        record(number, chosen)
        return
    widths = [n * indexer.index_head_dim for n in (indexer.index_n_heads, indexer.index_kv_heads)]
    q, keys = indexer.index_qk_proj(hidden_states).split(widths, -1)
    q = indexer.q_layernorm(q.unflatten(-1, (-1, indexer.index_head_dim)))
    cos, sin = position_embeddings
    q = _rotation(indexer)(q, cos=cos, sin=sin, unsqueeze_dim=2)
    found, rows = list[Tensor](), cp.layout.size(cp.rank)
    for entry in range(len(hidden_states)):
        documents = mask.documents[entry if len(mask.documents) > 1 else 0]
        own = [x[entry if len(x) > 1 else 0, :rows] for x in (q, keys, cos, sin)]
        entries = of_entries.entries_of(cp.layout, cp.rank, documents, indexer.compress_ratio)
        found.append(_positions(indexer, cp, documents, entries, *own))
    spare = hidden_states.shape[1] - rows  # a rank without tokens has one row of padding
    mask.chosen = chosen = F.pad(torch.stack(found), (0, 0, 0, spare), value=-1)
    record(number, chosen)


def _rotation(indexer: Any) -> Any:
    of = next(x for x in type(indexer).__mro__ if "torch.distributed" not in x.__module__)
    return sys.modules[of.__module__].apply_rotary_pos_emb


def _positions(  # noqa: PLR0913 - an indexer's operands
    indexer: Any,
    cp: tw.ContextParallel,
    documents: tuple[int, ...],
    entries: of_entries.Entries | None,
    q: Tensor,
    keys: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Positions that queries of one row of the batch choose, [rows, k], then -1.

    Args:
        q: [rows, heads, width], rotated.
        keys: [rows, width], before their mean.
        cos, sin: [rows, width of the rotation].
    """
    rate, position = indexer.compress_ratio, cp.position_ids.to(q.device)
    most = indexer.token_budget + rate - 1
    steps = torch.arange(rate, device=q.device)
    if entries is None:
        starts = torch.tensor(documents, device=q.device)
        first = starts[torch.searchsorted(starts, position, right=True) - 1]
        tokens = position.new_empty((len(position), 0))
    else:
        first = entries.first_tokens.to(q.device)
        blocks = _blocks(indexer, cp, entries, q, keys, cos, sin)
        tokens = entries.starts.to(q.device)[blocks.clamp(min=0)][..., None] + steps
        tokens = tokens.masked_fill(blocks[..., None] < 0, -1).flatten(1)
    rest = first[:, None] + steps[:-1]
    rest = rest.masked_fill(rest > position[:, None], -1)
    return F.pad(torch.cat([tokens, rest], 1), (0, most - tokens.shape[1] - rate + 1), value=-1)


def _blocks(  # noqa: PLR0913 - an indexer's operands
    indexer: Any,
    cp: tw.ContextParallel,
    entries: of_entries.Entries,
    q: Tensor,
    keys: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Numbers of the entries that queries choose, [rows, k], then -1."""
    windows = of_entries.windows_of(entries, cp.rank, overlapping=False)
    tokens = windows.tokens.to(q.device)
    raw = cp.gather_rows(keys, tokens)
    means = indexer.k_layernorm(raw.float().mean(1).to(raw.dtype))
    turns = (cp.gather_rows(x.contiguous(), tokens[:, 0]) for x in (cos, sin))
    made = _rotation(indexer)(means[:, None], **dict(zip(("cos", "sin"), turns, strict=True)))
    own = made[:, 0].index_select(0, torch.from_numpy(windows.kept).to(q.device))
    transport = tw.transport.transport_for(cp.group)
    weights = q.new_full(q.shape[:2], indexer.index_head_dim**-0.5, dtype=torch.float32)
    return of_entries.choose_entries(q, own, weights, indexer.block_topk, entries, transport)

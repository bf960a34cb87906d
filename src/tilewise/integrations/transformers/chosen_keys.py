"""Attention of a layer to the keys that an indexer chose for its queries.

Where a layer expands keys and values from latents (`expand_kv`), that is put off: the latents
travel to the queries that chose them, and are expanded there, by the layer's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tilewise as tw

EXPANDS = "expand_kv"
"""The method of an attention module that makes keys and values of latents."""


def kept_apart(latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """In place of `expand_kv`: attention gets the latents, and expands those that travelled."""
    return latent, rotary


def attend_to_chosen(  # noqa: PLR0913 - what a layer passes to its attention
    cp: tw.ContextParallel,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    mask: tw.masks.Mask | list[tw.masks.Mask],
    options: dict[str, Any],
) -> Tensor:
    """Return out [batch, rows, heads, v_head_dim]: each query attends to the keys chosen for it.

    Args:
        query, key, value: [batch, heads, rows, width]; key and value are a latent and its rotary
            part, [batch, 1, rows, width], where `expand_kv` has been put off.
        indices: [batch, rows, k], global positions.
        mask: the layer's, or one for each batch entry; the choice has to keep to it.
        options: of cp.attention.
    """
    if isinstance(mask, list):
        outs = list[Tensor]()
        for row, one in enumerate(mask):
            q, k, v, positions = (x[row : row + 1] for x in (query, key, value, indices))
            outs.append(attend_to_chosen(cp, module, q, k, v, positions, one, options))
        return torch.cat(outs)
    chosen = tw.Chosen(indices, mask)
    q = query.transpose(1, 2)
    if vars(module).get(EXPANDS) is not kept_apart:
        k, v = (x.transpose(1, 2) for x in (key, value))
        return cp.attention(q, k, v, mask=chosen, **options)
    latent = tw.wire.Latent(
        _expansion(module, (key.shape[-1], value.shape[-1])),
        num_kv_heads=query.shape[1],
        head_dim=query.shape[3],
        v_head_dim=module.v_head_dim,
    )
    rows = torch.cat([key, value], -1).squeeze(1)
    return cp.attention(q, rows, None, mask=chosen, wire=latent, **options)


def _expansion(module: Any, widths: tuple[int, int]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The function that makes keys and values of latent rows [n, width], by a module's own code."""
    expand = getattr(type(module), EXPANDS)

    def expanded(rows: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        parts = (x[None, None] for x in rows.split(widths, -1))
        k, v = expand(module, *parts)
        return k[0].transpose(0, 1), v[0].transpose(0, 1)

    return expanded

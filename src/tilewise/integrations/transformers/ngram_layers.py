"""Layers of Qwen4-Exp that look up n-grams of tokens and convolve them with a dilation, run split.

    token t     looks up its n-grams, of the ids t - 2, t - 1 and t
    convolution of the rows t - 9, t - 6, t - 3 and t

Both read rows of a document that other ranks may have: these are fetched, each once, and what lies
before the document counts as it does before a sequence, as the end-of-text id and as 0.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilewise.integrations.transformers.attention import LayerMask
from tilewise.integrations.transformers.saved import not_compiled

LOOKS_UP, CONVOLVES = "ple_embedding", "_short_conv"
"""A module of such layers, and a method: by these names they are known."""


def wire_ngram_layers(base: nn.Module) -> None:
    """Hook the layers of a model that look up n-grams."""
    for module in base.modules():
        known = hasattr(module, LOOKS_UP) and hasattr(module, CONVOLVES)
        if known and not hasattr(module, "_tilewise_ngrams"):
            module._tilewise_ngrams = True  # pyright: ignore[reportArgumentType]
            module.register_forward_pre_hook(_before, with_kwargs=True)
            module.register_forward_hook(_after, always_call=True)


@not_compiled
def _before(module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    mask = next((x for x in (*args, *given.values()) if isinstance(x, LayerMask)), None)
    if mask is None:
        return None
    assert mask.cu_seqlens is not None, "its model has layers that carry a state"
    vars(module.ple_embedding)["forward"] = partial(_looked_up, module.ple_embedding, mask)
    vars(module)[CONVOLVES] = partial(_convolved, module, mask)
    given = {name: None if x is mask else x for name, x in given.items()}  # no token is padding
    return tuple(None if x is mask else x for x in args), given


@not_compiled
def _after(module: Any, *_: Any) -> None:
    vars(module).pop(CONVOLVES, None)
    vars(module.ple_embedding).pop("forward", None)


def _rows_before(mask: LayerMask, x: Tensor, steps: range) -> tuple[Tensor, Tensor]:
    """Rows of each token's document that come some steps before it.

    Args:
        x: [batch, rows, ...] of this rank, without a row of padding.
        steps: how many tokens before, descending.
    Returns:
        [batch, rows, steps, ...], 0 before the document, and which are there, [rows, steps].
    """
    cp = mask.cp
    starts, position = torch.tensor(mask.cu_seqlens), cp.position_ids
    start = starts[torch.searchsorted(starts, position, right=True) - 1]
    positions = position[:, None] - torch.tensor(list(steps))
    positions = positions.masked_fill(positions < start[:, None], -1).to(x.device)
    fetched = cp.gather_rows(x.contiguous(), positions.flatten(), dim=1)
    return fetched.unflatten(1, positions.shape), positions >= 0


def _looked_up(embedding: Any, mask: LayerMask, input_ids: Tensor, _: Any) -> Tensor:
    """In place of the forward of an embedding of n-grams: its own code, on each token's n-gram."""
    rows, own = mask.cp.layout.size(mask.cp.rank), type(embedding).forward
    steps = range(embedding.context_len, -1, -1)
    ids, are_there = _rows_before(mask, input_ids[:, :rows], steps)
    if not rows:
        return own(embedding, input_ids, None)
    ids = torch.where(are_there, ids, embedding.eos_token_id)
    found = own(embedding, ids.flatten(0, 1), None)
    return found[:, -1].unflatten(0, ids.shape[:2])


def _convolved(layer: Any, mask: LayerMask, x: Tensor, _: Any) -> Tensor:
    """Replace a layer's dilated convolution: x [batch, rows, channels] -> silu of the sum of its
    taps.

    The rows before this rank's pieces are fetched from their owners.
    """
    rows, conv = mask.cp.layout.size(mask.cp.rank), layer.conv1d
    (width,), (dilation,) = conv.kernel_size, conv.dilation
    taps, _ = _rows_before(mask, x[:, :rows], range(dilation * (width - 1), -1, -dilation))
    out = F.silu(torch.einsum("brwc,cw->brc", taps, conv.weight[:, 0]))
    return F.pad(out, (0, 0, 0, x.shape[1] - rows))

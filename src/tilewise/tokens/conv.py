"""Short causal convolutions along a split sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewise.arguments import brief, dtype_name, require_dense
from tilewise.layouts.layout import Layout
from tilewise.tokens.moves import halo_moves
from tilewise.tokens.pieces import few_pieces
from tilewise.tokens.rows import move_rows
from tilewise.transport.agreement import settled
from tilewise.transport.protocol import Transport

ACTIVATIONS = (None, "silu", "swish")


def causal_conv1d(  # noqa: PLR0913 - the arguments of causal_conv1d, and the split
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    layout: Layout,
    cu_seqlens: tuple[int, ...],
    transport: Transport,
) -> Tensor:
    """Depthwise causal convolution: out[t] = sum over w of weight[:, w] x[t - width + 1 + w].

    Tokens before the beginning of a document count as 0.

    Args:
        x: [(batch,) this rank's tokens, channels].
        weight: [channels, width].
        bias: [channels].
        activation: None, "silu" or "swish".
    Returns:
        As x. Gradients of weight and bias are this rank's share.
    """

    def check() -> int:
        _check(x, weight, bias, activation)
        return int(weight.shape[1]) - 1

    left = settled(transport, check)
    moves = settled(transport, lambda: halo_moves(layout, left, 0, cu_seqlens))
    verb = {
        "call": "conv1d",
        "weight": f"{dtype_name(weight.dtype)} {[*weight.shape]}",
        "bias": "None" if bias is None else dtype_name(bias.dtype),
        "activation": "silu" if activation else "None",
    }
    rows = move_rows(x, moves, transport, x.ndim - 2, verb=verb)
    kept: list[Tensor] = []
    begin = 0
    for start, stop in few_pieces(layout, cu_seqlens, "conv1d")[transport.rank]:
        kept.append(torch.arange(begin, begin + stop - start))
        begin += left + stop - start
    if not kept:  # no rows, but every parameter gets a gradient
        out = rows * weight.sum(1) + (0 if bias is None else bias)
    else:
        channels_first = rows.movedim(-1, -2)
        batched = channels_first if x.ndim == 3 else channels_first[None]
        made = F.conv1d(batched, weight[:, None], bias, groups=weight.shape[0])
        made = made.index_select(-1, torch.cat(kept).to(x.device)).movedim(-1, -2)
        out = made if x.ndim == 3 else made[0]
    return out if activation is None else F.silu(out)


def _check(x: Any, weight: Any, bias: Any, activation: Any) -> None:
    for name, given in (("x", x), ("weight", weight)):
        if not isinstance(given, Tensor):
            raise ValueError(f"{name} ({type(given).__name__}) must be a Tensor")
        require_dense(name, given)
    if x.ndim not in (2, 3):
        raise ValueError(
            f"x {tuple(x.shape)} must be [(batch,) tokens, channels]; causal_conv1d's [batch, "
            "channels, tokens] is x.transpose(1, 2)"
        )
    if weight.ndim != 2 or weight.shape[0] != x.shape[-1] or not weight.shape[1]:
        raise ValueError(
            f"weight {tuple(weight.shape)} must be [channels, width] for x {tuple(x.shape)}, which "
            f"has {x.shape[-1]} channels; of an nn.Conv1d that is weight.squeeze(1)"
        )
    if isinstance(bias, Tensor):
        require_dense("bias", bias)
    if bias is not None and (not isinstance(bias, Tensor) or bias.shape != weight.shape[:1]):
        shape = tuple(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
        raise ValueError(f"bias {shape} must be [{weight.shape[0]}], one for each channel")
    for name, given in (("weight", weight), ("bias", x if bias is None else bias)):
        if given.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"{name} is {given.dtype}, x {x.dtype}; make them equal")
        if given.device != x.device:
            raise ValueError(f"{name} is on {given.device}, x on {x.device}; move it there")
    if not isinstance(activation, str | None) or activation not in ACTIVATIONS:
        raise ValueError(f"activation ({brief(activation)}) must be None, 'silu' or 'swish'")

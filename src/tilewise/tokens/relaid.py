"""Attention on another layout than a model's other layers: rows move before it, and back after.

q, k and v of a token travel together, its row of out on the way back; only rows that change owner.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.compiler.row_moves import RowMoves
from tilewise.execution.call import autocast_dtype, lowered
from tilewise.execution.validation import check_own_rows, check_tensors, named_operands
from tilewise.tokens.rows import move_rows
from tilewise.transport.agreement import settled
from tilewise.transport.protocol import Transport
from tilewise.wires.latent import Latent


def relaid(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    latent: Latent | None,
    moves: RowMoves,
    transport: Transport,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands of attention under another layout of the same tokens, in one exchange.

    Args:
        q, k, v: this rank's rows under the layout of the moves, as attention takes them.
        latent: of the wire, where k are latents and v is None.
        moves: from that layout to the other one.
    Raises:
        ValueError: the same on every rank, if one rank's operands do not fit, or the ranks differ.
    """
    region = autocast_dtype(q)
    if region is not None:
        q, k, v = lowered(q, region), lowered(k, region), lowered(v, region)
    keys = k.unsqueeze(-2) if v is None and isinstance(k, Tensor) else k
    operands = [x for x in (q, keys, v) if x is not None]

    def packed() -> Tensor:
        check_tensors(q, keys, v, latent)
        for name, x in zip(named_operands(q, k, v), operands, strict=True):
            check_own_rows(name, x, moves.layout, transport.rank)
        return torch.cat([x.flatten(-2) for x in operands], -1)

    rows = settled(transport, packed)
    moved = move_rows(rows, moves, transport, -2)
    shapes = [x.shape[-2:] for x in operands]
    parts = moved.split([shape.numel() for shape in shapes], -1)
    q, keys, *values = (x.unflatten(-1, shape) for x, shape in zip(parts, shapes, strict=True))
    return (q, keys, values[0]) if values else (q, keys.squeeze(-2), None)

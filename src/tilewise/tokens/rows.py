"""Row moves over a tensor, differentiable: the ranks agree, then each runs its code."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tilewise.arguments import (
    MOVED_DTYPES,
    dtype_name,
    real_number,
    require_dense,
    shown,
    whole_number,
)
from tilewise.compiler.row_moves import RowMoves
from tilewise.execution.row_moves import moved
from tilewise.transport.agreement import agree, agreement_of, settled
from tilewise.transport.protocol import Transport

_NONE: Mapping[str, str] = MappingProxyType({})


def move_rows(
    x: Tensor,
    moves: RowMoves,
    transport: Transport,
    dim: int = 0,
    fill: float = 0.0,
    verb: Mapping[str, str] = _NONE,
) -> Tensor:
    """The rows that this rank wants, of every rank's rows along dim.

    Every rank calls it. Ranks compare each kind of call once.

    Args:
        verb: name and arguments of the verb that moves the rows, where it has others than the
            moves: they belong to the kind of the call.
    Raises:
        ValueError: the same on every rank, if one rank's rows do not fit, or the ranks differ.
    """
    fields = settled(transport, lambda: row_fields(x, moves, transport.rank, dim, fill, verb))
    agree(transport, fields, None, "first")
    rows = x.movedim(dim, 0)
    moved = _MoveRows.apply(rows, moves, transport, False, fill)
    return moved.movedim(0, dim)  # pyright: ignore[reportOptionalMemberAccess]


def row_fields(
    x: Tensor,
    moves: RowMoves,
    rank: int,
    dim: int,
    fill: float = 0.0,
    verb: Mapping[str, str] = _NONE,
) -> dict[str, str]:
    """Return the facts of a tensor, right by itself, that the ranks must have in common."""
    if not isinstance(x, Tensor):
        raise ValueError(f"x ({type(x).__name__}) must be a Tensor, this rank's rows")
    require_dense("x", x)
    if not -x.ndim <= whole_number("dim", dim, None) < x.ndim:
        raise ValueError(
            f"dim ({dim}) must be in {-x.ndim}..{x.ndim - 1} for a tensor {tuple(x.shape)}; name "
            "the one of its tokens"
        )
    wanted, others = moves.layout.size(rank), list(x.shape)
    if x.shape[dim] != wanted:
        raise ValueError(
            f"x has {x.shape[dim]} tokens along dim {dim}, but the layout gives this rank {wanted}"
        )
    others[dim] = -1
    return {
        "call": moves.name,
        **verb,
        "layout": moves.layout.fingerprint,
        **moves.arguments,
        "rows": moves.fingerprint,
        "shape": str(others),
        "dim": str(dim % x.ndim),
        "dtype": _moved_dtype(x),
        "device": x.device.type,
        "fill": str(_filling(x, fill)),
        "requires_grad": str(torch.is_grad_enabled() and x.requires_grad),
    }


def _moved_dtype(x: Tensor) -> str:
    """Return the name of a dtype whose numbers travel.

    Raises:
        ValueError: if they do not.
    """
    name = dtype_name(x.dtype)
    if name not in MOVED_DTYPES:
        cure = "torch.view_as_real(x)" if x.is_complex() else "x.view(torch.uint8)"
        known = ", ".join(MOVED_DTYPES)
        raise ValueError(f"x is {x.dtype}, but must be one of {known}; pass {cure}")
    return name


def _filling(x: Tensor, fill: float) -> float:
    """Return a number as x holds it: 0 and 0.0 are the same there.

    Raises:
        ValueError: if x cannot hold it.
    """
    real_number("fill", fill)
    try:
        return torch.full((), fill, dtype=x.dtype).item()
    except (RuntimeError, OverflowError):
        raise ValueError(f"fill ({shown(fill)}) must be a number that {x.dtype} has") from None


class _MoveRows(torch.autograd.Function):
    """Run row moves on a tensor in one direction; the backward pass is the other direction.

    So it can be differentiated again.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, moves: RowMoves, transport: Transport, backward: bool, fill: float
    ) -> Tensor:
        ctx.given = moves, transport, backward
        return moved(x.detach(), moves, transport, backward=backward, fill=fill)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        moves, transport, backward = ctx.given
        # A rank without rows has nothing to differentiate, so it may not be here.
        if all(moves.num_wanted):
            name = f"{moves.name}, {'forward again' if backward else 'backward'}"
            agree(transport, {"call": name, "rows": moves.fingerprint}, None, "first")
        else:
            agreement_of(transport).go_on()
        given = moves, transport, not backward, 0.0
        return _MoveRows.apply(grad, *given), None, None, None, None  # pyright: ignore

"""Row moves over a tensor, differentiable: the ranks agree, then each runs its code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.arguments import dtype_name, real_number, shown, whole_number
from tilewise.compiler.row_moves import RowMoves
from tilewise.execution.row_moves import moved
from tilewise.transport.agreement import agree, settled
from tilewise.transport.protocol import Transport


def move_rows(
    x: Tensor, moves: RowMoves, transport: Transport, dim: int = 0, fill: float = 0.0
) -> Tensor:
    """The rows that this rank wants, of every rank's rows along dim.

    Every rank calls it. Ranks compare each kind of call once.

    Raises:
        ValueError: the same on every rank, if one rank's rows do not fit, or the ranks differ.
    """
    fields = settled(transport, lambda: row_fields(x, moves, transport.rank, dim, fill))
    agree(transport, fields, None, "first")
    rows = x.movedim(dim, 0)
    moved = _MoveRows.apply(rows, moves, transport, False, fill)
    return moved.movedim(0, dim)  # pyright: ignore[reportOptionalMemberAccess]


def row_fields(
    x: Tensor, moves: RowMoves, rank: int, dim: int, fill: float = 0.0
) -> dict[str, str]:
    """Return the facts of a tensor, right by itself, that the ranks must have in common."""
    if not isinstance(x, Tensor):
        raise ValueError(f"x ({type(x).__name__}) must be a Tensor, this rank's rows")
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
    _check_fill(x, fill)
    return {
        "call": moves.name,
        "layout": moves.layout.fingerprint,
        **moves.arguments,
        "rows": moves.fingerprint,
        "shape": str(others),
        "dim": str(dim),
        "dtype": dtype_name(x.dtype),
        "device": x.device.type,
        "fill": str(fill),
        "requires_grad": str(torch.is_grad_enabled() and x.requires_grad),
    }


def _check_fill(x: Tensor, fill: float) -> None:
    """Raise ValueError unless x may hold the number."""
    real_number("fill", fill)
    try:
        x.new_full((), fill)
    except (RuntimeError, OverflowError):
        raise ValueError(f"fill ({shown(fill)}) must be a number that {x.dtype} has") from None


class _MoveRows(torch.autograd.Function):
    """One pass; its own backward pass is the other, hence it can be differentiated again."""

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
        given = moves, transport, not backward, 0.0
        return _MoveRows.apply(grad, *given), None, None, None, None  # pyright: ignore

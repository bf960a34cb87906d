"""Row moves over a tensor, differentiable: the ranks agree, then each runs its code."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from tilewise.arguments import dtype_name, real_number, shown, whole_number
from tilewise.compiler.placement import Departures
from tilewise.compiler.row_code import row_code
from tilewise.compiler.row_moves import RowMoves
from tilewise.execution.run import BoundCode, Pass
from tilewise.execution.workspace import WorkspacePool
from tilewise.kernels.protocol import Scores
from tilewise.plan.kept import KeptWith, RecentValues
from tilewise.transport.agreement import agree, settled
from tilewise.transport.protocol import Transport

_NO_SCORES = Scores(1.0)
_POOLS: KeptWith[RecentValues[torch.device, WorkspacePool]] = KeptWith(lambda _: RecentValues(4))
_CODES: KeptWith[RecentValues[Hashable, BoundCode]] = KeptWith(lambda _: RecentValues(64))


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
        rank = transport.rank
        num_rows = moves.layout.size(rank) if backward else moves.num_wanted[rank]
        result = x.new_empty((num_rows, *x.shape[1:]))
        names = ("dout", "dx") if backward else ("x", "out")
        bound = _bound(moves, transport, x, backward=backward, fill=fill)
        bound.run(dict(zip(names, (x.detach(), result), strict=True)), Pass(transport, _NO_SCORES))
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        moves, transport, backward = ctx.given
        # A rank without rows has nothing to differentiate, so it may not be here.
        if all(moves.num_wanted):
            name = f"{moves.name}, {'forward again' if backward else 'backward'}"
            agree(transport, {"call": name, "rows": moves.fingerprint}, None, "first")
        given = moves, transport, not backward, 0.0
        return _MoveRows.apply(grad, *given), None, None, None, None  # pyright: ignore


def _bound(
    moves: RowMoves, transport: Transport, x: Tensor, *, backward: bool, fill: float
) -> BoundCode:
    """The code of this rank's pass, bound to the device; made at the first call."""
    rank, row_shape, dtype = transport.rank, tuple(x.shape[1:]), dtype_name(x.dtype)
    in_flight = getattr(transport, "sends_in_flight", None)
    departs = Departures(in_flight, not transport.receives_ahead)
    group = getattr(transport, "process_group", transport)

    def make() -> BoundCode:
        code = row_code(
            moves, rank, row_shape, dtype, backward=backward, fill=fill, departs=departs
        )
        pool = _POOLS.of(group).get(x.device, WorkspacePool)
        return BoundCode(code, x.device, None, _NO_SCORES, pool)

    key = id(group), rank, row_shape, dtype, x.device, backward, fill, departs
    return _CODES.of(moves).get(key, make)

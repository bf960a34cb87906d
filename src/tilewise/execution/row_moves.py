"""Row moves run on a tensor: one pass of one rank."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

import torch
from torch import Tensor

from tilewise.arguments import dtype_name
from tilewise.compiler.placement import Departures
from tilewise.compiler.row_code import row_code
from tilewise.compiler.row_moves import RowMoves
from tilewise.execution.run import BoundCode, Pass
from tilewise.execution.workspace import WorkspacePool
from tilewise.kernels.protocol import Scores
from tilewise.plan.kept import KeptWith, RecentValues
from tilewise.transport.protocol import Transport

_NO_SCORES = Scores(1.0)
_POOLS: KeptWith[RecentValues[torch.device, WorkspacePool]] = KeptWith(lambda _: RecentValues(4))
_Codes: TypeAlias = KeptWith[RecentValues[Hashable, BoundCode]]
_CODES: KeptWith[_Codes] = KeptWith(lambda _: KeptWith(lambda _: RecentValues(16)))
"""By group, whose workspaces they use, then by moves."""


def moved(
    x: Tensor,
    moves: RowMoves,
    transport: Transport,
    *,
    backward: bool = False,
    fill: float = 0.0,
) -> Tensor:
    """The rows [rows, ...] that this rank wants; in backward the gradient of its own rows.

    Every rank calls it. The tensors of all have been checked.
    """
    rank = transport.rank
    num_rows = moves.layout.size(rank) if backward else moves.num_wanted[rank]
    result = x.new_empty((num_rows, *x.shape[1:]))
    names = ("dout", "dx") if backward else ("x", "out")
    bound = _bound(moves, transport, x, backward=backward, fill=fill)
    bound.run(dict(zip(names, (x, result), strict=True)), Pass(transport, _NO_SCORES))
    return result


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

    key = rank, row_shape, dtype, x.device, backward, fill, departs
    return _CODES.of(group).of(moves).get(key, make)

"""Attention of joint layouts: tokens that every rank holds beside tokens that one rank holds.

Each replicated token has one owner, and attention is that of the owned rows: an ordinary layout, so
that each key counts once and each query is computed once. The owners then send their rows of out to
all, whose backward pass sums dout into the owners.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.arguments import Validate, dtype_name, shown
from tilewise.compiler.row_moves import RowMoves, share_moves
from tilewise.execution.call import Call
from tilewise.layouts.layout import Layout, contiguous
from tilewise.plan.ir import Plan
from tilewise.plan.kept import RecentValues
from tilewise.strategies.ring import ring
from tilewise.tokens.rows import move_rows
from tilewise.tokens.same_rows import first_difference
from tilewise.transport.agreement import settled
from tilewise.transport.protocol import Transport
from tilewise.transport.resolve import LocalTransport, transport_for

_ROWS: RecentValues[Hashable, Tensor] = RecentValues(64)


class OwnedRows(NamedTuple):
    """The operands of a call on the rows that each rank owns, and the way back to those it holds.

    Attributes:
        moves: of the rows of out to all ranks that hold them; None: each has its own.
    """

    q: Tensor
    k: Tensor
    v: Tensor | None
    moves: RowMoves | None
    group: Transport

    def completed(self, x: Tensor) -> Tensor:
        """The rows that this rank holds, of those [(batch,) tokens, heads, ...] that it owns."""
        if self.moves is None:
            return x
        return move_rows(x, self.moves, self.group, 1 if self.q.ndim == 4 else 0)


def owned_call(q: Tensor, k: Tensor, v: Tensor | None, call: Call) -> tuple[Call, OwnedRows | None]:
    """The call of the rows that this rank owns, and these; (call, None) of layouts without rows
    that every rank holds.

    Keys that every rank holds, all of them, are read where they are: no plan is needed.

    Args:
        q, k, v: as attention takes them, rows of a joint layout.
        call: of which nothing is checked yet.
    Raises:
        ValueError: the same on every rank, if one rank's rows do not fit, or replicated rows differ
            between ranks.
    """
    plan, layout = call.plan, call.layout
    keys = layout if call.kv_layout is None else call.kv_layout
    if not (isinstance(plan, Plan) and isinstance(layout, Layout) and isinstance(keys, Layout)):
        return call, None  # attention says so
    moves = share_moves(plan, layout)
    if moves is None and not len(keys.replicated):
        return call, None
    transport = transport_for(call.group)
    on_owned = replace(call, layout=layout.owned, kv_layout=keys.owned, group=transport)
    fits = plan.world_size == transport.world_size == layout.world_size == keys.world_size
    if not fits:  # attention says so
        return on_owned, OwnedRows(q, k, v, None, transport)
    rank = transport.rank
    whole_keys = len(keys.replicated) == keys.num_tokens and not plan.replicated_queries
    sides = [("k", k, keys, -2 if v is None else -3)]
    sides += [] if v is None else [("v", v, keys, -3)]
    sides += [] if moves is None else [("q", q, layout, -3)]

    def check() -> dict[str, Tensor]:
        if whole_keys and call.dropout_p and call.dropout_seed is None:
            raise ValueError(
                f"dropout_p ({call.dropout_p}) on {plan.world_size} ranks needs a dropout_seed; "
                "pass the same on all, another at every layer and step"
            )
        return {name: owned_rows(x, of, rank, dim, name) for name, x, of, dim in sides}

    owned = settled(transport, check)
    _compare(sides, transport, call.validate)
    if whole_keys:
        alone = LocalTransport()
        on_owned = replace(
            call,
            plan=ring(1),
            backward_plan=None,
            layout=Layout(layout.num_tokens, [layout.runs[rank]], layout.name),
            kv_layout=contiguous(keys.num_tokens, 1),
            group=alone,
        )
        return on_owned, OwnedRows(q, k, v, None, alone)
    q, k, v = owned.get("q", q), owned["k"], owned.get("v")
    return on_owned, OwnedRows(q, k, v, moves, transport)


def owned_rows(x: Tensor, layout: Layout, rank: int, dim: int, name: str = "x") -> Tensor:
    """The rows of x that a rank owns, of those that it holds; without replicated tokens x itself.

    Raises:
        ValueError: if x has not as many tokens as the layout gives the rank.
    """
    if not len(layout.replicated):
        return x
    if not isinstance(x, Tensor) or not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{name} ({shown(x)}) must be a tensor with tokens in dimension {dim}")
    if x.shape[dim] != layout.size(rank):
        raise ValueError(
            f"{name} has {x.shape[dim]} tokens on rank {rank}, but the layout gives it "
            f"{layout.size(rank)} of {layout.num_tokens}, {len(layout.replicated)} of them on "
            "every rank; pass layout.shard(x, rank), or cp.shard(x) of a ContextParallel"
        )
    key = layout, rank, x.device
    return x.index_select(dim, _ROWS.get(key, lambda: layout.owned_rows(rank).to(x.device)))


def _compare(
    sides: list[tuple[str, Tensor, Layout, int]], transport: Transport, validate: Validate
) -> None:
    """Raise on all ranks where a replicated row is another on one of them, at new kinds of call."""
    shared = [side for side in sides if len(side[2].replicated)]
    fields = {"call": "comparison of replicated rows"}
    for name, x, layout, dim in shared:
        others = [size for place, size in enumerate(x.shape) if place != x.ndim + dim]
        fields[f"layout of {name}"] = layout.fingerprint
        fields[f"shape of {name}"] = f"{dtype_name(x.dtype)} {others}"

    def rows() -> list[tuple[str, Tensor]]:
        return [
            (name, _replicated(x, layout, transport.rank, dim)) for name, x, layout, dim in shared
        ]

    found = first_difference(transport, fields, rows, validate)
    if found is not None:
        (layout,) = (layout for name, _, layout, _ in shared if name == found.name)
        raise ValueError(
            f"replicated rows of {found.name} differ: token {layout.replicated[found.row]} is "
            f"another on rank {found.rank} than on rank 0 ({found.num_rows} of "
            f"{len(layout.replicated)} rows); give every rank the same text, noise and weights, or "
            "skip this by validate='never'"
        )


def _replicated(x: Tensor, layout: Layout, rank: int, dim: int) -> Tensor:
    """The replicated rows of x, in order of their positions, [rows, ...]."""
    positions = layout.rows(rank)
    order = np.argsort(positions)
    rows = order[np.isin(positions[order], layout.replicated)]
    return x.detach().index_select(dim, torch.from_numpy(rows).to(x.device)).movedim(dim, 0)

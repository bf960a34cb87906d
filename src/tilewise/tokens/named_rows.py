"""Rows of any ranks by their positions, which each rank names for itself.

    rank 0 names 7, 2, 7      each owner gets a list of its rows that another rank named,
    rank 2 names 7, 5         and sends each of them to that rank once

Nobody knows beforehand which rows are named, so they travel as three rounds of messages: how many,
which, and the rows. Gradients return the way the rows came: first those of one row are summed where
it was named several times, then its owner adds what ranks send, in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.arguments import require_dense, require_type
from tilewise.compiler.row_moves import owners_of
from tilewise.kernels.protocol import accumulator_dtype
from tilewise.layouts.layout import Layout
from tilewise.tokens.moves import gather_moves
from tilewise.tokens.rows import move_rows, row_fields
from tilewise.transport.agreement import agree, agreement_of, settled
from tilewise.transport.means import exchange_tensors, on_every_rank
from tilewise.transport.protocol import Transport

MOST_SHARE = 0.75
"""Share of all rows of other ranks from which on every rank gathers all: lists of rows, and copies
of rows out of their order, would take longer than the bytes that they save."""

NO_ROW = -1
"""The position that names no row: its result is 0."""


class NamedRows(NamedTuple):
    """Rows of one rank in a call, by what it named.

    Attributes:
        table: rows that this rank named, [rows, ...], each once.
        places: of each position its row of the table, or NO_ROW; the shape of positions.
        positions: of the table's rows, [rows].
    """

    table: Tensor
    places: Tensor
    positions: Tensor


class _Routes(NamedTuple):
    """Rows on their way in one call, of one rank.

    Attributes:
        sent: for each rank, the rows here that it named.
        table_rows: for each rank, where its rows stand in this rank's table.
        num_own: rows here, of all batch entries.
        all_named: whether every rank named a row, so that all take part in backward.
    """

    sent: tuple[Tensor, ...]
    table_rows: tuple[Tensor, ...]
    num_own: int
    all_named: bool


def gather_rows(
    x: Tensor,
    positions: Tensor,
    layout: Layout,
    transport: Transport,
    dim: int,
    gather: Callable[[Tensor], Tensor],
) -> Tensor:
    """The rows [*positions.shape, ...] of any ranks at this rank's positions; 0 at NO_ROW.

    Args, Raises: as `fetch_rows`.
    """
    rows = fetch_rows(x, positions, layout, transport, dim, gather)
    return _Take.apply(rows.table, rows.places, None)  # pyright: ignore[reportReturnType]


def fetch_rows(  # noqa: PLR0913 - a verb, and the split
    x: Tensor,
    positions: Tensor,
    layout: Layout,
    transport: Transport,
    dim: int,
    gather: Callable[[Tensor], Tensor] | None = None,
    verb: str = "gather_rows",
) -> NamedRows:
    """Bring every rank the rows that it names, each once.

    Every rank calls it, with positions of its own. Ranks compare each kind of call once.

    Args:
        x: this rank's rows along dim; dimensions before it are of the batch.
        positions: global ones, or NO_ROW: [any number] for all entries of the batch, or one list
            for each entry, [*x.shape[:dim], ...].
        gather: brings all ranks' rows, where most of them are named; None: `gather_moves`.
    Raises:
        ValueError: the same on every rank, if one rank's rows or positions do not fit, or the ranks
            differ.
    """
    rank, num_tokens = transport.rank, layout.num_tokens

    def check() -> dict[str, str]:
        fields = row_fields(x, gather_moves(layout, None), rank, dim, verb={"call": verb})
        _check_positions(positions, x, dim % x.ndim, num_tokens)
        return fields

    agree(transport, settled(transport, check), None, "first")
    dim %= x.ndim
    before = x.shape[:dim]
    positions = positions.to(x.device, torch.int64)
    if dim and positions.ndim == 1:
        positions = positions.expand(*before, -1)
    num_entries = before.numel()
    entry = torch.arange(num_entries, device=x.device).reshape(-1, 1)
    flat = positions.reshape(num_entries, -1)
    named = torch.where(flat < 0, NO_ROW, flat + entry * num_tokens)
    keys, inverse = torch.unique(named, return_inverse=True)
    has_none = int(keys.numel() > 0 and keys[0] == NO_ROW)  # it comes first: the others move up
    keys, inverse = keys[has_none:], inverse - has_none
    owner, row, sizes = _owners(layout, x.device)
    owners = owner[keys % num_tokens]
    source = keys // num_tokens * sizes[owners] + row[keys % num_tokens]
    counts = torch.bincount(owners, minlength=transport.world_size)
    by_rank = torch.stack(on_every_rank(transport, counts)).tolist()
    if _names_most(by_rank, layout, num_entries):
        moves = gather_moves(layout, None)
        whole = move_rows(x, moves, transport, dim) if gather is None else gather(x)
        every = torch.arange(num_tokens, device=x.device).repeat(num_entries)
        return NamedRows(whole.flatten(0, dim), named.reshape(positions.shape), every)
    places = tuple((owners == peer).nonzero().flatten() for peer in range(transport.world_size))
    narrow = torch.int32 if num_entries * num_tokens < 1 << 31 else torch.int64
    lists = [source[place].to(narrow) for place in places]
    named_here = exchange_tensors(transport, lists, [counts[rank] for counts in by_rank])
    own = x.flatten(0, dim)
    sent = tuple(rows.long() for rows in named_here)
    routes = _Routes(sent, places, len(own), all(map(any, by_rank)))
    table = _Exchange.apply(own, routes, transport, False)
    return NamedRows(table, inverse.reshape(positions.shape), keys % num_tokens)  # pyright: ignore


def _check_positions(positions: Any, x: Tensor, dim: int, num_tokens: int) -> None:
    require_type(torch.Tensor, "positions", positions, "torch.tensor([7, 2])")
    require_dense("positions", positions)
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise ValueError(
            f"positions is {positions.dtype}, but must have whole numbers, as cp.position_ids does"
        )
    before = x.shape[:dim]
    if positions.ndim == 0 or (
        positions.shape[:dim] != before and not (dim and positions.ndim == 1)
    ):
        raise ValueError(
            f"positions is {list(positions.shape)}, but x is {list(x.shape)} with its tokens in "
            f"dimension {dim}; pass [number of positions], or a list for each entry of the batch, "
            f"{[*before, '...']}"
        )
    if positions.numel():
        least, most = (int(number) for number in torch.aminmax(positions))
        if least < NO_ROW or most >= num_tokens:
            raise ValueError(
                f"positions has {most if most >= num_tokens else least}, but must be global "
                f"positions of {num_tokens} tokens, from 0 to {num_tokens - 1}, or -1 for no row"
            )


@lru_cache(maxsize=8)
def _owners(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The owner of each position and its row there, and the number of rows of each rank."""
    tables = (*map(torch.from_numpy, owners_of(layout)), torch.tensor(layout.sizes))
    owner, row, sizes = (table.to(device) for table in tables)
    return owner, row, sizes


def _names_most(by_rank: list[list[int]], layout: Layout, num_entries: int) -> bool:
    """Return whether ranks name more than MOST_SHARE of the rows of other ranks.

    Args:
        by_rank: of each rank, how many rows of each other rank it named.
    """
    travelling = sum(sum(counts) - counts[rank] for rank, counts in enumerate(by_rank))
    others = num_entries * sum(layout.num_tokens - size for size in layout.sizes)
    return travelling > MOST_SHARE * others


class _Exchange(torch.autograd.Function):
    """Send own rows to the tables of other ranks; with backward=True, a table's gradient to the
    owners.

    Each direction is the other's backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, routes: _Routes, transport: Transport, backward: bool
    ) -> Tensor:
        ctx.given = routes, transport, backward
        x = x.detach()
        leaving, arriving = routes.sent, routes.table_rows
        if backward:
            leaving, arriving = arriving, leaving
        outgoing = [x.index_select(0, rows) for rows in leaving]
        arrived = exchange_tensors(transport, outgoing, [len(rows) for rows in arriving])
        if backward:
            total = _blank(x, routes.num_own)
            for rows, values in zip(arriving, arrived, strict=True):
                total.index_add_(0, rows, values.to(total.dtype))  # each row once
            return total.to(x.dtype)
        table = x.new_empty((sum(map(len, arriving)), *x.shape[1:]))
        for rows, values in zip(arriving, arrived, strict=True):
            table.index_copy_(0, rows, values)
        return table

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        routes, transport, backward = ctx.given
        # A rank that named nothing has nothing to differentiate, so it may not be here.
        if routes.all_named:
            name = f"gather_rows, {'forward again' if backward else 'backward'}"
            agree(transport, {"call": name}, None, "first")
        else:
            agreement_of(transport).go_on()
        return _Exchange.apply(grad, routes, transport, not backward), None, None, None  # pyright: ignore


class _Take(torch.autograd.Function):
    """Take rows of a table by an index; with num_rows, add rows into a table of that many rows.

    Each is the other's backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, num_rows: int | None) -> Tensor:
        ctx.given = index, None if num_rows is not None else len(x)
        x, flat = x.detach(), index.flatten()
        beside = x.shape[1 if num_rows is None else index.ndim :]
        if num_rows is not None:
            total = _blank(x.reshape(len(flat), *beside), num_rows + 1)  # the last for NO_ROW
            add_rows(total, flat % (num_rows + 1), x.reshape(len(flat), *beside))
            return total[:num_rows].to(x.dtype)
        if not len(x):
            return x.new_zeros((*index.shape, *beside))
        missing = (flat < 0).reshape(-1, *[1] * len(beside))
        rows = x.index_select(0, flat.clamp(min=0)).masked_fill_(missing, 0)
        return rows.reshape(*index.shape, *beside)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        return _Take.apply(grad, *ctx.given), None, None  # pyright: ignore


def _blank(x: Tensor, num_rows: int) -> Tensor:
    """Zeros for sums of rows as x has them, fp32 or wider."""
    dtype = accumulator_dtype(x.dtype) if x.is_floating_point() else x.dtype
    return x.new_zeros((num_rows, *x.shape[1:]), dtype=dtype)


def add_rows(total: Tensor, index: Tensor, rows: Tensor) -> None:
    """Add rows to those of total at an index, in place, in the order of the index.

    index_add_ on CUDA adds in an order that changes from run to run; index_put_ sorts first.
    """
    rows = rows.to(total.dtype)
    if total.is_cuda:
        total.index_put_((index,), rows, accumulate=True)
    else:
        total.index_add_(0, index, rows)

"""Scans: a state that every token changes by a linear map, carried from piece to piece.

A piece of tokens turns the state S before it into decay S + update. Two pieces one after the other
are such a map again, so all ranks together find the state before each piece in a number of rounds
that grows with the logarithm of the number of pieces, with messages of the size of a state.
Source: Hillis and Steele 1986, "Data parallel algorithms"; Blelloch 1990 for linear recurrences.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewise.compiler.row_moves import RowMoves
from tilewise.layouts.layout import Layout
from tilewise.tokens.moves import scan_moves
from tilewise.tokens.pieces import few_pieces
from tilewise.tokens.rows import move_rows
from tilewise.transport.agreement import settled
from tilewise.transport.protocol import Transport


def scan(  # noqa: PLR0913 - the map, and the split
    decay: Tensor,
    update: Tensor,
    layout: Layout,
    cu_seqlens: tuple[int, ...],
    transport: Transport,
    *,
    matrix: bool = False,
    dim: int | None = None,
) -> Tensor:
    """The state before each of this rank's pieces: S <- decay * S + update over earlier pieces.

    Args:
        decay, update: [(batch,) pieces, ...], of this rank's pieces in the order of its rows.
            decay may have fewer dimensions, or sizes of 1: it counts for all of the state there.
        matrix: decay is [..., d, d] and update [..., d, e]: S <- decay @ S + update.
        dim: of pieces, 0 or 1; None: the first, unless only the second has as many entries as this
            rank has pieces.
    Returns:
        As update; 0 before the first piece of a document.
    """

    def check() -> tuple[int, list[RowMoves]]:
        pieces = few_pieces(layout, cu_seqlens, "scan")
        number = _dimension(decay, update, len(pieces[transport.rank]), dim)
        _check(decay, update, number, matrix)
        return number, scan_moves(layout, cu_seqlens)

    at, (first, *rounds) = settled(transport, check)
    maps = decay.movedim(at, 0)
    states = update.movedim(at, 0)
    if not matrix:
        maps = maps.reshape(*maps.shape, *[1] * (states.ndim - maps.ndim))
    maps, states = _moved(maps, states, first, transport)
    for moves in rounds:
        earlier_maps, earlier_states = _moved(maps, states, moves, transport)
        if matrix:
            states = maps @ earlier_states + states
            maps = maps @ earlier_maps
        else:
            states = maps * earlier_states + states
            maps = maps * earlier_maps
    return states.movedim(0, at)


def _moved(
    maps: Tensor, states: Tensor, moves: RowMoves, transport: Transport
) -> tuple[Tensor, Tensor]:
    """Maps and states of the pieces some places before; 0 where that is another document."""
    both = torch.cat([maps.flatten(1), states.flatten(1)], 1)
    moved = move_rows(both, moves, transport)
    a, b = moved.split([_row(maps), _row(states)], 1)
    return a.reshape(maps.shape), b.reshape(states.shape)


def _row(x: Tensor) -> int:
    """Numbers of one row."""
    return int(np.prod(x.shape[1:]))


def _dimension(decay: Any, update: Any, num_pieces: int, dim: int | None) -> int:
    for name, x in (("decay", decay), ("update", update)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} ({kind}) must be a Tensor of floating-point numbers")
    fitting = [
        axis
        for axis in (0, 1)
        if all(x.ndim > axis and x.shape[axis] == num_pieces for x in (decay, update))
    ]
    if dim is not None and dim not in (0, 1):
        raise ValueError(f"dim ({dim}) must be 0 or 1, the dimension of pieces")
    if not fitting or (dim is not None and dim not in fitting):
        raise ValueError(
            f"decay {tuple(decay.shape)} and update {tuple(update.shape)} must be [(batch,) "
            f"pieces, ...] of this rank's {num_pieces} pieces: see cp.pieces(cu_seqlens)"
        )
    return fitting[0] if dim is None else dim


def _check(decay: Tensor, update: Tensor, dim: int, matrix: bool) -> None:
    shapes = f"decay {tuple(decay.shape)} and update {tuple(update.shape)}"
    if decay.dtype != update.dtype or decay.device != update.device:
        raise ValueError(
            f"decay is {decay.dtype} on {decay.device}, update {update.dtype} on {update.device}; "
            "make them equal"
        )
    if matrix:
        fits = decay.ndim == update.ndim >= dim + 3 and decay.shape[:-2] == update.shape[:-2]
        if not fits or not decay.shape[-2] == decay.shape[-1] == update.shape[-2]:
            raise ValueError(f"{shapes} must be [..., d, d] and [..., d, e] with matrix=True")
        return
    pairs = zip(decay.shape, update.shape, strict=False)
    if decay.ndim > update.ndim or any(a not in (1, b) for a, b in pairs):
        raise ValueError(
            f"{shapes}: each size of decay must be 1 or that of update, from the first dimension "
            "on; for a matrix pass matrix=True"
        )

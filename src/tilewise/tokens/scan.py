"""Scans: a state that every token changes by a linear map, carried from piece to piece.

A piece of tokens turns the state S before it into decay S + update. Two pieces one after the other
are such a map again, so all ranks together find the state before each piece in a number of rounds
that grows with the logarithm of the number of pieces, with messages of the size of a state.
Source: Hillis and Steele 1986, "Data parallel algorithms"; Blelloch 1990 for linear recurrences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewise.arguments import require_dense, require_type, whole_number
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
        dim: of pieces, 0 or 1; None: the one that can be on every rank, if only one can.
    Returns:
        As update; 0 before the first piece of a document.
    Raises:
        ValueError: the same on every rank, if one rank's maps do not fit, dim is needed, or the
            ranks differ.
    """

    def check() -> tuple[int, dict[str, str], list[RowMoves]]:
        counts = [len(pieces) for pieces in few_pieces(layout, cu_seqlens, "scan")]
        require_type(bool, "matrix", matrix, "True")
        at = _dimension(decay, update, counts, transport.rank, dim, matrix)
        _check(decay, update, at, matrix)
        verb = {"matrix": str(matrix), "dim of pieces": str(at)}
        for name, x in (("decay", decay), ("update", update)):
            sizes = [size if axis != at else -1 for axis, size in enumerate(x.shape)]
            verb[f"shape of {name}"] = str(sizes)
        return at, verb, scan_moves(layout, cu_seqlens)

    at, verb, (first, *rounds) = settled(transport, check)
    maps = decay.movedim(at, 0)
    states = update.movedim(at, 0)
    if not matrix:
        maps = maps.reshape(*maps.shape, *[1] * (states.ndim - maps.ndim))
    maps, states = _moved(maps, states, first, transport, verb)
    for moves in rounds:
        earlier_maps, earlier_states = _moved(maps, states, moves, transport, verb)
        if matrix:
            states = maps @ earlier_states + states
            maps = maps @ earlier_maps
        else:
            states = maps * earlier_states + states
            maps = maps * earlier_maps
    return states.movedim(0, at)


def _moved(
    maps: Tensor, states: Tensor, moves: RowMoves, transport: Transport, verb: dict[str, str]
) -> tuple[Tensor, Tensor]:
    """Fetch the maps and states of the pieces that `moves` names; 0 if that is another document."""
    both = torch.cat([x.reshape(len(x), _row(x)) for x in (maps, states)], 1)
    moved = move_rows(both, moves, transport, verb=verb)
    a, b = moved.split([_row(maps), _row(states)], 1)
    return a.reshape(maps.shape), b.reshape(states.shape)


def _row(x: Tensor) -> int:
    """Numbers of one row."""
    return int(np.prod(x.shape[1:]))


def _dimension(
    decay: Any, update: Any, counts: Sequence[int], rank: int, dim: int | None, matrix: bool
) -> int:
    """Return the dimension of pieces.

    A rank knows the other ranks' shapes: their numbers of pieces, beside the same other sizes. So
    all find the same where shapes leave open on one of them which dimension it is.

    Args:
        counts: pieces of each rank.
    """
    for name, x in (("decay", decay), ("update", update)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} ({kind}) must be a Tensor of floating-point numbers")
        require_dense(name, x)
    if dim is not None and whole_number("dim", dim, None) not in (0, 1):
        raise ValueError(f"dim ({dim}) must be 0 or 1, the dimension of pieces")
    sizes = [
        {x.shape[axis] for x in (decay, update)}
        for axis in (0, 1)
        if min(decay.ndim, update.ndim) > axis + 2 * matrix
    ]
    fitting = [axis for axis, of in enumerate(sizes) if of == {counts[rank]}]
    if not fitting or (dim is not None and dim not in fitting):
        raise ValueError(
            f"decay {tuple(decay.shape)} and update {tuple(update.shape)} must be [(batch,) "
            f"pieces, ...] of this rank's {counts[rank]} pieces: see cp.pieces(cu_seqlens)"
        )
    if dim is not None:
        return int(dim)
    others = sizes[1 - fitting[0]] if len(sizes) > 1 else set[int]()
    unclear = [peer for peer, count in enumerate(counts) if others == {count}]
    if unclear and {*counts} != {1}:  # one piece and a batch of one are the same either way
        raise ValueError(
            f"decay and update have {counts[unclear[0]]} entries in dimensions 0 and 1 on rank "
            f"{unclear[0]}, which has as many pieces; pass dim=0 or dim=1, the dimension of pieces"
        )
    return fitting[0]


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

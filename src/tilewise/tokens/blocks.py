"""Layers that treat each token by itself, run on fixed blocks of tokens, and sums of gradients.

The bits of a row of a matrix product change with the number of rows beside it, and the bits of a
parameter's gradient with the rows over which it is summed. So a layer runs on blocks of BLOCK
tokens at fixed places of the sequence, each a call of the same shape, and what each block adds to
the gradient of a parameter is a term of a binned sum (kernels/binned.py), whose bits do not depend
on the order of its terms, hence not on which rank had which block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.weak import WeakTensorKeyDictionary

from tilewise.arguments import require_type
from tilewise.kernels.binned import add_terms, blank_sums, merge_sums, rounded
from tilewise.layouts.layout import Layout
from tilewise.layouts.whole_blocks import split_blocks
from tilewise.plan.sums import MANY_TERMS
from tilewise.tokens.pieces import Piece, pieces_of
from tilewise.transport.agreement import agree, settled
from tilewise.transport.means import exchange_tensors, on_every_rank
from tilewise.transport.protocol import Transport, as_bytes

BLOCK = 64
"""Tokens of a block; the last one of a sequence may have fewer, and is filled up."""

Rows: TypeAlias = Tensor | tuple[Tensor, ...]
"""What a layer returns."""


class GradientSums:
    """Binned sums of the gradients of parameters, over the blocks that this rank has run."""

    def __init__(self) -> None:
        self._sums = WeakTensorKeyDictionary()  # int64 [rows of the parameter, columns]

    def leaf(self, parameter: Tensor) -> Tensor:
        """A tensor to compute with in place of a parameter: its gradient becomes a term."""
        leaf = parameter.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(partial(self._add, parameter))
        return leaf

    def take(self, parameter: Tensor) -> Tensor | None:
        """Return the sum for a parameter, and begin anew; None: no block had a gradient for it."""
        return self._sums.pop(parameter, None)

    def _add(self, parameter: Tensor, leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        if grad is None:
            return
        rows = _as_rows(grad)
        sums = self._sums.get(parameter)
        if sums is None:
            sums = self._sums[parameter] = _blank(parameter)
        if rows.numel():
            add_terms(sums, rows, MANY_TERMS)


def run_by_blocks(
    module: nn.Module,
    inputs: Sequence[Tensor],
    layout: Layout,
    transport: Transport,
    sums: GradientSums,
    dim: int,
) -> Rows:
    """Run a layer on each block of this rank's tokens; returns its rows.

    Raises:
        ValueError: the same on every rank, if the layout cuts a block or one rank's inputs are no
            rows of it.
    """

    def check() -> dict[str, str]:
        require_type(nn.Module, "module", module, "torch.nn.Linear(64, 64)")
        own = layout.size(transport.rank)
        for x in inputs:
            shape = require_type(Tensor, "inputs", x, "this rank's rows").shape
            if not -len(shape) <= dim < len(shape) or shape[dim] != own:
                raise ValueError(
                    f"an input is {tuple(shape)}, but must have this rank's {own} tokens along dim "
                    f"{dim}; pass cp.shard(x, dim={dim}), or name the dimension of the tokens"
                )
        check_blocks(layout)
        return {
            "call": "by_blocks",
            "layout": layout.fingerprint,
            "inputs": str([(dim % x.ndim, _sizes_beside(x, dim), str(x.dtype)) for x in inputs]),
        }

    agree(transport, settled(transport, check), None, "first")

    def run(start: int, stop: int) -> Rows:
        named = module.named_parameters()
        leaves = {n: sums.leaf(p) if p.requires_grad else p for n, p in named}
        filled = tuple(_filled_up(x.narrow(dim, start, stop - start), dim) for x in inputs)
        rows = functional_call(module, leaves, filled)
        return _each(lambda x: x.narrow(dim, 0, stop - start), rows)

    blocks = [run(*edges) for edges in blocks_of(layout, transport.rank)] or [run(0, 0)]
    if isinstance(blocks[0], Tensor):
        return torch.cat(blocks, dim)  # pyright: ignore[reportArgumentType, reportCallIssue]
    return tuple(torch.cat(parts, dim) for parts in zip(*blocks, strict=True))


def _sizes_beside(x: Tensor, dim: int) -> list[int]:
    """Return the shape of rows without the dimension of their tokens."""
    sizes = [*x.shape]
    del sizes[dim]
    return sizes


def _each(do: Callable[[Tensor], Tensor], rows: Rows) -> Rows:
    return do(rows) if isinstance(rows, Tensor) else tuple(map(do, rows))


def _filled_up(x: Tensor, dim: int) -> Tensor:
    """Rows of a block, the last one again and again up to BLOCK; zeros where there is none."""
    missing = BLOCK - x.shape[dim]
    if not missing:
        return x.contiguous()
    shape = [*x.shape]
    shape[dim] = missing
    last = x.narrow(dim, -1, 1).detach().expand(shape) if x.shape[dim] else x.new_zeros(shape)
    return torch.cat([x, last], dim)


@lru_cache(maxsize=256)
def blocks_of(layout: Layout, rank: int) -> list[tuple[int, int]]:
    """Return where each block of a rank begins and ends among its rows."""
    edges, row = [], 0
    for piece in _pieces(layout, rank):
        for start in range(piece.start, piece.stop, BLOCK):
            stop = min(start + BLOCK, piece.stop)
            edges.append((row, row + stop - start))
            row += stop - start
    return edges


def block_edges(num_tokens: int) -> list[int]:
    """Return where the blocks of a sequence begin, and its end."""
    return [*range(0, num_tokens, BLOCK), num_tokens]


@lru_cache(maxsize=64)
def check_blocks(layout: Layout) -> None:
    """Raise ValueError unless each block lies on one rank, in order."""
    if not layout.is_partition:
        raise ValueError(
            f"{layout!r} gives tokens to several ranks; by_blocks takes one owner each"
        )
    edges = block_edges(layout.num_tokens)
    split = split_blocks(layout, edges)
    if split:
        start, stop = edges[split[0] : split[0] + 2]
        raise ValueError(
            f"{layout!r} splits the block of tokens {start} to {stop - 1}, and {len(split) - 1} "
            f"more, over ranks, or has its tokens in another order; bits are the same at any split "
            f"only where blocks of {BLOCK} are whole, as they are in the layout that "
            "ContextParallel makes by itself"
        )


def _pieces(layout: Layout, rank: int) -> list[Piece]:
    return pieces_of(layout, rank, (0, layout.num_tokens))


def sum_gradients(module: nn.Module, transport: Transport, sums: GradientSums | None) -> None:
    """Give every parameter the sum of all ranks' gradients, in place, the same bits on all.

    A parameter without a gradient on every rank stays without.

    Args:
        sums: None: of the gradients that parameters have, added in the order of ranks.
    Raises:
        ValueError: the same on every rank, if the ranks' parameters differ or, with sums, one has a
            gradient of its own.
    """

    def check() -> dict[str, str]:
        require_type(nn.Module, "module", module, "torch.nn.Linear(64, 64)")
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        apart = [n for n, p in named if sums is not None and p.grad is not None]
        if apart:
            raise ValueError(
                f"{apart[0]} has a gradient that was not made by cp.by_blocks, so its bits depend "
                "on the split; run its layer by cp.by_blocks, and begin a step without gradients "
                "(optimizer.zero_grad())"
            )
        return {
            "call": "sum_gradients",
            "canonical": str(sums is not None),
            "parameters": str([(n, tuple(p.shape), str(p.dtype)) for n, p in named]),
        }

    agree(transport, settled(transport, check), None, "first")
    parameters = [p for p in module.parameters() if p.requires_grad]
    terms = [p.grad if sums is None else sums.take(p) for p in parameters]
    if not parameters:
        return
    flags = [term is not None for term in terms]
    has = torch.tensor(flags, dtype=torch.uint8, device=parameters[0].device)
    somewhere = torch.stack(on_every_rank(transport, has)).amax(0).tolist()
    parameters = [p for p, some in zip(parameters, somewhere, strict=True) if some]
    terms = [x for x, some in zip(terms, somewhere, strict=True) if some]
    if not parameters:
        return
    rows = [
        (_as_rows(torch.zeros_like(p)) if sums is None else _blank(p))
        if x is None
        else (_as_rows(x) if sums is None else x)
        for p, x in zip(parameters, terms, strict=True)
    ]
    totals = _summed(parameters, rows, transport, binned=sums is not None)
    for parameter, total in zip(parameters, totals, strict=True):
        parameter.grad = total


def _as_rows(x: Tensor) -> Tensor:
    """A parameter's rows; one of a single dimension is one row."""
    return x.flatten(0, -2) if x.ndim > 1 else x.reshape(1, -1)


def _blank(parameter: Tensor) -> Tensor:
    num_rows, width = _as_rows(parameter).shape
    return blank_sums((num_rows,), width, MANY_TERMS, parameter.device)


def _summed(
    parameters: Sequence[Tensor], rows: Sequence[Tensor], transport: Transport, binned: bool
) -> list[Tensor]:
    """Sum each parameter's rows over ranks: rank r sums an n-th of them, and sends it to all."""
    n, rank = transport.world_size, transport.rank
    cuts = [[len(x) * r // n for r in range(n + 1)] for x in rows]

    def part(x: Tensor, cut: Sequence[int], r: int) -> Tensor:
        return x[cut[r] : cut[r + 1]]

    def joined(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([as_bytes(x.contiguous()).reshape(-1) for x in parts])

    mine = [part(x, cut, rank) for x, cut in zip(rows, cuts, strict=True)]
    outgoing = [
        joined([part(x, cut, r) for x, cut in zip(rows, cuts, strict=True)]) for r in range(n)
    ]
    arrived = exchange_tensors(transport, outgoing, [outgoing[rank].numel()] * n)
    totals = []
    everyone = [_parted(data, mine) for data in arrived]
    for parameter, terms in zip(parameters, zip(*everyone, strict=True), strict=True):
        total = terms[0].clone()
        for term in terms[1:]:
            if binned:
                merge_sums(total, term, MANY_TERMS)
            else:
                total += term
        totals.append(rounded(total, MANY_TERMS, parameter.dtype) if binned else total)
    results = [
        [part(_as_rows(p), cut, r) for p, cut in zip(parameters, cuts, strict=True)]
        for r in range(n)
    ]
    sizes = [sum(x.numel() * x.element_size() for x in of) for of in results]
    arrived = exchange_tensors(transport, [joined(totals)] * n, sizes)
    found = [_parted(data, of) for data, of in zip(arrived, results, strict=True)]
    return [
        torch.cat(parts).view(parameter.shape)
        for parameter, parts in zip(parameters, zip(*found, strict=True), strict=True)
    ]


def _parted(data: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Bytes of several tensors, one after the other, as tensors of those shapes and dtypes."""
    pieces = data.split([x.numel() * x.element_size() for x in like])
    # a copy begins where any dtype may
    return [
        piece.clone().view(x.dtype).view(x.shape) for piece, x in zip(pieces, like, strict=True)
    ]

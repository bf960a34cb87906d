"""Layers that treat each token by itself, run on fixed blocks of tokens, and sums of gradients.

The bits of a row of a matrix product change with the number of rows beside it, and the bits of a
parameter's gradient with the rows over which it is summed. So a layer runs on blocks of BLOCK
tokens at fixed places of the sequence, each a call of the same shape, and what each block adds to
the gradient of a parameter is a term of a binned sum (sums.py), whose bits do not depend
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
from tilewise.exact.sums import add_terms, blank_sums, folded, merge_sums, rounded
from tilewise.layouts.layout import Layout
from tilewise.layouts.whole_blocks import split_blocks, whole_blocks
from tilewise.tokens.gradients import GradientTerms, as_rows
from tilewise.tokens.pieces import Piece, pieces_of
from tilewise.transport.agreement import agree, settled
from tilewise.transport.means import Sum
from tilewise.transport.protocol import Transport

BLOCK = 64
"""Tokens of a block; the last one of a sequence may have fewer, and is filled up."""

Rows: TypeAlias = Tensor | tuple[Tensor, ...]
"""What a layer returns."""


class GradientSums:
    """Binned sums of the gradients of parameters, over the blocks that this rank has run."""

    name = "canonical"

    def __init__(self) -> None:
        self._sums = WeakTensorKeyDictionary()  # int64 [rows of the parameter, columns]

    def leaf(self, parameter: Tensor) -> Tensor:
        """A tensor to compute with in place of a parameter: its gradient becomes a term."""
        leaf = parameter.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(partial(self._add, parameter))
        return leaf

    def refusal(self, name: str, parameter: Tensor) -> str | None:
        if parameter.grad is None:
            return None
        return (
            f"{name} has a gradient that was not made by cp.by_blocks, so its bits depend on the "
            "split; run its layer by cp.by_blocks, and begin a step without gradients "
            "(optimizer.zero_grad())"
        )

    def take(self, parameter: Tensor) -> Tensor | None:
        return self._sums.pop(parameter, None)

    def blank(self, parameter: Tensor) -> Tensor:
        num_rows, width = as_rows(parameter).shape
        return blank_sums((num_rows,), width, parameter.device)

    def merge(self, total: Tensor, term: Tensor) -> None:
        merge_sums(total, term)

    def rounded(self, total: Tensor, parameter: Tensor) -> Tensor:
        return rounded(total, parameter.dtype)

    def _add(self, parameter: Tensor, leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        if grad is None:
            return
        rows = as_rows(grad)
        sums = self._sums.get(parameter)
        if sums is None:
            sums = self._sums[parameter] = self.blank(parameter)
        add_terms(sums, rows)


def run_by_blocks(
    module: nn.Module,
    inputs: Sequence[Tensor],
    layout: Layout,
    transport: Transport,
    sums: GradientTerms,
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
            "inputs": str([(x.ndim, str(x.dtype)) for x in inputs]),
            "dim": str(dim),
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


def whole_layout(layout: Layout) -> Layout:
    """The layout that has whole blocks on each rank, or layout if it has."""
    return whole_blocks(layout, block_edges(layout.num_tokens))


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


def _total(numbers: Tensor) -> Tensor:
    """The binned sum of numbers, int64 [columns]."""
    sums = blank_sums((max(1, len(numbers)),), 1, numbers.device)
    add_terms(sums[: len(numbers)], numbers.unsqueeze(1))
    return folded(sums)


EXACT_SUM = Sum("canonical", _total, merge_sums, lambda sums: rounded(sums, torch.float64))
"""The sum of losses of tokens that has the same bits at any split."""

"""The allowed cells of a call as a table: for the oracle and for kernels that take a mask."""

import numpy as np
import torch
from torch import Tensor

from tilewise.masks.strips import expand
from tilewise.tiles.calls import KernelCall, Kind

MAX_DEPTH = 32  # intervals of a row, each of them a line of a compiled kernel


def call_mask(call: KernelCall, device: torch.device | str = "cpu") -> Tensor:
    """bool [m, n]: may row a of the call see its key j?"""
    m, n = call.num_q, call.num_k
    match call.kind:
        case Kind.FULL:
            return torch.ones(m, n, dtype=torch.bool, device=device)
        case Kind.CAUSAL:
            return torch.ones(m, n, dtype=torch.bool, device=device).tril_(n - m)
        case Kind.SLICES:
            return _slices_mask(call, m, n).to(device)
        case Kind.LISTS:
            raise ValueError(
                "a call of lists is of rows that lie anywhere; give the kernel its rows alone"
            )


def additive_mask(call: KernelCall, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """The mask [m, n] of a SLICES call, 0 and -inf, and which rows see no key (None: all see)."""
    if call.kind is not Kind.SLICES:
        return None, None
    allowed = call_mask(call)
    seen = allowed.any(1)
    mask = torch.where(allowed, *torch.tensor([0.0, -torch.inf], dtype=dtype))
    return mask, None if bool(seen.all()) else ~seen


def row_intervals(call: KernelCall) -> Tensor:
    """int32 [depth, 2, m]: first and end of the keys of each row's intervals, 0, 0 where fewer."""
    row, lo, hi = _intervals(call)
    order = np.argsort(row, kind="stable")
    row, lo, hi = row[order], lo[order], hi[order]
    depth = np.arange(len(row)) - np.searchsorted(row, row)
    table = np.zeros((int(depth.max(initial=0)) + 1, 2, call.num_q), np.int32)
    table[depth, 0, row], table[depth, 1, row] = lo, hi
    return torch.from_numpy(table)


def compiled_intervals(call: KernelCall, kernel: str) -> Tensor:
    """`row_intervals` for a kernel that compiles a line for each interval of a row.

    Raises:
        ValueError: if a row has more than MAX_DEPTH, naming the kernel.
    """
    table = row_intervals(call)
    if len(table) > MAX_DEPTH:
        raise ValueError(
            f"a row of this call sees {len(table)} intervals of keys; {kernel} takes at most "
            f"{MAX_DEPTH}: take another kernel"
        )
    return table


def block_cells(table: np.ndarray, num_keys: int, block: tuple[int, int]) -> np.ndarray:
    """Count the allowed cells of every block of a call.

    Args:
        table: `row_intervals` of the call.
        block: rows and keys of a block.
    """
    num_rows, width = block
    rows, columns = -(-table.shape[2] // num_rows), -(-num_keys // width)
    # an interval adds width to every block from its first to before its last, less what lies in
    # the first before it, and to its last what lies in it
    step = np.zeros((rows, columns + 2), np.int64)
    rest = np.zeros((rows, columns + 1), np.int64)
    row = np.arange(table.shape[2]) // num_rows
    for low, high in table.astype(np.int64):
        np.add.at(step, (row, low // width), width)
        np.add.at(step, (row, high // width), -width)
        np.add.at(rest, (row, low // width), -(low % width))
        np.add.at(rest, (row, high // width), high % width)
    return (step.cumsum(1)[:, :-1] + rest)[:, :columns]


def listed_blocks(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how many of each row's blocks are chosen, and their columns first among all
    columns, both int32.
    """
    order = np.argsort(~blocks, axis=1, kind="stable")
    return blocks.sum(1, dtype=np.int32), order.astype(np.int32)


def _slices_mask(call: KernelCall, m: int, n: int) -> Tensor:
    """A cell is allowed if one more interval of its row began than ended at or before it."""
    row, lo, hi = _intervals(call)
    if len(np.unique(row)) == len(row):
        edges = np.zeros((2, m), np.int32)
        edges[:, row] = lo, hi
        first, last = torch.from_numpy(edges)[:, :, None]
        column = torch.arange(n, dtype=torch.int32)
        return (column >= first) & (column < last)
    change = torch.zeros(m, n + 1, dtype=torch.int16)
    index = torch.from_numpy(np.concatenate([row * (n + 1) + lo, row * (n + 1) + hi]))
    sign = torch.ones(len(index), dtype=torch.int16)
    sign[len(row) :] = -1
    change.view(-1).scatter_add_(0, index, sign)
    return change.cumsum(1, dtype=torch.int16)[:, :n].bool()


def _intervals(call: KernelCall) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every slice on each of its rows: row, first key, end of keys."""
    q0, q1, lo, lo_slope, hi, hi_slope = np.asarray(call.as_slices, np.int64).reshape(-1, 6).T
    index, row = expand(q0, q1)
    return row, lo[index] + lo_slope[index] * row, hi[index] + hi_slope[index] * row

"""The allowed cells of a call as a dense table: for the oracle and kernels that take a mask."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tilewise.calls import Call, Kind


def call_mask(call: Call, device: torch.device | str = "cpu") -> Tensor:
    """bool [m, n]: may row a of the call see its key j?"""
    m, n = call.num_q, call.num_k
    match call.kind:
        case Kind.FULL:
            return torch.ones(m, n, dtype=torch.bool, device=device)
        case Kind.CAUSAL:
            return torch.ones(m, n, dtype=torch.bool, device=device).tril_(n - m)
        case Kind.SLICES:
            return _slices_mask(call, m, n).to(device)


def _slices_mask(call: Call, m: int, n: int) -> Tensor:
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


def _intervals(call: Call) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every slice on each of its rows: row, first key, end of keys."""
    q0, q1, lo, lo_slope, hi, hi_slope = np.asarray(call.slices, np.int64).reshape(-1, 6).T
    count = q1 - q0
    index = np.repeat(np.arange(len(count)), count)
    row = np.arange(len(index)) + (q0 - np.cumsum(count) + count)[index]
    return row, lo[index] + lo_slope[index] * row, hi[index] + hi_slope[index] * row

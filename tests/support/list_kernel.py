"""The oracle as a kernel of lists: it touches no row but those that a call names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.protocol import Places, Scores, deliver
from tilewise.kernels.reference import Reference
from tilewise.plan.row_ranges import count_rows, row_index, without
from tilewise.tiles.calls import KernelCall, Kind, Slice


class ListKernel(Reference):
    """The reference kernel, of whole tiles, that takes calls of lists.

    Attributes:
        calls: those that it took.
    """

    square_causal = False
    whole_tile = True
    lists = True

    def __init__(self) -> None:
        self.calls: list[KernelCall] = []

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: KernelCall,
        scale: float,
        into: Any = None,
        scores: Scores | None = None,
    ) -> Any:
        if call.kind is not Kind.LISTS:
            return super().forward(q, k, v, call, scale, into, scores)
        self.calls.append(call)
        rows, keys = (torch.from_numpy(row_index(x)) for x in call.sides)
        found = super().forward(
            q[rows], k[keys], v[keys], closed_up(call), scale, None, picked(scores, rows, keys)
        )
        fresh = torch.from_numpy(row_index(call.fresh[0]))
        for x, blank in zip(into, (0.0, -torch.inf, -torch.inf), strict=False):
            x[fresh] = blank
        mine = tuple(x[rows].to(y.dtype) for x, y in zip(into, found, strict=True))
        merged = tuple(x.clone() for x in mine)
        if len(rows):
            deliver(found, merged)
        for x, y in zip(into, merged, strict=True):
            x[rows] = y.to(x.dtype)
        return into

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        call: KernelCall,
        scale: float,
        into: Any = None,
        scores: Scores | None = None,
    ) -> Any:
        if call.kind is not Kind.LISTS:
            return super().backward(q, k, v, dout, lse, delta, call, scale, into, scores)
        self.calls.append(call)
        rows, keys = (torch.from_numpy(row_index(x)) for x in call.sides)
        mine = q[rows], k[keys], v[keys], dout[rows], lse[rows], delta[rows]
        scores = picked(scores, rows, keys)
        found = super().backward(*mine, closed_up(call), scale, None, scores)
        for side, x, y in zip((0, 1, 1), into, found, strict=True):
            x[torch.from_numpy(row_index(call.fresh[side]))] = 0.0
            index = (rows, keys)[side]
            x[index] = (x[index].to(y.dtype) + y).to(x.dtype)
        return into


def picked(scores: Scores | None, rows: Tensor, keys: Tensor) -> Scores | None:
    if scores is None or scores.places is None:
        return scores
    q, k, first = scores.places
    return scores._replace(places=Places(q[rows], k[keys], first))


def closed_up(call: KernelCall) -> KernelCall:
    """The call of the rows and keys that it names alone."""
    for ranges, fresh in zip(call.sides, call.fresh, strict=True):
        assert not without(fresh, ranges), "what is fresh is among the rows of a call"

    def shift(ranges: Any, at: int) -> int:
        before = [x for x in ranges if x[0] <= at]
        assert before and at < before[-1][1]
        return before[-1][0] - count_rows(before[:-1])

    slices: list[Slice] = []
    for x in call.slices:
        rows, keys = shift(call.q, x.q0), shift(call.k, x.lo + x.lo_slope * x.q0)
        last = x.hi + x.hi_slope * (x.q1 - 1) - 1
        assert shift(call.q, x.q1 - 1) == rows and shift(call.k, last) == keys
        lo, hi = x.lo - keys + x.lo_slope * rows, x.hi - keys + x.hi_slope * rows
        slices.append(Slice(x.q0 - rows, x.q1 - rows, lo, x.lo_slope, hi, x.hi_slope))
    m, n = map(count_rows, call.sides)
    return KernelCall(((0, m),), ((0, n),), Kind.SLICES, tuple(slices))

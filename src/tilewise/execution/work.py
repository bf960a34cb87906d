"""The two passes' work: what a tile computes, and how partials merge."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.execution.gather import BoundCall, Index, gather, pick
from tilewise.execution.packing import Block
from tilewise.execution.partials import Tensors
from tilewise.execution.pass_work import PassWork
from tilewise.kernels.merge import merge_into
from tilewise.plan.ir import Side


class Forward(PassWork):
    """Partials of queries are (out, lse), merged by lse; KV has none."""

    def _call(self, bound: BoundCall, q: list[Block], kv: list[Block]) -> None:
        call, q_parts, k_parts, q_heads, kv_heads = bound
        queries = gather(q, q_parts, "q", q_heads, self._scratch)
        k = gather(kv, k_parts, "k", kv_heads, self._scratch)
        v = gather(kv, k_parts, "v", kv_heads, self._scratch)
        target = self._target(q_parts, q_heads)
        into = None if target is None else (target[0], target[1])
        values = self.frame.kernel.forward(queries, k, v, call, self.frame.scale, into)
        if into is None:
            for part in q_parts:
                self._add_part(part, values, q_heads)

    def _blanks(self, side: Side) -> Sequence[tuple[float, *tuple[int, ...]]]:
        return (0.0, self.payload.head_dim), (-torch.inf,)

    def _merge(self, partials: Tensors, index: Index, values: Tensors) -> None:
        out, lse = partials
        if index is not None:
            out, lse = pick(out, index, self._scratch), pick(lse, index, self._scratch)
        merge_into(out, lse, *values)
        if isinstance(index, Tensor):  # an index made copies
            partials[0].index_copy_(0, index, out)
            partials[1].index_copy_(0, index, lse)


class Backward(PassWork):
    """Partials are sums: dq of queries, (dk, dv) of keys and values."""

    def _call(self, bound: BoundCall, q: list[Block], kv: list[Block]) -> None:
        call, q_parts, k_parts, q_heads, kv_heads = bound
        queries, dout, lse, delta = (
            gather(q, q_parts, name, q_heads, self._scratch)
            for name in ("q", "dout", "lse", "delta")
        )
        k = gather(kv, k_parts, "k", kv_heads, self._scratch)
        v = gather(kv, k_parts, "v", kv_heads, self._scratch)
        scale = self.frame.scale
        operands = queries, k, v, dout, lse, delta
        first, second = self._target(q_parts, q_heads), self._target(k_parts, kv_heads)
        into = None
        if (first and second) or not self._lender.adopts:
            (dq,), (dk, dv) = first or self._zeros(queries), second or self._zeros(k, v)
            into = dq, dk, dv
        dq, dk, dv = self.frame.kernel.backward(*operands, call, scale, into)
        # With into, a side that has a target is done; another's results were computed aside.
        if into is None or first is None:
            for part in q_parts:
                self._add_part(part, (dq,), q_heads)
        if into is None or second is None:
            for part in k_parts:
                self._add_part(part, (dk, dv), kv_heads)

    def _zeros(self, *like: Tensor) -> Tensors:
        """Where a kernel adds results that do not belong side by side."""
        take, dtype = self._scratch.take, self.frame.dtype
        return tuple([take(x.shape, dtype).zero_() for x in like])

    def _blanks(self, side: Side) -> Sequence[tuple[float, *tuple[int, ...]]]:
        return ((0.0, self.payload.head_dim),) * (1 if side is Side.Q else 2)

    def _merge(self, partials: Tensors, index: Index, values: Tensors) -> None:
        for total, value in zip(partials, values, strict=True):
            if isinstance(index, Tensor):
                total.index_add_(0, index, value.to(total.dtype))
            else:
                pick(total, index, self._scratch).add_(value)

"""Canonical attention of two shards: pairs of leaves by calls of fixed shape, added to binned sums.

Bits of a call depend on its shape and on where its memory begins, so each pair has the same shape
wherever it is computed, in fresh memory, and heads are computed apart. What a pair contributes is
then a function of the pair alone, and the sum of contributions does not depend on their order.

    out = sum of out_pair exp(lse_pair) / sum of exp(lse_pair);  lse = log(sum of exp(lse_pair))

exp(lse_pair) is kept as a mantissa and a power of two, so no running maximum is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.kernels.binned import (
    Scratch,
    add_groups,
    add_terms,
    blank_sums,
    exact_numbers,
    folded,
    in_blocks,
    merge_sums,
    power_of_two,
    rounded,
)
from tilewise.kernels.elementary import exp_parts, log_of
from tilewise.kernels.protocol import (
    Kernel,
    Places,
    Scores,
    accumulator_dtype,
)
from tilewise.kernels.reference import Reference
from tilewise.kernels.short_sums import read_short
from tilewise.kernels.torch_cpu import CpuFlash
from tilewise.kernels.triton.kernel import DeterministicTritonSlices, TritonSlices
from tilewise.layouts.layout import Run
from tilewise.plan.sums import MANY_TERMS, SumColumns
from tilewise.tiles.calls import KernelCall
from tilewise.tiles.leaf_pairs import Leaf, LeafPairs

WIDTH_UNIT = 16
"""Numbers of a row of a call are a multiple of it: then each row begins at the same alignment."""

_INTEGERS_AT_ONCE = 1 << 19  # of sums, that fit in a cache with what is made of them

_LEAST = -(1 << 23)  # the bits of -inf in fp32, as an integer


class _Apart(NamedTuple):
    """A kernel whose bits of a head depend on nothing but that head's rows, and how it is called.

    Attributes:
        equal_widths: v is as wide as q and k.
        by_head: each head is a call.
    """

    kernel: Kernel
    equal_widths: bool
    by_head: bool


def _apart(kernel: Kernel) -> _Apart:
    if isinstance(kernel, CpuFlash):
        return _Apart(kernel, equal_widths=True, by_head=False)
    if isinstance(kernel, TritonSlices):  # without atomic additions to dq
        kernel = replace(kernel, deterministic=True)
    return _Apart(kernel, equal_widths=False, by_head=True)


TRITON = TritonSlices, DeterministicTritonSlices
PROVEN: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {"cpu": (CpuFlash, Reference, *TRITON), "cuda": TRITON}
)
"""Kernels whose bits do not depend on what else is computed, by device."""


def why_not_canonical(kernel: Kernel, device_type: str) -> str | None:
    """Return why a kernel cannot serve a canonical reduction; None if it can."""
    proven = PROVEN.get(device_type, ())
    if type(kernel) in proven:
        return None
    names = ", ".join(repr(x.name) for x in proven) or "none"
    return (
        "its bits may depend on the shape of a call, and it has not been proven otherwise; on "
        f"{device_type} these can: {names}"
    )


class LeafKernel:
    """Computes the pairs of leaves of two shards by a kernel, and adds them to binned sums."""

    def __init__(self, kernel: Kernel):
        self._kernel, self._equal_widths, self._by_head = _apart(kernel)

    def forward(
        self,
        operands: tuple[Tensor, ...],
        call: LeafPairs,
        scores: Scores,
        first_head: int,
        sums: tuple[Tensor, ...],
        columns: tuple[SumColumns, ...],
    ) -> None:
        """Add what the pairs contribute to out and lse (and the largest scores).

        Args:
            operands: q, k, v as `Kernel` takes them.
            sums: of the queries' rows, integers [rows, batch, num_heads, columns].
        """
        q, k, v = operands
        widths, scratch = self._widths(q, v), Scratch()
        for leaf, pairs in _by_query_leaf(call):
            q_rows = _gathered(q, leaf, widths[0])
            for other, kernel_call in pairs:
                keys = _gathered(k, other, widths[0]), _gathered(v, other, widths[1])
                placed = _placed_scores(scores, leaf, other, first_head, q.device)
                run = self._kernel.forward
                out, lse, *largest = self._each_head(run, (q_rows, *keys), kernel_call, placed)
                partial = out[..., : v.shape[-1]], lse, *largest
                add_partial(sums[0], partial, leaf, columns[0], scratch)

    def backward(
        self,
        operands: tuple[Tensor, ...],
        call: LeafPairs,
        scores: Scores,
        first_head: int,
        sums: tuple[Tensor, ...],
        columns: tuple[SumColumns, ...],
    ) -> None:
        """Add what the pairs contribute to dq, and to dk and dv: each query head by itself.

        Args:
            operands: q, k, v, dout, lse, delta as `Kernel` takes them.
            sums: of the queries' rows and of the keys'.
        """
        q, k, v, dout, lse, delta = operands
        widths, shared = self._widths(q, v), q.shape[2] // k.shape[2]
        scratch = Scratch()
        for leaf, pairs in _by_query_leaf(call):
            mine = (
                _gathered(dout, leaf, widths[1]),
                _gathered_statistic(lse, leaf, torch.inf),  # weights of absent rows are 0
                _gathered_statistic(delta, leaf, 0.0),
            )
            q_rows = _gathered(q, leaf, widths[0])
            for other, kernel_call in pairs:
                keys = (
                    _gathered(k, other, widths[0], shared),
                    _gathered(v, other, widths[1], shared),
                )
                placed = _placed_scores(scores, leaf, other, first_head, q.device)
                rows, run = (q_rows, *keys, *mine), self._kernel.backward
                dq, dk, dv = self._each_head(run, rows, kernel_call, placed)
                _add(sums[0], columns[0], leaf, (dq[..., : q.shape[-1]],), scratch)
                found = dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]
                for head in range(shared):
                    one = tuple(x.unflatten(2, (-1, shared))[:, :, :, head] for x in found)
                    _add(sums[1], columns[1], other, one, scratch)

    def _widths(self, q: Tensor, v: Tensor) -> tuple[int, int]:
        """Widths of calls: of q and k, and of v."""
        widths = [-(-x.shape[-1] // WIDTH_UNIT) * WIDTH_UNIT for x in (q, v)]
        return (max(widths), max(widths)) if self._equal_widths else (widths[0], widths[1])

    def _each_head(
        self,
        run: Callable[..., tuple[Tensor, ...]],
        tensors: tuple[Tensor, ...],
        call: KernelCall,
        scores: Scores,
    ) -> tuple[Tensor, ...]:
        """Run a pass of the kernel, of each query head by itself where its bits depend on others.

        Args:
            tensors: q's first; others may have fewer heads, each of which several of q share.
        """
        given = call, scores.scale, None
        num_heads, found = tensors[0].shape[2], list[tuple[Tensor, ...]]()
        with _one_thread():
            if not self._by_head:
                return run(*tensors, *given, scores)
            for head in range(num_heads):
                own = (x.narrow(2, head * x.shape[2] // num_heads, 1) for x in tensors)
                placed = _of_head(scores, head)
                found.append(run(*(x.contiguous() for x in own), *given, placed))
        return tuple(torch.cat(x, 2) for x in zip(*found, strict=True))


def _by_query_leaf(call: LeafPairs) -> Iterator[tuple[Leaf, Iterator[tuple[Leaf, KernelCall]]]]:
    """Each query leaf, with the leaves of keys that it meets and their calls."""
    for number, pairs in groupby(call.pairs, attrgetter("q")):
        yield call.q[number], ((call.k[pair.k], pair.call) for pair in pairs)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch's operators run on the calling thread alone.

    Several threads cut an elementwise operator's numbers in as many parts, and at the end of each
    part ATen computes exp otherwise than before it. MKL's products of matrices, too, have bits that
    depend on the number of threads, on some processors (Intel's with AVX-512).
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@lru_cache(maxsize=4096)
def _rows(runs: tuple[Run, ...], device: torch.device) -> slice | Tensor:
    """Rows as what selects them fastest."""
    if len(runs) == 1:
        start, count, stride = runs[0]
        return slice(start, start + (count - 1) * stride + 1, stride)
    parts = [start + stride * torch.arange(count) for start, count, stride in runs]
    return torch.cat(parts).to(device)


def _gathered(x: Tensor, leaf: Leaf, width: int, shared: int = 1) -> Tensor:
    """A leaf's rows as a call takes them: [num_rows, batch, heads * shared, width], 0 elsewhere.

    Half precision becomes fp32, which holds the same numbers.
    """
    shape = leaf.num_rows, x.shape[1], x.shape[2] * shared, width
    whole = width == x.shape[-1] and leaf.slots == (Run(0, leaf.num_rows),)
    make = torch.empty if whole else torch.zeros
    rows = make(shape, dtype=accumulator_dtype(x.dtype), device=x.device)
    target = rows.unflatten(2, (x.shape[2], shared))[..., : x.shape[-1]]
    target[_rows(leaf.slots, x.device)] = x[_rows(leaf.held, x.device)].unsqueeze(3).to(rows.dtype)
    return rows


def _gathered_statistic(x: Tensor, leaf: Leaf, absent: float) -> Tensor:
    rows = torch.full((leaf.num_rows, *x.shape[1:]), absent, dtype=x.dtype, device=x.device)
    rows[_rows(leaf.slots, x.device)] = x[_rows(leaf.held, x.device)]
    return rows


def _placed_scores(
    scores: Scores, q: Leaf, k: Leaf, first_head: int, device: torch.device
) -> Scores:
    """Return what a call is told: where its rows are, if that is asked for."""
    if not scores.by_place:
        return scores
    rows, keys = (
        torch.arange(leaf.start, leaf.start + leaf.num_rows, device=device) for leaf in (q, k)
    )
    return scores._replace(places=Places(rows, keys, first_head))


def _of_head(scores: Scores, head: int) -> Scores:
    if scores.places is None:
        return scores
    first = scores.places.first_head + head
    return scores._replace(places=scores.places._replace(first_head=first))


def add_partial(
    sums: Tensor,
    partial: tuple[Tensor, ...],
    leaf: Leaf,
    columns: SumColumns,
    scratch: Scratch,
) -> None:
    """Add the attention of a leaf's queries over some keys.

    Args:
        partial: out, lse (and the largest scores) of a call.
    """
    slots = _rows(leaf.slots, sums.device)
    out, lse, *largest = (x[slots] for x in partial)
    mantissas, exponents = exp_parts(lse)
    ones = torch.ones_like(lse).unsqueeze(-1)
    with _Part(sums, leaf) as part:
        _add_groups(part, columns, (out, ones), scratch, mantissas, exponents)
        for x in largest:
            keys = part[..., -2:]
            torch.maximum(keys, _keys(x, keys.dtype), out=keys)


def _add(
    sums: Tensor, columns: SumColumns, leaf: Leaf, grads: tuple[Tensor, ...], scratch: Scratch
) -> None:
    """Add a call's gradients of a leaf's rows."""
    slots = _rows(leaf.slots, sums.device)
    with _Part(sums, leaf) as part:
        _add_groups(part, columns, [grad[slots] for grad in grads], scratch)


def _add_groups(
    sums: Tensor,
    columns: SumColumns,
    numbers: Sequence[Tensor],
    scratch: Scratch,
    factors: Tensor | None = None,
    exponents: Tensor | None = None,
) -> None:
    """Add numbers to each group of sums, those of one format together."""
    groups = zip(columns.groups, numbers, strict=True)
    for form, of_form in groupby(groups, lambda pair: pair[0].form):
        own, terms = zip(*((sums[..., x.columns], y) for x, y in of_form), strict=True)
        add_groups(own, terms, form, factors, exponents, scratch)


class _Part:
    """The sums of a leaf's rows, to be changed in place."""

    def __init__(self, sums: Tensor, leaf: Leaf):
        self._sums, self._rows = sums, _rows(leaf.local, sums.device)

    def __enter__(self) -> Tensor:
        self._part = self._sums[self._rows]
        return self._part

    def __exit__(self, *_: object) -> None:
        if isinstance(self._rows, Tensor):
            self._sums.index_copy_(0, self._rows, self._part)


def merge_columns(sums: Tensor, others: Tensor, columns: SumColumns) -> None:
    """Add other partials of the same rows and heads in place."""
    for group in columns.groups:
        merge_sums(sums[..., group.columns], others[..., group.columns], group.form)
    if columns.largest:
        torch.maximum(sums[..., -2:], others[..., -2:], out=sums[..., -2:])


def merge_short(sums: Tensor, others: Tensor, columns: SumColumns) -> None:
    """Add other partials of the same rows and heads, as they travel, in place.

    Args:
        others: uint8 [rows, batch, n].
    """
    others = others.unflatten(-1, (sums.shape[2], -1))
    for mine, theirs in in_blocks(_INTEGERS_AT_ONCE, sums, others):
        merge_columns(mine, read_short(theirs, columns, torch.empty_like(mine)), columns)


def finish_attention(
    sums: Tensor, columns: SumColumns, into: tuple[Tensor, ...], sink: Tensor | None = None
) -> None:
    """Write out and lse (and the largest scores) of complete sums.

    Args:
        into: out of any dtype [rows, batch, heads, width], and the others [rows, batch, heads].
        sink: broadcasts to lse: one more term of the denominator, with no value. Changes sums.
    """
    for part, *parts in in_blocks(_INTEGERS_AT_ONCE, sums, *into):
        _finish_rows(part, columns, parts, sink)


def _finish_rows(
    sums: Tensor, columns: SumColumns, into: Sequence[Tensor], sink: Tensor | None
) -> None:
    out, total = columns.groups
    if sink is not None:
        mantissas, exponents = exp_parts(sink.expand(sums.shape[:-1]))
        ones = torch.ones_like(mantissas).unsqueeze(-1)
        add_terms(sums[..., total.columns], ones, total.form, mantissas, exponents)
    numbers, exponents = exact_numbers(sums[..., out.columns], out.form)
    whole, units = exact_numbers(sums[..., total.columns], total.form)
    scale = power_of_two(exponents - units).unsqueeze(-1) / whole.masked_fill(whole == 0, 1.0)
    into[0].copy_(numbers.mul_(scale))
    into[1].copy_(log_of(whole.squeeze(-1), units))
    if columns.largest:
        into[2].copy_(_score(sums[..., -2:]))


def finish_gradients(sums: Tensor, columns: SumColumns, into: tuple[Tensor, ...]) -> None:
    """Write gradients, of any dtype, of complete sums."""
    for part, *parts in in_blocks(_INTEGERS_AT_ONCE, sums, *into):
        for group, grad in zip(columns.groups, parts, strict=True):
            grad.copy_(rounded(part[..., group.columns], group.form, torch.float64))


def sink_sums(lse: Tensor, delta: Tensor, sink: Tensor) -> Tensor:
    """Return sums of the gradient of a sink over some rows, in MANY_TERMS.

    dsink = -sum of exp(sink - lse) delta: the sink's own weight, whose value is 0.

    Args:
        lse, delta: [rows, batch, num_heads]; lse counts the sink.
        sink: [num_heads], or [batch, num_heads], each entry's own.
    Returns:
        int64 [num_heads or batch, num_heads, columns].
    """
    mantissas, exponents = exp_parts(sink - lse)
    if sink.ndim == 1:
        delta, mantissas, exponents = (x.flatten(0, 1) for x in (delta, mantissas, exponents))
    sums = blank_sums((len(delta) + 1, *delta.shape[1:]), 1, MANY_TERMS, delta.device)
    add_terms(sums[1:], -delta.unsqueeze(-1), MANY_TERMS, mantissas, exponents)
    return folded(sums, MANY_TERMS)


def _keys(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Scores as two integers [..., 2], for those from 0 on and for others, whose maxima stand for
    the largest score: 0 stands for none."""
    bits = scores.float().view(torch.int32)
    others = _LEAST - bits  # of negative numbers, larger bits are smaller numbers
    keys = (bits + 1).masked_fill(bits < 0, 0), others.masked_fill(bits >= 0, 0)
    return torch.stack(keys, -1).to(dtype)


def _score(keys: Tensor) -> Tensor:
    """The scores, fp32, of their keys; -inf of none."""
    from_zero, others = keys.int().unbind(-1)
    return torch.where(from_zero > 0, from_zero - 1, _LEAST - others).view(torch.float32)


def row_sum(x: Tensor) -> Tensor:
    """The sum over the last dimension, in an order that its size alone decides."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        paired = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat((paired, x[..., 2 * half :]), -1) if x.shape[-1] % 2 else paired
    return x.squeeze(-1)

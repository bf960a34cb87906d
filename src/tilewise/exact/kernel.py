"""Attention of whole rows: each is summed block by block, in the order of positions.

A row's bits are a function of the row, of the rows that it sees and of their positions in the
document. They do not depend on the rows beside it, its place among them, the number of heads or
the rows that are absent:

- a product has a fixed shape and fresh, aligned operands, and a matrix product of fixed shape gives
  each row the same bits at any place (tests/exact/test_kernel.py);
- one head is a product, by one thread, on widths that are multiples of 16;
- a walked block that a row does not see changes nothing of it: its weights are 0 and its running
  maximum stays.

    s = cap(scale q k^T) + bias;   p = exp(s - lse);   ds = p (dout v^T - delta)
    out = p v;   dq = scale ds k;   dk = scale ds^T q;   dv = p^T dout
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.exact.blocks import DocumentRows, documents
from tilewise.kernels.bias import BiasPlaces, bias_of_pairs
from tilewise.kernels.dropout import philox, threshold
from tilewise.kernels.protocol import Operands, Scores, accumulator_dtype
from tilewise.masks.base import Mask
from tilewise.plan.ir import Side
from tilewise.tiles.calls import KernelCall

WIDTH_UNIT = 16
"""Widths of products are a multiple of it: kernels compute what is left over otherwise."""

Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class WholeRowsKernel(ABC):
    """A kernel that gives each row its complete result, for one mask.

    It is told where its rows lie (`Scores.places`), and reads the mask itself.

    Attributes:
        mask: of all heads.
        num_tokens: of the queries' sequence and of the keys'.
    """

    mask: Mask
    num_tokens: tuple[int, int]
    name: str = "cpu"
    square_causal: bool = False
    whole_tile: bool = True

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Results:
        """out, lse (and the largest scores) of queries that see all their keys here."""

    @abstractmethod
    def query_gradients(self, operands: Operands, scores: Scores) -> Tensor:
        """dq of queries that see all their keys here."""

    @abstractmethod
    def key_gradients(self, operands: Operands, scores: Scores) -> tuple[Tensor, Tensor]:
        """dk and dv of keys that all their queries see here."""

    def supports(self, *_: object, **__: object) -> str | None:
        """The call was checked when the kernel was made for it."""
        return None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: KernelCall,
        scale: float,
        into: Results | None = None,
        scores: Scores | None = None,
    ) -> Results:
        return _delivered(self.attend(q, k, v, _placed(scores)), into)

    def backward_q(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        call: KernelCall,
        scale: float,
        into: Results | None = None,
        scores: Scores | None = None,
    ) -> Results:
        """dq alone."""
        operands = Operands(q, k, v, dout, lse, delta)
        return _delivered((self.query_gradients(operands, _placed(scores)),), into)

    def backward_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        call: KernelCall,
        scale: float,
        into: Results | None = None,
        scores: Scores | None = None,
    ) -> Results:
        """dk and dv alone."""
        operands = Operands(q, k, v, dout, lse, delta)
        return _delivered(self.key_gradients(operands, _placed(scores)), into)

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
        into: Results | None = None,
        scores: Scores | None = None,
    ) -> Results:
        """dq, dk and dv, where a rank has all rows of both sides."""
        operands, placed = Operands(q, k, v, dout, lse, delta), _placed(scores)
        found = self.query_gradients(operands, placed), *self.key_gradients(operands, placed)
        return _delivered(found, into)

    @staticmethod
    def row_sum(x: Tensor, out: Tensor) -> None:
        """Write the sums over the last dimension, in an order that its size alone decides."""
        while x.shape[-1] > 1:
            half = x.shape[-1] // 2
            paired = x[..., :half] + x[..., half : 2 * half]
            x = torch.cat((paired, x[..., 2 * half :]), -1) if x.shape[-1] % 2 else paired
        out.copy_(x.squeeze(-1))

    def mask_of(self, kv_head: int, shared: int, scores: Scores) -> Mask:
        """The mask of a KV head of the call.

        Args:
            shared: query heads of a KV head.
        """
        masks: Sequence[Mask] | None = getattr(self.mask, "heads", None)
        if masks is None:
            return self.mask
        assert scores.places is not None
        return masks[scores.places.first_head // shared + kv_head]


def position_bytes(scores: Scores) -> tuple[bytes, bytes]:
    """Positions of a call's queries and keys, as values."""
    assert scores.places is not None
    q, k, _ = scores.places
    return q.numpy(force=True).tobytes(), k.numpy(force=True).tobytes()


class CpuKernel(WholeRowsKernel):
    """Products of fixed shape by PyTorch, one head and one pair of blocks at a time."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Results:
        dtype = accumulator_dtype(q.dtype)
        out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=dtype)
        results = (out, lse, lse.clone()) if scores.max_logit else (out, lse)
        with one_thread():
            for work in self._work(Side.Q, q, k, scores):
                keys, values = work.walked(k), work.walked(v)
                for head in work.heads:
                    rows = work.own(q, head).mul_(scores.scale)
                    found = [
                        _attend(block, keys, values, work.pairs(head, i))
                        for i, block in enumerate(rows)
                    ]
                    for x, blocks in zip(results, zip(*found, strict=True), strict=False):
                        work.put(x, head, blocks)
        return results

    def query_gradients(self, operands: Operands, scores: Scores) -> Tensor:
        q, k, v, dout, lse, delta = operands
        dq = torch.zeros(q.shape, dtype=accumulator_dtype(q.dtype))
        with one_thread():
            for work in self._work(Side.Q, q, k, scores):
                keys, values = work.walked(k), work.walked(v)
                for head in work.heads:
                    rows, drows = work.own(q, head).mul_(scores.scale), work.own(dout, head)
                    shift = [work.own(x.unsqueeze(-1), head)[..., :1] for x in (lse, delta)]
                    found = torch.zeros_like(rows)
                    for i, total in enumerate(found):
                        for j, pairs in work.pairs(head, i):
                            ends = (rows[i], keys[j]), (drows[i], values[j])
                            _, ds = _slopes(*ends, (shift[0][i], shift[1][i]), pairs)
                            total.addmm_(ds, keys[j])
                    work.put(dq, head, found.mul_(scores.scale).unbind())
        return dq

    def key_gradients(self, operands: Operands, scores: Scores) -> tuple[Tensor, Tensor]:
        q, k, v, dout, lse, delta = operands
        dk, dv = (torch.zeros(x.shape, dtype=accumulator_dtype(q.dtype)) for x in (k, v))
        with one_thread():
            for work in self._work(Side.KV, q, k, scores):
                keys, values = work.own(k, work.kv_head), work.own(v, work.kv_head)
                totals = torch.zeros_like(keys), torch.zeros_like(values)
                for head in work.heads:
                    rows, drows = work.walked(q, head).mul_(scores.scale), work.walked(dout, head)
                    shift = [work.walked(x.unsqueeze(-1), head)[..., :1].mT for x in (lse, delta)]
                    for i in range(len(keys)):
                        for j, pairs in work.pairs(head, i):
                            ends = (keys[i], rows[j]), (values[i], drows[j])
                            p, ds = _slopes(*ends, (shift[0][j], shift[1][j]), pairs)
                            totals[0][i].addmm_(ds, rows[j])
                            totals[1][i].addmm_(p, drows[j])
                for x, total in zip((dk, dv), totals, strict=True):
                    work.put(x, work.kv_head, total.unbind())
        return dk, dv

    def _work(self, own: Side, q: Tensor, k: Tensor, scores: Scores) -> Iterator[_Work]:
        """The work of each KV head, document and batch entry."""
        shared, positions = q.shape[2] // k.shape[2], position_bytes(scores)
        dtype = accumulator_dtype(q.dtype)
        for kv_head in range(k.shape[2]):
            mask = self.mask_of(kv_head, shared, scores)
            for walk in _walks(mask, self.mask, self.num_tokens, own, positions):
                shape = walk.own_shape[1], walk.walked_shape[1]
                tables = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
                for entry in range(q.shape[1]):
                    yield _Work(walk, own, entry, kv_head, shared, scores, tables)


class _Meeting(NamedTuple):
    """A walked block that an own block meets.

    Attributes:
        block: its number in the document.
        allowed: bool [own rows, walked rows]; None: all pairs.
    """

    block: int
    allowed: Tensor | None


class _Walk(NamedTuple):
    """A document's rows, and the blocks that they meet.

    Attributes:
        own, walked, slots: as of `DocumentRows`.
        own_shape, walked_shape: (blocks, rows of a block).
        own_positions: [blocks, rows of a block].
        start: position of the first walked place.
        meetings: of each own block, in the order of positions.
    """

    own: Tensor
    walked: Tensor
    slots: Tensor
    own_shape: tuple[int, int]
    walked_shape: tuple[int, int]
    own_positions: Tensor
    start: int
    meetings: tuple[tuple[_Meeting, ...], ...]


@lru_cache(maxsize=32)
def _walks(
    mask: Mask,
    whole_mask: Mask,
    num_tokens: tuple[int, int],
    own: Side,
    positions: tuple[bytes, bytes],
) -> tuple[_Walk, ...]:
    """The documents of a call, with tables of the pairs of blocks; arguments as of `documents`."""
    found = documents(mask, whole_mask, num_tokens, own, positions)
    return tuple(
        _Walk(
            torch.from_numpy(document.own),
            torch.from_numpy(document.walked),
            torch.from_numpy(document.slots),
            (document.num_own_blocks, document.sizes.own),
            (document.num_walked_blocks, document.sizes.walked),
            torch.from_numpy(document.in_own_blocks(document.own_positions)),
            document.start,
            _meetings(document),
        )
        for document in found
    )


def _meetings(document: DocumentRows) -> tuple[tuple[_Meeting, ...], ...]:
    low, high = (document.in_own_blocks(x) for x in (document.low, document.high))
    found: list[list[_Meeting]] = [[] for _ in range(document.num_own_blocks)]
    for number, blocks, whole in document.meetings():
        start = number * document.sizes.walked
        places = np.arange(start, start + document.sizes.walked)
        for block in blocks.tolist():
            allowed = None
            if not whole[block]:
                first, last = low[:, block, :, None], high[:, block, :, None]
                allowed = torch.from_numpy(((places >= first) & (places < last)).any(0))
            found[block].append(_Meeting(number, allowed))
    return tuple(map(tuple, found))


class _Work(NamedTuple):
    """The rows of one document, batch entry and KV head.

    Attributes:
        shared: query heads of the KV head.
        tables: room for two tables of one pair of blocks.
    """

    walk: _Walk
    own_side: Side
    entry: int
    kv_head: int
    shared: int
    scores: Scores
    tables: tuple[Tensor, Tensor]

    @property
    def heads(self) -> range:
        return range(self.kv_head * self.shared, (self.kv_head + 1) * self.shared)

    def own(self, x: Tensor, head: int) -> Tensor:
        """The own rows of a head in blocks: [blocks, rows, width], 0 past the last one."""
        rows = x[:, self.entry, head].index_select(0, self.walk.own)
        return _in_blocks(rows, None, self.walk.own_shape)

    def walked(self, x: Tensor, head: int | None = None) -> Tensor:
        """The walked rows of a head in blocks, 0 where a row is absent."""
        rows = x[:, self.entry, self.kv_head if head is None else head]
        rows = rows.index_select(0, self.walk.walked)
        return _in_blocks(rows, self.walk.slots, self.walk.walked_shape)

    def pairs(self, head: int, block: int) -> Iterator[tuple[int, _Pairs]]:
        """Walked blocks that an own block meets, in the order of positions."""
        for meeting in self.walk.meetings[block]:
            yield meeting.block, _Pairs(self, head, block, meeting)

    def put(self, x: Tensor, head: int, blocks: Sequence[Tensor]) -> None:
        """Write the own rows of a head."""
        own = self.walk.own
        rows = torch.cat([*blocks])[: len(own)]
        target = x[:, self.entry, head]
        target[own] = rows[:, : x.shape[-1]] if target.ndim == 2 else rows.squeeze(-1)


class _Pairs(NamedTuple):
    """The pairs of an own and a walked block, for one query head."""

    work: _Work
    head: int
    own_block: int
    meeting: _Meeting

    def masked(self, table: Tensor, value: float) -> Tensor:
        """The table with a value where a pair is not allowed; changed in place."""
        allowed = self.meeting.allowed
        return table if allowed is None else table.masked_fill_(~allowed, value)

    @property
    def _places(self) -> tuple[Tensor, Tensor, int]:
        """Positions of queries and of keys, and the query head of the whole attention."""
        walk, places = self.work.walk, self.work.scores.places
        assert places is not None
        size = walk.walked_shape[1]
        first = walk.start + self.meeting.block * size
        own, walked = walk.own_positions[self.own_block], torch.arange(first, first + size)
        q, k = (own, walked) if self.work.own_side is Side.Q else (walked, own)
        return q, k, places.first_head + self.head

    def raised(self, table: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scores of scaled products: capped, biased; and the slope of the cap if there is one."""
        scores, slope = self.work.scores, None
        if scores.softcap is not None:
            table = table.div_(scores.softcap).tanh_()
            slope = 1 - table * table
            table.mul_(scores.softcap)
        if scores.bias is not None:
            q, k, head = self._places
            bias = bias_of_pairs(scores.bias, BiasPlaces(q, k, (head, head + 1)), table.dtype)[0]
            table += bias if self.work.own_side is Side.Q else bias.T
        return table, slope

    def dropped(self, dtype: torch.dtype) -> Tensor | None:
        """The factors by which dropout multiplies weights; None: there is no dropout."""
        scores = self.work.scores
        if not scores.dropout_p:
            return None
        q, k, head = self._places
        if self.work.own_side is Side.Q:
            q, k = q[:, None], k[None, :]
        else:
            q, k = q[None, :], k[:, None]
        word = philox((k, q, head, self.work.entry), scores.dropout_seed)
        return (word >= threshold(scores.dropout_p)).to(dtype).div_(1 - scores.dropout_p)


def _attend(
    rows: Tensor, keys: Tensor, values: Tensor, pairs: Iterator[tuple[int, _Pairs]]
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and the largest score of one block of queries.

    Source: Milakov and Gimelshein 2018, the running maximum.
    """
    most = rows.new_full((len(rows), 1), -torch.inf)
    total, out = torch.zeros_like(most), rows.new_zeros(len(rows), values.shape[-1])
    for j, pair in pairs:
        table, _ = pair.raised(torch.mm(rows, keys[j].T, out=pair.work.tables[0]))
        pair.masked(table, -torch.inf)
        higher = torch.maximum(most, table.amax(-1, keepdim=True))
        shift = higher.masked_fill(higher == -torch.inf, 0.0)
        weights = table.sub_(shift).exp_()
        factor = most.sub_(shift).exp_()
        total.mul_(factor).add_(weights.sum(-1, keepdim=True))
        keep = pair.dropped(rows.dtype)
        if keep is not None:
            weights.mul_(keep)
        out.mul_(factor).addmm_(weights, values[j])
        most = higher
    nothing = total == 0
    lse = total.log().add_(most).masked_fill_(nothing, -torch.inf)
    return out.div_(total.masked_fill(nothing, 1.0)), lse, most


def _slopes(
    scored: tuple[Tensor, Tensor],
    weighed: tuple[Tensor, Tensor],
    shift: tuple[Tensor, Tensor],
    pairs: _Pairs,
) -> tuple[Tensor, Tensor]:
    """Weights and the gradients of scores, [own rows, walked rows].

    Args:
        scored: own and walked rows of the product q k^T, of which q is scaled.
        weighed: own and walked rows of dout v^T.
        shift: lse and delta, along the side of the queries.
    """
    (lse, delta), (first, second) = shift, pairs.work.tables
    table, slope = pairs.raised(torch.mm(scored[0], scored[1].T, out=first))
    p = pairs.masked(table.sub_(lse).exp_(), 0.0)
    ds = torch.mm(weighed[0], weighed[1].T, out=second)
    keep, weights = pairs.dropped(p.dtype), p
    if keep is not None:
        ds.mul_(keep)
        weights = p * keep
    ds.sub_(delta).mul_(p)
    return weights, ds if slope is None else ds.mul_(slope)


def _in_blocks(rows: Tensor, slots: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """Rows at their places in fresh memory, fp32 or wider, 0 elsewhere: [blocks, rows, width]."""
    width = -(-rows.shape[-1] // WIDTH_UNIT) * WIDTH_UNIT
    found = torch.zeros(shape[0] * shape[1], width, dtype=accumulator_dtype(rows.dtype))
    target = found[:, : rows.shape[-1]]
    if slots is None:
        target[: len(rows)] = rows
    else:
        target[slots] = rows.to(found.dtype)
    return found.view(*shape, width)


def _placed(scores: Scores | None) -> Scores:
    assert scores is not None and scores.places is not None, "whole rows have places"
    return scores


def _delivered(found: Results, into: Results | None) -> Results:
    """Write results where they are wanted: of whole rows, nothing is there yet."""
    if into is None:
        return found
    for target, x in zip(into, found, strict=True):
        target.copy_(x)
    return into


@contextmanager
def one_thread() -> Iterator[None]:
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

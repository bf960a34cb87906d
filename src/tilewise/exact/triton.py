"""Attention of whole rows by our Triton kernels, on CUDA: fixed blocks, and every block masked.

Rows are packed into memory of their own: own rows document by document, walked rows at their places
in the document. A program has one block of own rows and one loop over the walked blocks, in which
each pair is masked, so that a row's bits do not depend on whether its neighbours see the same
blocks. Nothing is added atomically.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.exact.blocks import BlockSizes, Document, documents
from tilewise.exact.kernel import Results, WholeRowsKernel, position_bytes
from tilewise.kernels.protocol import Operands, Scores
from tilewise.kernels.triton import kernel as launches
from tilewise.kernels.triton.kernel import Lists, TritonSlices
from tilewise.kernels.triton.tuning import LaunchBlocks
from tilewise.kernels.triton.views import view_of
from tilewise.kernels.triton.work_list import UNIT
from tilewise.masks.base import Mask
from tilewise.plan.ir import Side
from tilewise.tiles.calls import KernelCall, Kind


@dataclass(frozen=True)
class TritonKernel(WholeRowsKernel):
    """The Triton kernels on lists of work that only positions decide.

    Attributes:
        kernel: the provider, whose table says which blocks a dtype, a width and a device take.
    """

    kernel: TritonSlices = field(default_factory=TritonSlices)
    name: str = "triton"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Results:
        out = _zeros(q, v.shape[-1])
        lse = torch.full_like(out[..., 0], -torch.inf)
        results = (out, lse, lse.clone()) if scores.max_logit else (out, lse)
        blocks = self.kernel._tuning(q, v).forward
        forward = launches._kernels()[0]
        scale = (scores.softcap or scores.scale) * math.log2(math.e)
        for part in self._parts(Side.Q, blocks, q, k, scores):
            rows, keys, values = part.own(q), part.walked(k), part.walked(v)
            found = [_zeros(rows, v.shape[-1]), *(_zeros(rows)[..., 0] for _ in results[1:])]
            views = [view_of(x) for x in (rows, keys, values, *found)]
            views += views[-1:] * (6 - len(views))
            part.launch(blocks)(forward, views, (len(rows),), scale, PEAKS=scores.max_logit)
            for x, y in zip(results, found, strict=True):
                part.put(x, y)
        return results

    def query_gradients(self, operands: Operands, scores: Scores) -> Tensor:
        q, k, v, dout, lse, delta = operands
        dq, blocks = _zeros(q), self.kernel._tuning(q, v).dq
        by_rows = launches._kernels()[1]
        for part in self._parts(Side.Q, blocks, q, k, scores):
            rows, drows = part.own(q), part.own(dout)
            statistics = launches._row_statistics(part.own(lse, -torch.inf), part.own(delta))
            found = _zeros(rows)
            operand_views = [view_of(x) for x in (rows, part.walked(k), part.walked(v), drows)]
            sizes = len(rows), statistics.shape[-1]
            views = *operand_views, view_of(found), statistics
            part.launch(blocks)(by_rows, views, sizes, scores.scale)
            part.put(dq, found)
        return dq

    def key_gradients(self, operands: Operands, scores: Scores) -> tuple[Tensor, Tensor]:
        q, k, v, dout, lse, delta = operands
        dk, dv, passes = _zeros(k), _zeros(v), self.kernel._tuning(q, v).keys
        by_keys = launches._kernels()[2]
        for number, blocks in enumerate(passes):
            made = {"DK": number == 0, "DV": number == len(passes) - 1, "DQ": False, "UNIT": UNIT}
            for part in self._parts(Side.KV, blocks, q, k, scores):
                keys, values = part.own(k), part.own(v)
                rows, drows = part.walked(q), part.walked(dout)
                walked = part.walked(lse, -torch.inf), part.walked(delta)
                statistics = launches._row_statistics(*walked)
                found = _zeros(keys), _zeros(values)
                tensors = rows, keys, values, drows, rows, *found
                views = *(view_of(x) for x in tensors), statistics
                sizes = len(keys), statistics.shape[-1]
                part.launch(blocks)(by_keys, views, sizes, scores.scale, **made)
                for x, y, is_made in zip((dk, dv), found, (made["DK"], made["DV"]), strict=True):
                    if is_made:
                        part.put(x, y)
        return dk, dv

    def _parts(
        self, own: Side, blocks: LaunchBlocks, q: Tensor, k: Tensor, scores: Scores
    ) -> Iterator[_Part]:
        """The rows of a call, for all heads at once or for each KV head that has its own mask."""
        sizes = BlockSizes(blocks.rows, blocks.keys)
        sizes = sizes if own is Side.Q else BlockSizes(*reversed(sizes))
        shared, positions = q.shape[2] // k.shape[2], position_bytes(scores)
        by_head = hasattr(self.mask, "heads")
        for kv_head in range(k.shape[2] if by_head else 1):
            mask = self.mask_of(kv_head, shared, scores)
            packed = _packed(mask, self.mask, self.num_tokens, own, positions, sizes, q.device)
            heads = (kv_head, kv_head + 1) if by_head else (0, k.shape[2])
            if packed.num_own:
                yield _Part(packed, own, heads, k.shape[2], shared, scores)


class _Packed(NamedTuple):
    """Rows of all documents of a call, packed on a device.

    Attributes:
        own, walked: rows of the operands; own_slots, walked_slots: where they are packed.
        num_own, num_walked: rows of the packed tensors.
        own_positions, walked_positions: of all packed rows.
    """

    own: Tensor
    own_slots: Tensor
    num_own: int
    own_positions: Tensor
    walked: Tensor
    walked_slots: Tensor
    num_walked: int
    walked_positions: Tensor
    lists: Lists


class _Part(NamedTuple):
    """Packed rows of some KV heads [first, last) of a call, and of the query heads that share them.

    Attributes:
        num_kv_heads: of the call.
    """

    packed: _Packed
    own_side: Side
    heads: tuple[int, int]
    num_kv_heads: int
    shared: int
    scores: Scores

    def own(self, x: Tensor, blank: float = 0.0) -> Tensor:
        packed = self.packed
        return _put(self._heads(x), packed.own, packed.own_slots, packed.num_own, blank)

    def walked(self, x: Tensor, blank: float = 0.0) -> Tensor:
        packed = self.packed
        return _put(self._heads(x), packed.walked, packed.walked_slots, packed.num_walked, blank)

    def put(self, x: Tensor, found: Tensor) -> None:
        """Write the own rows of a result."""
        packed = self.packed
        self._heads(x)[packed.own] = found[packed.own_slots]

    def launch(self, blocks: LaunchBlocks) -> _ListedLaunch:
        packed, scores = self.packed, self.scores
        assert scores.places is not None
        positions = packed.own_positions, packed.walked_positions
        q, k = positions if self.own_side is Side.Q else positions[::-1]
        first = scores.places.first_head + self.heads[0] * self.shared
        placed = scores._replace(
            places=scores.places._replace(q_positions=q, k_positions=k, first_head=first)
        )
        call = KernelCall(((0, len(q)),), ((0, len(k)),), Kind.FULL)
        of_keys = self.own_side is Side.KV
        return _ListedLaunch(blocks, call, False, placed, of_keys, packed.lists)

    def _heads(self, x: Tensor) -> Tensor:
        times = x.shape[2] // self.num_kv_heads
        return x[:, :, self.heads[0] * times : self.heads[1] * times]


@dataclass(frozen=True)
class _ListedLaunch(launches.Launch):
    """A launch on lists that are there already."""

    lists: Any = None

    def work(self, own: int, others: int, device: torch.device) -> tuple[Lists, int]:
        return self.lists, len(self.lists.items)


@lru_cache(maxsize=32)
def _packed(
    mask: Mask,
    whole_mask: Mask,
    num_tokens: tuple[int, int],
    own: Side,
    positions: tuple[bytes, bytes],
    sizes: BlockSizes,
    device: torch.device,
) -> _Packed:
    found = documents(mask, whole_mask, num_tokens, own, positions, sizes)
    columns: list[tuple[np.ndarray, ...]] = []
    runs = _Runs(sizes.own)
    num_own = num_walked = 0
    for x in found:
        own_slots, walked_slots = num_own + np.arange(len(x.own)), num_walked + x.slots
        own_positions = x.in_own_blocks(x.own_positions).reshape(-1)
        walked_rows = x.num_walked_blocks * sizes.walked
        walked_positions = x.start + np.arange(walked_rows)
        columns.append((x.own, own_slots, own_positions, x.walked, walked_slots, walked_positions))
        runs.add(x, num_walked)
        num_own, num_walked = num_own + len(own_positions), num_walked + walked_rows
    if not columns:
        columns.append((np.zeros(0, np.int64),) * 6)
    own_rows, own_slots, own_at, walked, walked_slots, walked_at = (
        torch.from_numpy(np.concatenate(x)).to(device) for x in zip(*columns, strict=True)
    )
    lists = Lists(*(torch.from_numpy(x).to(device) for x in runs.lists()))
    return _Packed(
        own_rows, own_slots, num_own, own_at, walked, walked_slots, num_walked, walked_at, lists
    )


class _Runs:
    """Lists of work: of each own block the walked places from the first to the last that it meets.

    A row with several intervals has a run for each, in ascending order.
    """

    def __init__(self, own: int):
        self._own = own
        self._items: list[tuple[int, int, int]] = []  # work, first and end of the runs of a block
        self._masked: list[tuple[int, int]] = []
        self._intervals: list[np.ndarray] = []

    def add(self, document: Document, first: int) -> None:
        """Add a document whose walked rows begin at a packed row."""
        walked = document.sizes.walked
        low, high = (document.in_own_blocks(x) for x in (document.low, document.high))
        for block in range(document.num_own_blocks):
            begin, work = len(self._masked), 0
            for x, y in zip(low[:, block], high[:, block], strict=True):
                meets = x < y
                if not meets.any():
                    continue
                start = int(x[meets].min()) // walked * walked
                stop = -(-int(y.max()) // walked) * walked
                self._masked.append((first + start, first + stop))
                self._intervals.append(np.where(meets, np.stack([x, y]) + first, 0))
                work += stop - start
            self._items.append((work, begin, len(self._masked)))

    def lists(self) -> tuple[np.ndarray, ...]:
        """As `Lists` has them: no run is a full one, and most work comes first."""
        works = np.array([work for work, _, _ in self._items], np.int64)
        items = [
            (block, 0, 0, *self._items[block][1:]) for block in np.argsort(-works, kind="stable")
        ]
        return (
            np.array(items, np.int32).reshape(-1, 5),
            np.zeros((0, 2), np.int32),
            np.array(self._masked, np.int32).reshape(-1, 2),
            np.array(self._intervals, np.int32).reshape(-1, 2, self._own),
        )


def _put(x: Tensor, rows: Tensor, slots: Tensor, size: int, blank: float) -> Tensor:
    found = x.new_full((size, *x.shape[1:]), blank)
    found[slots] = x[rows]
    return found


def _zeros(like: Tensor, width: int | None = None) -> Tensor:
    shape = like.shape if width is None else (*like.shape[:-1], width)
    return torch.zeros(shape, dtype=torch.float32, device=like.device)

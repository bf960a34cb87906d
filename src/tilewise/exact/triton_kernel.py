"""The kernel of whole rows on CUDA: one launch of Triton for a side, over all documents and heads.

Blocks have one shape for all calls of a dtype and width, because the order of a row's sums follows
from it. `kernels/triton/whole_rows.py` has the device's part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.exact.blocks import Array, BlockSizes, DocumentRows, documents
from tilewise.exact.kernel import Results, WholeRowsKernel, position_bytes
from tilewise.kernels.protocol import Operands, Scores
from tilewise.kernels.triton.kernel import block_width, empty_rows, score_rule
from tilewise.kernels.triton.launch import KernelLaunch, launch
from tilewise.kernels.triton.views import in_steps, view_of
from tilewise.masks.base import Mask
from tilewise.plan.ir import Side

WARPS = 4


class BlockLists(NamedTuple):
    """The blocks of a call on a device, as a kernel's argument.

    Attributes:
        own, own_positions: int32 [own blocks * rows], rows of the operands, -1 behind the last one
            of a document.
        walked: int32 [walked blocks * rows], -1 where a row is absent.
        starts: int32 [walked blocks], the position of each one's first place.
        meets, bounds: walked blocks that own block i meets: meets[bounds[i]:bounds[i + 1]].
        intervals: int32 [own blocks, depth, 2, rows], walked places that each own row meets.
    """

    own: Tensor
    own_positions: Tensor
    walked: Tensor
    starts: Tensor
    meets: Tensor
    bounds: Tensor
    intervals: Tensor


class TritonKernel(WholeRowsKernel):
    """Products of blocks on tensor cores, sums in fp32."""

    name = "triton"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Results:
        out = empty_rows(q, v.shape[-1]).zero_()
        lse = torch.full_like(out[..., 0], -torch.inf)
        largest = lse.clone() if scores.max_logit else lse
        for part, lists in self._parts(Side.Q, q, k, v, scores):
            tensors = [
                *part.of_queries(q),
                *part.of_keys(k, v),
                *part.of_queries(out, lse, largest),
            ]
            part.run(_kernels()[0], tensors, lists, PEAKS=scores.max_logit)
        return (out, lse, largest) if scores.max_logit else (out, lse)

    def query_gradients(self, operands: Operands, scores: Scores) -> Tensor:
        q, k, v, dout, lse, delta = operands
        dq = empty_rows(q).zero_()
        for part, lists in self._parts(Side.Q, q, k, v, scores):
            rows = *part.of_queries(q), *part.of_keys(k, v), *part.of_queries(dout, dq, lse, delta)
            part.run(_kernels()[1], rows, lists, scores.scale)
        return dq

    def key_gradients(self, operands: Operands, scores: Scores) -> tuple[Tensor, Tensor]:
        q, k, v, dout, lse, delta = operands
        dk, dv = empty_rows(k).zero_(), empty_rows(v).zero_()
        for part, lists in self._parts(Side.KV, q, k, v, scores):
            rows = *part.of_queries(q), *part.of_keys(k, v), *part.of_queries(dout)
            rows = *rows, *part.of_keys(dk, dv), *part.of_queries(lse, delta)
            part.run(_kernels()[2], rows, lists, scores.scale)
        return dk, dv

    def _parts(
        self, own: Side, q: Tensor, k: Tensor, v: Tensor, scores: Scores
    ) -> Iterator[tuple[_Part, _Placed]]:
        """KV heads side by side that have one mask, and their blocks, if any meet."""
        shared, positions = q.shape[2] // k.shape[2], position_bytes(scores)
        sizes, start = block_sizes(max(q.shape[-1], v.shape[-1]), q.dtype), 0
        masks = (self.mask_of(head, shared, scores) for head in range(k.shape[2]))
        for mask, heads in groupby(masks):
            stop = start + len([*heads])
            arguments = mask, self.mask, self.num_tokens, own, positions, sizes
            placed = _lists_of(*arguments, q.device)
            if placed is not None:
                yield _Part(own, start, stop, shared, sizes, scores), placed
            start = stop


class _Placed(NamedTuple):
    lists: BlockLists
    num_own_blocks: int
    depth: int


class _Part(NamedTuple):
    """KV heads [start, stop) of a call, with their query heads.

    Attributes:
        own: the side whose rows are computed.
        shared: query heads of a KV head.
    """

    own: Side
    start: int
    stop: int
    shared: int
    sizes: BlockSizes
    scores: Scores

    def of_queries(self, *tensors: Tensor) -> list[Tensor]:
        return [x[:, :, self.start * self.shared : self.stop * self.shared] for x in tensors]

    def of_keys(self, *tensors: Tensor) -> list[Tensor]:
        return [x[:, :, self.start : self.stop] for x in tensors]

    def run(
        self, kernel: Any, tensors: Sequence[Tensor], placed: _Placed, *extra: float, **more: bool
    ) -> None:
        scores, (lists, num_blocks, depth) = self.scores, placed
        assert scores.places is not None
        first = scores.places.first_head + self.start * self.shared if scores.dropout_p else 0
        rule = score_rule(scores)._replace(q_positions=None, k_positions=None, first_head=first)
        scale = float(scores.softcap or scores.scale) * math.log2(math.e)
        heads = self.stop - self.start if self.own is Side.KV else tensors[0].shape[2]
        facts = kernel, (num_blocks, heads, tensors[0].shape[1]), self.sizes, self.shared
        numbers = lists, scale, *map(float, extra), rule, depth, self.shared
        facts += scores.softcap is not None, (rule[2:5], first) if scores.dropout_p else None
        launch(_computing, tensors, *facts, *more.items(), extra=numbers)


def block_sizes(width: int, dtype: torch.dtype) -> BlockSizes:
    """Rows of blocks: what fits 99 KiB of shared memory, and registers."""
    rows = 64 if width <= 128 else 32
    if dtype == torch.float32:
        rows = 32 if width <= 64 else 16
    return BlockSizes(rows, rows)


def _computing(
    tensors: Sequence[Tensor],
    kernel: Any,
    grid: tuple[int, int, int],
    sizes: BlockSizes,
    shared: int,
    capped: bool,
    drops: Any,
    *more: tuple[str, bool],
) -> KernelLaunch:
    views, step = in_steps([view_of(x) for x in tensors])
    q, _, v, *_ = tensors
    given = {"HEAD_DIM": q.shape[3], "WIDTH": block_width(q), "V_DIM": v.shape[3]}
    given |= {"V_WIDTH": block_width(v), "STEP": step, "OWN": sizes.own, "WALKED": sizes.walked}
    given |= {"CAPPED": capped, "DROPS": drops is not None, "num_warps": WARPS, "num_stages": 1}
    given |= {"enable_fp_fusion": False, **dict(more)}
    return KernelLaunch(kernel, grid, (), given, [x[1:] for x in views])


@lru_cache(maxsize=32)
def _lists_of(
    mask: Mask,
    whole_mask: Mask,
    num_tokens: tuple[int, int],
    own: Side,
    positions: tuple[bytes, bytes],
    sizes: BlockSizes,
    device: torch.device,
) -> _Placed | None:
    """The blocks of a call; None: no row has others. Arguments as of `documents`."""
    found = documents(mask, whole_mask, num_tokens, own, positions, sizes)
    if not found:
        return None
    depth = max(len(x.low) for x in found)
    tables, meets, first_own, first_walked = list[list[Array]](), list[list[Array]](), 0, 0
    for one in found:
        places = np.arange(one.num_walked_blocks) * sizes.walked
        tables.append(
            [
                _padded(one.own, one.num_own_blocks * sizes.own),
                one.in_own_blocks(one.own_positions).ravel(),
                _scattered(one, one.num_walked_blocks * sizes.walked),
                one.start + places,
                _intervals(one, depth, first_walked * sizes.walked),
            ]
        )
        for number, blocks, _ in one.meetings():
            meets.append([first_own + blocks, np.full_like(blocks, first_walked + number)])
        first_own, first_walked = first_own + one.num_own_blocks, first_walked + len(places)
    own_blocks, walked_blocks = (np.concatenate(x) for x in zip(*meets, strict=True))
    order = np.argsort(own_blocks, kind="stable")
    bounds = np.searchsorted(own_blocks[order], np.arange(first_own + 1))
    rows, at, walked, starts, intervals = (np.concatenate(x) for x in zip(*tables, strict=True))
    arrays = rows, at, walked, starts, walked_blocks[order], bounds, intervals.ravel()
    lists = BlockLists(*(torch.from_numpy(x.astype(np.int32)).to(device) for x in arrays))
    return _Placed(lists, first_own, depth)


def _padded(rows: Array, size: int) -> Array:
    return np.pad(rows, (0, size - len(rows)), constant_values=-1)


def _scattered(document: DocumentRows, size: int) -> Array:
    """The rows of walked places."""
    found = np.full(size, -1, np.int64)
    found[document.slots] = document.walked
    return found


def _intervals(document: DocumentRows, depth: int, first: int) -> Array:
    """[own blocks, depth, 2, rows] of a document whose first walked place is one of the call's."""
    ends = np.stack([document.low, document.high]) + first
    ends = np.pad(ends, ((0, 0), (0, depth - ends.shape[1]), (0, 0)))
    return document.in_own_blocks(ends).transpose(2, 1, 0, 3)


@lru_cache(maxsize=1)
def _kernels() -> tuple[Any, Any, Any]:
    from tilewise.kernels.triton import whole_rows

    return whole_rows.attend, whole_rows.query_gradients, whole_rows.key_gradients

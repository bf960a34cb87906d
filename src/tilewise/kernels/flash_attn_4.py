"""The package flash-attn-4, where it is installed: flash attention for Hopper and Blackwell.

It takes the loss's gradient of lse beside dout: rowsum(out * dout) - dlse is delta where out is 0
and dlse is -delta. Not through torch, whose adapter takes two of the five values that it returns.
Two kernels: one makes a call of each rectangle, the other one call of all slices of a tile, by
lists of blocks. Written against 4.0.0b36's sources and tested by a stub of its signatures; both
compile for Hopper and Blackwell without a GPU, and none has run them yet.
"""

import re
from functools import lru_cache
from importlib import import_module, metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewise.kernels.call_cache import CALL_CACHE
from tilewise.kernels.call_masks import block_cells, compiled_intervals, listed_blocks
from tilewise.kernels.protocol import (
    Accumulators,
    Asked,
    Gradients,
    Operands,
    Scores,
    Tensors,
    deliver,
    widened,
)
from tilewise.kernels.self_check import check_kernel
from tilewise.kernels.torch_flash import CudaFlash, FlashRect, batch_first, columns, window
from tilewise.masks.base import Causal, Document, Mask
from tilewise.tiles.calls import KernelCall

OLDEST = "4.0.0b36"
MOST_BLACKWELL = 128  # head_dim, but for keys of 192 with values of up to 128
HOPPER, BLACKWELL = 9, 10  # major compute capabilities
HOPPER_BLOCKS = (128, (128, 128)), (192, (128, 96)), (256, (128, 64))
BLACKWELL_BLOCKS = (128, (256, 128)), (192, (256, 256))
"""The largest head_dim, and rows and keys of a block that both passes of 4.0.0b36 take."""
TRIAL: tuple[Mask, range, range] = (
    Document([0, 260, 800, 850, 1200]) & Causal(),
    range(260, 1060),
    range(810),
)
"""A mask, queries and keys, with full blocks, partial ones, and some without a row or a key."""


class FlashAttn4(CudaFlash):
    """Flash attention 4; values may be of another width, results come in the input dtype."""

    name = "flash_attn_4"
    equal_widths = False

    def unable(self, asked: Asked) -> str | None:
        version = _version()
        if version is None:
            return "flash-attn-4 is not installed"
        if _numbers(version) < _numbers(OLDEST):
            return (
                f"flash-attn-4 ({version}) must be {OLDEST} or later, whose results and sizes of "
                "blocks are known: pip install --pre --upgrade flash-attn-4"
            )
        major = _major()
        if asked.device_type == "cuda" and major not in (HOPPER, BLACKWELL):
            return f"it runs on compute capability 9 and 10, not on {major}"
        if major == BLACKWELL and asked.head_dim > MOST_BLACKWELL and asked.head_dim != 192:
            return f"head_dim ({asked.head_dim}) is over {MOST_BLACKWELL} and not 192, on Blackwell"
        return None

    def beside_dout(self, dout: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        return dout, delta

    def run_forward(
        self, operands: tuple[Tensor, ...], part: FlashRect, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        return _attend(operands, **_options(part, scores))

    def run_backward(
        self, operands: tuple[Tensor, ...], lse: Tensor, part: FlashRect, scores: Scores
    ) -> tuple[Tensor, ...]:
        deterministic = torch.are_deterministic_algorithms_enabled()
        return _differentiate(operands, lse, **_options(part, scores), deterministic=deterministic)


class FlashAttn4Lists(FlashAttn4):
    """Flash attention 4 on all slices of a call at once: lists of full blocks, which it computes
    without a mask, and of partial ones, whose mask reads a table of each row's intervals of keys.

    A call of one slice is a rectangle, as for `FlashAttn4`.

    Args:
        trial: try a small call of the first use of each kind beside the reference.
    """

    name = "flash_attn_4_lists"
    whole_tile = True

    def __init__(self, trial: bool = True) -> None:
        self.trial = trial

    def unable(self, asked: Asked) -> str | None:
        reason = super().unable(asked)
        if reason is None and asked.backward and torch.are_deterministic_algorithms_enabled():
            return (
                f"flash-attn-4 ({_version()}) has no deterministic backward by lists of blocks, "
                "which torch is told to take; 'flash_attn_4' has one"
            )
        return reason

    def attend_into(
        self, qkv: Tensors, call: KernelCall, scores: Scores, into: Accumulators | None
    ) -> Accumulators:
        if len(call.as_slices) < 2:
            return super().attend_into(qkv, call, scores, into)
        q, _, v = qkv
        self._try(q, v, backward=False)
        lists = _lists_of(call, *qkv)
        # tiles of one head each: all heads have the same blocks
        found = _attend(qkv, **lists.options(scores, lists.by_rows), pack_gqa=False)
        out, lse = columns(found[0], v.shape[-1]).transpose(0, 1), found[1].permute(2, 0, 1)
        return deliver((out, lse), into)

    def differentiate_into(
        self, operands: Operands, call: KernelCall, scores: Scores, into: Gradients | None
    ) -> Gradients:
        if len(call.as_slices) < 2:
            return super().differentiate_into(operands, call, scores, into)
        q, k, v, dout, lse, delta = operands
        self._try(q, v, backward=True)
        lists = _lists_of(call, q, k, v)
        options = lists.options(scores, lists.by_keys)
        tensors, statistics = (dout, q, k, v, delta), lse.permute(1, 2, 0).contiguous()
        grads = _differentiate(tensors, statistics, **options)
        dq, dk, dv = (
            columns(x, like.shape[-1]).transpose(0, 1)
            for x, like in zip(grads, (q, k, v), strict=True)
        )
        if into is None:
            return dq, dk, dv
        for total, grad in zip(into, (dq, dk, dv), strict=True):
            total += grad
        return into

    def _try(self, q: Tensor, v: Tensor, backward: bool) -> None:
        if self.trial:
            _prove(q.device, q.dtype, (q.shape[-1], v.shape[-1]), backward)


@lru_cache(maxsize=64)
def _prove(
    device: torch.device, dtype: torch.dtype, widths: tuple[int, int], backward: bool
) -> None:
    """Run a small call by lists beside the reference, once a process for each kind.

    Raises:
        ValueError: naming the version, what is wrong, and what to take in its place.
    """
    kernel, (head_dim, v_head_dim) = FlashAttn4Lists(trial=False), widths
    options: Any = {"v_head_dim": v_head_dim, "backward": backward, "masks": (TRIAL,)}
    try:
        check_kernel(kernel, device.type, dtype, head_dim, **options)
    except ValueError as error:
        raise ValueError(
            f"flash-attn-4 ({_version()}) failed its trial on this {device.type} device: {error}; "
            f"take kernel='flash_attn_4' or 'triton', or install flash-attn-4=={OLDEST}"
        ) from None


class _BlockLists(NamedTuple):
    """Blocks of a call, as the package takes them, and the table that its mask reads.

    Attributes:
        by_rows: of each block of rows the blocks of keys; by_keys: of each block of keys those of
            rows, which backward takes.
        table: `row_intervals`, int32 [depth, 2, rows], with intervals of no key up to a power of 2
            of them, so that few depths are compiled, and rows up to a whole block, which the
            package reads too.
    """

    by_rows: Any
    by_keys: Any
    table: Tensor

    def options(self, scores: Scores, lists: Any) -> dict[str, Any]:
        """Arguments of the package's functions.

        Args:
            lists: by_rows or by_keys.
        """
        return {
            "softmax_scale": scores.scale,
            "mask_mod": _rule(len(self.table)),
            "aux_tensors": [self.table],
            "block_sparse_tensors": lists,
        }


def _lists_of(call: KernelCall, q: Tensor, k: Tensor, v: Tensor) -> _BlockLists:
    """Return a call's lists on the device of q, in blocks of the size that both passes take."""
    width = max(q.shape[-1], v.shape[-1]) if _one_width(q, k) else q.shape[-1]
    sizes = BLACKWELL_BLOCKS if _major() == BLACKWELL else HOPPER_BLOCKS
    block = next(block for most, block in sizes if width <= most)
    key, device = ("flash_attn_4", block), q.device
    return CALL_CACHE.get(call, key, device, lambda: _block_lists(call, block, device))


def _block_lists(
    call: KernelCall, block: tuple[int, int], device: torch.device
) -> tuple[_BlockLists, list[Tensor]]:
    table = compiled_intervals(call, FlashAttn4Lists.name)
    cells = block_cells(table.numpy(), call.num_k, block)
    full = cells == block[0] * block[1]
    partial = (cells > 0) & ~full
    depth, _, rows = table.shape
    spare = (1 << (depth - 1).bit_length()) - depth
    table = F.pad(table, (0, -rows % block[0], 0, 0, 0, spare)).to(device)
    tensors = [table]

    def lists(partial: Any, full: Any) -> Any:
        """Lists are as long as the longest of them."""
        made: dict[str, Tensor] = {}
        for name, blocks in (("mask", partial), ("full", full)):
            count, index = listed_blocks(blocks)
            index = index[:, : max(1, int(count.max()))]
            for kind, x in (("cnt", count), ("idx", index)):
                made[f"{name}_block_{kind}"] = torch.from_numpy(x)[None, None].contiguous()
        made = {name: x.to(device) for name, x in made.items()}
        tensors.extend(made.values())
        return _package("block_sparsity").BlockSparseTensorsTorch(**made, block_size=block)

    return _BlockLists(lists(partial, full), lists(partial.T, full.T), table), tensors


@lru_cache(maxsize=8)
def _rule(depth: int) -> Any:
    """Return the mask of a table of so many intervals a row, in the language that the package
    compiles; its row and key are vectors of one index.
    """
    cutlass, cute = import_module("cutlass"), import_module("cutlass.cute")
    utils = _package("utils")

    @cute.jit
    def allows(batch, head, row, key, seqlen_info, aux_tensors):
        table = aux_tensors[0]
        low = utils.scalar_to_ssa(table[0, 0, row[0]], cutlass.Int32)
        high = utils.scalar_to_ssa(table[0, 1, row[0]], cutlass.Int32)
        inside = (key >= low) & (key < high)
        for i in cutlass.range_constexpr(1, depth):
            low = utils.scalar_to_ssa(table[i, 0, row[0]], cutlass.Int32)
            high = utils.scalar_to_ssa(table[i, 1, row[0]], cutlass.Int32)
            inside = inside | ((key >= low) & (key < high))
        return inside

    return allows


def _attend(operands: tuple[Tensor, ...], **options: Any) -> tuple[Tensor, Tensor]:
    """out [batch, rows, ...] and lse [batch, heads, rows] of q, k, v."""
    q, k, *values = operands
    q, k, v = map(batch_first, (q, k, *_fitting(q, *values)))
    found = _package("interface")._flash_attn_fwd(q, k, v, **options, return_lse=True)
    return found[0], found[1]


def _differentiate(operands: tuple[Tensor, ...], lse: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """dq, dk, dv [batch, rows, ...] of dout, q, k, v and delta."""
    dout, q, k, v, delta = operands
    v, dout = _fitting(q, v, dout)
    if _one_width(q, k):
        q, k, v, dout = widened(max(q.shape[-1], v.shape[-1]), q, k, v, dout)
    q, k, v, dout = map(batch_first, (q, k, v, dout))
    found = _package("interface")._flash_attn_bwd(
        *(q, k, v, torch.zeros_like(dout, memory_format=torch.contiguous_format), dout, lse),
        **options,
        dlse=delta.permute(1, 2, 0).neg().contiguous(),
    )
    return found[:3]


def _options(part: FlashRect, scores: Scores) -> dict[str, Any]:
    # causal stays False: a right side of 0 without a left one says the same
    return {"softmax_scale": scores.scale, "causal": False, **window(part)}


def _one_width(q: Tensor, k: Tensor) -> bool:
    """Return whether backward takes values as wide as keys alone: it does for GQA on Hopper."""
    return q.shape[2] != k.shape[2] and _major() == HOPPER


def _fitting(q: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """Values, and dout, of a width that is compiled beside q's: on Blackwell 128 beside 192.

    Raises:
        ValueError: for wider ones there.
    """
    width, v_width = q.shape[-1], values[0].shape[-1]
    if _major() != BLACKWELL or max(width, v_width) <= MOST_BLACKWELL:
        return values
    if v_width > MOST_BLACKWELL:
        raise ValueError(
            f"v_head_dim ({v_width}) must be at most {MOST_BLACKWELL} beside head_dim ({width}) "
            "for flash-attn-4 on Blackwell; take another kernel"
        )
    return widened(MOST_BLACKWELL, *values)


def _numbers(version: str) -> tuple[int, ...]:
    """4.0.0b36 as 4, 0, 0, 36; a release as later than its betas."""
    first = version.split("+")[0]
    return *map(int, re.findall(r"\d+", first)), *(() if re.search("[a-z]", first) else (1 << 30,))


@lru_cache(maxsize=1)
def _version() -> str | None:
    try:
        return metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return None


def _major() -> int:
    """Return the major compute capability of this device; where there is none, Hopper's."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else HOPPER


def _package(module: str) -> Any:
    return import_module(f"flash_attn.cute.{module}")

"""Our own kernel: all slices of a call in one launch, forward and backward, written in Triton.

Here is the host's part: work lists, blocks and launches. The kernels are in triton_forward.py and
triton_backward.py; triton is imported when the first of them runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.calls import Call
from tilewise.kernels.protocol import Accumulators, Gradients, no_gradients, no_keys
from tilewise.kernels.slices import Same
from tilewise.kernels.work_list import work_list

MAX_PROGRAMS = 65535  # in the second dimension of a CUDA grid


class Blocks(NamedTuple):
    """Rows and keys of a block, and how Triton is to run it."""

    rows: int
    keys: int
    warps: int = 4
    stages: int = 1


class Tuning(NamedTuple):
    """Blocks of the three kernels."""

    forward: Blocks
    rows_backward: Blocks
    keys_backward: Blocks


class Placed(NamedTuple):
    """A work list on a device; see `WorkList`."""

    items: Tensor
    num_busy: int
    full: Tensor
    masked: Tensor
    intervals: Tensor


@dataclass(frozen=True)
class TritonSlices:
    """bf16, fp16 and fp32, head_dim up to 256; yields fp32, the same bits every time.

    Attributes:
        tuning: blocks to use, whatever the device and head_dim (default: `tuning_for`).
    """

    tuning: Tuning | None = None
    name = "triton"
    square_causal = False
    whole_tile = True

    def supports(
        self, device_type: str, dtype: torch.dtype, head_dim: int, backward: bool = True
    ) -> str | None:
        if find_spec("triton") is None:
            return "triton is not installed"
        if device_type == "cpu":
            if not _interprets():
                return "it runs on cuda; on cpu only in Triton's interpreter"
            if dtype == torch.bfloat16:
                return "bfloat16 is wrong in Triton's interpreter"
        elif device_type != "cuda":
            return f"it runs on cuda, not on {device_type}"
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"dtype {dtype} is none of bfloat16, float16, float32"
        if head_dim > 256:
            return f"head_dim ({head_dim}) is over 256"
        return None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: Call,
        scale: float,
        into: Accumulators | None = None,
    ) -> tuple[Tensor, Tensor]:
        if not (len(q) and len(k)):
            return into or no_keys(q, torch.float32)
        out, lse = result = into or (_empty(q), _empty(q[..., 0]))
        # the kernel takes the largest score before it scales, so scale must not be negative
        q, scale = (q, scale) if scale >= 0 else (-q, -scale)
        numbers = *_strides(q, k, v, out), *lse.stride(), len(q)
        launch = _Launch(self._tuning(q).forward, call, into is not None)
        launch(_kernels()[0], (q, k, v, out, lse), numbers, scale * math.log2(math.e))
        return result

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        call: Call,
        scale: float,
        into: Gradients | None = None,
    ) -> Gradients:
        if not (len(q) and len(k)):
            return into or no_gradients(q, k, v)
        dq, dk, dv = grads = into or (_empty(q), _empty(k), _empty(v))
        _, by_rows, by_keys = _kernels()
        # base 2, by head; p = exp2(.. - inf) is 0 on the rows that no key reaches
        lse = lse.masked_fill(lse == -torch.inf, torch.inf).float() * math.log2(math.e)
        operands = q, k, v, dout, *(x.float().permute(1, 2, 0).contiguous() for x in (lse, delta))
        strides, tuning = _strides(q, k, v, dout), self._tuning(q)
        numbers = *strides, *_strides(dq), len(q)
        launch = _Launch(tuning.rows_backward, call, into is not None)
        launch(by_rows, (*operands, dq), numbers, scale)
        numbers = *strides, *_strides(dk, dv), len(q), len(k)
        launch = _Launch(tuning.keys_backward, call, into is not None, of_keys=True)
        launch(by_keys, (*operands, dk, dv), numbers, scale)
        return grads

    def _tuning(self, q: Tensor) -> Tuning:
        return self.tuning or tuning_for(q.shape[-1], q.dtype)


def tuning_for(head_dim: int, dtype: torch.dtype) -> Tuning:
    """Blocks for Hopper and Ampere, sized by what shared memory and registers hold."""
    if dtype == torch.float32:
        small = Blocks(32, 32, 4, 1) if head_dim > 64 else Blocks(64, 32, 4, 2)
        return Tuning(small, small, small)
    if head_dim > 128:
        return Tuning(Blocks(128, 64, 8, 2), Blocks(64, 64, 8, 2), Blocks(64, 64, 8, 1))
    if head_dim > 64:
        return Tuning(Blocks(128, 128, 8, 2), Blocks(128, 64, 8, 2), Blocks(64, 128, 8, 2))
    return Tuning(Blocks(128, 128, 8, 3), Blocks(128, 64, 8, 3), Blocks(64, 128, 8, 3))


@dataclass(frozen=True)
class _Launch:
    """One kernel over the work of a call, added to what is there or written over it."""

    blocks: Blocks
    call: Call
    add: bool
    of_keys: bool = False

    def __call__(
        self, kernel: Any, tensors: tuple[Tensor, ...], numbers: tuple[int, ...], scale: float
    ) -> None:
        q, k = tensors[:2]
        rows, keys, warps, stages = self.blocks
        own, others = (keys, rows) if self.of_keys else (rows, keys)
        work = _placed(Same(self.call), own, others, self.of_keys, q.device)
        num_items = work.num_busy if self.add else len(work.items)
        heads = (k if self.of_keys else q).shape[2]
        programs = q.shape[1] * heads
        if programs > MAX_PROGRAMS:
            raise ValueError(
                f"batch times heads ({q.shape[1]} x {heads}) must be at most {MAX_PROGRAMS}; "
                "split the batch"
            )
        if not num_items * programs:
            return
        with torch.cuda.device_of(q):
            kernel[(num_items, programs)](
                *tensors,
                *(work.items, work.full, work.masked, work.intervals),
                *(*numbers, heads, q.shape[2] // k.shape[2], scale),
                HEAD_DIM=q.shape[3],
                WIDTH=max(16, 1 << (q.shape[3] - 1).bit_length()),
                ROWS=rows,
                KEYS=keys,
                ADD=self.add,
                num_warps=warps,
                num_stages=stages,
                enable_fp_fusion=True,
            )


@lru_cache(maxsize=4096)
def _placed(call: Same, own: int, others: int, of_keys: bool, device: torch.device) -> Placed:
    work = work_list(call.call, own, others, of_keys)
    items, full, masked, intervals = (
        torch.from_numpy(x).to(device) for x in (work.items, *work[2:])
    )
    return Placed(items, work.num_busy, full, masked, intervals)


def _kernels() -> tuple[Any, Any, Any]:
    """Forward, dq, and dk with dv."""
    from tilewise.kernels.triton_backward import keys_backward, rows_backward
    from tilewise.kernels.triton_forward import forward

    return forward, rows_backward, keys_backward


def _interprets() -> bool:
    """Whether Triton's interpreter is on, which runs kernels on the CPU."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Of rows, batch and heads; head_dim has stride 1."""
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=torch.float32, device=like.device)

"""Our own kernel: all slices of a call in one launch, forward and backward, written in Triton.

Here is the host's part: work lists and launches. The kernels are in triton_forward.py and
triton_backward.py; triton is imported when the first of them runs.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.kernels.call_masks import Same
from tilewise.kernels.protocol import Accumulators, Gradients, no_gradients, no_keys
from tilewise.kernels.triton.tuning import LaunchBlocks, Tuning, tuning_for
from tilewise.kernels.triton.work_list import UNIT, work_list
from tilewise.tiles.calls import KernelCall

MAX_PROGRAMS = 65535  # in the second dimension of a CUDA grid
_STEP = 128  # rows that one program of row_statistics does


class TensorView(NamedTuple):
    """A tensor [rows, batch, heads] or [.., head_dim] as a kernel's argument; head_dim is dense."""

    base: Tensor
    row: int
    batch: int
    head: int


class Lists(NamedTuple):
    """A work list on a device, as a kernel's argument; see `WorkList`."""

    items: Tensor
    full: Tensor
    masked: Tensor
    intervals: Tensor


@dataclass(frozen=True)
class TritonSlices:
    """bf16, fp16 and fp32, head_dim up to 256; yields fp32.

    Attributes:
        tuning: blocks to use, whatever the device and head_dim (default: `tuning_for`).
        deterministic: True: the same bits each time. False: dq by atomic additions, where the
            tuning has that. None: what torch.use_deterministic_algorithms says at the call.
    """

    tuning: Tuning | None = None
    deterministic: bool | None = None
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
        call: KernelCall,
        scale: float,
        into: Accumulators | None = None,
    ) -> tuple[Tensor, Tensor]:
        if not (len(q) and len(k)):
            return into or no_keys(q, torch.float32)
        out, lse = result = into or (_empty(q), _empty(q[..., 0]))
        # the kernel takes the largest score before it scales: scale must be positive
        q, scale = (q, scale) if scale > 0 else (-q, -scale) if scale else (torch.zeros_like(q), 1)
        launch = _Launch(self._tuning(q).forward, call, into is not None)
        views = [_view(x) for x in (q, k, v, out, lse)]
        launch(_kernels()[0], views, (len(q),), scale * math.log2(math.e))
        return result

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
        into: Gradients | None = None,
    ) -> Gradients:
        if not (len(q) and len(k)):
            return into or no_gradients(q, k, v)
        tuning, add = self._tuning(q), into is not None
        at_once = None if self._is_deterministic() else tuning.at_once
        grads = into or (_empty(q).zero_() if at_once else _empty(q), _empty(k), _empty(v))
        _, by_rows, by_keys, _ = _kernels()
        statistics = _row_statistics(lse, delta)
        *operands, dq, dk, dv = (_view(x) for x in (q, k, v, dout, *grads))
        padded = statistics.shape[-1]
        if not at_once:
            launch = _Launch(tuning.dq, call, add)
            launch(by_rows, (*operands, dq, statistics), (len(q), padded), scale)
        passes = (at_once,) if at_once else tuning.keys
        for i, blocks in enumerate(passes):
            made = {"DK": i == 0, "DV": i == len(passes) - 1, "DQ": bool(at_once), "UNIT": UNIT}
            launch = _Launch(blocks, call, add, of_keys=True)
            views = *operands, dq, dk, dv, statistics
            launch(by_keys, views, (len(k), padded), scale, **made)
        return grads

    def _tuning(self, q: Tensor) -> Tuning:
        major = _major(q.device) if q.is_cuda else 9
        return self.tuning or tuning_for(q.shape[-1], q.dtype, major)

    def _is_deterministic(self) -> bool:
        if self.deterministic is None:
            return torch.are_deterministic_algorithms_enabled()
        return self.deterministic


@dataclass(frozen=True)
class DeterministicTritonSlices(TritonSlices):
    """The same bits each time, by a name of its own: to be chosen, and measured, as a kernel."""

    deterministic: bool | None = True
    name = "triton_deterministic"


@dataclass(frozen=True)
class _Launch:
    """One kernel over the work of a call, added to what is there or written over it."""

    blocks: LaunchBlocks
    call: KernelCall
    add: bool
    of_keys: bool = False

    def __call__(
        self, kernel: Any, views: Any, sizes: tuple[int, ...], scale: float, **options: Any
    ) -> None:
        (q, *_), (k, *_) = views[:2]
        rows, keys, warps, stages, registers = self.blocks
        own, others = (keys, rows) if self.of_keys else (rows, keys)
        lists, num_busy = _placed(Same(self.call), own, others, self.of_keys, q.device)
        num_items = num_busy if self.add else len(lists.items)
        heads = (k if self.of_keys else q).shape[2]
        programs = q.shape[1] * heads
        if programs > MAX_PROGRAMS:
            raise ValueError(
                f"batch times heads ({q.shape[1]} x {heads}) must be at most {MAX_PROGRAMS}; "
                "split the batch"
            )
        if not num_items * programs:
            return
        if registers:
            options["maxnreg"] = registers
        with torch.cuda.device_of(q):
            kernel[(num_items, programs)](
                *(*views, lists, *sizes, heads, q.shape[2] // k.shape[2], scale),
                HEAD_DIM=q.shape[3],
                WIDTH=max(16, 1 << (q.shape[3] - 1).bit_length()),
                ROWS=rows,
                KEYS=keys,
                ADD=self.add,
                num_warps=warps,
                num_stages=stages,
                enable_fp_fusion=True,
                **options,
            )


def _row_statistics(lse: Tensor, delta: Tensor) -> Tensor:
    """[batch, heads, 2, padded] lse in base 2 and delta; blocks of rows may end past the last."""
    num_rows, batch, heads = lse.shape
    num_steps = -(-num_rows // _STEP) + 1
    shape = batch, heads, 2, num_steps * _STEP
    statistics = torch.empty(shape, dtype=torch.float32, device=lse.device)
    several = min(16, 1 << (heads - 1).bit_length())
    with torch.cuda.device_of(lse):
        _kernels()[3][(num_steps, -(-heads // several), batch)](
            *(_view(lse), _view(delta), statistics, num_rows, shape[-1], heads),
            ROWS=_STEP,
            HEADS=several,
        )
    return statistics


@lru_cache(maxsize=4096)
def _placed(
    call: Same, own: int, others: int, of_keys: bool, device: torch.device
) -> tuple[Lists, int]:
    """A call's lists, and how many of their items have work."""
    work = work_list(call.call, own, others, of_keys)
    lists = (torch.from_numpy(x).to(device) for x in (work.items, *work[2:]))
    return Lists(*lists), work.num_busy


@lru_cache(maxsize=64)
def _major(device: torch.device) -> int:
    """Of its compute capability."""
    return torch.cuda.get_device_capability(device)[0]


@lru_cache(maxsize=1)
def _kernels() -> tuple[Any, Any, Any, Any]:
    """Forward; dq; dk and dv; row statistics."""
    from tilewise.kernels.triton import backward
    from tilewise.kernels.triton.forward import forward

    return forward, backward.rows_backward, backward.keys_backward, backward.row_statistics


def _interprets() -> bool:
    """Whether Triton's interpreter is on, which runs kernels on the CPU."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def _view(x: Tensor) -> TensorView:
    return TensorView(x, *x.stride()[:3])


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=torch.float32, device=like.device)

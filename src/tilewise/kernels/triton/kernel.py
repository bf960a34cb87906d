"""Our own kernel: all slices of a call in one launch, forward and backward, written in Triton.

Here is the host's part: work lists and launches. The kernels are in forward.py and backward.py;
triton is imported when the first of them runs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.kernels.call_cache import CALL_CACHE
from tilewise.kernels.dropout import threshold
from tilewise.kernels.protocol import (
    Accumulators,
    Asked,
    Gradients,
    Operands,
    ProvidedKernel,
    Scores,
    Tensors,
)
from tilewise.kernels.triton.launch import KernelLaunch, launch
from tilewise.kernels.triton.tuning import LaunchBlocks, Tuning, tuning_for
from tilewise.kernels.triton.views import in_steps, view_of
from tilewise.kernels.triton.work_list import unit_of, work_list
from tilewise.plan.row_ranges import count_rows
from tilewise.tiles.calls import KernelCall, Kind

MAX_PROGRAMS = 65535  # in the second dimension of a CUDA grid
_STEP = 128  # rows that one program of row_statistics does


class Lists(NamedTuple):
    """A work list on a device, as a kernel's argument; see `WorkList`."""

    items: Tensor
    full: Tensor
    masked: Tensor
    intervals: Tensor


class ScoreRule(NamedTuple):
    """The rule by which kernels change scores and weights, as their argument; see `Scores`.

    Attributes:
        inner, outer: cap(scale s) log2(e) = outer tanh(inner s).
        threshold, growth: weights whose word of Philox is below it are dropped, others grow.
    """

    inner: float = 0.0
    outer: float = 0.0
    seed: int = 0
    threshold: int = 0
    growth: float = 1.0
    q_positions: Tensor | None = None
    k_positions: Tensor | None = None
    first_head: int = 0


@dataclass(frozen=True)
class TritonSlices(ProvidedKernel):
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
    lists = True
    device = None
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    has = ("softcap", "dropout_p", "return_max_logit")

    def unable(self, asked: Asked) -> str | None:
        if find_spec("triton") is None:
            return "triton is not installed"
        if asked.device_type == "cpu":
            if not _interprets():
                return "it runs on cuda; on cpu only in Triton's interpreter"
            if asked.dtype == torch.bfloat16:
                return "bfloat16 is wrong in Triton's interpreter"
        elif asked.device_type != "cuda":
            return f"it runs on cuda, not on {asked.device_type}"
        return None

    def attend_into(
        self, qkv: Tensors, call: KernelCall, scores: Scores, into: Accumulators | None
    ) -> Accumulators:
        q, k, v = qkv
        out, lse, *largest = result = into or (
            empty_rows(q, v.shape[-1]),
            *(empty_rows(q[..., 0]) for _ in range(1 + scores.max_logit)),
        )
        # the kernel takes the largest score before it scales: scale must be positive
        scale = scores.scale
        q, scale = (q, scale) if scale > 0 else (-q, -scale) if scale else (torch.zeros_like(q), 1)
        run = _Launch(self._tuning(q, v).forward, call, into is not None, scores)
        tensors = q, k, v, out, lse, largest[0] if largest else lse
        scale = scores.softcap or scale
        run(_kernels()[0], tensors, (), scale * math.log2(math.e), PEAKS=bool(largest))
        return result

    def differentiate_into(
        self, operands: Operands, call: KernelCall, scores: Scores, into: Gradients | None
    ) -> Gradients:
        q, k, v, dout, lse, delta = operands
        tuning, add = self._tuning(q, v), into is not None
        at_once = None if self._is_deterministic() else tuning.at_once
        grads = into or (
            empty_rows(q).zero_() if at_once else empty_rows(q),
            empty_rows(k),
            empty_rows(v),
        )
        if at_once:
            for start, stop in call.fresh[0]:
                grads[0][start:stop].zero_()
        _, by_rows, by_keys, _ = _kernels()
        statistics = _row_statistics(lse, delta)
        rows, (dq, dk, dv), padded = (q, k, v, dout), grads, statistics.shape[-1]
        if not at_once:
            run = _Launch(tuning.dq, call, add, scores)
            run(by_rows, (*rows, dq), (padded,), scores.scale, statistics)
        passes = (at_once,) if at_once else tuning.keys
        for i, blocks in enumerate(passes):
            parts = {"DK": i == 0, "DV": i == len(passes) - 1, "DQ": bool(at_once)}
            run = _Launch(blocks, call, add, scores, of_keys=True)
            made, unit = (*rows, dq, dk, dv), unit_of(call)
            run(by_keys, made, (padded,), scores.scale, statistics, UNIT=unit, **parts)
        return grads

    def _tuning(self, q: Tensor, v: Tensor) -> Tuning:
        major = _major(q.device) if q.is_cuda else 9
        return self.tuning or tuning_for(max(q.shape[-1], v.shape[-1]), q.dtype, major)

    def _is_deterministic(self) -> bool:
        if self.deterministic is None:
            return torch.are_deterministic_algorithms_enabled()
        return self.deterministic


@dataclass(frozen=True)
class DeterministicTritonSlices(TritonSlices):
    """The slice kernel that gives the same bits each time; its own name lets it be chosen and
    measured.
    """

    deterministic: bool | None = True
    name = "triton_deterministic"


@dataclass(frozen=True)
class _Launch:
    """Launches one Triton kernel on all work of a call, with its blocks and lists of work.

    Attributes:
        add: add to the tensors that are there; False: write over them.
        of_keys: a program computes a block of keys; False: a block of rows.
    """

    blocks: LaunchBlocks
    call: KernelCall
    add: bool
    scores: Scores
    of_keys: bool = False

    def __call__(
        self,
        kernel: Any,
        tensors: Sequence[Tensor],
        sizes: tuple[int, ...],
        scale: float,
        *extra: Tensor,
        **options: Any,
    ) -> None:
        q, k = tensors[:2]
        rows, keys, *_ = self.blocks
        own, others = (keys, rows) if self.of_keys else (rows, keys)
        key = "triton", own, others, self.of_keys
        lists, num_busy = CALL_CACHE.get(
            self.call, key, q.device, lambda: _placed(self.call, *key[1:], q.device)
        )
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
        rule, drops = score_rule(self.scores), self.scores.dropout_p > 0
        facts = kernel, self.blocks, (num_items, programs), self.add and not self._only_writes()
        facts += self.scores.softcap is not None, (rule[2:5], rule[7]) if drops else None
        rest = *extra, lists, *sizes, heads, q.shape[2] // k.shape[2], float(scale), rule
        launch(_attending, tensors, *facts, *options.items(), extra=rest)

    def _only_writes(self) -> bool:
        """Return whether no row, or key, of a call of lists has results that are added."""
        ranges, fresh = self.call.sides[self.of_keys], self.call.fresh[self.of_keys]
        return self.call.kind is Kind.LISTS and count_rows(ranges) == count_rows(fresh)


def _attending(
    tensors: Sequence[Tensor],
    kernel: Any,
    blocks: LaunchBlocks,
    grid: tuple[int, int],
    add: bool,
    capped: bool,
    drops: Any,
    *options: tuple[str, Any],
) -> KernelLaunch:
    views, step = in_steps([view_of(x) for x in tensors])
    rows, keys, warps, stages, registers = blocks
    q, _, v, *_ = tensors
    given = {"HEAD_DIM": q.shape[3], "WIDTH": block_width(q), **dict(options)}
    given |= {"V_DIM": v.shape[3], "V_WIDTH": block_width(v), "ROWS": rows, "KEYS": keys}
    given |= {"ADD": add, "CAPPED": capped, "DROPS": drops is not None, "STEP": step}
    given |= {"num_warps": warps, "num_stages": stages}
    given |= {"maxnreg": registers} if registers else {}
    return KernelLaunch(kernel, (*grid, 1), (), given, [x[1:] for x in views])


def score_rule(scores: Scores) -> ScoreRule:
    rule = ScoreRule()
    if scores.softcap is not None:
        inner, outer = scores.scale / scores.softcap, scores.softcap * math.log2(math.e)
        rule = rule._replace(inner=inner, outer=outer)
    if scores.dropout_p:
        assert scores.places is not None
        drops = threshold(scores.dropout_p), 1 / (1 - scores.dropout_p)
        rule = ScoreRule(*rule[:2], scores.dropout_seed, *drops, *scores.places)
    return rule


def block_width(x: Tensor) -> int:
    """Columns of a block: a power of 2."""
    return max(16, 1 << (x.shape[3] - 1).bit_length())


def _row_statistics(lse: Tensor, delta: Tensor) -> Tensor:
    """[batch, heads, 2, padded] lse in base 2 and delta; blocks of rows may end past the last."""
    num_rows, batch, heads = lse.shape
    num_steps = -(-num_rows // _STEP) + 1
    shape = batch, heads, 2, num_steps * _STEP
    statistics = torch.empty(shape, dtype=torch.float32, device=lse.device)
    several = min(16, 1 << (heads - 1).bit_length())
    grid = num_steps, -(-heads // several), batch
    extra = statistics, num_rows, shape[-1], heads
    launch(_stating, (lse, delta), _kernels()[3], grid, several, extra=extra)
    return statistics


def _stating(
    tensors: Sequence[Tensor], kernel: Any, grid: tuple[int, int, int], several: int
) -> KernelLaunch:
    strides = [x.stride()[:3] for x in tensors]
    return KernelLaunch(kernel, grid, (), {"ROWS": _STEP, "HEADS": several}, strides)


def _placed(
    call: KernelCall, own: int, others: int, of_keys: bool, device: torch.device
) -> tuple[tuple[Lists, int], Lists]:
    """Move the work lists of a call to a device.

    Args:
        own, others: sizes of blocks of the side of a program, and of the other side.
        of_keys: a program computes a block of keys; False: a block of rows.
    Returns:
        (the lists, how many of their items have work); and the lists again.
    """
    work = work_list(call, own, others, of_keys)
    lists = Lists(*(torch.from_numpy(x).to(device) for x in (work.items, *work[2:])))
    return (lists, work.num_busy), lists


@lru_cache(maxsize=64)
def _major(device: torch.device) -> int:
    """Return the major number of a device's compute capability."""
    return torch.cuda.get_device_capability(device)[0]


@lru_cache(maxsize=1)
def _kernels() -> tuple[Any, Any, Any, Any]:
    """Forward; dq; dk and dv; row statistics."""
    from tilewise.kernels.triton import backward
    from tilewise.kernels.triton.forward import forward

    return forward, backward.rows_backward, backward.keys_backward, backward.row_statistics


def _interprets() -> bool:
    """Return whether Triton's interpreter is on, which runs kernels on the CPU."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def empty_rows(like: Tensor, width: int | None = None) -> Tensor:
    """Return an empty tensor of the shape of another, but for its width."""
    shape = like.shape if width is None else (*like.shape[:-1], width)
    return torch.empty(shape, dtype=torch.float32, device=like.device)

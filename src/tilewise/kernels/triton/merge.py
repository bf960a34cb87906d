"""Merging of partial attentions in one pass over memory, without temporaries, in Triton.

Imports triton, so nothing imports this module until CUDA tensors are merged.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.triton.launch import KernelLaunch, launch
from tilewise.kernels.triton.views import in_steps, view_of

_BLOCK = 64


def merge_rows(out_acc: Tensor, lse_acc: Tensor, out: Tensor, lse: Tensor) -> None:
    """`merge_into` of [rows, batch, heads, head_dim] and [rows, batch, heads], of any strides."""
    if lse.numel():
        launch(_merging, (out_acc, lse_acc, out, lse), _merge)


def _merging(tensors: Sequence[Tensor], kernel: Any) -> KernelLaunch:
    out_acc, lse_acc, out, lse = tensors
    ((old,), old_step), ((new,), new_step) = (in_steps([view_of(x)]) for x in (out_acc, out))
    num = lse.numel()
    numbers = *old[1:], out_acc.stride(3), *lse_acc.stride()
    numbers += *new[1:], out.stride(3), *lse.stride(), num, *lse.shape[1:]
    constants = {"OLD_STEP": old_step, "NEW_STEP": new_step, "HEAD_DIM": out.shape[3]}
    constants |= {"WIDTH": triton.next_power_of_2(out.shape[3]), "BLOCK": _BLOCK}
    return KernelLaunch(kernel, (triton.cdiv(num, _BLOCK), 1, 1), numbers, constants)


def combine_rows(
    parts: Sequence[Tensor],
    into: Tensor,
    lses: Sequence[Tensor] = (),
    lse_into: Tensor | None = None,
) -> None:
    """`combine` and, without lses, `add_up`, in one pass over memory.

    Args:
        parts, into: [rows, batch, heads, head_dim], of any strides and dtypes.
        lses, lse_into: [rows, batch, heads], of any strides.
    """
    if into.shape[:3].numel():
        statistics = () if lse_into is None else (*lses, lse_into)
        launch(_combining, (*parts, into, *statistics), lse_into is not None, _combine)


def _combining(tensors: Sequence[Tensor], by_lse: bool, kernel: Any) -> KernelLaunch:
    parts = tensors[: len(tensors) // 2] if by_lse else tensors
    statistics = tensors[len(parts) :]
    places, steps = list[tuple[Any, ...]](), list[int]()
    for x in parts:
        (view,), step = in_steps([view_of(x)])
        places.append((*view[1:], x.stride(3)))
        steps.append(step)
    shape = parts[0].shape
    num = shape[:3].numel()
    strides = [tuple(x[i] for x in places) for i in range(4)]
    strides += [tuple(x.stride(i) for x in statistics) for i in range(3)]
    constants: dict[str, Any] = {"COUNT": len(parts) - 1, "STEPS": tuple(steps), "BY_LSE": by_lse}
    wide = any(x.dtype is torch.float64 for x in parts)
    constants |= {"ACC": tl.float64 if wide else tl.float32, "HEAD_DIM": shape[3]}
    constants |= {"WIDTH": triton.next_power_of_2(shape[3]), "BLOCK": _BLOCK}
    numbers = *strides, num, *shape[1:3]
    tuples = len(parts), len(statistics)
    return KernelLaunch(kernel, (triton.cdiv(num, _BLOCK), 1, 1), numbers, constants, tuples=tuples)


@triton.jit
def _combine(
    parts, lses, rows, batches, heads, columns, lse_rows, lse_batches, lse_heads,
    num, num_batch, num_heads,
    COUNT: tl.constexpr, STEPS: tl.constexpr, BY_LSE: tl.constexpr, ACC: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """The last of parts = the sum of those before it; by their lse: of shares exp(lse_i - lse)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < num
    head = (at % num_heads).to(tl.int64)  # offsets have 64 bits, but divisions of those are slow
    batch = (at // num_heads % num_batch).to(tl.int64)
    row = (at // num_heads // num_batch).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = here[:, None] & (column < HEAD_DIM)[None, :]
    top = tl.full((BLOCK,), float("-inf"), ACC)
    total = tl.zeros((BLOCK,), ACC)
    acc = tl.zeros((BLOCK, WIDTH), ACC)
    if BY_LSE:
        for i in tl.static_range(COUNT):  # pyright: ignore[reportGeneralTypeIssues]
            place = lses[i] + row * lse_rows[i] + batch * lse_batches[i] + head * lse_heads[i]
            top = tl.maximum(top, tl.load(place, mask=here, other=0.0).to(ACC))
        top = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf is nan
        for i in tl.static_range(COUNT):  # pyright: ignore[reportGeneralTypeIssues]
            place = lses[i] + row * lse_rows[i] + batch * lse_batches[i] + head * lse_heads[i]
            total += tl.exp(tl.load(place, mask=here, other=0.0).to(ACC) - top)
    for i in tl.static_range(COUNT):  # pyright: ignore[reportGeneralTypeIssues]
        first = (row * rows[i] + batch * batches[i] + head * heads[i]) * STEPS[i]
        place = parts[i] + first[:, None] + column[None, :] * columns[i]
        x = tl.load(place, mask=inside, other=0.0).to(ACC)
        if BY_LSE:
            place = lses[i] + row * lse_rows[i] + batch * lse_batches[i] + head * lse_heads[i]
            share = tl.exp(tl.load(place, mask=here, other=0.0).to(ACC) - top)
            x *= (share / tl.where(total == 0.0, 1.0, total))[:, None]  # 0 where no part reaches
        acc += x
    # Several threads hold the same number where a block has more threads than rows, and the target
    # may be one of the parts: none may store before all have loaded.
    tl.debug_barrier()
    if BY_LSE:
        place = lses[COUNT] + row * lse_rows[COUNT] + batch * lse_batches[COUNT]
        tl.store(place + head * lse_heads[COUNT], top + tl.log(total), mask=here)
    first = (row * rows[COUNT] + batch * batches[COUNT] + head * heads[COUNT]) * STEPS[COUNT]
    tl.store(parts[COUNT] + first[:, None] + column[None, :] * columns[COUNT], acc, mask=inside)


@triton.jit
def _merge(
    out_acc, lse_acc, out, lse,
    oa_row, oa_batch, oa_head, oa_column, la_row, la_batch, la_head,
    o_row, o_batch, o_head, o_column, l_row, l_batch, l_head,
    num, num_batch, num_heads,
    OLD_STEP: tl.constexpr, NEW_STEP: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """lse = log(exp lse_a + exp lse_b); out_a moves to out_b by the share exp(lse_b - lse)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < num
    head = (at % num_heads).to(tl.int64)  # offsets have 64 bits, but divisions of those are slow
    batch = (at // num_heads % num_batch).to(tl.int64)
    row = (at // num_heads // num_batch).to(tl.int64)
    lse_place = lse_acc + row * la_row + batch * la_batch + head * la_head
    a = tl.load(lse_place, mask=here, other=0.0)
    b = tl.load(lse + row * l_row + batch * l_batch + head * l_head, mask=here, other=0.0)
    b = b.to(a.dtype)
    top = tl.maximum(a, b)
    top = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf is nan
    of_b = tl.exp(b - top)
    both = tl.exp(a - top) + of_b
    # a row that neither side reaches keeps out_a, which is 0
    share = tl.where(b == float("-inf"), 0.0, of_b / tl.where(both == 0.0, 1.0, both))
    column = tl.arange(0, WIDTH)
    inside = here[:, None] & (column < HEAD_DIM)[None, :]
    place = out_acc + ((row * oa_row + batch * oa_batch + head * oa_head) * OLD_STEP)[:, None]
    place += column[None, :] * oa_column
    other = out + ((row * o_row + batch * o_batch + head * o_head) * NEW_STEP)[:, None]
    other += column[None, :] * o_column
    x = tl.load(place, mask=inside, other=0.0)
    y = tl.load(other, mask=inside, other=0.0).to(x.dtype)
    # Several threads hold the same number where a block has more threads than rows: none may store
    # before all have loaded.
    tl.debug_barrier()
    tl.store(lse_place, top + tl.log(both), mask=here)
    tl.store(place, x + (y - x) * share[:, None].to(x.dtype), mask=inside)

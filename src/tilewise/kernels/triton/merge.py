"""Merging of partial attentions in one pass over memory, without temporaries, in Triton.

Imports triton, so nothing imports this module until CUDA tensors are merged.
"""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.triton.launch import Launch, launch
from tilewise.kernels.triton.views import in_steps, view_of

_BLOCK = 64


def merge_rows(out_acc: Tensor, lse_acc: Tensor, out: Tensor, lse: Tensor) -> None:
    """`merge_into` of [rows, batch, heads, head_dim] and [rows, batch, heads], of any strides."""
    if lse.numel():
        launch(_merging, (out_acc, lse_acc, out, lse), _merge)


def _merging(tensors: Sequence[Tensor], kernel: Any) -> Launch:
    out_acc, lse_acc, out, lse = tensors
    ((old,), old_step), ((new,), new_step) = (in_steps([view_of(x)]) for x in (out_acc, out))
    num = lse.numel()
    numbers = *old[1:], out_acc.stride(3), *lse_acc.stride()
    numbers += *new[1:], out.stride(3), *lse.stride(), num, *lse.shape[1:]
    constants = {"OLD_STEP": old_step, "NEW_STEP": new_step, "HEAD_DIM": out.shape[3]}
    constants |= {"WIDTH": triton.next_power_of_2(out.shape[3]), "BLOCK": _BLOCK}
    return Launch(kernel, (triton.cdiv(num, _BLOCK), 1, 1), numbers, constants)


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

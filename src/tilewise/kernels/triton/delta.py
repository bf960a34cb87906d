"""`out_for_delta` in one pass over memory, in Triton, where plain torch takes two dozen launches.

Imports triton, so nothing imports this module until a CUDA kernel needs out.
"""

# pyright: reportGeneralTypeIssues=false

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.triton.launch import KernelLaunch, launch
from tilewise.kernels.triton.views import in_steps, view_of

_BLOCK = 32


def put_out_for_delta(
    dout: Tensor,
    delta: Tensor,
    changed: Tensor,
    out: Tensor,
    columns: int,
    least: tuple[float, float],
) -> None:
    """Write dout' and out of [rows, batch, heads, head_dim]; see `out_for_delta`.

    Args:
        changed, out: of the same strides.
        columns: of out that are not 0.
        least: below this share of |delta|, or this number, dout is changed.
    """
    if delta.numel():
        launch(_putting, (dout, delta, changed, out), _put, columns, least)


def _putting(
    tensors: Sequence[Tensor], kernel: Any, columns: int, least: tuple[float, float]
) -> KernelLaunch:
    dout, delta, _, out = tensors
    (read, written), step = in_steps([view_of(dout), view_of(out)])
    num = delta.numel()
    numbers = *read[1:], dout.stride(3), *delta.stride(), *written[1:], out.stride(3)
    constants = {"STEP": step, "COLUMNS": columns, "HEAD_DIM": dout.shape[3]}
    constants |= {"WIDTH": triton.next_power_of_2(dout.shape[3]), "BLOCK": _BLOCK}
    numbers += num, *delta.shape[1:], *least
    return KernelLaunch(kernel, (triton.cdiv(num, _BLOCK), 1, 1), numbers, constants)


@triton.jit
def _put(
    dout, delta, changed, out,
    d_row, d_batch, d_head, d_column, l_row, l_batch, l_head,
    o_row, o_batch, o_head, o_column,
    num, num_batch, num_heads, share, tiny,
    STEP: tl.constexpr, COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """out_c = rest / dout_c column by column, rest being what of delta earlier columns left."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < num
    head = (at % num_heads).to(tl.int64)  # offsets have 64 bits, but divisions of those are slow
    batch = (at // num_heads % num_batch).to(tl.int64)
    row = (at // num_heads // num_batch).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = here[:, None] & (column < HEAD_DIM)[None, :]
    place = dout + ((row * d_row + batch * d_batch + head * d_head) * STEP)[:, None]
    grad = tl.load(place + column[None, :] * d_column, mask=inside, other=0.0)
    rest = tl.load(delta + row * l_row + batch * l_batch + head * l_head, mask=here, other=0.0)
    narrow = grad.dtype
    rest = rest.to(tl.float32)
    made = tl.zeros([BLOCK, WIDTH], tl.float32)
    changes = grad.to(tl.float32)
    for c in tl.static_range(COLUMNS):
        mine = column[None, :] == c
        divisor = tl.sum(tl.where(mine, changes, 0.0), 1)
        least = tl.maximum(tl.abs(rest) * share, tiny)
        small = (tl.abs(divisor) < least) & (rest != 0.0)
        divisor = tl.where(small, least, divisor).to(narrow).to(tl.float32)
        quotient = rest / tl.where(rest == 0.0, 1.0, divisor)
        quotient = tl.where(rest == 0.0, 0.0, quotient).to(narrow).to(tl.float32)
        changes = tl.where(mine, divisor[:, None], changes)
        made = tl.where(mine, quotient[:, None], made)
        rest -= quotient * divisor
    offset = ((row * o_row + batch * o_batch + head * o_head) * STEP)[:, None]
    offset += column[None, :] * o_column
    tl.store(changed + offset, changes.to(narrow), mask=inside)
    tl.store(out + offset, made.to(narrow), mask=inside)

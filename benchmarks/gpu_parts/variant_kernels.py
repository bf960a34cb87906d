"""The kernels of variants.py, in Triton: [tokens, heads, head_dim], dense."""

# ruff: noqa: N803, PLR0913

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2_E = tl.constexpr(1.4426950408889634)


def described(x: Tensor, rows: int) -> Any:
    """A tensor by a descriptor of [tokens, heads x head_dim], in blocks of rows of one head.

    With a dimension of heads the compiler does not specialise warps: it cannot part the reshape.
    """
    return TensorDescriptor.from_tensor(x.flatten(1), [rows, x.shape[2]])


@triton.jit
def _block(
    x, row, head, num_heads, ROWS: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """Rows of one head."""
    if TMA:
        found = x.load([row, head * WIDTH])
    else:
        rows = (row + tl.arange(0, ROWS)).to(tl.int64) * num_heads + head
        found = tl.load(x + rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])
    return found


@triton.jit
def _weighted(scores, values, acc, top, total):
    """One step of the softmax: scores in base 2 of some keys, and their values."""
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrunk = tl.exp2(top - higher)
    total = total * shrunk + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrunk[:, None])
    return acc, higher, total


@triton.jit
def forward(
    q, k, v, out, lse, num_keys, num_heads, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr,
    AHEAD: tl.constexpr, SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """out and lse; scale is in base 2."""
    row, head = tl.program_id(0) * ROWS, tl.program_id(1)
    mine = _block(q, row, head, num_heads, ROWS, WIDTH, TMA)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    if AHEAD:
        scores = tl.dot(mine, _block(k, 0, head, num_heads, KEYS, WIDTH, TMA).T) * scale
        for key in tl.range(0, num_keys - KEYS, KEYS):
            later = tl.dot(mine, _block(k, key + KEYS, head, num_heads, KEYS, WIDTH, TMA).T)
            values = _block(v, key, head, num_heads, KEYS, WIDTH, TMA)
            acc, top, total = _weighted(scores, values, acc, top, total)
            scores = later * scale
        values = _block(v, num_keys - KEYS, head, num_heads, KEYS, WIDTH, TMA)
        acc, top, total = _weighted(scores, values, acc, top, total)
    else:
        for key in tl.range(0, num_keys, KEYS, warp_specialize=SPECIALIZED):
            scores = tl.dot(mine, _block(k, key, head, num_heads, KEYS, WIDTH, TMA).T) * scale
            values = _block(v, key, head, num_heads, KEYS, WIDTH, TMA)
            acc, top, total = _weighted(scores, values, acc, top, total)
    rows = (row + tl.arange(0, ROWS)).to(tl.int64) * num_heads + head
    tl.store(lse + rows, (top + tl.log2(total)) / LOG2_E)
    acc = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], acc)


@triton.jit
def backward(
    q, k, v, dout, lse, delta, dq, dk, dv, num_rows, num_heads, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, whose share of dq threads or a descriptor add."""
    key, head = tl.program_id(0) * KEYS, tl.program_id(1)
    keys = _block(k, key, head, num_heads, KEYS, WIDTH, False)
    values = _block(v, key, head, num_heads, KEYS, WIDTH, False)
    dkeys = tl.zeros([KEYS, WIDTH], tl.float32)
    dvalues = tl.zeros([KEYS, WIDTH], tl.float32)
    for row in tl.range(0, num_rows, ROWS):
        rows = (row + tl.arange(0, ROWS)).to(tl.int64) * num_heads + head
        mine = _block(q, row, head, num_heads, ROWS, WIDTH, False)
        grad = _block(dout, row, head, num_heads, ROWS, WIDTH, False)
        scores = tl.dot(keys, mine.T) * (scale * LOG2_E) - (tl.load(lse + rows) * LOG2_E)[None, :]
        weights = tl.exp2(scores)
        dvalues = tl.dot(weights.to(grad.dtype), grad, dvalues)
        dweights = tl.dot(values, grad.T)
        dscores = (weights * (dweights - tl.load(delta + rows)[None, :])).to(mine.dtype)
        dkeys = tl.dot(dscores, mine, dkeys)
        share = tl.dot(dscores.T, keys) * scale
        if TMA:
            dq.atomic_add([row, head * WIDTH], share)
        else:
            tl.atomic_add(
                dq + rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], share, sem="relaxed"
            )
    mine_of = (key + tl.arange(0, KEYS)).to(tl.int64) * num_heads + head
    place = mine_of[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(dk + place, dkeys * scale)
    tl.store(dv + place, dvalues)

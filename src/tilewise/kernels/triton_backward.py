"""The backward kernels: dq by blocks of rows, dk and dv by blocks of keys, each its own pass.

Every sum is made by one program in a fixed order, so results are the same bit for bit each time.

Imports triton, so nothing imports this module until the Triton provider runs.
"""

# ruff: noqa: N803
# pyright: reportArgumentType=false

import triton
import triton.language as tl

from tilewise.kernels.triton_common import LOG2E, add_rows, load_rows, within


@triton.jit
def _dq_run(
    acc,
    q,
    dout,
    lse,
    delta,
    k,
    v,
    k_row,
    v_row,
    start,
    stop,
    low,
    high,
    scale,
    MASKED: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """acc + ds k over the keys [start, stop); lse in base 2."""
    for first in range(start, stop, KEYS):
        keys = first + tl.arange(0, KEYS)
        k_block = load_rows(k, first, k_row, stop, MASKED, KEYS, HEAD_DIM, q.shape[1])
        scores = tl.dot(q, tl.trans(k_block), input_precision="tf32x3")
        p = tl.exp2(scores * (scale * LOG2E) - lse[:, None])
        if MASKED:
            p = tl.where(within(keys, low, high), p, 0.0)
        v_block = load_rows(v, first, v_row, stop, MASKED, KEYS, HEAD_DIM, q.shape[1])
        dp = tl.dot(dout, tl.trans(v_block), input_precision="tf32x3")
        ds = p * (dp - delta[:, None])
        acc = tl.dot(ds.to(k_block.dtype), k_block, acc, input_precision="tf32x3")
    return acc


@triton.jit
def _dkv_run(
    dk,
    dv,
    k,
    v,
    q,
    dout,
    lse,
    delta,
    q_row,
    dout_row,
    start,
    stop,
    low,
    high,
    scale,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """dk + ds^T q and dv + p^T dout over the rows [start, stop); all tables are [keys, rows]."""
    for first in range(start, stop, ROWS):
        rows = first + tl.arange(0, ROWS)
        q_block = load_rows(q, first, q_row, stop, MASKED, ROWS, HEAD_DIM, k.shape[1])
        row_lse = tl.load(lse + rows, mask=rows < stop, other=float("inf"))
        row_delta = tl.load(delta + rows, mask=rows < stop, other=0.0)
        scores = tl.dot(k, tl.trans(q_block), input_precision="tf32x3")
        p = tl.exp2(scores * (scale * LOG2E) - row_lse[None, :])
        if MASKED:
            p = tl.where(within(rows, low, high), p, 0.0)
        dout_block = load_rows(dout, first, dout_row, stop, MASKED, ROWS, HEAD_DIM, k.shape[1])
        dv = tl.dot(p.to(dout_block.dtype), dout_block, dv, input_precision="tf32x3")
        dp = tl.dot(v, tl.trans(dout_block), input_precision="tf32x3")
        ds = p * (dp - row_delta[None, :])
        dk = tl.dot(ds.to(q_block.dtype), q_block, dk, input_precision="tf32x3")
    return dk, dv


@triton.jit(do_not_specialize=["num_rows"])
def rows_backward(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dq,
    items,
    full,
    masked,
    intervals,
    q_row,
    q_batch,
    q_head,
    k_row,
    k_batch,
    k_head,
    v_row,
    v_batch,
    v_head,
    dout_row,
    dout_batch,
    dout_head,
    dq_row,
    dq_batch,
    dq_head,
    num_rows,
    num_heads,
    group,
    scale,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    ADD: tl.constexpr,
):
    """dq. Grid: [items, batch * num_heads]; lse (base 2) and delta are [batch, heads, rows]."""
    item = items + tl.program_id(0) * 5
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    kv_head = head // group
    first = tl.load(item) * ROWS
    rows = first + tl.arange(0, ROWS)
    q += batch * q_batch + head * q_head
    dout += batch * dout_batch + head * dout_head
    k += batch * k_batch + kv_head * k_head
    v += batch * v_batch + kv_head * v_head
    statistics = (batch * num_heads + head) * num_rows + rows
    q_block = load_rows(q, first, q_row, num_rows, True, ROWS, HEAD_DIM, WIDTH)
    dout_block = load_rows(dout, first, dout_row, num_rows, True, ROWS, HEAD_DIM, WIDTH)
    row_lse = tl.load(lse + statistics, mask=rows < num_rows, other=float("inf"))
    row_delta = tl.load(delta + statistics, mask=rows < num_rows, other=0.0)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for i in range(tl.load(item + 1), tl.load(item + 2)):
        start, stop = tl.load(full + 2 * i), tl.load(full + 2 * i + 1)
        acc = _dq_run(
            acc, q_block, dout_block, row_lse, row_delta, k, v, k_row, v_row, start, stop,
            0, 0, scale, False, KEYS, HEAD_DIM,
        )  # fmt: skip
    for i in range(tl.load(item + 3), tl.load(item + 4)):
        start, stop = tl.load(masked + 2 * i), tl.load(masked + 2 * i + 1)
        ends = intervals + 2 * ROWS * i + tl.arange(0, ROWS)
        acc = _dq_run(
            acc, q_block, dout_block, row_lse, row_delta, k, v, k_row, v_row, start, stop,
            tl.load(ends), tl.load(ends + ROWS), scale, True, KEYS, HEAD_DIM,
        )  # fmt: skip
    dq += batch * dq_batch + head * dq_head
    add_rows(dq, first, dq_row, num_rows, acc * scale, ADD, HEAD_DIM)


@triton.jit(do_not_specialize=["num_rows", "num_keys"])
def keys_backward(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dk,
    dv,
    items,
    full,
    masked,
    intervals,
    q_row,
    q_batch,
    q_head,
    k_row,
    k_batch,
    k_head,
    v_row,
    v_batch,
    v_head,
    dout_row,
    dout_batch,
    dout_head,
    dk_row,
    dk_batch,
    dk_head,
    dv_row,
    dv_batch,
    dv_head,
    num_rows,
    num_keys,
    num_kv_heads,
    group,
    scale,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    ADD: tl.constexpr,
):
    """dk and dv, over all query heads of a KV head. Grid: [items, batch * num_kv_heads]."""
    item = items + tl.program_id(0) * 5
    batch = (tl.program_id(1) // num_kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % num_kv_heads).to(tl.int64)
    first = tl.load(item) * KEYS
    k += batch * k_batch + kv_head * k_head
    v += batch * v_batch + kv_head * v_head
    k_block = load_rows(k, first, k_row, num_keys, True, KEYS, HEAD_DIM, WIDTH)
    v_block = load_rows(v, first, v_row, num_keys, True, KEYS, HEAD_DIM, WIDTH)
    dk_acc = tl.zeros([KEYS, WIDTH], tl.float32)
    dv_acc = tl.zeros([KEYS, WIDTH], tl.float32)
    for head in range(kv_head * group, kv_head * group + group):
        q_base = q + batch * q_batch + head * q_head
        dout_base = dout + batch * dout_batch + head * dout_head
        statistics = (batch * num_kv_heads * group + head) * num_rows
        for i in range(tl.load(item + 1), tl.load(item + 2)):
            start, stop = tl.load(full + 2 * i), tl.load(full + 2 * i + 1)
            dk_acc, dv_acc = _dkv_run(
                dk_acc, dv_acc, k_block, v_block, q_base, dout_base, lse + statistics,
                delta + statistics, q_row, dout_row, start, stop, 0, 0, scale,
                False, ROWS, HEAD_DIM,
            )  # fmt: skip
        for i in range(tl.load(item + 3), tl.load(item + 4)):
            start, stop = tl.load(masked + 2 * i), tl.load(masked + 2 * i + 1)
            ends = intervals + 2 * KEYS * i + tl.arange(0, KEYS)
            dk_acc, dv_acc = _dkv_run(
                dk_acc, dv_acc, k_block, v_block, q_base, dout_base, lse + statistics,
                delta + statistics, q_row, dout_row, start, stop,
                tl.load(ends), tl.load(ends + KEYS), scale, True, ROWS, HEAD_DIM,
            )  # fmt: skip
    dk += batch * dk_batch + kv_head * dk_head
    dv += batch * dv_batch + kv_head * dv_head
    add_rows(dk, first, dk_row, num_keys, dk_acc * scale, ADD, HEAD_DIM)
    add_rows(dv, first, dv_row, num_keys, dv_acc, ADD, HEAD_DIM)

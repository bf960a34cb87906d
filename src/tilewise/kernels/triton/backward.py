"""The backward kernels: dq by blocks of rows; dk, dv and, where asked, dq too by blocks of keys.

Without dq by blocks of keys every sum is made by one program in a fixed order: the same bits each
time. With it dq is added up by many programs, in any order.

Imports triton, so nothing imports this module until the Triton provider runs.
"""

# ruff: noqa: N803
# pyright: reportArgumentType=false, reportIndexIssue=false

import triton
import triton.language as tl

from tilewise.kernels.triton.common import (
    LOG2E,
    at_head,
    capped,
    interval_of,
    key_places,
    load_rows,
    places,
    put_rows,
    row_places,
    run_of,
    thinned,
    within,
)


@triton.jit(do_not_specialize=["num_rows"])
def row_statistics(
    lse, delta, statistics, num_rows, padded, num_heads, ROWS: tl.constexpr, HEADS: tl.constexpr
):
    """lse in base 2 and delta as [batch, heads, 2, padded]: what the kernels below read.

    p = exp2(.. - inf) is 0: so on rows that no key reaches, and on those beyond num_rows.
    Grid: [padded / ROWS, num_heads / HEADS rounded up, batch].
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :]
    batch = tl.program_id(2)
    here = (rows < num_rows) & (heads < num_heads)
    at = at_head(lse, batch, heads, 1) + tl.cast(rows, tl.int64) * lse.row
    row_lse = tl.load(at, mask=here, other=float("-inf")).to(tl.float32)
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2E)
    at = at_head(delta, batch, heads, 1) + tl.cast(rows, tl.int64) * delta.row
    row_delta = tl.load(at, mask=here, other=0.0).to(tl.float32)
    at = statistics + (tl.cast(batch, tl.int64) * num_heads + heads) * 2 * padded + rows
    tl.store(at, row_lse, mask=heads < num_heads)
    tl.store(at + padded, row_delta, mask=heads < num_heads)


@triton.jit
def _rows_run(
    dq,
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
    rule,
    rows,
    head,
    batch,
    MASKED: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    CAPPED: tl.constexpr,
    DROPS: tl.constexpr,
):
    """dq + ds k over the keys [start, stop)."""
    for first in range(start, stop, KEYS):
        keys = first + tl.arange(0, KEYS)
        k_block = load_rows(k, first, k_row, stop, MASKED, KEYS, HEAD_DIM, q.shape[1])
        scores = tl.dot(q, tl.trans(k_block), input_precision="tf32x3")
        if CAPPED:
            scores = capped(scores, rule)
            p = tl.exp2(scores * rule.outer - lse[:, None])
        else:
            p = tl.exp2(scores * (scale * LOG2E) - lse[:, None])
        if MASKED:
            p = tl.where(within(keys, low, high), p, 0.0)
        v_block = load_rows(v, first, v_row, stop, MASKED, KEYS, V_DIM, dout.shape[1])
        dp = tl.dot(dout, tl.trans(v_block), input_precision="tf32x3")
        if DROPS:
            at = key_places(rule, first, stop, KEYS)
            dp = thinned(dp, rule, rows[:, None], at[None, :], head, batch)
        ds = p * (dp - delta[:, None])
        if CAPPED:
            ds *= 1.0 - scores * scores
        dq = tl.dot(ds.to(k_block.dtype), k_block, dq, input_precision="tf32x3")
    return dq


@triton.jit
def rows_backward(
    q,
    k,
    v,
    dout,
    dq,
    statistics,
    lists,
    padded,
    num_heads,
    group,
    scale,
    rule,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    ADD: tl.constexpr,
    CAPPED: tl.constexpr,
    DROPS: tl.constexpr,
    STEP: tl.constexpr,
):
    """dq. Grid: [items, batch * num_heads]. STEP: as for forward."""
    item = lists.items + tl.program_id(0) * 7
    batch, head = tl.program_id(1) // num_heads, tl.program_id(1) % num_heads
    first, end = tl.load(item), tl.load(item + 1)
    k_base, v_base = at_head(k, batch, head // group, STEP), at_head(v, batch, head // group, STEP)
    k_row, v_row, dout_row = k.row * STEP, v.row * STEP, dout.row * STEP
    q_base, dout_base = at_head(q, batch, head, STEP), at_head(dout, batch, head, STEP)
    q_block = load_rows(q_base, first, q.row * STEP, end, True, ROWS, HEAD_DIM, WIDTH)
    dout_block = load_rows(dout_base, first, dout_row, end, True, ROWS, V_DIM, V_WIDTH)
    at = row_places(rule, first, end, ROWS) if DROPS else 0
    lse = statistics + tl.program_id(1).to(tl.int64) * 2 * padded + first + tl.arange(0, ROWS)
    row_lse, row_delta = tl.load(lse), tl.load(lse + padded)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for i in range(tl.load(item + 2), tl.load(item + 3)):
        start, stop = run_of(lists.full, i, 1)
        acc = _rows_run(
            acc, q_block, dout_block, row_lse, row_delta, k_base, v_base, k_row, v_row,
            start, stop, 0, 0, scale, rule, at, head, batch,
            False, KEYS, HEAD_DIM, V_DIM, CAPPED, DROPS,
        )  # fmt: skip
    for i in range(tl.load(item + 4), tl.load(item + 5)):
        start, stop = run_of(lists.masked, i, 1)
        low, high = interval_of(lists.intervals, i, ROWS)
        acc = _rows_run(
            acc, q_block, dout_block, row_lse, row_delta, k_base, v_base, k_row, v_row,
            start, stop, low, high, scale, rule, at, head, batch,
            True, KEYS, HEAD_DIM, V_DIM, CAPPED, DROPS,
        )  # fmt: skip
    dq_base = at_head(dq, batch, head, STEP)
    put_rows(dq_base, first, dq.row * STEP, end, acc * scale, tl.load(item + 6), ADD, HEAD_DIM)


@triton.jit
def _keys_run(
    dk,
    dv,
    k,
    v,
    q,
    dout,
    dq,
    lse,
    delta,
    q_row,
    dout_row,
    dq_row,
    start,
    stop,
    low,
    high,
    scale,
    rule,
    keys,
    head,
    batch,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    DQ: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CAPPED: tl.constexpr,
    DROPS: tl.constexpr,
):
    """dk + ds^T q and dv + p^T dout over the rows [start, stop); all tables are [keys, rows]."""
    for first in range(start, stop, ROWS):
        rows = first + tl.arange(0, ROWS)
        q_block = load_rows(q, first, q_row, stop, MASKED, ROWS, HEAD_DIM, k.shape[1])
        row_lse = tl.load(lse + rows)
        scores = tl.dot(k, tl.trans(q_block), input_precision="tf32x3")
        if CAPPED:
            scores = capped(scores, rule)
            p = tl.exp2(scores * rule.outer - row_lse[None, :])
        else:
            p = tl.exp2(scores * (scale * LOG2E) - row_lse[None, :])
        if MASKED:
            p = tl.where(within(rows, low, high), p, 0.0)
        dout_block = load_rows(dout, first, dout_row, stop, MASKED, ROWS, V_DIM, v.shape[1])
        at_rows = row_places(rule, first, stop, ROWS) if DROPS else 0
        if DV:
            weights = p
            if DROPS:
                weights = thinned(p, rule, at_rows[None, :], keys[:, None], head, batch)
            dv = tl.dot(weights.to(dout_block.dtype), dout_block, dv, input_precision="tf32x3")
        if DK:
            dp = tl.dot(v, tl.trans(dout_block), input_precision="tf32x3")
            if DROPS:
                dp = thinned(dp, rule, at_rows[None, :], keys[:, None], head, batch)
            if MASKED:  # rows beyond the run's may hold anything
                row_delta = tl.load(delta + rows, mask=rows < stop, other=0.0)
            else:
                row_delta = tl.load(delta + rows)
            ds = p * (dp - row_delta[None, :])
            if CAPPED:
                ds *= 1.0 - scores * scores
            ds = ds.to(q_block.dtype)
            dk = tl.dot(ds, q_block, dk, input_precision="tf32x3")
            if DQ:
                share = tl.dot(tl.trans(ds), k, input_precision="tf32x3") * scale
                at, inside = places(dq, first, dq_row, stop, ROWS, HEAD_DIM, k.shape[1])
                if MASKED or k.shape[1] != HEAD_DIM:
                    tl.atomic_add(at, share, mask=inside, sem="relaxed")
                else:
                    tl.atomic_add(at, share, sem="relaxed")
    return dk, dv


@triton.jit
def keys_backward(
    q,
    k,
    v,
    dout,
    dq,
    dk,
    dv,
    statistics,
    lists,
    padded,
    num_kv_heads,
    group,
    scale,
    rule,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    ADD: tl.constexpr,
    CAPPED: tl.constexpr,
    DROPS: tl.constexpr,
    STEP: tl.constexpr,
    UNIT: tl.constexpr,
    DQ: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
):
    """dk if DK, dv if DV, over all query heads of a KV head. Grid: [items, batch * num_kv_heads].

    DQ: add to dq too, atomically. STEP: as for forward. UNIT: first rows of runs are its
    multiples, which lets pairs of statistics be loaded at once.
    """
    item = lists.items + tl.program_id(0) * 7
    batch, kv_head = tl.program_id(1) // num_kv_heads, tl.program_id(1) % num_kv_heads
    first, end = tl.load(item), tl.load(item + 1)
    k_base, v_base = at_head(k, batch, kv_head, STEP), at_head(v, batch, kv_head, STEP)
    k_block = load_rows(k_base, first, k.row * STEP, end, True, KEYS, HEAD_DIM, WIDTH)
    v_block = load_rows(v_base, first, v.row * STEP, end, True, KEYS, V_DIM, V_WIDTH)
    q_row, dout_row, dq_row = q.row * STEP, dout.row * STEP, dq.row * STEP
    at = key_places(rule, first, end, KEYS) if DROPS else 0
    dk_acc = tl.zeros([KEYS, WIDTH], tl.float32)
    dv_acc = tl.zeros([KEYS, V_WIDTH], tl.float32)
    for member in range(0, group):
        head = kv_head * group + member
        q_base, dout_base = at_head(q, batch, head, STEP), at_head(dout, batch, head, STEP)
        dq_base = at_head(dq, batch, head, STEP)
        lse = statistics + (tl.program_id(1).to(tl.int64) * group + member) * 2 * padded
        for i in range(tl.load(item + 2), tl.load(item + 3)):
            start, stop = run_of(lists.full, i, UNIT)
            dk_acc, dv_acc = _keys_run(
                dk_acc, dv_acc, k_block, v_block, q_base, dout_base, dq_base, lse, lse + padded,
                q_row, dout_row, dq_row, start, stop, 0, 0, scale, rule, at, head, batch,
                False, ROWS, HEAD_DIM, V_DIM, DQ, DK, DV, CAPPED, DROPS,
            )  # fmt: skip
        for i in range(tl.load(item + 4), tl.load(item + 5)):
            start, stop = run_of(lists.masked, i, UNIT)
            low, high = interval_of(lists.intervals, i, KEYS)
            dk_acc, dv_acc = _keys_run(
                dk_acc, dv_acc, k_block, v_block, q_base, dout_base, dq_base, lse, lse + padded,
                q_row, dout_row, dq_row, start, stop, low, high, scale, rule, at, head, batch,
                True, ROWS, HEAD_DIM, V_DIM, DQ, DK, DV, CAPPED, DROPS,
            )  # fmt: skip
    old_end = tl.load(item + 6)
    if DK:
        dk_base = at_head(dk, batch, kv_head, STEP)
        put_rows(dk_base, first, dk.row * STEP, end, dk_acc * scale, old_end, ADD, HEAD_DIM)
    if DV:
        dv_base = at_head(dv, batch, kv_head, STEP)
        put_rows(dv_base, first, dv.row * STEP, end, dv_acc, old_end, ADD, V_DIM)

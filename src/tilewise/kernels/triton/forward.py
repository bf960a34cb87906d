"""The forward kernel: one program computes a block of rows of one head over all its runs of keys.

Imports triton, so nothing imports this module until the Triton provider runs.
"""

# ruff: noqa: N803
# pyright: reportArgumentType=false

import triton
import triton.language as tl

from tilewise.kernels.triton.common import (
    LN2,
    at_head,
    blend_rows,
    capped,
    interval_of,
    key_places,
    load_rows,
    put_rows,
    row_places,
    run_of,
    thinned,
    within,
)


@triton.jit
def _run(
    acc,
    total,
    peak,
    q,
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
    """Online softmax, in base 2, over the keys [start, stop); scale is positive."""
    for first in range(start, stop, KEYS):
        k_block = load_rows(k, first, k_row, stop, MASKED, KEYS, HEAD_DIM, q.shape[1])
        scores = tl.dot(q, tl.trans(k_block), input_precision="tf32x3")
        if CAPPED:
            scores = capped(scores, rule)
        if MASKED:
            keys = first + tl.arange(0, KEYS)
            scores = tl.where(within(keys, low, high), scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, 1) * scale)
        origin = highest
        if MASKED:
            # -inf - -inf is nan: rows without keys so far are measured from 0
            origin = tl.where(highest == float("-inf"), 0.0, highest)
        p = tl.exp2(scores * scale - origin[:, None])
        shrink = tl.exp2(peak - origin)
        v_block = load_rows(v, first, v_row, stop, MASKED, KEYS, V_DIM, acc.shape[1])
        kept = p
        if DROPS:
            places = key_places(rule, first, stop, KEYS)
            kept = thinned(p, rule, rows[:, None], places[None, :], head, batch)
        acc *= shrink[:, None]
        acc = tl.dot(kept.to(v_block.dtype), v_block, acc, input_precision="tf32x3")
        total = total * shrink + tl.sum(p, 1)
        peak = highest
    return acc, total, peak


@triton.jit
def _finish(
    acc,
    total,
    peak,
    out,
    lse,
    largest,
    out_row,
    lse_row,
    largest_row,
    first,
    end,
    old_end,
    ADD: tl.constexpr,
    V_DIM: tl.constexpr,
    PEAKS: tl.constexpr,
):
    """Normalise, merge with what is there if ADD, and write out and natural-log lse.

    old_end: end of the rows that ADD reads; the others are taken to be blank. PEAKS: and the
    largest score of every row.
    """
    reached = total > 0.0
    total = tl.where(reached, total, 1.0)
    result = acc / total[:, None]
    found = tl.where(reached, (peak + tl.log2(total)) * LN2, float("-inf"))
    rows = first + tl.arange(0, acc.shape[0])
    at = lse + rows.to(tl.int64) * lse_row
    if PEAKS:
        highest, place = peak * LN2, largest + rows.to(tl.int64) * largest_row
        if ADD:
            old = tl.load(place, mask=rows < old_end, other=float("-inf"))
            highest = tl.maximum(highest, old)
        tl.store(place, highest, mask=rows < end)
    if ADD:
        before = tl.load(at, mask=rows < old_end, other=float("-inf"))
        origin = tl.maximum(before, found)
        origin = tl.where(origin == float("-inf"), 0.0, origin)
        kept, came = tl.exp(before - origin), tl.exp(found - origin)
        reached = kept + came > 0.0
        both = tl.where(reached, kept + came, 1.0)
        found = tl.where(reached, origin + tl.log(both), float("-inf"))
        blend_rows(out, first, out_row, end, result, came / both, old_end, V_DIM)
    else:
        put_rows(out, first, out_row, end, result, 0, False, V_DIM)
    if ADD:  # several threads may hold a row's number: none stores before all have loaded
        tl.debug_barrier()
    tl.store(at, found, mask=rows < end)


@triton.jit
def forward(
    q,
    k,
    v,
    out,
    lse,
    largest,
    lists,
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
    PEAKS: tl.constexpr,
):
    """Grid: [items, batch * num_heads]; scale is that of the scores times log2(e), positive.

    STEP: strides of tensors of rows are in units of it, which lets whole words be loaded.

    rule: a `ScoreRule`, read where CAPPED or DROPS; largest: of every row, written where PEAKS.
    """
    item = lists.items + tl.program_id(0) * 7
    batch, head = tl.program_id(1) // num_heads, tl.program_id(1) % num_heads
    first, end = tl.load(item), tl.load(item + 1)
    k_base, v_base = at_head(k, batch, head // group, STEP), at_head(v, batch, head // group, STEP)
    k_row, v_row = k.row * STEP, v.row * STEP
    q_base = at_head(q, batch, head, STEP)
    q_block = load_rows(q_base, first, q.row * STEP, end, True, ROWS, HEAD_DIM, WIDTH)
    places = row_places(rule, first, end, ROWS) if DROPS else 0
    acc = tl.zeros([ROWS, V_WIDTH], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    for i in range(tl.load(item + 2), tl.load(item + 3)):
        start, stop = run_of(lists.full, i, 1)
        acc, total, peak = _run(
            acc, total, peak, q_block, k_base, v_base, k_row, v_row, start, stop, 0, 0, scale,
            rule, places, head, batch, False, KEYS, HEAD_DIM, V_DIM, CAPPED, DROPS,
        )  # fmt: skip
    for i in range(tl.load(item + 4), tl.load(item + 5)):
        start, stop = run_of(lists.masked, i, 1)
        low, high = interval_of(lists.intervals, i, ROWS)
        acc, total, peak = _run(
            acc, total, peak, q_block, k_base, v_base, k_row, v_row, start, stop, low, high, scale,
            rule, places, head, batch, True, KEYS, HEAD_DIM, V_DIM, CAPPED, DROPS,
        )  # fmt: skip
    out_base, lse_base = at_head(out, batch, head, STEP), at_head(lse, batch, head, 1)
    largest_base = at_head(largest, batch, head, 1) if PEAKS else lse_base
    largest_row = largest.row if PEAKS else lse.row
    _finish(
        acc, total, peak, out_base, lse_base, largest_base, out.row * STEP, lse.row, largest_row,
        first, end, tl.load(item + 6), ADD, V_DIM, PEAKS,
    )  # fmt: skip

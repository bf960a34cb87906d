"""Attention of whole rows in Triton: each row is summed block by block, in the order of positions.

    attend          a program for each block of queries and head: over its blocks of keys
    query_gradients the same, for dq
    key_gradients   a program for each block of keys and KV head: over heads, then blocks of queries

Blocks of the walked side lie at fixed places of a document, so that a row's sums have one order
wherever the row is computed (`exact/blocks.py`). One shape of block serves all calls of a dtype and
width, and no multiplication is fused with an addition unless it says so: a compiler that is given
other strides could fuse others.

Imports triton, so nothing imports this module until whole rows are computed in Triton.
"""

# ruff: noqa: N803
# pyright: reportArgumentType=false, reportIndexIssue=false

import triton
import triton.language as tl

from tilewise.kernels.triton.common import LN2, LOG2E, at_head, capped, thinned, within


@triton.jit
def _rows(view, batch, head, rows, STEP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[rows, BLOCK] of a head, 0 for row -1 and past WIDTH."""
    columns = tl.arange(0, BLOCK)[None, :]
    at = at_head(view, batch, head, STEP) + rows.to(tl.int64)[:, None] * view.row * STEP + columns
    return tl.load(at, mask=(rows >= 0)[:, None] & (columns < WIDTH), other=0.0)


@triton.jit
def _put(view, batch, head, rows, value, STEP: tl.constexpr, WIDTH: tl.constexpr):
    columns = tl.arange(0, value.shape[1])[None, :]
    at = at_head(view, batch, head, STEP) + rows.to(tl.int64)[:, None] * view.row * STEP + columns
    tl.store(at, value, mask=(rows >= 0)[:, None] & (columns < WIDTH))


@triton.jit
def _numbers(view, batch, head, rows):
    """Return pointers to the numbers of rows, one each."""
    return at_head(view, batch, head, 1) + rows.to(tl.int64) * view.row


@triton.jit
def _loaded(view, batch, head, rows):
    """The numbers of rows, 0 for row -1."""
    return tl.load(_numbers(view, batch, head, rows), mask=rows >= 0, other=0.0)


@triton.jit
def _own(lists, block, OWN: tl.constexpr):
    """The rows of an own block, -1 behind the last one, and their positions."""
    at = block * OWN + tl.arange(0, OWN)
    return tl.load(lists.own + at), tl.load(lists.own_positions + at)


@triton.jit
def _walked(lists, number, WALKED: tl.constexpr):
    """The rows of a walked block, -1 for those that are absent, and their positions."""
    places = tl.arange(0, WALKED)
    rows = tl.load(lists.walked + number * WALKED + places)
    return rows, tl.load(lists.starts + number) + places


@triton.jit
def _allowed(lists, block, number, depth, OWN: tl.constexpr, WALKED: tl.constexpr):
    """[own, walked] whether rows meet."""
    places = number * WALKED + tl.arange(0, WALKED)
    found = tl.zeros([OWN, WALKED], tl.int32)
    for i in range(depth):
        at = lists.intervals + (block * depth + i) * 2 * OWN + tl.arange(0, OWN)
        found += within(places, tl.load(at), tl.load(at + OWN)).to(tl.int32)
    return found > 0


@triton.jit
def _raised(products, scale, rule, CAPPED: tl.constexpr):
    """Scores in base 2, and the slope of the cap, 1 without one."""
    if CAPPED:
        cap = capped(products, rule)
        return cap * scale, 1.0 - cap * cap
    return products * scale, 1.0


@triton.jit
def _weights(
    products, lse, lists, block, number, scale, rule, depth,
    OWN: tl.constexpr, WALKED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """The weights of a block's pairs, 0 where rows do not meet, and the slope of the cap.

    lse: in base 2, of the side of the queries, broadcast to [own, walked].
    """
    scores, slope = _raised(products, scale, rule, CAPPED)
    allowed = _allowed(lists, block, number, depth, OWN, WALKED)
    return tl.where(allowed, tl.exp2(scores - lse), 0.0), slope


@triton.jit(do_not_specialize=["depth"])
def attend(
    q, k, v, out, lse, largest, lists, scale, rule, depth, group,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, V_DIM: tl.constexpr, V_WIDTH: tl.constexpr,
    STEP: tl.constexpr, OWN: tl.constexpr, WALKED: tl.constexpr, CAPPED: tl.constexpr,
    DROPS: tl.constexpr, PEAKS: tl.constexpr,
):  # fmt: skip
    """Grid: [own blocks, heads, batch]; scale is that of the scores times log2(e)."""
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, positions = _own(lists, block, OWN)
    own = _rows(q, batch, head, rows, STEP, HEAD_DIM, WIDTH)
    acc = tl.zeros([OWN, V_WIDTH], tl.float32)
    total = tl.zeros([OWN], tl.float32)
    peak = tl.full([OWN], float("-inf"), tl.float32)
    for i in range(tl.load(lists.bounds + block), tl.load(lists.bounds + block + 1)):
        number = tl.load(lists.meets + i)
        others, places = _walked(lists, number, WALKED)
        keys = _rows(k, batch, head // group, others, STEP, HEAD_DIM, WIDTH)
        products = tl.dot(own, tl.trans(keys), input_precision="tf32x3")
        scores, _ = _raised(products, scale, rule, CAPPED)
        allowed = _allowed(lists, block, number, depth, OWN, WALKED)
        scores = tl.where(allowed, scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, 1))
        origin = tl.where(highest == float("-inf"), 0.0, highest)
        p = tl.exp2(scores - origin[:, None])
        shrink = tl.exp2(peak - origin)
        kept = p
        if DROPS:
            kept = thinned(p, rule, positions[:, None], places[None, :], head, batch)
        values = _rows(v, batch, head // group, others, STEP, V_DIM, V_WIDTH)
        acc *= shrink[:, None]
        acc = tl.dot(kept.to(values.dtype), values, acc, input_precision="tf32x3")
        total = total * shrink + tl.sum(p, 1)
        peak = highest
    reached = total > 0.0
    total = tl.where(reached, total, 1.0)
    _put(out, batch, head, rows, acc / total[:, None], STEP, V_DIM)
    found = tl.where(reached, (peak + tl.log2(total)) * LN2, float("-inf"))
    tl.store(_numbers(lse, batch, head, rows), found, mask=rows >= 0)
    if PEAKS:
        tl.store(_numbers(largest, batch, head, rows), peak * LN2, mask=rows >= 0)


@triton.jit(do_not_specialize=["depth"])
def query_gradients(
    q, k, v, dout, dq, lse, delta, lists, scale, slope_scale, rule, depth, group,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, V_DIM: tl.constexpr, V_WIDTH: tl.constexpr,
    STEP: tl.constexpr, OWN: tl.constexpr, WALKED: tl.constexpr, CAPPED: tl.constexpr,
    DROPS: tl.constexpr,
):  # fmt: skip
    """Grid: [own blocks, heads, batch]; slope_scale is that of products, whatever the cap."""
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, positions = _own(lists, block, OWN)
    own = _rows(q, batch, head, rows, STEP, HEAD_DIM, WIDTH)
    grad = _rows(dout, batch, head, rows, STEP, V_DIM, V_WIDTH)
    own_lse = _loaded(lse, batch, head, rows) * LOG2E
    own_delta = _loaded(delta, batch, head, rows)
    acc = tl.zeros([OWN, WIDTH], tl.float32)
    for i in range(tl.load(lists.bounds + block), tl.load(lists.bounds + block + 1)):
        number = tl.load(lists.meets + i)
        others, places = _walked(lists, number, WALKED)
        keys = _rows(k, batch, head // group, others, STEP, HEAD_DIM, WIDTH)
        products = tl.dot(own, tl.trans(keys), input_precision="tf32x3")
        p, slope = _weights(
            products, own_lse[:, None], lists, block, number, scale, rule, depth,
            OWN, WALKED, CAPPED,
        )  # fmt: skip
        values = _rows(v, batch, head // group, others, STEP, V_DIM, V_WIDTH)
        dp = tl.dot(grad, tl.trans(values), input_precision="tf32x3")
        if DROPS:
            dp = thinned(dp, rule, positions[:, None], places[None, :], head, batch)
        ds = p * (dp - own_delta[:, None]) * slope
        acc = tl.dot(ds.to(keys.dtype), keys, acc, input_precision="tf32x3")
    _put(dq, batch, head, rows, acc * slope_scale, STEP, HEAD_DIM)


@triton.jit(do_not_specialize=["depth"])
def key_gradients(
    q, k, v, dout, dk, dv, lse, delta, lists, scale, slope_scale, rule, depth, group,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, V_DIM: tl.constexpr, V_WIDTH: tl.constexpr,
    STEP: tl.constexpr, OWN: tl.constexpr, WALKED: tl.constexpr, CAPPED: tl.constexpr,
    DROPS: tl.constexpr,
):  # fmt: skip
    """Grid: [own blocks, KV heads, batch]; the walked side is that of queries."""
    block, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, positions = _own(lists, block, OWN)
    keys = _rows(k, batch, kv_head, rows, STEP, HEAD_DIM, WIDTH)
    values = _rows(v, batch, kv_head, rows, STEP, V_DIM, V_WIDTH)
    acc_k = tl.zeros([OWN, WIDTH], tl.float32)
    acc_v = tl.zeros([OWN, V_WIDTH], tl.float32)
    for head in range(kv_head * group, (kv_head + 1) * group):
        for i in range(tl.load(lists.bounds + block), tl.load(lists.bounds + block + 1)):
            number = tl.load(lists.meets + i)
            others, places = _walked(lists, number, WALKED)
            queries = _rows(q, batch, head, others, STEP, HEAD_DIM, WIDTH)
            grads = _rows(dout, batch, head, others, STEP, V_DIM, V_WIDTH)
            their_lse = _loaded(lse, batch, head, others) * LOG2E
            their_delta = _loaded(delta, batch, head, others)
            products = tl.dot(keys, tl.trans(queries), input_precision="tf32x3")
            p, slope = _weights(
                products, their_lse[None, :], lists, block, number, scale, rule, depth,
                OWN, WALKED, CAPPED,
            )  # fmt: skip
            dp = tl.dot(values, tl.trans(grads), input_precision="tf32x3")
            kept = p
            if DROPS:
                kept = thinned(p, rule, places[None, :], positions[:, None], head, batch)
                dp = thinned(dp, rule, places[None, :], positions[:, None], head, batch)
            acc_v = tl.dot(kept.to(grads.dtype), grads, acc_v, input_precision="tf32x3")
            ds = p * (dp - their_delta[None, :]) * slope
            acc_k = tl.dot(ds.to(queries.dtype), queries, acc_k, input_precision="tf32x3")
    _put(dk, batch, kv_head, rows, acc_k * slope_scale, STEP, HEAD_DIM)
    _put(dv, batch, kv_head, rows, acc_v, STEP, V_DIM)

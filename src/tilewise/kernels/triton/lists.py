"""Attention with a list of keys for each query, in Triton: forward, and backward without atomics.

    forward    a program for each query, KV head and block of its query heads: over the list
    backward   dq alike; then for each query and block of its list the shares of dk and dv, aside;
               then each row of the tables adds its shares, in the order of queries

All heads of a KV head read the same rows, so matrix products have heads on one side and rows of the
tables on the other. Shares are made of a few queries at a time, so that memory does not grow with
their number. Every sum has a fixed order: the same bits each time.

Imports triton, so nothing imports this module until lists are attended to in Triton.
"""

# ruff: noqa: N803
# pyright: reportArgumentType=false, reportIndexIssue=false

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.protocol import loadable
from tilewise.kernels.triton.common import LN2, LOG2E, load_rows, put_rows
from tilewise.kernels.triton.launch import KernelLaunch, launch
from tilewise.kernels.triton.tuning import ListBlocks, ListTuning, list_tuning_for
from tilewise.kernels.triton.views import in_steps, view_of

MOST_NUMBERS = 1 << 27
"""Numbers of the shares that are made before they are added: half a GB in fp32."""
_COLUMNS = 1024  # that a program adds up


def attend(q: Tensor, k: Tensor, v: Tensor, places: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """out [queries, heads, v_head_dim] and lse [queries, heads]; see `indexed.lists`.

    Args:
        q: [queries, heads, head_dim]; k, v: tables [rows, kv heads, width].
        places: rows of the tables, [queries, k]; -1 for none.
    """
    q, k, v = map(loadable, (q, k, v))
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    lists, bounds = _lists(places)
    _launch_queries("forward", forward, (q, k, v, out, lse), lists, bounds, scale)
    return out, lse


def differentiate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    places: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of what `attend` gave."""
    q, k, v, dout = map(loadable, (q, k, v, dout))
    dq, delta = torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty_like(lse)
    lists, bounds = _lists(places)
    tensors = q, k, v, out, dout, dq, lse, dlse, delta
    _launch_queries("dq", queries_backward, tensors, lists, bounds, scale)
    length, kv_heads, width = lists.shape[1], k.shape[1], k.shape[2] + v.shape[2]
    total = q.new_zeros((len(k), kv_heads, width), dtype=torch.float32)
    size = max(1, MOST_NUMBERS // max(1, length * kv_heads * width))
    rows = torch.arange(len(k) + 1, device=q.device, dtype=torch.int32)
    for first in range(0, len(q) if total.numel() and length else 0, size):
        own = lists[first : first + size]
        shares = q.new_empty((own.numel(), kv_heads, width), dtype=torch.float32)
        launch(
            _sharing,
            [x.unsqueeze(1) for x in (q, k, v, dout, lse, delta)],
            lists_backward,
            len(own),
            length,
            extra=(shares, lists, bounds, first, length, scale),
        )
        named, order = own.flatten().sort(stable=True)
        ends = torch.searchsorted(named, rows)
        launch(_adding, (total, shares), add_shares, extra=(order, ends))
    dk, dv = total.split((k.shape[2], v.shape[2]), -1)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _lists(places: Tensor) -> tuple[Tensor, Tensor]:
    """Return lists of rows as kernels read them.

    Args:
        places: row numbers [queries, length], -1 for none.
    Returns:
        int32 [queries, length]; and int32 [queries, 2], the first column and the end of what is not
        -1.
    """
    lists = places.to(torch.int32).contiguous()
    length = lists.shape[1]
    columns = torch.arange(length, dtype=torch.int32, device=lists.device)
    bounds = lists.new_zeros((len(lists), 2))
    if length:
        bounds[:, 0] = columns.expand_as(lists).masked_fill(lists < 0, length).amin(1)
        bounds[:, 1] = columns.expand_as(lists).masked_fill(lists < 0, -1).amax(1) + 1
    return lists, bounds


def _launch_queries(
    name: str,
    kernel: Any,
    tensors: Sequence[Tensor],
    lists: Tensor,
    bounds: Tensor,
    scale: float,
) -> None:
    """Launch a kernel with a program for each query, KV head and block of query heads."""
    if tensors[0].numel():
        extra = lists, bounds, lists.shape[1], scale
        launch(_asking, [x.unsqueeze(1) for x in tensors], kernel, name, extra=extra)


def _asking(tensors: Sequence[Tensor], kernel: Any, name: str) -> KernelLaunch:
    q, k, v, *_ = tensors
    group = q.shape[2] // k.shape[2]
    blocks: ListBlocks = getattr(_tuning(q, v), name)
    constants, strides = _constants(tensors, blocks, group)
    num_blocks = -(-group // constants["HEADS"])
    grid = q.shape[0] * num_blocks, k.shape[2], 1
    return KernelLaunch(kernel, grid, (group, num_blocks), constants, strides)


def _sharing(tensors: Sequence[Tensor], kernel: Any, num_queries: int, length: int) -> KernelLaunch:
    q, k, v, *_ = tensors
    group = q.shape[2] // k.shape[2]
    blocks = _tuning(q, v).shares
    constants, strides = _constants(tensors, blocks, group)
    num_blocks = -(-length // blocks.keys)
    grid = num_queries * num_blocks, k.shape[2], 1
    return KernelLaunch(kernel, grid, (group, num_blocks, k.shape[2]), constants, strides)


def _adding(tensors: Sequence[Tensor], kernel: Any) -> KernelLaunch:
    num_rows, width = tensors[0].shape[0], tensors[0].shape[1:].numel()
    grid = num_rows, -(-width // _COLUMNS), 1
    return KernelLaunch(kernel, grid, (width,), {"COLUMNS": _COLUMNS})


def _tuning(q: Tensor, v: Tensor) -> ListTuning:
    major = torch.cuda.get_device_capability(q.device)[0] if q.is_cuda else 9
    return list_tuning_for(max(q.shape[-1], v.shape[-1]), q.dtype, major)


def _constants(
    tensors: Sequence[Tensor], blocks: ListBlocks, group: int
) -> tuple[dict[str, Any], Sequence[Any]]:
    views, step = in_steps([view_of(x) for x in tensors])
    heads = max(16, min(blocks.heads, triton.next_power_of_2(group)))
    constants = widths_of(tensors[0].shape[3], tensors[2].shape[3])
    constants |= {"HEADS": heads, "KEYS": blocks.keys, "STEP": step}
    constants |= {"num_warps": blocks.warps, "num_stages": blocks.stages}
    return constants, [x[1:] for x in views]


def widths_of(head_dim: int, v_head_dim: int) -> dict[str, int]:
    """Constants of the kernels: columns of rows, and of their blocks, which are powers of 2.

    A row of keys is in two blocks where one would be longer than both: 576, of latents with their
    rotary part, in 512 and 64 instead of 1024. REST 0: in one.
    """
    whole = max(16, triton.next_power_of_2(head_dim))
    half = whole // 2
    rest = max(16, triton.next_power_of_2(head_dim - half)) if half >= 16 else whole
    main, rest = (half, rest) if rest < half else (whole, 0)
    widths = {"HEAD_DIM": head_dim, "MAIN": main, "REST": rest}
    return widths | {"V_DIM": v_head_dim, "V_WIDTH": max(16, triton.next_power_of_2(v_head_dim))}


@triton.jit
def _of_query(view, query, STEP: tl.constexpr):
    """Return where the heads of a query begin."""
    return view.base + tl.cast(query, tl.int64) * view.row * STEP


@triton.jit
def _heads_of(
    view, query, head, end, STEP: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    MAIN: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """A query's heads from one on, below end, in two blocks of columns; the second only if REST."""
    base, stride = _of_query(view, query, STEP), view.head * STEP
    main = load_rows(base, head, stride, end, True, HEADS, WIDTH, MAIN)
    rest = main
    if REST:
        rest = load_rows(base + MAIN, head, stride, end, True, HEADS, WIDTH - MAIN, REST)
    return main, rest


@triton.jit
def _number_of(view, query, heads):
    """Return where the numbers of a query's heads are."""
    return view.base + tl.cast(query, tl.int64) * view.row + heads * view.head


@triton.jit
def _named(places, query, length, first, KEYS: tl.constexpr):
    """The rows that a block of a list names, in 64 bits; -1 for none."""
    keys = first + tl.arange(0, KEYS)
    at = places + tl.cast(query, tl.int64) * length + keys
    return tl.load(at, mask=keys < length, other=-1).to(tl.int64)


@triton.jit
def _taken(
    table, head, rows, STEP: tl.constexpr, WIDTH: tl.constexpr, MAIN: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """Rows of a table's head, 0 for no row, in two blocks of columns; the second only if REST."""
    at = table.base + (tl.cast(head, tl.int64) * table.head + rows * table.row)[:, None] * STEP
    columns = tl.arange(0, MAIN)[None, :]
    is_named = (rows >= 0)[:, None]
    main = tl.load(at + columns, mask=is_named & (columns < WIDTH), other=0.0)
    rest = main
    if REST:
        columns = MAIN + tl.arange(0, REST)[None, :]
        rest = tl.load(at + columns, mask=is_named & (columns < WIDTH), other=0.0)
    return main, rest


@triton.jit
def _products(a, a_rest, b, b_rest, REST: tl.constexpr):
    """a b^T of rows in two blocks of columns."""
    found = tl.dot(a, tl.trans(b), input_precision="tf32x3")
    if REST:
        found = tl.dot(a_rest, tl.trans(b_rest), found, input_precision="tf32x3")
    return found


@triton.jit(do_not_specialize=["length"])
def forward(
    q, k, v, out, lse, places, bounds, length, scale, group, num_blocks,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr, STEP: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Online softmax, in base 2. Grid: [queries * num_blocks, kv heads]."""
    query, kv_head = tl.program_id(0) // num_blocks, tl.program_id(1)
    head = kv_head * group + tl.program_id(0) % num_blocks * HEADS
    end = (kv_head + 1) * group
    own, own_rest = _heads_of(q, query, head, end, STEP, HEADS, HEAD_DIM, MAIN, REST)
    acc = tl.zeros([HEADS, V_WIDTH], tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    for first in range(tl.load(bounds + 2 * query), tl.load(bounds + 2 * query + 1), KEYS):
        rows = _named(places, query, length, first, KEYS)
        keys, keys_rest = _taken(k, kv_head, rows, STEP, HEAD_DIM, MAIN, REST)
        scores = _products(own, own_rest, keys, keys_rest, REST) * (scale * LOG2E)
        scores = tl.where((rows >= 0)[None, :], scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, 1))  # finite: the first place names a row
        p = tl.exp2(scores - highest[:, None])
        shrink = tl.exp2(peak - highest)
        values = _taken(v, kv_head, rows, STEP, V_DIM, V_WIDTH, 0)[0]
        acc *= shrink[:, None]
        acc = tl.dot(p.to(values.dtype), values, acc, input_precision="tf32x3")
        total = total * shrink + tl.sum(p, 1)
        peak = highest
    reached = total > 0.0
    total = tl.where(reached, total, 1.0)
    base = _of_query(out, query, STEP)
    put_rows(base, head, out.head * STEP, end, acc / total[:, None], 0, False, V_DIM)
    heads = head + tl.arange(0, HEADS)
    found = tl.where(reached, (peak + tl.log2(total)) * LN2, float("-inf"))
    tl.store(_number_of(lse, query, heads), found, mask=heads < end)


@triton.jit(do_not_specialize=["length"])
def queries_backward(
    q, k, v, out, dout, dq, lse, dlse, delta, places, bounds, length, scale, group, num_blocks,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr, STEP: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dq, and delta = sum(dout out) - dlse. Grid: [queries * num_blocks, kv heads]."""
    query, kv_head = tl.program_id(0) // num_blocks, tl.program_id(1)
    head = kv_head * group + tl.program_id(0) % num_blocks * HEADS
    end = (kv_head + 1) * group
    heads = head + tl.arange(0, HEADS)
    own, own_rest = _heads_of(q, query, head, end, STEP, HEADS, HEAD_DIM, MAIN, REST)
    grad = _heads_of(dout, query, head, end, STEP, HEADS, V_DIM, V_WIDTH, 0)[0]
    result = _heads_of(out, query, head, end, STEP, HEADS, V_DIM, V_WIDTH, 0)[0]
    row_delta = tl.sum(grad.to(tl.float32) * result.to(tl.float32), 1)
    row_delta -= tl.load(_number_of(dlse, query, heads), mask=heads < end, other=0.0)
    tl.store(_number_of(delta, query, heads), row_delta, mask=heads < end)
    row_lse = tl.load(_number_of(lse, query, heads), mask=heads < end, other=0.0) * LOG2E
    acc = tl.zeros([HEADS, MAIN], tl.float32)
    acc_rest = acc
    if REST:
        acc_rest = tl.zeros([HEADS, REST], tl.float32)
    for first in range(tl.load(bounds + 2 * query), tl.load(bounds + 2 * query + 1), KEYS):
        rows = _named(places, query, length, first, KEYS)
        keys, keys_rest = _taken(k, kv_head, rows, STEP, HEAD_DIM, MAIN, REST)
        scores = _products(own, own_rest, keys, keys_rest, REST) * (scale * LOG2E)
        scores = tl.where((rows >= 0)[None, :], scores, float("-inf"))
        p = tl.exp2(scores - row_lse[:, None])
        values = _taken(v, kv_head, rows, STEP, V_DIM, V_WIDTH, 0)[0]
        dp = tl.dot(grad, tl.trans(values), input_precision="tf32x3")
        ds = (p * (dp - row_delta[:, None])).to(keys.dtype)
        acc = tl.dot(ds, keys, acc, input_precision="tf32x3")
        if REST:
            acc_rest = tl.dot(ds, keys_rest, acc_rest, input_precision="tf32x3")
    base, stride = _of_query(dq, query, STEP), dq.head * STEP
    put_rows(base, head, stride, end, acc * scale, 0, False, HEAD_DIM)
    if REST:
        put_rows(base + MAIN, head, stride, end, acc_rest * scale, 0, False, HEAD_DIM - MAIN)


@triton.jit(do_not_specialize=["first_query", "length"])
def lists_backward(
    q, k, v, dout, lse, delta, shares, places, bounds, first_query, length, scale,
    group, num_blocks, num_kv_heads,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr, STEP: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Shares of dk and dv, [queries * length, kv heads, head_dim + v_head_dim]; none of no row.

    Grid: [queries * num_blocks, kv heads]: a block of a query's list, over all heads of a KV head.
    """
    number, kv_head = tl.program_id(0) // num_blocks, tl.program_id(1)
    query, first = first_query + number, tl.program_id(0) % num_blocks * KEYS
    low, high = tl.load(bounds + 2 * query), tl.load(bounds + 2 * query + 1)
    if (first < high) & (first + KEYS > low):
        rows = _named(places, query, length, first, KEYS)
        is_named = (rows >= 0)[:, None]
        keys, keys_rest = _taken(k, kv_head, rows, STEP, HEAD_DIM, MAIN, REST)
        values = _taken(v, kv_head, rows, STEP, V_DIM, V_WIDTH, 0)[0]
        dk = tl.zeros([KEYS, MAIN], tl.float32)
        dk_rest = dk
        if REST:
            dk_rest = tl.zeros([KEYS, REST], tl.float32)
        dv = tl.zeros([KEYS, V_WIDTH], tl.float32)
        end = (kv_head + 1) * group
        for head in range(kv_head * group, end, HEADS):
            heads = head + tl.arange(0, HEADS)
            own, own_rest = _heads_of(q, query, head, end, STEP, HEADS, HEAD_DIM, MAIN, REST)
            scores = _products(keys, keys_rest, own, own_rest, REST) * (scale * LOG2E)
            scores = tl.where(is_named, scores, float("-inf"))
            at = _number_of(lse, query, heads)
            row_lse = tl.load(at, mask=heads < end, other=float("inf")) * LOG2E
            p = tl.exp2(scores - row_lse[None, :])
            grad = _heads_of(dout, query, head, end, STEP, HEADS, V_DIM, V_WIDTH, 0)[0]
            dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision="tf32x3")
            dp = tl.dot(values, tl.trans(grad), input_precision="tf32x3")
            row_delta = tl.load(_number_of(delta, query, heads), mask=heads < end, other=0.0)
            ds = (p * (dp - row_delta[None, :])).to(own.dtype)
            dk = tl.dot(ds, own, dk, input_precision="tf32x3")
            if REST:
                dk_rest = tl.dot(ds, own_rest, dk_rest, input_precision="tf32x3")
        pairs = tl.cast(number, tl.int64) * length + first + tl.arange(0, KEYS)
        at = shares + ((pairs * num_kv_heads + kv_head) * (HEAD_DIM + V_DIM))[:, None]
        columns = tl.arange(0, MAIN)[None, :]
        tl.store(at + columns, dk * scale, mask=is_named & (columns < HEAD_DIM))
        if REST:
            columns = MAIN + tl.arange(0, REST)[None, :]
            tl.store(at + columns, dk_rest * scale, mask=is_named & (columns < HEAD_DIM))
        columns = tl.arange(0, V_WIDTH)[None, :]
        tl.store(at + HEAD_DIM + columns, dv, mask=is_named & (columns < V_DIM))


@triton.jit
def add_shares(total, shares, order, ends, width, COLUMNS: tl.constexpr):
    """Add to each row of the tables its shares, in their order. Grid: [rows, blocks of columns].

    Args:
        order: shares by row; ends: of each row where its own begin, and where the next one's do.
    """
    row = tl.program_id(0)
    first, end = tl.load(ends + row), tl.load(ends + row + 1)
    if first < end:
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        at = total + tl.cast(row, tl.int64) * width + columns
        acc = tl.load(at, mask=columns < width, other=0.0)
        for i in range(first, end):
            share = shares + tl.load(order + i) * width + columns
            acc += tl.load(share, mask=columns < width, other=0.0)
        tl.store(at, acc, mask=columns < width)

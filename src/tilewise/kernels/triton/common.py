"""Functions that our Triton kernels share: places of a head's rows and a block's runs, loading and
adding.

Tensors come as `View`, the lists of work as `Lists`: named tuples, of which Triton makes arguments.
Imports triton, so nothing imports this module until the Triton provider runs.
"""

# ruff: noqa: N803
# pyright: reportArgumentType=false

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def at_head(view, batch, head, STEP: tl.constexpr):
    """Return where the rows of a head begin; offsets are 64 bits wide, strides in units of STEP."""
    strided = tl.cast(batch, tl.int64) * view.batch + tl.cast(head, tl.int64) * view.head
    return view.base + strided * STEP


@triton.jit
def run_of(runs, i, UNIT: tl.constexpr):
    """First and end of a run of others; the first is a multiple of UNIT."""
    return tl.multiple_of(tl.load(runs + 2 * i), UNIT), tl.load(runs + 2 * i + 1)


@triton.jit
def interval_of(intervals, i, OWN: tl.constexpr):
    """First and end of the others that each own index of a masked run meets."""
    ends = intervals + 2 * OWN * i + tl.arange(0, OWN)
    return tl.load(ends), tl.load(ends + OWN)


@triton.jit
def load_rows(
    base,
    first,
    stride,
    end,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """[ROWS, WIDTH] of the rows from first on; 0 from end on, which only MASKED blocks reach."""
    at, inside = places(base, first, stride, end, ROWS, HEAD_DIM, WIDTH)
    if MASKED:
        return tl.load(at, mask=inside, other=0.0)
    if HEAD_DIM != WIDTH:
        return tl.load(at, mask=tl.arange(0, WIDTH)[None, :] < HEAD_DIM, other=0.0)
    return tl.load(at)


@triton.jit
def put_rows(base, first, stride, end, value, old_end, ADD: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Write value [rows, width] to the rows from first on, below end, or with ADD add it to those
    of them that are below old_end: the first rows, or none.

    One program adds to a number once: atomics give the same bits each time, and leave the old
    numbers out of registers.
    """
    at, inside = places(base, first, stride, end, value.shape[0], HEAD_DIM, value.shape[1])
    if ADD:
        is_old = first + tl.arange(0, value.shape[0])[:, None] < old_end
        tl.atomic_add(at, value, mask=inside & is_old, sem="relaxed")
        inside = inside & (first + tl.arange(0, value.shape[0])[:, None] >= old_end)
    tl.store(at, value, mask=inside)


@triton.jit
def blend_rows(base, first, stride, end, value, share, old_end, HEAD_DIM: tl.constexpr):
    """Move the rows from first on, below end, to value [rows, width] by a share of each row.

    From old_end on they are not read, and taken to be 0.
    """
    at, inside = places(base, first, stride, end, value.shape[0], HEAD_DIM, value.shape[1])
    is_old = first + tl.arange(0, value.shape[0])[:, None] < old_end
    old = tl.load(at, mask=inside & is_old, other=0.0)
    tl.store(at, old + share[:, None] * (value - old), mask=inside)


@triton.jit
def places(
    base, first, stride, end, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """Return where a block's numbers are, and which of them exist.

    The block's own offset may pass 2^31, those within it do not: only it is 64 bits wide.
    """
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    at = base + tl.cast(first, tl.int64) * stride + (rows * stride + columns)
    return at, (first + rows < end) & (columns < HEAD_DIM)


@triton.jit
def capped(scores, rule):
    """tanh(scores rule.inner), to the last bits of fp32 also where it is small."""
    x = scores * rule.inner
    square = x * x
    series = -0.00886323553 + square * 0.00359212803
    series = -0.0539682540 + square * (0.0218694885 + square * series)
    series = 1.0 + square * (-0.333333333 + square * (0.133333333 + square * series))
    return tl.where(tl.abs(x) < 0.4, x * series, 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0))


@triton.jit
def row_places(rule, first, end, ROWS: tl.constexpr):
    """Global positions of the rows from first on."""
    rows = first + tl.arange(0, ROWS)
    return tl.load(rule.q_positions + rows, mask=rows < end, other=0)


@triton.jit
def key_places(rule, first, end, KEYS: tl.constexpr):
    """Global positions of the keys from first on."""
    keys = first + tl.arange(0, KEYS)
    return tl.load(rule.k_positions + keys, mask=keys < end, other=0)


@triton.jit
def thinned(weights, rule, rows, keys, head, batch):
    """Weights, those of dropped pairs 0 and the others grown; rows and keys are broadcast.

    The same Philox as `kernels.dropout`.
    """
    nothing = (rows + keys) * 0
    counters = keys + nothing, rows + nothing, nothing + rule.first_head + head, nothing + batch
    a, b, c, d = counters
    word, _, _, _ = tl.philox(
        rule.seed, a.to(tl.uint32), b.to(tl.uint32), c.to(tl.uint32), d.to(tl.uint32), 7
    )
    return tl.where(word.to(tl.int64) >= rule.threshold, weights * rule.growth, 0.0)


@triton.jit
def within(others, low, high):
    """[own, others] whether each other index lies in its own index's interval."""
    return (others[None, :] >= low[:, None]) & (others[None, :] < high[:, None])

"""The least bytes that any plan with equal shares of work and tokens must move.

A rank that computes W cells (query head, query, key) reads X_g query rows and K_g key rows of KV
head g, and W <= sum over g of X_g K_g. Of each head it owns p and r of them; what it lacks it
receives, and what it adds to it sends away. docs/planner.md derives what follows.
"""

from __future__ import annotations

from typing import NamedTuple

from tilewise.plan.payload import ITEM_BYTES, accumulator
from tilewise.workload import Workload


class Price(NamedTuple):
    """Bytes that a row of one head costs a rank that does not own it, both ways together."""

    q: float
    kv: float


def least_bytes(work: Workload, world_size: int) -> int:
    """Bytes that the rank that sends most sends at least, in both passes."""
    return sum(int(_least(work, world_size, price)) for price in prices(work))


def prices(work: Workload) -> tuple[Price, Price]:
    """Of forward and of backward; operands that may have been kept cost nothing in backward."""
    width = work.head_dim
    value, wire = width * ITEM_BYTES(work.dtype), width * ITEM_BYTES(work.wire_dtype or work.dtype)
    statistic = ITEM_BYTES(accumulator(work.dtype))
    kept = 0 if work.save == "replay" else 1
    forward = Price(value + wire + statistic, 2 * value)
    backward = Price((2 - kept) * value + 2 * statistic + wire, 2 * (1 - kept) * value + 2 * wire)
    return forward, backward


def _least(work: Workload, world_size: int, price: Price) -> float:
    """The bytes with which a rank's share of cells can just be reached."""
    cells = _cells(work) / world_size
    low, high = 0.0, 1.0
    while _most_cells(work, world_size, price, high) < cells:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        enough = _most_cells(work, world_size, price, middle) >= cells
        low, high = (low, middle) if enough else (middle, high)
    return low if low > 1 else 0.0


def _cells(work: Workload) -> float:
    tokens = (0, work.num_tokens)
    return float(work.mask.area(tokens, tokens)) * work.num_heads


def _most_cells(work: Workload, world_size: int, price: Price, num_bytes: float) -> float:
    """No rank that moves so many bytes computes more cells."""
    group = work.num_heads / work.num_kv_heads
    keys = float(max(work.layout_for(world_size).sizes))
    queries, others = group * keys, work.num_tokens - keys
    at_home = work.num_kv_heads * queries * keys
    one_side = num_bytes * max(keys / price.q, queries / price.kv)
    whole_head = others * (group * price.q + price.kv)
    both = min(
        num_bytes * min(num_bytes, whole_head) / (4 * price.q * price.kv),
        num_bytes * others / price.q,
        num_bytes * group * others / price.kv,
    )
    return at_home + one_side + both

"""The terms of a canonical reduction: which calls each row of a result is the sum of.

They follow from mask, layout and leaves alone. No plan is asked and no code, so that codes can be
checked against them. Terms and rows of operands are numbers of 64 bits, drawn by their names, and a
sum is the sum of its terms' numbers: two sums of other terms are equal by a chance of 2^-64.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate, combinations, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewise.compiler.resolved import CallShape
from tilewise.layouts.leaves import edges_of_sides
from tilewise.masks.base import Mask
from tilewise.plan.ir import Side
from tilewise.plan.payload import Payload
from tilewise.plan.sums import SumColumns

Numbers = NDArray[np.uint64]
Array = NDArray[np.int64]
Bools = NDArray[np.bool_]

ROWS_AT_ONCE = 1 << 24  # entries of a dense mask
_MODULUS = 1 << 64


class RowsOf(NamedTuple):
    """Rows and heads of all batch entries, by global positions and heads of the whole layer."""

    positions: Array
    heads: Array
    batch: int


class Terms:
    """The terms of every row of a call's results.

    Args:
        call: a canonical one.
        replicated_queries: every rank has the same queries.
    """

    def __init__(self, call: CallShape, replicated_queries: bool = False):
        self._call, layout = call, call.layout.owned
        kv_layout = layout if call.kv_layout is None else call.kv_layout.owned
        self.shared = call.num_heads // call.num_kv_heads
        self.world_size = layout.world_size
        ranks = range(layout.world_size)
        if replicated_queries:
            last = [kv_layout.num_tokens - 1]
            queries = np.array(last if call.q_positions is None else call.q_positions, np.int64)
            of_queries, num_queries = [queries for _ in ranks], kv_layout.num_tokens
        else:
            of_queries, num_queries = [layout.rows(rank) for rank in ranks], layout.num_tokens
        self.positions = of_queries, [kv_layout.rows(rank) for rank in ranks]
        self.num_tokens = num_queries, kv_layout.num_tokens
        self.edges = edges_of_sides(call.mask, self.num_tokens, self.shared)
        self._masks: tuple[Mask, ...] = getattr(call.mask, "heads", (call.mask,))

    def payload(self, backward: bool) -> Payload:
        """Return what the pass's tensors are."""
        return self._call.payload(1)._replace(backward=backward)

    def mask(self, kv_head: int) -> Mask:
        """The mask of the query heads that read a KV head."""
        return self._masks[kv_head if len(self._masks) > 1 else 0]

    def num_heads(self, side: Side) -> int:
        """The heads of the whole layer."""
        return self._call.num_heads if side is Side.Q else self._call.num_kv_heads

    @cached_property
    def _reaches(self) -> dict[Mask, tuple[Bools, Bools]]:
        return {mask: self._reach_of(mask) for mask in self._masks}

    def _reach_of(self, mask: Mask) -> tuple[Bools, Bools]:
        (num_queries, num_keys), (q_edges, k_edges) = self.num_tokens, self.edges
        of_queries = np.zeros((num_queries, len(k_edges) - 1), bool)
        of_keys = np.zeros((num_keys, len(q_edges) - 1), bool)
        keys = np.arange(num_keys)
        here = np.zeros(num_queries, bool)  # replicated queries are a few of the sequence's
        here[np.concatenate(self.positions[Side.Q])] = True
        at_once = max(1, ROWS_AT_ONCE // max(1, num_keys))
        for number, (first, last) in enumerate(pairwise(q_edges)):
            for start in range(first, last, at_once):
                rows = np.arange(start, min(start + at_once, last))
                dense = mask.dense(rows, keys) & here[rows, None]
                of_queries[rows] = np.logical_or.reduceat(dense, k_edges[:-1], axis=1)
                of_keys[:, number] |= dense.any(0)
        return of_queries, of_keys

    def reach(self, side: Side, kv_head: int) -> Bools:
        """Return which leaves of the other side each token meets, [tokens, leaves]."""
        return self._reaches[self.mask(kv_head)][side]

    def of_leaf(self, side: Side, rows: RowsOf, leaf: int) -> Numbers:
        """The terms that pairs with a leaf of the other side add to rows of a side.

        Args:
            rows: their heads are query heads, of keys too: each adds a term of its own.
        Returns:
            [rows, batch, query heads]; 0 where the mask lets them meet no row of the leaf.
        """
        kv_heads = (rows.heads // self.shared).tolist()
        meets = [self.reach(side, head)[rows.positions, leaf] for head in kv_heads]
        found = values(f"term of {side.name}", rows, self.edges[1 - side][leaf])
        return found * np.stack(meets, -1)[:, None]

    def whole(self, side: Side, rows: RowsOf) -> Numbers:
        """The complete sums of rows of a side.

        Args:
            rows: their heads are the side's own.
        Returns:
            [rows, batch, heads].
        """
        shape = len(rows.positions), rows.batch, len(rows.heads)
        total = np.zeros(shape, np.uint64)
        for each in range(1 if side is Side.Q else self.shared):
            heads = rows.heads if side is Side.Q else rows.heads * self.shared + each
            of_heads = rows._replace(heads=heads)
            for leaf in range(len(self.edges[1 - side]) - 1):
                total += self.of_leaf(side, of_heads, leaf)
        return total

    def most_terms(self, side: Side) -> int:
        """The most terms that a sum of a side has."""
        meets = np.stack([one[side] for one in self._reaches.values()]).sum(-1)
        return int(meets.max(initial=0)) * (1 if side is Side.Q else self.shared)

    def difference(self, side: Side, rows: RowsOf, at: Sequence[int], found: np.uint64) -> str:
        """Return in words which terms a sum lacks or has twice.

        Args:
            rows: of a side, with its own heads.
            at: the row, batch entry and head of the sum, as numbers of rows.
            found: the sum.
        """
        row, entry, head = at
        one = RowsOf(rows.positions[row : row + 1], rows.heads[head : head + 1], rows.batch)
        token, first = int(one.positions[0]), int(one.heads[0])
        heads = [first] if side is Side.Q else [first * self.shared + i for i in range(self.shared)]
        edges, name = self.edges[1 - side], Side(1 - side).name
        leaves = range(len(edges) - 1)
        terms = [
            [
                int(self.of_leaf(side, one._replace(heads=np.array([x])), leaf)[0, entry, 0])
                for leaf in leaves
            ]
            for x in heads
        ]
        missing = sum(map(sum, terms)) - int(found)
        where = f"that of token {token}, head {first},"
        if not found:
            return f"{where} has no terms"
        parts: dict[int, str] = {}  # sums of terms of neighbouring leaves, of a head and of all
        for label, of_heads in (
            ("", [sum(x) for x in zip(*terms, strict=True)]),
            *((f" of query head {x}", terms[i]) for i, x in enumerate(heads)),
        ):
            ends = [*accumulate(of_heads, initial=0)]
            for a, b in combinations(range(len(ends)), 2):
                words = f"{name} tokens {edges[a]} to {edges[b] - 1}{label}"
                parts.setdefault((ends[b] - ends[a]) % _MODULUS, words)
        if missing % _MODULUS in parts:
            return f"{where} lacks the terms of {parts[missing % _MODULUS]}"
        if -missing % _MODULUS in parts:
            return f"{where} has the terms of {parts[-missing % _MODULUS]} twice"
        return f"{where} has terms that are not its own"


def values(name: str, rows: RowsOf, other: int = 0) -> Numbers:
    """Numbers that stand for rows and heads of a tensor, or for terms, [rows, batch, heads]."""
    parts = rows.positions[:, None, None], np.arange(rows.batch)[:, None], rows.heads
    mixed = np.full((1, 1, 1), _seed(name), np.uint64)
    for number, part in enumerate((*parts, np.array([other]))):
        mixed = mixed + part.astype(np.uint64) * _odd(number)
    return _mixed(mixed)


def factors(name: str | SumColumns, count: int) -> Numbers:
    """Odd numbers by which a value is multiplied at each place of its row; the first is 1."""
    found = _mixed(np.arange(count, dtype=np.uint64) + _seed(str(name))) | np.uint64(1)
    found[:1] = 1
    return found


def _seed(name: str) -> np.uint64:
    return np.uint64(int.from_bytes(blake2b(name.encode(), digest_size=7).digest()))


def _odd(number: int) -> np.uint64:
    return np.uint64(_seed(f"factor {number}") << np.uint64(8) | np.uint64(1))


def _mixed(x: Numbers) -> Numbers:
    """Mix the bits of numbers. Source: Steele, Lea and Flood 2014, SplitMix64's last step."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

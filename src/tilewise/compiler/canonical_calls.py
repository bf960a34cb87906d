"""Calls of pairs of leaves, as the canonical check sees them: their operands, shapes and terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from tilewise.compiler.canonical_memory import (
    Causes,
    Memory,
    Values,
    first_cause,
    read_values,
    write_values,
)
from tilewise.compiler.canonical_terms import Array, RowsOf, Terms, values
from tilewise.compiler.code import AttendLeaves, Code
from tilewise.layouts.layout import Run
from tilewise.plan.ir import Side
from tilewise.plan.payload import STATISTICS, Payload, accumulator
from tilewise.plan.row_ranges import to_ranges
from tilewise.plan.sums import SumColumns
from tilewise.tiles.leaf_pairs import ROW_UNIT, Leaf, LeafPair, pair_call

SIDES: Mapping[str, Side] = MappingProxyType(
    {
        **dict.fromkeys(("q", "out", "lse", "largest", "dout", "delta", "dq"), Side.Q),
        **dict.fromkeys(("k", "v", "latent", "dk", "dv", "dlatent"), Side.KV),
    }
)
"""Tensors of a call, by the side whose rows they have."""

OPERANDS = ("q", "k", "v", "dout", "lse", "delta")
"""In the order in which a call takes them; forward the first three."""

NewCause = Callable[[str], int]
"""Numbers a cause for which content depends on the split."""


class LeafCalls:
    """The calls of one op, and the sums that they add to."""

    def __init__(self, terms: Terms, code: Code, memory: Memory, op: AttendLeaves):
        self._terms, self._code, self._memory, self._op = terms, code, memory, op
        num_q, self._num_kv = (code.shape(ref)[2] for ref in op.operands[:2])
        self._q_heads = op.first_head + np.arange(num_q)
        self._shared = num_q // max(1, self._num_kv)
        self._kv_heads = self._q_heads[:: max(1, self._shared)] // terms.shared
        self._names = OPERANDS if code.backward else OPERANDS[:3]
        self._sides = (Side.Q, Side.KV)[: 1 + code.backward]

    def why_not(self) -> str | None:
        """Return why no call of the op can be right."""
        op, terms, payload = self._op, self._terms, self._terms.payload(self._code.backward)
        columns = tuple(x for x in map(payload.sums, self._sides) if x is not None)
        heads, num_heads = self._q_heads, terms.num_heads(Side.Q)
        if len(op.sums) != len(columns) or op.columns != columns:
            return f"adds to sums of {formats(op.columns)}, and not {formats(columns)}"
        if not 0 <= op.first_head <= num_heads - len(heads):
            return f"is for query heads {listed(heads)}, of which there are {num_heads}"
        for name, ref in (
            *zip(self._names, op.operands, strict=True),
            *(("sums", x) for x in op.sums),
        ):
            dtype = self._code.tensors[ref.tensor].dtype
            if dtype != dtype_of(name, payload):
                return f"takes {name} as {dtype}, and not as {dtype_of(name, payload)}"
        kv_heads = self._kv_heads.repeat(self._shared)
        if len(kv_heads) != len(heads) or (kv_heads != heads // terms.shared).any():
            return f"reads {self._num_kv} KV heads for query heads {listed(heads)}"
        return None

    def run(self, new_cause: NewCause) -> None:
        """Add the pairs' terms to the sums, and the causes that there are."""
        op, memory = self._op, self._memory
        operands = [
            read_values(memory.view(ref), name)
            for name, ref in zip(self._names, op.operands, strict=True)
        ]
        sums = [
            read_values(memory.view(ref), columns)
            for ref, columns in zip(op.sums, op.columns, strict=True)
        ]
        totals = [x.values.copy() for x in sums]
        causes = [np.zeros_like(x.causes) for x in sums]
        wrong: dict[tuple[Side, int], str | None] = {}
        leaf_causes: dict[tuple[Side, int], Causes] = {}
        for side, leaves in zip(Side, op.call[:2], strict=True):
            rows = [len(operands[side].values), *(len(x) for x in totals[side : side + 1])]
            for number, leaf in enumerate(leaves):
                wrong[side, number] = self._wrong_leaf(side, leaf, rows)
                if wrong[side, number] is None:
                    found = self._leaf_causes(side, leaf, operands, new_cause)
                    leaf_causes[side, number] = found
        for pair in op.call.pairs:
            leaves, keys = self._leaves(pair), ((Side.Q, pair.q), (Side.KV, pair.k))
            reasons = [wrong[key] for key in keys if wrong[key] is not None]
            reason = reasons[0] if reasons else self._wrong_pair(pair)
            new = 0 if reason is None else new_cause(reason)
            of_sides = leaf_causes.get(keys[0]), leaf_causes.get(keys[1])
            for side in self._sides:
                at = _rows(leaves[side].local)
                of_q, of_kv = of_sides
                if new or of_q is None or of_kv is None:
                    causes[side][at] = new
                    continue
                totals[side][at] += self._added(side, leaves)
                found = self._spread(side, of_q, of_kv)
                causes[side][at] = first_cause(causes[side][at], found)
        for side, before in zip(self._sides, sums, strict=True):
            found = first_cause(before.causes, causes[side])
            if not before.whole.all():
                new = new_cause("adds to what is no sum of its format")
                found = first_cause(found, np.where(before.whole, 0, new).astype(np.int32))
            write_values(memory.view(op.sums[side]), op.columns[side], totals[side], found)

    def _leaves(self, pair: LeafPair) -> tuple[Leaf, Leaf]:
        return self._op.call.q[pair.q], self._op.call.k[pair.k]

    def _number(self, side: Side, leaf: Leaf) -> int:
        return int(np.searchsorted(self._terms.edges[side], leaf.start))

    def _added(self, side: Side, leaves: tuple[Leaf, Leaf]) -> np.ndarray:
        """The terms that a pair adds to the sums of a side, [rows, batch, heads]."""
        other = Side(1 - side)
        rows = RowsOf(_positions(leaves[side]), self._q_heads, self._code.batch)
        found = self._terms.of_leaf(side, rows, self._number(other, leaves[other]))
        if side is Side.Q:
            return found
        return found.reshape(*found.shape[:2], self._num_kv, -1).sum(-1, dtype=np.uint64)

    def _spread(self, side: Side, of_q: Causes, of_kv: Causes) -> Causes:
        """Causes of a side's rows of a pair, of those of its leaves' rows.

        A row of queries reaches its own result, but in backward all of dk and dv.
        """
        keys = of_kv.max(0, initial=0)
        queries = of_q.max(0, initial=0)
        if side is Side.Q:
            spread = keys.repeat(self._shared, -1)
            spread = np.maximum(queries, spread) if self._code.backward else spread
            return first_cause(of_q, np.broadcast_to(spread, of_q.shape))
        queries = queries.reshape(*queries.shape[:-1], self._num_kv, -1).max(-1, initial=0)
        return first_cause(of_kv, np.broadcast_to(np.maximum(queries, keys), of_kv.shape))

    def _leaf_causes(
        self, side: Side, leaf: Leaf, operands: Sequence[Values], new_cause: NewCause
    ) -> Causes:
        """Causes of a leaf's rows and heads, of all operands of its side."""
        heads = self._q_heads if side is Side.Q else self._kv_heads
        rows = RowsOf(_positions(leaf), heads, self._code.batch)
        held = _rows(leaf.held)
        found = [
            strangers(operand.rows(held), name, rows, new_cause)
            for name, operand in zip(self._names, operands, strict=True)
            if SIDES[name] is side
        ]
        return first_cause(*found)

    def _wrong_leaf(self, side: Side, leaf: Leaf, num_rows: Sequence[int]) -> str | None:
        """Return why rows of an operand, and of sums, are not those of a leaf.

        Args:
            num_rows: of the operand, and of the sums that are added to, if there are some.
        """
        edges, number = self._terms.edges[side], self._number(side, leaf)
        if number + 1 >= len(edges) or edges[number] != leaf.start:
            return f"computes rows from token {leaf.start} on, where no {side.name} leaf begins"
        size = edges[number + 1] - leaf.start
        padded = -(-size // ROW_UNIT) * ROW_UNIT
        name = f"the {side.name} leaf of tokens {leaf.start} to {leaf.start + size - 1}"
        if leaf.num_rows != padded:
            return f"computes {name} by a call of {leaf.num_rows} rows, and not of {padded}"
        slots, held, local = map(_rows, (leaf.slots, leaf.held, leaf.local))
        if not len(slots) == len(held) == len(local):
            return f"reads {len(held)} rows of {name} for {len(slots)} of the call"
        for rows, stop in ((slots, size), *zip((held, local), num_rows, strict=False)):
            if len(np.unique(rows)) != len(rows) or (rows < 0).any() or (rows >= stop).any():
                return f"names rows of {name} twice, or others than there are"
        return None

    def _wrong_pair(self, pair: LeafPair) -> str | None:
        """Return why a call is not the one of fixed shape that two leaves have."""
        terms, leaves = self._terms, self._leaves(pair)
        numbers = [self._number(side, leaf) for side, leaf in zip(Side, leaves, strict=True)]
        q, k = (
            (terms.edges[side][number], terms.edges[side][number + 1])
            for side, number in zip(Side, numbers, strict=True)
        )
        name = f"the pair of queries {q[0]} to {q[1] - 1} and keys {k[0]} to {k[1] - 1}"
        for head in np.unique(self._kv_heads).tolist():
            expected = pair_call(q, k, terms.mask(head))
            if expected is None:
                return f"computes {name}, of which the mask allows nothing"
            if pair.call != expected:
                return f"computes {name} by another call than its own"
            for side, leaf, (start, stop) in zip(Side, leaves, (q, k), strict=True):
                meets = terms.reach(side, head)[start:stop, numbers[1 - side]].copy()
                meets[_rows(leaf.slots)] = False
                if meets.any():
                    absent = listed(start + np.flatnonzero(meets))
                    return f"computes {name} without {side.name} rows {absent}"
        return None


def dtype_of(name: str, payload: Payload) -> str:
    """The dtype of a tensor of a canonical pass: of the call, or "sums"."""
    if name == "sums":
        return payload.partial_dtype
    return accumulator(payload.dtype) if name in STATISTICS else payload.dtype


def strangers(found: Values, name: str, rows: RowsOf, new_cause: NewCause) -> Causes:
    """Causes of values, and of those that are not the rows of a tensor that they should be."""
    expected = values(name, rows)
    if found.values.shape != expected.shape:
        raise ValueError(f"{name} is {found.values.shape}, and not {expected.shape}")
    wrong = (found.values != expected) | ~found.whole
    if not wrong.any():
        return found.causes
    at, _, heads = np.nonzero(wrong)
    where = f"tokens {listed(rows.positions[at])}, heads {listed(rows.heads[heads])}"
    new = new_cause(f"reads other numbers than {name} of {where}")
    return first_cause(found.causes, np.where(wrong, new, 0).astype(np.int32))


def listed(numbers: Sequence[int] | Array) -> str:
    """Numbers as text, in order: 0 to 63, 70."""
    ranges = to_ranges(np.unique(numbers))
    words = [str(a) if b == a + 1 else f"{a} to {b - 1}" for a, b in ranges]
    return ", ".join(words[:6]) + (f" and {len(words) - 6} more" if len(words) > 6 else "")


def formats(columns: Sequence[SumColumns]) -> str:
    """Formats of sums as text: 2 digits of 24 bits of 64 numbers, ..."""
    return " and ".join(
        ", ".join(
            f"{form.digits} digits of {form.digit_bits} bits of {width} numbers"
            for form, width in zip(one.forms, one.widths, strict=True)
        )
        for one in columns
    )


def _positions(leaf: Leaf) -> Array:
    return leaf.start + _rows(leaf.slots)


def _rows(runs: Sequence[Run]) -> Array:
    parts = [start + stride * np.arange(count) for start, count, stride in runs]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)

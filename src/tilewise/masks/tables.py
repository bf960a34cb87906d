"""Masks given by a table rather than by a rule: slices, blocks, and one mask per head.

A table is checked against itself (no pair twice) and against the sequence; a rule always fits.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tilewise.arguments import (
    as_array,
    brief,
    checks_arguments,
    listed,
    require_known,
    shown,
    whole_number,
)
from tilewise.masks import strips
from tilewise.masks.base import (
    And,
    Causal,
    Document,
    Full,
    Mask,
    Or,
    Window,
    as_ints,
    digest,
    positions,
)
from tilewise.masks.strips import Strips

Array = NDArray[np.int64]
Slice = tuple[tuple[int, int], tuple[int, int], str]
KINDS = ("full", "causal", "invcausal", "bicausal")
SHOWN = 4  # slices that a repr spells out


@dataclass(frozen=True, eq=False, repr=False)
class Slices(Mask):
    """Rectangles of queries x keys, in each of which local row i of m sees local keys j of n.

        full        causal: j - (n-1) <= i - (m-1)   invcausal: j >= i   bicausal: both
        # # # # #   # # # . .                        # # # # #           # # # . .
        # # # # #   # # # # .                        . # # # #           . # # # .
        # # # # #   # # # # #                        . . # # #           . . # # #

    Args:
        slices: (q_range, k_range, kind), half-open ranges. They may touch, but no pair may be in
            two of them. Empty ones are allowed and do nothing.
    """

    slices: tuple[Slice, ...]

    def __init__(self, slices: Iterable[tuple[Sequence[int], Sequence[int], str]]):
        entries = listed("slices", slices, "(q_range, k_range, kind)")
        checked = tuple(_checked_slice(i, entry) for i, entry in enumerate(entries))
        object.__setattr__(self, "slices", checked)
        both = strips.first_overlap(self._pieces())
        if both:
            q, k = both
            twice = [s for s in checked if _slice_dense(s, np.array([q]), np.array([k])).any()]
            raise ValueError(
                f"slices {twice[0]} and {twice[1]} both allow query {q}, key {k}; "
                "cut one of them, no pair may be allowed twice"
            )

    @checks_arguments
    def check_tokens(self, num_tokens: int, num_keys: int | None = None) -> None:
        limits = (num_tokens, num_tokens if num_keys is None else num_keys)
        for entry in self.slices:
            for what, (_, stop), limit in zip(
                ("q_range", "k_range"), entry[:2], limits, strict=True
            ):
                if stop > limit:
                    raise ValueError(
                        f"slice {entry}: {what} ends at {stop}, past the {limit} tokens there are; "
                        "cut it there"
                    )

    def dense(self, q_positions: Any, k_positions: Any) -> NDArray[np.bool_]:
        q, k = positions(q_positions), positions(k_positions)
        allowed = np.zeros((len(q), len(k)), bool)
        for entry in self.slices:
            (q0, q1), (k0, k1), _ = entry
            rows = np.flatnonzero((q >= q0) & (q < q1))
            columns = np.flatnonzero((k >= k0) & (k < k1))
            allowed[np.ix_(rows, columns)] |= _slice_dense(entry, q[rows], k[columns])
        return allowed

    @checks_arguments
    def windowed(self, left: int) -> "Slices":
        """The mask of a tree, in which a query sees at most `left` keys before it on its path.

            tree.mask.windowed(1023)    # for layers with a sliding window of 1024 tokens

        It is to a tree's mask what Causal() & Window(left, None) is to Causal(): where sequences
        share a beginning, tokens before a query in its own sequence count, whatever rows they are.

        Args:
            left: from 0 on, as in Window; a window of w tokens, the query's own among them, has
                left=w - 1.
        Raises:
            ValueError: if these slices are not those of a `tw.Tree`: for each of its nodes, in
                depth-first order, ((start, stop), (start, stop), "causal") and
                ((stop, last), (start, stop), "full") for the rows of the nodes below it.
        """
        whole_number("left", left, 0)
        pieces: list[Slice] = []
        for branch in _branches(self.slices):
            (start, stop), at = branch[-1]
            pieces += _own(start, stop, left)
            for (key, last), place in branch[:-1]:
                # A query at a place p of the path sees the node's tokens from p - left on.
                k0, k1 = place, place + last - key
                full = max(at, min(at + stop - start, k0 + left + 1))
                part = max(full, min(at + stop - start, k1 + left))
                q, k = start - at, key - place  # a place's row of queries, and of keys
                pieces.append(((start, q + full), (key, last), "full"))
                pieces.append(((q + full, q + part), (k + full - left, last), "invcausal"))
        return Slices(x for x in pieces if x[0][0] < x[0][1] and x[1][0] < x[1][1])

    def _pieces(self) -> Strips:
        """One strip per slice that allows anything."""
        corners = np.array([(*q, *k) for q, k, _ in self.slices], np.int64).reshape(-1, 4)
        kinds = np.array([KINDS.index(kind) for _, _, kind in self.slices], np.int64)
        q0, q1, k0, k1 = corners.T
        causal, invcausal = kinds & 1, kinds >> 1
        hi = np.where(causal, k1 - q1 + 1, k1)
        lo = np.where(invcausal, k0 - q0, k0)
        return strips.make(q0, q1, lo, hi, lo_slope=invcausal, hi_slope=causal)

    def _strips(self) -> Strips:
        return strips.coalesce(self._pieces())

    def __repr__(self) -> str:
        if len(self.slices) <= SHOWN:
            return f"Slices({list(self.slices)})"
        numbers = (x for q, k, kind in self.slices for x in (*q, *k, KINDS.index(kind)))
        return f"Slices({len(self.slices)} slices, {digest(numbers)})"


@dataclass(frozen=True, eq=False, repr=False)
class Blocks(Mask):
    """A bool table over blocks of queries and of keys.

    Args:
        table: bool [q_blocks, k_blocks], any array or tensor.
        q_edges, k_edges: where the blocks begin, and where the last one ends; from 0 on.
        overhang: by how many tokens the last block may reach past the end of the sequence.
    """

    packed_table: bytes
    q_edges: tuple[int, ...]
    k_edges: tuple[int, ...]
    overhang: int

    def __init__(self, table: Any, q_edges: Any, k_edges: Any, *, overhang: int = 0):
        block_table = bool_table(table)
        edges = {"q_edges": as_ints(q_edges, "q_edges"), "k_edges": as_ints(k_edges, "k_edges")}
        for what, values in edges.items():
            if not values or values[0] != 0 or sorted(values) != list(values):
                raise ValueError(f"{what} must ascend from 0, not {values[:8]}")
            object.__setattr__(self, what, values)
        shape = tuple(len(values) - 1 for values in edges.values())
        if block_table.shape != shape:
            raise ValueError(
                f"block_mask is {block_table.shape}, but the edges make {shape} blocks; "
                "give one entry per block of queries and block of keys"
            )
        object.__setattr__(self, "packed_table", np.packbits(block_table).tobytes())
        object.__setattr__(self, "overhang", whole_number("overhang", overhang, 0))

    @property
    def table(self) -> NDArray[np.bool_]:
        """The table, bool [q_blocks, k_blocks]."""
        shape = len(self.q_edges) - 1, len(self.k_edges) - 1
        bits = np.unpackbits(np.frombuffer(self.packed_table, np.uint8), count=shape[0] * shape[1])
        return bits.reshape(shape).astype(bool)

    @checks_arguments
    def check_tokens(self, num_tokens: int, num_keys: int | None = None) -> None:
        num_keys = num_tokens if num_keys is None else num_keys
        for what, end, limit in (
            ("queries", self.q_edges[-1], num_tokens),
            ("keys", self.k_edges[-1], num_keys),
        ):
            if not 0 <= end - limit <= self.overhang:
                raise ValueError(
                    f"the blocks end at {end}, but there are {limit} {what}; "
                    f"they must end there, or at most {self.overhang} tokens past it"
                )

    def dense(self, q_positions: Any, k_positions: Any) -> NDArray[np.bool_]:
        q, k = positions(q_positions), positions(k_positions)
        table = np.pad(self.table, ((0, 1), (0, 1)))  # nothing past the last block
        row, column = (
            np.searchsorted(np.asarray(edges), x, "right") - 1
            for edges, x in ((self.q_edges, q), (self.k_edges, k))
        )
        return table[np.ix_(row, column)]

    def _strips(self) -> Strips:
        q, k = np.asarray(self.q_edges, np.int64), np.asarray(self.k_edges, np.int64)
        change = np.diff(np.pad(self.table.astype(np.int8), ((0, 0), (1, 1))), axis=1)
        row, start = np.nonzero(change == 1)
        _, stop = np.nonzero(change == -1)
        return strips.coalesce(strips.make(q[row], q[row + 1], k[start], k[stop]))

    def __repr__(self) -> str:
        shape = f"{len(self.q_edges) - 1} x {len(self.k_edges) - 1} blocks"
        content = digest([*self.q_edges, *self.k_edges, self.overhang], self.packed_table)
        return f"Blocks({shape}, {self.q_edges[-1]} x {self.k_edges[-1]} tokens, {content})"


@dataclass(frozen=True, eq=False, repr=False)
class PerHead(Mask):
    """A mask of its own for each key/value head; & and | act per head.

    `area` and `areas` are means over the heads (int where whole, else float), `dense` is bool
    [num_kv_heads, queries, keys], and `strips` covers what any head needs.
    """

    heads: tuple[Mask, ...]

    def __init__(self, heads: Iterable[Mask]):
        object.__setattr__(self, "heads", tuple(listed("heads", heads, "masks")))
        if not self.heads:
            raise ValueError("PerHead has 0 masks; give one per key/value head")
        for i, head in enumerate(self.heads):
            if not _is_of_one_head(head):
                raise ValueError(f"head {i} of PerHead must be a mask that is not itself by head")

    def check_tokens(self, num_tokens: int, num_keys: int | None = None) -> None:
        for head in self.heads:
            head.check_tokens(num_tokens, num_keys)

    def dense(self, q_positions: Any, k_positions: Any) -> NDArray[np.bool_]:
        return np.stack([head.dense(q_positions, k_positions) for head in self.heads])

    def area(self, q_range: tuple[int, int], k_range: tuple[int, int]) -> Any:
        total = sum(head.area(q_range, k_range) for head in self.heads)
        quotient, rest = divmod(total, len(self.heads))
        return total / len(self.heads) if rest else quotient

    def areas(self, q_edges: ArrayLike, k_edges: ArrayLike) -> Array:
        total = np.sum([head.areas(q_edges, k_edges) for head in self.heads], axis=0)
        rest = (total % len(self.heads)).any()
        return total / len(self.heads) if rest else total // len(self.heads)

    def coverage(self, q_edges: ArrayLike, k_edges: ArrayLike) -> NDArray[np.int8]:
        low = high = self.heads[0].coverage(q_edges, k_edges)
        for head in self.heads[1:]:
            table = head.coverage(q_edges, k_edges)
            low, high = np.minimum(low, table), np.maximum(high, table)
        return np.where(low == high, low, np.int8(1))

    def _with(self, other: object, operation: type[And] | type[Or]) -> Mask:
        if not isinstance(other, PerHead):
            return PerHead(head._with(other, operation) for head in self.heads)
        if len(self.heads) != len(other.heads):
            raise ValueError(
                f"masks of {len(self.heads)} and {len(other.heads)} heads cannot be combined; "
                "give both one mask per key/value head"
            )
        pairs = zip(self.heads, other.heads, strict=True)
        return PerHead(a._with(b, operation) for a, b in pairs)

    def _after(self, first: Mask, operation: type[And] | type[Or]) -> Mask:
        return PerHead(operation(first, head) for head in self.heads)

    def _strips(self) -> Strips:
        distinct = dict.fromkeys(self.heads)
        return reduce(strips.union, (head.strips() for head in distinct))

    def __repr__(self) -> str:
        return f"PerHead([{', '.join(repr(head) for head in self.heads)}])"


MOST_CELLS = 1 << 27
"""Of a table over blocks, a byte each: 8 heads of 512K tokens in blocks of 128."""


def bool_table(values: Any, name: str = "block_mask") -> NDArray[np.bool_]:
    """A table of any kind (a tensor, lists) as bool.

    Raises:
        ValueError: "block_mask (float64) must hold True and False, or 1 and 0".
    """
    try:
        table = as_array(name, values, dims=3, most=MOST_CELLS)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{name} ({shown(values)}) must be a table: {error}") from None
    if table.dtype == bool:
        return table
    if table.size and (table.dtype.kind not in "iu" or not np.isin(table, (0, 1)).all()):
        raise ValueError(f"{name} ({table.dtype}) must hold True and False, or 1 and 0")
    return table.astype(bool)


def _is_of_one_head(value: object) -> bool:
    return isinstance(value, Mask) and not isinstance(value, PerHead)


def _checked_slice(i: int, entry: Any) -> Slice:
    parts = cast("Sequence[Any]", entry) if isinstance(entry, Sequence) else ()
    if len(parts) != 3:
        raise ValueError(
            f"slice {i} ({brief(cast(object, entry))}) must be (q_range, k_range, kind)"
        )
    q_range, k_range, kind = parts
    q = _checked_bounds(f"slice {i}: q_range", q_range)
    k = _checked_bounds(f"slice {i}: k_range", k_range)
    require_known(f"slice {i}: kind", kind, KINDS)
    return q, k, kind


Branch = list[tuple[tuple[int, int], int]]
"""Nodes of a tree from the first on: the rows of each, and the place of its first token."""


def _branches(slices: Sequence[Slice]) -> Iterator[Branch]:
    """The path to each node of a tree, itself last, in depth-first order, from its mask's slices.

    Raises:
        ValueError: for slices that are of no tree.
    """
    nodes = sorted(q for q, k, kind in slices if kind == "causal" and q == k)
    below = {k: q for q, k, kind in slices if kind == "full"}
    ends = [0, *(stop for _, stop in nodes)]
    fits = len(nodes) + len(below) == len(slices) and below.keys() <= {*nodes}
    fits &= all(start == end for (start, _), end in zip(nodes, ends, strict=False))
    path: list[tuple[tuple[int, int], int, int]] = []  # rows, place, where those below end
    for start, stop in nodes:
        while path and path[-1][2] <= start:
            path.pop()
        first, last = below.get((start, stop), (stop, stop))
        fits &= first == stop and last <= (path[-1][2] if path else ends[-1])
        if not fits:
            break
        place = path[-1][1] + path[-1][0][1] - path[-1][0][0] if path else 0
        path.append(((start, stop), place, last))
        yield [(rows, at) for rows, at, _ in path]
    if not fits:
        raise ValueError(
            f"these {len(slices)} slices are not those of a tree, whose tokens alone have places "
            "on a path; take tree.mask of a tw.Tree, or cut the slices yourself"
        )


def _own(start: int, stop: int, left: int) -> list[Slice]:
    """A node's tokens among themselves: the first left + 1 see all before them."""
    middle = min(stop, start + left + 1)
    rest = (middle, stop), (start + 1, stop), "bicausal"
    return [((start, middle), (start, middle), "causal"), rest]


def _checked_bounds(name: str, values: Any) -> tuple[int, int]:
    bounds = as_ints(values, name)
    if len(bounds) != 2 or not 0 <= bounds[0] <= bounds[1]:
        raise ValueError(f"{name} {bounds} must be (start, stop), 0 <= start <= stop")
    return bounds


def _slice_dense(entry: Slice, q: Array, k: Array) -> NDArray[np.bool_]:
    """Return what a slice allows of these global positions, from its definition in local rows."""
    (q0, q1), (k0, k1), kind = entry
    i, j = (q - q0)[:, None], (k - k0)[None, :]
    m, n = q1 - q0, k1 - k0
    allowed = (i >= 0) & (i < m) & (j >= 0) & (j < n)
    if kind in ("causal", "bicausal"):
        allowed &= j - (n - 1) <= i - (m - 1)
    if kind in ("invcausal", "bicausal"):
        allowed &= j >= i
    return allowed


MASK_KINDS = (Full, Causal, Window, Document, And, Or, Slices, Blocks, PerHead)
"""The masks that files can hold."""

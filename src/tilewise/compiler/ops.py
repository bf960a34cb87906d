"""Operations of a pass: what it does to memory, to the network and with kernels, one by one.

The operands of an operation are `V`s. While the passes of the compiler work on a pass they are
`View`s of buffers that have no place yet (draft.py); in a `Code` they are the tensors that those
have become. Everything that runs, prints, times, counts or places a pass reads this one list.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Generic, NamedTuple, TypeAlias, TypeVar, get_args, get_type_hints

import numpy as np

from tilewise.compiler.program import Team
from tilewise.plan.ir import Item
from tilewise.plan.payload import Field
from tilewise.tiles.calls import KernelCall

V = TypeVar("V")
READ, WRITTEN = "read", "written"
Reads: TypeAlias = Annotated[V, READ]
Writes: TypeAlias = Annotated[V, WRITTEN]
Updates: TypeAlias = Annotated[V, READ, WRITTEN]


class Table(NamedTuple):
    """Numbers to select rows or heads by, int64."""

    data: bytes

    @classmethod
    def of(cls, numbers: np.ndarray) -> Table:
        return cls(np.ascontiguousarray(numbers, np.int64).tobytes())

    @property
    def numbers(self) -> np.ndarray:
        return np.frombuffer(self.data, np.int64)

    def __len__(self) -> int:
        return len(self.data) // 8

    def __repr__(self) -> str:
        return f"Table({len(self)})"


class Copy(NamedTuple, Generic[V]):
    """target = source, converted to its dtype.

    Attributes:
        rows: target[i] = source[rows[i]]; with scatters target[rows[i]] = source[i].
        heads: target's head i is source's head heads[i].
    """

    label: str
    source: Reads[V]
    target: Writes[V]
    rows: Table | None = None
    scatters: bool = False
    heads: Table | None = None


class Fill(NamedTuple, Generic[V]):
    """target = value everywhere; one value for each of the target's tensors."""

    label: str
    target: Writes[V]
    values: tuple[float, ...]


class Encode(NamedTuple, Generic[V]):
    """Write tensors as bytes [rows, batch, n], each in the format of its field's wire.

    Attributes:
        counter: the item, and the rank that encodes it: for stochastic rounding.
    """

    label: str
    source: Reads[V]
    target: Writes[V]
    fields: tuple[Field, ...]
    counter: tuple[Item, int]


class Decode(NamedTuple, Generic[V]):
    """The inverse of Encode, but for rounding."""

    label: str
    source: Reads[V]
    target: Writes[V]
    fields: tuple[Field, ...]


class ComputeDelta(NamedTuple, Generic[V]):
    """delta = rowsum(out * dout) - dlse; product is room for out * dout."""

    label: str
    out: Reads[V]
    dout: Reads[V]
    product: Writes[V]
    delta: Writes[V]


class Message(NamedTuple):
    """One message of an exchange: the other end, the plan's step, and what travels.

    Attributes:
        item: of row moves a text.
    """

    peer: int
    step: int
    item: Item | str


class TeamExchange(NamedTuple):
    """An exchange of a whole team by one buffer each way: see transport.protocol.TeamMessages.

    Attributes:
        sizes: bytes that leave for, and arrive from, each rank of the team, this one included.
        most_bytes: upper bound of what any rank sends.
        label: names the exchange in errors.
    """

    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    team: Team
    most_bytes: int
    label: str


class Post(NamedTuple, Generic[V]):
    """Start sends and receives.

    Attributes:
        leaving, arriving: what is sent and received, one for each message; of a team one buffer.
        sends, recvs: the messages; of a team none.
        arrivals: the number under which each receive is awaited.
        apart: groups of receives that are posted by themselves, before the sends and the receives
            that are left; none where all of a launch is one exchange.
    """

    label: str
    handle: int
    lane: int
    leaving: Reads[tuple[V, ...]]
    arriving: Writes[tuple[V, ...]]
    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]
    arrivals: tuple[int, ...]
    apart: tuple[tuple[int, ...], ...] = ()
    team: TeamExchange | None = None


class Wait(NamedTuple, Generic[V]):
    """Let receives arrive; touched are the bytes that have then arrived."""

    label: str
    handle: int
    arrivals: tuple[int, ...]
    touched: tuple[V, ...]


class RowTables(NamedTuple):
    """Global positions of a kernel call's rows and keys, and its first query head and KV heads."""

    q_positions: Table
    k_positions: Table
    first_head: int
    kv_heads: tuple[int, int]


class Wholes(NamedTuple, Generic[V]):
    """The tensors that a kernel is handed in a call of lists, which uses some rows of them.

    Attributes:
        operands: q, k, v; in backward dout, lse, delta too.
        results: of each side's, rows of the same numbers as the operands'.
    """

    operands: tuple[V, ...]
    results: tuple[V, ...]


class Attend(NamedTuple, Generic[V]):
    """One kernel call.

    Attributes:
        operands: q, k, v; in backward dout, lse, delta too. In a call of lists the rows of them
            that it reads.
        added: where results are added to what is there.
        written: where results are written, whatever was there.
        adds: of each side's results, in the order of the kernel's, whether they are added. Forward:
            out and lse (and the largest scores). Backward: dq, then dk and dv. In a call of lists
            of each run of rows of them.
        made_bytes: of each of these results as the kernel makes them, in the dtype of its operands;
            0 where the kernel itself writes or adds them.
        wholes: None but in a call of lists.
    """

    label: str
    call: KernelCall
    operands: Reads[tuple[V, ...]]
    added: Updates[tuple[V, ...]]
    written: Writes[tuple[V, ...]]
    adds: tuple[bool, ...]
    made_bytes: tuple[int, ...]
    places: RowTables | None = None
    wholes: Wholes[V] | None = None

    def results(self) -> Iterator[tuple[V, bool]]:
        """Yield where the results of each side, or run of rows, go, and whether they are added."""
        added, written = iter(self.added), iter(self.written)
        for adds in self.adds:
            yield next(added if adds else written), adds


class ExpandKey(NamedTuple):
    """Cache key of an expansion: positions and KV heads. Backward may reuse the keys and values
    that forward made.
    """

    positions: Table
    heads: tuple[int, int]


class Expand(NamedTuple, Generic[V]):
    """Make keys and values of latents."""

    label: str
    latents: Reads[V]
    keys: Writes[V]
    places: RowTables
    key: ExpandKey
    learns: bool


class Pull(NamedTuple, Generic[V]):
    """Compute the gradient of the latents that the last Expand read, from dk and dv."""

    label: str
    gradients: Reads[V]
    dlatents: Writes[V]


class Merge(NamedTuple, Generic[V]):
    """Add partial results to others: attentions by their lse, gradients as sums.

    Attributes:
        target: all rows that rows selects, in order.
        rows: the rows of target to which the source's belong; None: one after the other.
        scratch: room for these rows of target, where rows are selected by a table.
    """

    label: str
    source: Reads[V]
    target: Updates[V]
    by_lse: bool
    rows: Table | None = None
    scratch: Writes[tuple[V, ...]] = ()


class Combine(NamedTuple, Generic[V]):
    """target = the sum of partial results of the same rows: of attentions by their lse, of
    gradients as they are.

    Attributes:
        sources: two or more, in any dtype. The target may be one of them.
    """

    label: str
    sources: Reads[tuple[V, ...]]
    target: Writes[V]
    by_lse: bool


class SumHeads(NamedTuple, Generic[V]):
    """target's head h is the sum of the source's of all ranks that have it: [rows, batch, ranks,
    heads of a rank(, width)]."""

    label: str
    source: Reads[V]
    target: Writes[V]


class Ask(NamedTuple, Generic[V]):
    """Ask the caller who runs the code for partial results, written to target.

    Decoding uses it: its keys grow from step to step, so the kernel calls are not part of the code.
    """

    label: str
    target: Writes[V]


Op: TypeAlias = (
    Copy[V]
    | Fill[V]
    | Encode[V]
    | Decode[V]
    | ComputeDelta[V]
    | Post[V]
    | Wait[V]
    | Attend[V]
    | Expand[V]
    | Pull[V]
    | Merge[V]
    | Combine[V]
    | SumHeads[V]
    | Ask[V]
)


@cache
def _places(kind: type[Any], mark: str) -> tuple[tuple[int, bool], ...]:
    """Return the fields of an operation class that carry a mark ("read" or "written").

    Returns:
        (index of the field, whether it is a tuple of operands) of each.
    """
    found: list[tuple[int, bool]] = []
    hints = get_type_hints(kind, include_extras=True)
    for place, name in enumerate(kind._fields):
        hint = hints[name]
        if mark in getattr(hint, "__metadata__", ()):
            found.append((place, get_args(hint)[0] is not V))
    return tuple(found)


def operand_places(kind: type[Any]) -> tuple[tuple[int, bool], ...]:
    """Return the fields of a kind of operation that are operands: place, and whether several."""
    return tuple(dict.fromkeys((*_places(kind, READ), *_places(kind, WRITTEN))))


def reads(op: Op[V]) -> list[V]:
    """Return the operands whose bytes an operation reads."""
    return _marked(op, READ)


def writes(op: Op[V]) -> list[V]:
    """Return the operands whose bytes an operation writes."""
    return _marked(op, WRITTEN)


def _marked(op: Op[Any], mark: str) -> list[Any]:
    found: list[Any] = []
    for place, several in _places(type(op), mark):
        operand: Any = op[place]
        found += operand if several else (operand,)
    return found

"""The code of one rank's pass: operations on numbered tensors of placed buffers, numbers only.

A code says all that a pass does to memory: what is copied, encoded, sent, awaited, computed and
merged, and which bytes of which buffer each tensor is. `codegen.py` writes it with a `CodeWriter`;
`execution/run.py` binds it to memory once and runs it, and nothing is decided then. Codes compare,
print and pickle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tilewise.arguments import item_bytes
from tilewise.compiler.program import Team
from tilewise.plan.ir import Item
from tilewise.plan.payload import Field, row_shape
from tilewise.tiles.calls import KernelCall


class Home(Enum):
    """The memory that a buffer lies in.

    WORKSPACE: at a place of the pass's workspace. KEPT: made by each forward pass, for its backward
    pass. SAVED: a buffer that forward kept. GIVEN: a tensor of the call, of any strides, to read or
    to write. MADE: what an operation itself makes, at no place of its own.
    """

    WORKSPACE = "workspace"
    KEPT = "kept"
    SAVED = "saved"
    GIVEN = "given"
    MADE = "made"


class Buffer(NamedTuple):
    """Bytes that are taken together.

    Attributes:
        name: of what lies in it; of a GIVEN one the name of the call's tensor.
        part_rows: rows of the parts that may be needed for different lengths of time, in order.
    """

    name: str
    num_bytes: int
    home: Home
    part_rows: tuple[int, ...] = ()


class TensorSpec(NamedTuple):
    """A tensor [rows, batch, ...] in a buffer.

    Attributes:
        start: first byte in the buffer.
        strides: in numbers; of GIVEN and MADE ones not known before the call, hence ().
    """

    name: str
    buffer: int
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class Ref(NamedTuple):
    """Rows and heads of a tensor: (start, stop, step) of its first dimension, (start, stop) of its
    third; None: all."""

    tensor: int
    rows: tuple[int, int, int] | None = None
    heads: tuple[int, int] | None = None


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


class Copy(NamedTuple):
    """target = source, converted to its dtype.

    Attributes:
        rows: target[i] = source[rows[i]]; with scatters target[rows[i]] = source[i].
        heads: target's head i is source's head heads[i].
    """

    source: Ref
    target: Ref
    rows: Table | None = None
    scatters: bool = False
    heads: Table | None = None

    reads = property(lambda self: (self.source,))
    writes = property(lambda self: (self.target,))


class Fill(NamedTuple):
    """target = value everywhere."""

    target: Ref
    value: float

    reads = property(lambda self: ())
    writes = property(lambda self: (self.target,))


class Encode(NamedTuple):
    """Write numbers as bytes [rows, batch, n] of a field's wire.

    Attributes:
        counter: whose rows these are, and by whom they are encoded: for stochastic rounding.
    """

    source: Ref
    target: Ref
    field: Field
    counter: tuple[Item, int]

    reads = property(lambda self: (self.source,))
    writes = property(lambda self: (self.target,))


class Decode(NamedTuple):
    """The inverse of Encode, but for rounding."""

    source: Ref
    target: Ref
    field: Field

    reads = property(lambda self: (self.source,))
    writes = property(lambda self: (self.target,))


class ComputeDelta(NamedTuple):
    """delta = rowsum(out * dout) - dlse; product is room for out * dout."""

    out: Ref
    dout: Ref
    product: Ref
    delta: Ref

    reads = property(lambda self: (self.out, self.dout))
    writes = property(lambda self: (self.product, self.delta))


class Bytes(NamedTuple):
    """One message: contiguous rows of bytes, the other end, and words for errors.

    Attributes:
        item: what travels; of row moves a text.
    """

    ref: Ref
    peer: int
    step: int
    item: Item | str


class TeamBytes(NamedTuple):
    """An exchange of a whole team by one buffer each way: see transport.protocol.TeamMessages."""

    leaving: Ref
    arriving: Ref
    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    team: Team
    most_bytes: int
    label: str


class Post(NamedTuple):
    """Start sends and receives.

    Attributes:
        arrivals: the number under which each receive is awaited.
        apart: groups of receives that are posted by themselves, before the sends and the receives
            that are left; none where all of a launch is one exchange.
    """

    handle: int
    lane: int
    sends: tuple[Bytes, ...]
    recvs: tuple[Bytes, ...]
    arrivals: tuple[int, ...]
    apart: tuple[tuple[int, ...], ...] = ()
    team: TeamBytes | None = None

    @property
    def reads(self) -> tuple[Ref, ...]:
        return (self.team.leaving,) if self.team else tuple(sent.ref for sent in self.sends)

    @property
    def writes(self) -> tuple[Ref, ...]:
        return (self.team.arriving,) if self.team else tuple(recv.ref for recv in self.recvs)


class Wait(NamedTuple):
    """Let receives arrive; touched are the bytes that have then arrived."""

    handle: int
    arrivals: tuple[int, ...]
    touched: tuple[Ref, ...]

    reads = property(lambda self: ())
    writes = property(lambda self: ())


class RowTables(NamedTuple):
    """Global positions of a kernel call's rows and keys, and its first query head and KV heads."""

    q_positions: Table
    k_positions: Table
    first_head: int
    kv_heads: tuple[int, int]


class Result(NamedTuple):
    """Tensors that a kernel call adds to; or writes, whatever was there."""

    refs: tuple[Ref, ...]
    adds: bool


class Attend(NamedTuple):
    """One kernel call.

    Attributes:
        operands: q, k, v; in backward dout, lse, delta too.
        results: out and lse (and the largest scores); in backward dq, then dk and dv.
    """

    call: KernelCall
    operands: tuple[Ref, ...]
    results: tuple[Result, ...]
    places: RowTables | None = None

    @property
    def reads(self) -> tuple[Ref, ...]:
        added = (ref for result in self.results if result.adds for ref in result.refs)
        return (*self.operands, *added)

    @property
    def writes(self) -> tuple[Ref, ...]:
        return tuple(ref for result in self.results for ref in result.refs)


class ExpandKey(NamedTuple):
    """Latents that a call reads; the backward pass may find again what forward made of them."""

    positions: Table
    heads: tuple[int, int]


class Expand(NamedTuple):
    """Make keys and values of latents."""

    latents: Ref
    k: Ref
    v: Ref
    places: RowTables
    key: ExpandKey
    learns: bool

    reads = property(lambda self: (self.latents,))
    writes = property(lambda self: (self.k, self.v))


class Pull(NamedTuple):
    """The gradient of the latents that the last Expand read, of the gradients of k and v."""

    dk: Ref
    dv: Ref
    dlatents: Ref

    reads = property(lambda self: (self.dk, self.dv))
    writes = property(lambda self: (self.dlatents,))


class Merge(NamedTuple):
    """Add partial results to others: attentions by their lse, gradients as sums.

    Attributes:
        targets: of all rows that rows selects, in order.
        rows: the rows of targets to which the sources' belong; None: one after the other.
        scratch: room for these rows of targets, where rows are selected by a table.
    """

    sources: tuple[Ref, ...]
    targets: tuple[Ref, ...]
    by_lse: bool
    rows: Table | None = None
    scratch: tuple[Ref, ...] = ()

    reads = property(lambda self: (*self.sources, *self.targets))
    writes = property(lambda self: (*self.scratch, *self.targets))


class SumHeads(NamedTuple):
    """target's head h is the sum of the source's of all ranks that have it: [rows, batch, ranks,
    heads of a rank(, width)]."""

    source: Ref
    target: Ref

    reads = property(lambda self: (self.source,))
    writes = property(lambda self: (self.target,))


class Ask(NamedTuple):
    """Partial results that whoever runs the code computes: decoding steps, whose keys grow."""

    targets: tuple[Ref, ...]

    reads = property(lambda self: ())
    writes = property(lambda self: self.targets)


Op: TypeAlias = (
    Copy
    | Fill
    | Encode
    | Decode
    | ComputeDelta
    | Post
    | Wait
    | Attend
    | Expand
    | Pull
    | Merge
    | SumHeads
    | Ask
)


class Line(NamedTuple):
    """An operation of the listing, and how many of the code's ops are its."""

    label: str
    num_ops: int


class KeptBuffer(NamedTuple):
    """A buffer that forward keeps: which operands lie in it, from which row on, of which rows."""

    buffer: int
    items: tuple[tuple[Item, int, tuple[tuple[int, int], ...]], ...]
    arena: bool


CODE_FORMAT = 2
"""Raised whenever codes that were pickled before mean something else, or nothing."""


def check_format(code_format: int) -> None:
    """Raise ValueError unless a pickled code is of this version."""
    if code_format != CODE_FORMAT:
        raise ValueError(
            f"the code was pickled in format {code_format}, but this version of tilewise reads "
            f"format {CODE_FORMAT}; prepare it anew with this version"
        )


class Code(NamedTuple):
    """One rank's pass; str() is its listing, one operation a line.

    Attributes:
        offsets: of WORKSPACE buffers, the first byte in the workspace; of others 0.
        num_bytes: of the workspace.
        bytes_sent: to other ranks.
        contiguous: the call's tensors whose rows must lie side by side.
        kept: in the order in which a forward pass hands them over.
    """

    rank: int
    world_size: int
    backward: bool
    batch: int
    tensors: tuple[TensorSpec, ...]
    buffers: tuple[Buffer, ...]
    ops: tuple[Op, ...]
    lines: tuple[Line, ...]
    offsets: tuple[int, ...]
    num_bytes: int
    contiguous: tuple[str, ...]
    kept: tuple[KeptBuffer, ...]

    def __str__(self) -> str:
        return "\n".join(self.labels)

    def __reduce__(self) -> tuple[Any, ...]:
        return _read, (CODE_FORMAT, *self)

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the operations, which profiles and simulated traces have, too."""
        return tuple(line.label for line in self.lines)

    @property
    def bytes_sent(self) -> int:
        total = 0
        for op in self.ops:
            if isinstance(op, Post):
                if op.team is not None:
                    sizes = op.team.sizes[0]
                    total += sum(sizes) - sizes[self.rank - op.team.team.ranks.start]
                else:
                    total += sum(self.num_bytes_of(sent.ref) for sent in op.sends)
        return total

    @property
    def made_bytes(self) -> int:
        """The most bytes that an operation makes for itself, beside the workspace."""
        made = (
            sum(self.num_bytes_of(ref) for ref in op.writes if self.home(ref) is Home.MADE)
            for op in self.ops
        )
        return max(made, default=0)

    @property
    def kept_bytes(self) -> int:
        return sum(self.buffers[kept.buffer].num_bytes for kept in self.kept)

    @property
    def peak_bytes(self) -> int:
        """All memory of the pass but what kernels allocate inside: the call's tensors too."""
        whole = (Ref(number) for number in range(len(self.tensors)))
        given = sum(self.num_bytes_of(ref) for ref in whole if self.home(ref) is Home.GIVEN)
        saved = sum(buffer.num_bytes for buffer in self.buffers if buffer.home is Home.SAVED)
        return self.num_bytes + self.made_bytes + self.kept_bytes + given + saved

    def home(self, ref: Ref) -> Home:
        return self.buffers[self.tensors[ref.tensor].buffer].home

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """Return the shape of the rows and heads that a reference means."""
        return ref_shape(self.tensors[ref.tensor], ref)

    def num_bytes_of(self, ref: Ref) -> int:
        spec, count = self.tensors[ref.tensor], 1
        for size in ref_shape(spec, ref):
            count *= size
        return count * item_bytes(spec.dtype)

    def named(self, ref: Ref) -> str:
        """A tensor's name with the rows and heads that are meant: "kv1.k[0:32]"."""
        rows = "" if ref.rows is None else f"[{_range(ref.rows)}]"
        heads = "" if ref.heads is None else f"{{{ref.heads[0]}:{ref.heads[1]}}}"
        return f"{self.tensors[ref.tensor].name}{rows}{heads}"

    def listing(self) -> Iterator[str]:
        """Every operation, and below it, indented, what is done for it to which tensors."""
        ops = iter(self.ops)
        for label, num_ops in self.lines:
            yield label
            for _ in range(num_ops):
                yield f"    {self._described(next(ops))}"

    def _described(self, op: Op) -> str:
        writes = ", ".join(map(self.named, op.writes))
        reads = ", ".join(map(self.named, op.reads))
        name = type(op).__name__.lower()
        match op:
            case Attend():
                calls = f"{op.call.kind.value} {op.call.num_q} x {op.call.num_k}"
                adds = "adds to" if all(result.adds for result in op.results) else "writes"
                operands = ", ".join(map(self.named, op.operands))
                return f"attend {calls} of {operands}; {adds} {writes}"
            case Wait():
                return f"wait for {', '.join(map(self.named, op.touched))}"
            case Post():
                return f"post {reads or 'nothing'}; receive {writes or 'nothing'}"
            case Fill():
                return f"fill {writes} with {op.value:g}"
            case Merge():
                sources = ", ".join(map(self.named, op.sources))
                return f"merge {sources} into {', '.join(map(self.named, op.targets))}"
            case _:
                return f"{name} {reads} to {writes}" if reads else f"{name} {writes}"


def _read(code_format: int, *fields: Any) -> Code:
    check_format(code_format)
    return Code(*fields)


def _range(rows: tuple[int, int, int]) -> str:
    start, stop, step = rows
    return f"{start}:{stop}" if step == 1 else f"{start}:{stop}:{step}"


def ref_shape(spec: TensorSpec, ref: Ref) -> tuple[int, ...]:
    shape = spec.shape
    if ref.rows is not None:
        shape = (len(range(*ref.rows)), *shape[1:])
    if ref.heads is not None:
        shape = (*shape[:2], ref.heads[1] - ref.heads[0], *shape[3:])
    return shape


class Extent(NamedTuple):
    """The bytes that a reference means: the first in its buffer, and a shape and strides in bytes.

    Attributes:
        item_bytes: of one number, which lie side by side.
    """

    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int

    @property
    def stop(self) -> int:
        """The byte after the last, of at least one number."""
        steps = ((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return self.first + sum(steps) + self.item_bytes


def extent(spec: TensorSpec, ref: Ref) -> Extent:
    """Return which bytes a reference means; a tensor of the call as if it were contiguous."""
    size, shape = item_bytes(spec.dtype), spec.shape
    numbers = spec.strides or tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    strides = [number * size for number in numbers]
    first = spec.start
    if ref.heads is not None:
        first += ref.heads[0] * strides[2]
    if ref.rows is not None:
        start, _, step = ref.rows
        first += start * strides[0]
        strides[0] *= step
    return Extent(first, ref_shape(spec, ref), tuple(strides), size)


class CodeWriter:
    """The tensors, buffers and ops that have been written of a code.

    Args:
        batch: sequences that lie side by side in every row.
    """

    def __init__(self, batch: int):
        self.batch = batch
        self.buffers: list[Buffer] = []
        self.tensors: list[TensorSpec] = []
        self.ops: list[Op] = []
        self._given: dict[str, int] = {}

    def add(self, op: Op) -> None:
        """Write an op."""
        self.ops.append(op)

    def buffer(self, name: str, num_bytes: int, home: Home, part_rows: Sequence[int] = ()) -> int:
        """The number of a new buffer."""
        self.buffers.append(Buffer(name, num_bytes, home, tuple(part_rows)))
        return len(self.buffers) - 1

    def tensor(self, spec: TensorSpec) -> Ref:
        """A new tensor in a buffer."""
        self.tensors.append(spec)
        return Ref(len(self.tensors) - 1)

    def new(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str,
        home: Home = Home.WORKSPACE,
        part_rows: Sequence[int] = (),
    ) -> Ref:
        """A tensor in a buffer of its own."""
        num_bytes = prod(shape) * item_bytes(dtype)
        buffer = self.buffer(name, num_bytes, home, part_rows)
        strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
        return self.tensor(TensorSpec(name, buffer, 0, tuple(shape), tuple(strides), dtype))

    def given(self, name: str, rows: int, heads: int, width: int, dtype: str) -> Ref:
        """A tensor of the call."""
        if name not in self._given:
            shape = rows, self.batch, *row_shape(name, heads, width)
            buffer = self.buffer(name, 0, Home.GIVEN)
            self._given[name] = self.tensor(TensorSpec(name, buffer, 0, shape, (), dtype)).tensor
        return Ref(self._given[name])

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """The shape of what a reference means."""
        return ref_shape(self.tensors[ref.tensor], ref)

    def dtype(self, ref: Ref) -> str:
        return self.tensors[ref.tensor].dtype

    def rows(
        self, ref: Ref, rows: slice | tuple[int, int] | None, heads: slice | None = None
    ) -> Ref:
        """Rows, and heads, of what a reference means."""
        if rows is not None:
            start, stop, step = (*rows, 1) if isinstance(rows, tuple) else _plain(rows)
            if ref.rows is not None:
                first, _, by = ref.rows
                start, stop, step = first + start * by, first + stop * by, step * by
            whole = (0, self.tensors[ref.tensor].shape[0], 1)
            here = None if (start, stop, step) == whole else (start, stop, step)
            ref = Ref(ref.tensor, here, ref.heads)
        if heads is not None:
            first = 0 if ref.heads is None else ref.heads[0]
            ref = Ref(ref.tensor, ref.rows, (first + heads.start, first + heads.stop))
        return ref

    def num_bytes(self, ref: Ref) -> int:
        return prod(self.shape(ref)) * item_bytes(self.dtype(ref))

    def picked(self, x: Ref, rows: slice | np.ndarray | None) -> Ref:
        """The rows that an index selects: a part of the tensor, unless they are a table."""
        if not isinstance(rows, np.ndarray):
            return x if rows is None else self.rows(x, rows)
        name = f"rows of {self.tensors[x.tensor].name}"
        target = self.new(name, (len(rows), *self.shape(x)[1:]), self.dtype(x))
        self.add(Copy(x, target, Table.of(rows)))
        return target

    def copy_pieces(self, source: Ref, ranges: Sequence[tuple[int, int]], target: Ref) -> None:
        """Copy ranges of rows one after the other."""
        for rows, here in packed_ranges(ranges):
            self.add(Copy(self.rows(source, rows), self.rows(target, here)))


def packed_ranges(
    ranges: Iterable[tuple[int, int]],
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Each range of rows, and where its rows are if all lie one after the other."""
    offset = 0
    for start, stop in ranges:
        yield (start, stop), (offset, offset + stop - start)
        offset += stop - start


def _plain(rows: slice) -> tuple[int, int, int]:
    return rows.start, rows.stop, rows.step or 1

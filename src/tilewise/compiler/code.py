"""The code of one rank's pass: operations on numbered tensors of placed buffers, numbers only.

A code says all that a pass does to memory: what is copied, encoded, sent, awaited, computed and
merged, and which bytes of which buffer each tensor is. The compiler's passes write it;
`execution/run.py` binds it to memory once and runs it, and nothing is decided then. Codes compare,
print and pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from math import prod
from typing import Any, NamedTuple, TypeAlias

from tilewise.arguments import item_bytes
from tilewise.compiler.ops import Attend, Combine, Fill, Merge, Op, Post, V, Wait, reads, writes
from tilewise.compiler.traffic import traffic_bytes
from tilewise.plan.ir import Item


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


Refs: TypeAlias = tuple[Ref, ...]
"""The operand of an operation in a code: the tensors that its fields are."""


class KeptBuffer(NamedTuple):
    """A buffer that forward keeps: which operands lie in it, from which row on, of which rows."""

    buffer: int
    items: tuple[tuple[Item, int, tuple[tuple[int, int], ...]], ...]


CODE_FORMAT = 5
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
        contiguous: the call's tensors whose rows must lie side by side.
        kept: in the order in which a forward pass hands them over.
    """

    rank: int
    world_size: int
    backward: bool
    batch: int
    tensors: tuple[TensorSpec, ...]
    buffers: tuple[Buffer, ...]
    ops: tuple[Op[Refs], ...]
    offsets: tuple[int, ...]
    num_bytes: int
    contiguous: tuple[str, ...] = ()
    kept: tuple[KeptBuffer, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self.labels)

    def __reduce__(self) -> tuple[Any, ...]:
        return _read, (CODE_FORMAT, *self)

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the operations, which profiles and simulated traces have, too."""
        return tuple(op.label for op in self.ops)

    @property
    def bytes_sent(self) -> int:
        """Bytes that the pass sends to other ranks."""
        total = 0
        for op in self.ops:
            if isinstance(op, Post):
                if op.team is not None:
                    sizes = op.team.sizes[0]
                    total += sum(sizes) - sizes[self.rank - op.team.team.ranks.start]
                else:
                    total += sum(map(self.num_bytes_of, op.leaving))
        return total

    @property
    def traffic_bytes(self) -> int:
        """Bytes that the pass reads and writes in memory beside what its kernels read.

        Counted are copies, fills, merges, encodings, additions in place, and each kernel's write of
        its results, in their dtype. What kernels read of q, k, v, dout, out and lse is not.
        """
        return sum(traffic_bytes(op, self.num_bytes_of) for op in self.ops)

    @property
    def num_calls(self) -> int:
        """Kernel calls of the pass."""
        return sum(isinstance(op, Attend) for op in self.ops)

    @property
    def made_bytes(self) -> int:
        """Largest number of bytes outside the workspace at one time, in tensors that operations
        allocate themselves. A tensor counts until the last operation that reads it.
        """
        last_reads = self.last_reads()
        made: dict[int, int] = {}
        most = 0
        for number, op in enumerate(self.ops):
            for ref in (ref for refs in writes(op) for ref in refs):
                if self.home(ref) is Home.MADE:
                    made[ref.tensor] = self.num_bytes_of((Ref(ref.tensor),))
            most = max(most, sum(made.values()))
            for tensor in last_reads.get(number, ()):
                made.pop(tensor, None)
        return most

    def last_reads(self) -> dict[int, list[int]]:
        """Return, by the number of an operation, the tensors that operations make and that none
        after this one reads.
        """
        last: dict[int, int] = {}
        for number, op in enumerate(self.ops):
            for ref in (ref for refs in (*writes(op), *reads(op)) for ref in refs):
                if self.home(ref) is Home.MADE:
                    last[ref.tensor] = number
        found: dict[int, list[int]] = {}
        for tensor, number in last.items():
            found.setdefault(number, []).append(tensor)
        return found

    @property
    def kept_bytes(self) -> int:
        """Bytes that a forward pass keeps for backward."""
        return sum(self.buffers[kept.buffer].num_bytes for kept in self.kept)

    @property
    def peak_bytes(self) -> int:
        """All memory of the pass but what kernels allocate inside: the call's tensors too."""
        whole = (Ref(number) for number in range(len(self.tensors)))
        given = sum(self.num_bytes_of((ref,)) for ref in whole if self.home(ref) is Home.GIVEN)
        saved = sum(buffer.num_bytes for buffer in self.buffers if buffer.home is Home.SAVED)
        return self.num_bytes + self.made_bytes + self.kept_bytes + given + saved

    def home(self, ref: Ref) -> Home:
        return self.buffers[self.tensors[ref.tensor].buffer].home

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """Return the shape of the rows and heads that a reference means."""
        return ref_shape(self.tensors[ref.tensor], ref)

    def num_bytes_of(self, refs: Refs) -> int:
        """Return the bytes of the rows and heads that references mean."""
        total = 0
        for ref in refs:
            spec = self.tensors[ref.tensor]
            total += prod(ref_shape(spec, ref)) * item_bytes(spec.dtype)
        return total

    def named(self, ref: Ref) -> str:
        """A tensor's name with the rows and heads that are meant: "kv1.k[0:32]"."""
        rows = "" if ref.rows is None else f"[{_range(ref.rows)}]"
        heads = "" if ref.heads is None else f"{{{ref.heads[0]}:{ref.heads[1]}}}"
        return f"{self.tensors[ref.tensor].name}{rows}{heads}"

    def listing(self) -> Iterator[str]:
        """Every operation, and below it, indented, which tensors it reads and writes."""
        return listing(self.ops, lambda refs: ", ".join(map(self.named, refs)))


def listing(ops: Iterable[Op[V]], named: Callable[[V], str]) -> Iterator[str]:
    """Yield a line for each operation, and below it, indented, what it reads and writes.

    Args:
        named: of an operand.
    """
    for op in ops:
        yield op.label
        yield f"    {_described(op, named)}"


def _described(op: Op[V], named: Callable[[V], str]) -> str:
    written, read = (", ".join(map(named, views)) for views in (writes(op), reads(op)))
    name = type(op).__name__.lower()
    match op:
        case Attend():
            calls = f"{op.call.kind.value} {op.call.num_q} x {op.call.num_k}"
            operands = ", ".join(map(named, op.operands))
            ends = [
                f"{'adds to' if adds else 'writes'} {named(view)}" for view, adds in op.results()
            ]
            return f"attend {calls} of {operands}; {', '.join(ends)}"
        case Wait():
            return f"wait for {', '.join(map(named, op.touched))}"
        case Post():
            return f"post {read or 'nothing'}; receive {written or 'nothing'}"
        case Fill():
            return f"fill {written} with {', '.join(f'{value:g}' for value in op.values)}"
        case Merge():
            return f"merge {named(op.source)} into {named(op.target)}"
        case Combine():
            return f"combine {' and '.join(map(named, op.sources))} into {named(op.target)}"
        case _:
            return f"{name} {read} to {written}" if read else f"{name} {written}"


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

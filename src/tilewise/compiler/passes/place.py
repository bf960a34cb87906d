"""The last pass: buffers become tensors with a place, and the draft a code that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tilewise.arguments import item_bytes
from tilewise.compiler.code import (
    Buffer,
    Code,
    Home,
    KeptBuffer,
    Ref,
    Refs,
    TensorSpec,
)
from tilewise.compiler.draft import (
    AttendTile,
    Draft,
    HeadBuffer,
    RowBuffer,
    View,
    field_shape,
    strides_of,
)
from tilewise.compiler.facts import Facts
from tilewise.compiler.ops import (
    Attend,
    Combine,
    Copy,
    Decode,
    Encode,
    Op,
    Post,
    Wait,
    Wholes,
    operand_places,
)
from tilewise.compiler.placement import Departures, placed
from tilewise.plan.payload import STATISTICS, Field, RowFormat


def place(draft: Draft, facts: Facts) -> Code:
    """Return the code: every buffer's tensors, and where they lie in the workspace."""
    writer = _Writer(draft)
    kept = [KeptBuffer(writer.buffer_of(one.buffer), one.items) for one in draft.kept]
    if facts.forward is not None:
        writer.name_saved()
    ops = tuple(map(writer.op, draft.ops))
    writer.name_given()
    tensors, buffers = tuple(writer.tensors), tuple(writer.buffers)
    departs = Departures(facts.traits.sends_in_flight, not facts.traits.receives_ahead)
    offsets, num_bytes = placed(tensors, buffers, ops, departs)
    return Code(
        facts.rank,
        facts.plan.world_size,
        facts.payload.backward,
        draft.batch,
        tensors,
        buffers,
        ops,
        offsets,
        num_bytes,
        tuple(writer.contiguous),
        tuple(kept),
    )


class _Writer:
    """The tensors and buffers that views become."""

    def __init__(self, draft: Draft):
        self._draft = draft
        self.tensors: list[TensorSpec] = []
        self.buffers: list[Buffer] = []
        self.contiguous: dict[str, None] = {}
        self._memory: dict[int, int] = {}  # by buffer of the draft
        self._fields: dict[tuple[int, str], int] = {}
        self._columns: dict[tuple[int, str], int] = {}
        self._bytes: dict[int, int] = {}
        self._given: dict[str, int] = {}

    def name_saved(self) -> None:
        """Give buffers that forward kept their numbers, also those that nothing reads."""
        for number, buffer in enumerate(self._draft.buffers):
            if buffer.home is Home.SAVED:
                self.buffer_of(number)

    def name_given(self) -> None:
        """Name the call's tensors that nothing reads, too: they take memory all the same."""
        for number, buffer in enumerate(self._draft.buffers):
            for field in buffer.fields if buffer.home is Home.GIVEN else ():
                if field.name != "delta":
                    self._field(number, field)

    def op(self, op: Op[View] | AttendTile) -> Op[Refs]:
        """Return an operation on views as one on tensors."""
        match op:
            case AttendTile():
                raise AssertionError("tiles are cut before they are placed")
            case Copy():
                return self._copy(op)
            case Encode():
                return op._replace(source=self.refs(op.source), target=self._packed(op.target))  # pyright: ignore
            case Decode():
                return op._replace(source=self._packed(op.source), target=self.refs(op.target))  # pyright: ignore
            case Post():
                leaving, arriving = (
                    tuple(map(self._message, x)) for x in (op.leaving, op.arriving)
                )
                return op._replace(leaving=leaving, arriving=arriving)  # pyright: ignore
            case Wait():
                return op._replace(touched=tuple(map(self._message, op.touched)))  # pyright: ignore
            case Attend():
                return self._attend(op)
            case Combine():
                sources = tuple(map(self.refs, op.sources))
                return op._replace(sources=sources, target=self._in_order(op.sources[0], op.target))  # pyright: ignore
            case _:
                return _mapped(op, self.refs)

    def _copy(self, copy: Copy[View]) -> Copy[Refs]:
        draft = self._draft
        forms = [draft.buffers[x.buffer].form for x in (copy.source, copy.target)]
        roots = [draft.buffers[draft.found(x).buffer] for x in (copy.source, copy.target)]
        travel = all(isinstance(x, RowFormat) for x in (*forms, *(root.form for root in roots)))
        if travel and copy.source.fields is None and forms[0] == forms[1]:
            return _mapped(copy, self._message)  # rows as they travel, whatever is in them
        source, target = self.refs(copy.source), self._in_order(copy.source, copy.target)
        return copy._replace(source=source, target=target)  # pyright: ignore

    def _in_order(self, source: View, target: View) -> Refs:
        """The tensors of a target, in the order of the source's fields."""
        names = [x.name for x in self._draft.fields_of(source)]
        targets = [x.name for x in self._draft.fields_of(target)]
        refs = self.refs(target)
        return refs if names == targets else tuple(refs[targets.index(name)] for name in names)

    def _attend(self, op: Attend[View]) -> Attend[Refs]:
        """A kernel call, whose operands are one tensor each, in the order that kernels take."""
        if op.wholes is None:
            operands = self._by_name(op.operands)
        else:
            operands = tuple(map(self.refs, op.operands))
        added, written = (tuple(map(self.refs, x)) for x in (op.added, op.written))
        wholes = None
        if op.wholes is not None:
            results = tuple(map(self.refs, op.wholes.results))
            wholes = Wholes(self._by_name(op.wholes.operands), results)
        return op._replace(operands=operands, added=added, written=written, wholes=wholes)  # pyright: ignore

    def _by_name(self, views: Iterable[View]) -> tuple[Refs, ...]:
        by_name = {
            one.name: ref
            for view in views
            for one, ref in zip(self._draft.fields_of(view), self.refs(view), strict=True)
        }
        order = ("q", "k", "v", "dout", "lse", "delta")
        return tuple((by_name[name],) for name in order if name in by_name)

    def refs(self, view: View) -> Refs:
        """The tensors of a view: one for each of its fields."""
        names = [x.name for x in self._draft.fields_of(view)]
        found = self._draft.found(view)
        fields = {x.name: x for x in self._draft.buffers[found.buffer].fields}
        return tuple(
            Ref(self._field(found.buffer, fields[name]), found.rows, found.heads) for name in names
        )

    def _field(self, number: int, field: Field) -> int:
        """Return the number of the tensor of a field of a buffer; it is made at first use."""
        key = number, field.name
        if key not in self._fields:
            buffer = self._draft.buffers[number]
            shape = field_shape(buffer, field, self._draft.batch)
            if buffer.home is Home.GIVEN and field.name != "delta":
                self._fields[key] = self._given_tensor(field, shape)
            elif buffer.form is None:
                name = f"{buffer.name}.{field.name}" if buffer.item else field.name
                name = buffer.name if buffer.name == field.name else name
                self._fields[key] = self._apart(name, buffer, field, shape)
            else:
                self._fields[key] = self._within(number, buffer, field, shape)
        return self._fields[key]

    def _given_tensor(self, field: Field, shape: tuple[int, ...]) -> int:
        if field.name not in self._given:
            self.buffers.append(Buffer(field.name, 0, Home.GIVEN))
            spec = TensorSpec(field.name, len(self.buffers) - 1, 0, shape, (), field.dtype)
            self._given[field.name] = self._tensor(spec)
        return self._given[field.name]

    def _apart(self, name: str, buffer: RowBuffer, field: Field, shape: tuple[int, ...]) -> int:
        strides = strides_of(shape)
        num_bytes = (shape[0] * strides[0] if shape[0] else 0) * field.item_bytes
        home = Home.WORKSPACE if buffer.home is Home.GIVEN else buffer.home
        self.buffers.append(Buffer(name, num_bytes, home, buffer.part_rows))
        return self._tensor(TensorSpec(name, len(self.buffers) - 1, 0, shape, strides, field.dtype))

    def _within(self, number: int, buffer: RowBuffer, field: Field, shape: tuple[int, ...]) -> int:
        """Make the tensor of a field that shares its rows of bytes with other fields."""
        memory, start, batch = self.buffer_of(number), self._start(buffer), self._draft.batch
        name = f"{buffer.name}.{field.name}"
        if isinstance(buffer.form, HeadBuffer):
            (one,) = [
                x
                for x in buffer.form.exchange.fields
                if (x.side, x.name) == (buffer.form.side, field.name)
            ]
            shape, strides = one.whole if buffer.form.whole else one.by_rank
            start = one.start * item_bytes(one.dtype)
            return self._tensor(TensorSpec(name, memory, start, shape, strides, one.dtype))
        assert isinstance(buffer.form, RowFormat)
        names = [x.name for x in buffer.form.fields]
        column = buffer.form.starts[names.index(field.name)]
        size = field.item_bytes
        step = buffer.form.num_bytes // size
        inner = (1,) if field.name in STATISTICS else (field.width, 1)
        strides = batch * step, step, *inner
        return self._tensor(TensorSpec(name, memory, start + column, shape, strides, field.dtype))

    def _packed(self, view: View) -> Refs:
        """Return the bytes of each field of packed rows, uint8 [rows, batch, bytes of a field]."""
        found = self._draft.found(view)
        buffer, batch = self._draft.buffers[found.buffer], self._draft.batch
        assert isinstance(buffer.form, RowFormat)
        refs: list[Ref] = []
        for field, column in zip(buffer.form.fields, buffer.form.starts, strict=True):
            key = found.buffer, field.name
            if key not in self._columns:
                width = buffer.form.num_bytes
                shape = buffer.num_rows, batch, buffer.heads * field.row_bytes
                spec = TensorSpec(
                    f"{buffer.name}.{field.name}.bytes",
                    self.buffer_of(found.buffer),
                    self._start(buffer) + column,
                    shape,
                    (batch * width, width, 1),
                    "uint8",
                )
                self._columns[key] = self._tensor(spec)
            refs.append(Ref(self._columns[key], found.rows, None))
        return tuple(refs)

    def _message(self, view: View) -> Refs:
        """Return what is sent or received: rows of bytes, or the one tensor of the call that they
        are.
        """
        found = self._draft.found(view)
        buffer = self._draft.buffers[found.buffer]
        if buffer.home is Home.GIVEN:
            (ref,) = self.refs(view)
            self.contiguous[self.tensors[ref.tensor].name] = None
            return (ref,)
        if found.buffer not in self._bytes:
            if isinstance(buffer.form, int):
                shape, strides = (buffer.form, 1, 1), (1, 1, 1)
            else:
                assert isinstance(buffer.form, RowFormat)
                width, batch = buffer.form.num_bytes, self._draft.batch
                shape, strides = (buffer.num_rows, batch, width), (batch * width, width, 1)
            memory = self.buffer_of(found.buffer)
            spec = TensorSpec(
                f"{buffer.name}.bytes", memory, self._start(buffer), shape, strides, "uint8"
            )
            self._bytes[found.buffer] = self._tensor(spec)
        return (Ref(self._bytes[found.buffer], found.rows, None),)

    def buffer_of(self, number: int) -> int:
        """Return the number of the memory in which a buffer lies; it is made at first use."""
        buffer = self._draft.buffers[number]
        if buffer.within is not None:
            return self.buffer_of(buffer.within[0])
        if number not in self._memory:
            if isinstance(buffer.form, int):
                num_bytes = buffer.form
            else:
                assert isinstance(buffer.form, RowFormat)
                num_bytes = buffer.num_rows * self._draft.batch * buffer.form.num_bytes
            self.buffers.append(Buffer(buffer.name, num_bytes, buffer.home, buffer.part_rows))
            self._memory[number] = len(self.buffers) - 1
        return self._memory[number]

    def _start(self, buffer: RowBuffer) -> int:
        return 0 if buffer.within is None else buffer.within[1]

    def _tensor(self, spec: TensorSpec) -> int:
        self.tensors.append(spec)
        return len(self.tensors) - 1


def _mapped(op: Op[View], refs: Callable[[View], Refs]) -> Any:
    """Return an operation with refs(view) in place of each of its views."""
    fields: list[Any] = list(op)
    for place, several in operand_places(type(op)):
        fields[place] = tuple(map(refs, fields[place])) if several else refs(fields[place])
    return type(op)(*fields)

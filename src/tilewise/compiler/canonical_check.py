"""The proof that results have the same bits at any split: codes are run on terms, not on numbers.

All ranks' codes are run together, message by message, on memory whose every unit holds a number
that stands for what lies there: which row and head of which operand, or which terms a sum has
(`canonical_terms.py`). A pair of leaves adds its terms, a merge of binned sums adds numbers, a copy
or a message carries them. Whatever depends on the split leaves its cause in what it writes: a
merge that rounds, a call of another shape, a number that is rounded on its way. A result is
canonical if it was made of exactly its terms, each once, and turned to floating point once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import gcd, prod
from typing import NamedTuple

import numpy as np

from tilewise.arguments import item_bytes
from tilewise.compiler.canonical_calls import SIDES, LeafCalls, dtype_of, formats, listed, strangers
from tilewise.compiler.canonical_memory import (
    UNWRITTEN,
    Content,
    Memory,
    first_cause,
    read_values,
    unit_of,
    write_causes,
    write_values,
)
from tilewise.compiler.canonical_terms import RowsOf, Terms, factors, values
from tilewise.compiler.code import (
    Attend,
    AttendLeaves,
    Code,
    ComputeDelta,
    Copy,
    Decode,
    Encode,
    Fill,
    Finish,
    Home,
    Merge,
    Op,
    Post,
    Ref,
    SumHeads,
    TensorSpec,
    Wait,
)
from tilewise.compiler.code_check import CodeError, check_code
from tilewise.compiler.placement import Departures
from tilewise.compiler.resolved import CallShape
from tilewise.layouts.layout import Layout
from tilewise.plan.ir import Side
from tilewise.plan.sums import SumColumns

MOST_SHOWN = 8
"""Faults that an error lists."""


class Fault(NamedTuple):
    """Rows of a result on one rank that may depend on the split, and why.

    Attributes:
        result: out, lse, largest, dq, dk or dv; rows: those that move to whole leaves, and back.
        positions: global positions of the rows.
        heads: of the whole layer.
        reason: the rank, the op and what it does.
    """

    result: str
    rank: int
    positions: tuple[int, ...]
    heads: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        rows, heads = listed(self.positions), listed(self.heads)
        return f"{self.result} of rank {self.rank}, tokens {rows}, heads {heads}: {self.reason}"


class CanonicalError(ValueError):
    """Codes whose results may depend on how they are split.

    Attributes:
        faults: the rows that do; none where the codes do not even run.
    """

    def __init__(self, message: str, faults: tuple[Fault, ...] = ()):
        super().__init__(message)
        self.faults = faults


def check_codes(
    forward: Sequence[Code],
    backward: Sequence[Code],
    call: CallShape,
    *,
    replicated_queries: bool = False,
    departs: Departures = Departures(1, True),  # noqa: B008 - a constant
) -> None:
    """Return None if results of these codes have the same bits as those of any others of the call.

    Args:
        forward, backward: codes of all ranks, in order.
        call: its mask and layout, of whole leaves, say what each row is to be.
        replicated_queries: every rank has the same queries.
        departs: by when the transport has sent what it was handed.
    Raises:
        CanonicalError: with .faults, the rows that may have other bits, and why.
    """
    terms, faults = Terms(call, replicated_queries), list[Fault]()
    unit = gcd(*map(unit_of, (*forward, *backward)))
    kept: list[list[Content]] = [[] for _ in forward]
    for of_pass, is_backward in ((forward, False), (backward, True)):
        _check_memory(of_pass, terms.world_size, is_backward, departs)
        world = _World(unit)
        world.ranks += (
            _PassRank(world, code, terms, of_rank)
            for code, of_rank in zip(of_pass, kept, strict=True)
        )
        world.run()
        kept = [rank.memory.kept() for rank in world.ranks]
        faults += world.faults()
    _raise(faults)


def check_moves(
    codes: Sequence[Code],
    layouts: tuple[Layout, Layout],
    departs: Departures = Departures(1, True),  # noqa: B008 - a constant
) -> None:
    """Return None if codes move the rows of one layout to the ranks that have them in another.

    Args:
        codes: of row moves of all ranks, in order, forward, of rows of one head: (1, 1, width).
        layouts: as the rows lie before, and after.
    Raises:
        CanonicalError: with .faults, the rows that do not arrive as they were.
    """
    _check_memory(codes, layouts[0].world_size, False, departs)
    world = _World(gcd(*map(unit_of, codes)))
    world.ranks += (_MovesRank(world, code, layouts) for code in codes)
    world.run()
    _raise([*world.faults()])


def _check_memory(
    codes: Sequence[Code], world_size: int, backward: bool, departs: Departures
) -> None:
    found = [(code.rank, code.world_size, code.backward) for code in codes]
    if found != [(rank, world_size, backward) for rank in range(world_size)]:
        raise ValueError(
            f"codes must be those of ranks 0 to {world_size - 1} in order, pass by pass"
        )
    for code in codes:
        try:
            check_code(code, departs)
        except CodeError as error:
            raise CanonicalError(f"rank {code.rank}, {_pass_name(code)}, {error}") from error


def _raise(faults: Sequence[Fault]) -> None:
    if faults:
        shown = "\n  ".join(map(str, faults[:MOST_SHOWN]))
        more = f"\n  and {len(faults) - MOST_SHOWN} more" if len(faults) > MOST_SHOWN else ""
        raise CanonicalError(f"results depend on the split:\n  {shown}{more}", tuple(faults))


def _pass_name(code: Code) -> str:
    return "backward" if code.backward else "forward"


def _label(code: Code, number: int) -> str:
    """The operation of the listing that an op is of."""
    for line in code.lines:
        number -= line.num_ops
        if number < 0:
            return line.label
    return "added"


def _as_short(columns: SumColumns) -> str:
    """The name under which factors of sums that travel are drawn."""
    return f"short {columns}"


_Route = tuple[int, int, int]  # sender, receiver, lane; -1: exchanges of a team
_TEAM = -1


class _World:
    """All ranks of a pass."""

    def __init__(self, unit: int):
        self.unit, self.ranks = unit, list[_Rank]()
        self.reasons: list[str] = ["", "nobody wrote it"]
        self.mail: defaultdict[_Route, list[Content]] = defaultdict(list)

    def run(self) -> None:
        """Let each rank go on until it waits for a message that is not there."""
        moved = True
        while moved:
            moved = False
            for rank in self.ranks:
                moved |= rank.go_on()
        for rank in self.ranks:
            if not rank.is_done:
                raise CanonicalError(f"{rank.where()} waits for a message that nobody sends")
        for route, sent in self.mail.items():
            left = len(sent) - self.ranks[route[1]].num_received[route]
            if left:
                raise CanonicalError(
                    f"rank {route[1]} never takes {left} messages of rank {route[0]}"
                )

    def cause(self, reason: str) -> int:
        """The number of a cause."""
        self.reasons.append(reason)
        return len(self.reasons) - 1

    def faults(self) -> Iterator[Fault]:
        """Rows of results that are not as they should be, at the end."""
        for rank in self.ranks:
            yield from rank.faults()


class _Rank(ABC):
    """One rank's code, as far as it has run.

    Args:
        results: names of the tensors that it is to write.
        kept: what a forward pass has kept for this one.
    """

    def __init__(
        self, world: _World, code: Code, results: Sequence[str], kept: Sequence[Content] = ()
    ):
        self.world, self.code, self.next_op = world, code, 0
        given = {f"kept{number}": x for number, x in enumerate(kept)}
        self.results: dict[str, Ref] = {}
        for number, spec in enumerate(code.tensors):
            if code.buffers[spec.buffer].home is Home.GIVEN:
                if spec.name in results:
                    self.results[spec.name] = Ref(number)
                given[spec.name] = self._given(spec, spec.name in results)
        absent = [name for name in results if name not in self.results]
        if absent:
            raise CanonicalError(f"rank {self.rank} has no {', '.join(absent)}")
        self.memory = Memory(code, world.unit, given)
        self.num_received: defaultdict[_Route, int] = defaultdict(int)
        self._awaited: dict[int, list[tuple[_Route, int, Content]]] = {}

    @property
    def rank(self) -> int:
        return self.code.rank

    @property
    def is_done(self) -> bool:
        return self.next_op == len(self.code.ops)

    def where(self) -> str:
        """The op that is next, for reasons."""
        label = _label(self.code, self.next_op)
        name = _pass_name(self.code)
        return f"rank {self.rank}, op {self.next_op} of {name} ({label})"

    def _cause(self, reason: str) -> int:
        return self.world.cause(f"{self.where()} {reason}")

    # The call's tensors

    @abstractmethod
    def _rows_of(self, name: str) -> RowsOf:
        """The rows and heads of a tensor of the call."""

    def _value_name(self, name: str) -> str:
        """The name under which a tensor's values are drawn."""
        return name

    def _given(self, spec: TensorSpec, is_result: bool) -> Content:
        """The content of a tensor of the call: its values, or nothing yet of a result."""
        rows, heads = self._rows_of(spec.name), np.arange(spec.shape[2])
        expected = len(rows.positions), len(rows.heads)
        if expected[0] != spec.shape[0] or (is_result and expected[1] != spec.shape[2]):
            raise CanonicalError(
                f"rank {self.rank} has {spec.shape[0]} rows of {spec.shape[2]} heads of "
                f"{spec.name}, but the call {expected[0]} of {expected[1]}"
            )
        width = prod(spec.shape[3:]) * item_bytes(spec.dtype) // self.world.unit
        content = Content.blank(prod(spec.shape[:3]) * width)
        if not is_result:
            whole = content.each(lambda x: x.reshape(*spec.shape[:3], width))
            name = self._value_name(spec.name)
            write_values(whole, name, values(name, rows._replace(heads=heads)))
        return content

    def faults(self) -> Iterator[Fault]:
        """Rows of this rank's results that are not finished as they should be."""
        for name, ref in self.results.items():
            rows, content = self._rows_of(name), self._value_name(name)
            found = read_values(self.memory.view(ref), content)
            wrong = (found.values != values(content, rows)) | ~found.whole
            other = self.world.cause(f"rank {self.rank} has other rows there") if wrong.any() else 0
            causes = first_cause(found.causes, np.where(wrong, other, 0).astype(np.int32))
            for cause in np.unique(causes[causes > 0]).tolist():
                at, _, heads = np.nonzero(causes == cause)
                yield Fault(
                    content,
                    self.rank,
                    tuple(np.unique(rows.positions[at]).tolist()),
                    tuple(np.unique(heads).tolist()),
                    self.world.reasons[cause],
                )

    # Operations

    def go_on(self) -> bool:
        """Run ops until a message is missing; returns whether any has run."""
        before = self.next_op
        while not self.is_done:
            try:
                if not self._run(self.code.ops[self.next_op]):
                    break
            except (ValueError, IndexError) as error:
                raise CanonicalError(f"{self.where()} cannot run: {error}") from error
            self.next_op += 1
        return self.next_op > before

    def _run(self, op: Op) -> bool:
        view = self.memory.view
        match op:
            case Wait():
                return self._wait(op)
            case Post():
                self._post(op)
            case Copy():
                self._copy(op)
            case Fill(target, value):
                content = view(target)
                content.numbers[...] = factors(f"fill {value}", 2)[1] if value else 0
                content.causes[...] = 0
            case Encode(source, target, field) | Decode(source, target, field):
                numbers = source if isinstance(op, Encode) else target
                if self._dtype(numbers) != field.dtype:
                    self._spoil(op, f"rounds {field.name} on its way")
                elif isinstance(field.wire, SumColumns):
                    self._recode(op, field.wire)
                elif field.wire is not None:
                    self._spoil(op, f"rounds {field.name} on its way")
                else:
                    view(target).write(view(source))
            case _:
                self._compute(op)
        return True

    def _compute(self, op: Op) -> None:
        """Run an op that makes numbers of others."""
        self._spoil(op, "computes numbers outside of pairs of leaves")

    def _dtype(self, ref: Ref) -> str:
        return self.code.tensors[ref.tensor].dtype

    def _spoil(self, op: Op, reason: str) -> None:
        """Leave a cause in all that an op writes, or the one that was read."""
        found = [int(self.memory.view(ref).causes.max(initial=0)) for ref in op.reads]
        cause = max(found, default=0)
        cause = cause if cause > UNWRITTEN else self._cause(reason)
        for ref in op.writes:
            self.memory.view(ref).causes[...] = cause

    def _recode(self, op: Encode | Decode, columns: SumColumns) -> None:
        """Write sums as they travel, or as they lie in memory: nothing is lost."""
        sums, rows = (op.source, op.target) if isinstance(op, Encode) else (op.target, op.source)
        self._check_short(rows, sums, columns)
        whole, short = self.memory.view(sums), self._short(rows, self.code.shape(sums)[2])
        ends = (whole, columns), (short, _as_short(columns))
        (source, name), (target, other) = ends if isinstance(op, Encode) else ends[::-1]
        found = read_values(source, name)
        new = (
            0
            if found.whole.all()
            else self._cause(f"sends what are no sums of {formats([columns])}")
        )
        causes = first_cause(found.causes, np.where(found.whole, 0, new).astype(np.int32))
        write_values(target, other, found.values, causes)

    def _short(self, ref: Ref, num_heads: int) -> Content:
        """The units of sums as they travel, [rows, batch, heads, units]."""
        return self.memory.view(ref).each(lambda x: x.reshape(*x.shape[:2], num_heads, -1))

    def _check_short(self, rows: Ref, sums: Ref, columns: SumColumns) -> None:
        """Raise ValueError unless bytes are those of as many sums as they travel."""
        shape, found = self.code.shape(sums), self.code.shape(rows)
        width = shape[2] * columns.row_bytes(columns.num_columns, columns.dtype)
        if found != (*shape[:2], width) or self._dtype(rows) != "uint8":
            raise ValueError(f"sums of {(*shape[:2], width)} bytes are read of {found}")

    def _copy(self, op: Copy) -> None:
        source, target = self.memory.view(op.source), self.memory.view(op.target)
        rows = None if op.rows is None else op.rows.numbers
        if rows is not None and not op.scatters:
            source = source.each(lambda x: x[rows])
        if op.heads is not None:
            heads = op.heads.numbers
            source = source.each(lambda x: x[:, :, heads])
        if self._dtype(op.source) != self._dtype(op.target):
            causes = source.causes.max(-1)
            new = self._cause(f"rounds to {self._dtype(op.target)}")
            causes = np.where(causes > 0, causes, new)
            write_causes(target, causes.reshape(target.causes.shape[:-1]))
        elif rows is not None and op.scatters:
            for mine, theirs in zip(target, source, strict=True):
                mine[rows] = theirs
        else:
            target.write(source)

    # Messages

    def _post(self, op: Post) -> None:
        if op.team is not None:
            self._post_team(op)
            return
        peers = [one.peer for one in (*op.sends, *op.recvs)]
        if not all(0 <= peer < len(self.world.ranks) for peer in peers):
            raise ValueError(f"there are ranks 0 to {len(self.world.ranks) - 1}, not {max(peers)}")
        for sent in op.sends:
            content = self.memory.view(sent.ref).each(np.ndarray.flatten)
            if len(content.numbers):  # transports skip empty messages
                self.world.mail[self.rank, sent.peer, op.lane].append(content)
        apart = [index for group in op.apart for index in group]
        rest = [index for index in range(len(op.recvs)) if index not in apart]
        for index in (*apart, *rest):
            received, content = op.recvs[index], self.memory.view(op.recvs[index].ref)
            rooms = [((received.peer, self.rank, op.lane), content)] if content.numbers.size else []
            self._awaited[op.arrivals[index]] = [self._room(*room) for room in rooms]

    def _room(self, route: _Route, content: Content) -> tuple[_Route, int, Content]:
        """Room for the next message of a route."""
        self.num_received[route] += 1
        return route, self.num_received[route] - 1, content

    def _post_team(self, op: Post) -> None:
        assert op.team is not None
        leaving, arriving = (
            self.memory.view(ref).each(np.ravel) for ref in (op.team.leaving, op.team.arriving)
        )
        rooms: list[tuple[_Route, int, Content]] = []
        for sizes, whole, leaves in (
            (op.team.sizes[0], leaving, True),
            (op.team.sizes[1], arriving, False),
        ):
            edges = [x // self.world.unit for x in (0, *np.cumsum(sizes).tolist())]
            for peer, (start, stop) in zip(op.team.team.ranks, pairwise(edges), strict=True):
                part = whole.each(lambda x, a=start, b=stop: x[a:b])
                if leaves:
                    self.world.mail[self.rank, peer, _TEAM].append(part.each(np.ndarray.flatten))
                else:
                    rooms.append(self._room((peer, self.rank, _TEAM), part))
        for arrival in op.arrivals:
            self._awaited[arrival] = rooms

    def _wait(self, op: Wait) -> bool:
        """Take in messages; returns False while one of them has not been sent."""
        rooms = [room for arrival in op.arrivals for room in self._awaited[arrival]]
        mail = self.world.mail
        if any(len(mail[route]) <= number for route, number, _ in rooms):
            return False
        for route, number, content in rooms:
            message = mail[route][number]
            if message.numbers.size != content.numbers.size:
                sizes = [x * self.world.unit for x in (message.numbers.size, content.numbers.size)]
                raise ValueError(
                    f"rank {route[0]} sends {sizes[0]} bytes, but {sizes[1]} are awaited"
                )
            content.write(message)
        return True


class _PassRank(_Rank):
    """One rank's code of a pass of attention."""

    def __init__(self, world: _World, code: Code, terms: Terms, kept: Sequence[Content]):
        self.terms, self.payload = terms, terms.payload(code.backward)
        results = [name for side in Side for name, _ in self.payload.results(side)]
        super().__init__(world, code, results, kept)

    def _rows_of(self, name: str) -> RowsOf:
        side = SIDES[name]
        heads = np.arange(self.terms.num_heads(side))
        return RowsOf(self.terms.positions[side][self.rank], heads, self.code.batch)

    def _compute(self, op: Op) -> None:
        match op:
            case ComputeDelta():
                self._delta(op)
            case AttendLeaves():
                self._attend(op)
            case Merge():
                self._merge(op)
            case Finish():
                self._finish(op)
            case Attend(call):
                shape = f"{call.num_q} rows of queries and {call.num_k} of keys"
                self._spoil(op, f"computes {shape}, a shape that depends on the split")
            case SumHeads():
                self._spoil(op, "adds gradients of ranks as floating-point numbers")
            case _:
                super()._compute(op)

    def _delta(self, op: ComputeDelta) -> None:
        named = ("out", op.out), ("dout", op.dout), ("delta", op.product), ("delta", op.delta)
        if not self._fit(named):
            self._spoil(op, "computes delta by numbers of another dtype")
            return
        rows, memory = self._rows_of("delta"), self.memory
        causes = [
            strangers(read_values(memory.view(ref), name), name, rows, self._cause)
            for name, ref in (("out", op.out), ("dout", op.dout))
        ]
        memory.view(op.product).causes[...] = UNWRITTEN
        write_values(memory.view(op.delta), "delta", values("delta", rows), first_cause(*causes))

    def _attend(self, op: AttendLeaves) -> None:
        calls = LeafCalls(self.terms, self.code, self.memory, op)
        reason = calls.why_not()
        if reason is None:
            calls.run(self._cause)
        else:
            self._spoil(op, reason)

    def _fit(self, named: Iterable[tuple[str, Ref]]) -> bool:
        """Return whether tensors have the dtypes that a canonical pass has."""
        return all(self._dtype(ref) == dtype_of(name, self.payload) for name, ref in named)

    def _merge(self, op: Merge) -> None:
        if op.columns is None:
            self._spoil(op, "adds partial results as floating-point numbers, in its own order")
            return
        (source,), (target,) = op.sources, op.targets
        sums = (target,) if op.short else (source, target)
        if not self._fit([("sums", ref) for ref in sums]):
            self._spoil(op, "adds sums as numbers of another dtype")
            return
        if op.short:
            self._check_short(source, target, op.columns)
            content = self._short(source, self.code.shape(target)[2])
            theirs = read_values(content, _as_short(op.columns))
        else:
            theirs = read_values(self.memory.view(source), op.columns)
        if op.rows is not None or len({self.code.shape(ref) for ref in sums}) > 1:
            raise ValueError("sums are added to those of the same rows and heads")
        mine = read_values(self.memory.view(target), op.columns)
        causes, whole = first_cause(mine.causes, theirs.causes), mine.whole & theirs.whole
        if not whole.all():
            new = self._cause(f"adds what are no sums of {formats([op.columns])}")
            causes = first_cause(causes, np.where(whole, 0, new).astype(np.int32))
        write_values(self.memory.view(target), op.columns, mine.values + theirs.values, causes)

    def _finish(self, op: Finish) -> None:
        specs = [self.code.tensors[ref.tensor] for ref in op.targets]
        # A tensor of a result that travels is named after it: q1!.out.
        travels = not any(spec.name in self.results for spec in specs)
        names = [spec.name.rpartition(".")[2] if travels else spec.name for spec in specs]
        side = SIDES.get(names[0], Side.Q)
        expected = [name for name, _ in self.payload.results(side)]
        if names != expected or (not travels and op.home != self.rank):
            self._spoil(op, f"finishes {', '.join(names)}, and not {', '.join(expected)}")
            return
        if not self._fit((("sums", op.sums), *zip(names, op.targets, strict=True))):
            self._spoil(op, "finishes sums as numbers of another dtype")
            return
        if op.columns != self.payload.sums(side):
            self._spoil(op, f"finishes sums of {formats([op.columns])}")
            return
        wanted = self._finished_rows(side, op, travels)
        alike = all(ref[1:] == op.targets[0][1:] for ref in op.targets)
        if not alike or (not self.code.backward and op.first_head != wanted.heads[0]):
            self._spoil(op, f"finishes heads from {op.first_head} on as others")
            return
        sums = self.memory.view(op.sums)
        found = read_values(sums, op.columns)
        whole = self.terms.whole(side, wanted)
        if found.values.shape != whole.shape:
            raise ValueError(f"sums are {found.values.shape}, and not {whole.shape}")
        wrong, causes = (found.values != whole) | ~found.whole, found.causes
        if (wrong & (causes == 0)).any():
            at = [int(x[0]) for x in np.nonzero(wrong & (causes == 0))]
            why = self.terms.difference(side, wanted, at, found.values[tuple(at)])
            new = self._cause(f"finishes sums of which {why}")
            causes = first_cause(causes, np.where(wrong, new, 0).astype(np.int32))
        if self.terms.most_terms(side) > op.columns.most_terms:
            self._spoil(op, f"finishes sums of more than {op.columns.most_terms} terms")
            return
        for ref, name in zip(op.targets, names, strict=True):
            write_values(self.memory.view(ref), name, values(name, wanted), causes)
        sums.causes[...] = self._cause("has finished the sum before it is used again")

    def _finished_rows(self, side: Side, op: Finish, travels: bool) -> RowsOf:
        """The rows and heads that an op says it finishes: of a result that travels, or a part of
        the rank's own.
        """
        target, positions = op.targets[0], self.terms.positions[side][op.home]
        heads = np.arange(self.terms.num_heads(side))
        if travels:
            heads = heads[op.first_head : op.first_head + self.code.shape(op.sums)[2]]
            return RowsOf(positions, heads, self.code.batch)
        if target.rows is not None:
            positions = positions[slice(*target.rows)]
        return RowsOf(
            positions,
            heads if target.heads is None else heads[slice(*target.heads)],
            self.code.batch,
        )


class _MovesRank(_Rank):
    """One rank's code of row moves between two layouts."""

    def __init__(self, world: _World, code: Code, layouts: tuple[Layout, Layout]):
        self._layouts = layouts
        super().__init__(world, code, ["out"])

    def _rows_of(self, name: str) -> RowsOf:
        positions = self._layouts[name == "out"].rows(self.rank)
        return RowsOf(positions, np.arange(1), self.code.batch)

    def _value_name(self, name: str) -> str:
        return "rows"

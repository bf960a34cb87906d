"""Running a code: it is bound to a device and a kernel once, then each pass is one loop over steps.

A step is one op of the code. Its tensors are numbered; those in the workspace are made once, those
of the call at the beginning of each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.autograd import profiler

from tilewise.compiler import code as ops
from tilewise.compiler.code import Code, Home, Ref, TensorSpec
from tilewise.execution.encoding import decode, encode
from tilewise.execution.expansion import Expanded, Expansion
from tilewise.execution.workspace import Workspace, WorkspacePool
from tilewise.kernels.call_cache import CALL_CACHE
from tilewise.kernels.canonical import (
    LeafKernel,
    finish_attention,
    finish_gradients,
    merge_columns,
    merge_short,
    row_sum,
)
from tilewise.kernels.protocol import Kernel, Places, Scores, accumulator_dtype, deliver
from tilewise.plan.ir import Item
from tilewise.transport.protocol import Handle, Message, TeamMessages, Transport, as_bytes
from tilewise.transport.streams import is_capturing

ADOPTING_DEVICES = ("cpu",)
"""Devices on which the first results of a partial stay where the kernel put them."""

Ask: TypeAlias = Callable[[], Sequence[Tensor]]


class Label:
    """The item and step of a message, written out only if an error names it."""

    __slots__ = ("item", "step")

    def __init__(self, step: int, item: Item | str):
        self.step, self.item = step, item

    def __str__(self) -> str:
        return f"step {self.step}, {self.item}"


class Pass:
    """The state of one run of a code, beside its tensors.

    Attributes:
        handles: of exchanges under way, by the number that a wait knows them by.
        ask: computes the partial results of a code that asks for them.
        sink: one a head, [num_heads] or [batch, num_heads], of a canonical forward pass.
        expanded: the keys and values that were made last.
    """

    __slots__ = ("ask", "dlse", "expanded", "expansion", "handles", "scores", "sink", "transport")

    def __init__(
        self,
        transport: Transport,
        scores: Scores,
        *,
        expansion: Expansion | None = None,
        dlse: Tensor | None = None,
        ask: Ask | None = None,
        sink: Tensor | None = None,
    ):
        self.transport, self.scores, self.expansion = transport, scores, expansion
        self.dlse, self.ask, self.sink = dlse, ask, sink
        self.handles: list[Handle] = []
        self.expanded: Expanded | None = None


Step: TypeAlias = Callable[[list[Any], Pass], object]
"""One op, bound: (tensors by number, the pass)."""


class BoundCode:
    """A code bound to a device, a kernel and what the kernel does to scores.

    Args:
        kernel: None: of a code that attends nothing.
        pool: of workspaces, which codes share that never run at the same time.
    """

    def __init__(
        self,
        code: Code,
        device: torch.device,
        kernel: Kernel | None,
        scores: Scores,
        pool: WorkspacePool,
    ):
        self.code, self._device, self._pool = code, device, pool
        self._run_kernel: Callable[..., tuple[Tensor, ...]] = (
            _no_kernel if kernel is None else kernel.backward if code.backward else kernel.forward
        )
        self._kernel = kernel
        self._scale = scores.scale
        self._scores = scores if scores.needs else None
        self._adopts = device.type in ADOPTING_DEVICES
        self._numbers: dict[Ref, int] = {}
        self._derived: dict[int, list[tuple[int, Ref]]] = {}  # by tensor, other parts of it
        self._as_bytes: dict[int, int] = {}
        self._groups: dict[int, int] = {}  # arrivals by their exchange
        self._num_exchanges = 0
        self._awaited: set[int] = set()  # exchanges
        self._canonical = any(isinstance(op, ops.Finish) for op in code.ops)
        self._made = {*self._tensors_that_ops_make()}
        self._steps = [self._bound(op) for op in code.ops]
        self._busy_steps = [step for step in self._steps if step is not _no_step]
        self._given_names: list[tuple[int, str]] = []
        self._prologue = self._given_parts()

    def run(self, given: Mapping[str, Tensor], work: Pass) -> list[Tensor]:
        """Run the code; returns when all that was sent has left.

        Args:
            given: the call's tensors [rows, batch, heads(, width)] by name, to read and to write,
                and under kept0, kept1, ... what a forward pass kept.
        Returns:
            The buffers that the pass keeps.
        """
        code, device = self.code, self._device
        capturing = is_capturing(device)
        if capturing:
            CALL_CACHE.keep_if_capturing(device, self)  # its tables
        workspace = Workspace() if capturing else self._pool.take()
        bound = workspace.enter(self, code.num_bytes, device, self._bind)
        tensors: list[Any] = bound.copy()
        kept = [
            torch.empty(code.buffers[one.buffer].num_bytes, dtype=torch.uint8, device=device)
            for one in code.kept
        ]
        for name in code.contiguous:
            if not given[name].is_contiguous():
                given = {**given, name: given[name].contiguous()}
        for number, name in self._given_names:
            tensors[number] = given[name]
        for number, make in self._prologue:
            tensors[number] = make(given, kept, tensors)
        work.handles = [_NOTHING] * self._num_exchanges
        if profiler._is_profiler_enabled:
            self._run_recorded(tensors, work)
        else:
            for step in self._busy_steps:
                step(tensors, work)
        work.transport.finish()
        workspace.leave()
        if not capturing:
            self._pool.give_back(workspace)
        return kept

    def _run_recorded(self, tensors: list[Any], work: Pass) -> None:
        """Run all steps; while an operation runs, a profiler sees a range of its label."""
        steps = iter(self._steps)
        for label, num_ops in self.code.lines:
            with profiler.record_function(label):
                for _ in range(num_ops):
                    next(steps)(tensors, work)

    # Numbers of tensors

    def _tensors_that_ops_make(self) -> Iterator[int]:
        """Tensors that are not in the workspace, but are what an op has made last."""
        for op in self.code.ops:
            if isinstance(op, ops.Attend) and self._adopts:
                written = (result for result in op.results if not result.adds)
                yield from (ref.tensor for result in written for ref in result.refs)
            elif isinstance(op, ops.Expand | ops.Pull | ops.Ask):
                yield from (ref.tensor for ref in op.writes)

    def _number(self, ref: Ref) -> int:
        """The place of a tensor among those of a pass."""
        number = self._numbers.get(ref)
        if number is None:
            number = self._numbers[ref] = len(self._numbers) + len(self._as_bytes)
            whole = Ref(ref.tensor)
            if ref.tensor in self._made and ref != whole:
                self._derived.setdefault(self._number(whole), []).append((number, ref))
        return number

    def _bytes_number(self, ref: Ref) -> int:
        """Return the number of a tensor that is sent: a tensor of the call is seen as bytes."""
        number = self._number(ref)
        if self.code.tensors[ref.tensor].dtype == "uint8":
            return number
        if number not in self._as_bytes:
            self._as_bytes[number] = len(self._numbers) + len(self._as_bytes)
        return self._as_bytes[number]

    def _bind(self, workspace: Tensor) -> list[Any]:
        """All tensors that lie in a workspace; None for others."""
        found: list[Any] = [None] * (len(self._numbers) + len(self._as_bytes))
        wholes: dict[int, Tensor] = {}
        for ref, number in self._numbers.items():
            spec = self.code.tensors[ref.tensor]
            home = self.code.buffers[spec.buffer].home
            if home is not Home.WORKSPACE or ref.tensor in self._made:
                continue
            if ref.tensor not in wholes:
                wholes[ref.tensor] = _placed(workspace, self.code.offsets[spec.buffer], spec)
            found[number] = part_of(wholes[ref.tensor], ref)
        return found

    def _given_parts(self) -> list[tuple[int, Make]]:
        """Return how tensors of a call, and those that are kept, are made at the beginning of a
        pass, but for those that are taken as they are given: they are named.
        """
        code, parts = self.code, []
        kept = {one.buffer: place for place, one in enumerate(code.kept)}
        wholes: dict[int, int] = {}  # of tensors of which parts are read, by tensor
        for ref in [*self._numbers]:
            if code.home(ref) in (Home.GIVEN, Home.SAVED, Home.KEPT):
                whole = Ref(ref.tensor)
                wholes.setdefault(ref.tensor, self._number(whole))
        for tensor, number in wholes.items():
            spec = code.tensors[tensor]
            buffer = code.buffers[spec.buffer]
            if buffer.home is Home.GIVEN:
                self._given_names.append((number, buffer.name))
            elif buffer.home is Home.SAVED:
                parts.append((number, _saved(buffer.name, spec)))
            else:
                parts.append((number, _kept(kept[spec.buffer], spec)))
        for ref, number in self._numbers.items():
            whole = wholes.get(ref.tensor, number)
            if whole != number:
                parts.append((number, _part_of_number(whole, ref)))
            if number in self._as_bytes:
                parts.append((self._as_bytes[number], _as_bytes_of_number(number)))
        return parts

    # Steps

    def _bound(self, op: ops.Op) -> Step:
        match op:
            case ops.Copy():
                return self._copy(op)
            case ops.Attend():
                return self._attend(op)
            case ops.AttendLeaves():
                return self._attend_leaves(op)
            case ops.Finish():
                return self._finish(op)
            case ops.Merge():
                return self._merge(op)
            case ops.Post():
                return self._post(op)
            case ops.Wait():
                return self._wait(op)
            case ops.Fill(target, value):
                number = self._number(target)
                return lambda t, _: t[number].fill_(value)
            case ops.ComputeDelta():
                return self._delta(op)
            case ops.Encode(source, target, field, counter):
                a, b = self._number(source), self._number(target)
                return lambda t, _: t[b].copy_(encode(field, t[a], counter))
            case ops.Decode(source, target, field):
                a, b = self._number(source), self._number(target)
                return lambda t, _: decode(field, t[a], t[b])
            case ops.Expand():
                return self._expand(op)
            case ops.Pull(dk, dv, dlatents):
                return self._pull(*map(self._number, (dk, dv, dlatents)))
            case ops.SumHeads():
                return self._sum_heads(op)
            case ops.Ask(targets):
                return self._ask([*map(self._number, targets)])

    def _table(self, table: ops.Table | None) -> Tensor | None:
        if table is None:
            return None
        return torch.from_numpy(table.numbers.copy()).to(self._device)

    def _copy(self, op: ops.Copy) -> Step:
        a, b = self._number(op.source), self._number(op.target)
        rows, heads = self._table(op.rows), self._table(op.heads)
        shape, source = self.code.shape(op.target), self.code.shape(op.source)
        if rows is not None:
            if op.scatters:
                return lambda t, _: t[b].index_copy_(0, rows, t[a])
            return lambda t, _: torch.index_select(t[a], 0, rows, out=t[b])
        if heads is not None:
            return lambda t, _: t[b].copy_(t[a].index_select(2, heads).view(shape))
        if len(shape) > len(source):
            return lambda t, _: t[b].copy_(t[a].view(shape))
        if len(shape) < len(source):
            return lambda t, _: t[b].view(source).copy_(t[a])
        return lambda t, _: t[b].copy_(t[a])

    def _delta(self, op: ops.ComputeDelta) -> Step:
        parts = op.out, op.dout, op.product, op.delta
        out, dout, product, delta = map(self._number, parts)
        widens = len({self.code.tensors[x.tensor].dtype for x in parts[:3]}) > 1

        canonical = self._canonical

        def step(t: list[Any], work: Pass) -> None:
            if widens:
                t[product].copy_(t[out]).mul_(t[dout])
            else:
                torch.mul(t[out], t[dout], out=t[product])
            if canonical:
                t[delta].copy_(row_sum(t[product]))
            else:
                torch.sum(t[product], -1, out=t[delta])
            if work.dlse is not None:
                t[delta].sub_(work.dlse)

        return step

    def _attend(self, op: ops.Attend) -> Step:
        results = [(result, [*map(self._number, result.refs)]) for result in op.results]
        operands, call, scale = [*map(self._number, op.operands)], op.call, self._scale
        run, extra = self._run_kernel, self._extra_arguments(op)
        into = [number for _, numbers in results for number in numbers]
        written = [number for result, numbers in results if not result.adds for number in numbers]
        if not written:

            def add(t: list[Any], work: Pass) -> None:
                kernel_into = tuple([t[i] for i in into])
                run(*[t[i] for i in operands], call, scale, kernel_into, *extra(work))

            return add
        if self._adopts:
            return self._adopting(op, results, operands)
        blanks = self._blanks(len(written)) if not self.code.backward else [0.0] * len(written)

        def fill_and_add(t: list[Any], work: Pass) -> None:
            for number, value in zip(written, blanks, strict=True):
                t[number].fill_(value)
            kernel_into = tuple([t[i] for i in into])
            run(*[t[i] for i in operands], call, scale, kernel_into, *extra(work))

        return fill_and_add

    def _blanks(self, count: int) -> list[float]:
        """Return the values of out, of lse and of the largest scores of a partial that nothing was
        added to.
        """
        return [0.0, *[-torch.inf] * (count - 1)]

    def _adopting(
        self, op: ops.Attend, results: list[tuple[ops.Result, list[int]]], operands: list[int]
    ) -> Step:
        """The kernel's own tensors become results that are written; to others they are added."""
        run, extra, call, scale = self._run_kernel, self._extra_arguments(op), op.call, self._scale
        adds = [(number, result.adds) for result, numbers in results for number in numbers]
        dtypes = [
            getattr(torch, self.code.tensors[ref.tensor].dtype)
            for result, _ in results
            for ref in result.refs
        ]
        put = self._putting()

        def step(t: list[Any], work: Pass) -> None:
            found = run(*[t[i] for i in operands], call, scale, None, *extra(work))
            for (number, added), x, dtype in zip(adds, found, dtypes, strict=True):
                if added:
                    t[number].add_(x)
                    continue
                put(t, number, x if x.dtype is dtype else x.to(dtype))

        return step

    def _putting(self) -> Callable[[list[Any], int, Tensor], None]:
        """Writes a tensor that an op has made, and its parts that others read."""
        derived = self._derived

        def put(t: list[Any], number: int, x: Tensor) -> None:
            t[number] = x
            for part, ref in derived.get(number, ()):
                t[part] = part_of(x, ref)

        return put

    def _extra_arguments(self, op: ops.Attend) -> Callable[[Pass], tuple[()] | tuple[Scores]]:
        """Return the further arguments of a kernel, for calls that ask for more than a scale."""
        scores = self._scores
        if scores is None:
            return _no_arguments
        if op.places is None:
            return lambda _: (scores,)
        q, k, first, _ = op.places
        places = Places(self._positions(q), self._positions(k), first)
        # dropout's seed and a dense bias are others at every pass
        return lambda work: (work.scores._replace(places=places),)

    def _positions(self, table: ops.Table) -> Tensor:
        found = self._table(table)
        assert found is not None
        return found

    def _attend_leaves(self, op: ops.AttendLeaves) -> Step:
        assert self._kernel is not None
        leaves = LeafKernel(self._kernel)
        run = leaves.backward if self.code.backward else leaves.forward
        operands, sums = ([*map(self._number, refs)] for refs in (op.operands, op.sums))
        call, first, columns = op.call, op.first_head, op.columns

        def step(t: list[Any], work: Pass) -> None:
            into = tuple([t[i] for i in sums])
            run(tuple([t[i] for i in operands]), call, work.scores, first, into, columns)

        return step

    def _finish(self, op: ops.Finish) -> Step:
        sums, targets = self._number(op.sums), [*map(self._number, op.targets)]
        columns, first, backward = op.columns, op.first_head, self.code.backward
        num_heads = self.code.shape(op.sums)[2]

        def step(t: list[Any], work: Pass) -> None:
            into = tuple([t[i] for i in targets])
            if backward:
                finish_gradients(t[sums], columns, into)
                return
            sink = work.sink
            sink = None if sink is None else sink[..., first : first + num_heads]
            finish_attention(t[sums], columns, into, sink)

        return step

    def _merge(self, op: ops.Merge) -> Step:
        columns = op.columns
        if columns is not None:
            into, other = self._number(op.targets[0]), self._number(op.sources[0])
            merge = merge_short if op.short else merge_columns
            return lambda t, _: merge(t[into], t[other], columns)
        sources, targets = [*map(self._number, op.sources)], [*map(self._number, op.targets)]
        rows, scratch = self._table(op.rows), [*map(self._number, op.scratch)]
        pairs = [*zip(sources, targets, strict=True)]
        if not op.by_lse:
            if rows is None:

                def add(t: list[Any], _: Pass) -> None:
                    for source, target in pairs:
                        t[target].add_(t[source])

                return add

            def add_rows(t: list[Any], _: Pass) -> None:
                for source, target in pairs:
                    total = t[target]
                    total.index_add_(0, rows, t[source].to(total.dtype))

            return add_rows
        if rows is None:
            return lambda t, _: deliver(
                tuple([t[i] for i in sources]), tuple([t[i] for i in targets])
            )

        def merge_rows(t: list[Any], _: Pass) -> None:
            mine = tuple([t[i] for i in scratch])
            for target, x in zip(targets, mine, strict=True):
                torch.index_select(t[target], 0, rows, out=x)
            deliver(tuple([t[i] for i in sources]), mine)
            for target, x in zip(targets, mine, strict=True):
                t[target].index_copy_(0, rows, x)

        return merge_rows

    def _expand(self, op: ops.Expand) -> Step:
        latents, k, v = map(self._number, (op.latents, op.k, op.v))
        positions, heads = self._positions(op.places.k_positions), slice(*op.places.kv_heads)
        put = self._putting()

        def step(t: list[Any], work: Pass) -> None:
            assert work.expansion is not None
            made = work.expansion.expand(op.key, t[latents], positions, heads, op.learns)
            work.expanded = made
            put(t, k, made.k)
            put(t, v, made.v)

        return step

    def _pull(self, dk: int, dv: int, dlatents: int) -> Step:
        put = self._putting()

        def step(t: list[Any], work: Pass) -> None:
            assert work.expansion is not None and work.expanded is not None
            put(t, dlatents, work.expansion.pull(work.expanded, t[dk], t[dv]))

        return step

    def _ask(self, targets: list[int]) -> Step:
        put = self._putting()

        def step(t: list[Any], work: Pass) -> None:
            assert work.ask is not None
            for number, x in zip(targets, work.ask(), strict=True):
                put(t, number, x)

        return step

    def _sum_heads(self, op: ops.SumHeads) -> Step:
        source, target = self._number(op.source), self._number(op.target)
        num_heads = self.code.shape(op.target)[2]

        def step(t: list[Any], _: Pass) -> None:
            x = t[source].unflatten(2, (num_heads, -1))
            x = x.sum(3, dtype=accumulator_dtype(x.dtype))
            t[target].view(x.shape).copy_(x)

        return step

    # Messages

    def _post(self, op: ops.Post) -> Step:
        if op.team is not None:
            return self._post_team(op, op.team)
        sends, lane = self._messages(op.sends), op.lane
        apart, left = [], {*range(len(op.recvs))}
        for indices in op.apart:
            left -= {*indices}
            mine = self._messages([op.recvs[index] for index in indices])
            apart.append((self._exchange([op.arrivals[index] for index in indices]), mine))
        together = self._messages([op.recvs[index] for index in sorted(left)])
        own = self._exchange([op.arrivals[index] for index in sorted(left)])

        def step(t: list[Any], work: Pass) -> None:
            exchange, handles = work.transport.exchange, work.handles
            for place, recvs in apart:
                mine = [Message(t[number], peer, label) for number, peer, label in recvs]
                handles[place] = exchange((), mine, lane)
            if sends or together:
                handles[own] = exchange(
                    [Message(t[number], peer, label) for number, peer, label in sends],
                    [Message(t[number], peer, label) for number, peer, label in together],
                    lane,
                )

        return step

    def _post_team(self, op: ops.Post, team: ops.TeamBytes) -> Step:
        leaving, arriving = self._number(team.leaving), self._number(team.arriving)
        rest = team.sizes, team.team.ranks, team.label, team.most_bytes
        place = self._exchange(op.arrivals)

        def step(t: list[Any], work: Pass) -> None:
            messages = TeamMessages(t[leaving], t[arriving], *rest)
            work.handles[place] = work.transport.exchange_all(messages)  # pyright: ignore

        return step

    def _exchange(self, arrivals: Sequence[int]) -> int:
        """The place of an exchange's handle, by which its arrivals are awaited."""
        self._groups.update(dict.fromkeys(arrivals, self._num_exchanges))
        self._num_exchanges += 1
        return self._num_exchanges - 1

    def _messages(self, parts: Sequence[ops.Bytes]) -> list[tuple[int, int, Label]]:
        return [(self._bytes_number(one.ref), one.peer, Label(one.step, one.item)) for one in parts]

    def _wait(self, op: ops.Wait) -> Step:
        # An exchange is waited for as a whole: by the first of its arrivals that is.
        places = [*dict.fromkeys(self._groups[arrival] for arrival in op.arrivals)]
        places = [place for place in places if place not in self._awaited]
        self._awaited.update(places)
        if not places:
            return _no_step
        if len(places) == 1:
            (place,) = places
            return lambda _, work: work.handles[place].wait()

        def step(_: list[Any], work: Pass) -> None:
            for place in places:
                work.handles[place].wait()

        return step


class _Nothing:
    def wait(self) -> None:
        return


_NOTHING = _Nothing()


def _no_kernel(*_: Any) -> NoReturn:
    raise AssertionError("a code without a kernel attends nothing")


def _no_step(_: list[Any], __: Pass) -> None:
    return


def _no_arguments(_: Pass) -> tuple[()]:
    return ()


def part_of(x: Tensor, ref: Ref) -> Tensor:
    """The rows and heads of a tensor."""
    if ref.rows is not None:
        start, stop, step = ref.rows
        x = x[start:stop:step]
    return x if ref.heads is None else x[:, :, slice(*ref.heads)]


def _placed(memory: Tensor, offset: int, spec: TensorSpec) -> Tensor:
    """A tensor in bytes whose first is a multiple of what its numbers need."""
    dtype = getattr(torch, spec.dtype)
    rest = memory.numel() % dtype.itemsize
    numbers = (memory[:-rest] if rest else memory).view(dtype)
    first = numbers.storage_offset() + (offset + spec.start) // dtype.itemsize
    return numbers.as_strided(spec.shape, spec.strides, first)


Make: TypeAlias = Callable[[Mapping[str, Tensor], Sequence[Tensor], Sequence[Tensor]], Tensor]
"""Makes a tensor of (the call's by name, what is kept, those that were made before)."""


def _saved(name: str, spec: TensorSpec) -> Make:
    return lambda given, _, __: _placed(given[name], 0, spec)


def _kept(place: int, spec: TensorSpec) -> Make:
    return lambda _, kept, __: _placed(kept[place], 0, spec)


def _part_of_number(number: int, ref: Ref) -> Make:
    return lambda _, __, made: part_of(made[number], ref)


def _as_bytes_of_number(number: int) -> Make:
    return lambda _, __, made: as_bytes(made[number])

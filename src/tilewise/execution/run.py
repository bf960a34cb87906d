"""Running a code: it is bound to a device and a kernel once, then each pass is one loop over steps.

A step is one op of the code. Its tensors are numbered; those in the workspace are made once, those
of the call at the beginning of each pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.autograd import profiler

from tilewise.compiler import ops
from tilewise.compiler.code import Code, Home, Ref, Refs, TensorSpec
from tilewise.execution.encoding import decode, encode
from tilewise.execution.expansion import Expanded, Expansion
from tilewise.execution.workspace import Numbered, Workspace, WorkspacePool
from tilewise.kernels.call_cache import CALL_CACHE
from tilewise.kernels.merge import add_up, combine
from tilewise.kernels.protocol import (
    Kernel,
    Places,
    Scores,
    accumulator_dtype,
    deliver,
    loadable,
)
from tilewise.plan.ir import Item
from tilewise.transport.protocol import Handle, Message, TeamMessages, Transport, as_bytes
from tilewise.transport.streams import is_capturing

ROWS = re.compile(r"\[[^\]]*\]")
"""Rows of an item in a label, as in kv0[0:16]."""
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
        expanded: the keys and values that were made last.
        mark: notes the time before the first operation, after each, and after the last send has
            left; None: nobody records this pass.
    """

    __slots__ = ("ask", "dlse", "expanded", "expansion", "handles", "mark", "scores", "transport")

    def __init__(
        self,
        transport: Transport,
        scores: Scores,
        *,
        expansion: Expansion | None = None,
        dlse: Tensor | None = None,
        ask: Ask | None = None,
    ):
        self.transport, self.scores, self.expansion = transport, scores, expansion
        self.dlse, self.ask = dlse, ask
        self.handles: list[Handle] = []
        self.expanded: Expanded | None = None
        self.mark: Callable[[], object] | None = None


Step: TypeAlias = Callable[[Numbered, Pass], object]
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
        self._kernel = kernel
        self._scale = scores.scale
        self._scores = scores if scores.needs else None
        self._adopts = device.type in ADOPTING_DEVICES
        self._numbers: dict[_Part, int] = {}
        self._derived: dict[int, list[tuple[int, _Part]]] = {}  # by tensor, other parts of it
        self._as_bytes: dict[int, int] = {}
        self._teams: list[_TeamNumbers] = []
        self._given_teams: list[_TeamNumbers] = []  # of which not all is in the workspace
        self._num_tensors = 0
        self._groups: dict[int, int] = {}  # arrivals by their exchange
        self._num_exchanges = 0
        self._awaited: set[int] = set()  # exchanges
        self._made = {*self._tensors_that_ops_make()}
        self._steps = self._bound_ops()
        self._busy_steps = [step for step in self._steps if step is not _no_step]
        self._aligned = self._names_read_by_kernels()
        self._kept = [
            (f"kept{place}", code.buffers[one.buffer].num_bytes)
            for place, one in enumerate(code.kept)
        ]
        self._given, self._stored, self._parts = self._find_given()

    def run(self, given: Mapping[str, Tensor], work: Pass) -> list[Tensor]:
        """Run the code; returns when all that was sent has left.

        Args:
            given: the call's tensors [rows, batch, heads(, width)] by name, to read and to write;
                dimensions of size 1 may be missing. Under kept0, kept1, ... what a forward pass
                kept.
        Returns:
            The buffers that the pass keeps.
        """
        code, device = self.code, self._device
        capturing = is_capturing(device)
        if capturing:
            CALL_CACHE.keep_if_capturing(device, self)  # its tables
        workspace = Workspace() if capturing else self._pool.take()
        bound = workspace.enter(self, code.num_bytes, device, self._bind)
        tensors = bound.copy()
        kept = {
            name: torch.empty(num_bytes, dtype=torch.uint8, device=device)
            for name, num_bytes in self._kept
        }
        self._take(tensors, {**given, **kept})
        work.handles = [_NOTHING] * self._num_exchanges
        if work.mark is not None or profiler._is_profiler_enabled:
            self._run_watched(tensors, work)
        else:
            for step in self._busy_steps:
                step(tensors, work)
            work.transport.finish()
        workspace.leave()
        if not capturing:
            self._pool.give_back(workspace)
        return [*kept.values()]

    def _take(self, tensors: Numbered, given: dict[str, Tensor]) -> None:
        """Set the tensors of a pass that lie in tensors of the caller, or in memory kept from
        forward.

        Args:
            tensors: by number; it is filled.
            given: the caller's tensors and kept memory, by name.
        """
        for name in self._aligned:
            given[name] = loadable(given[name])
        for name in self.code.contiguous:
            given[name] = given[name].contiguous()
        numbers, names, shapes = self._given
        views = map(Tensor.view, map(given.__getitem__, names), shapes)
        tensors.update(zip(numbers, views, strict=True))
        for name, dtype, numbers, shapes, strides, starts in self._stored:
            memory = _numbers_in(given[name], dtype)
            starts = map(memory.storage_offset().__add__, starts)
            views = map(memory.as_strided, shapes, strides, starts)
            tensors.update(zip(numbers, views, strict=True))
        for number, whole, part in self._parts:
            tensors[number] = part_of(tensors[whole], *part)
        for number, bytes_number in self._as_bytes.items():
            tensors[bytes_number] = as_bytes(tensors[number])
        for number, leaving, arriving, rest in self._given_teams:
            tensors[number] = TeamMessages(tensors[leaving], tensors[arriving], *rest)

    def _run_watched(self, tensors: Numbered, work: Pass) -> None:
        """Run all steps, each in a range that a profiler sees, and mark their times.

        A range's name is tilewise, the pass, and the operation's label without its rows, as in
        "tilewise::fwd compute q0 x kv1": ranges of one name can be summed over steps and layers.
        The whole label is the range's argument.
        """
        prefix = f"tilewise::{'bwd' if self.code.backward else 'fwd'}"
        mark = work.mark or _no_mark
        mark()
        for op, step in zip(self.code.ops, self._steps, strict=True):
            name = f"{prefix} {ROWS.sub('', op.label)}"
            with profiler.record_function(name, op.label):
                step(tensors, work)
            mark()
        work.transport.finish()
        mark()

    # Numbers of tensors

    def _tensors_that_ops_make(self) -> Iterator[int]:
        """Yield the tensors (by index in the code) that an op allocates, outside the workspace."""
        for op in self.code.ops:
            if isinstance(op, ops.Attend) and op.wholes is None:
                yield from (ref.tensor for refs in op.written for ref in refs if self._keeps(ref))
            elif isinstance(op, ops.Expand | ops.Pull | ops.Ask):
                yield from (ref.tensor for refs in ops.writes(op) for ref in refs)

    def _number(self, ref: Ref, shape: tuple[int, ...] | None = None) -> int:
        """Return the number under which a pass holds a tensor, or rows and heads of it.

        Args:
            shape: the shape in which an op sees it; None: its own.
        """
        part = ref, shape
        number = self._numbers.get(part)
        if number is None:
            number = self._numbers[part] = self._new_number()
            if ref.tensor in self._made and part != (_whole(ref), None):
                self._derived.setdefault(self._number(_whole(ref)), []).append((number, part))
        return number

    def _new_number(self) -> int:
        self._num_tensors += 1
        return self._num_tensors - 1

    def _bytes_number(self, ref: Ref) -> int:
        """Return the number of a tensor that is sent: a tensor of the call is seen as bytes."""
        number = self._number(ref)
        if self.code.tensors[ref.tensor].dtype == "uint8":
            return number
        if number not in self._as_bytes:
            self._as_bytes[number] = self._new_number()
        return self._as_bytes[number]

    def _bind(self, workspace: Tensor) -> Numbered:
        """Tensors that lie in a workspace, and what teams exchange of them."""
        found: Numbered = {}
        wholes: dict[int, Tensor] = {}
        for part, number in self._numbers.items():
            tensor = part[0].tensor
            spec = self.code.tensors[tensor]
            home = self.code.buffers[spec.buffer].home
            if home is not Home.WORKSPACE or tensor in self._made:
                continue
            if tensor not in wholes:
                wholes[tensor] = _placed(workspace, self.code.offsets[spec.buffer], spec)
            found[number] = part_of(wholes[tensor], *part)
        for number, leaving, arriving, rest in self._teams:
            found[number] = TeamMessages(found[leaving], found[arriving], *rest)
        return found

    def _names_read_by_kernels(self) -> list[str]:
        """Names of the call's tensors that kernels read.

        They are made contiguous and aligned before a pass.
        """
        names: dict[str, None] = {}
        written = {x.tensor for op in self.code.ops for refs in ops.writes(op) for x in refs}
        for op in self.code.ops:
            if not isinstance(op, ops.Copy | ops.ComputeDelta | ops.Post):
                for ref in (ref for refs in ops.reads(op) for ref in refs):
                    if self.code.home(ref) is Home.GIVEN and ref.tensor not in written:
                        names[self.code.buffers[self.code.tensors[ref.tensor].buffer].name] = None
        return [*names]

    def _find_given(self) -> tuple[_Given, list[_Stored], list[tuple[int, int, _Part]]]:
        """Find how tensors of a call, and those that are kept, are made at the beginning of a pass:
        as they are given, or in memory that is given, or as parts of others.
        """
        code, homes = self.code, (Home.GIVEN, Home.SAVED, Home.KEPT)
        names = {one.buffer: name for one, (name, _) in zip(code.kept, self._kept, strict=True)}
        given, parts = _Given([], [], []), list[tuple[int, int, _Part]]()
        stored: dict[tuple[str, torch.dtype], _Stored] = {}
        for ref, _ in [*self._numbers]:
            if code.home(ref) in homes and (code.home(ref) is not Home.GIVEN or ref != _whole(ref)):
                self._number(_whole(ref))  # of which they are parts
        for (ref, shape), number in self._numbers.items():
            spec = code.tensors[ref.tensor]
            buffer, is_whole = code.buffers[spec.buffer], ref == _whole(ref)
            if buffer.home not in homes:
                continue
            if is_whole and buffer.home is Home.GIVEN:
                given.add(number, buffer.name, shape or spec.shape)
            elif is_whole and shape is None:
                name, dtype = names.get(spec.buffer, buffer.name), getattr(torch, spec.dtype)
                placed = stored.setdefault((name, dtype), _Stored(name, dtype, [], [], [], []))
                placed.add(number, spec)
            else:
                parts.append((number, self._numbers[_whole(ref), None], (ref, shape)))
        return given, [*stored.values()], parts

    # Steps

    def _bound_ops(self) -> list[Step]:
        """The steps of all ops; the last that reads what an op has made lets it go."""
        steps: list[Step] = []
        last_reads = self.code.last_reads()
        for place, op in enumerate(self.code.ops):
            step, ended = self._bound(op), last_reads.get(place)
            steps.append(step if ended is None else self._releasing(step, ended))
        return steps

    def _releasing(self, step: Step, tensors: Sequence[int]) -> Step:
        """Return a step that runs `step` and then drops tensors, and the parts of them."""
        wholes = [self._number(Ref(tensor)) for tensor in tensors]
        parts = [number for whole in wholes for number, _ in self._derived.get(whole, ())]
        numbers = [*wholes, *parts]

        def release(t: Numbered, work: Pass) -> None:
            step(t, work)
            for number in numbers:
                t.pop(number, None)

        return release

    def _keeps(self, ref: Ref) -> bool:
        """Return whether a kernel's own result tensor is used as it is, not copied to the
        workspace.
        """
        return self._adopts or self.code.home(ref) is Home.MADE

    def _bound(self, op: ops.Op[Refs]) -> Step:
        match op:
            case ops.Copy():
                return self._copy(op)
            case ops.Attend():
                return self._attend(op)
            case ops.Merge():
                return self._merge(op)
            case ops.Combine():
                return self._combine(op)
            case ops.Post():
                return self._post(op)
            case ops.Wait():
                return self._wait(op)
            case ops.Fill():
                return self._fill(op)
            case ops.ComputeDelta():
                return self._delta(op)
            case ops.Encode():
                return self._encode(op)
            case ops.Decode():
                return self._decode(op)
            case ops.Expand():
                return self._expand(op)
            case ops.Pull():
                return self._pull(op)
            case ops.SumHeads():
                return self._sum_heads(op)
            case ops.Ask():
                return self._ask(op)

    def _all(self, refs: Refs) -> list[int]:
        """The numbers of an operand's tensors."""
        return [*map(self._number, refs)]

    def _fill(self, op: ops.Fill[Refs]) -> Step:
        targets = [*zip(self._all(op.target), op.values, strict=True)]

        def step(t: Numbered, _: Pass) -> None:
            for number, value in targets:
                t[number].fill_(value)

        return step

    def _encode(self, op: ops.Encode[Refs]) -> Step:
        triples = [*zip(self._all(op.source), self._all(op.target), op.fields, strict=True)]
        counter = op.counter

        def step(t: Numbered, _: Pass) -> None:
            for a, b, field in triples:
                t[b].copy_(encode(field, t[a], counter))

        return step

    def _decode(self, op: ops.Decode[Refs]) -> Step:
        triples = [*zip(self._all(op.source), self._all(op.target), op.fields, strict=True)]

        def step(t: Numbered, _: Pass) -> None:
            for a, b, field in triples:
                decode(field, t[a], t[b])

        return step

    def _table(self, table: ops.Table | None) -> Tensor | None:
        if table is None:
            return None
        return torch.from_numpy(table.numbers.copy()).to(self._device)

    def _copy(self, op: ops.Copy[Refs]) -> Step:
        rows, heads = self._table(op.rows), self._table(op.heads)
        if rows is None and heads is None:
            return self._copy_plainly(op)
        pairs = [*zip(self._all(op.source), self._all(op.target), strict=True)]
        shapes = [self.code.shape(ref) for ref in op.target]

        def copy_heads(t: Numbered, _: Pass) -> None:
            for (a, b), shape in zip(pairs, shapes, strict=True):
                t[b].copy_(t[a].index_select(2, heads).view(shape))  # pyright: ignore

        def scatter(t: Numbered, _: Pass) -> None:
            for a, b in pairs:
                t[b].index_copy_(0, rows, t[a])  # pyright: ignore

        def select_made(t: Numbered, _: Pass) -> None:  # a kernel's own, of any dtype
            for a, b in pairs:
                t[b].copy_(t[a].index_select(0, rows))  # pyright: ignore

        def select(t: Numbered, _: Pass) -> None:
            for a, b in pairs:
                torch.index_select(t[a], 0, rows, out=t[b])  # pyright: ignore

        if rows is None or op.scatters:
            return copy_heads if rows is None else scatter
        return select_made if op.source[0].tensor in self._made else select

    def _copy_plainly(self, op: ops.Copy[Refs]) -> Step:
        """A copy of all rows and heads; either end may have the same numbers in another shape."""
        pairs: list[tuple[int, int]] = []
        for source, target in zip(op.source, op.target, strict=True):
            shape, own = self.code.shape(target), self.code.shape(source)
            a = self._number(source, shape if len(shape) > len(own) else None)
            pairs.append((self._number(target, own if len(own) > len(shape) else None), a))

        def step(t: Numbered, _: Pass) -> None:
            for b, a in pairs:
                t[b].copy_(t[a])

        return step

    def _delta(self, op: ops.ComputeDelta[Refs]) -> Step:
        parts = *op.out, *op.dout, *op.product, *op.delta
        out, dout, product, delta = map(self._number, parts)
        widens = len({self.code.tensors[x.tensor].dtype for x in parts[:3]}) > 1
        row_sum: Callable[[Tensor, Tensor], object] = getattr(self._kernel, "row_sum", _row_sum)

        def step(t: Numbered, work: Pass) -> None:
            if widens:
                t[product].copy_(t[out]).mul_(t[dout])
            else:
                torch.mul(t[out], t[dout], out=t[product])
            row_sum(t[product], t[delta])
            if work.dlse is not None:
                t[delta].sub_(work.dlse.view_as(t[delta]))

        return step

    def _attend(self, op: ops.Attend[Refs]) -> Step:
        if op.wholes is not None:
            return self._attend_lists(op, op.wholes)
        results = [(self._all(refs), adds) for refs, adds in op.results()]
        operands = [number for refs in op.operands for number in self._all(refs)]
        operands_of, call, scale = itemgetter(*operands), op.call, self._scale
        run, extra = self._kernel_pass(op), self._extra_arguments(op)
        into = [number for numbers, _ in results for number in numbers]
        written = [number for numbers, adds in results if not adds for number in numbers]
        if not written:

            def add(t: Numbered, work: Pass) -> None:
                kernel_into = tuple([t[i] for i in into])
                run(*operands_of(t), call, scale, kernel_into, *extra(work))

            return add
        if all(self._keeps(ref) for refs in op.written for ref in refs):
            return self._adopting(op, results, operands_of)
        blanks = self._blanks(len(written)) if not self.code.backward else [0.0] * len(written)

        def fill_and_add(t: Numbered, work: Pass) -> None:
            for number, value in zip(written, blanks, strict=True):
                t[number].fill_(value)
            kernel_into = tuple([t[i] for i in into])
            run(*operands_of(t), call, scale, kernel_into, *extra(work))

        return fill_and_add

    def _attend_lists(self, op: ops.Attend[Refs], wholes: ops.Wholes[Refs]) -> Step:
        """A call that says itself which rows it reads, and of which it writes or adds results."""
        kernel: Any = self._kernel
        run = kernel.backward if self.code.backward else kernel.forward
        operands = [number for refs in wholes.operands for number in self._all(refs)]
        into = [number for refs in wholes.results for number in self._all(refs)]
        operands_of, results_of = itemgetter(*operands), itemgetter(*into)
        call, scale, extra = op.call, self._scale, self._extra_arguments(op)
        return lambda t, work: run(*operands_of(t), call, scale, results_of(t), *extra(work))

    def _kernel_pass(self, op: ops.Attend[Refs]) -> Callable[..., tuple[Tensor, ...]]:
        """The kernel's function that gives the results of a call: all, or those of one side."""
        kernel: Any = self._kernel
        if kernel is None:
            return _no_kernel
        if not self.code.backward:
            return kernel.forward
        (first, _), *others = op.results()
        if others:
            return kernel.backward
        return kernel.backward_q if len(first) == 1 else kernel.backward_kv

    def _blanks(self, count: int) -> list[float]:
        """Return the values of out, of lse and of the largest scores of a partial that nothing was
        added to.
        """
        return [0.0, *[-torch.inf] * (count - 1)]

    def _adopting(
        self,
        op: ops.Attend[Refs],
        results: list[tuple[list[int], bool]],
        operands_of: Callable[[Numbered], tuple[Tensor, ...]],
    ) -> Step:
        """The kernel's own tensors become results that are written; to others they are added."""
        run, extra = self._kernel_pass(op), self._extra_arguments(op)
        call, scale = op.call, self._scale
        adds = [(number, added) for numbers, added in results for number in numbers]
        dtypes = [  # those that wait until they are combined stay what they are
            None
            if self.code.home(ref) is Home.MADE
            else getattr(torch, self.code.tensors[ref.tensor].dtype)
            for refs, _ in op.results()
            for ref in refs
        ]
        put, derived = self._putting(), self._derived

        def step(t: Numbered, work: Pass) -> None:
            found = run(*operands_of(t), call, scale, None, *extra(work))
            for (number, added), x, dtype in zip(adds, found, dtypes, strict=True):
                if added:
                    t[number].add_(x)
                    continue
                t[number] = x if dtype is None or x.dtype is dtype else x.to(dtype)
                if number in derived:
                    put(t, number, t[number])

        return step

    def _putting(self) -> Callable[[Numbered, int, Tensor], None]:
        """Return a function that sets a tensor which an op has made, and the parts of it that ops
        read.
        """
        derived = self._derived

        def put(t: Numbered, number: int, x: Tensor) -> None:
            t[number] = x
            for other, part in derived.get(number, ()):
                t[other] = part_of(x, *part)

        return put

    def _extra_arguments(self, op: ops.Attend[Refs]) -> Callable[[Pass], tuple[()] | tuple[Scores]]:
        """Return the further arguments of a kernel, for calls that ask for more than a scale."""
        scores = self._scores
        if op.places is None:
            return _no_arguments if scores is None else lambda _: (scores,)
        q, k, first, _ = op.places
        places = Places(self._positions(q), self._positions(k), first)
        # dropout's seed and a dense bias are others at every pass
        return lambda work: (work.scores._replace(places=places),)

    def _positions(self, table: ops.Table) -> Tensor:
        found = self._table(table)
        assert found is not None
        return found

    def _merge(self, op: ops.Merge[Refs]) -> Step:
        sources, targets = self._all(op.source), self._all(op.target)
        rows = self._table(op.rows)
        scratch = [number for refs in op.scratch for number in self._all(refs)]
        pairs = [*zip(sources, targets, strict=True)]
        if not op.by_lse:
            if rows is None:

                def add(t: Numbered, _: Pass) -> None:
                    for source, target in pairs:
                        t[target].add_(t[source])

                return add

            def add_rows(t: Numbered, _: Pass) -> None:
                for source, target in pairs:
                    total = t[target]
                    total.index_add_(0, rows, t[source].to(total.dtype))

            return add_rows
        if rows is None:
            return lambda t, _: deliver(
                tuple([t[i] for i in sources]), tuple([t[i] for i in targets])
            )

        def merge_rows(t: Numbered, _: Pass) -> None:
            mine = tuple([t[i] for i in scratch])
            for target, x in zip(targets, mine, strict=True):
                torch.index_select(t[target], 0, rows, out=x)
            deliver(tuple([t[i] for i in sources]), mine)
            for target, x in zip(targets, mine, strict=True):
                t[target].index_copy_(0, rows, x)

        return merge_rows

    def _combine(self, op: ops.Combine[Refs]) -> Step:
        sources, target = [self._all(refs) for refs in op.sources], self._all(op.target)
        if op.by_lse:
            return lambda t, _: combine(
                [[t[i] for i in numbers] for numbers in sources], [t[i] for i in target]
            )
        fields = [*zip(zip(*sources, strict=True), target, strict=True)]

        def step(t: Numbered, _: Pass) -> None:
            for parts, into in fields:
                add_up([t[i] for i in parts], t[into])

        return step

    def _expand(self, op: ops.Expand[Refs]) -> Step:
        latents, k, v = map(self._number, (*op.latents, *op.keys))
        positions, heads = self._positions(op.places.k_positions), slice(*op.places.kv_heads)
        put = self._putting()

        def step(t: Numbered, work: Pass) -> None:
            assert work.expansion is not None
            made = work.expansion.expand(op.key, t[latents], positions, heads, op.learns)
            work.expanded = made
            put(t, k, made.k)
            put(t, v, made.v)

        return step

    def _pull(self, op: ops.Pull[Refs]) -> Step:
        dk, dv, dlatents = map(self._number, (*op.gradients, *op.dlatents))
        put = self._putting()

        def step(t: Numbered, work: Pass) -> None:
            assert work.expansion is not None and work.expanded is not None
            put(t, dlatents, work.expansion.pull(work.expanded, t[dk], t[dv]))

        return step

    def _ask(self, op: ops.Ask[Refs]) -> Step:
        targets, put = self._all(op.target), self._putting()

        def step(t: Numbered, work: Pass) -> None:
            assert work.ask is not None
            for number, x in zip(targets, work.ask(), strict=True):
                put(t, number, x)

        return step

    def _sum_heads(self, op: ops.SumHeads[Refs]) -> Step:
        pairs = [*zip(self._all(op.source), self._all(op.target), strict=True)]
        num_heads = self.code.shape(op.target[0])[2]

        def step(t: Numbered, _: Pass) -> None:
            for source, target in pairs:
                x = t[source].unflatten(2, (num_heads, -1))
                x = x.sum(3, dtype=accumulator_dtype(x.dtype))
                t[target].view(x.shape).copy_(x)

        return step

    # Messages

    def _post(self, op: ops.Post[Refs]) -> Step:
        if op.team is not None:
            return self._post_team(op, op.team)
        sends, lane = self._messages(op.sends, op.leaving), op.lane
        recvs = self._messages(op.recvs, op.arriving)
        apart, left = [], {*range(len(op.recvs))}
        for indices in op.apart:
            left -= {*indices}
            mine = [recvs[index] for index in indices]
            apart.append((self._exchange([op.arrivals[index] for index in indices]), mine))
        together = [recvs[index] for index in sorted(left)]
        own = self._exchange([op.arrivals[index] for index in sorted(left)])

        def step(t: Numbered, work: Pass) -> None:
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

    def _post_team(self, op: ops.Post[Refs], team: ops.TeamExchange) -> Step:
        number, place = self._new_number(), self._exchange(op.arrivals)
        ((leaving,),), ((arriving,),) = op.leaving, op.arriving
        tensors = self._number(leaving), self._number(arriving)
        rest = team.sizes, team.team.ranks, team.label, team.most_bytes
        placed = self.code.home(arriving) is Home.WORKSPACE
        (self._teams if placed else self._given_teams).append((number, *tensors, rest))

        def step(t: Numbered, work: Pass) -> None:
            work.handles[place] = work.transport.exchange_all(t[number])  # pyright: ignore

        return step

    def _exchange(self, arrivals: Sequence[int]) -> int:
        """Return the number of a new exchange, by which its handle and its arrivals are found."""
        self._groups.update(dict.fromkeys(arrivals, self._num_exchanges))
        self._num_exchanges += 1
        return self._num_exchanges - 1

    def _messages(
        self, messages: Sequence[ops.Message], parts: Sequence[Refs]
    ) -> list[tuple[int, int, Label]]:
        return [
            (self._bytes_number(ref), one.peer, Label(one.step, one.item))
            for one, (ref,) in zip(messages, parts, strict=True)
        ]

    def _wait(self, op: ops.Wait[Refs]) -> Step:
        # An exchange is waited for as a whole: by the first of its arrivals that is.
        places = [*dict.fromkeys(self._groups[arrival] for arrival in op.arrivals)]
        places = [place for place in places if place not in self._awaited]
        self._awaited.update(places)
        if not places:
            return _no_step
        if len(places) == 1:
            (place,) = places
            return lambda _, work: work.handles[place].wait()

        def step(_: Numbered, work: Pass) -> None:
            for place in places:
                work.handles[place].wait()

        return step


class _Nothing:
    def wait(self) -> None:
        return


_NOTHING = _Nothing()


def _no_kernel(*_: Any) -> NoReturn:
    raise AssertionError("a code without a kernel attends nothing")


def _row_sum(x: Tensor, out: Tensor) -> None:
    torch.sum(x, -1, out=out)


def _no_step(_: Numbered, __: Pass) -> None:
    return


def _no_mark() -> None:
    return


def _no_arguments(_: Pass) -> tuple[()]:
    return ()


def _whole(ref: Ref) -> Ref:
    """All rows and heads of a tensor."""
    return Ref(ref.tensor)


_Part: TypeAlias = tuple[Ref, tuple[int, ...] | None]
"""Rows and heads of a tensor, and the shape in which an op sees them (None: their own)."""
_TeamNumbers: TypeAlias = tuple[int, int, int, tuple[Any, ...]]
"""The number of what a team exchanges, of its tensors, and what else it is made of."""


class _Given(NamedTuple):
    """Tensors that are as the call gives them: their numbers, names and shapes."""

    numbers: list[int]
    names: list[str]
    shapes: list[tuple[int, ...]]

    def add(self, number: int, name: str, shape: tuple[int, ...]) -> None:
        self.numbers.append(number)
        self.names.append(name)
        self.shapes.append(shape)


class _Stored(NamedTuple):
    """Tensors of one dtype in memory that is given; starts count numbers of it."""

    name: str
    dtype: torch.dtype
    numbers: list[int]
    shapes: list[tuple[int, ...]]
    strides: list[tuple[int, ...]]
    starts: list[int]

    def add(self, number: int, spec: TensorSpec) -> None:
        self.numbers.append(number)
        self.shapes.append(spec.shape)
        self.strides.append(spec.strides)
        self.starts.append(spec.start // self.dtype.itemsize)


def part_of(x: Tensor, ref: Ref, shape: tuple[int, ...] | None = None) -> Tensor:
    """The rows and heads of a tensor.

    Args:
        shape: in which they are seen; None: their own.
    """
    if ref.rows is not None:
        start, stop, step = ref.rows
        x = x[start:stop:step]
    if ref.heads is not None:
        x = x[:, :, slice(*ref.heads)]
    return x if shape is None else x.view(shape)


def _numbers_in(memory: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers, without those at the end that make no whole number."""
    if dtype is memory.dtype:
        return memory
    rest = memory.numel() % dtype.itemsize
    return (memory[:-rest] if rest else memory).view(dtype)


def _placed(memory: Tensor, offset: int, spec: TensorSpec) -> Tensor:
    """A tensor in bytes whose first is a multiple of what its numbers need."""
    dtype = getattr(torch, spec.dtype)
    numbers = _numbers_in(memory, dtype)
    first = numbers.storage_offset() + (offset + spec.start) // dtype.itemsize
    return numbers.as_strided(spec.shape, spec.strides, first)

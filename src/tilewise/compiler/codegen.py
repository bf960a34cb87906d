"""Code generation: a program's operations become ops on numbered tensors of placed buffers.

    plan -> lowering -> program -> operations -> codegen (here) -> placement -> code

Everything that a pass does to memory is decided here, once for calls of the same shapes: what is
packed and where it arrives, which rows a kernel call reads in place and which are gathered, where
it adds, what becomes a partial result without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial as partial_of
from functools import reduce
from itertools import accumulate, product
from math import prod
from typing import NamedTuple

import numpy as np

from tilewise.arguments import item_bytes, require_range
from tilewise.compiler.code import (
    Ask,
    Attend,
    Bytes,
    Code,
    CodeWriter,
    ComputeDelta,
    Copy,
    Decode,
    Encode,
    Expand,
    ExpandKey,
    Fill,
    Home,
    KeptBuffer,
    Line,
    Merge,
    Post,
    Pull,
    Ref,
    Result,
    RowTables,
    SumHeads,
    Table,
    TeamBytes,
    TensorSpec,
    Wait,
    packed_ranges,
)
from tilewise.compiler.head_exchange import HeadExchange, as_one_shard, head_exchange
from tilewise.compiler.joined import joined
from tilewise.compiler.lowering import Part, lower
from tilewise.compiler.placement import Departures, placed
from tilewise.compiler.program import (
    LAUNCHES_IN_FLIGHT,
    AttendTile,
    Await,
    Collect,
    Delta,
    Join,
    Launch,
    MergeArrived,
    Operation,
    Pack,
    PackHeads,
    Program,
    Unpack,
    arrivals,
    held_ranges,
    made_arenas,
    operations,
)
from tilewise.compiler.resolved import ResolvedPass
from tilewise.layouts.layout import Layout
from tilewise.plan.builder import gc_paused, operand, partial
from tilewise.plan.ir import Item, Plan, Role, Rows, Side, Tile, Transfer
from tilewise.plan.kept import kept_with_plan
from tilewise.plan.payload import STATISTICS, Field, Payload, RowFormat, accumulator, row_shape
from tilewise.plan.row_ranges import count, count_rows
from tilewise.tiles.call_rows import (
    CallParts,
    CallStyle,
    RowSelection,
    TileCalls,
    is_range,
    num_rows,
    span,
)

SMALL_BYTES = 2**20
"""Up to here a message costs more than a copy of it; beyond, copies are avoided."""

MOST_AHEAD = 8
"""Launches by which receives of small shards are posted before their sends."""


class CodeTraits(NamedTuple):
    """Facts of the transport and of the kernel that a code depends on, beside the call.

    Attributes:
        receives_ahead, node_size, sends_in_flight: as of transport.protocol.Transport.
        takes_teams: whether the transport takes exchanges of whole teams.
        cut: how the kernel wants tiles cut.
    """

    receives_ahead: int = 0
    node_size: int | None = None
    takes_teams: bool = False
    sends_in_flight: int | None = LAUNCHES_IN_FLIGHT
    cut: CallStyle = CallStyle(square_causal=True)


DEFAULT_TRAITS = CodeTraits()
"""Of a transport that posts a launch as one batch, as NCCL's and loopback's do."""


class CallTraits(NamedTuple):
    """Facts of a call that a code depends on, beside its resolved passes.

    Attributes:
        batch: sequences that lie side by side in every row.
        prune: whether what the mask makes needless is left out.
        keep: a forward pass keeps what it receives for backward, where the call saves that.
        places: kernels are told where their rows lie in the sequence (dropout, bias).
        asks: tiles are computed by whoever runs the code (decoding).
    """

    batch: int = 1
    prune: bool = True
    keep: bool = False
    places: bool = False
    asks: bool = False


def pass_code(
    passes: tuple[ResolvedPass, ResolvedPass],
    rank: int,
    *,
    backward: bool,
    call: CallTraits = CallTraits(),  # noqa: B008 - a constant
    traits: CodeTraits = DEFAULT_TRAITS,
) -> Code:
    """The code of one rank's forward or backward pass.

    Args:
        passes: the resolved forward and backward pass of a call.
        rank: in 0..world_size - 1.
    Raises:
        ValueError: if there is no such rank.
    """
    require_range("rank", rank, 0, passes[0].plan.world_size - 1)
    with gc_paused():
        codes: list[Code] = []
        for part in passes[backward].parts:
            forward = None
            if part.payload.saved:
                forward = _Generator(passes[0], rank, call._replace(keep=True), traits).code()
            codes.append(_Generator(part, rank, call, traits, forward).code())
        departs = Departures(traits.sends_in_flight, not traits.receives_ahead)
        return reduce(partial_of(joined, departs), codes)


class Held(NamedTuple):
    """An operand that is here: which rows of its shard, as tensors by name and as bytes.

    Attributes:
        arena: the arena in which it lies beside others, and its first row there.
    """

    rows: Rows
    fields: dict[str, Ref]
    wire: Ref | None = None
    arena: tuple[_Arena, int] | None = None


class _Arena(NamedTuple):
    items: tuple[Item, ...]
    starts: dict[Item, int]
    fields: dict[str, Ref]  # of all rows
    wire: Ref | None


KnownCalls = dict[tuple[Tile, tuple[Sequence[Rows], ...]], tuple[CallParts[np.ndarray], ...]]


@kept_with_plan(keep=1, each_rank=True)
def _known_calls(plan: Plan, rank: int, table: TileCalls) -> KnownCalls:
    """The kernel calls of a rank's tiles, as they become known; both passes have the same."""
    return {}


class _PackedRows:
    """Writes tensors to packed rows, and reads them, in the code of one pass.

    Attributes:
        formats: of a row, by side and role.
    """

    def __init__(self, code: CodeWriter, payload: Payload):
        self._code, self._payload = code, payload
        self.formats = {
            (side, role): payload.row_format(side, role) for side in Side for role in Role
        }

    def wire(
        self,
        name: str,
        rows: int,
        part: Part,
        home: Home = Home.WORKSPACE,
        part_rows: Sequence[int] = (),
    ) -> Ref:
        """A buffer of so many rows as they travel."""
        shape = rows, self._code.batch, self.formats[part].num_bytes
        return self._code.new(f"{name}.bytes", shape, "uint8", home, part_rows)

    def fields_at(self, wire: Ref, first: int, rows: int, part: Part, name: str) -> dict[str, Ref]:
        """The tensors that rows of a buffer are, where they can be used as they lie."""
        spec = self._code.tensors[wire.tensor]
        row_bytes = self._code.batch * self.formats[part].num_bytes
        start = spec.start + (first + (wire.rows[0] if wire.rows else 0)) * row_bytes
        form = self.formats[part], self._payload.heads(part[0])
        return self.typed(spec.buffer, start, rows, form, name)

    def typed(
        self, buffer: int, start: int, rows: int, form: tuple[RowFormat, int], name: str
    ) -> dict[str, Ref]:
        """The fields of packed rows that begin at a byte of a buffer."""
        row, heads = form
        fields: dict[str, Ref] = {}
        for field, column in zip(row.fields, row.starts, strict=True):
            size = item_bytes(field.dtype)
            step = row.num_bytes // size
            strides = (1,) if field.name in STATISTICS else (field.width, 1)
            shape = rows, self._code.batch, *row_shape(field.name, heads, field.width)
            steps = self._code.batch * step, step, *strides
            spec = TensorSpec(
                f"{name}.{field.name}", buffer, start + column, shape, steps, field.dtype
            )
            fields[field.name] = self._code.tensor(spec)
        return fields

    def columns(
        self, buffer: int, start: int, rows: int, form: tuple[RowFormat, int], name: str
    ) -> list[Ref]:
        """The bytes of each field of packed rows: uint8 [rows, batch, n]."""
        row, heads = form
        strides = self._code.batch * row.num_bytes, row.num_bytes, 1
        return [
            self._code.tensor(
                TensorSpec(
                    f"{name}.{field.name}.bytes",
                    buffer,
                    start + column,
                    (rows, self._code.batch, heads * field.row_bytes),
                    strides,
                    "uint8",
                )
            )
            for field, column in zip(row.fields, row.starts, strict=True)
        ]

    def decoded(
        self, buffer: int, first: int, rows: int, form: tuple[RowFormat, int], name: str
    ) -> dict[str, Ref]:
        """Rows of a buffer that cannot be used as they lie, as tensors of their own."""
        row, heads = form
        start = first * self._code.batch * row.num_bytes
        fields: dict[str, Ref] = {}
        columns = self.columns(buffer, start, rows, form, name)
        for field, source in zip(row.fields, columns, strict=True):
            target = self._apart(rows, heads, field, name)
            self._code.add(Decode(source, target, field))
            fields[field.name] = target
        return fields

    def _apart(self, rows: int, heads: int, field: Field, name: str) -> Ref:
        """A tensor of its own for a field of rows."""
        shape = rows, self._code.batch, *row_shape(field.name, heads, field.width)
        return self._code.new(f"{name}.{field.name}", shape, field.dtype)

    def write(self, sources: Sequence[Ref], wire: Ref, part: Part, of: tuple[Item, int]) -> None:
        """Copy tensors into packed rows, encoded where the format says so.

        Args:
            of: whose rows these are, and who encodes them.
        """
        row, rows = self.formats[part], self._code.shape(wire)[0]
        spec, form = self._code.tensors[wire.tensor], (row, self._payload.heads(part[0]))
        name = spec.name.removesuffix(".bytes")
        first = (wire.rows[0] if wire.rows else 0) * self._code.batch * row.num_bytes + spec.start
        if row.in_place:
            targets = self.typed(spec.buffer, first, rows, form, name)
            for source, target in zip(sources, targets.values(), strict=True):
                self._code.add(Copy(source, target))
            return
        columns = self.columns(spec.buffer, first, rows, form, name)
        for source, target, field in zip(sources, columns, row.fields, strict=True):
            self._code.add(Encode(source, target, field, of))

    def read(self, wire: Ref, part: Part, name: str) -> dict[str, Ref]:
        """The tensors that packed rows are, decoded where they must be."""
        rows = self._code.shape(wire)[0]
        if self.formats[part].in_place:
            return self.fields_at(wire, 0, rows, part, name)
        first = wire.rows[0] if wire.rows else 0
        spec = self._code.tensors[wire.tensor]
        assert spec.start == 0, "packed rows of such a format have a buffer of their own"
        form = self.formats[part], self._payload.heads(part[0])
        return self.decoded(spec.buffer, first, rows, form, name)


After = Callable[[], None]


class _Group:
    """Partials of operands of one arena: side by side, so that a kernel call can add to several.

    Each has its place there once: from when it is first added to until it leaves.
    """

    def __init__(self, items: Sequence[Item], sizes: Sequence[int]):
        self.items = tuple(items)
        self.sizes = tuple(sizes)
        self.starts = dict(zip(items, accumulate(sizes, initial=0), strict=False))
        self.whole: tuple[Ref, ...] = ()


class _Partials:
    """The partials of one pass of one rank.

    Args:
        layouts: of the query and the KV shards, as tiles read them.
    """

    def __init__(
        self,
        code: CodeWriter,
        packing: _PackedRows,
        payload: Payload,
        layouts: tuple[Layout, Layout],
    ):
        self._code, self._packing, self._payload = code, packing, payload
        self._sizes = tuple(layout.sizes for layout in layouts)
        self._acc = accumulator(payload.dtype)
        self._here: dict[Item, tuple[Ref, ...]] = {}
        self._group_of: dict[Item, _Group] = {}
        self._unused: set[Item] = set()  # of a group, of which nothing is here yet

    def _size(self, item: Item) -> int:
        """Rows of its shard."""
        return self._sizes[item.side][item.shard]

    def __contains__(self, item: Item) -> bool:
        """Return whether something of a partial is here."""
        return item in self._here

    def put(self, item: Item, tensors: tuple[Ref, ...]) -> None:
        """Take tensors as a partial."""
        self._here[item] = tensors

    def taken(self, item: Item) -> tuple[Ref, ...]:
        """A partial that leaves: what is added later makes a new one."""
        tensors = self.made(item)
        self._here.pop(item, None)
        group = self._group_of.get(item)
        if group is not None:
            group.starts.pop(item, None)
        return tensors

    def fields_of(self, side: Side) -> list[tuple[str, tuple[int, ...], float]]:
        """Return the tensors of a partial: name, heads and width, and the value that each has at
        first.
        """
        payload, heads = self._payload, self._payload.heads(side)
        return [
            (name, row_shape(name, heads, width), -np.inf if name in STATISTICS else 0.0)
            for name, width in payload.results(side)
        ]

    def new(self, item: Item, home: Home = Home.WORKSPACE) -> tuple[Ref, ...]:
        """Tensors for a partial, of any content."""
        dtype = self._payload.partial_dtype
        return tuple(
            self._code.new(
                f"{item}.{name}", (self._size(item), self._code.batch, *inner), dtype, home
            )
            for name, inner, _ in self.fields_of(item.side)
        )

    def _fill(self, item: Item, refs: Sequence[Ref]) -> None:
        fields = self.fields_of(item.side)
        for ref, (_, _, value) in zip(refs, fields, strict=True):
            self._code.add(Fill(ref, value))

    def made(self, item: Item) -> tuple[Ref, ...]:
        """A partial to be added to."""
        if item not in self._here:
            if item in self._unused:
                self._enter_group(item, blank=True)
            else:
                self._here[item] = self.new(item)
                self._fill(item, self._here[item])
        return self._here[item]

    def _enter_group(self, item: Item, *, blank: bool) -> None:
        """Give a partial its place beside the others of its group."""
        group = self._group_of[item]
        self._unused.discard(item)
        if not group.whole:
            rows = sum(group.sizes)
            names = ", ".join(map(str, group.items))
            group.whole = tuple(
                self._code.new(
                    f"{names}.{name}",
                    (rows, self._code.batch, *inner),
                    self._payload.partial_dtype,
                    part_rows=group.sizes,
                )
                for name, inner, _ in self.fields_of(item.side)
            )
            if blank:
                self._fill(item, group.whole)
        start = group.starts[item]
        at = start, start + self._size(item)
        self._here[item] = tuple(self._code.rows(x, at) for x in group.whole)

    def result(
        self,
        side: Side,
        parts: Sequence[RowSelection[np.ndarray]],
        heads: slice | None,
        rows: int,
        expanded: Sequence[Ref] = (),
    ) -> tuple[Result, After]:
        """Return where a kernel call's results of a side go, and what is to be done with them after
        it.

        A kernel itself adds to neighbouring rows of partials. Results that are the first of all
        rows of a partial become it. All others are put aside, and merged.

        Args:
            expanded: keys and values that were made of latents, whose gradients are pulled back.
        """
        found = None if expanded or heads is not None else self._direct(parts)
        if found is not None:
            return found, _nothing
        inner = [shape for _, shape, _ in self.fields_of(side)]
        names = [name for name, _, _ in self.fields_of(side)]
        if expanded:
            names, inner = ["dk", "dv"], [self._code.shape(x)[2:] for x in expanded]
        elif heads is not None:
            inner = [(heads.stop - heads.start, *shape[1:]) for shape in inner]
        aside = tuple(
            self._code.new(f"{name} of a call", (rows, self._code.batch, *shape), self._acc)
            for name, shape in zip(names, inner, strict=True)
        )
        return Result(aside, adds=False), lambda: self._merge_aside(parts, aside, heads, expanded)

    def _direct(self, parts: Sequence[RowSelection[np.ndarray]]) -> Result | None:
        """Partials, or neighbouring rows of some, to which a kernel can add or which it writes."""
        if len(parts) > 1:
            return self._beside(parts)
        _, item, in_call, _, local = parts[0]
        if in_call is not None or isinstance(local, np.ndarray):
            return None
        if local is None and item not in self._here and item not in self._unused:
            self._here[item] = self.new(item)
            return Result(self._here[item], adds=False)
        made = self.made(item)
        return Result(
            made if local is None else tuple(self._code.rows(x, local) for x in made), True
        )

    def _beside(self, parts: Sequence[RowSelection[np.ndarray]]) -> Result | None:
        """Partials of several shards that lie side by side as their operands do."""
        group = self._group_of.get(parts[0].item)
        if group is None or any(self._group_of.get(part.item) is not group for part in parts):
            return None
        sizes = [self._size(part.item) for part in parts]
        starts = [group.starts.get(part.item) for part in parts]
        whole = [part._replace(shard=i, block=part.local) for i, part in enumerate(parts)]
        rows = span(whole, sizes, starts)
        if rows is None:
            return None
        first = not group.whole and rows[1] - rows[0] == sum(group.sizes)
        for part in parts:
            if part.item not in self._here:
                self._enter_group(part.item, blank=not first)
        return Result(tuple(self._code.rows(x, rows) for x in group.whole), not first)

    def _merge_aside(
        self,
        parts: Sequence[RowSelection[np.ndarray]],
        aside: tuple[Ref, ...],
        heads: slice | None,
        expanded: Sequence[Ref],
    ) -> None:
        """Add results of a call to the partials that its rows belong to."""
        if expanded:
            dk, dv = aside
            (inner,) = [shape for _, shape, _ in self.fields_of(Side.KV)]
            shape = self._code.shape(dk)[0], self._code.batch, *inner
            pulled = self._code.new("dlatent of a call", shape, self._acc, Home.MADE)
            self._code.add(Pull(dk, dv, pulled))
            aside, heads = (pulled,), None
        if heads is None and not expanded and self._fills(parts):
            self._write_aside(parts, aside)
            return
        for part in parts:
            sources = tuple(self._code.picked(x, part.call) for x in aside)
            free = part.item not in self._here and part.item not in self._unused
            if free and part.local is None and heads is None and not expanded:
                self._here[part.item] = sources
                continue
            targets = self.made(part.item)
            if heads is not None:
                targets = tuple(self._code.rows(x, None, heads) for x in targets)
            self._merge(sources, targets, part.local)

    def _fills(self, parts: Sequence[RowSelection[np.ndarray]]) -> bool:
        """Return whether a call's results are the first of a partial, and of all its rows, in
        ranges.
        """
        (item, *others) = {part.item for part in parts}
        if others or item in self._here or item in self._unused:
            return False
        if not all(is_range(part.call) and is_range(part.local) for part in parts):
            return False
        # Rows of a call are rows of different tokens, so as many as there are means all of them.
        return sum(num_rows(part.local, self._size(item)) for part in parts) == self._size(item)

    def _write_aside(
        self, parts: Sequence[RowSelection[np.ndarray]], aside: tuple[Ref, ...]
    ) -> None:
        """Put a call's results in the order of the partial that they are."""
        item = parts[0].item
        targets = self._here[item] = self.new(item)
        for part in parts:
            for source, target in zip(aside, targets, strict=True):
                mine = self._code.picked(source, part.call)
                self._code.add(Copy(mine, self._code.picked(target, part.local)))

    def _merge(
        self, sources: tuple[Ref, ...], targets: tuple[Ref, ...], rows: slice | np.ndarray | None
    ) -> None:
        by_lse = not self._payload.backward
        if not isinstance(rows, np.ndarray):
            mine = targets if rows is None else tuple(self._code.rows(x, rows) for x in targets)
            self._code.add(Merge(sources, mine, by_lse))
            return
        scratch: tuple[Ref, ...] = ()
        if by_lse:
            scratch = tuple(
                self._code.new(
                    "rows to merge", (len(rows), *self._code.shape(x)[1:]), self._code.dtype(x)
                )
                for x in targets
            )
        self._code.add(Merge(sources, targets, by_lse, Table.of(rows), scratch))

    def merge_arrived(self, transfer: Transfer, values: Sequence[Ref], adds: bool) -> None:
        """Add what has arrived to what is here, or copy it if that is nothing."""
        item, rows = transfer.item, transfer.rows
        if not adds and rows is None and item not in self._unused:
            self._here[item] = self.new(item)
            for source, target in zip(values, self._here[item], strict=True):
                self._code.add(Copy(source, target))
            return
        totals = self.made(item)
        for mine, here in packed_ranges(rows or ((0, self._size(item)),)):
            sources = [self._code.rows(x, here) for x in values]
            targets = [self._code.rows(x, mine) for x in totals]
            by_lse = not self._payload.backward
            self._code.add(Merge(tuple(sources), tuple(targets), by_lse))

    def add_group(self, items: Sequence[Item]) -> None:
        """Keep partials of these operands side by side."""
        partials = [item._replace(role=Role.PARTIAL) for item in items]
        if not self._payload.fields(items[0].side, Role.PARTIAL):
            return
        group = _Group(partials, [self._size(item) for item in partials])
        self._group_of.update(dict.fromkeys(partials, group))
        self._unused.update(partials)


def _nothing() -> None:
    return


class _Generator:
    """Writes the code of one rank's pass, operation by operation."""

    def __init__(
        self,
        resolved: ResolvedPass,
        rank: int,
        call: CallTraits,
        traits: CodeTraits,
        forward: Code | None = None,
    ):
        self._rank, self._call, self._forward = rank, call, forward
        self._traits, self._batch = traits, call.batch
        plan, mask, layouts, groups, payload, _ = resolved
        pruned = resolved.pruned if call.prune else plan
        self._plan, self._payload, self._groups = pruned, payload, groups
        self._layouts = layouts
        latent = payload.wires.latent is not None
        # A latent is of all heads: every group has the whole.
        self._carried = groups._replace(num_kv_heads=1) if latent else groups
        self._code = CodeWriter(call.batch)
        self._packing = _PackedRows(self._code, payload)
        self._exchange_bytes = {part: self._longest(part) for part in self._packing.formats}
        self._program, self._by_head = self._lowered(pruned, latent)
        if self._by_head:
            q_layout, kv_layout = map(as_one_shard, self._layouts)
            self._tile_layouts = q_layout, kv_layout
        else:
            self._tile_layouts = layouts
        self._partials = _Partials(self._code, self._packing, payload, self._tile_layouts)
        cut = CallStyle(whole_rows=True) if payload.whole_rows else traits.cut
        self._table = TileCalls(self._tile_layouts, mask, groups, cut)
        self._known_calls = _known_calls(pruned, rank, self._table)
        self._keeps = call.keep and not payload.backward
        self._acc = accumulator(payload.dtype)
        self._lines: list[Line] = []
        self._contiguous: dict[str, None] = {}
        self._kept: list[KeptBuffer] = []
        self._operands: dict[Item, Held] = {}
        self._results: dict[Item, dict[str, Ref]] = {}
        self._arrived: dict[Transfer, tuple[Ref, ...]] = {}
        self._left: set[Transfer] = set()
        self._rooms: dict[tuple[int, int], Ref] = {}
        self._arrival_numbers: dict[tuple[int, int], int] = {}
        self._packed: dict[Item, Ref] = {}
        self._leaving: dict[tuple[Item, Rows | None], Ref] = {}
        self._saved_fields: dict[Item, Callable[[], dict[str, Ref]]] = {}
        self._arena_of: dict[Item, _Arena] = {}
        self._taken_in: dict[int, list[tuple[Ref, Ref]]] = {}
        self._arriving_wires: dict[Transfer, Ref] = {}
        self._own: list[dict[str, Ref]] = []
        self._heads_here: set[int] = set()
        self._leaving_heads: Ref | None = None
        self._arriving_heads: dict[Role, Ref] = {}
        self._received = arrivals(self._program)
        self._held = [
            [
                (shard, pruned.cuts[shard] if pruned.cuts else (0, layout.sizes[shard]))
                for shard, ranks in enumerate(pruned.owners[side])
                if rank in ranks
            ]
            for side, layout in zip(Side, layouts, strict=True)
        ]

    def _longest(self, part: Part) -> int:
        """Bytes of a part's item of the longest shard: the same on all ranks."""
        rows = max(self._layouts[part[0]].sizes, default=0)
        return self._batch * rows * self._packing.formats[part].num_bytes

    def _lowered(self, plan: Plan, latent: bool) -> tuple[Program, dict[Role, HeadExchange]]:
        """The program, and how teams exchange heads by whole buffers, if they do."""
        traits, largest = self._traits, max(self._exchange_bytes.values())
        ahead, exchanges = traits.receives_ahead, ()
        if traits.takes_teams and largest <= SMALL_BYTES:
            exchanges = plan.traits.exchanges
        if ahead:  # more of small ones: posted while all is quiet, they meet nobody's sends
            ahead = max(ahead, min(MOST_AHEAD, SMALL_BYTES // max(1, largest)))
        program = lower(
            plan,
            self._rank,
            node_size=traits.node_size,
            ahead=ahead,
            carries=frozenset(part for part, row in self._packing.formats.items() if row.fields),
            exchanges=exchanges,
        )
        found: dict[Role, HeadExchange] = {}
        whole_buffers = self._batch and not latent
        if exchanges and all(one.by_head for one in exchanges) and whole_buffers:
            for launch in program.instructions:
                if isinstance(launch, Launch):
                    role = (launch.sends or launch.recvs)[0].item.role
                    shape = self._rank, self._batch
                    whole = head_exchange(role, self._payload, self._layouts, self._groups, *shape)
                    if whole is None:
                        return program, {}
                    found[role] = whole
        return program, found

    def code(self) -> Code:
        self._start()
        alone = self._batch > 1 or self._groups.groups > 1
        listed = operations(
            self._program, self._payload, packs_alone=alone, by_head=bool(self._by_head)
        )
        for operation in listed:
            before = len(self._code.ops)
            self._emit(operation)
            self._lines.append(Line(str(operation), len(self._code.ops) - before))
        code = self._code
        tensors, buffers, ops = tuple(code.tensors), tuple(code.buffers), tuple(code.ops)
        departs = Departures(self._traits.sends_in_flight, not self._traits.receives_ahead)
        offsets, num_bytes = placed(tensors, buffers, ops, departs)
        return Code(
            self._rank,
            self._plan.world_size,
            self._payload.backward,
            self._batch,
            tensors,
            buffers,
            ops,
            tuple(self._lines),
            offsets,
            num_bytes,
            tuple(self._contiguous),
            tuple(self._kept),
        )

    def _emit(self, operation: Operation) -> None:
        match operation:
            case Delta():
                self._delta()
            case Join(item):
                self._join(item)
            case Pack():
                self._pack(operation)
            case PackHeads(role):
                self._pack_heads(role)
            case Launch():
                self._launch(operation)
            case Await():
                self._await(operation)
            case Unpack(transfer):
                self._unpack(transfer)
            case MergeArrived(transfer, adds):
                self._partials.merge_arrived(transfer, self._arrived.pop(transfer), adds)
            case AttendTile(tile):
                self._attend_tile(tile)
            case Collect(side):
                self._collect(side)

    # What is here from the start

    def _start(self) -> None:
        self._make_arenas()
        names = [[name for name, _ in self._payload.inputs(side)] for side in Side]
        if self._payload.backward:
            names[Side.Q] += ["dout", "lse", "delta"]
        for side in Side:
            heads_of = self._carried.num_heads, self._carried.num_kv_heads
            rows = sum(stop - start for _, (start, stop) in self._held[side])
            whole: dict[str, Ref] = {}
            for name in names[side]:
                width = dict(self._payload.inputs(side)).get(name, self._payload.v_head_dim)
                dtype = self._acc if name in STATISTICS else self._payload.dtype
                if name == "delta":
                    whole[name] = self._code.new(name, (rows, self._batch, heads_of[side]), dtype)
                else:
                    whole[name] = self._code.given(name, rows, heads_of[side], width, dtype)
            self._own.append(whole)
            if self._by_head:
                continue
            for (shard, at), group in product(self._held[side], range(self._groups.groups)):
                heads = self._carried.slice(side, group) if self._groups.groups > 1 else None
                rows_at = at if self._plan.cuts else None
                fields = {name: self._code.rows(x, rows_at, heads) for name, x in whole.items()}
                item, local = operand(side, shard, group), ((0, at[1] - at[0]),)
                arena = self._arena_of.get(item)
                place = None if arena is None else (arena, arena.starts[item])
                self._operands[item] = Held(local, fields, None, place)
        if self._forward is not None:
            self._find_saved(self._forward)

    def _make_arenas(self) -> None:
        """Buffers in which operands that tiles read together lie side by side."""
        if self._by_head:
            return
        for items in made_arenas(self._program, self._payload):
            side = items[0].side
            part = side, Role.OPERAND
            rows = [self._arriving_rows(item) for item in items]
            starts = dict(zip(items, accumulate(rows, initial=0), strict=False))
            wire, fields = None, {}
            if self._packing.formats[part].fields:
                home = Home.KEPT if self._keeps else Home.WORKSPACE
                wire = self._packing.wire(f"{side.name.lower()}s", sum(rows), part, home, rows)
                fields = self._packing.fields_at(wire, 0, sum(rows), part, f"{side.name.lower()}s")
            arena = _Arena(items, starts, fields, wire)
            self._arena_of.update(dict.fromkeys(items, arena))
            self._partials.add_group(items)
            if wire is not None and self._keeps:
                self._keep(wire, [(item, starts[item]) for item in items], arena=True)

    def _arriving_rows(self, item: Item) -> int:
        return count(self._forward_received().get(item), self._size(item))

    def _forward_received(self) -> Mapping[Item, Rows | None]:
        """The operands that arrive; where they were kept, those that arrived in forward."""
        if self._forward is None:
            return self._received
        found: dict[Item, Rows | None] = dict(self._received)
        for kept in self._forward.kept:
            found.update({item: rows for item, _, rows in kept.items})
        return found

    def _size(self, item: Item) -> int:
        """Rows of its shard; where heads are exchanged by one buffer, results are of all rows."""
        if self._by_head and item.role is Role.PARTIAL:
            return self._tile_layouts[item.side].sizes[0]
        return self._layouts[item.side].sizes[item.shard]

    def _keep(self, wire: Ref, starts: Iterable[tuple[Item, int]], *, arena: bool) -> None:
        """Note what of a buffer arrives, and is to be found again by the backward pass."""
        buffer = self._code.tensors[wire.tensor].buffer
        items: list[tuple[Item, int, tuple[tuple[int, int], ...]]] = []
        for item, start in starts:
            if item in self._received:
                rows = self._received[item]
                items.append((item, start, ((0, self._size(item)),) if rows is None else rows))
        if items:
            self._kept.append(KeptBuffer(buffer, tuple(items), arena))

    def _find_saved(self, forward: Code) -> None:
        """Take what a forward pass kept as operands of this pass."""
        before = self._payload._replace(backward=False, saved=False)
        for number, kept in enumerate(forward.kept):
            side = kept.items[0][0].side
            buffer = forward.buffers[kept.buffer]
            place = self._code.buffer(f"kept{number}", buffer.num_bytes, Home.SAVED)
            if self._by_head:
                self._find_saved_heads(place, before)
                continue
            row, heads = before.row_format(side, Role.OPERAND), before.heads(side)
            total = buffer.num_bytes // max(1, self._batch * row.num_bytes)
            if row.in_place:
                fields = self._packing.typed(place, 0, total, (row, heads), f"kept{number}")
                arena = self._arena_of.get(kept.items[0][0]) if kept.arena else None
                if arena is not None:
                    arena.fields.update(fields)
                for item, start, rows in kept.items:
                    part = (start, start + count_rows(rows))
                    mine = {name: self._code.rows(x, part) for name, x in fields.items()}
                    self._saved_fields[item] = lambda mine=mine: mine
                    at = None if arena is None else (arena, start)
                    self._operands[item] = Held(rows, {}, None, at)
            else:
                for item, start, rows in kept.items:
                    spot = place, start, count_rows(rows)
                    self._saved_fields[item] = self._decoded_later(spot, (row, heads), item)
                    self._operands[item] = Held(rows, {})

    def _decoded_later(
        self, spot: tuple[int, int, int], form: tuple[RowFormat, int], item: Item
    ) -> Callable[[], dict[str, Ref]]:
        """Decode saved rows when a tile first reads them."""
        found: dict[str, Ref] = {}

        def fields() -> dict[str, Ref]:
            if not found:
                found.update(self._packing.decoded(*spot, form, str(item)))
            return found

        return fields

    def _find_saved_heads(self, place: int, before: Payload) -> None:
        shape = self._rank, self._batch
        whole = head_exchange(Role.OPERAND, before, self._layouts, self._groups, *shape)
        assert whole is not None, "forward exchanged heads by one buffer"
        for side, fields in self._head_fields(place, whole, whole=True).items():
            item, rows = operand(side, 0, self._rank), self._tile_layouts[side].size(0)
            self._operands[item] = Held(((0, rows),), dict(fields))

    # Messages

    def _join(self, item: Item) -> None:
        arena, held, part = self._arena_of[item], self._operands[item], item[:2]
        assert arena.wire is not None
        start = arena.starts[item]
        wire = self._code.rows(arena.wire, (start, start + self._size(item)))
        moved = self._packing.fields_at(arena.wire, start, self._size(item), part, str(item))
        for name, target in moved.items():
            self._code.add(Copy(held.fields[name], target))
        fields = {**held.fields, **moved}
        self._operands[item] = Held(held.rows, fields, wire, (arena, start))

    def _pack(self, pack: Pack) -> None:
        item, part = pack.item, pack.item[:2]
        names = [field.name for field in self._packing.formats[part].fields]
        if item.role is Role.PARTIAL:
            self._leave(pack)
        elif item.role is Role.RESULT:
            wire = self._packing.wire(str(item), self._size(item), part)
            home = partial(item.side, item.shard, item.heads)
            self._packing.write(self._partials.made(home), wire, part, (item, self._rank))
            self._packed[item] = wire
            self._results[home] = self._packing.read(wire, part, str(item))
        elif pack.rows is not None:
            held = self._operands[item]
            wire = self._packing.wire(f"{item} to send", count_rows(pack.rows), part)
            source, target = held.wire, wire
            if source is None:  # a single tensor of the call
                source = held.fields[names[0]]
                rows = count_rows(pack.rows)
                target = self._packing.fields_at(wire, 0, rows, part, str(item))[names[0]]
            self._code.copy_pieces(source, held_ranges(held.rows, pack.rows), target)
            self._leaving[item, pack.rows] = wire
        else:
            held = self._operands[item]
            wire = self._packing.wire(str(item), self._size(item), part)
            self._packing.write([held.fields[name] for name in names], wire, part, (item, 0))
            self._operands[item] = held._replace(wire=wire)

    def _leave(self, pack: Pack) -> None:
        """Write a partial, which moves on, as bytes."""
        item, part = pack.item, pack.item[:2]
        tensors = self._partials.taken(item)
        rows = self._size(item) if pack.rows is None else count_rows(pack.rows)
        wire = self._packing.wire(f"{item} to send", rows, part)
        ranges = pack.rows or ((0, self._size(item)),)
        if self._packing.formats[part].in_place or len(ranges) == 1:
            for mine, here in packed_ranges(ranges):
                pieces = [self._code.rows(x, mine) for x in tensors]
                self._packing.write(pieces, self._code.rows(wire, here), part, (item, self._rank))
        else:
            joined: list[Ref] = []
            for x in tensors:
                shape = rows, *self._code.shape(x)[1:]
                joined.append(self._code.new(f"{item} joined", shape, self._code.dtype(x)))
                self._code.copy_pieces(x, ranges, joined[-1])
            self._packing.write(joined, wire, part, (item, self._rank))
        self._leaving[item, pack.rows] = wire

    def _launch(self, launch: Launch) -> None:
        if self._by_head:
            self._launch_heads(launch)
            return
        handle, step, lane, sends, recvs, team = launch
        arrivals = tuple(self._arrival_number(handle, index) for index in range(len(recvs)))
        if team is not None:
            self._launch_team(launch, arrivals)
            return
        leaving = tuple(Bytes(self._sent(one), one.dst, step, one.item) for one in sends)
        arriving = tuple(
            Bytes(self._room(handle, index, one), one.src, step, one.item)
            for index, one in enumerate(recvs)
        )
        apart: tuple[tuple[int, ...], ...] = ()
        if self._traits.receives_ahead and len(recvs) > 1:
            apart = self._apart(arriving)
        self._code.add(Post(handle, lane, leaving, arriving, arrivals, apart))

    def _apart(self, recvs: Sequence[Bytes]) -> tuple[tuple[int, ...], ...]:
        """Receives by what is posted, and awaited, by itself: small ones of a rank together."""
        by_peer: dict[int, list[int]] = {}
        for index, received in enumerate(recvs):
            by_peer.setdefault(received.peer, []).append(index)
        groups: list[tuple[int, ...]] = []
        for indices in by_peer.values():
            sizes = [prod(self._code.shape(recvs[index].ref)) for index in indices]
            if shares_message(sizes):
                groups.append(tuple(indices))
            else:
                groups += [(index,) for index in indices]
        return tuple(groups)

    def _arrival_number(self, handle: int, index: int) -> int:
        return self._arrival_numbers.setdefault((handle, index), len(self._arrival_numbers))

    def _sent(self, transfer: Transfer) -> Ref:
        """The bytes of a transfer, packed before."""
        item, _, _, rows = transfer
        if item.role is Role.PARTIAL:
            return self._leaving[item, rows]
        if item.role is Role.RESULT:
            return self._packed[item]
        if (item, rows) in self._leaving:
            return self._leaving[item, rows]
        held = self._operands[item]
        wire = held.wire
        if wire is None:  # a single tensor of the call, whose rows lie side by side
            (field,) = self._packing.formats[item[:2]].fields
            wire = held.fields[field.name]
            self._contiguous[self._code.tensors[wire.tensor].name] = None
        if rows is None:
            return wire
        (only,) = held_ranges(held.rows, rows)
        return wire if only == (0, count_rows(held.rows)) else self._code.rows(wire, only)

    def _room(self, handle: int, index: int, transfer: Transfer) -> Ref:
        """Return the bytes into which a transfer is received."""
        item, _, _, rows = transfer
        num_rows = count(rows, self._size(item))
        arena = self._arena_of.get(item)
        if arena is not None and arena.wire is not None:
            start = arena.starts[item]
            room = self._code.rows(arena.wire, (start, start + num_rows))
        else:
            keeps = self._keeps and item.role is Role.OPERAND
            home = Home.KEPT if keeps else Home.WORKSPACE
            name = f"{item} from {transfer.src}"
            room = self._packing.wire(name, num_rows, item[:2], home)
            if keeps:
                self._keep(room, [(item, 0)], arena=False)
        self._rooms[handle, index] = room
        return room

    def _launch_team(self, launch: Launch, arrivals: tuple[int, ...]) -> None:
        """One buffer each way, the bytes for and from each rank of the team in turn."""
        handle, step, _, sends, recvs, team = launch
        assert team is not None
        sent = [(one, self._sent(one)) for one in sends]
        rooms = [(one, self._room(handle, index, one)) for index, one in enumerate(recvs)]
        leaving, parts = self._in_turn("leaving", [(one.dst, ref) for one, ref in sent])
        arriving, places = self._in_turn("arriving", [(one.src, ref) for one, ref in rooms])
        for source, target in parts:
            self._code.add(Copy(source, target))
        self._taken_in[handle] = [(place, room) for room, place in places]
        sizes = (
            self._bytes_by_rank([(one.dst, ref) for one, ref in sent], team.ranks),
            self._bytes_by_rank([(one.src, ref) for one, ref in rooms], team.ranks),
        )
        most = sum(self._exchange_bytes[part] for part in team.parts)
        named = recvs or sends
        label = f"step {step}, {named[0].item}" if named else "an exchange of a team"
        whole = TeamBytes(leaving, arriving, sizes, team, most, label)
        self._code.add(Post(handle, 0, (), (), arrivals, (), whole))

    def _in_turn(
        self, name: str, messages: Sequence[tuple[int, Ref]]
    ) -> tuple[Ref, list[tuple[Ref, Ref]]]:
        """A buffer for messages in order of their peers, and the place of each in it."""
        total = sum(self._code.num_bytes(ref) for _, ref in messages)
        whole = self._code.new(name, (total, 1, 1), "uint8")
        buffer, offset = self._code.tensors[whole.tensor].buffer, 0
        places: list[tuple[Ref, Ref]] = []
        for _, ref in sorted(messages, key=lambda message: message[0]):
            rows, batch = self._code.shape(ref)[:2]
            row_bytes = self._code.num_bytes(ref) // max(1, rows * batch)
            strides = batch * row_bytes, row_bytes, 1
            shape = rows, batch, row_bytes
            place = self._code.tensor(TensorSpec(name, buffer, offset, shape, strides, "uint8"))
            places.append((ref, place))
            offset += self._code.num_bytes(ref)
        return whole, places

    def _bytes_by_rank(self, messages: Sequence[tuple[int, Ref]], ranks: range) -> tuple[int, ...]:
        sizes = dict.fromkeys(ranks, 0)
        for peer, ref in messages:
            sizes[peer] += self._code.num_bytes(ref)
        return tuple(sizes.values())

    def _await(self, arrived: Await) -> None:
        handle, _, transfers, indices, left = arrived
        numbers = tuple(self._arrival_numbers[handle, index] for index in indices)
        if self._by_head:
            self._await_heads(handle, numbers, transfers[0].item.role)
            return
        self._left = {*left}
        rooms = [self._rooms[handle, index] for index in indices]
        self._code.add(Wait(handle, numbers, tuple(rooms)))
        for place, room in self._taken_in.pop(handle, ()):
            self._code.add(Copy(place, room))
        for transfer, room in zip(transfers, rooms, strict=True):
            item, part = transfer.item, transfer.item[:2]
            if item.role is Role.RESULT:
                home = partial(item.side, item.shard, item.heads)
                self._packed[item] = room
                self._results[home] = self._packing.read(room, part, str(item))
                continue
            self._arriving_wires[transfer] = room
            if self._packing.formats[part].in_place:
                fields = self._packing.fields_at(
                    room, 0, self._code.shape(room)[0], part, str(item)
                )
                self._take_in(transfer, fields)

    def _unpack(self, transfer: Transfer) -> None:
        room, part = self._arriving_wires[transfer], transfer.item[:2]
        self._take_in(transfer, self._packing.read(room, part, str(transfer.item)))

    def _take_in(self, transfer: Transfer, fields: dict[str, Ref]) -> None:
        item, _, _, rows = transfer
        if item.role is Role.PARTIAL:
            if transfer in self._left:
                self._partials.put(item, tuple(fields.values()))
            else:
                self._arrived[transfer] = tuple(fields.values())
            return
        before = self._operands.get(item)
        arena = self._arena_of.get(item)
        place = None if arena is None else (arena, arena.starts[item])
        known = {} if before is None else before.fields
        held = ((0, self._size(item)),) if rows is None else rows
        wire = self._arriving_wires[transfer]
        self._operands[item] = Held(held, {**known, **fields}, wire, place)

    # Tiles

    def _attend_tile(self, tile: Tile) -> None:
        heads = tile.heads
        if self._call.asks:
            item = partial(Side.Q, tile.q[0], heads)
            self._partials.put(item, self._partials.new(item, Home.MADE))
            self._code.add(Ask(self._partials.made(item)))
            return
        if self._by_head:
            tile = Tile((0,), (0,), heads)
        q = [self._operand(operand(Side.Q, shard, heads)) for shard in tile.q]
        kv = [self._operand(operand(Side.KV, shard, heads)) for shard in tile.kv]
        held = tuple(block.rows for block in q), tuple(block.rows for block in kv)
        if (tile, held) not in self._known_calls:
            self._known_calls[tile, held] = tuple(self._table.calls(tile, held))
        for parts in self._known_calls[tile, held]:
            self._attend(parts, q, kv)

    def _operand(self, item: Item) -> Held:
        held = self._operands[item]
        if item in self._saved_fields:
            fields = {**self._saved_fields.pop(item)(), **held.fields}
            held = self._operands[item] = held._replace(fields=fields)
        return held

    def _attend(self, parts: CallParts[np.ndarray], q: Sequence[Held], kv: Sequence[Held]) -> None:
        """One kernel call: gather what it reads, run it, and merge what it could not add itself."""
        call, q_parts, k_parts, q_heads, kv_heads = parts
        backward, latent = self._payload.backward, self._payload.wires.latent is not None
        names = ("q", "dout", "lse", "delta") if backward else ("q",)
        queries, *rest = self._gathered(q, q_parts, names, q_heads)
        placed = self._call.places or self._payload.whole_rows
        places = self._places(parts) if placed or latent else None
        if latent:
            keys = self._expanded(parts, kv, places)
        else:
            keys = tuple(self._gathered(kv, k_parts, ("k", "v"), kv_heads))
        rows = self._code.shape(queries)[0], self._code.shape(keys[0])[0]
        results: list[Result] = []
        after: list[After] = []
        for side, part, heads in ((Side.Q, q_parts, q_heads), (Side.KV, k_parts, kv_heads)):
            if self._payload.results(side):
                pulled = keys if latent and side is Side.KV else ()
                result, merge = self._partials.result(side, part, heads, rows[side], pulled)
                results.append(result)
                after.append(merge)
        kernel_places = places if placed else None
        self._code.add(Attend(call, (queries, *keys, *rest), tuple(results), kernel_places))
        for add in after:
            add()

    def _gathered(
        self,
        blocks: Sequence[Held],
        parts: Sequence[RowSelection[np.ndarray]],
        names: Sequence[str],
        heads: slice | None,
    ) -> list[Ref]:
        """The rows that a call reads, of several tensors: in place where they lie side by side."""
        first = blocks[parts[0].shard]
        beside = self._side_by_side(blocks, parts)
        if len(parts) == 1:
            found = [self._code.picked(first.fields[name], parts[0].block) for name in names]
        elif beside is not None and first.arena is not None:
            fields = first.arena[0].fields
            found = [self._code.rows(fields[name], beside) for name in names]
        else:
            found = [self._joined(blocks, parts, name) for name in names]
        return found if heads is None else [self._code.rows(x, None, heads) for x in found]

    def _side_by_side(
        self, blocks: Sequence[Held], parts: Sequence[RowSelection[np.ndarray]]
    ) -> tuple[int, int] | None:
        """The rows of their arena that several parts are; None if not in one, or not in order."""
        place = blocks[parts[0].shard].arena
        if place is None or len(parts) == 1:
            return None
        starts = [
            None if block.arena is None or block.arena[0] is not place[0] else block.arena[1]
            for block in blocks
        ]
        return span(parts, [count_rows(block.rows) for block in blocks], starts)

    def _joined(
        self, blocks: Sequence[Held], parts: Sequence[RowSelection[np.ndarray]], name: str
    ) -> Ref:
        """Rows of several shards copied together, in the order of the call."""
        sources = [blocks[part.shard].fields[name] for part in parts]
        counts = [
            num_rows(part.block, self._code.shape(x)[0])
            for part, x in zip(parts, sources, strict=True)
        ]
        shape = sum(counts), *self._code.shape(sources[0])[1:]
        target = self._code.new(f"rows of {name}", shape, self._code.dtype(sources[0]))
        offset = 0
        for part, source, rows in zip(parts, sources, counts, strict=True):
            if isinstance(part.call, np.ndarray):
                picked = self._code.picked(source, part.block)
                self._code.add(Copy(picked, target, Table.of(part.call), scatters=True))
                continue
            place = (offset, offset + rows) if part.call is None else part.call
            here = self._code.rows(target, place)
            if isinstance(part.block, np.ndarray):
                self._code.add(Copy(source, here, Table.of(part.block)))
            else:
                self._code.add(Copy(self._code.picked(source, part.block), here))
            offset += rows
        return target

    def _places(self, parts: CallParts[np.ndarray]) -> RowTables:
        """Return the positions of a call's rows, keys and heads in the whole attention."""
        q, k = (
            self._positions(layout, of)
            for layout, of in zip(self._tile_layouts, (parts.q, parts.k), strict=True)
        )
        first = self._groups.slice(Side.Q, parts.q[0].item.heads).start
        first += parts.q_heads.start if parts.q_heads else 0
        heads = self._groups.slice(Side.KV, parts.k[0].item.heads)
        if parts.kv_heads is not None:
            start = heads.start + parts.kv_heads.start
            heads = slice(start, start + parts.kv_heads.stop - parts.kv_heads.start)
        return RowTables(Table.of(q), Table.of(k), first, (heads.start, heads.stop))

    def _positions(self, layout: Layout, parts: Sequence[RowSelection[np.ndarray]]) -> np.ndarray:
        """Global positions of a call's rows of one side, in the order of the call."""
        shards = [layout.rows(part.item.shard) for part in parts]
        rows = [x if p.local is None else x[p.local] for x, p in zip(shards, parts, strict=True)]
        positions = np.concatenate(rows)
        if len(parts) > 1:
            for x, part in zip(rows, parts, strict=True):
                positions[part.call] = x
        return positions

    def _expanded(
        self, parts: CallParts[np.ndarray], kv: Sequence[Held], places: RowTables | None
    ) -> tuple[Ref, ...]:
        """A call's keys and values, made of its latents."""
        assert places is not None
        (latents,) = self._gathered(kv, parts.k, ("latent",), None)
        payload, rows = self._payload, self._code.shape(latents)[0]
        heads = places.kv_heads[1] - places.kv_heads[0]
        k, v = (
            self._code.new(name, (rows, self._batch, heads, width), payload.dtype, Home.MADE)
            for name, width in (("k", payload.head_dim), ("v", payload.v_head_dim))
        )
        key = ExpandKey(places.k_positions, places.kv_heads)
        self._code.add(Expand(latents, k, v, places, key, payload.backward))
        return k, v

    # Beginning and end

    def _delta(self) -> None:
        rows, payload = sum(stop - start for _, (start, stop) in self._held[0]), self._payload
        out = self._code.given(
            "out", rows, self._groups.num_heads, payload.v_head_dim, payload.dtype
        )
        product = self._code.new("out * dout", self._code.shape(out), self._acc)
        own = self._own[Side.Q]
        self._code.add(ComputeDelta(out, own["dout"], product, own["delta"]))

    def _collect(self, side: Side) -> None:
        """Write this rank's finished partials of a side, over its shards and head groups."""
        fields = self._partials.fields_of(side)
        heads_of = self._carried.num_heads, self._carried.num_kv_heads
        rows = sum(stop - start for _, (start, stop) in self._held[side])
        results: list[Ref] = []
        for name, width in self._payload.results(side):
            dtype = self._acc if name in STATISTICS else self._payload.dtype
            results.append(self._code.given(name, rows, heads_of[side], width, dtype))
        if self._by_head:
            self._collect_heads(side, results)
            return
        held = self._held[side]
        if len(held) == self._groups.groups == 1:
            self._finish(partial(side, held[0][0]), results, fields)
            return
        for shard, at in held:
            sums: dict[int, tuple[Ref, ...]] = {}  # by first head
            for group in range(self._groups.groups):
                item, heads = partial(side, shard, group), self._carried.slice(side, group)
                values = self._final(item)
                before = sums.setdefault(heads.start, values)
                if before is not values:  # groups may share a KV head, whose gradients sum
                    self._code.add(Merge(values, before, by_lse=False))
            width = self._carried.slice(side, 0).stop
            for first, values in sums.items():
                for result, value in zip(results, values, strict=True):
                    target = self._code.rows(result, at, slice(first, first + width))
                    self._code.add(Copy(value, target))

    def _final(self, item: Item) -> tuple[Ref, ...]:
        """Return the complete result that a partial of this rank has become."""
        result = self._results.get(item)
        return self._partials.made(item) if result is None else tuple(result.values())

    def _finish(
        self,
        item: Item,
        results: Sequence[Ref],
        fields: Sequence[tuple[str, tuple[int, ...], float]],
    ) -> None:
        if item not in self._results and item not in self._partials:
            for result, (_, _, value) in zip(results, fields, strict=True):
                self._code.add(Fill(result, value))
            return
        for result, value in zip(results, self._final(item), strict=True):
            self._code.add(Copy(value, result))

    # Exchanges of heads by whole buffers

    def _head_fields(
        self, buffer: int, exchange: HeadExchange, *, whole: bool
    ) -> dict[Side, dict[str, Ref]]:
        """The tensors of an exchange's buffer: of all rows, or apart for each rank."""
        found: dict[Side, dict[str, Ref]] = {}
        for field in exchange.fields:
            shape, strides = field.whole if whole else field.by_rank
            start = field.start * item_bytes(field.dtype)
            spec = TensorSpec(f"heads of {field.name}", buffer, start, shape, strides, field.dtype)
            found.setdefault(field.side, {})[field.name] = self._code.tensor(spec)
        return found

    def _pack_heads(self, role: Role) -> None:
        exchange = self._by_head[role]
        leaving = self._code.new("heads to send", (sum(exchange.sizes[0]), 1, 1), "uint8")
        buffer = self._code.tensors[leaving.tensor].buffer
        first = role is Role.OPERAND
        for side, places in self._head_fields(buffer, exchange, whole=not first).items():
            if first:
                sources = tuple(self._own[side][name] for name in places)
                shared = exchange.shared[side]
            else:
                sources, shared = self._partials.made(partial(side, 0, self._rank)), None
            heads = None if shared is None else Table.of(shared)
            for source, target in zip(sources, places.values(), strict=True):
                self._code.add(Copy(source, target, heads=heads))
        self._leaving_heads = leaving

    def _launch_heads(self, launch: Launch) -> None:
        handle, step, _, sends, recvs, team = launch
        assert team is not None and self._leaving_heads is not None
        role = (sends or recvs)[0].item.role
        exchange = self._by_head[role]
        keeps = self._keeps and role is Role.OPERAND
        home = Home.KEPT if keeps else Home.WORKSPACE
        arriving = self._code.new("arriving heads", (sum(exchange.sizes[1]), 1, 1), "uint8", home)
        numbers = tuple(self._arrival_number(handle, index) for index in range(len(recvs)))
        self._arriving_heads[role] = arriving
        if keeps:
            rows = [(one.item, 0, ((0, self._size(one.item)),)) for one in recvs]
            buffer = self._code.tensors[arriving.tensor].buffer
            self._kept.append(KeptBuffer(buffer, tuple(rows), arena=True))
        most = sum(self._exchange_bytes[part] for part in team.parts)
        label = f"step {step}, {(recvs or sends)[0].item}"
        sizes = tuple(exchange.sizes[0]), tuple(exchange.sizes[1])
        whole = TeamBytes(self._leaving_heads, arriving, sizes, team, most, label)
        self._code.add(Post(handle, 0, (), (), numbers, (), whole))

    def _await_heads(self, handle: int, numbers: tuple[int, ...], role: Role) -> None:
        arriving = self._arriving_heads[role]
        self._code.add(Wait(handle, numbers, (arriving,)))
        if role is not Role.OPERAND or handle in self._heads_here:
            return
        self._heads_here.add(handle)
        buffer = self._code.tensors[arriving.tensor].buffer
        for side, fields in self._head_fields(buffer, self._by_head[role], whole=True).items():
            item, rows = operand(side, 0, self._rank), self._tile_layouts[side].size(0)
            before = self._operands.get(item)
            known = {} if before is None else before.fields
            self._operands[item] = Held(((0, rows),), {**known, **fields})

    def _collect_heads(self, side: Side, results: Sequence[Ref]) -> None:
        """Read what all ranks computed of this rank's rows."""
        exchange = self._by_head[Role.PARTIAL]
        buffer = self._code.tensors[self._arriving_heads[Role.PARTIAL].tensor].buffer
        fields = self._head_fields(buffer, exchange, whole=False)[side]
        for source, result in zip(fields.values(), results, strict=True):
            if exchange.shared[side] is None:
                self._code.add(Copy(source, result))
            else:  # ranks of one KV head, whose gradients sum
                self._code.add(SumHeads(source, result))


def shares_message(num_bytes: Sequence[int]) -> bool:
    """Return whether tensors of these sizes, from one rank to another in one launch, share a
    message.

    Both ends decide it from the same numbers.
    """
    return len(num_bytes) > 1 and sum(num_bytes) <= SMALL_BYTES

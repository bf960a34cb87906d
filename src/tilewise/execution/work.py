"""The values of one rank during a pass: operands, partials, what is sent and received."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tilewise.compiler.liveness import Lifetimes
from tilewise.compiler.program import Launch
from tilewise.execution.allocator import Allocator, FreshAllocator, Scratch
from tilewise.execution.expansion import Expanded, Expansion
from tilewise.execution.gather import (
    Binder,
    BoundCall,
    Index,
    PartialGroups,
    Spans,
    TensorPart,
    Tensors,
    gather,
    pick,
)
from tilewise.execution.head_exchange import HeadExchange
from tilewise.execution.launching import Exchange
from tilewise.execution.packing import Arena, PackedRows, Packing, take
from tilewise.kernels.protocol import Kernel, deliver
from tilewise.kernels.scores import Scores
from tilewise.layouts.layout import Layout
from tilewise.plan.builder import partial
from tilewise.plan.ir import Item, Role, Rows, Side, Tile, Transfer
from tilewise.plan.payload import Payload
from tilewise.plan.row_ranges import count_rows


@dataclass(frozen=True)
class Frame:
    """One pass of one attention call, beside its tensors.

    Attributes:
        layouts: of the query and the KV shards.
        batch: sequences side by side, all of the same layout and mask.
        keep: received operands stay for the next pass.
        packing: how each side's and role's tensors lie in a row of bytes.
        expansion: of latents, if k and v are made of some.
        allocator: of the pass's buffers.
        exchanges: by a launch's handle, those that are packed as a whole.
        spans: what gather remembers, of the binder's calls in this pass.
    """

    layouts: tuple[Layout, Layout]
    binder: Binder
    kernel: Kernel
    scores: Scores
    batch: int
    dtype: torch.dtype
    device: torch.device
    keep: bool
    packing: Mapping[tuple[Side, Role], Packing]
    expansion: Expansion | None
    allocator: Allocator
    exchanges: Mapping[int, HeadExchange]
    spans: Spans


@lru_cache(maxsize=64)
def packings(payload: Payload) -> Mapping[tuple[Side, Role], Packing]:
    """How every kind of item is packed in a pass."""
    return {
        (side, role): Packing(payload.row_format(side, role), payload.heads(side))
        for side in Side
        for role in Role
    }


class PassWork(ABC):
    """The executor's work; see launching.RankState."""

    def __init__(
        self,
        frame: Frame,
        payload: Payload,
        own: dict[Item, PackedRows],
        arenas: Sequence[Arena],
        lifetimes: Lifetimes,
        named: Sequence[Mapping[str, Tensor]] = (),
    ):
        self.frame, self.payload, self._packing = frame, payload, frame.packing
        self._operand_packing = [frame.packing[side, Role.OPERAND] for side in Side]
        self._allocator, self._sent = frame.allocator, frame.allocator.sent
        self.launched, self.left = frame.allocator.launched, frame.allocator.left
        # What stays for the next pass is no buffer of this one.
        self._operand_lender = FreshAllocator(frame.device) if frame.keep else frame.allocator
        self._scratch = Scratch(frame.allocator)
        self._expansion = frame.expansion
        self._kernel, self._scale = frame.kernel, frame.scores.scale
        self._asks = bool(frame.scores.needs)
        self._sizes = frame.layouts[0].sizes, frame.layouts[1].sizes
        self.operands, self._named = own, named
        self.arrived: dict[bool, Tensor] = {}  # by whether it is the first exchange
        self._arenas = arenas
        self.partials: dict[Item, Tensors] = {}
        self.results: dict[Item, Tensor] = {}
        self._arena_of = {item: arena for arena in arenas for item in arena.starts}
        self._sends = dict(lifetimes.sends)  # of own operands, still to come
        self._with_free = lifetimes.with_free
        self._totals = PartialGroups(self._sizes, arenas)
        if not frame.exchanges:
            for item in own.keys() & self._arena_of.keys():
                self.operands[item] = self._moved_in(item, own[item])

    def exchange(self, launch: Launch) -> Exchange | None:
        whole = self.frame.exchanges.get(launch.handle)
        if whole is None:
            return None
        leaving, arriving = whole.buffers(self.frame.batch)
        if whole.is_first:
            whole.scatter(self._named, leaving)
        else:
            for side, fields in whole.fields(leaving):
                sums = self._totals.whole(self._arenas[side], self._blank)
                for place, x in zip(fields.values(), sums, strict=True):
                    place.copy_(x)
        sizes = whole.sizes(self.frame.batch)
        return Exchange(leaving, arriving, sizes, lambda: self._take_in_heads(whole, arriving))

    def _take_in_heads(self, whole: HeadExchange, arrived: Tensor) -> None:
        self.arrived[whole.is_first] = arrived
        if whole.is_first:
            for side, fields in whole.fields(arrived):
                self._arenas[side].fields.update(fields)

    def pack_send(self, transfer: Transfer) -> Tensor:
        item, rank, _, rows = transfer
        if item.role is Role.OPERAND:
            return self._operand_wire(item, rows)
        allocator, packing = self._allocator, self._packing[item.side, item.role]
        source = partial(item.side, item.shard, item.heads)
        if item.role is Role.RESULT:
            wire = self.results.get(item)
            if wire is None:
                tensors = self._filled(source)
                wire = self.results[item] = packing.pack(tensors, allocator, item, rank)
            self._sent(wire)
            return wire
        tensors = self._filled(source)
        self.partials.pop(source, None)
        self._totals.leave(source)
        cut = [take(x, self._whole(item), rows, allocator) for x in tensors]
        wire = packing.pack(cut, allocator, item, rank)
        self._sent(wire)
        for x in (*tensors, *cut, wire):
            allocator.give(x)
        return wire

    def recv_buffer(self, transfer: Transfer) -> Tensor:
        item, _, _, rows = transfer
        num_rows = self._sizes[item.side][item.shard] if rows is None else count_rows(rows)
        arena = self._arena_of.get(item) if self._arena_of else None
        if arena is not None and arena.wire is not None:
            return arena.wire[arena.starts[item] : arena.starts[item] + num_rows]
        shape = self._packing[item.side, item.role].row_shape
        allocator = self._operand_lender if item.role is Role.OPERAND else self._allocator
        return allocator.take((num_rows, self.frame.batch, *shape), torch.uint8)

    def on_receive(self, transfer: Transfer, wire: Tensor) -> None:
        item, _, _, rows = transfer
        if item.role is Role.OPERAND:
            fields = self._operand_packing[item.side].unpack(wire, self._allocator)
            before = self.operands.get(item)  # gathered in forward
            if before is not None:
                fields = {**before.fields, **fields}
            if rows is None:
                rows = ((0, self._sizes[item.side][item.shard]),)
            place = self._place(item) if self._arena_of else None
            self.operands[item] = PackedRows(rows, fields, wire, place)
        elif item.role is Role.PARTIAL:
            packing = self._packing[item.side, item.role]
            values = packing.unpack(wire, self._allocator)
            self._merge_arrived(item, rows, tuple(values.values()))
            self._give(wire, packing, values)
        else:
            self.results[item] = wire

    def _operand_wire(self, item: Item, rows: Rows | None) -> Tensor:
        block = self.operands[item]
        wire = block.wire
        if wire is None:
            packing = self._packing[item.side, item.role]
            fields = [block.fields[name] for name in packing.names]
            wire = packing.pack(fields, self._allocator, item)
            self.operands[item] = block._replace(wire=wire)
        allocator, sends = self._allocator, self._sends
        part = wire
        if rows is not None and rows != block.rows:
            part = take(wire, block.rows, rows, allocator)
        self._sent(part)
        if part is not wire and part.untyped_storage() is not wire.untyped_storage():
            allocator.give(part)  # a copy
        if sends and item in sends:
            sends[item] -= 1
            if not sends[item]:
                del sends[item]
                if block.arena is None:
                    allocator.give(wire)
        return part

    def _merge_arrived(self, item: Item, rows: Rows | None, values: Tensors) -> None:
        if rows is None:
            self._add(item, None, values)
            return
        offset = 0
        for start, stop in rows:
            here = slice(offset, offset + stop - start)
            self._add(item, slice(start, stop), tuple(x[here] for x in values))
            offset = here.stop

    def free(self, item: Item) -> None:
        if self.frame.keep:
            return
        _, fields, wire, _ = self.operands.pop(item)
        if wire is not None:
            self._give(wire, self._operand_packing[item.side], fields)
        for own in self._with_free.get(item, ()) if self._with_free else ():
            wire = self.operands[own].wire
            if wire is not None:
                self._allocator.give(wire)

    def _give(self, wire: Tensor, packing: Packing, fields: Mapping[str, Tensor]) -> None:
        """Give what has arrived back, and what it was decoded into."""
        self._allocator.give(wire)
        for name in packing.encoded:
            self._allocator.give(fields[name])

    def run(self, tile: Tile) -> None:
        bound = self.frame.binder.tile(tile)
        q = [self.operands[item] for item in bound.q]
        kv = [self.operands[item] for item in bound.kv]
        held = tuple([block.rows for block in q]), tuple([block.rows for block in kv])
        for call in self.frame.binder.calls(bound, held):
            self._call(call, q, kv)
            if self._scratch.held:
                self._scratch.clear()

    def final(self, item: Item) -> Tensors:
        """What a partial of this rank came to in the end."""
        result = self.results.get(item._replace(role=Role.RESULT))
        if result is None:
            return self._filled(item)
        packing = self._packing[item.side, Role.RESULT]
        return tuple(packing.unpack(result, self._allocator).values())

    def _scores(self, bound: BoundCall) -> Scores:
        """What a kernel is told of a call that asks for more than a scale."""
        scores = self.frame.scores
        if not scores.dropout_p:
            return scores
        return scores._replace(places=self.frame.binder.places(bound))

    def _expanded(self, bound: BoundCall, kv: list[PackedRows], learns: bool) -> Expanded:
        """A call's keys and values, made of its latents."""
        expansion, scratch = self._expansion, self._scratch
        assert expansion is not None
        rows = gather(kv, bound.k, "latent", None, scratch, self.frame.spans)
        heads = self.frame.binder.kv_heads(bound)
        if rows.is_meta:
            shape, latent = (*rows.shape[:2], heads.stop - heads.start), expansion.latent
            widths = latent.head_dim, latent.v_head_dim
            k, v = (scratch.take((*shape, width), rows.dtype) for width in widths)
            return Expanded(k, v, rows, (), bound)
        positions = self.frame.binder.places(bound).k_positions
        return expansion.expand(bound, rows, positions, heads, learns)

    @abstractmethod
    def _call(self, bound: BoundCall, q: list[PackedRows], kv: list[PackedRows]) -> None:
        """Compute one kernel call and add its results to the partials."""

    @abstractmethod
    def _blanks(self, side: Side) -> Sequence[tuple[float, *tuple[int, ...]]]:
        """Per tensor of a partial: what it is at first, and its width if it has one."""

    @abstractmethod
    def _merge(self, partials: Tensors, index: Index, values: Tensors) -> None:
        """Add values to rows of a partial, in place."""

    def _target(self, parts: Sequence[TensorPart], heads: slice | None) -> Tensors | None:
        """Where a kernel itself can add a call's results: neighbouring rows of partials, in order.

        None as well where the results may become the partial.
        """
        if heads is not None:
            return None
        if len(parts) != 1:
            return self._beside(parts)
        _, item, in_call, _, local = parts[0]
        if in_call is not None or isinstance(local, Tensor):
            return None
        partials = self.partials.get(item)
        if partials is None:
            if local is None and self._allocator.adopts and item not in self._totals:
                return None
            partials = self.partials[item] = self._empty(item)
        return partials if local is None else tuple([x[local] for x in partials])

    def _beside(self, parts: Sequence[TensorPart]) -> Tensors | None:
        """Partials of several shards that lie side by side as their operands do."""
        place = self._totals.beside(parts)
        if place is None or (self._allocator.adopts and self._totals.untouched(place)):
            return None
        for part in parts:
            if part.item not in self.partials:
                self.partials[part.item] = self._totals.take(part.item, self._blank)
        return self._totals.between(place)

    def _adopted(self, parts: Sequence[TensorPart], values: Tensors, heads: slice | None) -> bool:
        """Whether a call's results have become the partials of all shards that lie side by side."""
        if len(parts) == 1 or heads is not None or not self._allocator.adopts:
            return False
        place = self._totals.beside(parts)
        if place is None or not self._totals.untouched(place):
            return False
        lasting, dtype = self._allocator.lasting, self.frame.dtype
        self._totals.adopt(place, tuple([lasting(x, dtype) for x in values]))
        return True

    def _add(self, item: Item, index: Index, values: Tensors) -> None:
        """Add values, which nobody else uses, to rows of a partial."""
        partials = self.partials.get(item)
        if partials is None:
            if index is None and item not in self._totals:
                lasting, dtype = self._allocator.lasting, self.frame.dtype
                self.partials[item] = tuple([lasting(x, dtype) for x in values])
                return
            partials = self.partials[item] = self._empty(item)
        self._merge(partials, index, values)

    def _add_part(self, part: TensorPart, values: Tensors, heads: slice | None) -> None:
        """Add a call's results to the partial that one part of its rows belongs to."""
        if part.call is not None:
            values = tuple([pick(x, part.call, self._scratch) for x in values])
        if heads is None:
            self._add(part.item, part.local, values)
            return
        if part.item not in self.partials:
            self.partials[part.item] = self._empty(part.item)
        self._merge(tuple([x[:, :, heads] for x in self.partials[part.item]]), part.local, values)

    def _filled(self, item: Item) -> Tensors:
        return self.partials.get(item) or self._empty(item)

    def _empty(self, item: Item) -> Tensors:
        """A partial that nothing was added to."""
        if item in self._totals:
            return self._totals.take(item, self._blank)
        return self._blank(item.side, (self._size(item),))

    def _blank(self, side: Side, rows: Sequence[int]) -> Tensors:
        """Partials of so many rows each, one after the other, that nothing was added to."""
        frame, shape = self.frame, (sum(rows), self.frame.batch, self.payload.heads(side))
        return tuple(
            [
                self._allocator.take_parts((*shape, *width), frame.dtype, rows).fill_(value)
                for value, *width in self._blanks(side)
            ]
        )

    def _size(self, item: Item) -> int:
        return self._sizes[item.side][item.shard]

    def _whole(self, item: Item) -> Rows:
        return ((0, self._size(item)),)

    def _place(self, item: Item) -> tuple[Arena, int] | None:
        arena = self._arena_of.get(item)
        return None if arena is None else (arena, arena.starts[item])

    def _moved_in(self, item: Item, block: PackedRows) -> PackedRows:
        """An operand that is here from the start, its rows copied to their place in the arena."""
        arena = self._arena_of[item]
        place = arena, arena.starts[item]
        packing = self._packing[item.side, item.role]
        if arena.wire is None or not packing.names or packing.names[0] not in block.fields:
            return block._replace(arena=place)
        wire = arena.wire[place[1] : place[1] + self._size(item)]
        moved = packing.unpack(wire)
        if wire.numel():
            for name, x in moved.items():
                x.copy_(block.fields[name])
        return PackedRows(block.rows, {**block.fields, **moved}, wire, place)


class Forward(PassWork):
    """Partials of queries are (out, lse), merged by lse, and the largest score; KV has none."""

    def _call(self, bound: BoundCall, q: list[PackedRows], kv: list[PackedRows]) -> None:
        call, q_parts, k_parts, q_heads, kv_heads = bound
        ways = self._scratch, self.frame.spans
        queries = gather(q, q_parts, "q", q_heads, *ways)
        if self._expansion is None:
            k = gather(kv, k_parts, "k", kv_heads, *ways)
            v = gather(kv, k_parts, "v", kv_heads, *ways)
        else:
            k, v, *_ = self._expanded(bound, kv, learns=False)
        into, scale = self._target(q_parts, q_heads), self._scale
        if self._asks:
            told = self._scores(bound)
            values = self._kernel.forward(queries, k, v, call, scale, into, told)
        else:
            values = self._kernel.forward(queries, k, v, call, scale, into)
        if into is None and not self._adopted(q_parts, values, q_heads):
            for part in q_parts:
                self._add_part(part, values, q_heads)

    def _blanks(self, side: Side) -> Sequence[tuple[float, *tuple[int, ...]]]:
        statistics = ((-torch.inf,),) * (1 + self.payload.max_logit)
        return (0.0, self.payload.v_head_dim), *statistics

    def _merge(self, partials: Tensors, index: Index, values: Tensors) -> None:
        if index is None:
            deliver(values, partials)
            return
        rows = tuple([pick(x, index, self._scratch) for x in partials])
        deliver(values, rows)
        if isinstance(index, Tensor):  # an index made copies
            for total, merged in zip(partials, rows, strict=True):
                total.index_copy_(0, index, merged)


class Backward(PassWork):
    """Partials are sums: dq of queries, (dk, dv) of keys and values."""

    def _call(self, bound: BoundCall, q: list[PackedRows], kv: list[PackedRows]) -> None:
        call, q_parts, k_parts, q_heads, kv_heads = bound
        ways = self._scratch, self.frame.spans
        queries, dout, lse, delta = (
            gather(q, q_parts, name, q_heads, *ways) for name in ("q", "dout", "lse", "delta")
        )
        expanded = second = None
        if self._expansion is None:
            k = gather(kv, k_parts, "k", kv_heads, *ways)
            v = gather(kv, k_parts, "v", kv_heads, *ways)
            second = self._target(k_parts, kv_heads)
        else:
            k, v, *_ = expanded = self._expanded(bound, kv, learns=True)
        operands = queries, k, v, dout, lse, delta, call, self._scale
        first, into = self._target(q_parts, q_heads), None
        if (first and second) or not self._allocator.adopts:
            (dq,), (dk, dv) = first or self._zeros(queries), second or self._zeros(k, v)
            into = dq, dk, dv
        told = (self._scores(bound),) if self._asks else ()
        dq, dk, dv = self._kernel.backward(*operands, into, *told)
        # With into, a side that has a target is done; another's results were computed aside.
        if (into is None or first is None) and not self._adopted(q_parts, (dq,), q_heads):
            for part in q_parts:
                self._add_part(part, (dq,), q_heads)
        if expanded is not None:
            dlatent = self._pulled(expanded, dk, dv)
            for part in k_parts:
                self._add_part(part, (dlatent,), None)
        elif (into is None or second is None) and not self._adopted(k_parts, (dk, dv), kv_heads):
            for part in k_parts:
                self._add_part(part, (dk, dv), kv_heads)

    def _pulled(self, expanded: Expanded, dk: Tensor, dv: Tensor) -> Tensor:
        """The gradient of a call's latents."""
        rows = expanded.leaf
        if rows.is_meta:
            return self._scratch.take(rows.shape, rows.dtype)
        assert self._expansion is not None
        return self._expansion.pull(expanded, dk, dv)

    def _zeros(self, *like: Tensor) -> Tensors:
        """Where a kernel adds results that do not belong side by side."""
        take, dtype = self._scratch.take, self.frame.dtype
        return tuple([take(x.shape, dtype).zero_() for x in like])

    def _blanks(self, side: Side) -> Sequence[tuple[float, *tuple[int, ...]]]:
        return [(0.0, width) for _, width in self.payload.inputs(side)]

    def _merge(self, partials: Tensors, index: Index, values: Tensors) -> None:
        if partials[0].is_meta:  # shapes without values
            return
        for total, value in zip(partials, values, strict=True):
            if total.is_meta:  # shapes without values
                continue
            if isinstance(index, Tensor):
                total.index_add_(0, index, value.to(total.dtype))
            else:
                pick(total, index, self._scratch).add_(value)

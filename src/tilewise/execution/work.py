"""The values of one rank during a pass: its operands, and the bytes that it sends and receives."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tilewise.compiler.program import Launch
from tilewise.execution.allocator import Allocator, FreshAllocator, Scratch
from tilewise.execution.arenas import Operands
from tilewise.execution.call import ResolvedCall
from tilewise.execution.expansion import Expanded
from tilewise.execution.gather import BoundCall, PlacedCall, Tensors, gather
from tilewise.execution.head_exchange import Exchange
from tilewise.execution.packing import Arena, PackedRows, Packing, take
from tilewise.execution.partials import MergedPartials, Partials, SummedPartials
from tilewise.execution.pass_run import PassRun
from tilewise.kernels.scores import Scores
from tilewise.plan.builder import partial
from tilewise.plan.ir import Item, Role, Rows, Side, Tile, Transfer
from tilewise.plan.row_ranges import count_rows


class PassWork(ABC):
    """What the executor asks for: bytes to send, room to receive, tiles computed.

    launched and left are told that what was packed last is on its way, and that it has left.

    Args:
        named: by side, this rank's tensors [rows, batch, heads(, width)] by the names of fields;
            None: a subclass has operands of its own.
        gathered: operands that an earlier pass kept.
        keep: received operands stay for the next pass.
    """

    kind: type[Partials]

    def __init__(
        self,
        run: PassRun,
        problem: ResolvedCall,
        allocator: Allocator,
        named: Sequence[Mapping[str, Tensor]] | None = None,
        gathered: Operands | None = None,
        keep: bool = False,
    ):
        self._run, self._named, self._packing = run, named, run.packing
        self.shard_bytes = run.shard_bytes
        self._allocator, self._sent = allocator, allocator.sent
        self.launched, self.left = allocator.launched, allocator.left
        # What stays for the next pass is no buffer of this one.
        self._lender = FreshAllocator(run.device) if keep else allocator
        self._frees = not keep and not run.exchanges
        self._scratch = Scratch(allocator)
        self._kernel, self._scores, self._expansion = run.kernel, problem.scores, problem.expansion
        self._scale = problem.scores.scale
        # What a kernel is told of a call, where more than a scale is asked for.
        self._told: tuple[()] | tuple[Scores] = (problem.scores,) if problem.scores.needs else ()
        self._sizes = run.layouts[0].sizes, run.layouts[1].sizes
        self._results: dict[Item, Tensor] = {}
        self._exchanged: dict[bool, Tensor] = {}  # by whether it is the first exchange
        self._sends = dict(run.lifetimes.sends)  # of own operands, still to come
        self._with_free = run.lifetimes.with_free
        self.operands: Operands = dict(gathered or {})
        arenas: list[Arena] = []
        if named is not None and not run.exchanges:
            self.operands.update(run.own.operands(named))
            arenas = run.arenas.take(self.operands, self._lender)
        self._arena_of = {item: arena for arena in arenas for item in arena.starts}
        groups = [arena.starts for arena in arenas]
        self.partials = self.kind(run, allocator, self._scratch, groups)

    def pack_send(self, transfer: Transfer) -> Tensor:
        """The bytes to send; a partial leaves its place."""
        item, rank, _, rows = transfer
        if item.role is Role.OPERAND:
            return self._operand_wire(item, rows)
        allocator, packing = self._allocator, self._packing[item.side, item.role]
        if item.role is Role.RESULT:
            wire = self._results.get(item)
            if wire is None:
                tensors = self.partials.filled(partial(item.side, item.shard, item.heads))
                wire = self._results[item] = packing.pack(tensors, allocator, item, rank)
            self._sent(wire)
            return wire
        tensors = cut = self.partials.leave(item)
        if rows is not None:
            whole = ((0, self.partials.size(item)),)
            cut = tuple([take(x, whole, rows, allocator) for x in tensors])
        wire = packing.pack(cut, allocator, item, rank)
        self._sent(wire)
        for x in (*tensors, *cut, wire):
            allocator.give(x)
        return wire

    def recv_buffer(self, transfer: Transfer) -> Tensor:
        """Where to receive."""
        item, _, _, rows = transfer
        num_rows = self._sizes[item.side][item.shard] if rows is None else count_rows(rows)
        arena = self._arena_of.get(item)
        if arena is not None and arena.wire is not None:
            return arena.wire[arena.starts[item] : arena.starts[item] + num_rows]
        shape = self._packing[item.side, item.role].row_shape
        allocator = self._lender if item.role is Role.OPERAND else self._allocator
        return allocator.take((num_rows, self._run.batch, *shape), torch.uint8)

    def on_receive(self, transfer: Transfer, wire: Tensor) -> None:
        """Take in what was received; a partial is merged."""
        item, _, _, rows = transfer
        if item.role is Role.RESULT:
            self._results[item] = wire
            return
        packing = self._packing[item.side, item.role]
        fields = packing.unpack(wire, self._allocator)
        if item.role is Role.PARTIAL:
            self.partials.merge_arrived(item, rows, tuple(fields.values()))
            self._give(wire, packing, fields)
            return
        before = self.operands.get(item)  # gathered in forward
        if before is not None:
            fields = {**before.fields, **fields}
        if rows is None:
            rows = ((0, self._sizes[item.side][item.shard]),)
        arena = self._arena_of.get(item)
        place = None if arena is None else (arena, arena.starts[item])
        self.operands[item] = PackedRows(rows, fields, wire, place)

    def exchange(self, launch: Launch) -> Exchange | None:
        """What a team exchanges, packed as a whole; None: message by message."""
        whole = self._run.exchanges.get(launch.handle)
        if whole is None or self._named is None:
            return None
        leaving, arriving = whole.buffers()
        if whole.is_first:
            whole.scatter(self._named, leaving)
        else:
            for side, places in whole.fields(leaving).items():
                sums = self.partials.filled(partial(side, 0, self._run.program.rank))
                for place, x in zip(places.values(), sums, strict=True):
                    place.copy_(x)

        def take_in() -> None:
            self._exchanged[whole.is_first] = arriving
            if whole.is_first:
                self._run.exchanged(whole, arriving, self.operands)

        return Exchange(leaving, arriving, whole.sizes, take_in)

    def kept(self) -> list[Tensor]:
        """What a pass that keeps its operands has received, for `PassRun.found`."""
        if self._run.exchanges:
            return [self._exchanged[True]]
        return self._run.arenas.kept(self.operands)

    def collect(self, side: Side, results: Sequence[Tensor]) -> None:
        """Write this rank's finished partials of a side, over its shards and head groups.

        Args:
            results: one for each of a partial's tensors, of all of this rank's rows and heads.
        """
        if self._run.exchanges:
            last = next(one for one in self._run.exchanges.values() if not one.is_first)
            last.gather(self._exchanged[False], side, results)
        else:
            self._run.own.collect(self.final, side, results)

    def final(self, item: Item) -> Tensors:
        """What a partial of this rank came to in the end."""
        result = self._results.get(item._replace(role=Role.RESULT))
        if result is None:
            return self.partials.filled(item)
        packing = self._packing[item.side, Role.RESULT]
        return tuple(packing.unpack(result, self._allocator).values())

    def free(self, item: Item) -> None:
        if not self._frees:
            return
        _, fields, wire, _ = self.operands.pop(item)
        if wire is not None:
            self._give(wire, self._packing[item.side, Role.OPERAND], fields)
        for own in self._with_free.get(item, ()) if self._with_free else ():
            wire = self.operands[own].wire
            if wire is not None:
                self._allocator.give(wire)

    def run(self, tile: Tile) -> None:
        bound, operands = self._run.bound.get(tile), self.operands
        if bound is None:
            bound = self._run.bind(tile, operands)
        q = [*map(operands.__getitem__, bound.q)]
        kv = [*map(operands.__getitem__, bound.kv)]
        for placed in bound.calls:
            self._call(placed, q, kv)
            if self._scratch.held:
                self._scratch.clear()

    @abstractmethod
    def _call(self, placed: PlacedCall, q: list[PackedRows], kv: list[PackedRows]) -> None:
        """Compute one kernel call and add its results to the partials."""

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
        if item in sends:
            sends[item] -= 1
            if not sends[item]:
                del sends[item]
                if block.arena is None:
                    allocator.give(wire)
        return part

    def _give(self, wire: Tensor, packing: Packing, fields: Mapping[str, Tensor]) -> None:
        """Give what has arrived back, and what it was decoded into."""
        self._allocator.give(wire)
        for name in packing.encoded:
            self._allocator.give(fields[name])

    def _tell(self, bound: BoundCall) -> tuple[Scores]:
        """Where the call's rows are, which dropout asks for."""
        return (self._scores._replace(places=self._run.binder.places(bound)),)

    def _expanded(self, placed: PlacedCall, kv: list[PackedRows], learns: bool) -> Expanded:
        """A call's keys and values, made of its latents."""
        expansion, scratch, bound = self._expansion, self._scratch, placed.call
        assert expansion is not None
        (rows,) = gather(kv, bound.k, ("latent",), None, scratch, placed.k_rows)
        heads = self._run.binder.kv_heads(bound)
        if rows.is_meta:
            shape, latent = (*rows.shape[:2], heads.stop - heads.start), expansion.latent
            widths = latent.head_dim, latent.v_head_dim
            k, v = (scratch.take((*shape, width), rows.dtype) for width in widths)
            return Expanded(k, v, rows, (), bound)
        positions = self._run.binder.places(bound).k_positions
        return expansion.expand(bound, rows, positions, heads, learns)


class Forward(PassWork):
    """Attention of every call, merged."""

    kind = MergedPartials

    def _call(self, placed: PlacedCall, q: list[PackedRows], kv: list[PackedRows]) -> None:
        bound, q_rows, k_rows = placed
        call, q_parts, k_parts, q_heads, kv_heads = bound
        scratch, partials = self._scratch, self.partials
        (queries,) = gather(q, q_parts, ("q",), q_heads, scratch, q_rows)
        if self._expansion is None:
            k, v = gather(kv, k_parts, ("k", "v"), kv_heads, scratch, k_rows)
        else:
            k, v, *_ = self._expanded(placed, kv, learns=False)
        into = partials.target(q_parts, q_heads)
        told = self._tell(bound) if self._scores.dropout_p else self._told
        values = self._kernel.forward(queries, k, v, call, self._scale, into, *told)
        if into is None:
            partials.add_call(q_parts, values, q_heads)


class Backward(PassWork):
    """The gradients of every call, summed."""

    kind = SummedPartials

    def _call(self, placed: PlacedCall, q: list[PackedRows], kv: list[PackedRows]) -> None:
        bound, q_rows, k_rows = placed
        call, q_parts, k_parts, q_heads, kv_heads = bound
        scratch, partials = self._scratch, self.partials
        names = "q", "dout", "lse", "delta"
        queries, dout, lse, delta = gather(q, q_parts, names, q_heads, scratch, q_rows)
        expanded = second = None
        if self._expansion is None:
            k, v = gather(kv, k_parts, ("k", "v"), kv_heads, scratch, k_rows)
            second = partials.target(k_parts, kv_heads)
        else:
            k, v, *_ = expanded = self._expanded(placed, kv, learns=True)
        operands = queries, k, v, dout, lse, delta, call, self._scale
        first, into = partials.target(q_parts, q_heads), None
        if (first and second) or not self._allocator.adopts:
            (dq,), (dk, dv) = first or self._zeros(queries), second or self._zeros(k, v)
            into = dq, dk, dv
        told = self._tell(bound) if self._scores.dropout_p else self._told
        dq, dk, dv = self._kernel.backward(*operands, into, *told)
        # With into, a side that has a target is done; another's results were computed aside.
        if into is None or first is None:
            partials.add_call(q_parts, (dq,), q_heads)
        if expanded is not None:
            partials.add_call(k_parts, (self._pulled(expanded, dk, dv),), None)
        elif into is None or second is None:
            partials.add_call(k_parts, (dk, dv), kv_heads)

    def _pulled(self, expanded: Expanded, dk: Tensor, dv: Tensor) -> Tensor:
        """The gradient of a call's latents."""
        rows = expanded.leaf
        if rows.is_meta:
            return self._scratch.take(rows.shape, rows.dtype)
        assert self._expansion is not None
        return self._expansion.pull(expanded, dk, dv)

    def _zeros(self, *like: Tensor) -> Tensors:
        """Where a kernel adds results that do not belong side by side."""
        take, dtype = self._scratch.take, self._run.dtype
        return tuple([take(x.shape, dtype).zero_() for x in like])

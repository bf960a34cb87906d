"""The two passes of one checked call on this rank: tensors in, its program run, tensors out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tilewise.binding import Binder
from tilewise.blocks import Arena, Block
from tilewise.execute import execute
from tilewise.kernels.protocol import accumulator_dtype
from tilewise.lowering import lower
from tilewise.messages import Transport
from tilewise.payload import HeadGroups, Payload
from tilewise.plan import Item, Rows, Side
from tilewise.problem import Problem
from tilewise.program import Program, arrivals
from tilewise.pruning import prune_shards
from tilewise.rows import count
from tilewise.script import operand, partial
from tilewise.work import Backward, Forward, Frame, PassWork, packings


def forward_pass(
    problem: Problem, transport: Transport, q: Tensor, k: Tensor, v: Tensor, keep: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """out, lse, and the operands that backward is to find again (none unless keep).

    Args:
        keep: a backward pass follows; save="gathered" then keeps what was received.
    """
    batched = q.ndim == 4
    rows = [_rows_first(x, batched) for x in (q, k, v)]
    run = Run(problem, transport, backward=False, batch=rows[0].shape[1], device=q.device)
    keep = keep and problem.gathered
    work = Forward(
        run.frame(keep=keep),
        run.payload,
        *run.start(({"q": rows[0]}, {"k": rows[1], "v": rows[2]})),
    )
    execute(run.program, work, transport)
    ((out, lse),) = run.collect(work, [(Side.Q, (q.shape[-1], None))])
    kept = run.kept(work.operands) if keep else []
    return _as_given(out.to(q.dtype), batched), _as_given(lse, batched), kept


def backward_pass(
    problem: Problem,
    transport: Transport,
    saved: Sequence[Tensor],
    kept: Sequence[Tensor],
    grads: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv.

    Args:
        saved: q, k, v, out, lse of the forward pass.
        kept: what forward_pass kept.
        grads: dout and dlse; None: zero.
    """
    batched = saved[0].ndim == 4
    q, k, v, out, lse = (_rows_first(x, batched) for x in saved)
    dout = torch.zeros_like(out) if grads[0] is None else _rows_first(grads[0], batched)
    delta = (out.to(lse.dtype) * dout.to(lse.dtype)).sum(-1)
    if grads[1] is not None:
        delta -= _rows_first(grads[1], batched)
    batch, device = q.shape[1], q.device
    gathered = {}
    if problem.gathered:
        before = Run(problem, transport, backward=False, batch=batch, device=device)
        gathered = before.found(kept)
    run = Run(problem, transport, backward=True, batch=batch, device=device)
    named = ({"q": q, "dout": dout, "lse": lse, "delta": delta}, {"k": k, "v": v})
    work = Backward(run.frame(keep=False), run.payload, *run.start(named, gathered))
    execute(run.program, work, transport)
    width = q.shape[-1]
    (dq,), (dk, dv) = run.collect(work, [(Side.Q, (width,)), (Side.KV, (width, width))])
    dq, dk, dv = (_as_given(x.to(q.dtype), batched) for x in (dq, dk, dv))
    return dq, dk, dv


class Run:
    """One pass of one call on this rank: its program, its payload, what it starts and ends with."""

    def __init__(
        self,
        problem: Problem,
        transport: Transport,
        *,
        backward: bool,
        batch: int,
        device: torch.device,
    ):
        self.problem, self.batch, self.device = problem, batch, device
        plan = problem.plans[backward]
        self.groups: HeadGroups = problem.groups[backward]
        self.rank = transport.rank
        pruned = prune_shards(plan, problem.mask, *problem.layouts) if problem.prune else plan
        self.plan = pruned
        saved = backward and problem.gathered
        names = problem.head_dim, problem.dtype, problem.wire_dtype
        self.payload = Payload(backward, *self.groups.size, *names, saved)
        self.packing = pruned.memo("packing", self.payload, lambda: packings(self.payload))
        ahead = transport.receives_ahead
        self.program: Program = pruned.memo(
            "program",
            (self.rank, ahead, self.payload),
            lambda: lower(pruned, self.rank, ahead=ahead, carries=self.payload.carries),
            keep=4 * plan.world_size,
        )

    def frame(self, keep: bool) -> Frame:
        problem = self.problem
        square = problem.kernel.square_causal
        key = problem.layouts, problem.mask, square, self.groups, self.device
        binder = self.plan.memo("binder", key, lambda: Binder(*key))
        dtype = accumulator_dtype(getattr(torch, problem.dtype))
        return Frame(
            problem.layouts,
            binder,
            problem.kernel,
            problem.scale,
            self.batch,
            dtype,
            self.device,
            keep,
            self.packing,
        )

    def start(
        self, named: Sequence[dict[str, Tensor]], gathered: dict[Item, Block] | None = None
    ) -> tuple[dict[Item, Block], list[Arena]]:
        """The operands that this rank holds from the start, and the arenas that they move into."""
        gathered = gathered or {}
        operands = dict(gathered)
        for side, tensors in zip(Side, named, strict=True):
            for shard, rows in self._held(side):
                for group in range(self.groups.groups):
                    item, heads = operand(side, shard, group), self.groups.slice(side, group)
                    fields = {name: x[rows][:, :, heads] for name, x in tensors.items()}
                    operands[item] = Block(((0, rows.stop - rows.start),), fields)
        return operands, [a for items in self.program.arenas if (a := self._arena(items, gathered))]

    def collect(
        self, work: PassWork, wanted: Sequence[tuple[Side, Sequence[int | None]]]
    ) -> list[tuple[Tensor, ...]]:
        """This rank's finished partials, put together over shards and head groups.

        Args:
            wanted: per side the widths of its partial's tensors, None for a statistic.
        """
        collected = []
        for side, widths in wanted:
            heads = self.groups.num_heads if side is Side.Q else self.groups.num_kv_heads
            held = self._held(side)
            num_rows = sum(rows.stop - rows.start for _, rows in held)
            shape = num_rows, self.batch, heads
            options = {"dtype": work.frame.dtype, "device": self.device}
            wholes = [torch.zeros(shape if w is None else (*shape, w), **options) for w in widths]
            for shard, rows in held:
                for group in range(self.groups.groups):
                    parts = work.final(partial(side, shard, group))
                    for whole, part in zip(wholes, parts, strict=True):
                        # Added: groups may share a KV head, whose gradients sum.
                        whole[rows][:, :, self.groups.slice(side, group)] += part
            collected.append(tuple(wholes))
        return collected

    def buffers(self) -> Iterator[tuple[Item, ...]]:
        """The items that lie in each of the buffers that hold what arrives.

        Items of one arena share one buffer, own operands among them; all others have their own.
        """
        arriving = self._arriving()
        shared: set[Item] = set()
        for items in self.program.arenas:
            packing = self.packing[items[0].side, items[0].role]
            if packing.in_place and packing.names and any(item in arriving for item in items):
                yield items
                shared.update(items)
        yield from ((item,) for item in sorted(arriving.keys() - shared))

    def kept(self, operands: Mapping[Item, Block]) -> list[Tensor]:
        """The buffers of `buffers`, of a pass that kept its operands."""
        kept = []
        for items in self.buffers():
            block = next(operands[item] for item in items if item in self._arriving())
            wire = block.arena[0].wire if block.arena else block.wire
            assert wire is not None
            kept.append(wire)
        return kept

    def found(self, kept: Sequence[Tensor]) -> dict[Item, Block]:
        """What `kept` kept, as the operands of another pass."""
        operands = {}
        for wire, items in zip(kept, self.buffers(), strict=True):
            packing = self.packing[items[0].side, items[0].role]
            starts = dict(zip(items, self._starts(items), strict=True))
            shared = items in self.program.arenas
            arena = Arena(starts, wire, packing.unpack(wire)) if shared else None
            for item, start in starts.items():
                if item not in self._arriving():
                    continue
                rows = self._arriving()[item] or (
                    (0, self.problem.layouts[item.side].size(item.shard)),
                )
                part = wire[start : start + self._num_rows(item)]
                place = None if arena is None else (arena, start)
                operands[item] = Block(rows, packing.unpack(part), part, place)
        return operands

    def _arriving(self) -> dict[Item, Rows | None]:
        return self.plan.memo(
            "arriving",
            (self.rank, self.payload),
            lambda: arrivals(self.program),
            keep=4 * self.plan.world_size,
        )

    def _num_rows(self, item: Item) -> int:
        return count(self._arriving().get(item), self.problem.layouts[item.side].size(item.shard))

    def _starts(self, items: Sequence[Item]) -> list[int]:
        """First row of each item in the arena of these items."""
        return [0, *accumulate(map(self._num_rows, items))][:-1]

    def _held(self, side: Side) -> list[tuple[int, slice]]:
        """This rank's shards of a side, and where their rows are among its own."""
        owners, cuts = self.plan.owners[side], self.plan.cuts
        held = [shard for shard, ranks in enumerate(owners) if self.rank in ranks]
        sizes = self.problem.layouts[side].sizes
        return [(s, slice(*cuts[s]) if cuts else slice(0, sizes[s])) for s in held]

    def _arena(self, items: Sequence[Item], gathered: dict[Item, Block]) -> Arena | None:
        """One buffer for these items; None where their packed fields could not be used in place."""
        packing = self.packing[items[0].side, items[0].role]
        if not packing.in_place:
            return None
        before = next((b.arena[0].fields for i in items if (b := gathered.get(i)) and b.arena), {})
        starts = dict(zip(items, self._starts(items), strict=True))
        if not packing.names:
            return Arena(starts, None, dict(before))
        shape = sum(map(self._num_rows, items)), self.batch, *packing.row_shape
        wire = torch.empty(shape, dtype=torch.uint8, device=self.device)
        return Arena(starts, wire, {**before, **packing.unpack(wire)})


def _rows_first(x: Tensor, batched: bool) -> Tensor:
    """[(batch,) tokens, heads, ...] as [tokens, batch, heads, ...]."""
    return x.transpose(0, 1) if batched else x.unsqueeze(1)


def _as_given(x: Tensor, batched: bool) -> Tensor:
    """The inverse of _rows_first."""
    return (x.transpose(0, 1) if batched else x.squeeze(1)).contiguous()

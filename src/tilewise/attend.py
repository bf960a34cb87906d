"""tw.attention: one autograd function for every strategy, mask and layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.agreement import agree
from tilewise.binding import Binder
from tilewise.blocks import Arena, Block
from tilewise.execute import execute
from tilewise.kernels.protocol import accumulator_dtype
from tilewise.layout import Layout
from tilewise.lowering import lower
from tilewise.mask import Mask
from tilewise.messages import Transport
from tilewise.payload import HeadGroups, Payload
from tilewise.plan import Item, Plan, Side
from tilewise.problem import Options, Problem, agreement_fields, make_problem
from tilewise.program import Program, arrivals
from tilewise.pruning import prune_shards
from tilewise.rows import count
from tilewise.script import operand, partial
from tilewise.transport import transport_for
from tilewise.work import Backward, Forward, Frame, PassWork, packings


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: Plan,
    layout: Layout,
    mask: Mask,
    group: Any = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    backward_plan: Plan | None = None,
    kv_layout: Layout | None = None,
    wire_dtype: torch.dtype | str | None = None,
    save: str | None = None,
    prune: bool = True,
    q_positions: Sequence[int] | Tensor | None = None,
    validate: str = "always",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact softmax attention over a sequence split across the ranks of a group.

    out = softmax(softmax_scale q k^T + mask) v over all tokens; every rank passes its own rows and
    gets its own rows of out. Gradients of q, k, v are exact; lse has one too. Every rank of the
    group calls it with the same arguments but the tensors' values.

    Args:
        q: [num_tokens, num_heads, head_dim] or [batch, num_tokens, num_heads, head_dim], this
            rank's rows under layout; with a plan of replicated queries (tree) the same few on all.
        k, v: as q with num_kv_heads, a divisor of num_heads.
        plan: from a strategy; of the backward pass too, unless backward_plan is given.
        layout: which tokens each rank owns; of k and v too, unless kv_layout is given.
        mask: acts on global positions.
        group: a ProcessGroup, a loopback group, a Transport, or None: the default group.
        softmax_scale: default 1 / sqrt(head_dim).
        return_lse: also return lse.
        wire_dtype: of travelling out, dq, dk, dv; default q's dtype. Merging is fp32 or wider.
        save: "replay" operands' transfers in backward, or keep them "gathered"; default: replay,
            but gathered for ulysses alone, where it takes no more memory.
        prune: leave out what the mask makes needless.
        q_positions: of replicated queries; default the last of the sequence.
        validate: "always", or "never" to leave out the agreement between ranks.
    Returns:
        out as q; with return_lse (out, lse), lse [(batch,) num_tokens, num_heads], natural log,
        fp32 (fp64 for fp64). Rows that no key reaches: out 0, lse -inf, gradients 0.
    Raises:
        ValueError: the same on every rank, before any tensor is sent, if one rank's input is wrong
            or the ranks disagree.
    """
    transport = transport_for(group)
    options = Options(
        plan,
        backward_plan,
        layout,
        kv_layout,
        mask,
        softmax_scale,
        wire_dtype,
        save,
        prune,
        q_positions,
    )
    problem, error, needs_grad = None, None, False
    try:
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        if validate not in ("always", "never"):
            raise ValueError(f"validate ({validate!r}) must be 'always' or 'never'")
        problem = make_problem(q, k, v, options, transport.rank, transport.world_size)
    except Exception as raised:  # whatever it is, the other ranks must learn of it
        if validate == "never":
            raise
        error = raised
    if validate != "never":
        fields = agreement_fields(problem, q, k, needs_grad) if problem else None
        agree(transport, fields, None if error is None else str(error))
    assert problem is not None
    out, lse = _Attention.apply(q, k, v, problem, transport, needs_grad)  # pyright: ignore[reportGeneralTypeIssues]
    return (out, lse) if return_lse else out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
        problem, transport, needs_grad = call
        batched = q.ndim == 4
        rows = [_rows_first(x, batched) for x in (q, k, v)]
        run = Run(problem, transport, backward=False, batch=rows[0].shape[1], device=q.device)
        start = run.start(({"q": rows[0]}, {"k": rows[1], "v": rows[2]}))
        work = Forward(run.frame(keep=needs_grad and problem.gathered), run.payload, *start)
        execute(run.program, work, transport)
        ((out, lse),) = run.collect(work, [(Side.Q, (q.shape[-1], None))])
        out, lse = _as_given(out.to(q.dtype), batched), _as_given(lse, batched)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.problem, ctx.transport = problem, transport
        ctx.gathered = work.operands if problem.gathered else {}
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dout: Tensor | None, dlse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        batched = ctx.saved_tensors[0].ndim == 4
        q, k, v, out, lse = (_rows_first(x, batched) for x in ctx.saved_tensors)
        dout = torch.zeros_like(out) if dout is None else _rows_first(dout, batched)
        delta = (out.to(lse.dtype) * dout.to(lse.dtype)).sum(-1)
        if dlse is not None:
            delta -= _rows_first(dlse, batched)
        run = Run(ctx.problem, ctx.transport, backward=True, batch=q.shape[1], device=q.device)
        named = ({"q": q, "dout": dout, "lse": lse, "delta": delta}, {"k": k, "v": v})
        work = Backward(run.frame(keep=False), run.payload, *run.start(named, ctx.gathered))
        execute(run.program, work, ctx.transport)
        width = q.shape[-1]
        (dq,), (dk, dv) = run.collect(work, [(Side.Q, (width,)), (Side.KV, (width, width))])
        grads = (_as_given(x.to(q.dtype), batched) for x in (dq, dk, dv))
        return *grads, None, None, None


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

    def _held(self, side: Side) -> list[tuple[int, slice]]:
        """This rank's shards of a side, and where their rows are among its own."""
        owners, cuts = self.plan.owners[side], self.plan.cuts
        held = [shard for shard, ranks in enumerate(owners) if self.rank in ranks]
        sizes = self.problem.layouts[side].sizes
        return [(s, slice(*cuts[s]) if cuts else slice(0, sizes[s])) for s in held]

    def _arena(self, items: Sequence[Item], gathered: dict[Item, Block]) -> Arena | None:
        """One buffer for these items; None where their packed fields could not be used in place."""
        arriving = self.plan.memo(
            "arriving",
            (self.rank, self.payload),
            lambda: arrivals(self.program),
            keep=4 * self.plan.world_size,
        )
        starts, num_rows = {}, 0
        for item in items:
            starts[item] = num_rows
            num_rows += count(arriving.get(item), self.problem.layouts[item.side].size(item.shard))
        packing = self.packing[items[0].side, items[0].role]
        if not packing.in_place:
            return None
        before = next((b.arena[0].fields for i in items if (b := gathered.get(i)) and b.arena), {})
        if not packing.names:
            return Arena(starts, None, dict(before))
        shape = num_rows, self.batch, *packing.row_shape
        wire = torch.empty(shape, dtype=torch.uint8, device=self.device)
        return Arena(starts, wire, {**before, **packing.unpack(wire)})


def _rows_first(x: Tensor, batched: bool) -> Tensor:
    """[(batch,) tokens, heads, ...] as [tokens, batch, heads, ...]."""
    return x.transpose(0, 1) if batched else x.unsqueeze(1)


def _as_given(x: Tensor, batched: bool) -> Tensor:
    """The inverse of _rows_first."""
    return (x.transpose(0, 1) if batched else x.squeeze(1)).contiguous()

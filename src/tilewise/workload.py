"""The workload, and the bytes that a plan moves for it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Literal, NamedTuple, Self

import numpy as np

from tilewise.arguments import (
    ITEM_BYTES,
    DtypeName,
    LayoutName,
    Reduction,
    Save,
    check_fields,
    checks_arguments,
    dtype_name,
    require_known,
    whole_number,
)
from tilewise.compiler.code import Code
from tilewise.compiler.codegen import pass_code
from tilewise.compiler.facts import CallTraits, device_traits
from tilewise.compiler.pruning import everything_needed
from tilewise.compiler.resolved import CallShape, ResolvedPass, resolve_passes
from tilewise.compiler.row_moves import share_moves
from tilewise.layouts.joint import joint
from tilewise.layouts.layout import Layout, contiguous, striped, zigzag
from tilewise.masks.base import Full, Mask
from tilewise.plan.ir import Item, Plan, find_symmetry
from tilewise.plan.payload import head_groups
from tilewise.plan.shifts import Symmetry, absolute
from tilewise.tiles.call_rows import KERNEL_STYLES, LIBRARY_STYLE
from tilewise.wires.wire import AnyWire, Wires, wires_of

MOST_NUMBERS = 1 << 48
"""Of one tensor: bytes of all ranks together are counted in 64 bits."""

LAYOUTS = (("contiguous", contiguous), ("zigzag", zigzag), ("striped", striped))


class WorkloadPreset(NamedTuple):
    """The attention of a published model's layer, all tokens to all."""

    num_tokens: int
    num_text: int
    num_heads: int
    head_dim: int


PRESETS: Mapping[str, WorkloadPreset] = MappingProxyType(
    {
        "flux": WorkloadPreset(4608, 512, 24, 128),
        "wan": WorkloadPreset(75_600, 0, 40, 128),
    }
)
"""Flux.1 at 1024 x 1024: 4,096 tokens of an image after 512 of a text; Wan 2.1 and 2.2 of 14B, 81
frames of 1280 x 720: 21 x 45 x 80 tokens. num_text: tokens that every rank holds, the first."""


class Volume(NamedTuple):
    """Bytes sent by each rank in each pass."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """A computation of attention, without tensors.

    Args:
        num_tokens: length of the whole sequence.
        num_heads, num_kv_heads, head_dim: of the whole model layer.
        dtype: of q, k, v; a name, or torch's own.
        wire_dtype: of travelling out, dq, dk, dv; None: dtype; short for a wire.
        mask: which pairs attend.
        layout: "contiguous", "zigzag", "striped" or a Layout.
        v_head_dim: of v and out; None: head_dim.
        max_logit: attention is to return the largest scores, which travel with partial results.
        wire: as attention takes it; a Latent needs its width. A lone Plain becomes wire_dtype, and
            any other the tw.wire.Wires that it stands for.
        reduction: as attention takes it.
        save: "replay" the operands' transfers in backward, or keep them "gathered"; None: as the
            plan prefers (ulysses alone keeps them, all others replay).
    """

    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: DtypeName = "bfloat16"
    wire_dtype: DtypeName | None = None
    mask: Mask = field(default_factory=Full)
    layout: LayoutName | Layout = "zigzag"
    save: Save | None = None
    v_head_dim: int | None = None
    max_logit: bool = False
    wire: AnyWire | None = None
    reduction: Reduction = "fast"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.wire_dtype is not None:
            object.__setattr__(self, "wire_dtype", dtype_name(self.wire_dtype))
        check_fields(self)
        wires = wires_of(self.wire, self.wire_dtype)
        plain = wires.only_wire_dtype
        object.__setattr__(self, "wire_dtype", wires.wire_dtype if plain else None)
        object.__setattr__(self, "wire", None if plain else wires.sizes)
        sizes = {"num_tokens": self.num_tokens, "num_heads": self.num_heads}
        for what, width in (("head_dim", self.head_dim), ("v_head_dim", self.widths[1])):
            numbers = {**sizes, what: width}
            if math.prod(whole_number(*number) for number in numbers.items()) > MOST_NUMBERS:
                shown = " x ".join(f"{name} ({value})" for name, value in numbers.items())
                raise ValueError(f"{shown} is more than any memory holds, {MOST_NUMBERS}")
        if wires.latent is not None:
            wires.latent.check(self.num_kv_heads, *self.widths, wires.latent.width)
        self.mask.check_tokens(self.num_tokens)
        head_groups(self.num_heads, self.num_kv_heads, 1)
        if isinstance(self.layout, Layout) and self.layout.num_tokens != self.num_tokens:
            raise ValueError(
                f"layout has {self.layout.num_tokens} tokens, the workload {self.num_tokens}; "
                "make them equal"
            )

    @classmethod
    @checks_arguments
    def preset(cls, name: str, world_size: int) -> Self:
        """The attention of a published image or video model's layer, on a number of ranks.

            tw.search(tw.Workload.preset("wan", 72), tw.Machine.preset("nvl72"), world_size=72)

        Args:
            name: "flux" (4,608 tokens, of which every rank holds the 512 of the text) or "wan"
                (75,600 tokens).
        """
        require_known("preset", name, PRESETS)
        num_tokens, num_text, num_heads, head_dim = PRESETS[name]
        layout = contiguous(num_tokens - num_text, whole_number("world_size", world_size))
        if num_text:
            layout = joint(layout, range(num_text))
        return cls(num_tokens, num_heads, num_heads, head_dim, layout=layout)

    @cached_property
    def wires(self) -> Wires:
        """Wires that encode what travels."""
        return wires_of(self.wire, self.wire_dtype).resolved(self.dtype)

    @property
    def strategies(self) -> tuple[str, ...] | None:
        """Names of the strategies that serve the reduction; None: all do."""
        return None if self.reduction == "fast" else ("all_gather", "needed", "ulysses")

    @property
    def widths(self) -> tuple[int, int]:
        """head_dim of q and k, and of v."""
        return self.head_dim, self.head_dim if self.v_head_dim is None else self.v_head_dim

    @checks_arguments
    def kv_bytes(self, degree: int = 1) -> float:
        """Bytes of a KV shard per byte of a query shard, for one of so many head groups.

        A query shard counts as the mean of its q and its out: values of any width give one number.
        """
        whole_number("degree", degree)
        if self.wires.latent is not None:
            return self.wires.latent.row_width * degree / (self.num_heads * self.head_dim)
        return 2 * max(self.num_kv_heads, degree) / self.num_heads

    @property
    def shown_widths(self) -> str:
        """The widths as text: 128, or 192/128."""
        return "/".join(map(str, dict.fromkeys(self.widths)))

    @checks_arguments
    def layout_for(self, world_size: int) -> Layout:
        """The layout on a number of ranks."""
        if isinstance(self.layout, Layout):
            return self.layout
        return dict(LAYOUTS)[self.layout](self.num_tokens, world_size)

    def shared_bytes(self, plan: Plan) -> Volume:
        """Bytes of out that each rank sends to all others, and of dout that it sends back.

        Of the tokens that every rank of a joint layout holds, one rank computes each.
        """
        moves = share_moves(plan, self.layout_for(plan.world_size))
        if moves is None:
            nothing = (0,) * plan.world_size
            return Volume(nothing, nothing)
        row_bytes = self.num_heads * self.widths[1] * ITEM_BYTES(self.dtype)
        return Volume(*moves.volume(row_bytes))

    def call_shape(self, world_size: int) -> CallShape:
        """The call on a number of ranks."""
        return CallShape(
            self.mask,
            self.layout_for(world_size),
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.dtype,
            self.wires,
            self.save,
            v_head_dim=self.v_head_dim,
            max_logit=self.max_logit,
        )

    @checks_arguments
    def resolve(
        self, plan: Plan, backward_plan: Plan | None = None
    ) -> tuple[ResolvedPass, ResolvedPass]:
        """The forward and the backward pass of a plan, or of one each, for this workload.

        Raises:
            ValueError: if a plan does not fit the workload, or the two do not fit each other.
        """
        back = backward_plan or plan
        if back.world_size != plan.world_size:
            raise ValueError(
                f"{back.name} is for {back.world_size} ranks, {plan.name} for {plan.world_size}; "
                "make both for the same number"
            )
        shape = self.call_shape(plan.world_size)
        if self.reduction == "fast":
            return resolve_passes(shape, plan, backward_plan)
        from tilewise.exact.passes import exact_passes

        return exact_passes(shape, plan, backward_plan)


@checks_arguments
def volume(plan: Plan, work: Workload, backward_plan: Plan | None = None) -> Volume:
    """Bytes that each rank sends, after pruning; agreement messages are not counted.

    Args:
        plan: of the forward pass, and of the backward pass if backward_plan is None.
    """
    passes, shared = work.resolve(plan, backward_plan), work.shared_bytes(plan)
    return Volume(
        *(
            tuple(map(sum, zip(more, *map(_sent, one.parts), strict=True)))
            for one, more in zip(passes, shared, strict=True)
        )
    )


def _sent(resolved: ResolvedPass) -> tuple[int, ...]:
    plan = resolved.plan
    if everything_needed(resolved.mask, *resolved.layouts):
        symmetry = find_symmetry(plan)
        if symmetry.members > 1:
            return _sent_alike(resolved, symmetry)
    pruned = resolved.pruned
    return tuple(
        sum(
            resolved.transfer_bytes(transfer)
            for step in pruned.rank_steps(rank)
            for transfer in step.sends
        )
        for rank in range(plan.world_size)
    )


def _sent_alike(resolved: ResolvedPass, symmetry: Symmetry) -> tuple[int, ...]:
    """Return what _sent returns, of whole shards: transfers are those of one rank per class,
    relabelled for others.

    Only the sizes of the shards differ between ranks of a class, if at all.
    """
    plan, layouts, payload = resolved.plan, resolved.layouts, resolved.payload
    sizes = [np.asarray(layout.sizes) for layout in layouts]
    equal = all(len(set(layout.sizes)) == 1 for layout in layouts)
    known: dict[int, list[tuple[int, int, np.ndarray]]] = {}
    for rank in symmetry.representatives():
        shards: dict[Item, list[int]] = {}
        for step in plan.rank_steps(rank):
            for transfer in step.sends:
                shards.setdefault(transfer.item._replace(shard=0, heads=0), []).append(
                    transfer.item.shard
                )
        known[rank] = [
            (item.side, payload.row_bytes(item), np.array(moved)) for item, moved in shards.items()
        ]

    def sent(rank: int) -> int:
        return sum(
            int(sizes[side][absolute(moved, rank, symmetry.shifts)].sum()) * row_bytes
            for side, row_bytes, moved in known[symmetry.representative(rank)]
        )

    if not equal:
        return tuple(map(sent, range(plan.world_size)))
    of_class = {rank: sent(rank) for rank in known}
    return tuple(of_class[symmetry.representative(rank)] for rank in range(plan.world_size))


@checks_arguments
def plan_code(
    plan: Plan,
    work: Workload,
    rank: int,
    backward: bool = False,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    kernel: str | None = None,
) -> Code:
    """The code of one rank's pass: every copy, message, kernel call and merge, in order.

        print(tw.ring(4).code(work, rank=0))                 # one operation a line
        tw.ring(4).code(work, 0, device="cuda").traffic_bytes

    It is that of loopback and of NCCL on one node: receives belong to the launch of their sends.

    Args:
        plan: of both passes.
        rank: in 0..plan.world_size - 1.
        device: "cpu" or "cuda", where results wait until they are combined.
        kernel: name of the kernel for which tiles are cut, as `tilewise doctor` has it; None: of a
            library, which takes rectangles and squares.
    Returns:
        Its str() has a line for each operation, by the label that profiles and simulated traces
        have; num_bytes are those of the pass's workspace, bytes_sent those of `tw.volume`,
        traffic_bytes those that copies, merges and results read and write in memory.
    Raises:
        ValueError: if plan, workload and rank do not fit each other, or there is no such kernel.
    """
    if kernel is not None:
        require_known("kernel", kernel, KERNEL_STYLES)
    traits = device_traits(device, LIBRARY_STYLE if kernel is None else KERNEL_STYLES[kernel])
    passes = work.resolve(plan)
    call = CallTraits(keep=passes[1].payload.saved and not backward)
    return pass_code(passes, rank, backward=backward, call=call, traits=traits)

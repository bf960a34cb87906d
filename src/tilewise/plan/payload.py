"""Payload: the tensors that each side and role carries in each pass, as data.

            | Q operand           | Q partial          | KV operand | KV partial
    forward | q                   | out, lse (by lse)  | k, v       | -
            |                     | largest (maximum)  |            |
    backward| q, dout, lse, delta | dq (sum)           | k, v       | dk, dv (sum)

A latent travels in place of k and v, and dlatent in place of dk and dv. One table for executor,
volume and simulator, so that what is counted is what travels. Rows of operands are padded to 16
bytes where kernels load so many at once (see `Payload.row_format`).
"""

from functools import lru_cache
from typing import NamedTuple

from tilewise.arguments import ITEM_BYTES, Save, item_bytes, of_kind
from tilewise.plan.ir import Item, Plan, Role, Side
from tilewise.wires.wire import Plain, Wire, Wires

ALIGNMENT_BYTES = 16
"""What kernels load at once: operands begin at multiples of it, if their heads' rows are such."""

STATISTICS = ("lse", "delta", "largest")
"""Tensors that have one number a head."""


def row_shape(name: str, heads: int, width: int) -> tuple[int, ...]:
    """The shape of one row of a tensor: statistics have no width."""
    return (heads,) if name in STATISTICS else (heads, width)


class Field(NamedTuple):
    """One tensor of an item: [rows, batch, heads, width] of a dtype.

    Attributes:
        wire: how it is encoded on its way; None: its numbers travel as they are.
    """

    name: str
    width: int
    dtype: str
    wire: Wire | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one head, as it travels."""
        if self.wire is not None:
            return self.wire.row_bytes(self.width, self.dtype)
        return self.width * self.item_bytes

    @property
    def item_bytes(self) -> int:
        """Bytes of one number."""
        return item_bytes(self.dtype)


class RowFormat(NamedTuple):
    """Layout of an item's fields in one token's packed row, one after the other.

    Attributes:
        starts: first byte of each field.
        num_bytes: of the row, padding counted.
        in_place: whether fields are aligned, so that they can be used where they lie.
    """

    fields: tuple[Field, ...]
    starts: tuple[int, ...]
    num_bytes: int
    in_place: bool


class Payload(NamedTuple):
    """The travelling tensors of one pass, for one head group.

    Args:
        backward: which pass.
        num_heads, num_kv_heads: of one head group.
        head_dim, v_head_dim: of q, k, dq, dk; of v, out, dout, dv.
        dtype: of q, k, v; lse and delta are float32 (float64 for float64).
        wires: how all but statistics are encoded on their way.
        saved: operands gathered in the forward pass are still there, and do not travel again.
        max_logit: every row's largest score travels with out and lse, as they do.
        only: of a backward pass, the side whose gradients alone it computes; None: of both.
        whole_rows: a tile is one kernel call of all its rows, whose results are complete.
    """

    backward: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    wires: Wires
    saved: bool = False
    max_logit: bool = False
    only: Side | None = None
    whole_rows: bool = False

    def fields(self, side: Side, role: Role) -> tuple[Field, ...]:
        """The tensors of an item, in the order in which they are packed."""
        statistic, inputs = accumulator(self.dtype), self.inputs(side)
        if role is Role.OPERAND:
            numbers = () if self.backward and self.saved else inputs
            if self.backward and side is Side.Q:
                numbers = *numbers, ("dout", self.v_head_dim)
            wire = self.wires.backward if self.backward else self.wires.forward
            exact = isinstance(wire, Plain) and wire.dtype in (None, self.dtype)
            field_wire = None if exact else wire
            fields = [Field(name, width, self.dtype, field_wire) for name, width in numbers]
            if self.backward and side is Side.Q:
                fields += [Field("lse", 1, statistic), Field("delta", 1, statistic)]
            return tuple(fields)
        return tuple(
            Field(name, width, statistic) if name in STATISTICS else self._result(name, width)
            for name, width in self.results(side)
        )

    def results(self, side: Side) -> tuple[tuple[str, int], ...]:
        """Name and width of the tensors that a side's complete partials become."""
        if self.only not in (None, side):
            return ()
        if self.backward:
            return tuple((f"d{name}", width) for name, width in self.inputs(side))
        if side is Side.KV:
            return ()
        statistics = ("lse", "largest") if self.max_logit else ("lse",)
        return ("out", self.v_head_dim), *((name, 1) for name in statistics)

    def inputs(self, side: Side) -> tuple[tuple[str, int], ...]:
        """Name and width of the caller's tensors of a side."""
        if side is Side.Q:
            return (("q", self.head_dim),)
        if self.wires.latent is not None:
            return (("latent", self.wires.latent.row_width),)
        return ("k", self.head_dim), ("v", self.v_head_dim)

    def _result(self, name: str, width: int) -> Field:
        """Return the field of a tensor of a partial or a result.

        With a Plain wire it is merged as it arrives; with any other it is decoded first.
        """
        wire = self.wires.partials
        if isinstance(wire, Plain):
            return Field(name, width, wire.dtype or self.dtype)
        return Field(name, width, accumulator(self.dtype), wire)

    @property
    def flop(self) -> int:
        """Floating-point operations of one allowed pair of rows, all heads of the group.

        q k and p v; in backward q k again, dout v, dv, dq and dk. Where gradients are of whole
        rows, q k and dout v are computed for each side.
        """
        keys, values = 1, 1
        if self.backward:
            keys, values = {None: (3, 2), Side.Q: (2, 1), Side.KV: (2, 2)}[self.only]
            if self.whole_rows and self.only is None:
                keys, values = keys + 1, values + 1
        return 2 * self.num_heads * (keys * self.head_dim + values * self.v_head_dim)

    @property
    def carries(self) -> frozenset[tuple[Side, Role]]:
        """The sides and roles that have any bytes."""
        return frozenset((side, role) for side in Side for role in Role if self.fields(side, role))

    def heads(self, side: Side) -> int:
        """Return the number of heads of what travels: a latent is that of all heads."""
        if side is Side.KV and self.wires.latent is not None:
            return 1
        return self.num_heads if side is Side.Q else self.num_kv_heads

    def row_format(self, side: Side, role: Role) -> RowFormat:
        """Return how an item's row is packed; operands are padded for what kernels load at once."""
        fields, heads = self.fields(side, role), self.heads(side)
        starts: list[int] = []
        stop, row_unit = 0, 1
        for field in fields:
            head_bytes, encoded = field.row_bytes, field.wire is not None
            loads = role is Role.OPERAND and not encoded and head_bytes % ALIGNMENT_BYTES == 0
            unit = ALIGNMENT_BYTES if loads else 1
            starts.append(-(-stop // unit) * unit)
            stop, row_unit = starts[-1] + heads * head_bytes, max(unit, row_unit)
        num_bytes = -(-stop // row_unit) * row_unit
        widest = max((field.item_bytes for field in fields), default=1)
        in_place = all(at % widest == 0 for at in (*starts, num_bytes))
        in_place = in_place and not any(field.wire for field in fields)
        return RowFormat(fields, tuple(starts), num_bytes, in_place)

    def row_bytes(self, item: Item) -> int:
        """Bytes of one token of an item, padding counted."""
        return self.row_format(item.side, item.role).num_bytes


class ShardWeights(NamedTuple):
    """Relative bytes: a query shard, a KV shard, a query partial, a KV partial."""

    q: float
    kv: float
    q_partial: float
    kv_partial: float


@lru_cache
def shard_weights(kv_bytes: float, backward: bool) -> ShardWeights:
    """Bytes of what travels of a shard in one pass, in those of its q.

    Plans are made before head_dim and dtype are known: lse and delta are those of 16 bits and a
    head_dim of 128, 1 / 64 of q.

    Args:
        kv_bytes: bytes of k and v beside those of q, 2 num_kv_heads / num_heads.
    """
    usual = Payload(backward, 1, 1, 128, 128, "bfloat16", Wires())
    q = usual.inputs(Side.Q)[0][1] * ITEM_BYTES(usual.dtype)

    def weight(role: Role) -> float:
        return sum(field.row_bytes for field in usual.fields(Side.Q, role)) / q

    return ShardWeights(
        weight(Role.OPERAND), kv_bytes, weight(Role.PARTIAL), kv_bytes if backward else 0.0
    )


def accumulator(dtype: str) -> str:
    """The dtype in which partials are kept and merged, lse always."""
    return "float64" if dtype == "float64" else "float32"


class HeadGroups(NamedTuple):
    """Equal groups of heads; every group has the KV heads that its queries read."""

    num_heads: int
    num_kv_heads: int
    groups: int

    @property
    def size(self) -> tuple[int, int]:
        """Query heads and KV heads of one group."""
        return self.num_heads // self.groups, max(1, self.num_kv_heads // self.groups)

    def slice(self, side: Side, group: int) -> slice:
        """The heads of a group, of all of a tensor's."""
        size = self.size[side]
        start = group * size if side is Side.Q else group * self.num_kv_heads // self.groups
        return slice(start, start + size)


def head_groups(num_heads: int, num_kv_heads: int, groups: int) -> HeadGroups:
    """Cut heads into groups, as ulysses does by its degree.

    Raises:
        ValueError: unless groups divides num_heads and divides or is divided by num_kv_heads.
    """
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads})"
        )

    def works(degree: int) -> bool:
        return num_heads % degree == 0 and (
            num_kv_heads % degree == 0 or degree % num_kv_heads == 0
        )

    if not works(groups):
        good = [degree for degree in range(1, num_heads + 1) if works(degree)]
        raise ValueError(
            f"a ulysses degree of {groups} must divide num_heads ({num_heads}) and divide or be "
            f"divided by num_kv_heads ({num_kv_heads}); "
            f"degrees that work: {', '.join(map(str, good))}"
        )
    return HeadGroups(num_heads, num_kv_heads, groups)


def saving(plan: Plan, save: str | None) -> str:
    """Return what backward does about operands: "replay" their transfers, or use those
    "gathered".
    """
    of_kind("save", save, Save | None)
    return save or plan.default_save


def check_gathered(plan: Plan, backward_plan: Plan) -> None:
    """Raise ValueError unless both passes run the same plan, as save="gathered" needs."""
    if backward_plan != plan:
        raise ValueError(
            "save='gathered' needs the same plan in backward, not "
            f"{plan.name} and {backward_plan.name}; use save='replay'"
        )

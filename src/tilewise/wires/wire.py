"""A wire, and the set of them that a call has: one for each kind of tensor that travels."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

from tilewise.arguments import (
    ITEM_BYTES,
    DtypeName,
    brief,
    checks_arguments,
    dtype_name,
    of_kind,
    require_type,
)
from tilewise.wires.float8 import Float8
from tilewise.wires.latent import Latent


@runtime_checkable
class Wire(Protocol):
    """A way to write one tensor into bytes, row by row: a row can be read without its neighbours.

    A frozen value with == and hash.
    """

    def row_bytes(self, width: int, dtype: str) -> int:
        """Bytes of one row of one head, so wide and of this dtype before it is encoded."""
        ...


@dataclass(frozen=True)
class Plain:
    """The numbers themselves, converted to a dtype.

    Given alone it is that of travelling out, dq, dk, dv, as wire_dtype is.

    Args:
        dtype: a name, or torch's own; None: that of q.
    """

    dtype: DtypeName | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None:
            object.__setattr__(self, "dtype", dtype_name(self.dtype))
            of_kind("wire_dtype", self.dtype, DtypeName)

    @checks_arguments
    def row_bytes(self, width: int, dtype: str) -> int:
        return width * ITEM_BYTES(self.dtype or dtype)

    def __str__(self) -> str:
        return self.dtype or "the dtype of q"


@dataclass(frozen=True)
class Wires:
    """The wires of a call.

    Args:
        forward: of q, k, v in the forward pass.
        backward: of q, k, v and dout in the backward pass.
        partials: of out, dq, dk, dv; merging is fp32 or wider. lse and the other statistics of a
            row always travel as they are.
        latent: what travels in place of k and v, and its gradient in place of dk and dv; encoded
            as they would be.
    """

    forward: Wire = Plain()
    backward: Wire = Plain()
    partials: Wire = Plain()
    latent: Latent | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "partials"):
            require_type(Wire, name, getattr(self, name), "tw.wire.Plain('bfloat16')")
        if self.latent is not None:
            require_type(Latent, "latent", self.latent, "tw.wire.Latent(expand, ...)")
        values = tuple(getattr(self, field.name) for field in fields(self))
        object.__setattr__(self, "_hash", hash(values))  # of every key of a call's memos
        text = f"{self.forward} forward, {self.backward} backward, {self.partials} for partials"
        object.__setattr__(self, "_text", text + (f", {self.latent}" if self.latent else ""))

    def __hash__(self) -> int:
        return cast(int, self._hash)  # pyright: ignore[reportAttributeAccessIssue]

    def __str__(self) -> str:
        return cast(str, self._text)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def wire_dtype(self) -> DtypeName | None:
        """The value that wire_dtype would have for the partials, if they are plain."""
        return self.partials.dtype if isinstance(self.partials, Plain) else None

    @property
    def only_wire_dtype(self) -> bool:
        """True if the argument wire_dtype alone can express this set: the rest is Plain()."""
        return self == Wires(partials=self.partials) and isinstance(self.partials, Plain)

    def rounds(self, dtype: str) -> bool:
        """Return whether numbers of this dtype may change on any wire."""
        plain = Plain(dtype_name(dtype))
        return any(w not in (Plain(), plain) for w in (self.forward, self.backward, self.partials))

    def resolved(self, dtype: str) -> Wires:
        """Return these wires with a dtype in each Plain that has none, and the latent without its
        function: one object for all calls.
        """
        return _resolved(self.sizes, dtype_name(dtype))

    def of_width(self, width: int) -> Wires:
        """Return these wires with the width of the latent set, and without its function."""
        latent = self.latent and replace(self.latent.sizes, width=width)
        return replace(self, latent=latent)

    @property
    def sizes(self) -> Wires:
        """The set without the functions of its latent: a key of memos holds no weights."""
        return replace(self, latent=self.latent and self.latent.sizes)


AnyWire: TypeAlias = Wire | Latent | Wires


def latent_of(wire: AnyWire | None) -> Latent | None:
    """Return the latent among what a caller passes as `wire`, or None."""
    return wire if isinstance(wire, Latent) else getattr(wire, "latent", None)


def wires_of(wire: AnyWire | None, wire_dtype: Any = None) -> Wires:
    """Return the wires that the two arguments of a call mean.

    Raises:
        ValueError: if both are given, or wire is none.
    """
    if wire is None:
        return Wires(partials=Plain(wire_dtype))
    if wire_dtype is not None:
        raise ValueError(
            f"wire_dtype ({brief(dtype_name(wire_dtype))}) is short for wire=tw.wire.Plain(...); "
            f"beside wire ({brief(wire)}) leave it out, or pass tw.wire.Wires(...) with a partials "
            "of its own"
        )
    if isinstance(wire, Latent):
        return Wires(latent=wire)
    if isinstance(wire, Wires):
        return wire
    if isinstance(wire, type) or not isinstance(wire, Wire):
        raise ValueError(f"wire ({brief(wire)}) must be a wire, such as tw.wire.Plain('bfloat16')")
    return Wires(partials=wire) if isinstance(wire, Plain) else Wires(wire, wire)


@lru_cache(maxsize=64)
def _resolved(wires: Wires, dtype: DtypeName) -> Wires:
    plain, each = Plain(dtype), (wires.forward, wires.backward, wires.partials)
    return Wires(*(plain if wire == Plain() else wire for wire in each), latent=wires.latent)


WIRE_KINDS = (Plain, Float8, Latent)
"""The wires that files can hold."""

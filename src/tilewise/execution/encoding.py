"""Fields that a wire encodes, as bytes and back."""

import torch
from torch import Tensor

from tilewise.plan.payload import Field
from tilewise.wires.wire import Plain


def encode(field: Field, x: Tensor) -> Tensor:
    """A tensor [rows, batch, heads, width] of a field that has a wire, as uint8 [rows, batch, n].

    n is heads * field.row_bytes, and every row can be decoded by itself.
    """
    wire = field.wire
    if isinstance(wire, Plain):
        return x.to(getattr(torch, wire.dtype or field.dtype)).flatten(2).view(torch.uint8)
    raise TypeError(f"{field.name} has a wire that nobody encodes: {wire!r}")


def decode(field: Field, columns: Tensor, heads: int) -> Tensor:
    """The inverse of encode, but for rounding, in new memory and the field's dtype.

    Args:
        columns: uint8 [rows, batch, n], contiguous.
    """
    wire = field.wire
    if isinstance(wire, Plain):
        numbers = columns.view(getattr(torch, wire.dtype or field.dtype))
        return numbers.unflatten(-1, (heads, field.width)).to(getattr(torch, field.dtype))
    raise TypeError(f"{field.name} has a wire that nobody decodes: {wire!r}")

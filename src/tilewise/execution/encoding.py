"""Numbers as the bytes of a wire, and back, row by row."""

import torch
from torch import Tensor

from tilewise.kernels import float8
from tilewise.plan.ir import Item
from tilewise.plan.payload import Field
from tilewise.transport.protocol import as_bytes
from tilewise.wires.float8 import Float8
from tilewise.wires.wire import Plain

_NUMBERS = ("q", "k", "v", "dout", "out", "dq", "dk", "dv", "latent", "dlatent")
"""Fields that may be rounded at random, by their number in counters."""


def encode(field: Field, x: Tensor, counter: tuple[Item, int]) -> Tensor:
    """A tensor [rows, batch, heads(, width)] as uint8 [rows, batch, heads * field.row_bytes].

    Every row can be decoded by itself.

    Args:
        field: a wire of None stands for the field's own dtype.
        counter: whose rows these are, and who encodes them: for stochastic rounding.
    """
    wire = Plain() if field.wire is None else field.wire
    if isinstance(wire, Plain):
        numbers = x.to(getattr(torch, wire.dtype or field.dtype)).flatten(2)
        return as_bytes(numbers.contiguous())
    if isinstance(wire, Float8):
        item, rank = counter
        number = _NUMBERS.index(field.name)
        return float8.encode(wire, x, (item.shard << 15 | item.heads << 4 | number, rank))
    raise TypeError(f"{field.name} has a wire that nobody encodes: {wire!r}")


def decode(field: Field, columns: Tensor, into: Tensor) -> Tensor:
    """The inverse of encode, but for rounding.

    Args:
        columns: uint8 [rows, batch, heads * field.row_bytes], of any strides.
        into: [rows, batch, heads(, width)] of the field's dtype, which is returned.
    """
    wire = Plain() if field.wire is None else field.wire
    if isinstance(wire, Plain):  # views of wider numbers begin at multiples of their size
        numbers = columns.clone(memory_format=torch.contiguous_format)
        numbers = numbers.view(getattr(torch, wire.dtype or field.dtype))
        return into.copy_(numbers.view(into.shape))
    if isinstance(wire, Float8):
        return float8.decode(columns, into)
    raise TypeError(f"{field.name} has a wire that nobody decodes: {wire!r}")

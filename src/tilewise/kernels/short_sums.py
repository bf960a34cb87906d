"""Binned sums as bytes: each digit's sum in as many bits as it can have, and no more.

    row of a head     [ windows, and other sums | 16 bits of each short sum | the rests ]

The rest of four sums, r bits of each, lies in r / 2 bytes. Nothing is lost: what is read is what
was written.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewise.kernels.binned import in_blocks
from tilewise.plan.sums import SHORT_BITS, SHORT_GROUP, SumColumns, SumGroup

_INTEGERS_AT_ONCE = 1 << 18  # that fit in a cache


def write_short(sums: Tensor, columns: SumColumns, into: Tensor) -> None:
    """Write sums as bytes.

    Args:
        sums: int32 [rows, batch, heads, columns.num_columns], of any strides.
        into: uint8 [rows, batch, heads, columns.row_bytes], whose rows begin at multiples of 4
            bytes.
    """
    for own, found in in_blocks(_INTEGERS_AT_ONCE, sums, into):
        first = 0
        for part in _whole(columns):
            stop = first + 4 * (part.stop - part.start)
            found[..., first:stop].view(torch.int32).copy_(own[..., part])
            first = stop
        for _, part in _short(columns):
            stop = first + 2 * (part.stop - part.start)
            found[..., first:stop].view(torch.int16).copy_(own[..., part])  # their lowest bits
            first = stop
        for group, part in _short(columns):
            rests = _rests(own[..., part], group)
            found[..., first : first + rests.shape[-1]] = rests
            first += rests.shape[-1]
        found[..., first:] = 0


def read_short(rows: Tensor, columns: SumColumns, into: Tensor) -> Tensor:
    """The inverse of write_short.

    Args:
        rows: uint8 [rows, batch, heads, columns.row_bytes], as written.
        into: int32 [rows, batch, heads, columns.num_columns], which is returned.
    """
    for own, found in in_blocks(_INTEGERS_AT_ONCE, rows, into):
        first = 0
        for part in _whole(columns):
            stop = first + 4 * (part.stop - part.start)
            found[..., part] = own[..., first:stop].view(torch.int32)
            first = stop
        lows: list[Tensor] = []
        for _, part in _short(columns):
            stop = first + 2 * (part.stop - part.start)
            lows.append(own[..., first:stop].view(torch.int16))
            first = stop
        for (group, part), low in zip(_short(columns), lows, strict=True):
            count = part.stop - part.start
            stop = first + _rest_bytes(group, count)
            integers = _high(own[..., first:stop], group)[..., :count]
            found[..., part] = integers.bitwise_or_(low.int().bitwise_and_((1 << SHORT_BITS) - 1))
            first = stop
    return into


def _rest_bytes(group: SumGroup, count: int) -> int:
    return _bits_left(group) * SHORT_GROUP // 8 * -(-count // SHORT_GROUP)


def _bits_left(group: SumGroup) -> int:
    return group.form.sum_bits - SHORT_BITS


def _rests(integers: Tensor, group: SumGroup) -> Tensor:
    """The bytes of the bits of integers above the lowest 16."""
    bits = _bits_left(group)
    high = (integers >> SHORT_BITS).to(torch.uint8)
    if high.shape[-1] % SHORT_GROUP:
        high = pad(high, (0, -high.shape[-1] % SHORT_GROUP))
    words, mask = high.view(torch.int32), (1 << bits) - 1
    found = words & mask
    for number in range(1, SHORT_GROUP):  # a byte of each becomes so many bits
        found |= (words >> (8 - bits) * number) & (mask << bits * number)
    size = bits * SHORT_GROUP // 8
    if size == 2:
        return found.to(torch.int16).view(torch.uint8)
    return found.view(torch.uint8).unflatten(-1, (-1, 4))[..., :size].flatten(-2)


def _high(rests: Tensor, group: SumGroup) -> Tensor:
    """Integers whose lowest 16 bits are 0, of the bytes of their rests: int32 [..., count]."""
    bits = _bits_left(group)
    size, mask = bits * SHORT_GROUP // 8, (1 << bits) - 1
    if size == 2:
        found = rests.view(torch.int16).int()
    else:
        whole = pad(rests.unflatten(-1, (-1, size)), (0, 4 - size))
        found = whole.view(torch.int32).squeeze(-1)
    words = found & mask
    for number in range(1, SHORT_GROUP):
        words |= (found << (8 - bits) * number) & (mask << 8 * number)
    high = words.view(torch.uint8).int()
    return high.bitwise_left_shift_(32 - bits).bitwise_right_shift_(SHORT_BITS - bits)


def _whole(columns: SumColumns) -> Sequence[slice]:
    """The integers that travel as they are, in ranges."""
    found: list[slice] = []
    for group in columns.groups:
        start, stop = group.columns.start, group.columns.stop
        found.append(slice(stop - 1, stop) if group.is_short else slice(start, stop))
    if columns.largest:
        found.append(slice(columns.num_columns - 2, columns.num_columns))
    return found


def _short(columns: SumColumns) -> Sequence[tuple[SumGroup, slice]]:
    """The integers that travel in fewer bits."""
    return [
        (group, slice(group.start, group.columns.stop - 1))
        for group in columns.groups
        if group.is_short
    ]

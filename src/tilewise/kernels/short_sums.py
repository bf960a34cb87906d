"""Binned sums as bytes: each digit's sum in as many bits as it can have, and no more.

    row of a head     [ windows, and other sums | 16 bits of each short sum | the rest ]

The rest of eight sums, r bits of each, lies in r bytes. Nothing is lost: what is read is what was
written.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.plan.sums import SHORT_BITS, SHORT_GROUP, SumColumns, SumGroup


def write_short(sums: Tensor, columns: SumColumns) -> Tensor:
    """Return sums as bytes.

    Args:
        sums: int32 [..., columns.num_columns], of any strides.
    Returns:
        uint8 [..., columns.row_bytes].
    """
    size = columns.row_bytes(columns.num_columns, columns.dtype)
    found = torch.empty(*sums.shape[:-1], size, dtype=torch.uint8, device=sums.device)
    first = 0
    for part in _whole(columns):
        stop = first + 4 * (part.stop - part.start)
        found[..., first:stop].view(torch.int32).copy_(sums[..., part])
        first = stop
    for group, integers in _short(columns):
        own = sums[..., integers]
        stop = first + 2 * own.shape[-1]
        found[..., first:stop].view(torch.int16).copy_(own)  # their lowest 16 bits
        rest, first = _rests(own, group), stop
        found[..., first : first + rest.shape[-1]] = rest
        first += rest.shape[-1]
    found[..., first:] = 0
    return found


def read_short(rows: Tensor, columns: SumColumns, into: Tensor) -> Tensor:
    """The inverse of write_short.

    Args:
        rows: uint8 [..., columns.row_bytes], of any strides.
        into: int32 [..., columns.num_columns], which is returned.
    """
    if rows.storage_offset() % 4 or any(stride % 4 for stride in rows.stride()[:-1]):
        rows = rows.clone(memory_format=torch.contiguous_format)  # for views as wider integers
    first = 0
    for part in _whole(columns):
        stop = first + 4 * (part.stop - part.start)
        into[..., part] = rows[..., first:stop].view(torch.int32)
        first = stop
    for group, integers in _short(columns):
        own = into[..., integers]
        stop = first + 2 * own.shape[-1]
        low, first = rows[..., first:stop].view(torch.int16), stop
        stop += _bits_left(group) * -(-own.shape[-1] // SHORT_GROUP)
        own.copy_(_high(rows[..., first:stop], group)[..., : own.shape[-1]]).add_(
            low.int() & ((1 << SHORT_BITS) - 1)
        )
        first = stop
    return into


def _bits_left(group: SumGroup) -> int:
    return group.form.sum_bits - SHORT_BITS


def _rests(sums: Tensor, group: SumGroup) -> Tensor:
    """The bits of sums above the lowest 16, eight sums in as many bytes as each has bits."""
    bits, eighth = _bits_left(group), -(-sums.shape[-1] // SHORT_GROUP)
    high = (sums >> SHORT_BITS) & ((1 << bits) - 1)
    if high.shape[-1] < SHORT_GROUP * eighth:
        high = torch.nn.functional.pad(high, (0, SHORT_GROUP * eighth - high.shape[-1]))
    found = torch.zeros(*sums.shape[:-1], eighth, dtype=torch.int64, device=sums.device)
    for number, part in enumerate(high.split(eighth, -1)):
        found += part.long() << bits * number
    return found.view(torch.uint8).unflatten(-1, (eighth, 8))[..., :bits].flatten(-2)


def _high(rests: Tensor, group: SumGroup) -> Tensor:
    """Sums without their lowest 16 bits, of the bytes of their rests: int32 [..., sums]."""
    bits = _bits_left(group)
    eighths = rests.unflatten(-1, (-1, bits))
    whole = torch.zeros(*eighths.shape[:-1], 8, dtype=torch.uint8, device=rests.device)
    whole[..., :bits] = eighths
    found = whole.view(torch.int64).squeeze(-1)
    parts = [
        (found << (64 - bits * (number + 1))) >> (64 - bits) << SHORT_BITS
        for number in range(SHORT_GROUP)
    ]
    return torch.cat(parts, -1).int()


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

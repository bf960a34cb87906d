"""Comparison of the rows that every rank holds among all ranks, by a few numbers a row."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.arguments import Validate
from tilewise.plan.kept import KeptWith, RecentValues
from tilewise.transport.agreement import agree
from tilewise.transport.protocol import Transport

PROJECTIONS = 4
"""Numbers by which rows are compared, beside their norm; other content differs in all of them."""

_COMPARED: KeptWith[RecentValues[Hashable, bool]] = KeptWith(lambda _: RecentValues(256))


class Difference(NamedTuple):
    """The first row that is another on a rank than on rank 0, and of how many rows that is so."""

    name: str
    row: int
    rank: int
    num_rows: int


def first_difference(
    transport: Transport,
    fields: Mapping[str, str],
    rows: Callable[[], Sequence[tuple[str, Tensor]]],
    validate: Validate,
) -> Difference | None:
    """Compare rows among ranks where the kind of call is new, and return where they differ.

    Every rank calls it and gets the same answer. Rows may differ by as much as rounding does in
    what came before: the square root of their dtype's precision.

    Args:
        fields: of the kind of call, names and shapes of the rows among them; ranks must agree.
        rows: makes names and tensors [rows, ...], where they are compared.
        validate: "first", "always" or "never", as attention takes it.
    Raises:
        ValueError: the same on every rank, if the ranks' fields differ.
    """
    if validate == "never" or transport.world_size == 1:
        return None
    known = _COMPARED.of(getattr(transport, "process_group", transport))
    new: list[bool] = []
    known.get(tuple(fields.items()), lambda: not new.append(True))
    if not new and validate != "always":
        return None
    agree(transport, fields, None, "always")
    named = rows()
    found = [_sketch(x) for _, x in named]
    own = torch.cat([sketch.flatten() for sketch in found]).contiguous()
    records = transport.gather_records(own.view(torch.uint8))
    sizes = [sketch.numel() for sketch in found]
    first, *others = [record.view(torch.float64).split(sizes) for record in records]
    for rank, theirs in enumerate(others, start=1):
        for (name, x), a, b in zip(named, first, theirs, strict=True):
            wrong = _differ(a, b, x.dtype).nonzero().flatten().tolist()
            if wrong:
                return Difference(name, wrong[0], rank, len(wrong))
    return None


def _sketch(x: Tensor) -> Tensor:
    """The norm and a few projections of each row, fp64 [rows, 1 + PROJECTIONS]."""
    values = x.detach().reshape(len(x), -1).cpu().double().nan_to_num()
    place = torch.arange(1, values.shape[1] + 1, dtype=torch.float64)
    directions = torch.stack([(place * place * (1 + i)).sin() for i in range(PROJECTIONS)], 1)
    return torch.cat([values.norm(dim=1, keepdim=True), values @ directions], 1)


def _differ(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return which rows differ, bool [rows]."""
    a, b = (x.view(-1, 1 + PROJECTIONS) for x in (a, b))
    precision = torch.finfo(dtype).eps ** 0.5 if dtype.is_floating_point else 0.0
    return ((a - b).abs() > precision * (a[:, :1] + b[:, :1])).any(1)

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
_EXACT = 2
"""Whole numbers beside these, which say where a row is not finite."""
_LARGEST = 1e150
"""Larger numbers are compared as this one, so that the norm of a row is finite."""

_COMPARED: KeptWith[RecentValues[Hashable, list[bool]]] = KeptWith(lambda _: RecentValues(256))


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

    Every rank calls it and gets the same answer. A kind is new until its rows were the same once.
    Rows may differ by as much as rounding does in what came before: the square root of their
    dtype's precision. Infinities and NaN must stand at the same places.

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
    were_same = known.get(tuple(fields.items()), list)
    if were_same and validate != "always":
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
    were_same[:] = [True]
    return None


def _sketch(x: Tensor) -> Tensor:
    """The norm, a few projections and _EXACT of each row, fp64 [rows, 1 + PROJECTIONS + _EXACT]."""
    values = x.detach().reshape(len(x), -1).cpu().double()
    place = torch.arange(1, values.shape[1] + 1, dtype=torch.float64)
    kinds = values.isnan().double() + 2.0 * values.isposinf() + 3.0 * values.isneginf()
    exact = [kinds @ place, kinds @ (place * place % 65537)]
    values = values.nan_to_num(0.0, 0.0, 0.0).clamp(-_LARGEST, _LARGEST)
    directions = torch.stack([(place * place * (1 + i)).sin() for i in range(PROJECTIONS)], 1)
    rounded = [values.norm(dim=1, keepdim=True), values @ directions]
    return torch.cat([*rounded, torch.stack(exact, 1)], 1)


def _differ(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return which rows differ, bool [rows]."""
    a, b = (x.view(-1, 1 + PROJECTIONS + _EXACT) for x in (a, b))
    precision = torch.finfo(dtype).eps ** 0.5 if dtype.is_floating_point else 0.0
    apart = (a - b).abs() > precision * (a[:, :1] + b[:, :1])
    return apart[:, :-_EXACT].any(1) | (a != b)[:, -_EXACT:].any(1)

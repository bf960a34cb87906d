"""Masks as JSON: the name of their kind and its arguments, masks within masks included."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, cast

from tilewise.arguments import require_type, whole_number
from tilewise.masks.base import And, Causal, Document, Full, Mask, Or, Window
from tilewise.masks.tables import Blocks, PerHead, Slices

KINDS = (Full, Causal, Window, Document, And, Or, Slices, Blocks, PerHead)


def write_mask(mask: Mask) -> dict[str, Any]:
    """A mask as plain values; the inverse of read_mask."""
    values = {field.name: getattr(mask, field.name) for field in fields(mask)}
    if isinstance(mask, Blocks):
        values["table"] = mask.block_mask.astype(int).tolist()
    return {"kind": type(mask).__name__, **{name: _plain(x) for name, x in values.items()}}


def read_mask(data: Any) -> Mask:
    """The mask that write_mask wrote.

    Raises:
        ValueError, TypeError, KeyError: if it is none.
    """
    kinds = {kind.__name__: kind for kind in KINDS}
    if data["kind"] not in [*kinds]:
        raise ValueError(f"mask {data['kind']!r} is not known; take one of {', '.join(kinds)}")
    kind = kinds[data["kind"]]
    values = [_value(data[field.name]) for field in fields(kind)]
    if kind in (And, Or):
        for field, part in zip(fields(kind), values, strict=True):
            require_type(Mask, f"{field.name} of {kind.__name__}", part)
    if kind is Blocks:
        table, q_edges, k_edges, overhang = values
        return Blocks(table, q_edges, k_edges, overhang=whole_number("overhang", overhang, 0))
    return kind(*values)


def _plain(value: Any) -> Any:
    if isinstance(value, Mask):
        return write_mask(value)
    return (
        [_plain(x) for x in cast("Sequence[Any]", value)]
        if isinstance(value, list | tuple)
        else value
    )


def _value(value: Any) -> Any:
    if isinstance(value, dict):
        return read_mask(value)
    return tuple(map(_value, cast("list[Any]", value))) if isinstance(value, list) else value

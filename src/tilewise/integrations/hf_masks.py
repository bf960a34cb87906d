"""Mask functions of transformers, read as masks: by their structure, never by sampling pairs.

transformers describes a layer's mask as nested closures of a few known functions. Each of them has
one meaning; any other function is refused by name. What they say about packing is left out: they
see this rank's rows alone, so documents come from the whole sequence (documents.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import reduce
from operator import and_, or_
from typing import Any

from tilewise.masks.base import And, Causal, Document, Full, Mask, Or, Window

MODULE = "transformers.masking_utils"


def read_mask(function: Callable[..., Any]) -> Mask:
    """The mask that a mask function of transformers stands for, documents aside.

    Raises:
        ValueError: naming the function, if its meaning is not known.
    """
    name = _name(function)
    if getattr(function, "__module__", None) != MODULE:
        raise ValueError(_refusal(name))
    inner = inspect.getclosurevars(function).nonlocals
    match name:
        case "causal_mask_function":
            return Causal()
        case "bidirectional_mask_function" | "packed_sequence_mask_function":
            return Full()
        case "sliding_window_overlay":
            return Window(inner["sliding_window"] - 1, None)
        case "sliding_window_bidirectional_overlay":
            return Window(inner["sliding_window"], inner["sliding_window"])
        case "remap_positions_for_packed_sequence":
            # Within a document a distance is the same by either count of positions.
            return read_mask(inner["mask_function"])
        case "and_masks":
            masks = [m for m in map(read_mask, inner["mask_functions"]) if m != Full()]
            return reduce(and_, masks) if masks else Full()
        case "or_masks":
            return reduce(or_, map(read_mask, inner["mask_functions"]))
    raise ValueError(_refusal(name))


def packs(function: Callable[..., Any]) -> bool:
    """Whether transformers keeps documents apart in a mask function that read_mask can read."""
    if _name(function) == "packed_sequence_mask_function":
        return True
    inner = inspect.getclosurevars(function).nonlocals
    return any(map(packs, inner.get("mask_functions", ())))


def parts(mask: Mask) -> Iterator[Mask]:
    """The masks that all must allow a pair."""
    if isinstance(mask, And) and not isinstance(mask, Or):
        yield from parts(mask.a)
        yield from parts(mask.b)
    else:
        yield mask


def documents_of(mask: Mask) -> tuple[int, ...] | None:
    """cu_seqlens of a mask that keeps documents apart, or None."""
    found = [part.cu_seqlens for part in parts(mask) if isinstance(part, Document)]
    return found[0] if found else None


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function)).split(".")[0]


def _refusal(name: str) -> str:
    return (
        f"the model asks for the mask function {name}, which tilewise cannot represent; it reads "
        "causal and bidirectional masks, sliding windows and packed documents"
    )

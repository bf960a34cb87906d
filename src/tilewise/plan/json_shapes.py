"""What a value read from JSON must look like; errors name the place and the value."""

import math
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

_WORDS = MappingProxyType(
    {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}
)


Shape: TypeAlias = "type | OrNull | Each | dict[str, Any] | list[Any] | tuple[Any, ...]"
"""A kind of value, or shapes inside one another: see `require_shape`."""


class OrNull(NamedTuple):
    """null, or a value of this shape; an entry may be missing."""

    shape: Shape


class Each(NamedTuple):
    """An object of any names whose values have this shape."""

    shape: Shape


def require_shape(value: Any, shape: Shape, place: str) -> None:
    """Return if a value has a shape.

        {"links": {"inside": float}}    an object that has at least these entries
        [int]                           a list of any length
        ([int], str)                    a list of these two
        OrNull(int)                     null, or a whole number
        Each(int)                       an object of whole numbers

    Args:
        place: what errors call the value.
    Raises:
        ValueError: "plan.steps[0].transfers[2].src ('x') must be a whole number".
    """
    match shape:
        case OrNull(inner):
            if value is not None:
                require_shape(value, inner, place)
        case Each(inner):
            _require(isinstance(value, dict), value, place, "an object")
            for name, one in value.items():
                require_shape(one, inner, f"{place}.{name}")
        case dict():
            _require(isinstance(value, dict), value, place, "an object")
            for name, inner in shape.items():
                known = name in value or isinstance(inner, OrNull)
                _require(known, value, place, f"an object with the entry {name!r}")
                require_shape(value.get(name), inner, f"{place}.{name}")
        case list():
            (inner,) = shape
            _require(isinstance(value, list | tuple), value, place, "a list")
            for i, one in enumerate(value):
                require_shape(one, inner, f"{place}[{i}]")
        case tuple():
            wanted = f"a list of {len(shape)}"
            _require(isinstance(value, list | tuple), value, place, wanted)
            _require(len(value) == len(shape), value, place, wanted)
            for i, (one, inner) in enumerate(zip(value, shape, strict=True)):
                require_shape(one, inner, f"{place}[{i}]")
        case _:
            _require(_is(value, shape), value, place, _WORDS[shape])


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool) or kind is bool:
        return kind is bool and isinstance(value, bool)
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, kind)


def _require(good: bool, value: Any, place: str, wanted: str) -> None:
    if not good:
        text = repr(value)
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        raise ValueError(f"{place} ({shown}) must be {wanted}")

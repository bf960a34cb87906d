"""What callers pass where a plan, a mask or a layout belongs, refused in the same words everywhere.

It stands alone because plans, masks and layouts know nothing of each other.
"""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def must_be(kind: type[T], name: str, value: object, example: str) -> T:
    """Return value if it is of this kind.

    Raises:
        ValueError: "mask ('causal') must be a Mask, such as tw.Causal()".
    """
    if not isinstance(value, kind):
        what = value if isinstance(value, str | int | float | None) else type(value).__name__
        raise ValueError(f"{name} ({what!r}) must be a {kind.__name__}, such as {example}")
    return value

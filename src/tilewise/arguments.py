"""Arguments of public calls: words that they take, and values of a wrong kind, refused alike."""

import math
from collections.abc import Mapping
from numbers import Real
from operator import index
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, TypeVar, cast

T = TypeVar("T")

Save: TypeAlias = Literal["replay", "gathered"]
Validate: TypeAlias = Literal["always", "first", "never"]
DtypeName: TypeAlias = Literal["float64", "float32", "bfloat16", "float16"]
LayoutName: TypeAlias = Literal["contiguous", "zigzag", "striped"]
Moves: TypeAlias = Literal["kv", "q"]
Schedule: TypeAlias = Literal["greedy", "eager", "kv_first", "gather"]

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}.__getitem__

MOST_RANKS = 1 << 17
"""More than any cluster has: a plan of a mistyped number of ranks would take minutes to make."""

# What makes one, by the name of the kind.
EXAMPLES: Mapping[str, str] = MappingProxyType(
    {
        "Plan": "tw.ring(4)",
        "Mask": "tw.Causal()",
        "Layout": "tw.zigzag(num_tokens, world_size)",
        "Machine": 'tw.Machine.preset("h100x8")',
        "Workload": "tw.Workload(num_tokens=..., ...)",
    }
)


def dtype_name(dtype: object) -> DtypeName:
    """The name of a torch dtype, or a name as it is; check_dtype knows which there are."""
    return cast(DtypeName, str(dtype).removeprefix("torch."))


def require_type(kind: type[T], name: str, value: object, example: str | None = None) -> T:
    """Return value if it is of this kind.

    Args:
        example: what makes one; by default that of EXAMPLES.
    Raises:
        ValueError: "mask ('causal') must be a Mask, such as tw.Causal()".
    """
    if not isinstance(value, kind):
        what = value if isinstance(value, str | int | float | None) else type(value).__name__
        example = example or EXAMPLES[kind.__name__]
        raise ValueError(f"{name} ({what!r}) must be a {kind.__name__}, such as {example}")
    return value


def require_range(what: str, value: float, least: float = 1, most: float | None = None) -> None:
    """Refuse a number that is out of range.

    Raises:
        ValueError: "hosts (0) must be at least 1", or "must be from 1 to 250".
    """
    if not least <= value <= (math.inf if most is None else most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{what} ({value}) must be {bounds}")


def whole_number(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """The value as an int; True and False are none.

    Raises:
        ValueError: "rows (1.5) must be a whole number, at least 1", or as require_range.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} ({value!r}) must be a whole number, at least {least}")
    require_range(name, index(value), least)
    require_range(name, index(value), least, most)
    return index(value)


def real_number(name: str, value: Any) -> float:
    """The value as a float; True and False, texts and tensors are none.

    Raises:
        ValueError: "softcap ('30') must be a number, as tensor.item() gives it".
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} ({value!r}) must be a number, as tensor.item() gives it")
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def check_dtype(what: str, name: str) -> None:
    try:
        ITEM_BYTES(name)
    except KeyError:
        raise ValueError(
            f"{what} ({name!r}) must be float64, float32, bfloat16 or float16"
        ) from None

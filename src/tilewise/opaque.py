"""Values that torch's compiler takes as constants: it compiles anew for one that is not equal."""

from abc import ABCMeta
from typing import Any, Self
from uuid import uuid4


class OpaqueType(ABCMeta):
    """The metaclass of opaque values; execution/operator.py derives it from torch's own besides."""


class OpaqueValue(metaclass=OpaqueType):
    """A frozen value with == and hash, for execution/operator.py to register; without torch."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the value itself: it is frozen."""
        return self

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """A name for this very object, and what it stands for, in code that torch.fx writes.

        A new one every time, unlike id: torch's caches take code of the same text for the same.
        """
        name = f"{type(self).__name__}_{uuid4().hex}"
        return name, {name: self}

"""What torch's compiler may take as a constant: it compiles anew for a value that is not equal."""

from typing import Any


class Constant:
    """A frozen value with == and hash, for operators.py to register. It knows nothing of torch."""

    __slots__ = ()

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """A name for this very object, and what it stands for, in code that torch.fx writes."""
        name = f"{type(self).__name__}_{id(self)}"
        return name, {name: self}

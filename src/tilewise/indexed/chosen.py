"""A choice of keys for each query, in place of a mask."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from tilewise.arguments import require_dense, require_type, whole_number
from tilewise.masks.base import Mask

COMBINED = (
    "chosen keys are not combined with masks: they are all that a query attends to; choose among "
    "the keys that a mask shows by cp.index(..., mask=), and add a window by Chosen(..., window=)"
)


class Chosen:
    """The keys that each of this rank's queries attends to, by their global positions.

        out = cp.attention(q, k, v, mask=tw.Chosen(cp.index(q_index, k_index, weights, k=2048)))

    All heads attend to the same keys. It is an operand, as q is, and no mask: each rank has its
    own, of which ranks compare the shape alone, so that one call serves every step.

    Args:
        positions: whole numbers [(batch,) this rank's tokens, k], in any order, each key once a
            query; -1 stands for no key.
        within: a mask that shows each query all keys chosen for it, or the call is refused;
            `cp.attention` takes that of cp. None: any key may be chosen.
        window: how many tokens each query sees beside the choice, itself and those right before it,
            as far as `within` shows them. A key of both counts once.
    """

    __slots__ = ("positions", "window", "within")

    def __init__(
        self, positions: Tensor, within: Mask | None = None, window: int | None = None
    ) -> None:
        self.positions = require_type(Tensor, "positions", positions, "cp.index(...)")
        require_dense("positions", positions)
        if positions.is_floating_point() or positions.is_complex() or positions.ndim not in (2, 3):
            raise ValueError(
                f"positions is {positions.dtype} {list(positions.shape)}, but must be whole "
                "numbers [(batch,) this rank's tokens, k], as cp.index returns them"
            )
        self.window = window if window is None else whole_number("window", window)
        self.within = within if within is None else require_type(Mask, "within", within)

    def kept_to(self, mask: Mask) -> Chosen:
        """Return this choice with a mask that must show the chosen keys, unless it has one of its
        own.
        """
        return self if self.within is not None else Chosen(self.positions, mask, self.window)

    def __repr__(self) -> str:
        return f"Chosen({list(self.positions.shape)})"

    def _combined(self, other: Any) -> NoReturn:
        raise TypeError(f"{self!r} with {other!r}: {COMBINED}")

    __and__ = __rand__ = __or__ = __ror__ = __add__ = __radd__ = _combined

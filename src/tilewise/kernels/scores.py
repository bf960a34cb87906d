"""What an attention does to its scores and weights: one value from the caller to the kernel."""

from itertools import compress
from typing import NamedTuple

from torch import Tensor


class Places(NamedTuple):
    """Where a call's rows, keys and heads lie in the whole attention; batch rows count from 0.

    Attributes:
        q_positions, k_positions: global, int64 [m] and [n], on the device of the tensors.
        first_head: which of all query heads the call's first one is.
    """

    q_positions: Tensor
    k_positions: Tensor
    first_head: int


class Scores(NamedTuple):
    """out = dropout(softmax(cap(scale q k^T) + mask)) v;  cap(x) = softcap tanh(x / softcap).

    Attributes:
        softcap: None: no cap.
        dropout_p: the share of weights that are dropped; the others grow by 1 / (1 - dropout_p).
            lse is that without dropout.
        dropout_seed: with it and `places`, kernels.dropout says which pairs are dropped.
        max_logit: the largest score of every row is asked for, after the cap.
        places: of one kernel call, if there is dropout.
    """

    scale: float
    softcap: float | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    max_logit: bool = False
    places: Places | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        """What not every kernel has, by the name of the argument that asks for it."""
        asked = self.softcap is not None, self.dropout_p > 0, self.max_logit
        names = "softcap", "dropout_p", "return_max_logit"
        return tuple(compress(names, asked)) if any(asked) else ()


def lacks(needs: tuple[str, ...], *has: str) -> str | None:
    """Why a kernel that has these cannot serve what needs those; None if it can."""
    missing = [name for name in needs if name not in has]
    return f"it has no {', '.join(missing)}" if missing else None

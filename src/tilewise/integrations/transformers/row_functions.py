"""Functions of logits that act on each token by itself, so that a rank may run them on its rows.

A Trainer's preprocess_logits_for_metrics (argmax, say) makes little of large logits. If it runs
before ranks gather, they never hold the whole logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LAST_DIM = frozenset(("argmax", "argmin", "max", "min", "topk", "sum", "amax", "amin", "logsumexp"))
SOFTMAX = frozenset(("_softmax", "_log_softmax"))
COPIES = frozenset(("_to_copy", "detach", "clone", "alias"))


class _ByToken(TorchDispatchMode):
    """Watches which operators make results of logits [batch, tokens, vocabulary].

    Attributes:
        derived: tensors of which each number [i, j, ...] comes of logits[i, j] alone, by id.
    """

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.derived: dict[int, Tensor] = {id(logits): logits}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable:  # before it changes logits that are still needed
            raise ValueError(f"{func} changes a tensor in place")
        made = func(*args, **(kwargs or {}))
        if self._by_token(func, args, kwargs or {}):
            self.derived |= {id(x): x for x in tree_leaves(made) if isinstance(x, Tensor)}
        return made

    def _by_token(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        name = func._schema.name.split("::")[1]
        if not inputs or any(id(x) not in self.derived for x in inputs):
            return False
        if name in COPIES or torch.Tag.pointwise in func.tags:
            return len({x.shape for x in inputs}) == 1
        x = inputs[0]
        if len(inputs) > 1 or x.ndim < 3:
            return False
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        dims = named.get("dim", -1 if name == "topk" else None)
        dims = dims if isinstance(dims, list | tuple) else [dims]
        within = bool(dims) and all(d is not None and d % x.ndim >= 2 for d in dims)
        return name in LAST_DIM | SOFTMAX and within


def by_token(function: Callable[..., Any], logits: Tensor, labels: Any) -> Tensor | None:
    """Return function(logits, labels) if it is known to act on each token by itself, else None.

    Known operators alone make the result of logits, over the vocabulary or number by number, and
    none reads labels; half of the tokens give half of the result.

    Args:
        logits: [batch, tokens, vocabulary].
    """
    half = logits.shape[1] // 2
    try:
        with _ByToken(logits) as watch:
            result = function(logits, labels)
        if not isinstance(result, Tensor) or id(result) not in watch.derived:
            return None
        part = function(logits[:, :half].contiguous(), labels)
    except Exception:  # of whole rows it may take more, or say what is wrong
        return None
    same = isinstance(part, Tensor) and torch.equal(part, result[:, :half])
    return result if same else None

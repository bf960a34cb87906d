"""A tensor of whole rows that is gathered from all ranks when it is first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

OPERATORS = (  # which Python looks up in a class, not in a value
    *("getitem", "len", "iter", "neg", "abs", "bool", "float", "int", "array"),
    *(f"{side}{name}" for side in ("", "r") for name in ("add", "sub", "mul", "truediv", "matmul")),
    *("pow", "lt", "le", "gt", "ge", "eq", "ne"),
)


class LateGather:
    """Stands for a tensor. Its first use gathers it, so all ranks have to use it.

    Args:
        gather: makes the whole tensor of every rank's share.
    """

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __init__(self, gather: Callable[[], Tensor]) -> None:
        self._gather = gather
        self._by_grad_mode: dict[bool, Tensor] = {}

    def whole(self) -> Tensor:
        """The tensor, gathered once with a gradient and once without."""
        mode = torch.is_grad_enabled()
        if mode not in self._by_grad_mode:
            self._by_grad_mode[mode] = self._gather()
        return self._by_grad_mode[mode]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle ask for what a tensor has, too
            raise AttributeError(name)
        return getattr(self.whole(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given: Any = tree_map_only(cls, lambda x: x.whole(), (args, dict(kwargs or {})))
        return func(*given[0], **given[1])


def _operator(name: str) -> Callable[..., Any]:
    def call(self: LateGather, *args: Any) -> Any:
        args = tree_map_only(LateGather, lambda x: x.whole(), args)
        return getattr(self.whole(), name)(*args)

    return call


for _name in OPERATORS:
    setattr(LateGather, f"__{_name}__", _operator(f"__{_name}__"))

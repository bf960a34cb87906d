"""The two helpers of ring-flash-attn's utils that other libraries' own attention is built with."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, isfunction, signature
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor


class AllGatherComm:
    """Gathers that are under way in a group, until `wait`.

    Args:
        group: None: the default group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.handles: list[dist.Work] = []

    def all_gather(self, output_tensor: Tensor, input_tensor: Tensor) -> None:
        """Begin to gather every rank's input_tensor into output_tensor, rank after rank."""
        work = dist.all_gather_into_tensor(
            output_tensor, input_tensor, group=self.group, async_op=True
        )
        self.handles.append(cast("dist.Work", work))

    def wait(self) -> None:
        """Return when all that was begun is there."""
        for handle in self.handles:
            handle.wait()
        self.handles.clear()


def get_default_args(func: Callable[..., Any]) -> dict[str, Any]:
    """Return each argument of flash_attn's private functions with its default, or None.

    Args:
        func: a function, or a custom operator of torch.
    """
    plain = func if isfunction(func) else cast("Any", func)._init_fn
    values = {
        name: None if one.default is Parameter.empty else one.default
        for name, one in signature(plain).parameters.items()
    }
    return values | {"softcap": 0.0} if "softcap" in values else values

"""The helpers of ring-flash-attn's utils that other libraries' own attention is built with."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, isfunction, signature
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tilewise.masks.base import as_ints


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


def flatten_varlen_lse(lse: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[sequences, heads, longest] -> [heads, rows], without what pads the shorter sequences."""
    edges = as_ints(cu_seqlens, "cu_seqlens")
    spans = enumerate(pairwise(edges))
    return torch.cat([lse[at, :, : end - start] for at, (start, end) in spans], 1)


def unflatten_varlen_lse(lse: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """[rows, heads, 1] -> [sequences, heads, max_seqlen], 0 behind a sequence's end."""
    edges = as_ints(cu_seqlens, "cu_seqlens")
    rows = [lse[start:end, :, 0] for start, end in pairwise(edges)]
    padded = [F.pad(x, (0, 0, 0, max_seqlen - len(x))) for x in rows]
    return torch.stack(padded).transpose(1, 2).contiguous()

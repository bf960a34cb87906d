"""Models of diffusers under parity: a loss of what they return, and one rank's share of a step."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.layouts.layout import contiguous
from tilewise.transport.resolve import LocalTransport, transport_for


def is_image_model(model: nn.Module) -> bool:
    """Return whether a model is one of diffusers."""
    return any(one.__module__.startswith("diffusers.") for one in type(model).__mro__)


def is_split_here(model: nn.Module) -> bool:
    """Return whether a model is one of diffusers that enable_parallelism splits by itself."""
    if not is_image_model(model):
        return False
    from tilewise.integrations.diffusers import TRIED

    return type(model).__name__ in TRIED


def with_loss(model: nn.Module) -> nn.Module:
    """Return the model with a loss in place of its sample, which weighs each number by another.

    Parameters and submodules are the model's own, under their names.
    """
    kind = type(model)

    @wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        samples = kind.forward(self, *args, **{**kwargs, "return_dict": False})
        flat = torch.cat([x.flatten() for x in samples])
        weights = torch.randn(flat.shape, generator=torch.Generator().manual_seed(0))
        return (flat * weights.to(flat)).sum() / len(flat) ** 0.5

    weighed = copy.copy(model)
    weighed.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return weighed


def num_split_rows(model: nn.Module, inputs: Mapping[str, Any]) -> int:
    """Return how many rows of a model are split in a call with these inputs."""
    from tilewise.integrations.diffusers import enable_parallelism, split_rows

    alone = enable_parallelism(copy.deepcopy(model), LocalTransport())
    with torch.no_grad():
        alone(**copy.deepcopy(dict(inputs)))
    return split_rows(alone)


def image_share(model: Any, inputs: Mapping[str, Any], rank: int, group: Any) -> Any:
    """One rank's share of a model through enable_parallelism: the whole loss, and its rows."""
    from tilewise.integrations.diffusers import enable_parallelism, split_rows

    loss = enable_parallelism(model, group)(**inputs)
    n, rows = transport_for(group).world_size, split_rows(model)
    if rows < n:
        raise ValueError(f"{type(model).__name__} has {rows} rows for {n} ranks; give each one")
    return loss, contiguous(rows, n).positions(rank)

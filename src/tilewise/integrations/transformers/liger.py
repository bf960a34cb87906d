"""Liger's kernels in models that a Trainer splits (use_liger_kernel).

When training begins, transformers lets Liger replace functions of a model's layers, each of which
acts on a token by itself, and the model's forward, whose fused loss never holds logits. Split calls
hand that forward labels that were shifted over whole rows, and the count of the whole batch, so
that the losses of all ranks add up to the loss of the unsplit model.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from tilewise.integrations.transformers.refusals import LIGER, check_allowed


class WithLiger(NamedTuple):
    """A class of models, and the version of liger-kernel; empty where it is missing."""

    name: str
    version: str


def check_liger(model: Any) -> None:
    """Raise ValueError for a model of transformers that cannot be split with Liger's kernels."""
    # FSDP2 gives a model a class made at run time.
    classes = (x for x in type(model).__mro__ if not x.__module__.startswith("torch.distributed"))
    try:
        installed = version("liger-kernel")
    except PackageNotFoundError:
        installed = ""
    check_allowed(LIGER, WithLiger(next(classes).__name__, installed))

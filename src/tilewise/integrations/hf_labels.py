"""Labels that were sharded by hand are refused: a model would make a wrong loss of them."""

from typing import Any

from torch import nn

from tilewise.context_parallel import ContextParallel
from tilewise.integrations.hf_saved import Shared
from tilewise.transport.agreement import agree
from tilewise.transport.resolve import transport_for


def refuse_labels_sharded_by_hand(model: nn.Module, cp: ContextParallel, *, masked: bool) -> None:
    """Make calls of a model raise ValueError for labels that did not come from hf.shard.

    The model would shift a rank's labels over the borders of its shards, and its loss would be the
    mean over this rank's labels in place of the rank's share of the whole mean.

    Args:
        cp: which it runs over, in place of one of an earlier call.
        masked: the model predicts labels where they are, so there is nothing to shift.
    """
    if not hasattr(model, "_tilewise_labels"):
        model.register_forward_pre_hook(_check, with_kwargs=True)
    model._tilewise_labels = _Labels(cp, masked)  # pyright: ignore[reportArgumentType]


class _Labels(Shared):
    """The ranks over which a model runs, and whether it predicts labels where they are."""

    def __init__(self, cp: ContextParallel, masked: bool) -> None:
        self.cp, self.masked = cp, masked


def _check(model: Any, _: Any, given: dict[str, Any]) -> None:
    labels: _Labels | None = model._tilewise_labels
    if labels is None:
        return
    cp = labels.cp
    needed = ("num_items_in_batch",) if labels.masked else ("shift_labels",)
    missing = [name for name in needed if given.get(name) is None]
    if cp.world_size == 1 or given.get("labels") is None or not missing:
        return
    error = (
        f"labels are given without {missing[0]}: the model would take the mean over this rank's "
        "labels alone, and shift them over the borders of its shards; call it with what "
        "hf.shard(cp, input_ids, labels=labels) makes of the whole rows; a Trainer is split by "
        "ParallelismConfig of tilewise.integrations.accelerate, in place of hf.parallelize"
    )
    agree(transport_for(cp.group), None, error)

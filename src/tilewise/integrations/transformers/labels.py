"""Calls of which a split model would make a wrong loss are refused."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

import tilewise as tw
from tilewise.integrations.transformers.saved import Shared, is_split
from tilewise.transport.agreement import agree

LABELS = (  # arguments of which models of transformers make a loss
    *("labels", "shift_labels", "start_positions", "end_positions", "next_sentence_label"),
)


def given_labels(given: Mapping[str, Any]) -> list[str]:
    """Names of the arguments of a call that ask for the model's own loss."""
    return [name for name in LABELS if given.get(name) is not None]


def refuse_wrong_losses(
    model: nn.Module, cp: tw.ContextParallel, *, masked: bool, loss_refusal: str | None = None
) -> None:
    """Make calls of a model raise ValueError for labels that give a wrong loss.

    The model would shift labels that were sharded by hand over the borders of its shards, and its
    loss would be the mean over this rank's labels in place of the rank's share of the whole mean.

    Args:
        cp: which it runs over, in place of one of an earlier call.
        masked: the model predicts labels where they are, so there is nothing to shift.
        loss_refusal: why the model is to be called without labels; None: it may have them.
    """
    if not hasattr(model, "_tilewise_labels"):
        model.register_forward_pre_hook(_check, with_kwargs=True)
        model.register_forward_hook(_check_pooled)
    model._tilewise_labels = _Labels(cp, masked, loss_refusal)  # pyright: ignore[reportArgumentType]


class _Labels(Shared):
    """Facts of a split model by which calls with labels are refused.

    Args:
        cp: the ranks over which it runs.
        masked, loss_refusal: as refuse_wrong_losses takes them.
    """

    def __init__(self, cp: tw.ContextParallel, masked: bool, loss_refusal: str | None) -> None:
        self.cp, self.masked, self.loss_refusal = cp, masked, loss_refusal


def _check(model: Any, _: Any, given: dict[str, Any]) -> None:
    labels: _Labels = model._tilewise_labels
    if not is_split(model) or labels.cp.world_size == 1 or not given_labels(given):
        return
    cp, loss_refusal = labels.cp, labels.loss_refusal
    needed = ("num_items_in_batch",) if labels.masked else ("shift_labels",)
    missing = [name for name in needed if given.get(name) is None]
    if loss_refusal is not None:
        agree(tw.transport.transport_for(cp.group), None, loss_refusal)
    elif given.get("labels") is not None and missing:
        error = (
            f"labels are given without {missing[0]}: the model would take the mean over this "
            "rank's labels alone, and shift them over the borders of its shards; call it with what "
            "hf.shard(cp, input_ids, labels=labels) makes of the whole rows; a Trainer is split by "
            "ParallelismConfig of tilewise.integrations.accelerate, in place of hf.parallelize"
        )
        agree(tw.transport.transport_for(cp.group), None, error)


def _check_pooled(model: Any, _: Any, result: Any) -> None:
    labels: _Labels = model._tilewise_labels
    if not is_split(model) or labels.cp.world_size == 1 or labels.loss_refusal is None:
        return
    if not isinstance(result, Mapping):
        return
    tensors = {name: x for name, x in result.items() if isinstance(x, Tensor)}
    first = next((x for x in tensors.values() if x.is_floating_point()), None)
    pooled = (
        []
        if first is None
        else [
            name
            for name, x in tensors.items()
            if x.is_floating_point() and x.shape[1:2] != first.shape[1:2]
        ]
    )
    if pooled:
        error = (
            f"{type(model).__name__} returned {', '.join(pooled)}, made of this rank's rows alone: "
            "make the model without it (add_pooling_layer=False, say), and pool what "
            "hf.unshard(cp, rows) gives"
        )
        agree(tw.transport.transport_for(labels.cp.group), None, error)


def is_masked(model_class: type) -> bool:
    """Return whether a model predicts its labels where they are, and not one token before."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    names = {x for n in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values() for x in _names(n)}
    return any(base.__name__ in names for base in model_class.__mro__)


def _names(value: Any) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else (value,)

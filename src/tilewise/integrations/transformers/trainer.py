"""Arguments and a collator for the Trainer of transformers, whose rows ParallelismConfig splits."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import tilewise as tw
from tilewise.integrations.data import refuse_images


def arguments(
    cp: tw.ContextParallel, model: nn.Module, args: Any, datasets: Mapping[str, Any]
) -> dict[str, Any]:
    """Keyword arguments of a Trainer: model, args, data_collator and the datasets that are given.

    Args:
        args: TrainingArguments, of which a copy is returned.
        datasets: train_dataset and eval_dataset.
    Raises:
        ValueError: if the ranks of cp are not those that share a row under accelerate.
    """
    from tilewise.integrations.transformers.accelerate import ParallelismConfig

    if args.world_size % cp.world_size or args.process_index % cp.world_size != cp.rank:
        raise ValueError(
            f"process {args.process_index} of {args.world_size} is rank {cp.rank} of "
            f"{cp.world_size} of its sequence, but must be rank "
            f"{args.process_index % cp.world_size}: the ranks of a sequence must follow one "
            'another, as in init_device_mesh(..., (num_dp, num_cp), mesh_dim_names=("dp", "cp"))'
        )
    args = copy.copy(args)
    args.parallelism_config = ParallelismConfig(
        cp_size=cp.world_size, strategy=cp.strategy, reduction=cp.reduction
    )
    given = {name: rows for name, rows in datasets.items() if rows is not None}
    return {"model": model, "args": args, "data_collator": _collator(), **given}


def _collator() -> Any:
    """transformers' DataCollatorWithFlattening, of examples without their padding."""
    from transformers import DataCollatorWithFlattening

    class WithoutPadding(DataCollatorWithFlattening):
        def __call__(self, features: Any, *args: Any, **given: Any) -> Any:
            kept = [_kept(number, example) for number, example in enumerate(features)]
            return super().__call__(kept, *args, **given)

    return WithoutPadding()


def _kept(number: int, example: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens of an example that its attention_mask does not hide."""
    refuse_images(example, f"example {number} of a batch")
    if "input_ids" not in example:
        raise ValueError(
            "an example has no input_ids: tokenise the dataset first, or use TRL's SFTTrainer, "
            "which does"
        )
    columns = {name: example[name] for name in ("input_ids", "labels") if name in example}
    if "attention_mask" in example:
        kept = torch.as_tensor(example["attention_mask"]).bool()
        columns = {name: torch.as_tensor(column)[kept] for name, column in columns.items()}
    return columns

"""The Trainer of transformers over a split sequence: its data, packed and the same on all ranks.

    trainer = Trainer(**hf.trainer_args(cp, model, args, train_dataset=documents))

accelerate deals a dataset out to processes item by item. So that the ranks of one sequence get the
same item, the dataset here has each packed sequence once for each of them.
"""

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from tilewise.context_parallel import ContextParallel
from tilewise.integrations.data import Inputs, ShardingCollator, pack

Example = Mapping[str, Any]


class PackedSequences(IterableDataset[list[Example]]):
    """Documents packed into sequences of num_tokens, each sequence once for each rank of cp.

    Args:
        documents: as ShardingCollator takes them; padding on the right is left out.
        num_copies: ranks that share a sequence.
        num_readers: all ranks that read, those of other sequences too.
        seed: of the order, which is another one in each epoch; None: the order of packing.
    """

    def __init__(
        self,
        documents: Sequence[Example],
        num_tokens: int,
        *,
        num_copies: int,
        num_readers: int,
        seed: int | None = None,
    ):
        self.documents, self.seed, self.epoch = documents, seed, 0
        self.num_copies, self.num_readers = num_copies, num_readers
        self.groups = pack((_length(document) for document in documents), num_tokens)

    def __len__(self) -> int:
        return len(self.groups) * self.num_copies

    def set_epoch(self, epoch: int) -> None:
        """accelerate calls it on every process."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[Example]]:
        order = list(range(len(self.groups)))
        if self.seed is not None:
            make = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(order), generator=make).tolist()
        at_once = self.num_readers // self.num_copies
        steps = [order[i : i + at_once] for i in range(0, len(order), at_once)]
        worker = get_worker_info()
        for step in steps if worker is None else steps[worker.id :: worker.num_workers]:
            for group in step:
                sequence = [self.documents[index] for index in self.groups[group]]
                yield from [sequence] * self.num_copies


class _SequenceCollator(ShardingCollator):
    """A batch of one sequence, which is a list of documents."""

    def __call__(self, examples: Sequence[Any]) -> Inputs:
        (documents,) = examples
        return super().__call__(documents)


def _length(document: Example) -> int:
    if "input_ids" not in document:
        raise ValueError(
            f"an example has the columns {', '.join(map(str, document)) or '(none)'}, but needs "
            "input_ids, and labels if they are not the same: tokenise the dataset first"
        )
    mask = document.get("attention_mask")
    return len(document["input_ids"]) if mask is None else int(torch.as_tensor(mask).sum())


def arguments(
    cp: ContextParallel, args: Any, datasets: Mapping[str, Sequence[Example] | None], masked: bool
) -> dict[str, Any]:
    """Keyword arguments of a Trainer: args, datasets and data_collator.

    Args:
        datasets: train_dataset and eval_dataset.
        masked: whether the model predicts labels where they are.
    """
    _check(cp, args)
    args = copy.copy(args)
    args.accelerator_config = copy.copy(args.accelerator_config)
    args.accelerator_config.dispatch_batches = False  # every process reads for itself
    args.accelerator_config.split_batches = False
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        if getattr(args, name) not in (1, _default(args, name)):
            warnings.warn(
                f"{name} ({getattr(args, name)}) becomes 1: a step has one sequence of "
                f"{cp.layout.num_tokens} tokens, into which documents are packed; for more tokens "
                "a step raise num_tokens or gradient_accumulation_steps",
                stacklevel=4,
            )
        setattr(args, name, 1)
    args.average_tokens_across_devices = True  # ranks' shares of the loss add up
    if args.neftune_noise_alpha is not None:  # transformers divides by the root of a rank's rows
        share = max(1, cp.layout.size(cp.rank)) / cp.layout.num_tokens
        args.neftune_noise_alpha *= share**0.5
    args.prediction_loss_only = True  # ranks have logits of their own tokens
    seed = args.seed if args.data_seed is None else args.data_seed
    shuffles = getattr(args, "train_sampling_strategy", "random") != "sequential"
    packed = {
        name: PackedSequences(
            documents,
            cp.layout.num_tokens,
            num_copies=cp.world_size,
            num_readers=args.world_size,
            seed=seed if shuffles and name == "train_dataset" else None,
        )
        for name, documents in datasets.items()
        if documents is not None
    }
    collator = _SequenceCollator(cp.layout, cp.rank, shift_labels=not masked)
    return {"args": args, "data_collator": collator, **packed}


def _default(args: Any, name: str) -> Any:
    """The default of a field of TrainingArguments."""
    return next(field.default for field in fields(args) if field.name == name)


def _check(cp: ContextParallel, args: Any) -> None:
    if args.world_size % cp.world_size or args.process_index % cp.world_size != cp.rank:
        raise ValueError(
            f"process {args.process_index} of {args.world_size} is rank {cp.rank} of "
            f"{cp.world_size} of its sequence, but must be rank "
            f"{args.process_index % cp.world_size}: the ranks of a sequence must follow one "
            'another, as in init_device_mesh(..., (num_dp, num_cp), mesh_dim_names=("dp", "cp"))'
        )
    if args.label_smoothing_factor:
        raise ValueError(
            f"label_smoothing_factor ({args.label_smoothing_factor}) must be 0: the Trainer would "
            "shift this rank's labels, which are shifted already"
        )

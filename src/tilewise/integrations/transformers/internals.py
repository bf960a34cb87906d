"""Private names of transformers, accelerate and TRL, all in this file.

The ranks that share a row count as one where rows are counted: gathering takes each row once,
num_processes is the number of data-parallel ranks, and seeds of workers and shares of a list go by
the row. process_index stays the rank, by which accelerate, transformers and scripts choose the one
that writes a file, and name files. transformers 5.23, accelerate 1.15 and TRL 1.16 ask for this in
several places, which are replaced here, for an Accelerator whose ParallelismConfig is ours alone.
"""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilewise.integrations.seeds import share_random_state
from tilewise.integrations.transformers.check import base_model, models_inside
from tilewise.integrations.transformers.forward import split_forward, whole_logits
from tilewise.integrations.transformers.liger import check_liger
from tilewise.integrations.transformers.noise import noise_of_batch
from tilewise.integrations.transformers.refusals import LAUNCHERS, LOADERS, TRAINERS, check_allowed


def split_size() -> int:
    """Ranks that share a row, of the Accelerator of this process; 1 if it does not split."""
    from accelerate.state import AcceleratorState

    config = AcceleratorState._shared_state.get("parallelism_config")
    return size_of(config)


def size_of(config: Any) -> int:
    """Ranks that share a row by a ParallelismConfig; 1 if it is not ours."""
    return config.row_ranks if getattr(config, "splits_forward", False) else 1


class SplitAccelerator:
    """The methods that an Accelerator of ours has in place of its own.

    Attributes:
        deals_to_ranks: while data loaders are dealt out: num_processes counts all ranks, of which
            accelerate takes those of one row together by its mesh.
        cuts_rows: while TRL cuts a row's share out of what was gathered: process_index is the row.
        hands_out_rows: while TRL makes a data loader of which the first process alone reads, and
            hands each of the others its row.
    """

    deals_to_ranks = False
    hands_out_rows = False
    cuts_rows = False

    @property
    def num_processes(self) -> int:
        """Ranks that have rows of their own; for functions that save and load FSDP, all ranks."""
        all_ranks = super().num_processes  # type: ignore[misc]
        saves = sys._getframe(1).f_globals.get("__name__") == "accelerate.utils.fsdp_utils"
        return all_ranks if self.deals_to_ranks or saves else all_ranks // self._row_ranks

    @property
    def process_index(self) -> int:
        """This rank, so that one alone is 0 and writes."""
        return super().process_index // (self._row_ranks if self.cuts_rows else 1)  # type: ignore[misc]

    @property
    def is_last_process(self) -> bool:
        return dist.get_rank() == dist.get_world_size() - 1

    @property
    def dispatch_batches(self) -> bool:
        """False: every rank reads for itself, and the ranks that share a row read the same."""
        if self.hands_out_rows:
            return True
        check_allowed(LOADERS, super().dispatch_batches)  # type: ignore[misc]
        return False

    @property
    def _row_ranks(self) -> int:
        return size_of(self.parallelism_config)  # type: ignore[attr-defined]

    def prepare(self, *args: Any, **given: Any) -> Any:
        for model in args:
            if isinstance(model, nn.Module):
                self._split(model)
        return super().prepare(*args, **given)  # type: ignore[misc]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Split and prepare a model. One that only evaluated is prepared anew when it trains.

        accelerate would return it as it is, without DDP: each rank would train by itself.
        """
        self._split(model)
        if not evaluation_mode:
            self.forget_evaluation(model)
        evaluates = evaluation_mode and not getattr(model, "_is_accelerate_prepared", False)
        prepared = super().prepare_model(model, device_placement, evaluation_mode)  # type: ignore[misc]
        if evaluates:
            model._tilewise_evaluates = True  # pyright: ignore[reportArgumentType]
        return prepared

    def forget_evaluation(self, model: nn.Module) -> bool:
        """Undo that a model was prepared to evaluate; return False if it was not."""
        if not vars(model).pop("_tilewise_evaluates", False):
            return False
        self._models: list[Any]
        self._models = [
            x
            for x in self._models
            if self.unwrap_model(x, keep_torch_compile=False) is not model  # type: ignore[attr-defined]
        ]
        self.unwrap_model(model, keep_fp32_wrapper=False)  # type: ignore[attr-defined]
        model._is_accelerate_prepared = False  # pyright: ignore[reportArgumentType]
        return True

    def prepare_data_loader(self, data_loader: Any, *args: Any, **given: Any) -> Any:
        if self.hands_out_rows:
            data_loader.collate_fn = _row_of_each_rank(data_loader.collate_fn, self._row_ranks)
        self.deals_to_ranks = True
        try:
            return super().prepare_data_loader(data_loader, *args, **given)  # type: ignore[misc]
        finally:
            self.deals_to_ranks = False

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Deal a list out to rows; the ranks that share a row get the same."""
        with _row_state().split_between_processes(inputs, apply_padding) as share:
            yield share

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """accelerate's reduce; a sum counts the first rank of each row."""
        from accelerate.utils import operations

        if reduction == "sum" and dist.get_rank() % self._row_ranks:
            tensor = operations.recursively_apply(torch.zeros_like, tensor)
        return super().reduce(tensor, reduction, scale)  # type: ignore[misc]

    def _split(self, model: nn.Module) -> None:
        from transformers.modeling_layers import GenericForSequenceClassification

        inside = models_inside(model)
        if len(inside) != 1:
            names = ", ".join(type(x).__name__ for x in inside)
            self._says_unsplit(model, f"it holds {names}" if inside else "it holds none")
            return
        split_model: Any = inside[0]
        if "SequenceClassification" in type(split_model).__name__ and not _trains(split_model):
            return  # a reward model, which runs on whole rows
        reads_last_token = isinstance(inside[0], GenericForSequenceClassification)
        if reads_last_token:  # the head gets whole rows
            split_model = split_model.base_model
        config = self.parallelism_config  # type: ignore[attr-defined]
        if self.is_main_process and getattr(split_model, "_tilewise_rows", None) is None:  # type: ignore[attr-defined]
            logging.getLogger("tilewise").warning(
                "%s: each row is split over %d ranks", type(split_model).__name__, self._row_ranks
            )
        group = self.torch_device_mesh["cp"].get_group()  # type: ignore[attr-defined]
        split_forward(split_model, group, config.strategy, config.reduction)

    def _says_unsplit(self, model: nn.Module, reason: str) -> None:
        if self.is_main_process and _trains(model):  # type: ignore[attr-defined]
            warnings.warn(
                f"{type(model).__name__} is not split: each of the {self._row_ranks} ranks that "
                "share a row computes all of it. One model of transformers is split, by itself or "
                f"within a module; {reason}",
                stacklevel=4,
            )


def _trains(model: nn.Module) -> bool:
    return model.training and any(x.requires_grad for x in model.parameters())


def _row_of_each_rank(collate: Callable[[Any], Any], size: int) -> Callable[[Any], Any]:
    """A batch's rows, each as often as ranks share it: process i is handed row i."""
    return lambda examples: {k: x.repeat_interleave(size, 0) for k, x in collate(examples).items()}


@functools.cache
def _split_class(of: type) -> type:
    return type(of.__name__, (SplitAccelerator, of), {"__module__": of.__module__})


def split_accelerator(accelerator: Any) -> None:
    """Make an Accelerator split the models that it prepares.

    Raises:
        ValueError: for what it cannot split under.
    """
    check_allowed(LAUNCHERS, accelerator)
    if not isinstance(accelerator, SplitAccelerator):
        accelerator.__class__ = _split_class(type(accelerator))


class RowCount:
    """The state of this process, with rows in place of processes."""

    _shared_state: dict[str, Any]

    @property
    def num_processes(self) -> int:
        return self._shared_state["num_processes"] // split_size()

    @property
    def process_index(self) -> int:
        return self._shared_state["process_index"] // split_size()


def _row_state() -> Any:
    from accelerate.state import PartialState

    return type("PartialState", (RowCount, PartialState), {})()


@functools.cache
def install() -> None:
    """Replace what accelerate and transformers ask of processes, once in a process."""
    from accelerate import scheduler
    from accelerate.state import AcceleratorState
    from accelerate.utils import operations, random

    class RowState(RowCount, AcceleratorState):
        """AcceleratorState that counts rows in place of processes, for schedulers' steps and for
        seeds.
        """

    scheduler.AcceleratorState = random.AcceleratorState = RowState
    operations._gpu_gather = _once_a_row(operations._gpu_gather, operations)
    operations._gpu_gather_object = _objects_once_a_row(operations._gpu_gather_object)
    try:
        import transformers
    except ImportError:  # Accelerator in a loop of one's own
        return
    arguments: Any = transformers.TrainingArguments
    trainer: Any = transformers.Trainer
    rows = ("_get_train_sampler",)  # BatchRebalanceSampler deals out by itself
    arguments.world_size = _by_row(arguments.world_size, ("__post_init__", *rows))
    arguments.process_index = _by_row(arguments.process_index, ("_get_dataloader", *rows), least=0)
    create = trainer.create_accelerator_and_postprocess
    trainer.create_accelerator_and_postprocess = _with_split(create)
    trainer._get_num_items_in_batch = _undivided(trainer._get_num_items_in_batch)
    from transformers.integrations import neftune

    neftune.neftune_post_forward_hook = noise_of_batch(neftune.neftune_post_forward_hook)


def _once_a_row(gather: Callable[[Any], Any], operations: Any) -> Callable[[Any], Any]:
    """Wrap accelerate's gather so that each row counts once, not once for each of its ranks."""

    @functools.wraps(gather)
    def gather_rows(tensor: Any) -> Any:
        if split_size() == 1:
            return gather(tensor)
        return operations.recursively_apply(_from_rows, tensor)

    return gather_rows


def _from_rows(x: Tensor) -> Tensor:
    """Return the tensors of all rows, one after the other, as the first rank of each has them."""
    from accelerate.state import AcceleratorState

    mesh: Any = AcceleratorState().device_mesh
    row = mesh["cp"].get_group()
    mine = torch.atleast_1d(x).contiguous()
    mine = mine if dist.get_rank(row) == 0 else torch.empty_like(mine)
    dist.broadcast(mine, dist.get_global_rank(row, 0), group=row)
    if dist.get_world_size() == dist.get_world_size(row):
        return mine
    group = mesh["dp"].get_group()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return torch.cat(parts)


def _objects_once_a_row(gather: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(gather)
    def gather_rows(objects: Any) -> Any:
        size = split_size()
        if size == 1:
            return gather(objects)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, objects)
        return [x for one in everyone[::size] for x in one]

    return gather_rows


def _by_row(number: property, callers: tuple[str, ...], least: int = 1) -> property:
    """A number of TrainingArguments, which some functions of transformers ask for by row.

    Args:
        number: world_size or process_index: of all processes, for who writes and names files.
        callers: __post_init__ divides GRPO's generation_batch_size by world_size, _get_dataloader
            seeds workers by process_index.
    """
    of_processes: Any = number.fget

    def of_arguments(self: Any) -> int:
        size = size_of(self.parallelism_config)
        if size > 1 and sys._getframe(1).f_code.co_name in callers:
            return max(least, of_processes(self) // size)
        return of_processes(self)

    return property(of_arguments)


def _undivided(count: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the Trainer's count of num_items_in_batch, so that it does not divide by cp_size.

    Gathering has taken each row once already.
    """

    @functools.wraps(count)
    def count_once(self: Any, *args: Any, **given: Any) -> Any:
        config: Any = getattr(self.accelerator, "parallelism_config", None)
        if size_of(config) == 1:
            return count(self, *args, **given)
        size, config.cp_size = config.cp_size, 1
        try:
            return count(self, *args, **given)
        finally:
            config.cp_size = size

    return count_once


def _with_split(create: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(create)
    def create_accelerator_and_postprocess(self: Any) -> None:
        create(self)
        size = size_of(getattr(self.accelerator, "parallelism_config", None))
        if size > 1:
            count_completions(self.args, size)
            check_allowed(TRAINERS, self)
            _adapt(self)

    return create_accelerator_and_postprocess


def count_completions(args: Any, size: int) -> None:
    """Correct generation_batch_size of GRPO and RLOO if it was computed before rows were split."""
    steps = getattr(args, "steps_per_generation", None)
    if steps is not None:
        of_all = args.per_device_train_batch_size * args.world_size * steps
        if args.generation_batch_size == of_all:
            args.generation_batch_size = of_all // size


def _adapt(trainer: Any) -> None:
    """Give a Trainer logits where it asks for them, and completions that ranks of a row share."""
    predict = trainer.prediction_step

    @functools.wraps(predict)
    def prediction_step(
        model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **given: Any
    ) -> Any:
        whole = not prediction_loss_only
        reduce = _reduction(trainer) if whole and _reads_no_logits(trainer) else None
        with whole_logits(whole, reduce) as got:
            step = predict(model, inputs, prediction_loss_only, *args, **given)
        if got.vocabulary is not None:
            trainer.preprocess_logits_for_metrics.reduced = got.vocabulary, step[1].shape[1]
        return step

    trainer.prediction_step = prediction_step
    train = trainer.train

    @functools.wraps(train)
    def train_anew(*args: Any, **given: Any) -> Any:
        if trainer.accelerator.forget_evaluation(trainer.model):
            trainer.model_wrapped = trainer.model  # where evaluation compiled it
        if trainer.args.use_liger_kernel:
            check_liger(base_model(trainer.model))
            # The model is tried before Liger replaces functions of its module.
            trainer.accelerator._split(trainer.model)
        return train(*args, **given)

    trainer.train = train_anew
    if hasattr(trainer, "_generate_and_score_completions"):
        complete = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = _of_first_rank(complete, trainer.accelerator)
    if type(trainer).__name__ == "AsyncGRPOTrainer":
        trainer.get_train_dataloader = _handing_out_rows(trainer)
    if hasattr(trainer, "generate_on_policy_outputs"):
        _adapt_distillation(trainer)


def _of_first_rank(complete: Callable[..., Any], accelerator: Any) -> Callable[..., Any]:
    """A Trainer's completions, which the first rank of a row's ranks hands to the others."""

    @functools.wraps(complete)
    def completions(*args: Any, **given: Any) -> Any:
        group = accelerator.torch_device_mesh["cp"].get_group()
        share_random_state(group)
        accelerator.cuts_rows = True
        try:
            made = from_first_rank(complete(*args, **given), group)
        finally:
            accelerator.cuts_rows = False
        share_random_state(group)  # TRL shuffles them next
        return made

    return completions


def _handing_out_rows(trainer: Any) -> Callable[[], Any]:
    """get_train_dataloader of async GRPO: the first process reads the queue of rollouts."""
    load = trainer.get_train_dataloader

    @functools.wraps(load)
    def get_train_dataloader() -> Any:
        trainer.accelerator.hands_out_rows = True
        try:
            return load()
        finally:
            trainer.accelerator.hands_out_rows = False

    return get_train_dataloader


def _adapt_distillation(trainer: Any) -> None:
    """Let the ranks of a row agree whether a step of GKD generates, and what."""
    generate, step = trainer.generate_on_policy_outputs, trainer.training_step
    named = _of_first_rank(lambda *args: dict(enumerate(generate(*args))), trainer.accelerator)
    trainer.generate_on_policy_outputs = lambda *args: tuple(named(*args).values())

    @functools.wraps(step)
    def training_step(*args: Any, **given: Any) -> Any:
        share_random_state(trainer.accelerator.torch_device_mesh["cp"].get_group())
        return step(*args, **given)

    trainer.training_step = training_step


def _reads_no_logits(trainer: Any) -> bool:
    """Return whether a Trainer leaves logits to preprocess_logits_for_metrics alone."""
    from transformers import Trainer

    of = type(trainer)
    own_loss = trainer.compute_loss_func is not None or trainer.label_smoother is not None
    steps = of.compute_loss is Trainer.compute_loss, of.prediction_step is Trainer.prediction_step
    return not own_loss and all(steps)


def _reduction(trainer: Any) -> Callable[..., Any] | None:
    """Return preprocess_logits_for_metrics of a Trainer, which learns what a call has reduced."""
    given = trainer.preprocess_logits_for_metrics
    if isinstance(given, _ReducedOnce):
        return given.function
    if given is not None:
        trainer.preprocess_logits_for_metrics = _ReducedOnce(given)
    return given


class _ReducedOnce:
    """preprocess_logits_for_metrics, which leaves what the model's call made of its logits.

    Attributes:
        reduced: a row of logits without entries, and the columns of the batch before accelerate
            filled it to the length of other processes', where the call has run function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.reduced: tuple[Tensor, int] | None = None

    def __call__(self, logits: Any, labels: Any) -> Any:
        if self.reduced is None:
            return self.function(logits, labels)
        (row, columns), self.reduced = self.reduced, None
        if logits.shape[1] > columns:  # filled as accelerate fills logits
            logits[:, columns:] = self.function(row - 100, labels)[0, 0]
        return logits


def from_first_rank(values: dict[Any, Any], group: Any) -> dict[Any, Any]:
    """The values of a group's first rank, on all of them: others may have been sampled otherwise.

    Args:
        values: tensors, of shapes of its own on each rank, and what else pickles, by name.
    """
    first = dist.get_global_rank(group, 0)
    described: list[Any] = [
        {name: (x.shape, x.dtype) if isinstance(x, Tensor) else x for name, x in values.items()}
    ]
    dist.broadcast_object_list(described, first, group=group)
    device = next(x.device for x in values.values() if isinstance(x, Tensor))
    made: dict[Any, Any] = {}
    for name, x in described[0].items():
        if isinstance(x, tuple) and len(x) == 2 and isinstance(x[1], torch.dtype):
            mine = values[name].contiguous() if dist.get_rank() == first else None
            mine = torch.empty(x[0], dtype=x[1], device=device) if mine is None else mine  # type: ignore[call-overload]
            dist.broadcast(mine, first, group=group)
            x = mine
        made[name] = x
    return made

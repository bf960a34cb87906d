"""Attention of Hugging Face models, split over the ranks of a ContextParallel.

    cp = tw.ContextParallel(num_tokens=len(tokens), mask=tw.Causal())
    model = hf.parallelize(AutoModelForCausalLM.from_config(config), cp)
    loss = model(**hf.shard(cp, tokens[None], labels=tokens[None])).loss

Every layer runs with the mask that it asks transformers for, on the whole sequence; what cannot be
honoured is refused by name, on all ranks alike. transformers is imported when a function is called.
"""

from typing import Any, TypeVar

from torch import Tensor, nn

import tilewise as tw
from tilewise.arguments import checks_arguments, is_dense, whole_number
from tilewise.integrations.data import OF_IMAGES, shard_inputs
from tilewise.integrations.transformers.attention import LayerMask
from tilewise.integrations.transformers.check import (
    attach,
    base_model,
    check_model,
    refuse_new_adapters,
    refused_loss,
    registered,
)
from tilewise.integrations.transformers.forward import unsplit
from tilewise.integrations.transformers.labels import is_masked, refuse_wrong_losses
from tilewise.integrations.transformers.plan import (
    choose_layouts,
    may_choose,
    measured_work,
    work_to_plan,
)
from tilewise.integrations.transformers.replay import record_indices, sharded_indices
from tilewise.integrations.transformers.trainer import arguments as trainer_arguments

__all__ = [
    "LayerMask",
    "check_model",
    "hybrid_work",
    "parallelize",
    "record_indices",
    "register",
    "shard",
    "trainer_args",
    "unshard",
    "unsplit",
]

Model = TypeVar("Model", bound=nn.Module)


@checks_arguments
def parallelize(model: Model, cp: tw.ContextParallel, name: str = "tilewise") -> Model:
    """Make a model's attention run over cp, after check_model, and return the model.

    A model that only has a wrong loss, or pools, runs without labels: a call with labels, and one
    that returns pooled rows, are refused.

    It registers cp under the name and, where RoPE depends on the largest position ("dynamic",
    "longrope"), makes the ranks agree on it. Labels that were sharded by hand, which the model
    would shift over the borders of shards, are refused when it is called.

    Of a model with layers that carry a state, the planner chooses the layouts of cp where neither a
    layout nor a plan was given and tokens were not split yet: contiguous or zigzag tokens, or a
    relayout around each layer of attention. Rank 0 logs which (logger "tilewise", INFO).

    Args:
        model: of transformers, or one that PEFT made of it (LoRA, say).
    Raises:
        ValueError: as of check_model and register.
    """
    base = base_model(model)
    loss_refusal = refused_loss(model)
    work = work_to_plan(base, cp.rank) if may_choose(cp) else None
    if work is not None:
        choose_layouts(cp, work, type(base).__name__, next(base.parameters()).device.type)
    attach(model, cp, name)
    refuse_new_adapters(model, cp.group)
    for called in {id(x): x for x in (model, base)}.values():  # PEFT calls base.forward
        refuse_wrong_losses(called, cp, masked=is_masked(type(base)), loss_refusal=loss_refusal)
    return model


@checks_arguments
def hybrid_work(model: nn.Module, num_tokens: int) -> tw.planning.HybridWork:
    """The training step of a model with layers that carry a state or choose keys, as
    `search_hybrid` takes it.

        search_hybrid(hf.hybrid_work(model, 1 << 18), tw.Machine.preset("h100x8"), world_size=32)

    Its layers are measured on torch's meta device, by what they would send: no weights are read or
    made, so the model may be on that device itself. Layers of attention count as causal, those with
    windows too; convolutions of a layer count as one, and its scans. Layers whose indexer chooses
    keys (`HybridWork.indexed`) are read from the modules.

    Args:
        num_tokens: of one sequence without documents.
    Raises:
        ValueError: for a model without such layers, and one that compresses keys (DeepSeek V4).
    """
    base = base_model(model)
    whole_number("num_tokens", num_tokens)
    work = measured_work(base, num_tokens)
    if not work.states and not work.indexed:
        raise ValueError(
            f"{type(base).__name__} has no layer that carries a state or convolves, and none that "
            "chooses keys: price its attention by tw.search"
        )
    return work


@checks_arguments
def trainer_args(
    cp: tw.ContextParallel,
    model: nn.Module,
    args: Any,
    *,
    train_dataset: Any = None,
    eval_dataset: Any = None,
) -> dict[str, Any]:
    """Keyword arguments for transformers' Trainer, which then splits its rows over cp's ranks.

        trainer = Trainer(**hf.trainer_args(cp, model, args, train_dataset=documents))

    A short way to write `args.parallelism_config = ParallelismConfig(cp_size=cp.world_size)`
    (tilewise.integrations.accelerate), with a collator that packs the examples of a batch into one
    row: transformers' DataCollatorWithFlattening. Length, layout and mask are those of each batch,
    not of cp. On one rank nothing is split.

    Args:
        cp: its group and strategy are taken.
        model: as parallelize takes it.
        args: TrainingArguments; a copy is returned.
        train_dataset, eval_dataset: examples with input_ids, and labels if they are not the same;
            what an attention_mask hides is left out.
    Raises:
        ValueError: for a model or args that a split sequence cannot honour, here or by the Trainer.
    """
    refused_loss(model)
    datasets = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
    return trainer_arguments(cp, model, args, datasets)


@checks_arguments
def register(cp: tw.ContextParallel, name: str = "tilewise") -> str:
    """Make attn_implementation=name run the attention of a model over cp; return name.

    A name stands for one cp: register again to replace it (another length), or take another name
    for a second one. The mask is each layer's own; cp.mask serves layout and strategy. A cp.mask of
    Slices (a tree's) says itself what each token sees: it takes the place of causal masks, and
    layers with a causal window get cp.mask.windowed.

    A model whose code is not transformers' own is refused when it runs: parallelize tries it first.

    Raises:
        ImportError: without transformers.
        ValueError: for a name that transformers treats in a way of its own.
    """
    registered(cp, name, proven=False)
    return name


@checks_arguments
def shard(
    cp: tw.ContextParallel, input_ids: Tensor, *, indices: Any = None, **columns: Any
) -> dict[str, Any]:
    """Return the arguments with which a model is called on this rank, from the whole batch.

    Args:
        indices: the keys that each query attends to, in place of the model's own choice: one
            tensor a layer that has an indexer, [batch, num_tokens, k], positions in the row, -1 for
            no key. `record_indices` records them. They have to be visible to their queries: the
            model's call refuses others, on every rank.
        columns: labels, cu_seqlens, attention_mask, token_type_ids, mm_token_type_ids,
            shift_labels, as of data.shard_inputs. What a processor returns beside them of images
            and videos (pixel_values, image_grid_thw, ...) is returned whole: the model's call
            gives each rank the features, and the positions, of its own tokens.
    """
    images = {name: columns.pop(name) for name in OF_IMAGES & columns.keys()}
    inputs = shard_inputs(cp.layout, cp.rank, input_ids, **columns) | images
    if indices is None:
        return inputs
    if columns.get("attention_mask") is not None:
        raise ValueError(
            "indices are positions in a row, and attention_mask makes the rows documents of one: "
            "pass that row, with cu_seqlens and positions in it, and no attention_mask"
        )
    return {**inputs, "indices": sharded_indices(cp, indices, len(input_ids))}


@checks_arguments
def unshard(cp: tw.ContextParallel, x: Tensor, dim: int = 1) -> Tensor:
    """The whole tensor on every rank, from what a model gave for the rows of shard."""
    if not is_dense(x) or not -x.ndim <= dim < x.ndim:
        return cp.unshard(x, dim)  # which refuses it on every rank
    return cp.unshard(x.narrow(dim, 0, min(x.shape[dim], cp.layout.size(cp.rank))), dim)

"""Attention of Hugging Face models, split over the ranks of a ContextParallel.

    cp = tw.ContextParallel(num_tokens=len(tokens), mask=tw.Causal())
    model = hf.parallelize(AutoModelForCausalLM.from_config(config), cp)
    loss = model(**hf.shard(cp, tokens[None], labels=tokens[None])).loss

Every layer runs with the mask that it asks transformers for, on the whole sequence; what cannot be
honoured is refused by name, on all ranks alike. transformers is imported when a function is called.
"""

from typing import Any, TypeVar

from torch import Tensor, nn

from tilewise.arguments import checks_arguments
from tilewise.context_parallel import ContextParallel
from tilewise.integrations.data import shard_inputs
from tilewise.integrations.hf_attention import LayerMask, attention_of, masks_of
from tilewise.integrations.hf_labels import refuse_labels_sharded_by_hand
from tilewise.integrations.hf_masks import refused_model, uses_attention_interface
from tilewise.integrations.hf_proof import PACKED, WHOLE, ModelUnderTest, is_masked, refuted
from tilewise.integrations.hf_rope import RopeLengths
from tilewise.integrations.hf_states import documents_of_call, has_state_functions, split_all_calls
from tilewise.integrations.hf_trainer import arguments as trainer_arguments

__all__ = [
    "LayerMask",
    "check_model",
    "parallelize",
    "register",
    "shard",
    "trainer_args",
    "unshard",
]

TAKEN = ("eager", "sdpa", "flash", "flex", "paged")
Model = TypeVar("Model", bound=nn.Module)


@checks_arguments
def parallelize(model: Model, cp: ContextParallel, name: str = "tilewise") -> Model:
    """Make a model's attention run over cp, after check_model, and return the model.

    It registers cp under the name and, where RoPE depends on the largest position ("dynamic",
    "longrope"), makes the ranks agree on it. Labels that were sharded by hand, which the model
    would shift over the borders of shards, are refused when it is called.

    Args:
        model: of transformers, or one that PEFT made of it (LoRA, say).
    Raises:
        ValueError: as of check_model and register.
    """
    base = base_model(model)
    check_model(base)
    _attach(base, cp, name)
    split_all_calls(model, base, cp, name)
    for called in {id(x): x for x in (model, base)}.values():  # PEFT calls base.forward
        refuse_labels_sharded_by_hand(called, cp, masked=is_masked(type(base)))
    return model


def base_model(model: nn.Module) -> Any:
    """The model of transformers that PEFT put its adapters into; others as they are.

    Raises:
        ValueError: if PEFT adds tokens to the sequence (prompt tuning and the like).
    """
    if not type(model).__module__.startswith("peft."):
        return model
    config: Any = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise ValueError(
            f"{config.peft_type.value} puts tokens of its own before the sequence, which the "
            "layout does not know; use adapters that change weights alone, such as LoRA"
        )
    return model.get_base_model()  # pyright: ignore[reportCallIssue]


@checks_arguments
def trainer_args(
    cp: ContextParallel,
    model: nn.Module,
    args: Any,
    *,
    train_dataset: Any = None,
    eval_dataset: Any = None,
) -> dict[str, Any]:
    """Keyword arguments for transformers' Trainer, which then runs the model over cp.

        trainer = Trainer(**hf.trainer_args(cp, model, args, train_dataset=documents))

    The model is parallelized. Documents are packed into sequences of cp's length, one a step and
    data-parallel rank, in an order of their own each epoch, the same on all ranks of cp.

    Args:
        model: as parallelize takes it.
        args: TrainingArguments; a changed copy is returned: one sequence a device, losses averaged
            by tokens over all devices, no logits from evaluation.
        train_dataset, eval_dataset: examples by index, as ShardingCollator takes them.
    Raises:
        ValueError: as of parallelize; for args that a split sequence cannot honour.
    """
    parallelize(model, cp)
    base = base_model(model)
    # Some models tell the Trainer that they do not, for their images' sake; check_model saw it.
    base.accepts_loss_kwargs = True
    datasets = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
    return {"model": model, **trainer_arguments(cp, args, datasets, is_masked(type(base)))}


@checks_arguments
def check_model(model: nn.Module, *, numerical: bool = True, loss: bool = True) -> None:
    """Raise ValueError if a model of transformers cannot run with its sequence split.

    A model that reaches tilewise's attention is asked again when it runs; one that never does (a
    state space model, a hand-written attention) can only be seen here.

    Args:
        numerical: whether a tiny model of the same class and configuration is run, split over three
            ranks in this process and not split, and has to have one loss and the same gradients.
            It takes about a second, once for a class and configuration.
        loss: whether the model's own loss, and what it pools, have to be right; False: its first
            output alone, the logits or hidden states.
    """
    if not hasattr(model, "config"):
        raise ValueError(f"model ({type(model).__name__}) must be a model of transformers")
    # FSDP2 gives a model a class made at run time.
    bases = (c for c in type(model).__mro__ if not c.__module__.startswith("torch.distributed"))
    given = {"loss_function": getattr(model, "_loss_function", None)}
    error = refusal(next(bases), model.config, numerical=numerical, loss=loss, **given)
    if error:
        raise ValueError(error)


def refusal(
    model_class: type,
    config: Any,
    *,
    numerical: bool = True,
    loss: bool = True,
    loss_function: Any = None,
) -> str | None:
    """Why a model of this class and configuration is refused by check_model; None if it is not."""
    text_config = config.get_text_config(decoder=True)
    splits_states = has_state_functions(text_config)
    error = refused_model(text_config, splits_states=splits_states)
    if error is None and not uses_attention_interface(model_class, splits_states):
        error = f"{model_class.__name__} does not use transformers' AttentionInterface"
    if error is None and numerical:
        text = config.to_json_string(use_diff=False)
        documents = PACKED if splits_states else WHOLE
        subject = ModelUnderTest(model_class, text, loss, loss_function, documents, config, _attach)
        error = refuted(subject)
    return error


def _attach(model: Any, cp: ContextParallel, name: str) -> None:
    lengths = _register(cp, name, proven=True)
    text = model.config.get_text_config(decoder=True)
    sub_configs = getattr(model.config, "sub_configs", ())
    only = {key: name for key in sub_configs if getattr(model.config, key) is text}
    model.set_attn_implementation(only or name)  # what sees images is not split
    lengths.agree_in(model)
    split_all_calls(model, model, cp, name)


@checks_arguments
def register(cp: ContextParallel, name: str = "tilewise") -> str:
    """Make attn_implementation=name run the attention of a model over cp; return name.

    A name stands for one cp: register again to replace it (another length), or take another name
    for a second one. The mask is each layer's own; cp.mask serves layout and strategy. A cp.mask of
    Slices (a tree's) says itself what each token sees: it takes the place of causal masks.

    A model whose code is not transformers' own is refused when it runs: parallelize tries it first.

    Raises:
        ImportError: without transformers.
        ValueError: for a name that transformers treats in a way of its own.
    """
    _register(cp, name, proven=False)
    return name


def _register(cp: ContextParallel, name: str, proven: bool) -> RopeLengths:
    taken = [word for word in TAKEN if word in name]
    if taken or not name:
        raise ValueError(f"name ({name!r}) must not be empty or hold any of {', '.join(TAKEN)}")
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "tilewise.integrations.hf needs transformers: pip install 'tilewise[hf]'"
        ) from error
    lengths = RopeLengths(cp)
    AttentionInterface.register(name, attention_of(cp, proven))
    AttentionMaskInterface.register(name, masks_of(cp, lengths, proven, documents_of_call))
    return lengths


@checks_arguments
def shard(cp: ContextParallel, input_ids: Tensor, **columns: Any) -> dict[str, Tensor]:
    """Return the arguments with which a model is called on this rank, from the whole batch.

    Args:
        columns: labels, cu_seqlens, attention_mask, token_type_ids, shift_labels, as of
            data.shard_inputs.
    """
    return shard_inputs(cp.layout, cp.rank, input_ids, **columns)


@checks_arguments
def unshard(cp: ContextParallel, x: Tensor, dim: int = 1) -> Tensor:
    """The whole tensor on every rank, from what a model gave for the rows of shard."""
    if not -x.ndim <= dim < x.ndim:
        return cp.unshard(x, dim)  # which refuses it on every rank
    return cp.unshard(x.narrow(dim, 0, min(x.shape[dim], cp.layout.size(cp.rank))), dim)

"""Checks whether a model of transformers can be split, and makes its attention run over a cp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import tilewise as tw
from tilewise import lazy
from tilewise.arguments import checks_arguments
from tilewise.integrations.transformers.adapters import (
    Adapter,
    adapted,
    adapters,
    configurations,
    refused_names,
)
from tilewise.integrations.transformers.attention import attention_of, masks_of
from tilewise.integrations.transformers.block_indexers import wire_block_indexers
from tilewise.integrations.transformers.compressed import wire_compressors
from tilewise.integrations.transformers.counted_positions import wire_positions
from tilewise.integrations.transformers.experts import knows_router_loss
from tilewise.integrations.transformers.indexers import wire_indexers
from tilewise.integrations.transformers.masks import (
    COMPRESSED_TYPES,
    uses_attention_interface,
)
from tilewise.integrations.transformers.ngram_layers import wire_ngram_layers
from tilewise.integrations.transformers.refusals import ADAPTERS, check_allowed, refused_model
from tilewise.integrations.transformers.replay import wire_replay
from tilewise.integrations.transformers.rope import RopeLengths
from tilewise.integrations.transformers.saved import (
    REGISTERED,
    NotSaved,
    Shared,
    is_split,
    not_compiled,
    use_split_attention,
)
from tilewise.integrations.transformers.stand_ins import stand_in
from tilewise.integrations.transformers.states import (
    documents_of_call,
    has_state_functions,
    is_stateless,
    split_all_calls,
)
from tilewise.transport.agreement import settled

TAKEN = ("eager", "sdpa", "flash", "flex", "paged")


def base_model(model: nn.Module) -> Any:
    """The model of transformers that was compiled, or that PEFT put its adapters into.

    Raises:
        ValueError: if there is none, or PEFT adds tokens to the sequence (prompt tuning and such).
    """
    model = uncompiled(model)
    if not adapted(model):
        _check_kind(model)
        return model
    config: Any = getattr(model, "active_peft_config", None)
    if config is not None:
        check_allowed(ADAPTERS, config)
    tuner: Any = model.base_model  # get_base_model is not of PeftMixedModel
    return base_model(tuner.model)


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model that torch.compile was given; other models as they are."""
    return getattr(model, "_modules", {}).get("_orig_mod") or model


def _check_kind(model: nn.Module) -> None:
    """Raise ValueError unless a model is one of transformers, and name one that it holds."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return
    named = model.named_modules() if isinstance(model, nn.Module) else ()
    name, held = next((item for item in named if isinstance(item[1], PreTrainedModel)), ("", None))
    pass_it = f"; it holds one, model.{name} ({type(held).__name__}): pass that" * bool(name)
    raise ValueError(f"model ({type(model).__name__}) must be a model of transformers{pass_it}")


def models_inside(module: nn.Module) -> list[nn.Module]:
    """The models of transformers, or that PEFT made of one, that a module is or holds; of models
    that lie in each other the outermost.
    """
    from transformers import PreTrainedModel

    if isinstance(module, PreTrainedModel) or type(module).__module__.startswith("peft."):
        return [module]
    found = [model for child in module.children() for model in models_inside(child)]
    return list({id(model): model for model in found}.values())


@checks_arguments
def check_model(model: nn.Module, *, numerical: bool = True, loss: bool = True) -> None:
    """Raise ValueError if a model of transformers cannot run with its sequence split.

    A model that reaches tilewise's attention is asked again when it runs; one that never does (a
    state space model, a hand-written attention) can only be seen here.

    Args:
        model: of transformers, or one that PEFT made of it: each of its adapters is tried.
        numerical: whether a tiny model of the same class and configuration is run, split over three
            ranks in this process and not split, and has to have one loss and the same gradients.
            It takes about a second, once for a class and configuration.
        loss: whether the model's own loss, and what it pools, have to be right; False: its first
            output alone, the logits or hidden states.
    """
    model, base = uncompiled(model), base_model(model)
    error = refused_names(model)
    if error:
        raise ValueError(error)
    given = {"loss_function": getattr(base, "_loss_function", None), "loss": loss}
    model_class = _class_of(base)
    for adapter in adapters(model, base) if numerical and configurations(model) else (None,):
        given["adapter"] = adapter
        error = refusal(model_class, base.config, numerical=numerical, **given)
        if error:
            raise ValueError(error)


def _class_of(base: nn.Module) -> type:
    """Return a model's class; FSDP2 gives a model one made at run time."""
    return next(c for c in type(base).__mro__ if not c.__module__.startswith("torch.distributed"))


def refuse_new_adapters(model: nn.Module, group: Any) -> None:
    """Make calls of a model raise ValueError if it got an adapter meanwhile that cannot be split.

    Args:
        model: after check_model.
        group: of the ranks that share its rows.
    """
    base = base_model(model)
    tried = {**configurations(base), **configurations(model)}
    # AdaLoRA around a model calls base.forward, past base's hooks, but not past those in it.
    hooks: dict[int, tuple[Any, nn.Module, Callable[..., None]]] = {
        id(base.base_model): (base.base_model, base, _check_where_not_compiled),
        id(base): (base, base, _check_new_adapters),
        id(model): (model, model, _check_new_adapters),
    }
    for called, owner, hook in hooks.values():
        if "_tilewise_adapters" not in vars(called):  # PEFT's models have base's attributes
            called.register_forward_pre_hook(hook, prepend=True)
        called._tilewise_adapters = _Tried(_GroupOnly(group), tried, owner)


class _GroupOnly(Shared):
    """The group of the ranks that share a model's rows."""

    def __init__(self, group: Any) -> None:
        self.group = group


class _Tried(NotSaved):
    """The adapters of a model that were tried, by their configurations."""

    def __init__(self, ranks: _GroupOnly, configs: dict[str, Any], model: nn.Module) -> None:
        self.ranks, self.configs, self.model = ranks, configs, model


@not_compiled
def _check_new_adapters(called: Any, _: Any) -> None:
    if not is_split(called):
        return
    tried: _Tried = called._tilewise_adapters
    now = dict(configurations(tried.model))
    known = all(tried.configs.get(name) is x for name, x in now.items())
    if known and refused_names(tried.model) is None:
        return
    settled(tw.transport.transport_for(tried.ranks.group), lambda: check_model(tried.model))
    called._tilewise_adapters = _Tried(tried.ranks, now, tried.model)


def _check_where_not_compiled(called: Any, args: Any) -> None:
    """Run _check_new_adapters, unless a compiler traces the model: that would break its graph."""
    if not torch.compiler.is_compiling():
        _check_new_adapters(called, args)


def refused_loss(model: nn.Module) -> str | None:
    """Return why a model may be called without labels alone; None if its own loss is right too.

    Raises:
        ValueError: as of check_model, if its rows are wrong as well.
    """
    try:
        check_model(model)
    except ValueError as error:
        try:
            check_model(model, loss=False)
        except ValueError:
            raise error from None
        return str(error)
    return None


def refusal(
    model_class: type,
    config: Any,
    *,
    numerical: bool = True,
    loss: bool = True,
    loss_function: Any = None,
    adapter: Adapter | None = None,
) -> str | None:
    """Why a model of this class and configuration is refused by check_model; None if it is not."""
    text_config = config.get_text_config(decoder=True)
    splits_states = has_state_functions(text_config)
    counts_routers = knows_router_loss(model_class)
    error = refused_model(
        text_config,
        splits_states=splits_states,
        counts_routers=counts_routers,
        moves_positions=True,
    )
    if error is None and not uses_attention_interface(model_class, splits_states):
        error = f"{model_class.__name__} does not use transformers' AttentionInterface"
    if error is None and numerical:
        text = config.to_json_string(use_diff=False)
        types = getattr(text_config, "layer_types", None) or ()
        packed = splits_states or not {"indexed_attention", *COMPRESSED_TYPES}.isdisjoint(types)
        given = model_class, text, loss, loss_function, packed, config, attach
        error = lazy.find("ModelUnderTest")(*given, adapter).refuted()
    return error


def attach(model: Any, cp: tw.ContextParallel, name: str) -> None:
    """Make a model run over cp, under a name of its own among transformers' attentions.

    Args:
        model: of transformers, or one that PEFT made of it.
    """
    base = base_model(model)
    lengths = registered(cp, name, proven=True, stateless=is_stateless(base))
    use_split_attention(base, name)
    lengths.agree_in(base)
    wire_layers(base)
    for called in {id(x): x for x in (model, base)}.values():  # PEFT calls base.forward
        wire_replay(called, base, cp.group)
        stand_in(called, base, cp)
    split_all_calls(model, base, cp, name)


def wire_layers(base: nn.Module) -> None:
    """Hook the layers of a model that split calls run in another way than unsplit ones."""
    wire_indexers(base)
    wire_compressors(base)
    wire_block_indexers(base)
    wire_ngram_layers(base)
    wire_positions(base)


def registered(
    cp: tw.ContextParallel, name: str, proven: bool, stateless: bool = False
) -> RopeLengths:
    """Register cp under a name.

    Args:
        proven: check_model has tried the model.
        stateless: of a family with layers that carry a state the model has none.
    """
    taken = [word for word in TAKEN if word in name]
    if taken or not name:
        raise ValueError(f"name ({name!r}) must not be empty or hold any of {', '.join(TAKEN)}")
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "tilewise.integrations.hf needs transformers: pip install 'tilewise[hf]'"
        ) from error
    REGISTERED.names.add(name)
    lengths = RopeLengths(cp, name)
    attend: Any = attention_of(cp, proven)
    # Rows that move are no part of a compiled graph.
    AttentionInterface.register(name, torch.compiler.disable(attend) if cp.moves_rows else attend)
    AttentionMaskInterface.register(
        name, masks_of(cp, lengths, proven, documents_of_call, stateless)
    )
    return lengths

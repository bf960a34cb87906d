"""Facts of a split model that are not saved with it: a pickled model is the unsplit one.

torch.save(model) writes no group of processes. Hooks are functions of modules, which pickle by
name. A model is split as long as its configuration names an attention that is a SplitName: hooks do
nothing in others, so nothing reads the facts of a model that was unpickled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

Hook = TypeVar("Hook", bound=Callable[..., Any])


def not_compiled(hook: Hook) -> Hook:
    """Keep a hook out of compiled code: torch.compiler.disable, as a decorator with types."""
    disabled: Any = torch.compiler.disable(hook)
    return disabled


class NotSaved:
    """Base class of values of a split model that are pickled as None."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = object.__new__(type(self))
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made


class Shared(NotSaved):
    """A value that copies of a model share, since a process group cannot be copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


class SplitName(str):
    """The name of an attention that is split; it pickles as the name of the one before.

    Attributes:
        unsplit: the attention that the model had before it was split.
    """

    unsplit: str

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.unsplit,)

    def __deepcopy__(self, memo: dict[int, Any]) -> SplitName:
        return self

    def __copy__(self) -> SplitName:
        return self


class SplitNames:
    """Names of all attentions of this process that are split."""

    def __init__(self) -> None:
        self.names = set[str]()


REGISTERED = SplitNames()


def is_split(model: Any) -> bool:
    """Return whether calls of a model of transformers are split now."""
    return model.config.get_text_config(decoder=True)._attn_implementation in REGISTERED.names


def use_split_attention(base: Any, name: str) -> None:
    """Make a text model call the attention that is registered under a name.

    The name of its attention before is kept, by which it can run unsplit.
    """
    text = base.config.get_text_config(decoder=True)
    before = _unsplit(base, text._attn_implementation)
    _share_config(base, text)
    REGISTERED.names.add(name)
    sub_configs = getattr(base.config, "sub_configs", ())
    only = {key: name for key in sub_configs if getattr(base.config, key) is text}
    base.set_attn_implementation(only or name)  # what sees images is not split
    split_name = SplitName(name)
    split_name.unsplit = before
    for config in _configurations(base):
        if config._attn_implementation == name:
            config._attn_implementation_internal = split_name


def _share_config(base: nn.Module, text: Any) -> None:
    """Give layers that were copied with their configuration (PEFT's layer_replication, and
    modules_to_save) the one of their model, which set_attn_implementation of transformers changes.
    """
    from transformers import PreTrainedModel

    of_models = {id(x.config) for x in base.modules() if isinstance(x, PreTrainedModel)}
    for module in base.modules():
        config = getattr(module, "config", None)
        if type(config) is type(text) and id(config) not in of_models:
            module.config = text


@contextmanager
def whole_attention(base: Any) -> Iterator[None]:
    """Calls of a model run unsplit inside, with the attention that it had before it was split."""
    names = [(x, x._attn_implementation) for x in _configurations(base)]
    split = [(x, name) for x, name in names if name in REGISTERED.names]
    for config, name in split:
        config._attn_implementation_internal = _unsplit(base, name)
    try:
        yield
    finally:
        for config, name in split:
            config._attn_implementation_internal = name


def _unsplit(base: Any, name: str) -> str:
    """Return the attention to run unsplit; of a model that was made with the name of a split one
    (hf.register) it is transformers' own choice.
    """
    if isinstance(name, SplitName):
        return name.unsplit
    return ("sdpa" if base._supports_sdpa else "eager") if name in REGISTERED.names else name


def _configurations(base: nn.Module) -> list[Any]:
    """The configurations of a model and of the models in it, each once."""
    found = [getattr(module, "config", None) for module in base.modules()]
    return [*{id(x): x for x in found if hasattr(x, "_attn_implementation_internal")}.values()]

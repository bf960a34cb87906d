"""The model of a config.json, made without memory: transformers' own code on fake tensors."""

import copy
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewise.integrations.transformers.refusals import refused_model
from tilewise.planning.candidate import read_json

EXPERTS = re.compile(r"experts|moe")
NAME = "tilewise_fits"  # of the attention that stands in for ours


def read_config(path: Path) -> Any:
    """Read the configuration of a decoder of transformers.

    Args:
        path: of a config.json, or of the folder that has one.
    Raises:
        ValueError: naming the file, and what is missing, wrong or not counted.
    """
    path = path / "config.json" if path.is_dir() else path
    data = read_json(path)
    try:
        if not isinstance(data, dict):
            raise ValueError("the file must hold one object")
        return _config(cast("dict[str, Any]", data))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _config(data: Mapping[str, Any]) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        what = "is missing" if kind is None else f"({kind!r}) is not known to transformers"
        raise ValueError(
            f"model_type {what}; its code says what is held in memory: give a model's config.json"
        )
    if isinstance(data.get("text_config"), dict):
        raise ValueError(
            f"model_type ({kind}) has a text_config beside what sees images or hears: write the "
            "text_config to a file of its own, and name that"
        )
    try:
        config = CONFIG_MAPPING[kind].from_dict(copy.deepcopy(dict(data)))
    except Exception as error:  # whatever the fields make a configuration's code raise
        raise ValueError(f"transformers refuses it: {_brief(error)}") from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"model_type ({kind}) has no model that predicts the next token; "
            "give the config.json of one that has, such as llama's"
        )
    error = refused_model(config)
    if error is not None:
        raise ValueError(error)
    experts = [name for name, x in vars(config).items() if EXPERTS.search(name) and _many(x)]
    if experts:
        raise ValueError(
            f"{experts[0]} means a mixture of experts: the rows of each are decided by its router, "
            "not by the configuration, so they are not counted"
        )
    return config


def _many(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x > 1


def fake_model(
    config: Any, dtype: str, attention: Callable[..., Any], mask: Callable[..., Any]
) -> tuple[FakeTensorMode, Any]:
    """Make a model whose tensors have shapes and strides alone.

    Args:
        attention, mask: what stands for attention and for its masks, as transformers' interfaces
            AttentionInterface and AttentionMaskInterface call them.
    Returns:
        The mode in which it can be called, and the model, in training.
    Raises:
        ValueError: if the model's code does not run so.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    mode, config = FakeTensorMode(), copy.deepcopy(config)
    with refusing_values(config), mode, torch.device("cpu"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=NAME
        )
    return mode, model.train()


class refusing_values:  # noqa: N801 - a context manager
    """Turn what a model's code raises, where it cannot run without numbers, into a ValueError."""

    def __init__(self, config: Any):
        self._name = type(config).__name__

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, _: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, ValueError | MemoryError):
            raise ValueError(
                f"{self._name}: the model's code does not run without numbers, so that what it "
                f"holds cannot be counted ({_brief(error)})"
            ) from error


def checkpointed(model: Any) -> None:
    """Switch transformers' checkpointing of all layers on, by its name in any version 5."""
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable()


def decoder_layers(model: Any) -> nn.ModuleList:
    """Return the layers of a decoder.

    Raises:
        ValueError: if there is not one list of them.
    """
    count = model.config.num_hidden_layers
    lists = [x for x in model.modules() if isinstance(x, nn.ModuleList) and len(x) == count]
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no list of num_hidden_layers ({count}) layers"
        )
    return lists[0]


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"

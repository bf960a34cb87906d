"""PEFT's adapters of a model, made again on the tiny model of a proof.

An adapter is code that runs between the layers of a model, and its wrapper sees the arguments of
every call: activated LoRA counts where its rows begin, AdaLoRA adds to the loss. Whether that can
be split is a question for a proof, not for a list of names.
"""

from __future__ import annotations

import copy
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from torch import nn

from tilewise.integrations.transformers.refusals import ADAPTERS, check_allowed

FEW = 4  # ranks, blocks and frequencies of an adapter on a tiny model, whose widths it divides
FIRST_TOKEN = 5  # that stands for a token of an adapter's configuration
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # of a layer, in the name of a module
PLACES = ("layers_to_transform", "layers_pattern", "exclude_modules", "layer_replication")
STARTS = ("loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_config")
ORDINARY = ("peft_type", "task_type", "peft_version", "base_model_name_or_path", "target_modules")


@dataclass(frozen=True)
class Adapter:
    """One adapter of a model: its configuration, and the modules that it changes.

    Attributes:
        name: PEFT's name of its kind, with the settings that are not the default ones.
        text: the configuration as text, by which results of proofs are kept.
        targets: names of the modules that it changes, without the numbers of layers.
        wrapper: PEFT's class of the model that has it; None: PEFT chooses it by the task.
    """

    name: str
    text: str
    targets: frozenset[str]
    wrapper: type | None
    config: Any = field(compare=False)

    def put_into(self, tiny: nn.Module) -> Any:
        """Make a tiny model's adapter of this kind, and return the model that has it."""
        import peft

        config = self._shrunk(tiny)
        make: Any = self.wrapper or peft.get_peft_model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = make(tiny, config)
        drops = [x for x in model.modules() if isinstance(x, nn.Dropout)]
        by_row = {x.p for x in drops}
        for setting, probability in _dropouts(config).items():
            if probability not in by_row:
                raise ValueError(
                    f"{setting} ({getattr(self.config, setting)}) must be 0: it drops weights or "
                    "whole layers, and each rank would drop others"
                )
        for module in drops:  # of rows, of which each rank drops its own
            module.p = 0.0
        return model

    def tokens(self) -> list[int]:
        """Tokens of a tiny vocabulary that the adapter on a tiny model looks for."""
        return [x for value in vars(_small(self.config)).values() for x in _token_lists(value)]

    def _shrunk(self, tiny: nn.Module) -> Any:
        config = _small(self.config)
        names = [name for name, _ in tiny.named_modules() if NUMBER.sub("#", name) in self.targets]
        if self.targets and not names:
            raise ValueError(f"it has no module called {', '.join(sorted(self.targets))}")
        if names:
            config.target_modules = names
        layers = tiny.config.get_text_config(decoder=True).num_hidden_layers  # type: ignore
        for name, value in vars(config).items():
            if name.endswith("layers") and isinstance(value, int):
                setattr(config, name, min(value, layers))
        return config


def adapted(model: nn.Module) -> bool:
    """Return whether a model is one of PEFT's, which calls a model of transformers."""
    peft = sys.modules.get("peft")  # without it no model is
    return peft is not None and isinstance(model, peft.PeftModel | peft.PeftMixedModel)


def names_in_layers(module: nn.Module) -> set[str]:
    """Names of the adapters that were put into a module, or into those in it."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    layers: Any = (x for x in module.modules() if tuners and isinstance(x, tuners.BaseTunerLayer))
    return {name for layer in layers for name in layer._get_available_adapters()}


def refused_names(model: nn.Module) -> str | None:
    """Why a model cannot be split of whose adapters the configurations are not known; None if all
    are. PEFT notes them on the module that it was given, which may hold the model.
    """
    names = sorted(names_in_layers(model) - configurations(model).keys())
    if not names:
        return None
    return (
        f"{type(model).__name__} has adapters of PEFT ({', '.join(names)}) that were put into a "
        "module around it, so their settings are not known and they cannot be tried: put them into "
        "the model itself, by get_peft_model or inject_adapter_in_model"
    )


def configurations(model: nn.Module) -> dict[str, Any]:
    """Configurations of a model's adapters, by name."""
    found = model.peft_config if adapted(model) else vars(model).get("peft_config")
    return found if isinstance(found, dict) else {}


def adapters(model: nn.Module, base: nn.Module) -> list[Adapter]:
    """The adapters of a model.

    Args:
        base: the model of transformers in it, or itself.
    Raises:
        ValueError: for a kind that cannot be tried.
    """
    return [_adapter(model, base, name, x) for name, x in configurations(model).items()]


def _adapter(model: nn.Module, base: nn.Module, name: str, config: Any) -> Adapter:
    kind = config.peft_type.value
    check_allowed(ADAPTERS, config)
    settings = vars(config)
    changed = [x.name for x in fields(config) if _is_changed(x, settings[x.name])]
    text = repr(sorted((x, repr(value)) for x, value in settings.items()))
    # FSDP2 gives a model a class made at run time.
    classes = (c for c in type(model).__mro__ if not c.__module__.startswith("torch.distributed"))
    wrapper = next(classes) if adapted(model) else None
    title = f"{kind} of PEFT" + f" ({', '.join(changed)})" * bool(changed)
    return Adapter(title, text, frozenset(_targets(base, name)), wrapper, config)


def _is_changed(setting: Field[Any], value: Any) -> bool:
    """Return whether a setting of an adapter is there and not the default one."""
    made = setting.default_factory
    default = setting.default if made is MISSING else made()
    return bool(value) and value != default and setting.name not in ORDINARY


def _targets(base: nn.Module, adapter: str) -> Iterator[str]:
    """Names of the modules that an adapter changes, without the numbers of layers."""
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in base.named_modules():
        if not isinstance(module, BaseTunerLayer) or isinstance(module, ParamWrapper):
            continue
        if adapter in module._get_available_adapters():
            yield NUMBER.sub("#", name.replace(".base_layer", ""))


def _dropouts(config: Any) -> dict[str, float]:
    """Settings of dropout in a small configuration, which are small numbers of their own."""
    found = {name: x for name, x in vars(config).items() if "dropout" in name}
    return {name: x for name, x in found.items() if isinstance(x, float) and x}


def _small(config: Any) -> Any:
    """A copy of an adapter's configuration for a tiny model."""
    config = copy.deepcopy(config)
    for number, name in enumerate(_dropouts(config)):
        setattr(config, name, 2.0 ** -(20 + number))  # by which a module that drops is known
    for name, value in list(vars(config).items()):
        if name == "inference_mode":
            config.inference_mode = False
        elif name in PLACES or name in STARTS:
            setattr(config, name, {} if name == "loftq_config" else None)
        elif name == "init_lora_weights" and isinstance(value, str):
            config.init_lora_weights = True  # what only says how training begins
        elif name.endswith("_pattern"):
            setattr(config, name, {})
        elif isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, min(value, FEW))
        elif isinstance(value, list) and _numbers(value):
            setattr(config, name, _renamed(value))
        elif isinstance(value, dict) and value and all(map(_numbers, value.values())):
            setattr(config, name, {key: _renamed(x) for key, x in value.items()})
    return config


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(x, int) for x in value)


def _renamed(tokens: list[int]) -> list[int]:
    """Map tokens to the smallest numbers of a tiny vocabulary; different ones stay different."""
    numbers = {token: FIRST_TOKEN + at for at, token in enumerate(dict.fromkeys(tokens))}
    return [numbers[token] for token in tokens]


def _token_lists(value: Any) -> Iterator[int]:
    for one in value.values() if isinstance(value, dict) else (value,):
        if _numbers(one):
            yield from one

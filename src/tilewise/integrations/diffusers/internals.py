"""Private names of diffusers 0.42 that this package uses: the registry of its attention backends,
its plans and the processors of its attention layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn


class SplitAttention(Protocol):
    """The parallel configuration that a processor hands to the dispatch of attention."""

    def attention(self, call: dict[str, Any], backend: Callable[[], Tensor]) -> Tensor:
        """Return out of a call whose rows are split, by the names of the dispatch's arguments.

        Args:
            backend: runs the call on this rank's rows alone.
        """
        ...


class Split(NamedTuple):
    """A tensor that is split: an argument of a module's forward by name, or an output by number.

    Attributes:
        item: of a list or tuple of tensors that is one argument; None: the argument is a tensor.
        num_dims: of tensors that are split; others stay whole. None: any.
    """

    module: str
    name: str | int
    item: int | None
    dim: int
    num_dims: int | None


class Gather(NamedTuple):
    """An output, by number, whose rows are gathered."""

    module: str
    item: int
    dim: int


class Cuts(NamedTuple):
    """The tensors that a model splits, and the outputs that it gathers."""

    splits: tuple[Split, ...]
    gathers: tuple[Gather, ...]


def cuts_of(plan: Any) -> Cuts:
    """Read a plan in diffusers' form, as a model's `_cp_plan` has it.

    Raises:
        ValueError: for what is no such plan.
    """
    from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

    splits: list[Split] = []
    gathers: list[Gather] = []
    for module, entry in plan.items():
        if isinstance(entry, dict):
            for name, given in entry.items():
                several = isinstance(given, list | tuple)
                for item, one in enumerate(given if several else [given]):
                    if not isinstance(one, ContextParallelInput):
                        raise ValueError(f"plan of {module!r}: {name!r} is {one!r}, no input")
                    if one.split_output != isinstance(name, int):
                        raise ValueError(
                            f"plan of {module!r}: {name!r} must be an output's number if, and only "
                            "if, split_output is True"
                        )
                    number = item if several else None
                    splits.append(Split(module, name, number, one.split_dim, one.expected_dims))
            continue
        for item, one in enumerate(entry if isinstance(entry, list | tuple) else [entry]):
            if one is None:
                continue
            if not isinstance(one, ContextParallelOutput):
                raise ValueError(f"plan of {module!r}: {one!r} is neither an input nor an output")
            gathers.append(Gather(module, item, one.gather_dim))
    return Cuts(tuple(splits), tuple(gathers))


def modules_named(model: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """Return the modules of a plan's path, in which "*" stands for each of a list, -1 for its last.

    Raises:
        ValueError: if the model has none.
    """
    found: list[tuple[str, nn.Module]] = [("", model)]
    for atom in path.split(".") if path else ():
        deeper: list[tuple[str, nn.Module]] = []
        for name, module in found:
            children = dict(module.named_children())
            every = [*children]
            chosen = {"*": every, "-1": every[-1:]}.get(atom, [atom] if atom in children else [])
            deeper += [(f"{name}.{child}".lstrip("."), children[child]) for child in chosen]
        found = deeper
    if not found:
        raise ValueError(f"{type(model).__name__} has no module {path!r}, which its plan names")
    return found


def processors(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names of the attention layers whose processor can run split, and their processors."""
    for name, module in model.named_modules():
        processor = getattr(module, "processor", None)
        if hasattr(processor, "_parallel_config"):
            yield name, processor


def undispatched(model: nn.Module) -> list[str]:
    """Classes of the processors of attention layers that cannot run split, each once."""
    found = (getattr(module, "processor", None) for module in model.modules())
    others = (x for x in found if x is not None and not hasattr(x, "_parallel_config"))
    return list(dict.fromkeys(type(x).__name__ for x in others))


def is_split(processor: Any) -> bool:
    """Return whether a processor has a parallel configuration, of anyone."""
    return processor._parallel_config is not None


def split_processor(processor: Any, attention: SplitAttention) -> None:
    """Let a processor's attention over split rows run through `attention`."""
    processor._parallel_config = attention


def plan_of_model(model: nn.Module) -> Any:
    """Return the plan that a model's class declares, or None."""
    return getattr(model, "_cp_plan", None)


def route_calls() -> None:
    """Let each backend of diffusers hand calls with a `SplitAttention` to it, and run all others.

    Backends stand in a table of diffusers by the members of a closed Enum; a backend is wrapped
    once, and does what it did for every other model.
    """
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry

    for name, backend in tuple(Registry._backends.items()):
        if not isinstance(backend, _Routed):
            accepted = Registry._supported_arg_names[name]
            Registry._backends[name] = _Routed(backend, accepted)
            Registry._supported_arg_names[name] = {*_ARGUMENTS, *accepted}


_ARGUMENTS = (
    *("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
    "_parallel_config",
)


class _Routed:
    """A backend that hands calls with a `SplitAttention` to it.

    Args:
        accepted: names of the backend's own arguments.
    """

    def __init__(self, backend: Any, accepted: set[str]):
        self.backend, self.accepted = backend, frozenset(accepted)

    def __call__(self, **call: Any) -> Any:
        config: Any = call.get("_parallel_config")
        if hasattr(config, "attention"):
            return config.attention(call, lambda: self(**{**call, "_parallel_config": None}))
        return self.backend(**{name: x for name, x in call.items() if name in self.accepted})

"""What one run of a model leaves: every module's inputs and output by rows, and all gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook


class Setting(NamedTuple):
    """Columns of a module's output that are replaced, and a module whose first input is read.

    Attributes:
        values: of the whole sequence, [num_tokens, len(columns)].
        read: with "()" behind it: the module's output instead.
    """

    module: str
    columns: tuple[int, ...]
    values: Tensor
    read: str


class Job(NamedTuple):
    """One run: plain, or with a setting; positions: of this run's rows, -1 for padding."""

    setting: Setting | None = None
    positions: Tensor | None = None
    noise: float = 0.0
    seed: int = 0


@dataclass
class Record:
    """By module name, in the order in which modules returned; of a module's first call.

    Attributes:
        outputs: the first floating-point tensor that a module returned.
        inputs: its tensors, by place or keyword.
        grads: the loss's gradient at its output.
        parameters: gradients by parameter name.
        loss: of the whole, or a rank's share; None if the split returned none.
        positions: of a rank's rows, as the split said.
        reading: what a setting asked for.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    loss: float | None = None
    positions: Tensor | None = None
    reading: Tensor | None = None


def loss_of(result: Any) -> Tensor | None:
    """The loss in what a model or a split returned; None if there is none."""
    if isinstance(result, tuple | list) and result:
        result = result[0]
    if isinstance(result, Mapping):
        result = result.get("loss")
    result = getattr(result, "loss", result)
    if isinstance(result, int | float):
        return torch.tensor(float(result))
    return result if isinstance(result, Tensor) and result.numel() == 1 else None


def run_model(model: nn.Module, call: Any, job: Job) -> Record:
    """Run call() forward and, unless it did so itself, backward; record what passes the model."""
    torch.manual_seed(job.seed)
    for parameter in model.parameters():
        parameter.grad = None
    with torch.enable_grad(), _recording(model, job) as record:
        result = call()
        loss = loss_of(result)
        if isinstance(result, tuple) and len(result) == 2 and result[1] is not None:
            record.positions = torch.as_tensor(result[1]).detach().cpu().reshape(-1)
        undone = all(p.grad is None for p in model.parameters())
        if job.setting is None and loss is not None and loss.requires_grad and undone:
            loss.backward()
    record.loss = None if loss is None else float(loss.detach())
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            record.parameters[name] = _kept(parameter.grad)
    return record


@contextmanager
def _recording(model: nn.Module, job: Job) -> Iterator[Record]:
    record = Record()
    draw = torch.Generator().manual_seed(job.seed)  # leaves the model's own random numbers alone

    def disturbed(x: Tensor) -> Tensor:
        signs = torch.randint(0, 2, x.shape, generator=draw) * 2 - 1
        return x * (1 + job.noise * signs.to(x))

    names: dict[int, str] = {}
    strangers: dict[int, nn.Module] = {}  # held, so that no other module gets their ids

    def name_of(module: nn.Module) -> str | None:
        if id(module) not in names and id(module) not in strangers:
            names.update({id(m): name for name, m in model.named_modules()})
            if id(module) not in names:
                strangers[id(module)] = module
        return names.get(id(module))

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        name = name_of(module)
        if name is None:
            return None
        found = _first(output)
        if job.setting is not None:
            return _set(record, job, name, args, kwargs, output)
        if name not in record.inputs:
            record.inputs[name] = dict(_tensors(args, kwargs))
            if found is not None:
                record.outputs[name] = _kept(found)
                _watch(record, name, found, disturbed if job.noise else None)
        if job.noise and found is output and found is not None and not list(module.children()):
            return disturbed(found)
        return None

    handle = register_module_forward_hook(hook, with_kwargs=True)
    try:
        yield record
    finally:
        handle.remove()


def _watch(
    record: Record, name: str, output: Tensor, change: Callable[[Tensor], Tensor] | None
) -> None:
    def keep(grad: Tensor) -> Tensor | None:
        known = record.grads.get(name)
        record.grads[name] = _kept(grad) if known is None else known + _kept(grad)
        return change(grad) if change else None

    if output.requires_grad:
        output.register_hook(keep)


def _set(
    record: Record, job: Job, name: str, args: Any, kwargs: Any, returned: Any
) -> Tensor | None:
    setting, output = job.setting, _first(returned)
    assert setting is not None
    if name == setting.read and record.reading is None:
        record.reading = _kept(next(iter(dict(_tensors(args, kwargs)).values())))
    if f"{name}()" == setting.read and record.reading is None and output is not None:
        record.reading = _kept(output)
    if name != setting.module or output is None or output is not returned:
        return None
    positions = torch.arange(len(setting.values)) if job.positions is None else job.positions
    rows = setting.values[positions.clamp(min=0)] * (positions >= 0)[:, None]
    if output.shape[-2] != len(rows):  # a module that runs on other rows than those of this rank
        return None
    changed = output.clone()
    changed[..., list(setting.columns)] = rows.to(output)
    return changed


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in [*((str(i), x) for i, x in enumerate(args)), *kwargs.items()]:
        values = value if isinstance(value, tuple | list) else [value]
        for i, x in enumerate(values):
            if isinstance(x, Tensor):
                yield f"{name}.{i}" if values is value else name, _kept(x)


def _first(output: Any) -> Tensor | None:
    """The first floating-point tensor with rows."""
    if isinstance(output, Mapping):
        output = tuple(output.values())
    for x in output if isinstance(output, tuple | list) else (output,):
        if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1:
            return x
    return None


def _kept(x: Tensor) -> Tensor:
    """On the CPU, of its own; floating point in fp64."""
    x = x.detach().to("cpu", copy=True)
    return x.double() if x.is_floating_point() else x

"""What one run of a model leaves: every module's inputs and output by rows, and all gradients."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode


class OutputSetting(NamedTuple):
    """Columns of a module's output that are replaced, and a module whose first input is read.

    Attributes:
        values: of the whole sequence, [num_tokens, len(columns)].
        read: with "()" behind it: the module's output instead.
    """

    module: str
    columns: tuple[int, ...]
    values: Tensor
    read: str


class ModelRun(NamedTuple):
    """One run: plain, or with a setting.

    Attributes:
        positions: of this run's rows, -1 for padding.
        dtype: in which the model runs; None: its own.
    """

    setting: OutputSetting | None = None
    positions: Tensor | None = None
    noise: float = 0.0
    seed: int = 0
    dtype: torch.dtype | None = None


@dataclass
class Record:
    """By module name, in the order in which modules returned; of a module's first call.

    A projection that is no module, as in nn.MultiheadAttention, has its parameter's name.

    Attributes:
        outputs: the first floating-point tensor that a module returned.
        inputs: its tensors, by place or keyword.
        grads: the loss's gradient at its output.
        projections: names of those that multiply rows by a matrix.
        parameters: gradients by parameter name.
        loss: of the whole, or a rank's share; None if the split returned none.
        positions: of a rank's rows, as the split said.
        reading: what a setting asked for.
        eps: the coarsest rounding of what was computed: models in fp64 may use fp32 inside.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    projections: list[str] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    loss: float | None = None
    positions: Tensor | None = None
    reading: Tensor | None = None
    eps: float = 0.0


def copied(
    model: nn.Module, inputs: Mapping[str, Any], dtype: torch.dtype | None
) -> tuple[nn.Module, dict[str, Any]]:
    """A model and its inputs, to be changed; in a dtype if one is given."""
    model, inputs = copy.deepcopy(model), copy.deepcopy(dict(inputs))
    if dtype is None:
        return model, inputs
    floating = {k for k, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
    return model.to(dtype), {k: x.to(dtype) if k in floating else x for k, x in inputs.items()}


def run_whole(model: nn.Module, inputs: Mapping[str, Any], job: ModelRun) -> Record:
    """Run a copy of the unsplit model."""
    model, inputs = copied(model, inputs, job.dtype)
    return run_model(model, lambda: model(**inputs), job)


def run_model(model: nn.Module, call: Callable[[], Any], job: ModelRun) -> Record:
    """Run call() forward and, unless it did so itself, backward; record what passes the model."""
    torch.manual_seed(job.seed)
    for parameter in model.parameters():
        parameter.grad = None
    recorder = _Recorder(model, job)
    record = recorder.record
    with torch.enable_grad(), recorder.watching():
        result = call()
        loss = _loss_of(result)
        if isinstance(result, tuple) and len(result) == 2 and result[1] is not None:
            record.positions = torch.as_tensor(result[1]).detach().cpu().reshape(-1)
        undone = all(p.grad is None for p in model.parameters())
        if job.setting is None and loss is not None and loss.requires_grad and undone:
            loss.backward()
    record.loss = None if loss is None else float(loss.detach())
    grads = {name: x.grad for name, x in model.named_parameters()}
    record.parameters = {name: _kept(grad) for name, grad in grads.items() if grad is not None}
    return record


def _loss_of(result: Any) -> Tensor | None:
    """The loss in what a model or a split returned; None if there is none."""
    if isinstance(result, tuple | list) and result:
        result = result[0]
    if isinstance(result, Mapping):
        result = result.get("loss")
    result = getattr(result, "loss", result)
    if isinstance(result, int | float):
        return torch.tensor(float(result))
    return result if isinstance(result, Tensor) and result.numel() == 1 else None


def token_dim(x: Tensor, num_rows: int, first: int = -2) -> int | None:
    """The dimension of that length; the first is preferred."""
    dims = sorted(range(x.ndim), key=lambda d: d != first % x.ndim)
    return next((d for d in dims if x.shape[d] == num_rows), None)


def rows_of_one(x: Tensor, num_rows: int) -> Tensor | None:
    """Rows [num_rows, numbers of a row] of the first sequence of a batch."""
    if x.ndim > 2 and x.shape[0] != num_rows:
        x = x[:1]
    dim = token_dim(x, num_rows)
    return None if dim is None else x.movedim(dim, 0).reshape(num_rows, -1)


class _Recorder(TorchFunctionMode):
    """Sees what modules return, and what linear() gives for a weight of no nn.Linear's."""

    def __init__(self, model: nn.Module, job: ModelRun):
        super().__init__()
        self.model, self.job, self.record = model, job, Record()
        self.draw = torch.Generator().manual_seed(job.seed)  # leaves the model's own numbers alone
        self.thread, self.names = get_ident(), dict[int, str]()
        self.weights: dict[int, str] = {}
        self.by_weight: set[str] = set()  # names that linear() gave
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear | nn.Embedding):
                own = module.named_parameters(name, recurse=False)
                self.weights |= {id(x): of for of, x in own if x.ndim == 2}
            if isinstance(module, nn.MultiheadAttention):
                self.weights[id(module.out_proj.weight)] = f"{name}.out_proj"

    @contextmanager
    def watching(self) -> Iterator[None]:
        handle = register_module_forward_hook(self._returned, with_kwargs=True)
        try:
            with self:
                yield
        finally:
            handle.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return _OPEN_ATTENTION(*args, **kwargs)
        out = func(*args, **kwargs)
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and x.is_floating_point():
                self.record.eps = max(self.record.eps, torch.finfo(x.dtype).eps)
        weight = args[1] if func is F.linear and len(args) > 1 else kwargs.get("weight")
        if func is not F.linear or not isinstance(weight, Tensor):
            return out
        name = self.weights.get(id(weight if weight._base is None else weight._base))
        if name is None:
            return out
        name += f"[{weight.storage_offset()}]" if weight.storage_offset() else ""
        self.by_weight.add(name)
        return self._seen(name, True, args[:1], {}, out)

    def _returned(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """A module's forward hook; what runs in other threads, as other ranks do, is left alone."""
        if get_ident() != self.thread:
            return None
        if id(module) not in self.names:  # the split may have put it there
            self.names = {id(m): name for name, m in self.model.named_modules()}
        name = self.names.get(id(module))
        weight = getattr(module, "weight", None)
        if name is None or name in self.by_weight:
            return None
        projects = getattr(weight, "ndim", 0) == 2 and not isinstance(module, nn.Embedding)
        changed = self._seen(name, projects, args, kwargs, output, bool(list(module.children())))
        return None if changed is output else changed

    def _seen(
        self, name: str, projects: bool, args: Any, kwargs: Any, output: Any, outer: bool = False
    ) -> Any:
        """Record what a module took and gave; return what it should give instead."""
        record, found = self.record, first_rows(output)
        if projects and name not in record.projections:
            record.projections.append(name)
        if self.job.setting is not None:
            return self._set(self.job.setting, name, args, kwargs, output)
        if name not in record.inputs:
            record.inputs[name] = dict(_tensors(args, kwargs))
            if found is not None:
                record.outputs[name] = _kept(found)
                if found.requires_grad:
                    found.register_hook(lambda grad: self._gradient(name, grad))
        return self._disturbed(output) if found is output and not outer else output

    def _gradient(self, name: str, grad: Tensor) -> Tensor:
        known = self.record.grads.get(name)
        self.record.grads[name] = _kept(grad) if known is None else known + _kept(grad)
        return self._disturbed(grad)

    def _disturbed(self, x: Tensor) -> Tensor:
        if not self.job.noise:
            return x
        signs = torch.randint(0, 2, x.shape, generator=self.draw) * 2 - 1
        return x * (1 + self.job.noise * signs.to(x))

    def _set(self, setting: OutputSetting, name: str, args: Any, kwargs: Any, output: Any) -> Any:
        found = first_rows(output)
        if self.record.reading is None and setting.read in (name, f"{name}()"):
            own = found if setting.read != name else next(x for _, x in _tensors(args, kwargs))
            self.record.reading = None if own is None else _kept(own)
        at = self.job.positions
        at = torch.arange(len(setting.values)) if at is None else at
        if name != setting.module or found is None or found is not output:
            return output
        dim = token_dim(found, len(at))
        if dim is None:  # a module that runs on other rows than those of this rank
            return output
        values = setting.values[at.clamp(min=0)] * (at >= 0)[:, None]
        changed = found.clone()
        rows = changed.movedim(dim, 0)
        rows[..., list(setting.columns)] = values[:, *[None] * (rows.ndim - 2)].to(found)
        return changed


_OPEN_ATTENTION: Any = types.FunctionType(  # which does not hide its projections from a mode
    F.multi_head_attention_forward.__code__,
    vars(F) | {"has_torch_function": lambda _: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in [*((str(i), x) for i, x in enumerate(args)), *kwargs.items()]:
        values = value if isinstance(value, tuple | list) else [value]
        for i, x in enumerate(values):
            if isinstance(x, Tensor):
                yield f"{name}.{i}" if values is value else name, _kept(x)


def first_rows(output: Any) -> Tensor | None:
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

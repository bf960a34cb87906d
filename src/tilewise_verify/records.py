"""Records of one run of a model: every module's inputs and output by rows, and all gradients."""

from __future__ import annotations

import copy
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import (
    _global_forward_hooks,
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
)
from torch.overrides import TorchFunctionMode

from tilewise_verify.row_probe import RowProbe, on_gradient


class OutputSetting(NamedTuple):
    """A setting of a run: columns of a module's output are replaced, and another module is read.

    Attributes:
        values: of the whole sequence, [num_tokens, len(columns)].
        read: the module whose first input is read; with "()" behind its name, its output.
        positions: of this run's rows, -1 for padding; None: all.
    """

    module: str
    columns: tuple[int, ...]
    values: Tensor
    read: str
    positions: Tensor | None = None

    def changed(self, name: str, output: Tensor) -> Tensor:
        rows_of_run = torch.arange(len(self.values)) if self.positions is None else self.positions
        dim = token_dim(output, len(rows_of_run))
        if name != self.module or dim is None:  # or it runs on other rows than those of this rank
            return output
        values = self.values[rows_of_run.clamp(min=0)] * (rows_of_run >= 0)[:, None]
        changed = output.clone()
        rows = changed.movedim(dim, 0)
        rows[..., list(self.columns)] = values[:, *[None] * (rows.ndim - 2)].to(output)
        return changed


class LeafSetting:
    """Outputs of modules are leaves of the graph, times a number; as OutputSetting."""

    def __init__(self, modules: Collection[str], read: str, times: float):
        self.modules, self.read, self.times = modules, read, times
        self.leaves: dict[str, Tensor] = {}

    def changed(self, name: str, output: Tensor) -> Tensor:
        if name not in self.modules or name in self.leaves:
            return output
        self.leaves[name] = (self.times * output).detach().requires_grad_()
        return self.leaves[name]


class ModelRun(NamedTuple):
    """One run: plain, or with a setting; dtype: in which the model runs, None: its own."""

    setting: OutputSetting | LeafSetting | RowProbe | None = None
    noise: float = 0.0
    seed: int = 0
    dtype: torch.dtype | None = None


@dataclass
class Record:
    """Record of a run; of each module its first call.

    Attributes:
        tables: by kind and module's name, in the order in which modules returned. "output": the
            first floating-point tensor that a module returned; "gradient": the loss's at it;
            "input " and place or keyword; "choice": whole numbers that it returned, as an indexer
            does, and "scores": what it called topk on before. A projection that is no module, as in
            nn.MultiheadAttention, has its parameter's name.
        projections: names of those that multiply rows by a matrix.
        parameters: gradients by parameter name.
        loss: of the whole, or a rank's share; None if the split returned none.
        positions: of a rank's rows, as the split said.
        reading: the tensor that the setting reads; with a LeafSetting it is in the graph.
        eps: the coarsest rounding of what was computed: models in fp64 may use fp32 inside.
        in_layer: whether the layer of a RowProbe is running.
        called: names of functions of torch that it called.
    """

    tables: dict[str, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    projections: dict[str, None] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    loss: float | None = None
    positions: Tensor | None = None
    reading: Tensor | None = None
    eps: float = 0.0
    in_layer: bool = False
    called: set[str] = field(default_factory=set)

    @property
    def outputs(self) -> dict[str, Tensor]:
        return self.tables["output"]

    def inputs(self, name: str) -> dict[str, Tensor]:
        """Return the inputs of a module, by the kinds that they are."""
        kinds = self.tables.items()
        return {
            kind: tables_by_module[name]
            for kind, tables_by_module in kinds
            if kind[:6] == "input " and name in tables_by_module
        }


def run_whole(model: nn.Module, inputs: Mapping[str, Any], job: ModelRun) -> Record:
    """Run a copy of the unsplit model."""
    model, inputs = copied(model, inputs, job.dtype)
    return run_model(model, lambda: model(**inputs), job)


def copied(
    model: nn.Module, inputs: Mapping[str, Any], dtype: torch.dtype | None
) -> tuple[nn.Module, dict[str, Any]]:
    """A model and its inputs, to be changed; in a dtype if one is given.

    Raises:
        ValueError: if the model or its inputs cannot be copied.
    """
    try:
        model, inputs = copy.deepcopy(model), copy.deepcopy(dict(inputs))
    except Exception as error:  # whatever an object's own way to be copied raises
        raise ValueError(
            f"model or inputs cannot be copied ({type(error).__name__}: {error}); parity runs "
            "copies of them, so make what cannot be copied inside split"
        ) from error
    if dtype is None:
        return model, inputs
    floating = {k for k, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
    return model.to(dtype), {k: x.to(dtype) if k in floating else x for k, x in inputs.items()}


def run_model(model: nn.Module, call: Callable[[], Any], job: ModelRun) -> Record:
    """Run call() forward and, unless it did so itself, backward; record what passes the model."""
    torch.manual_seed(job.seed)
    for parameter in model.parameters():
        parameter.grad = None
    recorder = _Recorder(model, job)
    record = recorder.record
    handles = [register_module_forward_hook(recorder.returned, with_kwargs=True)]
    backward = job.setting is None
    if isinstance(job.setting, RowProbe):
        handles += job.setting.attach(model, record)
        backward = job.setting.backward
    try:
        with torch.enable_grad(), recorder:
            result = call()
            loss = _loss_of(result)
            if isinstance(result, tuple) and len(result) == 2 and result[1] is not None:
                record.positions = torch.as_tensor(result[1]).detach().cpu().reshape(-1)
            needs_backward = all(p.grad is None for p in model.parameters())
            if backward and loss is not None and loss.requires_grad and needs_backward:
                loss.backward()
    finally:
        for handle in handles:
            handle.remove()
        # torch's handle leaves this entry behind, and compiled models warn of it
        _global_forward_hooks_with_kwargs.pop(handles[0].id, None)
    record.loss = None if loss is None else float(loss.detach())
    if record.reading is not None and not isinstance(job.setting, LeafSetting):
        record.reading = _kept(record.reading)
    grads = {name: x.grad for name, x in model.named_parameters()}
    record.parameters = {name: _kept(grad) for name, grad in grads.items() if grad is not None}
    return record


def forget_runs(threads: Collection[int]) -> None:
    """Remove the forward hooks of runs that never end; torch.compile refuses to run beside them.

    Args:
        threads: identifiers of the threads in which they run.
    """
    for key, hook in list(_global_forward_hooks.items()):
        recorder = getattr(hook, "__self__", None)
        if isinstance(recorder, _Recorder) and recorder.thread in threads:
            _global_forward_hooks.pop(key, None)
            _global_forward_hooks_with_kwargs.pop(key, None)


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


class _Recorder(TorchFunctionMode):
    """Recorder of the modules' outputs, and of linear() with weights of no nn.Linear."""

    def __init__(self, model: nn.Module, job: ModelRun):
        super().__init__()
        self.model, self.job, self.record = model, job, Record()
        self.draw = torch.Generator().manual_seed(job.seed)  # leaves the model's own numbers alone
        self.thread, self.names, self.seen = get_ident(), dict[int, str](), set[str]()
        self.scores: Tensor | None = None  # of the last topk
        self.weights: dict[int, str] = {}  # names, of projections that are no modules
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear | nn.Embedding):
                own_parameters = module.named_parameters(name, recurse=False)
                self.weights |= {
                    id(x): parameter_name for parameter_name, x in own_parameters if x.ndim == 2
                }
            if isinstance(module, nn.MultiheadAttention):
                self.weights[id(module.out_proj.weight)] = f"{name}.out_proj"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return _OPEN_ATTENTION(*args, **kwargs)
        out = func(*args, **kwargs)
        if self.record.in_layer:
            self.record.called.add(getattr(func, "__name__", ""))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and x.is_floating_point():
                self.record.eps = max(self.record.eps, torch.finfo(x.dtype).eps)
        if func in (torch.topk, Tensor.topk):
            self.scores = args[0].detach()
        weight = args[1] if func is F.linear and len(args) > 1 else kwargs.get("weight")
        if func is not F.linear or not isinstance(weight, Tensor):
            return out
        name = self.weights.get(id(weight if weight._base is None else weight._base))
        if name is None:
            return out
        name += f"[{weight.storage_offset()}]" if weight.storage_offset() else ""
        self.record.projections.setdefault(name)
        return self._passed(name, args[:1], {}, out)

    def returned(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Forward hook of every module. Modules that run in other threads (ranks) are ignored."""
        if get_ident() != self.thread:
            return None
        if id(module) not in self.names:  # the split may have put it there
            self.names = {id(m): name for name, m in self.model.named_modules()}
        name = self.names.get(id(module))
        if name is None or name in self.weights.values():
            return None
        weight = getattr(module, "weight", None)
        if getattr(weight, "ndim", 0) == 2 and not isinstance(module, nn.Embedding):
            self.record.projections.setdefault(name)
        return self._passed(name, args, kwargs, output, bool(list(module.children())))

    def _passed(self, name: str, args: Any, kwargs: Any, output: Any, outer: bool = False) -> Any:
        """Record a module's inputs and output; return the output that it should have."""
        first_output, inputs, setting = first_rows(output), _tensors(args, kwargs), self.job.setting
        if isinstance(setting, RowProbe):
            return output
        if setting is not None:
            if self.record.reading is None and setting.read in (name, f"{name}()"):
                self.record.reading = (
                    next(iter(inputs.values())) if setting.read == name else first_output
                )
            return (
                output
                if first_output is None or first_output is not output
                else setting.changed(name, first_output)
            )
        if name not in self.seen:
            self.seen.add(name)
            for key, x in inputs.items():
                self.record.tables[f"input {key}"][name] = _kept(x)
            if isinstance(output, Tensor) and output.dtype in (torch.int32, torch.int64):
                self.record.tables["choice"][name] = _kept(output)
                if self.scores is not None:
                    self.record.tables["scores"][name] = _kept(self.scores)
                self.scores = None
            if first_output is not None:
                self.record.outputs[name] = _kept(first_output)
                if first_output.requires_grad:
                    on_gradient(first_output, lambda grad: self._gradient(name, grad))
        return self._disturbed(output) if first_output is output and not outer else output

    def _gradient(self, name: str, grad: Tensor) -> Tensor:
        gradient_so_far = self.record.tables["gradient"].get(name, 0.0)
        self.record.tables["gradient"][name] = gradient_so_far + _kept(grad)
        return self._disturbed(grad)

    def _disturbed(self, x: Tensor) -> Tensor:
        if not self.job.noise:
            return x
        signs = torch.randint(0, 2, x.shape, generator=self.draw) * 2 - 1
        return x * (1 + self.job.noise * signs.to(x))


_OPEN_ATTENTION: Any = types.FunctionType(  # which does not hide its projections from a mode
    F.multi_head_attention_forward.__code__,
    vars(F) | {"has_torch_function": lambda _: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors among arguments, also those in tuples, by place or keyword."""
    arguments = {str(i): x for i, x in enumerate(args)} | dict(kwargs)
    for name, value in list(arguments.items()):
        if isinstance(value, tuple | list):
            arguments |= {f"{name}.{i}": x for i, x in enumerate(value)}
    return {name: x for name, x in arguments.items() if isinstance(x, Tensor)}


def first_rows(output: Any) -> Tensor | None:
    """The first floating-point tensor with rows."""
    if isinstance(output, Mapping):
        output = tuple(output.values())
    for x in output if isinstance(output, tuple | list) else (output,):
        if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1:
            return x
    return None


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


def _kept(x: Tensor) -> Tensor:
    """A copy on the CPU, in fp64 if it is floating point."""
    x = x.detach().to("cpu", copy=True)
    return x.double() if x.is_floating_point() else x

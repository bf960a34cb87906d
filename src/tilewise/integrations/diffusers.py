"""Image and video models of diffusers, with their sequence split over the ranks of a group.

    from tilewise.integrations.diffusers import enable_parallelism

    enable_parallelism(pipe.transformer, group)     # then as on one process

Every rank calls the model with whole inputs and gets the whole output. Where it is split and
gathered a model's own `_cp_plan` says; lengths need not divide by the number of ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from itertools import combinations
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tilewise.arguments import Validate, checks_arguments
from tilewise.context_parallel import ContextParallel
from tilewise.integrations.diffusers_internals import (
    Cuts,
    Gather,
    Split,
    cuts_of,
    is_split,
    modules_named,
    plan_of_model,
    processors,
    route_calls,
    split_processor,
)
from tilewise.layouts.layout import Layout, Run, contiguous
from tilewise.plan.ir import Plan
from tilewise.plan.kept import RecentValues
from tilewise.strategies.ring import ring
from tilewise.strategies.ulysses import ulysses
from tilewise.tokens.moves import gather_moves
from tilewise.tokens.rows import move_rows
from tilewise.tokens.same_rows import first_difference
from tilewise.transport.agreement import agree
from tilewise.transport.resolve import Group, transport_for

__all__ = ["TRIED", "enable_parallelism"]

TRIED = (
    "ChronoEditTransformer3DModel",
    "Flux2Transformer2DModel",
    "FluxTransformer2DModel",
    "QwenImageTransformer2DModel",
    "WanTransformer3DModel",
)
"""Classes of models of diffusers that tests compare with one process."""

TAKES_NO_TEXT = TRIED[1:3]
"""Those of them that run on a rank without a row of the text, if it has one of the image."""

MOST_JOINED = 3
"""Most tensors that a model concatenates to one sequence of attention."""

Model = TypeVar("Model", bound=nn.Module)
Key = tuple[str, str | int, int | None]


@checks_arguments
def enable_parallelism(
    model: Model,
    group: Group | DeviceMesh | Any = None,
    *,
    strategy: Literal["auto"] | Plan = "auto",
    cp_plan: Mapping[str, Any] | None = None,
    validate: Validate = "first",
) -> Model:
    """Split a model of diffusers over the ranks of a group, for all later calls of any shapes.

        enable_parallelism(pipe.transformer, mesh["cp"])
        loss = loss_of(model(whole_inputs))             # the same on every rank, undivided
        loss.backward()
        for p in model.parameters():                    # sum, no mean
            torch.distributed.all_reduce(p.grad)

    Every rank passes whole inputs, equal on all, and gets the whole output. Its backward pass takes
    the rank's slice: where every rank computes the same loss from it, the sum over ranks of a
    parameter's gradients is that of one process, and their mean is too small by the number of
    ranks. Attention without positions in other ranks (to a text that each has whole) stays that of
    diffusers.

    Args:
        model: such as pipe.transformer.
        group: a ProcessGroup, a loopback group, None for the default group, or a DeviceMesh of one
            dimension or with dimensions "ring" and "ulysses", whose sizes then are the strategy. Or
            diffusers' ContextParallelConfig(ring_degree=, ulysses_degree=).
        strategy: a plan, such as tw.ulysses(8), or "auto": the planner's choice for each length.
        cp_plan: in diffusers' form; None: the one that the model's class declares. Models other
            than `TRIED` need it: it is taken as it is.
        validate: "first": inputs are compared among ranks at the first call of each kind, so that
            noise drawn on each rank is found; "always": at each call; "never".
    Returns:
        The model.
    Raises:
        ValueError: if the model has no plan, has been split already, or has attention that cannot
            be split. Calls raise it on every rank for inputs that differ between ranks, and for
            attention with a mask, dropout or keys of another length.
    """
    name = type(model).__name__
    of_mesh, ranks = _strategy_of(group)
    if of_mesh is not None and strategy == "auto":
        strategy = of_mesh
    declared = plan_of_model(model)
    if cp_plan is None and name not in TRIED:
        known = "declares a plan that was not tried" if declared else "declares none"
        raise ValueError(
            f"{name} needs a cp_plan: its class {known}. Tried are {', '.join(TRIED)}; pass "
            "cp_plan= in diffusers' form, which says which modules' inputs are split and which "
            "outputs are gathered, and compare with one process"
        )
    cuts = cuts_of(declared if cp_plan is None else cp_plan)
    layers = [*processors(model)]
    if not layers or not cuts.splits or not cuts.gathers:
        raise ValueError(
            f"{name} has {len(layers)} attention layers that can run split, and its plan "
            f"{len(cuts.splits)} inputs and {len(cuts.gathers)} outputs; each must be at least 1"
        )
    for layer, processor in layers:
        if is_split(processor):
            raise ValueError(f"{name} is split already: {layer} has a parallel configuration")
        if "IPAdapter" in type(processor).__name__:
            raise ValueError(
                f"{layer} attends to an image prompt that every rank has whole "
                f"({type(processor).__name__}), which cannot be split; unload the IP adapter"
            )
    state = _SplitModel(name, ranks, strategy, validate)
    _install(model, cuts, state)
    for layer, processor in layers:
        split_processor(processor, _Layer(layer, state))
    route_calls()
    return model


def _strategy_of(group: Any) -> tuple[Plan | None, Any]:
    """The plan that a mesh or a configuration of diffusers names, and the group of it."""
    if hasattr(group, "ring_degree") and hasattr(group, "ulysses_degree"):
        rings, heads, mesh = group.ring_degree, group.ulysses_degree, group.mesh
        ranks = transport_for(None).world_size if mesh is None else rings * heads
        if ranks != rings * heads:
            raise ValueError(
                f"ring_degree ({rings}) x ulysses_degree ({heads}) is {rings * heads}, but the "
                f"default group has {ranks} ranks; give it a mesh with dimensions ring and ulysses"
            )
        return _unified(rings, heads), None if mesh is None else _flat(mesh)
    if isinstance(group, DeviceMesh) and group.ndim > 1:
        if {"ring", "ulysses"} <= {*(group.mesh_dim_names or ())}:
            sizes = (group[x].size() for x in ("ring", "ulysses"))
            return _unified(*sizes), _flat(group)
        raise ValueError(
            f"the mesh has dimensions {group.mesh_dim_names}; pass one of them, as in mesh['cp'], "
            "or a mesh with dimensions ring and ulysses"
        )
    return None, group.get_group() if isinstance(group, DeviceMesh) else group


def _unified(rings: int, heads: int) -> Plan:
    if heads == 1:
        return ring(rings)
    return ulysses(heads, inner=None if rings == 1 else ring(rings))


def _flat(mesh: DeviceMesh) -> Any:
    return mesh["ring", "ulysses"]._flatten().get_group()


class _SplitModel:
    """A split model on one rank: the lengths of this call, and the sequences that they make up."""

    def __init__(
        self,
        name: str,
        group: Group,
        strategy: Literal["auto"] | Plan,
        validate: Validate,
    ):
        self.name, self.strategy = name, strategy
        self.validate: Validate = validate
        self.transport = transport_for(group)
        self.rank, self.world_size = self.transport.rank, self.transport.world_size
        if isinstance(strategy, Plan) and strategy.world_size != self.world_size:
            raise ValueError(
                f"{strategy.name} is for {strategy.world_size} ranks, but the group has "
                f"{self.world_size}; make the plan for {self.world_size}"
            )
        self.lengths: dict[Key, int] = {}
        self._candidates: dict[str, list[tuple[Key, ...]]] = {}
        self._cps: RecentValues[Hashable, ContextParallel] = RecentValues(64)

    def __deepcopy__(self, memo: dict[int, Any]) -> _SplitModel:
        """A copy of the model has the same group."""
        return self

    def begin(self, inputs: Mapping[str, Tensor]) -> None:
        """Begin a call of the model, whose inputs must be the same on every rank."""
        self.lengths.clear()
        fields = {"call": f"inputs of {self.name}"}
        fields |= {name: f"{x.dtype} {list(x.shape)}" for name, x in inputs.items()}

        def rows() -> list[tuple[str, Tensor]]:
            given = [(name, x) for name, x in inputs.items() if x.numel()]
            return [(name, x.reshape(-1, x.shape[-1] if x.ndim else 1)) for name, x in given]

        found = first_difference(self.transport, fields, rows, self.validate)
        if found is not None:
            raise ValueError(
                f"{found.name} of {self.name} is another tensor on rank {found.rank} than on rank "
                "0; pass the same on all ranks: draw noise and timesteps from generators of one "
                "seed, or broadcast them from one rank"
            )

    def split(self, x: Tensor, key: Key, dim: int) -> Tensor:
        """This rank's part of a whole tensor; its backward pass has zeros elsewhere."""
        self.lengths[key] = length = x.shape[dim]
        most = max(self.lengths.values()) if self.name in TAKES_NO_TEXT else length
        if most < self.world_size:
            raise ValueError(
                f"{key[1]!r} of {key[0] or self.name} has {length} rows for {self.world_size} "
                "ranks, of which each needs one; use fewer ranks, larger images or longer texts"
            )
        (run,) = contiguous(max(length, 1), self.world_size).runs[self.rank] or (Run(0, 0),)
        return x.narrow(dim, min(run.start, length), min(run.count, length))

    def layout(self, sequence: str, num_rows: int, most: int = MOST_JOINED) -> Layout:
        """The layout of a sequence that is made up of split tensors, found by its rows.

        It is the same on all ranks; a rank that has other rows is refused where they are used.

        Args:
            sequence: whose; it is made up of the same tensors in every call.
            num_rows: of this rank.
            most: tensors that it is made up of.
        """
        candidates = self._candidates.get(sequence)
        if candidates is None:
            keys = [*self.lengths]
            counts = range(1, min(most, len(keys)) + 1)
            candidates = [one for count in counts for one in combinations(keys, count)]
        sizes = {one: self._sizes(one) for one in candidates if {*one} <= self.lengths.keys()}
        if len({*sizes.values()}) != 1:  # the same on all ranks, which ask each other then
            found = self._rows_of_ranks(sequence, num_rows)
            candidates = [one for one in candidates if sizes.get(one, found) == found]
            sizes = {one: found for one in candidates if one in sizes}
            if not sizes:
                raise ValueError(
                    f"{sequence} has {found} rows on the ranks, which no sum of at most "
                    f"{most} of the split lengths {[*self.lengths.values()]} gives; the "
                    f"plan does not say all that {self.name} splits"
                )
        self._candidates[sequence] = candidates
        (rows, *_) = sizes.values()
        starts = np.cumsum([0, *rows]).tolist()
        runs = [[Run(start, count)] for start, count in zip(starts, rows, strict=False)]
        return Layout(starts[-1], runs, "split")

    def _sizes(self, keys: tuple[Key, ...]) -> tuple[int, ...]:
        """Rows of each rank of tensors one after the other."""
        n = self.world_size
        parts = [contiguous(max(self.lengths[key], 1), n).sizes for key in keys]
        parts = [x if self.lengths[key] else (0,) * n for x, key in zip(parts, keys, strict=True)]
        return tuple(map(sum, zip(*parts, strict=True)))

    def _rows_of_ranks(self, sequence: str, num_rows: int) -> tuple[int, ...]:
        agree(self.transport, {"call": f"rows of {sequence}"}, None, "always")
        record = torch.tensor([num_rows]).view(torch.uint8)
        records = self.transport.gather_records(record)
        return tuple(int(x.view(torch.int64)) for x in records)

    def attention(self, layer: str, call: Mapping[str, Any]) -> Tensor:
        """Attention of a layer over the rows of all ranks."""
        q, k, v = call["query"], call["key"], call["value"]
        refused = {
            "attn_mask": call.get("attn_mask") is not None,
            "dropout_p": bool(call.get("dropout_p")),
            "is_causal": bool(call.get("is_causal")),
            "return_lse": bool(call.get("return_lse")),
        }
        if any(refused.values()):
            names = ", ".join(name for name, given in refused.items() if given)
            raise ValueError(
                f"{layer} of {self.name} attends with {names}, which cannot be split yet; call the "
                "model without it"
            )
        if k.shape[1] != q.shape[1]:
            raise ValueError(
                f"{layer} of {self.name} has {q.shape[1]} rows of queries and {k.shape[1]} of "
                "keys on this rank; only attention of a sequence to itself is split"
            )
        layout = self.layout(layer, int(q.shape[1]))
        return self._cp(layout).attention(q, k, v, softmax_scale=call.get("scale"))

    def _cp(self, layout: Layout) -> ContextParallel:
        def make() -> ContextParallel:
            num_tokens, strategy = layout.num_tokens, self.strategy
            given: dict[str, Any] = {
                "num_tokens": num_tokens,
                "layout": layout,
                "strategy": strategy,
            }
            return ContextParallel(self.transport, **given)

        return self._cps.get(layout, make)

    def gather(self, x: Tensor, at: Gather) -> Tensor:
        """All rows of a tensor, whose backward pass takes this rank's slice."""
        rows, where = int(x.shape[at.dim]), at.module or "the model"
        layout = self.layout(f"output {at.item} of {where}", rows, most=1)
        return _Gathered.apply(x, self, layout, at.dim % x.ndim)  # pyright: ignore


class _Layer:
    """An attention layer of a split model, as its processor's parallel configuration."""

    def __init__(self, name: str, model: _SplitModel):
        self.name, self.model = name, model

    def __deepcopy__(self, memo: dict[int, Any]) -> _Layer:
        return self

    def attention(self, call: dict[str, Any]) -> Tensor:
        return self.model.attention(self.name, call)


class _Gathered(torch.autograd.Function):
    """Every rank computes the same of the whole, so that its slice of the gradient is all of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: _SplitModel, layout: Layout, dim: int) -> Tensor:
        ctx.dim, ctx.rows = dim, layout.ranges(model.rank)
        return move_rows(x, gather_moves(layout, None), model.transport, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        start, stop = ctx.rows[0] if ctx.rows else (0, 0)
        return grad.narrow(ctx.dim, start, stop - start), None, None, None


def _install(model: nn.Module, cuts: Cuts, state: _SplitModel) -> None:
    """Hang the splits and gathers into a model, and the beginning of each call."""
    hooks: list[Callable[[], Any]] = []
    signature = inspect.signature(model.forward)

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = signature.bind_partial(*args, **kwargs).arguments
        state.begin({name: x for name, x in given.items() if isinstance(x, Tensor)})

    hooks.append(lambda: model.register_forward_pre_hook(begin, with_kwargs=True))
    for path in dict.fromkeys(x.module for x in (*cuts.splits, *cuts.gathers)):
        splits = [x for x in cuts.splits if x.module == path]
        inputs = [x for x in splits if isinstance(x.name, str)]
        outputs = [x for x in splits if isinstance(x.name, int)]
        gathers = [x for x in cuts.gathers if x.module == path]
        for name, module in modules_named(model, path):
            if inputs:
                hooks.append(_input_hook(module, name, inputs, state))
            if outputs or gathers:
                hooks.append(_output_hook(module, name, outputs, gathers, state))
    for hook in hooks:  # all at once: a plan that does not fit leaves the model as it is
        hook()


def _part(x: Any, split: Split, name: str, state: _SplitModel) -> Any:
    """A rank's part of what a plan splits; what is no tensor of so many dimensions stays whole."""
    if not isinstance(x, Tensor) or split.num_dims not in (None, x.ndim):
        return x
    return state.split(x, (name, split.name, split.item), split.dim)


def _input_hook(
    module: nn.Module, name: str, splits: list[Split], state: _SplitModel
) -> Callable[[], Any]:
    signature = inspect.signature(module.forward)
    for split in splits:
        if split.name not in signature.parameters:
            raise ValueError(
                f"{name or 'the model'} takes no {split.name!r}, which the plan splits; it takes "
                f"{', '.join(signature.parameters)}"
            )

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = signature.bind_partial(*args, **kwargs)
        for split in splits:
            assert isinstance(split.name, str)
            given = bound.arguments.get(split.name)
            if split.item is None:
                part = _part(given, split, name, state)
            elif isinstance(given, list | tuple):
                items = [*given]
                items[split.item] = _part(items[split.item], split, name, state)
                part = type(given)(items)
            else:
                continue
            if given is not None:
                bound.arguments[split.name] = part
        return bound.args, bound.kwargs

    return lambda: module.register_forward_pre_hook(hook, with_kwargs=True)


def _output_hook(
    module: nn.Module, name: str, splits: list[Split], gathers: list[Gather], state: _SplitModel
) -> Callable[[], Any]:
    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        items = [output] if isinstance(output, Tensor) else [*output]
        for split in splits:
            assert isinstance(split.name, int)
            items[split.name] = _part(items[split.name], split, name, state)
        for at in gathers:
            items[at.item] = state.gather(items[at.item], at)
        return items[0] if isinstance(output, Tensor) else tuple(items)

    return lambda: module.register_forward_hook(hook)

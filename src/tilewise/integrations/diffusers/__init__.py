"""Image and video models of diffusers, with their sequence split over the ranks of a group.

    from tilewise.integrations.diffusers import enable_parallelism

    enable_parallelism(pipe.transformer, group)     # then as on one process

Every rank calls the model with whole inputs and gets the whole output. Where it is split and
gathered a model's own `_cp_plan` says; lengths need not divide by the number of ranks.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from itertools import combinations
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import tilewise as tw
from tilewise.arguments import Validate, checks_arguments
from tilewise.integrations.diffusers.internals import (
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
    undispatched,
)
from tilewise.integrations.diffusers.models import MODELS, Attends, ModelSplit
from tilewise.plan.kept import RecentValues
from tilewise.tokens.moves import gather_moves
from tilewise.tokens.rows import move_rows
from tilewise.tokens.same_rows import first_difference
from tilewise.transport.agreement import agree, settled

__all__ = ["TRIED", "enable_parallelism"]

TRIED = tuple(MODELS)
"""Classes of models of diffusers that tests compare with one process."""

HIDDEN = -9000.0
"""Most that a mask in numbers adds to scores of keys that it hides: -10,000 in any dtype."""

MOST_JOINED = 3
"""Most tensors that a model concatenates to one sequence of attention."""

Model = TypeVar("Model", bound=nn.Module)
Key = tuple[str, str | int, int | None]
BlockTable = tuple[np.ndarray, list[int], list[int]]
"""A mask by blocks: bool [row blocks, column blocks], the edges of rows and of columns."""


@checks_arguments
def enable_parallelism(
    model: Model,
    group: tw.transport.Group | DeviceMesh | Any = None,
    *,
    strategy: Literal["auto"] | tw.Plan = "auto",
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
            attention with dropout or a mask that differs between queries.
    """
    name = type(model).__name__
    of_mesh, ranks = _strategy_of(group)
    if of_mesh is not None and strategy == "auto":
        strategy = of_mesh
    declared = plan_of_model(model)
    if cp_plan is None and name not in TRIED:
        others = undispatched(model)
        if others and not any(processors(model)):
            raise ValueError(
                f"{name} cannot be split: its attention layers ({', '.join(others)}) do not run "
                "through diffusers' dispatch_attention_fn, where attention over all ranks enters; "
                "take another model, or processors that call it"
            )
        has_plan = "declares a plan that was not tried" if declared else "declares none"
        raise ValueError(
            f"{name} needs a cp_plan: its class {has_plan}. Tried are {', '.join(TRIED)}; pass "
            "cp_plan= in diffusers' form, which splits what leads to its attention layers "
            f"({_layers_of(model)}), gathers the output after the last, and compare with one "
            "process"
        )
    known = MODELS[name] if cp_plan is None else ModelSplit({})
    for setting, value, reason in known.refused:
        if getattr(model.config, setting) == value:
            raise ValueError(
                f"{name} has {setting}={value!r}, which {reason}, so that it cannot be split; take "
                "a model without it"
            )
    cuts = known.cuts or cuts_of(declared if cp_plan is None else cp_plan)
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
    attends: dict[str, Attends | None] = {}
    if cp_plan is None:
        cuts = cuts._replace(splits=(*cuts.splits, *known.splits))
        for layer, _ in layers:
            fits = [part for part in known.layers if part in layer.split(".")]
            if not fits:
                raise ValueError(
                    f"{layer} of {name} is no attention layer that was tried "
                    f"({', '.join(known.layers)}); pass cp_plan=, and compare with one process"
                )
            attends[layer] = known.layers[fits[0]]
    state = _SplitModel(name, ranks, strategy, validate, known if cp_plan is None else None)
    _install(model, cuts, state)
    for layer, processor in layers:
        if attends.get(layer, _UNKNOWN) is not None:
            split_processor(processor, _Layer(layer, attends.get(layer), state))
    route_calls()
    return model


def _layers_of(model: nn.Module) -> str:
    """Return as text the names of attention layers that can run split, layers of a list once."""
    names = dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, _ in processors(model))
    return ", ".join(names) or "none that can run split"


def split_rows(model: nn.Module) -> int:
    """Return how many rows the last call of a split, tried model had over all ranks.

    Raises:
        ValueError: if the model computes them whole between its layers, or was not split here.
    """
    splits = [processor._parallel_config for _, processor in processors(model)]
    state = next((one.model for one in splits if isinstance(one, _Layer)), None)
    if state is None or state.known is None or state.known.gathers_within:
        raise ValueError(
            f"{type(model).__name__} computes whole rows on every rank between its layers; compare "
            "its output, and the sum over ranks of its parameters' gradients, with one process"
        )
    return state.length_of(state.known.output)


def _strategy_of(group: Any) -> tuple[tw.Plan | None, Any]:
    """The plan that a mesh or a configuration of diffusers names, and the group of it."""
    if hasattr(group, "ring_degree") and hasattr(group, "ulysses_degree"):
        rings, heads, mesh = group.ring_degree, group.ulysses_degree, group.mesh
        ranks = tw.transport.transport_for(None).world_size if mesh is None else rings * heads
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


def _unified(rings: int, heads: int) -> tw.Plan:
    if heads == 1:
        return tw.ring(rings)
    return tw.ulysses(heads, inner=None if rings == 1 else tw.ring(rings))


def _flat(mesh: DeviceMesh) -> Any:
    return mesh["ring", "ulysses"]._flatten().get_group()


class _SplitModel:
    """A split model on one rank: the lengths of this call, and the sequences that they make up."""

    def __init__(
        self,
        name: str,
        group: tw.transport.Group,
        strategy: Literal["auto"] | tw.Plan,
        validate: Validate,
        known: ModelSplit | None,
    ):
        self.name, self.known = name, known
        self.strategy: Literal["auto"] | tw.Plan = strategy
        self.validate: Validate = validate
        self.transport = tw.transport.transport_for(group)
        self.rank, self.world_size = self.transport.rank, self.transport.world_size
        if isinstance(strategy, tw.Plan) and strategy.world_size != self.world_size:
            raise ValueError(
                f"{strategy.name} is for {strategy.world_size} ranks, but the group has "
                f"{self.world_size}; make the plan for {self.world_size}"
            )
        self.lengths: dict[Key, int] = {}
        self._candidates: dict[str, list[tuple[Key, ...]]] = {}
        self._cps: RecentValues[Hashable, tw.ContextParallel] = RecentValues(64)

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
        """This rank's part of a whole tensor; its backward pass has zeros elsewhere.

        A tensor of fewer rows than ranks stays whole on every rank, as a text of one token does.
        """
        self.lengths.pop(key, None)  # the last of a name is the one that was split last
        self.lengths[key] = length = x.shape[dim]
        if length < self.world_size:
            if self.known is not None:
                return x
            raise ValueError(
                f"{key[1]!r} of {key[0] or self.name} has {length} rows for {self.world_size} "
                "ranks, of which each needs one; use fewer ranks, larger images or longer texts"
            )
        (run,) = tw.contiguous(length, self.world_size).runs[self.rank]
        return x.narrow(dim, run.start, run.count)

    def sequence(self, names: tuple[str, ...], num_rows: int) -> tw.Layout:
        """The layout of a sequence of a tried model.

        Split parts stand by rank, each rank's in order, as its rows do.

        Args:
            names: of the tensors that it is made of; at most one is never split.
            num_rows: of this rank; those of the others are left for the one that is never split.
        """
        lengths = [self.length_of(name) for name in names]
        whole = [length < self.world_size for length in lengths]
        parts = [x for x, is_whole in zip(lengths, whole, strict=True) if not is_whole]
        sizes = [tw.contiguous(x, self.world_size).sizes for x in parts]
        others = sum(x[self.rank] for x in sizes) + sum(
            x for x, is_whole in zip(lengths, whole, strict=True) if is_whole and x >= 0
        )
        lengths = [num_rows - others if length < 0 else length for length in lengths]
        if all(whole):
            return tw.joint(self.world_size, range(sum(lengths)))
        split = _by_rank(tuple(map(sum, zip(*sizes, strict=True))))
        if not any(whole):
            return split
        before = sum(lengths[: whole.index(False)])
        after = range(before + split.num_tokens, sum(lengths))
        return tw.joint(split, [*range(before), *after])

    def leading(self, count: int) -> int:
        """Return how many of the first rows of the model's sequence are this rank's."""
        assert self.known is not None
        length = self.length_of(self.known.output)
        if length < self.world_size:
            return count
        (run,) = tw.contiguous(length, self.world_size).runs[self.rank]
        return min(max(count - run.start, 0), run.count)

    def length_of(self, name: str) -> int:
        """Return the length of the tensor of a name that was split last; -1 if none was."""
        named = [
            length
            for key, length in self.lengths.items()
            if name == (key[1] if isinstance(key[1], str) else key[0])
        ]
        return named[-1] if named else -1

    def layout(self, sequence: str, num_rows: int, most: int = MOST_JOINED) -> tw.Layout:
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
                why = f"the plan does not say all that {self.name} splits"
                if len({*found}) == 1:
                    why = (
                        "as all ranks have as many, it is whole on each, a text say: add it to "
                        "cp_plan, so that it is split, too (encoder_hidden_states: "
                        "ContextParallelInput(split_dim=1, expected_dims=3)), or let the layer's "
                        "processor hand None as _parallel_config to dispatch_attention_fn"
                    )
                raise ValueError(
                    f"{sequence} has {found} rows on the ranks, which no sum of at most "
                    f"{most} of the split lengths {[*self.lengths.values()]} gives; {why}"
                )
        self._candidates[sequence] = candidates
        return _by_rank(next(iter(sizes.values())))

    def _sizes(self, keys: tuple[Key, ...]) -> tuple[int, ...]:
        """Rows of each rank of tensors one after the other."""
        parts = [tw.contiguous(self.lengths[key], self.world_size).sizes for key in keys]
        return tuple(map(sum, zip(*parts, strict=True)))

    def _rows_of_ranks(self, sequence: str, num_rows: int) -> tuple[int, ...]:
        agree(self.transport, {"call": f"rows of {sequence}"}, None, "always")
        record = torch.tensor([num_rows]).view(torch.uint8)
        records = self.transport.gather_records(record)
        return tuple(int(x.view(torch.int64)) for x in records)

    def attention(
        self,
        layer: str,
        attends: Attends | None,
        call: Mapping[str, Any],
        backend: Callable[[], Tensor],
    ) -> Tensor:
        """Attention of a layer over the rows of all ranks.

        Args:
            attends: what its sequences are made of; None: found by their rows.
            backend: that of diffusers, for rows of this rank alone.
        """
        q, k, v = call["query"], call["key"], call["value"]
        refused = {
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
        num_rows, num_keys = int(q.shape[1]), int(k.shape[1])
        if attends is None:
            # On some ranks alone there may be as many keys as rows.
            layout, keys = self.layout(layer, num_rows), self.layout(f"keys of {layer}", num_keys)
        else:
            layout = self.sequence(attends.queries, num_rows)
            keys = self.sequence(attends.keys, num_keys)
        if len(keys.replicated) == keys.num_tokens:
            return backend()
        options: dict[str, Any] = {"softmax_scale": call.get("scale"), "validate": self.validate}
        if keys != layout:
            moves = "kv" if keys.num_tokens <= layout.num_tokens else "q"
            plan = tw.ring(self.world_size, moves) if self.strategy == "auto" else self.strategy
            options |= {"kv_layout": keys, "plan": plan}
        cp, given = self._cp(layout), call.get("attn_mask")
        if given is None:
            return cp.attention(q, k, v, **options)
        outs: list[Tensor] = []
        entries: list[int] = []
        for mask, batch in self._masks(layer, given, len(q), layout, keys):
            rows = (x[batch] for x in (q, k, v))
            outs.append(cp.attention(*rows, mask=mask, **options))
            entries += batch
        return torch.cat(outs)[np.argsort(entries).tolist()]

    def _masks(
        self, layer: str, given: Tensor, num_entries: int, layout: tw.Layout, keys: tw.Layout
    ) -> list[tuple[tw.masks.Mask | None, list[int]]]:
        """Masks that some entries of a batch have in common, and these entries.

        Args:
            given: [batch, keys], or broadcast to [batch, num_heads, rows, keys]: of the whole
                sequence, or of this rank's rows and keys, if it hides whole rows and whole keys.
        """
        whole_keys = given.shape[-1] == keys.num_tokens
        num_rows = layout.num_tokens if whole_keys else layout.size(self.rank)
        num_keys = keys.num_tokens if whole_keys else keys.size(self.rank)

        def visible() -> tuple[Tensor, Tensor, Tensor]:
            x = given.detach()
            if x.shape == (num_entries, num_keys):
                x = x[:, None, None]  # as the backends of diffusers read it
            x = x[(None,) * (4 - x.ndim)]
            seen = x if x.dtype == torch.bool else x == 0
            fits = x.shape[2:] in ((1, num_keys), (num_rows, num_keys))
            fits &= bool((seen == seen[:, :1]).all())
            if x.dtype != torch.bool:
                fits &= bool((seen | (x <= HIDDEN)).all())
            seen = seen[:, 0]
            rows, columns = seen.any(-1), seen.any(-2)
            if seen.shape[1] == 1:
                rows = torch.ones_like(rows)
            elif not whole_keys:  # of an entry without any one cannot tell rows from keys
                fits &= bool((seen == rows[:, :, None] & columns[:, None]).all())
                fits &= bool(rows.any(-1).all())
            if not fits:
                raise ValueError(
                    f"{layer} of {self.name} attends with attn_mask {list(given.shape)}, which is "
                    f"none of padding: one that hides some of the {keys.size(self.rank)} keys from "
                    "all queries and heads, by False or by -10,000, and adds 0 elsewhere, or whole "
                    f"queries; nor one of all {layout.num_tokens} queries and {keys.num_tokens} "
                    "keys. Others cannot be split; call the model without it"
                )
            return seen, rows, columns

        seen, rows, columns = settled(self.transport, visible)
        if whole_keys:
            tables = [_whole_table(x.cpu().numpy(), layout.num_tokens) for x in seen]
        else:
            tables = self._padding(rows, columns, layout, keys)
        entries: dict[tw.masks.Mask | None, list[int]] = {}
        for entry in range(num_entries):
            table, *edges = tables[entry % len(tables)]
            if not table.any():
                raise ValueError(
                    f"{layer} of {self.name} attends with attn_mask, which hides all "
                    f"{keys.num_tokens} keys of batch entry {entry}; leave at least one"
                )
            mask = None if table.all() else tw.masks.block_sparse_variable(table, *edges)
            entries.setdefault(mask, []).append(entry)
        return [*entries.items()]

    def _padding(
        self, rows: Tensor, columns: Tensor, layout: tw.Layout, keys: tw.Layout
    ) -> list[BlockTable]:
        """Tables of masks that hide whole rows and whole keys, of which each rank knows its own.

        Args:
            rows: [entries, rows] or [entries, 1], visible ones of this rank; columns: keys.
        """
        rows = rows.expand(-1, layout.size(self.rank))
        most_keys, most_rows = max(keys.sizes), max(layout.sizes)
        record = torch.zeros(len(rows), most_keys + most_rows, dtype=torch.uint8)
        record[:, : columns.shape[1]] = columns
        record[:, most_keys : most_keys + rows.shape[1]] = rows
        whole_columns = np.zeros((len(rows), keys.num_tokens), bool)
        whole_rows = np.zeros((len(rows), layout.num_tokens), bool)
        for rank, theirs in enumerate(self.transport.gather_records(record.flatten())):
            table = theirs.view(record.shape).numpy().astype(bool)
            whole_columns[:, keys.rows(rank)] = table[:, : keys.size(rank)]
            of_rows = table[:, most_keys : most_keys + layout.size(rank)]
            whole_rows[:, layout.rows(rank)] = of_rows
        tables: list[BlockTable] = []
        for of_rows, of_columns in zip(whole_rows, whole_columns, strict=True):
            (q, q_edges), (k, k_edges) = _runs(of_rows[:, None]), _runs(of_columns[:, None])
            tables.append((q & k.T, q_edges, k_edges))
        return tables

    def _cp(self, layout: tw.Layout) -> tw.ContextParallel:
        def make() -> tw.ContextParallel:
            return tw.ContextParallel(
                self.transport,
                num_tokens=layout.num_tokens,
                strategy=self.strategy,
                layout=layout,
            )

        return self._cps.get(layout, make)

    def gather(self, x: Tensor, at: Gather) -> Tensor:
        """All rows of a tensor.

        Its backward pass takes this rank's slice; within a model the sum over ranks of that.
        """
        rows, where = int(x.shape[at.dim]), at.module or "the model"
        if self.known is None:
            layout = self.layout(f"output {at.item} of {where}", rows, most=1)
        else:
            layout = self.sequence((self.known.output,), rows)
            if self.known.gathers_within:
                if len(layout.replicated):
                    return x
                return move_rows(x, gather_moves(layout, None), self.transport, at.dim)
            if len(layout.replicated):
                return self.shared(x)
        return _Gathered.apply(x, self, layout, at.dim % x.ndim)  # pyright: ignore

    def shared(self, x: Tensor) -> Tensor:
        """A tensor that every rank computes whole, whose backward pass gives each rank a share."""
        return _Shared.apply(x, self.rank, self.world_size)  # pyright: ignore


_UNKNOWN = Attends((), ())
"""Stands for a layer of a model that was not tried."""


def _by_rank(sizes: tuple[int, ...]) -> tw.Layout:
    """The layout of so many rows of each rank, one rank after the other."""
    starts = np.cumsum([0, *sizes]).tolist()
    runs = [[tw.layouts.Run(start, count)] for start, count in zip(starts, sizes, strict=False)]
    return tw.Layout(starts[-1], runs, "split")


def _whole_table(visible: np.ndarray, num_queries: int) -> BlockTable:
    """The table [num_queries or 1, num_keys] of a mask by its blocks of equal rows and columns."""
    columns, k_edges = _runs(visible.T)
    rows, q_edges = _runs(columns.T)
    return rows, q_edges if len(visible) == num_queries else [0, num_queries], k_edges


def _runs(rows: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Rows without those that repeat the one before, and where each begins, and the end."""
    starts = np.flatnonzero(np.r_[True, (rows[1:] != rows[:-1]).any(1)])
    return rows[starts], [*starts.tolist(), len(rows)]


class _Layer:
    """An attention layer of a split model, as its processor's parallel configuration."""

    def __init__(self, name: str, attends: Attends | None, model: _SplitModel):
        self.name, self.attends, self.model = name, attends, model

    def __deepcopy__(self, memo: dict[int, Any]) -> _Layer:
        return self

    def attention(self, call: dict[str, Any], backend: Callable[[], Tensor]) -> Tensor:
        return self.model.attention(self.name, self.attends, call, backend)


class _Gathered(torch.autograd.Function):
    """Gather all rows. In backward each rank takes its own rows of the gradient.

    That is the whole gradient, because every rank computes the same from the gathered rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: _SplitModel, layout: tw.Layout, dim: int) -> Tensor:
        ctx.dim, ctx.rows = dim, layout.ranges(model.rank)
        return move_rows(x, gather_moves(layout, None), model.transport, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        start, stop = ctx.rows[0] if ctx.rows else (0, 0)
        return grad.narrow(ctx.dim, start, stop - start), None, None, None


class _Shared(torch.autograd.Function):
    """Return x.

    In backward each rank keeps 1 / world_size of the numbers of the gradient, else zeros.

    Every rank computes all of x, so a sum over ranks would count the gradient world_size times.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int, world_size: int) -> Tensor:
        ctx.of = rank, world_size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        rank, world_size = ctx.of
        start, stop = (grad.numel() * part // world_size for part in (rank, rank + 1))
        share = torch.zeros_like(grad, memory_format=torch.contiguous_format)
        share.view(-1)[start:stop] = grad.reshape(-1)[start:stop]
        return share, None, None


def _install(model: nn.Module, cuts: Cuts, state: _SplitModel) -> None:
    """Hang the splits and gathers into a model, and the beginning of each call."""
    split = {name for x in cuts.splits for name, _ in modules_named(model, x.module)}
    gathered = [name for x in cuts.gathers for name, _ in modules_named(model, x.module)]
    both = [name for name in gathered if name in split - {""}]
    if both and (state.known is None or not state.known.gathers_within):
        raise ValueError(
            f"the plan of {state.name} splits and gathers {both[0]!r}: every rank computes whole "
            "tensors between such modules, whose gradients each would count; pass a cp_plan that "
            "splits once, before the first block, and gathers once, after the last"
        )
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
    for path in () if state.known is None else state.known.whole_outputs:
        for _, module in modules_named(model, path):
            hooks.append(partial(module.register_forward_hook, _shared_hook(state)))
    for argument in () if state.known is None else state.known.leading:
        for module in model.modules():
            if argument in inspect.signature(module.forward).parameters:
                hooks.append(_leading_hook(module, argument, state))
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


def _leading_hook(module: nn.Module, argument: str, state: _SplitModel) -> Callable[[], Any]:
    signature = inspect.signature(module.forward)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = signature.bind_partial(*args, **kwargs)
        bound.arguments[argument] = state.leading(bound.arguments[argument])
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


def _shared_hook(state: _SplitModel) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    return lambda _, __, output: state.shared(output)

"""The choices of a model's indexers, recorded and handed in again (index replay).

    with hf.record_indices() as indices:               # one tensor a layer that has an indexer
        model(**hf.shard(cp, tokens))
    model(**hf.shard(cp, tokens, indices=[hf.unshard(cp, x) for x in indices]))

A rollout samples tokens with one choice of keys, and a training step that chooses anew may choose
others, of which the probabilities of its tokens are not those that were sampled from. The choice
that is handed in takes the place of the indexers' own, in backward and in recomputed layers too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise as tw
from tilewise.arguments import require_dense, require_type
from tilewise.integrations.transformers.saved import Shared, is_split, not_compiled
from tilewise.transport.agreement import settled

INDICES = "indices"
"""The argument of a model's call that has the choices of its layers."""


class _State(threading.local):
    """State of the thread that calls models.

    Attributes:
        handed: the choices of this rank's queries that a call was given, until it ends.
        recorded: the list that choices are recorded in, if any.
    """

    def __init__(self) -> None:
        self.handed: tuple[Tensor, ...] | None = None
        self.recorded: list[Tensor] | None = None


_state = _State()


class IndexerLayers(Shared):
    """The number of layers of a model that have an indexer, and the ranks that share its rows."""

    def __init__(self, count: int, group: Any) -> None:
        self.count, self.group = count, group


@contextmanager
def record_indices() -> Iterator[list[Tensor]]:
    """Record the keys that the indexers of a split model choose.

        with hf.record_indices() as indices:
            model(**hf.shard(cp, tokens))
        choices = [hf.unshard(cp, x) for x in indices]     # as hf.shard(..., indices=choices) takes

    Yields:
        A list which each layer that has an indexer puts its choice into, in the order of layers:
        positions in the row, int64 [batch, this rank's tokens, k], -1 where a query sees fewer keys
        than k. The last call of a model counts.
    """
    before, _state.recorded = _state.recorded, []
    try:
        yield _state.recorded
    finally:
        _state.recorded = before


def handed_in() -> tuple[Tensor, ...] | None:
    """The choices that the call in progress was given for this rank's queries, or None."""
    return _state.handed


def record(number: int, chosen: Tensor) -> None:
    """Keep the choice of a layer, if the caller records choices.

    Args:
        number: of the layer, among those with an indexer.
    """
    if _state.recorded is not None:
        _state.recorded[number : number + 1] = [chosen]  # a recomputed layer chooses again


def sharded_indices(cp: tw.ContextParallel, indices: Any, batch: int) -> tuple[Tensor, ...]:
    """This rank's rows of choices for the whole batch; one row of padding if it has no tokens.

    Raises:
        ValueError: unless they are whole numbers [batch, num_tokens, k] of each layer.
    """
    shape = list(indices.shape) if isinstance(indices, Tensor) else None
    if not isinstance(indices, list | tuple) and len(shape or ()) != 4:
        raise ValueError(
            f"indices is {shape or type(indices).__name__}, but must be a list: the positions of "
            "each layer that has an indexer, [batch, num_tokens, k]"
        )
    made = []
    for number, x in enumerate(indices):
        _check_choice(f"indices[{number}]", x, [batch, cp.num_tokens])
        mine = cp.shard(x, 1)
        spare = 0 if mine.shape[1] else 1
        made.append(F.pad(mine, (0, 0, 0, spare), value=-1))
    return tuple(made)


def _check_choice(name: str, x: Any, rows: list[int]) -> None:
    require_type(Tensor, name, x, "torch.tensor of positions")
    require_dense(name, x)
    kind = x.is_floating_point() or x.is_complex() or x.dtype == torch.bool
    if kind or x.ndim != 3 or [*x.shape[:2]] != rows:
        raise ValueError(
            f"{name} is {x.dtype} {list(x.shape)}, but must be whole numbers "
            f"{[*rows, 'k']}: the positions of the keys that each query attends to, -1 for none"
        )


def wire_replay(called: nn.Module, base: nn.Module, group: Any) -> None:
    """Make calls of a model take `indices`.

    Args:
        called: base, or what PEFT made of it.
        group: the ranks that share the model's rows.
    """
    count = sum(getattr(x, "_tilewise_indexer", -1) >= 0 for x in base.modules())
    if "_tilewise_replays" not in vars(called):  # PEFT's models have base's attributes
        called.register_forward_pre_hook(_before_model, with_kwargs=True)
        called.register_forward_hook(_after_model, always_call=True)
    called._tilewise_replays = IndexerLayers(count, group)  # pyright: ignore


def refuse_unsplit(given: Mapping[str, Any]) -> None:
    """Raise ValueError if an unsplit call of a model is given choices, which it would not read."""
    if given.get(INDICES) is not None:
        raise ValueError(
            "indices are for a split call: in an unsplit one (a cache, one rank, hf.unsplit) the "
            "model's own code chooses; leave them out"
        )


@not_compiled
def _before_model(model: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    if INDICES not in given:
        return None
    indices = given[INDICES]
    layers: IndexerLayers | None = model._tilewise_replays
    if layers is None or not is_split(model):
        refuse_unsplit(given)
        return None

    def check() -> tuple[Tensor, ...] | None:
        if indices is None:
            return None
        if not layers.count:
            raise ValueError(
                f"{type(model).__name__} has no layer with an indexer, so no choice of keys can be "
                "handed to it; leave indices out"
            )
        if not isinstance(indices, list | tuple | Tensor) or len(indices) != layers.count:
            has = len(indices) if isinstance(indices, list | tuple | Tensor) else "no list"
            raise ValueError(
                f"indices has {has} of {layers.count}: pass the choice of each layer that has an "
                "indexer, in the order of layers, as hf.record_indices records them"
            )
        tokens = (given.get("input_ids"), given.get("inputs_embeds"), *args)
        rows = next([*x.shape[:2]] for x in tokens if isinstance(x, Tensor))
        for number, x in enumerate(indices):
            _check_choice(f"indices[{number}]", x, rows)
        return tuple(x.long() for x in indices)

    _state.handed = settled(tw.transport.transport_for(layers.group), check)
    return args, {name: x for name, x in given.items() if name != INDICES}


@not_compiled
def _after_model(*_: Any) -> None:
    _state.handed = None

"""Models that count positions from padding_idx + 1 on, RoBERTa and its kin, run split.

Their embeddings number the tokens that they are given, and leave padding out. In a split call a
rank has some of the tokens only, so it is handed positions, from 0 on in each document, and the
embeddings take these, moved by padding_idx + 1.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

import tilewise as tw
from tilewise.integrations.transformers.masks import COUNTS_FROM_PADDING
from tilewise.integrations.transformers.saved import not_compiled
from tilewise.transport.agreement import settled


class _State(threading.local):
    """State of a thread: the ranks over which its call is split; None: positions are left alone."""

    cp: tw.ContextParallel | None = None


_state = _State()


@contextmanager
def positions_moved(cp: tw.ContextParallel | None) -> Iterator[None]:
    """Context in which embeddings that count from padding_idx + 1 add that to the positions they
    get.

    Args:
        cp: the ranks over which the call is split; None: positions are left alone.
    """
    before, _state.cp = _state.cp, cp
    try:
        yield
    finally:
        _state.cp = before


def skips_padding(base: nn.Module) -> bool:
    """Return whether embeddings of a model count from padding_idx + 1, and leave padding out."""
    return any(hasattr(module, COUNTS_FROM_PADDING) for module in base.modules())


def wire_positions(base: nn.Module) -> None:
    """Hook the embeddings of a model that count from padding_idx + 1."""
    for module in base.modules():
        known = hasattr(module, COUNTS_FROM_PADDING)
        if known and not hasattr(module, "_tilewise_positions"):
            module._tilewise_positions = True  # pyright: ignore[reportArgumentType]
            module.register_forward_pre_hook(_before, with_kwargs=True)


@not_compiled
def _before(module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    cp = _state.cp
    if cp is None:
        return None
    ids = args[0] if args else given.get("input_ids")
    return args, given | {"position_ids": _moved(cp, ids, given.get("position_ids"), module)}


def _moved(cp: tw.ContextParallel, ids: Any, positions: Any, module: Any) -> Tensor:
    """Positions as the model counts them.

    Raises:
        ValueError: on every rank, without positions, and for padding among the ids: how much of it
            comes before a rank's tokens is not known to the rank.
    """
    padding = module.padding_idx

    def moved() -> Tensor:
        if not isinstance(positions, Tensor):
            raise ValueError(
                f"the model counts positions from padding_idx + 1 ({padding + 1}) on, and a rank "
                "has some of the tokens only; pass position_ids as hf.shard returns them"
            )
        if ids is not None and bool((ids[:, : cp.layout.size(cp.rank)] == padding).any()):
            raise ValueError(
                f"input_ids hold {padding}, the id of padding, which the model leaves out when it "
                "counts positions; hide it by an attention_mask, and pass that to hf.shard or "
                "ShardingCollator in a loop of your own: the rows are then split without padding"
            )
        return positions + (padding + 1)

    return settled(tw.transport.transport_for(cp.group), moved)

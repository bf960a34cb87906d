"""Split calls run dropout by position, a routers' loss that counts all ranks, positions that are
counted as the model does, and towers that return features of this rank's tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

import tilewise as tw
from tilewise.integrations.transformers.attention import refuse
from tilewise.integrations.transformers.counted_positions import positions_moved
from tilewise.integrations.transformers.dropout import rows_dropped
from tilewise.integrations.transformers.experts import (
    ASKS,
    refused_router_loss,
    routers_of_all_ranks,
)
from tilewise.integrations.transformers.images import images_of_call
from tilewise.integrations.transformers.saved import Shared, is_split, not_compiled


class _Open(threading.local):
    """Contexts of the hooked models that run in this thread, the innermost last.

    Each context is closed when its model ends.
    """

    def __init__(self) -> None:
        self.calls: list[ExitStack] = []


_open = _Open()


class _Ranks(Shared):
    """The ranks over which a model runs, and its class."""

    def __init__(self, cp: tw.ContextParallel, model_class: type) -> None:
        self.cp, self.model_class = cp, model_class


@contextmanager
def standing_in(called: Any, model_class: type, cp: tw.ContextParallel) -> Iterator[None]:
    """Replace a model's dropout and routers' loss inside, for one split call over cp.

    Args:
        called: the model, or what PEFT made of it.
        model_class: the model's, of transformers.
    """
    with rows_dropped(called, cp), routers_of_all_ranks(model_class, cp):
        yield


def stand_in(called: nn.Module, base: nn.Module, cp: tw.ContextParallel) -> None:
    """Hook a model so that each of its split calls runs inside standing_in.

    Args:
        called: base, or what PEFT made of it.
    """
    if "_tilewise_ranks" not in vars(called):  # PEFT's models have base's attributes
        called.register_forward_pre_hook(_before, with_kwargs=True, prepend=True)
        called.register_forward_hook(_after, always_call=True)
    called._tilewise_ranks = _Ranks(cp, type(base))  # pyright: ignore[reportArgumentType]


@not_compiled
def _before(called: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    stack = ExitStack()
    _open.calls.append(stack)
    if not is_split(called):
        return None
    ranks: _Ranks = called._tilewise_ranks
    error = refused_router_loss(ranks.model_class) if given.get(ASKS) else None
    if error is not None:
        refuse(ranks.cp, error)
    stack.enter_context(standing_in(called, ranks.model_class, ranks.cp))
    stack.enter_context(positions_moved(ranks.cp))
    return args, stack.enter_context(images_of_call(called, ranks.cp, args, given))


@not_compiled
def _after(*_: Any) -> None:
    if _open.calls:
        _open.calls.pop().close()

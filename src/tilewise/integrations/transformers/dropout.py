"""Dropout modules of a split model drop by each row's position in the whole sequence.

nn.Dropout draws as many numbers as a rank has rows, so that ranks whose generators are alike would
drop the same places of other rows. In split calls the modules of a text model draw instead by
position, with a seed that the ranks agree on once a call. A layer that transformers' checkpoints
run again has the seed and the rows of its call.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import tilewise as tw
from tilewise.execution.validation import MOST_SEEDS
from tilewise.integrations.seeds import agreed_seed
from tilewise.integrations.transformers.saved import not_compiled
from tilewise.tokens.dropout import dropped


class CallDropout(NamedTuple):
    """The rows of a split call, and the seed from which its modules count theirs."""

    cp: tw.ContextParallel
    seed: int


class _State(threading.local):
    """State of the thread that calls models: the split call in progress, or the one of which a
    layer runs again.
    """

    call: CallDropout | None = None


_state = _State()


class RowDropout(nn.Dropout):
    """nn.Dropout that drops by position in split calls, and as ever in others.

    Attributes:
        number: of this module in its model.
        ran_split: its last forward pass belonged to a split call.
    """

    number: int
    ran_split = False

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return super().forward(input)
        return self._drop(input)

    @not_compiled
    def _drop(self, x: Tensor) -> Tensor:
        call = _state.call
        if call is None and self.ran_split and torch._C._current_graph_task_id() != -1:
            raise ValueError(
                "a checkpoint that is not transformers' own runs a dropout module of a split model "
                "again, so which rows it has is not known; checkpoint by "
                "model.gradient_checkpointing_enable() (gradient_checkpointing=True of a Trainer), "
                "or set the module's p to 0"
            )
        self.ran_split = call is not None
        if call is None:
            return super().forward(x)
        positions = call.cp.position_ids
        if x.ndim < 3 or x.shape[1] != len(positions) or self.p == 1:
            return super().forward(x)  # rows in another order, or padding alone
        return dropped(x, self.p, (call.seed + self.number) % MOST_SEEDS, positions, 1)


@contextmanager
def rows_dropped(base: Any, cp: tw.ContextParallel) -> Iterator[None]:
    """Dropout modules of a model drop by the positions of cp's rows inside."""
    active = [x for x in _dropout_modules(base) if x.training and 0 < x.p < 1]
    if not active or _state.call is not None:
        yield
        return
    _keep_in_checkpoints(base)
    _state.call = CallDropout(cp, agreed_seed(cp.group))
    try:
        yield
    finally:
        _state.call = None


def _dropout_modules(base: Any) -> list[RowDropout]:
    """Return the dropout modules of a model that see rows of text; new ones get their class.

    PEFT may have added some since the last call, so they are counted anew.
    """
    text = base.config.get_text_config(decoder=True)
    roots = [base] if base.config is text else [x for x in base.modules() if _is_model_of(x, text)]
    modules = {id(x): x for root in roots for x in root.modules()}
    for module in modules.values():
        if type(module) is nn.Dropout:
            module.__class__ = RowDropout
    found = [x for x in modules.values() if isinstance(x, RowDropout)]
    for number, module in enumerate(found):
        module.number = number
    return found


def _is_model_of(module: nn.Module, config: Any) -> bool:
    return getattr(module, "config", None) is config and hasattr(module, "get_input_embeddings")


def _keep_in_checkpoints(base: nn.Module) -> None:
    """Let layers of a model that are checkpointed run again with the dropout of their call."""
    for layer in base.modules():
        checkpoint = getattr(layer, "_gradient_checkpointing_func", None)
        if checkpoint is not None and getattr(checkpoint, "func", None) is not _checkpointed:
            kept = functools.partial(_checkpointed, checkpoint)
            layer._gradient_checkpointing_func = kept  # pyright: ignore[reportArgumentType]


@not_compiled
def _checkpointed(
    checkpoint: Callable[..., Any], layer: Callable[..., Any], *args: Any, **given: Any
) -> Any:
    return checkpoint(functools.partial(_run_in, _state.call, layer), *args, **given)


def _run_in(call: CallDropout | None, layer: Callable[..., Any], *args: Any, **given: Any) -> Any:
    before, _state.call = _state.call, call
    try:
        return layer(*args, **given)
    finally:
        _state.call = before

"""The loss that levels the work of experts counts the tokens of all ranks in split calls.

A mixture of experts may add to its loss the product of two means over all tokens: how many choose
an expert, and how probable the router finds it. transformers' models take both in one function,
load_balancing_loss_func, of the scores of their routers. In split calls ours stands for it: it adds
up both over the ranks, and gives each rank its share of the product, as a split loss is one.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import tilewise as tw
from tilewise.integrations.transformers.attention import refuse
from tilewise.integrations.transformers.saved import not_compiled
from tilewise.transport.means import on_every_rank

NAME, MIXTRAL = "load_balancing_loss_func", "transformers.models.mixtral.modeling_mixtral"
PARAMETERS = ("gate_logits", "num_experts", "top_k", "attention_mask")
ASKS = "output_router_logits"
"""The argument of a call, and the field of a configuration, that asks for the loss."""


NOT_CANONICAL = (
    "the bits of the routers' sums depend on the split; set router_aux_loss_coef=0.0 and "
    'output_router_logits=False, or take reduction="fast"'
)


class _State(threading.local):
    """State of the thread that calls models: the ranks of the split call in progress."""

    cp: tw.ContextParallel | None = None


_state = _State()


@cache
def knows_router_loss(model_class: type) -> bool:
    """Return whether the routers' loss of a model is one that counts all ranks in split calls."""
    found = _module(model_class).get(NAME)
    return found is not None and tuple(inspect.signature(found).parameters) == PARAMETERS


def refused_router_loss(model_class: type) -> str | None:
    """Why a model cannot run split with output_router_logits; None if it can."""
    if knows_router_loss(model_class):
        return None
    return (
        f"{ASKS}=True cannot be honoured by a split model: {model_class.__name__} has no "
        f"{NAME}({', '.join(PARAMETERS)}) in its module, so its loss would count this rank's "
        f"tokens alone; set {ASKS} to False, router_aux_loss_coef=0.0 in TRL's configuration"
    )


@contextmanager
def routers_of_all_ranks(model_class: type, cp: tw.ContextParallel) -> Iterator[None]:
    """The routers' loss of a class of models counts all ranks' rows inside, in this thread."""
    if not knows_router_loss(model_class) or _state.cp is not None:
        yield
        return
    # TRL's fused head takes Mixtral's for all models.
    for module in _module(model_class), vars(import_module(MIXTRAL)):
        if not hasattr(module[NAME], "_tilewise_split"):
            module[NAME] = _ours(module[NAME])
    _state.cp = cp
    try:
        yield
    finally:
        _state.cp = None


def _module(model_class: type) -> dict[str, Any]:
    """The globals of a model's module; FSDP2 gives a model a class made at run time."""
    own = next(x for x in model_class.__mro__ if "torch.distributed" not in x.__module__)
    return vars(sys.modules[own.__module__])


def _ours(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a module's load_balancing_loss_func: split calls count the tokens of all ranks."""

    @wraps(function)
    @not_compiled
    def run(*args: Any, **given: Any) -> Any:
        if _state.cp is None:
            return function(*args, **given)
        if _state.cp.reduction != "fast":
            refuse(_state.cp, f'{ASKS}=True with reduction="canonical": {NOT_CANONICAL}')
        named = inspect.signature(function).bind(*args, **given)
        named.apply_defaults()
        logits, num_experts, top_k, _ = named.arguments.values()  # padding is in no split call
        return share_of_router_loss(_state.cp, logits, num_experts, top_k)

    ours: Any = run
    ours._tilewise_split = True
    return ours


def share_of_router_loss(
    cp: tw.ContextParallel, logits: tuple[Tensor, ...] | None, num_experts: int, top_k: int
) -> Tensor | int:
    """This rank's share of num_experts * sum over experts of (choices * probability), both of which
    are means over the tokens of all ranks and layers.

    Its value is the whole loss divided by the number of ranks, its gradient that of the whole loss
    by this rank's logits: the shares of all ranks add up to the loss, and so do their gradients.

    Args:
        logits: of each layer's router, [batch * this rank's rows, num_experts]; None: 0 is the
            loss, as of a model without routers.
        top_k: experts that a token chooses.
    """
    if not logits or not isinstance(logits, tuple):
        return 0
    size = cp.layout.size(cp.rank)
    sums = logits[0].new_zeros(2 * num_experts + 1, dtype=torch.float64)
    for layer in logits:
        own = layer if size else layer[:0]  # a rank without tokens runs a row of padding
        probabilities = torch.softmax(own, -1)
        chosen = probabilities.topk(top_k, -1).indices.flatten()
        counts = sums.new_zeros(num_experts, device=own.device)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=counts.dtype))
        rows = counts.new_full((1,), len(own))
        found = counts, probabilities.float().sum(0).double(), rows
        sums = sums + torch.cat(found).to(sums.device)
    transport = tw.transport.transport_for(cp.group)
    total: Any = _OfAllRanks.apply(sums, transport)
    counts, probabilities, rows = total.split([num_experts, num_experts, 1])
    loss = (num_experts * (counts / rows * (probabilities / rows)).sum()).float()
    return loss - loss.detach() * (1 - 1 / cp.world_size)


class _OfAllRanks(torch.autograd.Function):
    """Sum numbers over all ranks. Backward passes each rank's gradient on unchanged."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, transport: tw.transport.Transport) -> Tensor:
        return torch.stack(on_every_rank(transport, own.detach())).sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        return grad, None

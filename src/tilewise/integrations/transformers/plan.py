"""The layouts of a hybrid model of transformers: its layers, as the planner prices them.

A model of the same configuration is made without memory (on torch's meta device), and each kind of
its layers that carry a state is called once on a few tokens, over a ContextParallel that only notes
what the layer would send. Kernels are not run.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

import tilewise as tw
from tilewise.arguments import dtype_name
from tilewise.integrations.transformers.attention import LayerMask
from tilewise.integrations.transformers.indexed_work import indexed_layer
from tilewise.integrations.transformers.states import (
    kernels_replaced,
    names_read,
    state_layers,
    wire,
)
from tilewise.planning.hybrid import CHOICES, promising_hybrid
from tilewise.planning.model_attention import HEAD_FIELDS, heads_of
from tilewise.transport.resolve import LocalTransport

VARIABLE = inspect.Parameter.VAR_KEYWORD
NUM_TOKENS = 8  # of the calls that measure layers
INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # what attention of transformers reads


class _OnePiece(NamedTuple):
    """A layout of one rank."""

    num_tokens: int

    def size(self, _: int) -> int:
        return self.num_tokens


class _Scan(NamedTuple):
    """Shapes [pieces, batch, heads, ...] of a scan."""

    decay: tuple[int, ...]
    update: tuple[int, ...]
    dtype: torch.dtype
    is_matrix: bool

    def layer(self, **conv: Any) -> tw.planning.StateLayer:
        """The layer that has it."""
        heads, sizes = self.update[2], self.update[3:]
        conv["dtype"] = dtype_name(self.dtype)
        if self.is_matrix:
            return tw.planning.StateLayer(heads, sizes[0], sizes[1], "matrix", **conv)
        if prod(self.decay[2:]) == heads:  # of Mamba2's states the last dimension is read by tokens
            return tw.planning.StateLayer(heads, prod(sizes[1:]), prod(sizes[:1]), "number", **conv)
        assert self.decay == self.update and len(sizes) == 1, self
        return tw.planning.StateLayer(heads, sizes[0], 1, "row", **conv)


class _Notes:
    """A ContextParallel of one piece within a document, which notes what a layer would send."""

    def __init__(self) -> None:
        self.rank, self.group = 0, LocalTransport()
        self.layout = _OnePiece(NUM_TOKENS)
        self.weights: list[tuple[int, int]] = []  # channels and width of each convolution
        self.scans: list[_Scan] = []

    def pieces(self, _: Any) -> list[tuple[int, int]]:
        return [(1, 1 + NUM_TOKENS)]  # not the first one: its state comes from another rank

    def conv1d(self, x: Tensor, weight: Tensor, *_: Any) -> Tensor:
        self.weights.append((int(weight.shape[0]), int(weight.shape[1])))
        return x

    def scan(self, decay: Tensor, update: Tensor, *, matrix: bool = False, **_: Any) -> Tensor:
        self.scans.append(_Scan(tuple(decay.shape), tuple(update.shape), update.dtype, matrix))
        return torch.zeros_like(update)

    def layer(self) -> tw.planning.StateLayer:
        """The layer that was called: its convolutions as one, and its scans."""
        conv: dict[str, Any] = {"conv_channels": sum(channels for channels, _ in self.weights)}
        conv["conv_width"] = max((width for _, width in self.weights), default=1)
        if not self.scans:
            return tw.planning.StateLayer(0, 1, 1, "number", **conv)
        (scan,) = set(self.scans)  # Zamba has one for each group of channels
        layer = scan.layer(**conv)
        return replace(layer, num_heads=len(self.scans) * layer.num_heads)


KERNELS: MappingProxyType[str, Callable[..., Any]] = MappingProxyType(
    {
        "torch_chunk_gated_delta_rule": lambda q, k, v, *, initial_state, **_: (v, initial_state),
        "chunk_kimi_delta_attention": lambda q, k, v, *, initial_state, **_: (v, initial_state),
        "mamba2_chunk_scan": lambda x, dt, a, b, c, **_: (
            x,
            x.new_empty(len(x), *x.shape[2:], b.shape[-1]),
        ),
        "mamba_selective_scan": lambda x, *_, **__: x,
    }
)
"""What results of kernels look like."""


@dataclass(frozen=True)
class _Kind:
    """The facts that decide a model's layers.

    Attributes:
        text: the configuration, written out.
    """

    model_class: type
    text: str
    dtype: torch.dtype
    config: Any = field(compare=False)


@lru_cache(maxsize=16)
def _layers(
    kind: _Kind,
) -> tuple[int, tuple[tw.planning.StateLayer, ...], tuple[tw.planning.IndexedLayer, ...]]:
    """Count a model's layers of attention, and list those that carry a state or convolve, and
    those that attend to chosen keys.
    """
    with torch.device("meta"), torch.no_grad():
        model = kind.model_class(copy.deepcopy(kind.config)).to(kind.dtype)
        wire(model)
        text = model.config.get_text_config(decoder=True)
        measured = dict[Any, tw.planning.StateLayer]()
        states = list[tw.planning.StateLayer]()
        for layer in state_layers(model):
            shapes = (type(layer), *(x.shape for x in layer.parameters()))
            if shapes not in measured:
                measured[shapes] = _measured(layer, text.hidden_size, kind.dtype)
            states.append(measured[shapes])
    attention = [
        layer
        for layer in model.modules()
        if INTERFACE in names_read(type(layer))
        and isinstance(getattr(layer, "config", text), type(text))  # not what sees images
    ]
    if any(getattr(layer, "compressor", None) is not None for layer in attention):
        raise ValueError(
            f"{kind.model_class.__name__} has layers of attention to compressed keys, which the "
            "planner does not price; name the layout and strategy of ContextParallel"
        )
    choosing = [layer for layer in attention if hasattr(layer, "indexer")]
    sizes = _sizes(text) if choosing else None
    indexed = [indexed_layer(layer, text, sizes) for layer in choosing if sizes is not None]
    return len(attention) - len(indexed), tuple(states), tuple(indexed)


def _sizes(text: Any) -> tuple[int, int, int, int | None]:
    """num_heads, num_kv_heads, head_dim and v_head_dim by a configuration."""
    return heads_of({name: getattr(text, name, None) for name in HEAD_FIELDS})


def _measured(layer: Any, hidden_size: int, dtype: torch.dtype) -> tw.planning.StateLayer:
    """A layer by what it sends."""
    notes = _Notes()
    mask = LayerMask(cast(tw.ContextParallel, notes), tw.Causal(), packs=True)
    mask.cu_seqlens = (0, 2 * NUM_TOKENS)
    parameters = list(inspect.signature(type(layer).forward).parameters.values())[2:]
    given: dict[str, Any] = {}
    given |= {x.name: None for x in parameters if x.default is x.empty and x.kind is not VARIABLE}
    if "position_ids" in given:
        given["position_ids"] = torch.arange(NUM_TOKENS)[None]
    with kernels_replaced(KERNELS):
        layer(
            torch.empty(1, NUM_TOKENS, hidden_size, dtype=dtype), **given | {"attention_mask": mask}
        )
    return notes.layer()


def measured_work(base: Any, num_tokens: int) -> tw.planning.HybridWork:
    """The step of a model of transformers, of one sequence without documents, for the planner.

    All its layers of attention count as causal ones, those with windows too.
    """
    text = base.config.get_text_config(decoder=True)
    dtype = next(x.dtype for x in base.parameters() if x.is_floating_point())
    # FSDP2 gives a model a class made at run time.
    classes = (x for x in type(base).__mro__ if not x.__module__.startswith("torch.distributed"))
    config = base.config
    kind = _Kind(next(classes), config.to_json_string(use_diff=False), dtype, config)
    num_attention, states, indexed = _layers(kind)
    sizes = _sizes(text) if num_attention else (1, 1, 1, None)  # a model without attention
    num_heads, num_kv_heads, head_dim, v_head_dim = sizes
    attention = tw.Workload(
        num_tokens,
        num_heads,
        num_kv_heads,
        head_dim,
        dtype_name(dtype),
        mask=tw.Causal(),
        v_head_dim=v_head_dim,
    )
    return tw.planning.HybridWork(attention, num_attention, states, indexed)


def work_to_plan(base: Any, rank: int) -> tw.planning.HybridWork | None:
    """The step of a model whose layouts are chosen, of one token; None if none are to be chosen.

    A model that cannot be measured, of which rank 0 warns, keeps the layouts that it has.
    """
    if not state_layers(base):
        return None
    try:
        return measured_work(base, 1)
    except Exception as error:  # whatever a model's code raises
        if rank == 0:
            logging.getLogger("tilewise").warning(
                "strategy='auto' chooses no layout for %s: its layers could not be measured (%s: "
                "%s); name layout and attention_layout of ContextParallel to have others than the "
                "usual ones",
                type(base).__name__,
                type(error).__name__,
                error,
            )
        return None


def may_choose(cp: tw.ContextParallel) -> bool:
    """Return whether a planner may choose a cp's layouts: nobody has named them or a plan."""
    planned = cp.strategy == "auto" and cp.reduction == "fast" and cp.mask == tw.Causal()
    return planned and cp.world_size > 1 and cp.layouts_are_open


def choose_layouts(
    cp: tw.ContextParallel,
    work: tw.planning.HybridWork,
    name: str,
    device: str,
    num_tokens: int | None = None,
) -> None:
    """Take the planner's layouts for a hybrid model. Rank 0 logs which, and why.

    Args:
        name: of the model's class.
        device: type of the device that it runs on.
        num_tokens: that are planned for; None: cp's own.
    """
    machine = cp.machine or tw.Machine.preset("h100x8" if device == "cuda" else "cpu-gloo")
    length = cp.num_tokens if num_tokens is None else num_tokens
    work = replace(work, attention=replace(work.attention, num_tokens=length))
    choice = promising_hybrid(work, machine, cp.world_size)
    cp.choose_layouts(*CHOICES[choice.name].make(cp.num_tokens, cp.world_size))
    if cp.rank == 0:
        logging.getLogger("tilewise").info(
            "strategy='auto' laid out %d tokens of %s (%d layers of attention, %d with a state or "
            "convolution) on %d ranks of %s. Simulated for %d tokens, both passes: %s",
            cp.num_tokens,
            name,
            work.num_attention_layers,
            len(work.states),
            cp.world_size,
            machine.name,
            length,
            choice.reason,
        )

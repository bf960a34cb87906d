"""torchtitan's context parallelism by tilewise: its two functions, with its signatures.

    from tilewise.integrations.torchtitan import apply_cp_to_forward, prepare_context_parallel_input

They take the place of torchtitan.distributed.context_parallel's in a model's parallelize.py, in
trainer.py and in validate.py. Its loader, RoPE, loss, FSDP2 and tensor parallelism stay.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import tilewise as tw
from tilewise.transport.agreement import settled

BALANCERS: Mapping[str | None, Callable[[int, int], tw.Layout]] = MappingProxyType(
    {"headtail": tw.zigzag, None: tw.contiguous}
)
Edges = tuple[int, ...]


class SplitSequence(NamedTuple):
    """The split and the mask of a batch, in the place of torchtitan's attention_masks.

    Args:
        masks: of each row of the batch; None: the layer's own alone.
        whole: the masks are all that a layer asks for; else it adds its own window, or causal.
    """

    layout: tw.Layout
    masks: tuple[tw.masks.Mask, ...] | None = None
    whole: bool = False


def prepare_context_parallel_input(  # noqa: PLR0913 - theirs
    inputs: Tensor,
    labels: Tensor,
    extra_kwargs: dict[str, Any],
    cp_mesh: DeviceMesh,
    device: torch.device | str | None,
    load_balancer_type: str | None = "headtail",
    ptrr_mask_key: str | None = None,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """This rank's part of a batch, as torchtitan's function of that name.

    Args:
        inputs, labels: [batch, num_tokens], any number of tokens.
        extra_kwargs: positions [batch, num_tokens], 0 at the start of each document, and
            attention_masks: torchtitan's of "flex" or "varlen", those of each kind of layer, or
            none.
        load_balancer_type: "ptrr", which orders tokens for flex attention, is "headtail" here.
    Raises:
        ValueError: for masks that tilewise cannot read.
    """

    def checked() -> tuple[tw.Layout, Any]:
        balancer = "headtail" if load_balancer_type == "ptrr" else load_balancer_type
        if balancer not in BALANCERS:
            raise ValueError(
                f"context_parallel_load_balancer ({balancer!r}) of torchtitan must be 'headtail', "
                "'ptrr' or None"
            )
        layout = BALANCERS[balancer](inputs.shape[1], cp_mesh.size())
        documents = _documents(extra_kwargs["positions"].expand_as(inputs))
        masks = extra_kwargs.get("attention_masks")
        if isinstance(masks, Mapping):
            return layout, {key: _split(layout, x, documents) for key, x in masks.items()}
        return layout, _split(layout, masks, documents)

    layout, split = settled(tw.transport.transport_for(cp_mesh.get_group()), checked)
    rank = cp_mesh.get_local_rank()
    positions = extra_kwargs["positions"]
    inputs, labels, positions = (
        layout.shard(x, rank, 1).contiguous() for x in (inputs, labels, positions)
    )
    return inputs, labels, {**extra_kwargs, "positions": positions, "attention_masks": split}


def apply_cp_to_forward(
    attention_modules: Sequence[nn.Module],
    cp_mesh: DeviceMesh,
    *,
    strategy: Literal["auto"] | tw.Plan = "auto",
) -> None:
    """Make inner attention modules attend over the mesh, as torchtitan's function of that name.

    Args:
        attention_modules: of any attn_backend, before the model is parallelized.
        strategy: what ContextParallel takes.
    """
    group = cp_mesh.get_group()
    known: dict[tw.Layout, tw.ContextParallel] = {}

    def cp_of(layout: tw.Layout) -> tw.ContextParallel:
        if layout not in known:
            known.clear()
            options: dict[str, Any] = {"mask": tw.Causal(), "layout": layout, "strategy": strategy}
            known[layout] = tw.ContextParallel(group, num_tokens=layout.num_tokens, **options)
        return known[layout]

    for module in attention_modules:
        window = getattr(module, "window_size", None)
        setattr(module, "forward", _forward(cp_of, window))  # noqa: B010 - as torchtitan does


def _forward(
    cp_of: Callable[[tw.Layout], tw.ContextParallel], window: tuple[int, int] | None
) -> Callable[..., Tensor]:
    """The forward of an inner attention module: tensors [batch, rows, heads, head_dim]."""

    def forward(  # noqa: PLR0913 - theirs
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_masks: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **others: Any,
    ) -> Tensor:
        if not isinstance(attention_masks, SplitSequence):
            raise ValueError(
                "the batch was not split by prepare_context_parallel_input of "
                "tilewise.integrations.torchtitan; import it where torchtitan's was"
            )
        given = {name: x for name, x in others.items() if x is not None}
        if given:
            raise ValueError(f"{next(iter(given))} of torchtitan's attention is not supported")
        own = _window((-1, 0 if is_causal else -1) if window is None else window)
        masks = list(attention_masks.masks or (tw.Full(),))
        if not attention_masks.whole:
            masks = [_both(own, mask) for mask in masks]
        mask = masks[0] if len(set(masks)) == 1 else masks
        cp = cp_of(attention_masks.layout)
        out, lse = cp.attention(q, k, v, mask=mask, softmax_scale=scale, return_lse=True)
        return out if out_transform is None else out_transform(out, lse)

    return forward


def _split(layout: tw.Layout, masks: Any, documents: tuple[Edges, ...]) -> SplitSequence:
    """Return the layout, and for each row of the batch its mask, from torchtitan's attention_masks.

    Args:
        masks: None, a VarlenMetadata or a BlockMask.
        documents: boundaries of the documents of each row.
    Raises:
        ValueError: for masks of another type.
    """
    if masks is None:
        return SplitSequence(layout)
    if hasattr(masks, "cu_seq_q"):  # VarlenMetadata: documents, as positions say them
        return SplitSequence(layout, tuple(map(_apart, documents)))
    if not hasattr(masks, "mask_mod"):
        raise ValueError(
            f"attention_masks ({type(masks).__name__}) of torchtitan must be a BlockMask or a "
            "VarlenMetadata"
        )
    return SplitSequence(layout, tuple(_read(masks.mask_mod, x) for x in documents), True)


def _read(function: Callable[..., Any], edges: Edges) -> tw.masks.Mask:
    """The mask that a mask function of torchtitan's models stands for, in a row of documents."""
    name = getattr(function, "__qualname__", repr(function)).split(".")[0]
    inner = inspect.getclosurevars(function).nonlocals
    match name:
        case "and_masks":
            return reduce(_both, (_read(x, edges) for x in inner["mask_mods"]))
        case "get_causal_mask_mod":
            return tw.Causal()
        case "get_document_mask_mod" | "get_efficient_causal_mask_mod_for_packed_document":
            return _apart(edges)
        case "get_sliding_window_mask_mod":
            return tw.Window(inner["window_size"] - 1, 0)
        case "get_fixed_block_mask_mod":
            return tw.Document((*range(0, edges[-1], inner["fixed_block_size"]), edges[-1]))
    raise ValueError(
        f"the mask function {name} of torchtitan cannot be read by tilewise, which knows those of "
        "torchtitan.models.common.attention: causal, document, sliding window and fixed block"
    )


def _window(window: tuple[int, int]) -> tw.masks.Mask:
    """The mask of torchtitan's window_size, of which -1 is unbounded."""
    left, right = (None if x < 0 else x for x in window)
    if left is None and right is None:
        return tw.Full()
    return tw.Causal() if left is None and right == 0 else tw.Window(left, right)


def _both(a: tw.masks.Mask, b: tw.masks.Mask) -> tw.masks.Mask:
    if tw.Full() in (a, b):
        return a if b == tw.Full() else b
    return a if a == b else a & b


def _apart(edges: Edges) -> tw.masks.Mask:
    return tw.Document(edges) if len(edges) > 2 else tw.Full()


def _documents(positions: Tensor) -> tuple[Edges, ...]:
    """Boundaries of the documents in each row: one starts where its positions are 0 again."""
    num_tokens = positions.shape[1]
    starts = ((positions[row] == 0).nonzero().flatten() for row in range(len(positions)))
    return tuple((0, *(x for x in row.tolist() if x), num_tokens) for row in starts)

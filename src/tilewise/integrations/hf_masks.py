"""What a transformers model asks of attention: its mask as ours, its documents, what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from operator import and_, or_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tilewise.context_parallel import ContextParallel
from tilewise.masks import lengths
from tilewise.masks.base import And, Causal, Document, Full, Mask, Or, Window, as_ints
from tilewise.transport.gather_shards import gather_shards
from tilewise.transport.resolve import transport_for

LAYER_TYPES = ("full_attention", "sliding_attention")
# What models pass on to their attention that says nothing about its result, or is read elsewhere.
READ = frozenset(
    (
        *("scaling", "position_ids", "cu_seq_lens_q", "max_length_q", "max_length_k"),
        *("position_embeddings", "cache_position", "use_cache", "num_items_in_batch"),
        *("labels", "shift_labels", "logits_to_keep", "return_dict", "output_hidden_states"),
        *("output_router_logits", "is_training"),
    )
)


def refused_keyword(module: nn.Module, mask: Mask, given: Mapping[str, Any]) -> str | None:
    """Why a layer cannot be run as it asks; None if it can.

    Args:
        given: the keywords that the layer passes to its attention.
    """
    found = tuple(parts(mask))
    for name, value in given.items():
        match name, value:
            case _, None | False if name != "is_causal":
                continue
            case "dropout", rate if rate == 0:
                continue
            case "sliding_window", w if Window(w - 1, None) in found or Window(w, w) in found:
                continue
            case "is_causal", causal if causal in (None, Causal() in found):
                continue
            case "cu_seq_lens_k", k if _same(k, given.get("cu_seq_lens_q")):
                continue
        if name not in READ:
            return f"{name}={_shown(value)} cannot be honoured by tilewise; turn it off"
    if getattr(getattr(module, "config", None), "output_attentions", False):
        return "output_attentions=True cannot be honoured by tilewise; turn it off"
    return None


def refused_model(config: Any) -> str | None:
    """Why a model of this configuration cannot run with its sequence split; None if it can."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    model = MODEL_MAPPING.get(type(config), None)
    name = type(config).__name__
    if model is not None and not isinstance(model, tuple):
        if getattr(model, "_is_stateful", False):
            return f"{name}: the model carries a state along the sequence; tilewise splits it"
        if not getattr(model, "_supports_attention_backend", False):
            return (
                f"{name}: the model's attention does not go through transformers' "
                "AttentionInterface, so tilewise cannot reach it"
            )
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", 0):
        return f"{name}: the model has cross attention, which tilewise does not run"
    others = set(getattr(config, "layer_types", None) or ()) - set(LAYER_TYPES)
    if others:
        return f"{name}: layers of type {', '.join(sorted(others))} cannot be split by tilewise"
    if getattr(config, "attn_temperature_tuning", False):
        return f"{name}: attn_temperature_tuning counts this rank's rows as positions"
    return None


def check_model(model: nn.Module) -> None:
    """Raise ValueError if a model of transformers cannot run with its sequence split.

    A model that reaches tilewise's attention is checked when it runs; one that never asks for it
    (a state space model, a hand-written attention) can only be seen here.
    """
    config: Any = model.config
    error = refused_model(config.get_text_config())
    if error is None and not getattr(model, "_supports_attention_backend", False):
        error = f"{type(model).__name__} does not use transformers' AttentionInterface"
    if error:
        raise ValueError(error)


def _same(a: Any, b: Any) -> bool:
    return b is not None and a.tolist() == b.tolist()


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, int | float | str) else type(value).__name__


MODULE = "transformers.masking_utils"


def read_mask(function: Callable[..., Any]) -> Mask:
    """The mask that a mask function of transformers stands for, documents aside.

    Raises:
        ValueError: naming the function, if its meaning is not known.
    """
    name = _name(function)
    if getattr(function, "__module__", None) != MODULE:
        raise ValueError(_refusal(name))
    inner = inspect.getclosurevars(function).nonlocals
    match name:
        case "causal_mask_function":
            return Causal()
        case "bidirectional_mask_function" | "packed_sequence_mask_function":
            return Full()
        case "sliding_window_overlay":
            return Window(inner["sliding_window"] - 1, None)
        case "sliding_window_bidirectional_overlay":
            return Window(inner["sliding_window"], inner["sliding_window"])
        case "remap_positions_for_packed_sequence":
            # Within a document a distance is the same by either count of positions.
            return read_mask(inner["mask_function"])
        case "and_masks":
            masks = [m for m in map(read_mask, inner["mask_functions"]) if m != Full()]
            return reduce(and_, masks) if masks else Full()
        case "or_masks":
            return reduce(or_, map(read_mask, inner["mask_functions"]))
    raise ValueError(_refusal(name))


def packs(function: Callable[..., Any]) -> bool:
    """Whether transformers keeps documents apart in a mask function that read_mask can read."""
    if _name(function) == "packed_sequence_mask_function":
        return True
    inner = inspect.getclosurevars(function).nonlocals
    return any(map(packs, inner.get("mask_functions", ())))


def parts(mask: Mask) -> Iterator[Mask]:
    """The masks that all must allow a pair."""
    if isinstance(mask, And) and not isinstance(mask, Or):
        yield from parts(mask.a)
        yield from parts(mask.b)
    else:
        yield mask


def documents_of(mask: Mask) -> tuple[int, ...] | None:
    """cu_seqlens of a mask that keeps documents apart, or None."""
    found = [part.cu_seqlens for part in parts(mask) if isinstance(part, Document)]
    return found[0] if found else None


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function)).split(".")[0]


def _refusal(name: str) -> str:
    return (
        f"the model asks for the mask function {name}, which tilewise cannot represent; it reads "
        "causal and bidirectional masks, sliding windows and packed documents"
    )


CuSeqlens = tuple[int, ...]
PASS = "pass position_ids=cp.position_ids[None] or what hf.shard returns"


def gathered_documents(cp: ContextParallel, position_ids: Tensor, batch: int) -> CuSeqlens:
    """cu_seqlens that the whole sequence's position ids say: a document starts at each 0.

    Every rank calls it; a world of ranks exchanges the position ids once.

    Args:
        position_ids: [1 or batch, num_rows], this rank's.
    Raises:
        ValueError: the same on every rank.
    """
    local = position_ids.expand(batch, -1)[:, : cp.layout.size(cp.rank)]
    whole = gather_shards(local, cp.layout, transport_for(cp.group), 1).cpu()
    if (whole != whole[:1]).any():
        row = int((whole != whole[:1]).any(1).nonzero()[0])
        raise ValueError(
            f"rows 0 and {row} of the batch have different position_ids, but one mask serves the "
            "whole batch; put them into one row as documents, as ShardingCollator does"
        )
    _refuse_forgotten(cp, whole[0])
    ids = whole[0].numpy()
    jumps = np.flatnonzero(np.diff(ids) != 1) + 1
    odd = jumps[ids[jumps] != 0]
    if len(odd):
        at = int(odd[0])
        raise ValueError(
            f"position_ids go from {ids[at - 1]} to {ids[at]} at token {at}, which neither goes on "
            f"nor starts a document at 0; {PASS}"
        )
    return (0, *jumps.tolist(), cp.layout.num_tokens)


def checked_documents(cp: ContextParallel, cu_seqlens: Tensor, position_ids: Tensor) -> str | None:
    """What is wrong with cu_seqlens, or with this rank's position ids beside them; else None."""
    boundaries = as_ints(cu_seqlens)
    if (boundaries[0], boundaries[-1]) != (0, cp.layout.num_tokens):
        return (
            f"cu_seq_lens_q goes from {boundaries[0]} to {boundaries[-1]}, but must go from 0 to "
            f"{cp.layout.num_tokens}, the whole sequence's length; do not shard it"
        )
    within = lengths.position_ids(boundaries)[cp.layout.rows(cp.rank)]
    got = position_ids[..., : len(within)].cpu()
    if any(torch.equal(got, x.expand_as(got)) for x in (torch.from_numpy(within), cp.position_ids)):
        return None
    return f"position_ids are not those of this rank's tokens in the documents given; {PASS}"


def _refuse_forgotten(cp: ContextParallel, whole: Tensor) -> None:
    """Without position_ids a model counts its own rows, from 0 on every rank."""
    sizes = [size for size in cp.layout.sizes if size]
    counted = cp.layout.unshard([torch.arange(size) for size in cp.layout.sizes])
    if len(sizes) > 1 and torch.equal(whole, counted):
        raise ValueError(
            "position_ids start at 0 on every rank, which is what a model counts when it is given "
            f"none; {PASS}, and for documents that end where the shards do cu_seq_lens_q too"
        )

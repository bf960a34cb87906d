"""Masks of transformers models as ours, with their documents, and what is refused."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from operator import and_, or_
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

import tilewise as tw
from tilewise.masks.base import And, Or

COUNTS_FROM_PADDING = "create_position_ids_from_input_ids"  # a method of RoBERTa's embeddings
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention")
COMPRESSED_TYPES = ("compressed_sparse_attention", "heavily_compressed_attention")
COMPRESSES = "store_compression_weights"  # a method of caches of layers that compress keys
STATE_TYPES = ("linear_attention", "conv", "hybrid", "hybrid_sliding", "mlp", "moe")
PADDED = (
    "attention_mask hides padding, which would be another mask for each row; pass it to hf.shard "
    "or ShardingCollator, not to the model: they put the rows into one, as documents"
)
# What models pass on to their attention that says nothing about its result, or is read elsewhere.
READ = frozenset(
    (
        *("scaling", "position_ids", "cu_seq_lens_q", "max_length_q", "max_length_k"),
        *("position_embeddings", "cache_position", "use_cache", "num_items_in_batch"),
        *("labels", "shift_labels", "logits_to_keep", "return_dict", "output_hidden_states"),
        *("is_training", "s_aux", "softcap", "dropout", "skip_logits"),
    )
)
# What else models ask for; the rest is not known here.
ADVICE = MappingProxyType(
    {
        "output_router_logits": "its loss needs the router's choices for all tokens; leave it out",
        "output_attentions": "the scores are never in one place; leave it out",
        "sliding_window": "the layer's mask does not have this window",
    }
)


def refused_keyword(
    module: nn.Module,
    mask: tw.masks.Mask,
    given: Mapping[str, Any],
    *,
    counts_routers: bool = False,
) -> str | None:
    """Why a layer cannot be run as it asks; None if it can.

    Args:
        given: the keywords that the layer passes to its attention.
        counts_routers: the model's call has asked already whether its routers' loss can be split.
    """
    found = set(parts(mask, joined=Or))
    for name, value in given.items():
        match name, value:
            case _, None | False if name != "is_causal":
                continue
            case "sliding_window", width if _is_window(found, width):
                continue
            case "is_causal", causal if causal in (None, tw.Causal() in found):
                continue
            case "output_router_logits", _ if counts_routers:
                continue
            case "cu_seq_lens_k", k if _same(k, given.get("cu_seq_lens_q")):
                continue
        if name not in READ:
            return _not_honoured(name, value)
    if getattr(getattr(module, "config", None), "output_attentions", False):
        return _not_honoured("output_attentions", True)
    return None


def _is_window(found: set[tw.masks.Mask], width: int) -> bool:
    """Return whether the mask has a window that models call by this width."""
    wanted = ((width - 1, None), (width, width), (width - 1, width - 1))
    return width > 0 and not found.isdisjoint(tw.Window(*sides) for sides in wanted)


def _not_honoured(name: str, value: Any) -> str:
    why = ADVICE.get(name, "it is not known, and leaving it unread may change the result")
    return f"{name}={_shown(value)} cannot be honoured by tilewise: {why}"


def has_compressors(model_class: type) -> bool:
    """Return whether layers of a model's class compress keys as DeepSeek V4's do."""
    found = vars(sys.modules[model_class.__module__]).values()
    return any(isinstance(x, type) and hasattr(x, COMPRESSES) for x in found)


def uses_attention_interface(model_class: Any, splits_states: bool) -> bool:
    """Return whether a model's attention can be reached; hybrid models do not say so themselves."""
    if getattr(model_class, "_supports_attention_backend", False):
        return True
    return splits_states and model_class._can_set_attn_implementation()


def _same(a: Any, b: Any) -> bool:
    return b is not None and a.tolist() == b.tolist()


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, int | float | str) else type(value).__name__


MODULE = "transformers.masking_utils"
NOTHING = tw.Slices(())  # Qwen2-MoE makes a mask of a window of 0 tokens, for no layer


def read_mask(function: Callable[..., Any], cu_seqlens: Sequence[int] = ()) -> tw.masks.Mask:
    """The mask that a mask function of transformers stands for, documents aside.

    Args:
        cu_seqlens: documents of the whole sequence; chunks count from each one's start.
    Raises:
        ValueError: naming the function, if its meaning is not known; if blocks are not those of
            the whole sequence, or differ by row.
    """
    name = _name(function)
    if getattr(function, "__module__", None) != MODULE:
        raise ValueError(_refusal(name))
    inner = inspect.getclosurevars(function).nonlocals
    match name:
        case "causal_mask_function":
            return tw.Causal()
        case "bidirectional_mask_function" | "packed_sequence_mask_function":
            return tw.Full()
        case "sliding_window_overlay":
            window = inner["sliding_window"]
            return tw.Window(window - 1, None) if window > 0 else NOTHING
        case "chunked_overlay" if cu_seqlens:
            spans = pairwise(cu_seqlens)
            starts = (at for span in spans for at in range(*span, inner["chunk_size"]))
            return tw.Document((*starts, cu_seqlens[-1]))
        case "blockwise_overlay" if cu_seqlens:
            return _blocks(inner["block_sequence_ids"], cu_seqlens[-1])
        case "sliding_window_bidirectional_overlay":
            return tw.Window(inner["sliding_window"], inner["sliding_window"])
        case "remap_positions_for_packed_sequence":
            # Within a document a distance is the same by either count of positions. Blocks are not
            # remapped: transformers looks those of later documents up in the first one.
            return read_mask(inner["mask_function"], cu_seqlens)
        case "and_masks":
            read = (read_mask(f, cu_seqlens) for f in inner["mask_functions"])
            masks = [mask for mask in read if mask != tw.Full()]
            return reduce(and_, masks) if masks else tw.Full()
        case "or_masks":
            read = (read_mask(f, cu_seqlens) for f in inner["mask_functions"])
            return reduce(or_, [mask for mask in read if mask != NOTHING])
    raise ValueError(_refusal(name))


def _blocks(numbers: Tensor, num_tokens: int) -> tw.masks.Mask:
    """Tokens of one number see each other, those of a number below 0 do not.

    Args:
        numbers: [batch, num_tokens], made by the model of its token types.
    """
    if numbers.shape[-1] != num_tokens:
        raise ValueError(
            f"the model was told of {numbers.shape[-1]} tokens whether they are of an image, but "
            f"the sequence has {num_tokens}; pass token_type_ids of the whole sequence on every "
            "rank, as hf.shard(..., token_type_ids=) does"
        )
    if bool((numbers != numbers[:1]).any()):
        raise ValueError(
            "rows of the batch have images at different tokens, but one mask serves the whole "
            "batch; put them into one row as documents, as ShardingCollator does"
        )
    found, counts = numbers[0].unique_consecutive(return_counts=True)
    runs: dict[int, list[tuple[int, int]]] = {}
    for number, run in zip(found.tolist(), pairwise([0, *counts.cumsum(0).tolist()]), strict=True):
        runs.setdefault(number, []).append(run)
    same = (block for number, block in runs.items() if number >= 0)
    return tw.Slices((q, k, "full") for block in same for q in block for k in block)


def packs(function: Callable[..., Any]) -> bool:
    """Return whether transformers keeps documents apart in a mask function that read_mask
    can read.
    """
    if _name(function) == "packed_sequence_mask_function":
        return True
    inner = inspect.getclosurevars(function).nonlocals
    return any(map(packs, inner.get("mask_functions", ())))


def parts(mask: tw.masks.Mask, joined: type[And] = And) -> Iterator[tw.masks.Mask]:
    """Yield the masks that make up `mask` by And, all of which must allow a pair.

    Args:
        joined: Or: take masks joined by Or apart, too.
    """
    if isinstance(mask, And) and (joined is Or or not isinstance(mask, Or)):
        yield from parts(mask.a, joined)
        yield from parts(mask.b, joined)
    else:
        yield mask


def documents_of(mask: tw.masks.Mask) -> tuple[int, ...] | None:
    """cu_seqlens of a mask that keeps documents apart, or None."""
    found = [part.cu_seqlens for part in parts(mask) if isinstance(part, tw.Document)]
    return found[0] if found else None


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function)).split(".")[0]


def _refusal(name: str) -> str:
    return (
        f"the model asks for the mask function {name}, which tilewise cannot represent; it reads "
        "causal and bidirectional masks, sliding windows, chunks, images and packed documents"
    )

"""TransformerEngine's arguments of attention: their meaning here, and which are refused."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tilewise as tw
from tilewise.arguments import of_kind, require_known
from tilewise.kernels.bias import Alibi

COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p", "auto")
QKV_FORMATS = ("sbhd", "bshd", "thd")
CAUSAL_TYPES = ("causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right")
MASK_TYPES = ("no_mask", "padding", *CAUSAL_TYPES)
BIAS_TYPES = ("no_bias", "post_scale_bias", "alibi")
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
# Arguments that are taken with these values alone.
ONLY: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "inference_params": (None,),
        "fp8_output": (None, False),
        "bf16_backward": (None, False),
        "qkv_interleave_dim": (-3,),
        "output_final_state": (False,),
        "use_qk_l2norm_in_kernel": (False,),
    }
)
KINDS: Mapping[str, Any] = MappingProxyType(
    {
        "query_layer": Tensor,
        "key_layer": Tensor,
        "value_layer": Tensor,
        "qkv_format": str | None,
        "attn_mask_type": str | None,
        "window_size": tuple[int, int] | None,
        "core_attention_bias_type": str,
        "core_attention_bias": Tensor | None,
        "alibi_slopes": Tensor | None,
        "layout": tw.Layout | None,
    }
)
"""Of arguments that forward reads."""
Boundaries = tuple[Tensor | None, Tensor | None]


def refuse(given: dict[str, Any]) -> None:
    """Raise for arguments of TransformerEngine with values that tilewise does not take."""
    for name, value in given.items():
        allowed = ONLY.get(name, (None,))
        if isinstance(value, Tensor) or getattr(value, "ndim", 0) or value not in allowed:
            raise ValueError(
                f"{name} of TransformerEngine's DotProductAttention is not supported by tilewise: "
                f"leave it {allowed[0]!r}"
            )


def check_kinds(given: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument of another kind than TransformerEngine's."""
    for name, kind in KINDS.items():
        of_kind(name, given[name], kind)
    ndims = [given[name].ndim for name in ("query_layer", "key_layer", "value_layer")]
    if ndims not in ([3] * 3, [4] * 3):
        raise ValueError(
            f"query_layer, key_layer and value_layer have {ndims} dimensions, but must have 4, or "
            '3 of qkv_format "thd"'
        )


def check_no_padding(attention_mask: Any, cu_seqlens: Tensor | None) -> None:
    masks = attention_mask if isinstance(attention_mask, tuple) else (attention_mask,)
    hides = any(mask is not None and bool(mask.any()) for mask in masks)
    if hides or cu_seqlens is not None:
        raise ValueError(
            "attn_mask_type 'padding' with a mask or cu_seqlens of its own for each batch entry is "
            'not supported; pack the sequences (qkv_format="thd")'
        )


def documents_and_mask(
    lengths: Boundaries, padded: Boundaries, n: int, causal: bool
) -> tuple[tw.Layout, tw.masks.Mask]:
    """The layout of packed documents as TransformerEngine splits them, and their mask."""
    if lengths[0] is None:
        raise ValueError('qkv_format "thd" needs cu_seqlens_q, the boundaries of the documents')
    for name, (own, of_keys) in {"": lengths, "_padded": padded}.items():
        if own is None or of_keys is None:
            continue
        if tw.Document(own).cu_seqlens != tw.Document(of_keys).cu_seqlens:
            raise ValueError(f"cu_seqlens_kv{name} must be as cu_seqlens_q{name}: self-attention")
    edges = tw.Document(lengths[0]).cu_seqlens
    places = edges if padded[0] is None else tw.Document(padded[0]).cu_seqlens
    layout = tw.zigzag_documents(places, n)
    if places == edges:
        return layout, tw.Causal() & tw.Document(edges) if causal else tw.Document(edges)
    if len(places) != len(edges):
        raise ValueError(
            f"cu_seqlens_q_padded has {len(places)} boundaries, but cu_seqlens_q has {len(edges)}"
        )
    rooms = [*pairwise(places)]
    kept = [b - a for a, b in pairwise(edges)]
    for i, ((start, stop), tokens) in enumerate(zip(rooms, kept, strict=True)):
        if tokens > stop - start:
            raise ValueError(f"document {i} has {tokens} tokens in room for {stop - start}")
    ranges = [(start, start + size) for (start, _), size in zip(rooms, kept, strict=True)]
    return layout, tw.Slices([(x, x, "causal" if causal else "full") for x in ranges])


def with_window(mask: tw.masks.Mask, window: tuple[int, int] | None, causal: bool) -> tw.masks.Mask:
    """The mask within TransformerEngine's window_size, of which -1 is unbounded."""
    left, right = (None if x < 0 else x for x in window or (-1, -1))
    right = None if causal or (left is None and right == 0) else right
    if left is None and right is None:
        return mask
    near = tw.Window(left, right)
    return near if mask == tw.Full() else mask & near


class BiasArguments(NamedTuple):
    """TransformerEngine's core_attention_bias_type, core_attention_bias and alibi_slopes."""

    kind: str
    values: Tensor | None
    slopes: Tensor | None

    def check(self, comm_type: str, *, plain: bool) -> None:
        """Raise ValueError for a combination that is not supported.

        Args:
            comm_type: "p2p" where there is one rank.
            plain: the sequence is not packed, and keys are as many as queries.
        """
        kind = self.kind
        require_known("core_attention_bias_type", kind, BIAS_TYPES)
        if (self.values is not None) != (kind == "post_scale_bias"):
            raise ValueError(
                "core_attention_bias of TransformerEngine must be a tensor where "
                f"core_attention_bias_type is 'post_scale_bias', and else None; it is {kind!r}"
            )
        if self.slopes is not None and kind != "alibi":
            raise ValueError(
                "alibi_slopes of TransformerEngine must be None where core_attention_bias_type "
                f"({kind!r}) is not 'alibi'"
            )
        if kind != "no_bias" and not plain:
            raise ValueError(
                f"core_attention_bias_type {kind!r} is not supported for qkv_format 'thd', nor for "
                "keys of another length than queries; leave it 'no_bias'"
            )
        if self.values is not None and comm_type not in ("p2p", "all_gather"):
            raise ValueError(
                f"core_attention_bias is not supported with cp_comm_type {comm_type!r}: "
                "a rank has its own rows of it; take 'p2p' or 'all_gather'"
            )

    def alibi(self, num_heads: int, all_heads: int) -> Alibi | None:
        """Return the ALiBi bias of this rank's heads, or None if core_attention_bias_type is
        another.
        """
        if self.kind != "alibi":
            return None
        if self.slopes is not None:
            return tw.alibi(self.slopes)
        if num_heads != all_heads or num_heads & (num_heads - 1):
            raise ValueError(
                f"core_attention_bias_type 'alibi' needs alibi_slopes for {num_heads} of "
                f"{all_heads} heads: the slopes that are known by themselves are those of all, a "
                "power of 2"
            )
        return tw.alibi([2 ** (-8 * (head + 1) / num_heads) for head in range(num_heads)])

    def tables(self, batch: int, num_heads: int, layout: tw.Layout, rank: int) -> Tensor | None:
        """Return the bias as [1 or batch, heads, all queries, all keys], or None without one.

        Only this rank's queries are filled: strategies that move keys alone read no other rows.
        """
        values = self.values
        if values is None:
            return None
        positions = layout.positions(rank)
        shape = batch, num_heads, len(positions), layout.num_tokens
        fits = values.ndim == 4 and values.shape[-1] == shape[-1]
        if not fits or any(x not in (1, y) for x, y in zip(values.shape, shape, strict=True)):
            raise ValueError(
                f"core_attention_bias is {list(values.shape)}, but must be [batch, heads, this "
                f"rank's rows, all keys], {list(shape)}, or 1 in place of the first three"
            )
        rows = values.expand(-1, *shape[1:])
        whole = rows.new_zeros((*rows.shape[:2], layout.num_tokens, layout.num_tokens))
        return whole.index_copy(2, torch.as_tensor(positions, device=values.device), rows)

"""ring-flash-attn's adapter of transformers, for the attention interface of transformers 4.48 on.

    substitute_hf_flash_attn(group, heads_k_stride=1)        # once
    update_ring_flash_attn_params(cu_seqlens, group)         # before each batch, the whole row's
    model(input_ids=part, position_ids=part_positions)       # made for "flash_attention_2"

Its interface is global: callers write and read DATA_PARAMS, and switch it by use_ring_attn. So this
is the one module whose values change; it serves one group, and ranks that are processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tilewise.compat.ring_flash_attn.attend import Options, RankSlices, attend_in_a_row
from tilewise.compat.ring_flash_attn.functions import llama3_flash_attn_prepare_cu_seqlens
from tilewise.transport.agreement import settled
from tilewise.transport.resolve import transport_for

NAME = "flash_attention_2"


class Substitution:
    """Stand-in for transformers' flash attention: its arguments, its group, and what it replaced.

    Attributes:
        params: arguments of the llama3 functions for the batch under way; {} before the first.
        enabled: False: `replaced` runs.
        replaced: transformers' own function; None: nothing was substituted.
    """

    def __init__(self) -> None:
        self.params: dict[str, Any] = {}
        self.enabled = True
        self.group: ProcessGroup | None = None
        self.heads_k_stride = 1
        self.replaced: Callable[..., Any] | None = None


SUBSTITUTION = Substitution()
DATA_PARAMS = SUBSTITUTION.params


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: ProcessGroup | None) -> None:
    """Set the packed sequences of the batch that comes next.

    Args:
        cu_seqlens: boundaries in the whole row, of which each rank has an equal part.
    Raises:
        ValueError: the same on every rank, unless the number of ranks divides that of tokens.
    """
    transport = transport_for(process_group)
    given = True, transport.rank, transport.world_size
    prepared = settled(transport, lambda: llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, *given))
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice"
    DATA_PARAMS.update(zip(names, prepared, strict=True))


def use_ring_attn(flag: bool) -> None:
    """Switch to transformers' own flash attention, of rows that are not split, and back."""
    SUBSTITUTION.enabled = flag


def substitute_hf_flash_attn(process_group: ProcessGroup | None, heads_k_stride: int) -> None:
    """Let models with attn_implementation="flash_attention_2" attend over the ranks of a group.

    Args:
        heads_k_stride: as the llama3 functions take it.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    SUBSTITUTION.group, SUBSTITUTION.heads_k_stride = process_group, heads_k_stride
    if ALL_ATTENTION_FUNCTIONS[NAME] is not flash_attention_forward:
        SUBSTITUTION.replaced = ALL_ATTENTION_FUNCTIONS[NAME]
    ALL_ATTENTION_FUNCTIONS[NAME] = flash_attention_forward


def flash_attention_forward(  # noqa: PLR0913 - theirs
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function, over the ranks of the substituted group.

    Args:
        query, key, value: [1, heads, rows, head_dim], this rank's part of a row.
        sliding_window: keys that a query sees, itself one of them.
        kwargs: is_causal, and s_aux, a sink a head; packed sequences come from DATA_PARAMS.
    Returns:
        out [1, rows, heads, head_dim], and None.
    """
    if not SUBSTITUTION.enabled:
        if SUBSTITUTION.replaced is None:
            raise ValueError("use_ring_attn(False) needs substitute_hf_flash_attn before it")
        given = attention_mask, dropout, scaling, sliding_window, softcap
        return SUBSTITUTION.replaced(module, query, key, value, *given, **kwargs)
    is_causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    transport = transport_for(SUBSTITUTION.group)
    settled(transport, lambda: _check(query, attention_mask, causal, kwargs))
    window = -1 if sliding_window is None else sliding_window - 1
    options = Options(
        *(dropout, scaling, causal, (window, window), None, False, False, SUBSTITUTION.group),
        softcap=softcap,
        sink=kwargs.get("s_aux"),
    )
    slices = RankSlices(*(DATA_PARAMS[name] for name in RankSlices._fields))
    # The KV heads of a rank of tensor parallelism may be fewer than the stride.
    stride = min(SUBSTITUTION.heads_k_stride, key.shape[1])
    q, k, v = (x.transpose(1, 2).squeeze(0) for x in (query, key, value))
    out = attend_in_a_row((q, k, v), slices, stride, options)
    assert isinstance(out, Tensor)
    return out.unsqueeze(0), None


def _check(
    query: Tensor, attention_mask: Tensor | None, causal: bool, kwargs: dict[str, Any]
) -> None:
    if not DATA_PARAMS:
        raise ValueError("call update_ring_flash_attn_params(cu_seqlens, group) before the model")
    if len(query) != 1:
        raise ValueError(
            f"query has {len(query)} rows of a batch, but ring-flash-attn's adapter takes one: "
            "pack them into it, and pass their boundaries to update_ring_flash_attn_params"
        )
    if not causal:
        raise ValueError(
            f"is_causal ({causal}) must be True: ring-flash-attn's adapter tells each rank only "
            "the keys up to its own part"
        )
    if attention_mask is not None and not bool(torch.as_tensor(attention_mask != 0).all()):
        raise ValueError(
            "attention_mask hides tokens, which ring-flash-attn's adapter ignored; leave padding "
            "out, or make it a sequence of its own in cu_seqlens"
        )
    refused = [name for name in ("cache", "block_table") if kwargs.get(name) is not None]
    if refused:
        raise ValueError(f"{refused[0]} of transformers' attention is not supported here")

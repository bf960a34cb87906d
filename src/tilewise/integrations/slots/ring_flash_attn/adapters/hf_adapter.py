"""ring-flash-attn's adapter of transformers, for the attention interface of transformers 4.48 on.

    substitute_hf_flash_attn(group, heads_k_stride=1)        # once
    update_ring_flash_attn_params(cu_seqlens, group)         # before each batch, the whole row's
    model(input_ids=part, position_ids=part_positions)       # made for "flash_attention_2"

Its interface is global: callers write and read DATA_PARAMS, and switch it by use_ring_attn. So this
is the one module whose values change; it serves one group, and ranks that are processes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import tilewise as tw
from tilewise.integrations.slots.ring_flash_attn.attend import Options, RankSlices, attend_in_a_row
from tilewise.integrations.slots.ring_flash_attn.functions import (
    llama3_flash_attn_prepare_cu_seqlens,
)
from tilewise.transport.agreement import settled

NAME, FORWARD = "flash_attention_2", "_flash_attention_forward"


class Substitution:
    """Stand-in for transformers' flash attention: the functions that run, and what they replaced.

    Attributes:
        params: arguments of the llama3 functions for the batch under way; {} before the first.
        enabled: False: what was replaced runs.
        forward: stands for transformers' _flash_attention_forward; None: nothing was substituted.
        replaced: transformers' own functions, by what they are: the attention function of its
            interface, and the _flash_attention_forward behind it, which some models call.
    """

    def __init__(self) -> None:
        self.params: dict[str, Any] = {}
        self.enabled = True
        self.forward: Callable[..., Tensor] | None = None
        self.replaced: dict[str, Callable[..., Any]] = {}


SUBSTITUTION = Substitution()
DATA_PARAMS = SUBSTITUTION.params


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: ProcessGroup | None) -> None:
    """Set the packed sequences of the batch that comes next.

    Args:
        cu_seqlens: boundaries in the whole row, of which each rank has an equal part.
    Raises:
        ValueError: the same on every rank, unless the number of ranks divides that of tokens.
    """
    transport = tw.transport.transport_for(process_group)
    given = True, transport.rank, transport.world_size
    prepared = settled(transport, lambda: llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, *given))
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice"
    DATA_PARAMS.update(zip(names, prepared, strict=True))


def use_ring_attn(flag: bool) -> None:
    """Switch to transformers' own flash attention, of rows that are not split, and back."""
    SUBSTITUTION.enabled = flag


def substitute_hf_flash_attn(process_group: ProcessGroup | None, heads_k_stride: int) -> None:
    """Let models with attn_implementation="flash_attention_2" attend over the ranks of a group.

    Models that call transformers' _flash_attention_forward themselves (Falcon, GPT-J) do as well,
    whether they were imported before or come later.

    Args:
        heads_k_stride: as the llama3 functions take it.
    """
    from transformers import modeling_flash_attention_utils as utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # Callers may have put a function of their own in the place of this one.
    forwards = create_ring_flash_attention_forward(process_group, heads_k_stride)
    original = SUBSTITUTION.replaced.setdefault(FORWARD, utils._flash_attention_forward)
    fitting = (forward for forward in forwards if check_params(original, forward))
    SUBSTITUTION.forward = next(fitting, None)
    if SUBSTITUTION.forward is None:
        raise ValueError(
            f"none of the {len(forwards)} functions of create_ring_flash_attention_forward takes "
            f"what transformers passes: it needs the {len(signature(original).parameters)} "
            f"parameters of {FORWARD}, or **kwargs"
        )
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(FORWARD) is original:
            setattr(module, FORWARD, _substituted)
    if ALL_ATTENTION_FUNCTIONS[NAME] is not flash_attention_forward:
        SUBSTITUTION.replaced[NAME] = ALL_ATTENTION_FUNCTIONS[NAME]
    ALL_ATTENTION_FUNCTIONS[NAME] = flash_attention_forward


def check_params(f1: Callable[..., Any], f2: Callable[..., Any]) -> bool:
    """Return whether f2 can stand for f1: it has as many parameters, or takes any keyword."""
    ours, theirs = (signature(f).parameters for f in (f2, f1))
    return len(ours) == len(theirs) or any(x.kind is x.VAR_KEYWORD for x in ours.values())


def _substituted(*args: Any, **kwargs: Any) -> Tensor:
    """transformers' _flash_attention_forward, split while that is switched on."""
    if not SUBSTITUTION.enabled or SUBSTITUTION.forward is None:
        return SUBSTITUTION.replaced[FORWARD](*args, **kwargs)
    return SUBSTITUTION.forward(*args, **kwargs)


def create_ring_flash_attention_forward(
    process_group: ProcessGroup | None, heads_k_stride: int
) -> list[Callable[..., Tensor]]:
    """Make what stands for transformers' _flash_attention_forward; callers take the first."""

    def forward(  # noqa: PLR0913 - transformers'
        query_states: Tensor,
        key_states: Tensor,
        value_states: Tensor,
        attention_mask: Tensor | None,
        query_length: int,
        is_causal: bool,
        dropout: float = 0.0,
        position_ids: Tensor | None = None,
        softmax_scale: float | None = None,
        sliding_window: int | None = None,
        use_top_left_mask: bool = False,
        softcap: float | None = None,
        deterministic: bool | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of this rank's part of a row, [1, rows, heads, head_dim].

        Args:
            sliding_window: keys that a query sees, itself one of them.
            kwargs: s_aux, a sink a head; packed sequences come from DATA_PARAMS.
        """
        transport = tw.transport.transport_for(process_group)
        q, k, v = query_states, key_states, value_states
        settled(transport, lambda: _check(q, attention_mask, is_causal, kwargs))
        window = -1 if sliding_window is None else sliding_window - 1
        scores = dropout, softmax_scale, is_causal, (window, window), None
        options = Options(
            *(*scores, bool(deterministic), False, process_group),
            softcap=softcap,
            sink=kwargs.get("s_aux"),
        )
        slices = RankSlices(*(DATA_PARAMS[name] for name in RankSlices._fields))
        # The KV heads of a rank of tensor parallelism may be fewer than the stride.
        stride = min(heads_k_stride, k.shape[2])
        out = attend_in_a_row((q[0], k[0], v[0]), slices, stride, options)
        assert isinstance(out, Tensor)
        return out.unsqueeze(0)

    return [forward]


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
    """transformers' attention function, by what stands for its _flash_attention_forward.

    Args:
        query, key, value: [1, heads, rows, head_dim], this rank's part of a row.
        sliding_window: keys that a query sees, itself one of them.
        kwargs: is_causal, and what _flash_attention_forward takes.
    Returns:
        out [1, rows, heads, head_dim], and None.
    """
    from transformers import modeling_flash_attention_utils as utils

    if not SUBSTITUTION.enabled:
        if NAME not in SUBSTITUTION.replaced:
            raise ValueError("use_ring_attn(False) needs substitute_hf_flash_attn before it")
        given = attention_mask, dropout, scaling, sliding_window, softcap
        return SUBSTITUTION.replaced[NAME](module, query, key, value, *given, **kwargs)
    is_causal = kwargs.pop("is_causal", None)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    forward: Any = utils._flash_attention_forward
    out = forward(
        *(x.transpose(1, 2) for x in (query, key, value)),
        attention_mask,
        query_length=query.shape[2],
        is_causal=causal,
        dropout=dropout,
        softmax_scale=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        **kwargs,
    )
    return out, None


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

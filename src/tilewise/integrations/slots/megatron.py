"""Megatron-Core's core attention, run by tilewise.

    submodules.core_attention = CoreAttention       # in a layer spec of megatron.core

Loader, RoPE and loss stay Megatron's; the split is TransformerEngine's, whose class this is made
of: see `tilewise.integrations.transformer_engine`. It serves megatron-core 0.16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.integrations.slots.transformer_engine import (
    DotProductAttention as DotProductAttention,
)

REFUSED_SETTINGS = (
    "apply_query_key_layer_scaling",
    "deterministic_mode",
    "batch_invariant_mode",
    "fp8_dot_product_attention",
    "fp8_multi_head_attention",
    "experimental_attention_variant",
)
PACKED = (
    "qkv_format",
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded",
    "layout",
)


class CoreAttention(DotProductAttention):
    """The core attention that megatron-core builds from a layer spec, in place of its
    TEDotProductAttention, whose arguments it has.

        spec = get_gpt_layer_local_spec()
        spec.submodules.self_attention.submodules.core_attention = CoreAttention
        model = GPTModel(config, spec, ...)     # context_parallel_size=2, on CPU, too

    It reads the configuration's cp_comm_type ("auto", too), window_size, softmax_type, qk_clip and
    dropout. packed_seq_params may have a layout of its own, as an attribute that is set.
    """

    def __init__(  # noqa: PLR0913 - theirs
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = "p2p",
        pg_collection: Any = None,
    ) -> None:
        from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]
        from megatron.core.transformer.utils import (  # pyright: ignore[reportMissingImports]
            is_layer_window_attention,
        )

        for option in REFUSED_SETTINGS:
            if getattr(config, option, None):
                raise ValueError(f"{option} of Megatron's configuration is not supported")
        tp_group, group, degree = getattr(pg_collection, "tp", None), None, None
        if pg_collection is None:
            tp_group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
        if config.context_parallel_size > 1:
            group = getattr(pg_collection, "cp", None)
            hierarchy = getattr(pg_collection, "hcp", None)
            if pg_collection is None:
                given = {"check_initialized": False}
                group = parallel_state.get_context_parallel_group(**given)
                hierarchy = parallel_state.get_hierarchical_context_parallel_groups(**given)
            degree = hierarchy[0].size() if cp_comm_type == "a2a+p2p" and hierarchy else None
        skips = config.window_size, config.window_attn_skip_freq, layer_number
        widths = config.kv_channels if k_channels is None else k_channels, v_channels or 0
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        super().__init__(
            num_attention_heads=config.num_attention_heads,
            kv_channels=widths,
            attention_dropout=dropout,
            attn_mask_type=attn_mask_type.name,
            window_size=config.window_size if is_layer_window_attention(*skips) else None,
            tp_group=tp_group,
            layer_number=layer_number,
            attention_type=attention_type,
            softmax_scale=softmax_scale,
            softmax_type=getattr(config, "softmax_type", "vanilla"),
            return_max_logit=config.qk_clip or config.log_max_attention_logit,
        )
        self.config, self._tp_group, self._a2a_degree = config, tp_group, degree
        self._set_group(group, cp_comm_type or "p2p", degree)
        self.current_max_attn_logits: Tensor | None = None

    def forward(  # noqa: PLR0913 - theirs  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        num_splits: int | None = None,
        **others: Any,
    ) -> Tensor:
        """Attention of this rank's rows [rows, batch, heads, width]; packed: [rows, heads, width].

        Args:
            packed_seq_params: None, or Megatron's; cp_group and local_cp_size, if set, say which
                ranks share this batch.
        """
        if attention_bias is not None:
            others = {"core_attention_bias_type": "post_scale_bias", **others}
        packed = {name: getattr(packed_seq_params, name, None) for name in PACKED}
        group, size = (getattr(packed_seq_params, x, None) for x in ("cp_group", "local_cp_size"))
        if (group is not None or size is not None) and group is not self.cp_group:
            self._set_group(group, self.cp_comm_type, self._a2a_degree)
        mask_type = getattr(attn_mask_type, "name", attn_mask_type)
        given = {**packed, **others, "attn_mask_type": mask_type}
        out = super().forward(
            *(query, key, value, attention_mask), core_attention_bias=attention_bias, **given
        )
        if not isinstance(out, tuple):
            return out
        out, logits = out
        before = self.current_max_attn_logits
        self.current_max_attn_logits = logits if before is None else torch.maximum(before, logits)
        return out

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Megatron's checkpoint of softmax_offset, if it is learned."""
        from megatron.core.transformer.utils import (  # pyright: ignore[reportMissingImports]
            make_sharded_tensors_for_checkpoint,
        )

        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self._tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )

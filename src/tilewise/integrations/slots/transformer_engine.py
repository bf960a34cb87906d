"""TransformerEngine's DotProductAttention: its signature and its split, run by tilewise.

    from tilewise.integrations.transformer_engine import DotProductAttention

A rank holds pieces r and 2n - 1 - r of every sequence or, packed, of every document
(`tw.zigzag_documents`). A loader with another order passes its layout, made by
`layout_of_positions`. TransformerEngine need not be installed.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tilewise as tw
from tilewise.arguments import checks_arguments, require_known, shown, whole_number
from tilewise.execution.validation import MOST_SEEDS
from tilewise.integrations.seeds import agreed_seed
from tilewise.integrations.slots.te_arguments import (
    CAUSAL_TYPES,
    COMM_TYPES,
    KINDS,
    MASK_TYPES,
    QKV_FORMATS,
    SOFTMAX_TYPES,
    BiasArguments,
    check_kinds,
    check_no_padding,
    documents_and_mask,
    refuse,
    with_window,
)
from tilewise.tokens.moves import gather_moves
from tilewise.tokens.rows import move_rows
from tilewise.transport.agreement import settled
from tilewise.transport.resolve import LocalTransport

SEEDS_APART = 1 << 40  # of dropout on the ranks of tensor parallelism, whose heads differ


class DotProductAttention(nn.Module):
    """TransformerEngine's DotProductAttention, over the ranks of cp_group.

        attend = DotProductAttention(32, 128, num_gqa_groups=8, cp_group=group)
        out = attend(q, k, v)                   # [rows, batch, 32 * 128], this rank's rows

    The arguments are theirs. cp_comm_type: "p2p" is tw.ring, "all_gather" tw.all_gather, "a2a"
    tw.ulysses, "a2a+p2p" tw.ulysses around tw.ring, and "auto" the planner's choice. With
    softmax_type "learnable" the gradient of softmax_offset is this rank's share, as that of every
    weight. Dropout is drawn by rank 0 from torch's CPU generator. attention_type,
    bottom_right_diagonal, cp_stream, get_rng_state_tracker, layer_number, name and
    sequence_parallel have no effect.

    Raises:
        ValueError: for what tilewise does not have, with the argument's name.
    """

    @checks_arguments
    def __init__(  # noqa: PLR0913 - theirs
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: tw.transport.Group | list[Any] = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        sizes = {"num_attention_heads": num_attention_heads, "kv_channels": channels}
        for what, size in {**sizes, "tp_size": tp_size}.items():
            whole_number(what, size)
        if tp_group is not None and not hasattr(tp_group, "rank"):
            raise ValueError(f"tp_group ({shown(tp_group)}) must be a ProcessGroup or None")
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type
        self.window_size = window_size
        self.all_heads = num_attention_heads
        self.tp_rank = 0 if tp_group is None else tp_group.rank()
        self.num_heads = num_attention_heads // (tp_size if tp_group is None else tp_group.size())
        self.attention_dropout, self.return_max_logit = attention_dropout, bool(return_max_logit)
        self.softmax_scale = channels**-0.5 if softmax_scale is None else softmax_scale
        require_known("softmax_type", softmax_type, SOFTMAX_TYPES)
        self.softmax_offset: Tensor | None = None
        if softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(torch.zeros(self.num_heads))
        elif softmax_type == "off-by-one":
            del self.softmax_offset
            self.register_buffer("softmax_offset", torch.zeros(self.num_heads), persistent=False)
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def set_context_parallel_group(
        self,
        cp_group: tw.transport.Group | list[Any],
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        load_balancing_strategy: Any = None,
    ) -> None:
        """Attend over the ranks of another group from now on.

        Args:
            cp_group: None: this rank alone; for "a2a+p2p" the list of both groups.
            cp_global_ranks: of the list's ranks, all of which call this function together.
        """
        balancing = getattr(load_balancing_strategy, "name", load_balancing_strategy)
        if balancing not in (None, "DUAL_CHUNK_SWAP"):
            raise ValueError(
                f"load_balancing_strategy ({balancing}) of TransformerEngine must be "
                "DUAL_CHUNK_SWAP; pass forward a layout where tokens are split in another way"
            )
        degree, whole = None, cp_group
        if isinstance(cp_group, list | tuple):
            if len(cp_group) != 2 or cp_global_ranks is None:
                raise ValueError("cp_group must be two groups, with the cp_global_ranks of both")
            degree = cp_group[0].size()
            whole = dist.new_group(cp_global_ranks, use_local_synchronization=True)
        self._set_group(cast(tw.transport.Group, whole), cp_comm_type, degree)

    def _set_group(
        self, group: tw.transport.Group, comm_type: str, a2a_degree: int | None = None
    ) -> None:
        require_known("cp_comm_type", comm_type, COMM_TYPES)
        self.cp_group, self.cp_comm_type = group, comm_type
        self._group = LocalTransport() if group is None else group
        n = tw.transport.transport_for(self._group).world_size
        if comm_type == "a2a+p2p" and n > 1 and a2a_degree is None:
            raise ValueError("cp_comm_type 'a2a+p2p' needs cp_group=[a2a group, p2p group]")
        self._strategy: tw.Plan | Literal["auto"] = "auto"
        if comm_type == "p2p":
            self._strategy = tw.ring(n)
        elif comm_type == "all_gather":
            self._strategy = tw.all_gather(n)
        elif comm_type != "auto":
            degree = a2a_degree or n
            self._strategy = tw.ulysses(degree, tw.ring(n // degree))
        self._cp: tw.ContextParallel | None = None

    def forward(  # noqa: PLR0913 - theirs
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        *,
        layout: tw.Layout | None = None,
        **others: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of this rank's rows; heads and their width are one dimension of out.

        checkpoint_core_attention, num_splits, fast_zero_fill, pad_between_seqs and max_seqlen have
        no effect: no scores are kept for backward, and lengths are those of cu_seqlens.

        Args:
            query_layer, key_layer, value_layer: [rows, batch, heads, width] ("sbhd"), "bshd" or
                "thd"; value_layer may have another width.
            attention_mask: for attn_mask_type "padding" and "padding_causal", where it must hide
                nothing. For the others it is ignored, as by TransformerEngine.
            core_attention_bias: of "post_scale_bias", [batch, heads, this rank's rows, all keys],
                1 in place of any but the keys; under "p2p" and "all_gather".
            cu_seqlens_q: of "thd": boundaries of the whole documents, not this rank's.
            cu_seqlens_q_padded: where documents start in the sequence, if there is padding after
                them. Padding sees nothing and is not seen; its rows of out are 0.
            layout: of the tokens, in place of TransformerEngine's: see `layout_of_positions`.
        Returns:
            out, or with return_max_logit (out, largest score of each head on any rank).
        """
        transport = tw.transport.transport_for(self._group)
        others |= {
            "inference_params": inference_params,
            "fp8_output": fp8_output,
            "bf16_backward": bf16_backward,
        }
        given = {name: x for name, x in locals().items() if name in KINDS}
        settled(transport, lambda: check_kinds(given))
        kind = qkv_format or self.qkv_format
        mask_type = (attn_mask_type or self.attn_mask_type).replace(",", "_")
        mask_type = "padding_causal" if mask_type == "causal_padding" else mask_type
        of_bias = BiasArguments(core_attention_bias_type, core_attention_bias, alibi_slopes)
        n, dim = transport.world_size, int(kind == "bshd")

        def checked() -> tuple[tw.Layout, tw.Layout | None, tw.masks.Mask, list[Any]]:
            refuse(others)
            require_known("qkv_format", kind, QKV_FORMATS)
            require_known("attn_mask_type", mask_type, MASK_TYPES)
            rows, kv_rows = query_layer.shape[dim], key_layer.shape[dim]
            if query_layer.shape[-2] != self.num_heads:
                raise ValueError(
                    f"query_layer has {query_layer.shape[-2]} heads, but num_attention_heads gives "
                    f"this rank {self.num_heads}"
                )
            causal, window = mask_type in CAUSAL_TYPES, window_size or self.window_size
            if kind == "thd":
                pairs = (cu_seqlens_q, cu_seqlens_kv), (cu_seqlens_q_padded, cu_seqlens_kv_padded)
                own, mask = documents_and_mask(*pairs, n, causal)
                tokens = layout or own
            else:
                if "padding" in mask_type:
                    check_no_padding(attention_mask, cu_seqlens_q)
                tokens, mask = (
                    layout or tw.zigzag(rows * n, n),
                    tw.Causal() if causal else tw.Full(),
                )
            mask = with_window(mask, window, causal)
            keys = tokens if kv_rows == rows else tw.zigzag(kv_rows * n, n)
            if keys is not tokens and (mask != tw.Full() or layout or kind == "thd"):
                raise ValueError(
                    f"key_layer has {kv_rows} rows, but query_layer has {rows}: that is for "
                    f"attn_mask_type 'no_mask' without a window, not {mask_type!r}"
                )
            comm_type = self.cp_comm_type if n > 1 else "p2p"
            of_bias.check(comm_type, plain=kind != "thd" and keys is tokens)
            batch = 1 if kind == "thd" else query_layer.shape[1 - dim]
            tables = of_bias.tables(batch, self.num_heads, tokens, transport.rank)
            linear = of_bias.alibi(self.num_heads, self.all_heads)
            biases = [linear] if tables is None else [*tables]
            return tokens, None if keys is tokens else keys, mask, biases

        tokens, keys, mask, biases = settled(transport, checked)
        q, k, v = query_layer, key_layer, value_layer
        if kind == "sbhd":
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        dropout = self.attention_dropout if self.training else 0.0
        seed = None
        if dropout:
            seed = (agreed_seed(self._group) + SEEDS_APART * self.tp_rank) % MOST_SEEDS
        parts = [(q, k, v)]
        if len(biases) > 1:  # each batch entry has its own
            parts = list(zip(*(x.split(1) for x in (q, k, v)), strict=True))
        results = [
            self._context_parallel(tokens).attention(
                *part,
                mask=mask,
                kv_layout=keys,
                softmax_scale=self.softmax_scale,
                sink=self.softmax_offset,
                bias=bias,
                dropout_p=dropout,
                dropout_seed=None if seed is None else (seed + entry) % MOST_SEEDS,
                return_max_logit=self.return_max_logit,
            )
            for entry, (part, bias) in enumerate(zip(parts, biases, strict=True))
        ]
        outs: list[tuple[Tensor, ...]] = [x if isinstance(x, tuple) else (x,) for x in results]
        out = torch.cat([x[0] for x in outs]) if len(outs) > 1 else outs[0][0]
        out = out.flatten(-2)
        out = out.transpose(0, 1) if kind == "sbhd" else out
        if not self.return_max_logit:
            return out
        largest = torch.stack([x[1] for x in outs]).amax(0)
        of_ranks = move_rows(largest[None], gather_moves(tw.contiguous(n, n), None), transport)
        return out, of_ranks.amax(0)

    def _context_parallel(self, layout: tw.Layout) -> tw.ContextParallel:
        """Return the ContextParallel of a layout; a new one is made when the layout changes."""
        if self._cp is None or self._cp.layout != layout:
            self._cp = tw.ContextParallel(
                self._group,
                num_tokens=layout.num_tokens,
                strategy=self._strategy,
                layout=layout,
            )
        return self._cp

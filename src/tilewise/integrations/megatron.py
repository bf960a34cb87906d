"""Attention of Megatron-Core and of TransformerEngine: their signatures, run by tilewise.

    submodules.core_attention = CoreAttention       # in a layer spec of megatron.core

Their loader, RoPE and loss stay as they are: a rank holds pieces r and 2n - 1 - r of every sequence
or, packed, of every document (`tw.zigzag_documents`). A loader with another order passes its
layout, made by `layout_of_positions`. `CoreAttention` serves megatron-core 0.16; both classes need
neither of the two libraries to be imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilewise.context_parallel import ContextParallel
from tilewise.execution.validation import MOST_SEEDS
from tilewise.integrations.seeds import agreed_seed
from tilewise.kernels.bias import Alibi, alibi
from tilewise.layouts.documents import zigzag_documents
from tilewise.layouts.layout import Layout, contiguous, zigzag
from tilewise.masks.base import Causal, Document, Full, Mask, Window
from tilewise.masks.tables import Slices
from tilewise.plan.ir import Plan
from tilewise.strategies.all_gather import all_gather
from tilewise.strategies.ring import ring
from tilewise.strategies.ulysses import ulysses
from tilewise.tokens.moves import gather_moves
from tilewise.tokens.rows import move_rows
from tilewise.transport.agreement import settled
from tilewise.transport.resolve import Group, LocalTransport, transport_for

COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p", "auto")
QKV_FORMATS = ("sbhd", "bshd", "thd")
CAUSAL_TYPES = ("causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right")
MASK_TYPES = ("no_mask", "padding", *CAUSAL_TYPES)
BIAS_TYPES = ("no_bias", "post_scale_bias", "alibi")
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
SEEDS_APART = 1 << 40  # of dropout on the ranks of tensor parallelism, whose heads differ
# TransformerEngine's arguments that are taken with these values alone.
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


class DotProductAttention(nn.Module):
    """TransformerEngine's DotProductAttention, over the ranks of cp_group.

        attend = DotProductAttention(32, 128, num_gqa_groups=8, cp_group=group)
        out = attend(q, k, v)                   # [rows, batch, 32 * 128], this rank's rows

    The arguments are theirs. cp_comm_type: "p2p" is tw.ring, "all_gather" tw.all_gather, "a2a"
    tw.ulysses, "a2a+p2p" tw.ulysses around tw.ring, and "auto" the planner's choice. With
    softmax_type "learnable" the gradient of softmax_offset is this rank's share, as that of every
    weight. Dropout is drawn by rank 0 from torch's CPU generator. cp_stream, get_rng_state_tracker,
    sequence_parallel and name have no effect.

    Raises:
        ValueError: for what tilewise does not have, with the argument's name.
    """

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
        cp_group: Group | list[Any] = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type
        self.window_size, self.bottom_right_diagonal = window_size, bottom_right_diagonal
        self.all_heads = num_attention_heads
        self.tp_rank = 0 if tp_group is None else tp_group.rank()
        self.num_heads = num_attention_heads // (tp_size if tp_group is None else tp_group.size())
        self.attention_dropout, self.attention_type = attention_dropout, attention_type
        self.layer_number, self.return_max_logit = layer_number or 1, bool(return_max_logit)
        channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = channels**-0.5 if softmax_scale is None else softmax_scale
        _check_among("softmax_type", softmax_type, SOFTMAX_TYPES)
        self.softmax_offset: Tensor | None = None
        if softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(torch.zeros(self.num_heads))
        elif softmax_type == "off-by-one":
            del self.softmax_offset
            self.register_buffer("softmax_offset", torch.zeros(self.num_heads), persistent=False)
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def set_context_parallel_group(
        self,
        cp_group: Group | list[Any],
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
        self._set_group(cast(Group, whole), cp_comm_type, degree)

    def _set_group(self, group: Group, comm_type: str, a2a_degree: int | None = None) -> None:
        _check_among("cp_comm_type", comm_type, COMM_TYPES)
        self.cp_group, self.cp_comm_type = group, comm_type
        self._group = LocalTransport() if group is None else group
        n = transport_for(self._group).world_size
        if comm_type == "a2a+p2p" and n > 1 and a2a_degree is None:
            raise ValueError("cp_comm_type 'a2a+p2p' needs cp_group=[a2a group, p2p group]")
        self._strategy: Plan | Literal["auto"] = "auto"
        if comm_type == "p2p":
            self._strategy = ring(n)
        elif comm_type == "all_gather":
            self._strategy = all_gather(n)
        elif comm_type != "auto":
            degree = a2a_degree or n
            self._strategy = ulysses(degree, ring(n // degree))
        self._cp: ContextParallel | None = None

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
        layout: Layout | None = None,
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
            cu_seqlens_q: of "thd": boundaries of the whole documents, not this rank's.
            cu_seqlens_q_padded: where documents start in the sequence, if there is padding after
                them. Padding sees nothing and is not seen; its rows of out are 0.
            layout: of the tokens, in place of TransformerEngine's: see `layout_of_positions`.
        Returns:
            out, or with return_max_logit (out, largest score of each head on any rank).
        """
        transport = transport_for(self._group)
        others |= {
            "inference_params": inference_params,
            "fp8_output": fp8_output,
            "bf16_backward": bf16_backward,
        }
        kind = qkv_format or self.qkv_format
        mask_type = (attn_mask_type or self.attn_mask_type).replace(",", "_")
        mask_type = "padding_causal" if mask_type == "causal_padding" else mask_type

        def checked() -> tuple[Layout, Layout | None, Mask, Tensor | Alibi | None]:
            _refuse(others)
            _check_among("qkv_format", kind, QKV_FORMATS)
            _check_among("attn_mask_type", mask_type, MASK_TYPES)
            n, dim = transport.world_size, int(kind == "bshd")
            rows, kv_rows = query_layer.shape[dim], key_layer.shape[dim]
            if query_layer.shape[-2] != self.num_heads:
                raise ValueError(
                    f"query_layer has {query_layer.shape[-2]} heads, but num_attention_heads gives "
                    f"this rank {self.num_heads}"
                )
            causal, window = mask_type in CAUSAL_TYPES, window_size or self.window_size
            if kind == "thd":
                pairs = (cu_seqlens_q, cu_seqlens_kv), (cu_seqlens_q_padded, cu_seqlens_kv_padded)
                own, mask = _documents(*pairs, n, causal)
                tokens = layout or own
            else:
                if "padding" in mask_type:
                    _check_no_padding(attention_mask, cu_seqlens_q)
                tokens, mask = layout or zigzag(rows * n, n), Causal() if causal else Full()
            mask = _with_window(mask, window, causal)
            keys = tokens if kv_rows == rows else zigzag(kv_rows * n, n)
            if keys is not tokens and (mask != Full() or layout or kind == "thd"):
                raise ValueError(
                    f"key_layer has {kv_rows} rows, but query_layer has {rows}: that is for "
                    f"attn_mask_type 'no_mask' without a window, not {mask_type!r}"
                )
            of_bias = core_attention_bias_type, core_attention_bias, alibi_slopes
            bias = self._bias(*of_bias, tokens, plain=kind != "thd" and keys is tokens)
            return tokens, None if keys is tokens else keys, mask, bias

        tokens, keys, mask, bias = settled(transport, checked)
        q, k, v = query_layer, key_layer, value_layer
        if kind == "sbhd":
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        dropout = self.attention_dropout if self.training else 0.0
        seed = None
        if dropout:
            seed = (agreed_seed(self._group) + SEEDS_APART * self.tp_rank) % MOST_SEEDS
        out = self._context_parallel(tokens).attention(
            q,
            k,
            v,
            mask=mask,
            kv_layout=keys,
            softmax_scale=self.softmax_scale,
            sink=self.softmax_offset,
            bias=bias,
            dropout_p=dropout,
            dropout_seed=seed,
            return_max_logit=self.return_max_logit,
        )
        out, *logits = out if isinstance(out, tuple) else (out,)
        out = out.flatten(-2)
        out = out.transpose(0, 1) if kind == "sbhd" else out
        if not logits:
            return out
        n = transport.world_size
        of_ranks = move_rows(logits[0][None], gather_moves(contiguous(n, n), None), transport)
        return out, of_ranks.amax(0)

    def _bias(
        self,
        kind: str,
        values: Tensor | None,
        slopes: Tensor | None,
        layout: Layout,
        *,
        plain: bool,
    ) -> Tensor | Alibi | None:
        """TransformerEngine's core_attention_bias, or its ALiBi, as attention takes them.

        Args:
            plain: the sequence is not packed, and keys are as many as queries.
        """
        _check_among("core_attention_bias_type", kind, BIAS_TYPES)
        if (values is not None) != (kind == "post_scale_bias"):
            raise ValueError(
                "core_attention_bias of TransformerEngine must be a tensor where "
                f"core_attention_bias_type is 'post_scale_bias', and else None; it is {kind!r}"
            )
        if slopes is not None and kind != "alibi":
            raise ValueError(
                "alibi_slopes of TransformerEngine must be None where core_attention_bias_type "
                f"({kind!r}) is not 'alibi'"
            )
        if kind == "no_bias":
            return None
        if not plain:
            raise ValueError(
                f"core_attention_bias_type {kind!r} is not supported for qkv_format 'thd', nor for "
                "keys of another length than queries; leave it 'no_bias'"
            )
        if values is not None:
            return self._whole_bias(values, layout)
        if slopes is not None:
            return alibi(slopes)
        n = self.num_heads
        if n != self.all_heads or n & (n - 1):
            raise ValueError(
                f"core_attention_bias_type 'alibi' needs alibi_slopes for {n} of {self.all_heads} "
                "heads: the slopes that are known by themselves are those of all, a power of 2"
            )
        return alibi([2 ** (-8 * (head + 1) / n) for head in range(n)])

    def _whole_bias(self, values: Tensor, layout: Layout) -> Tensor:
        """A bias of this rank's queries in place among those of the whole sequence.

        Strategies that move keys alone compute a rank's own queries, and read no other rows.
        """
        transport = transport_for(self._group)
        if self.cp_comm_type not in ("p2p", "all_gather") and transport.world_size > 1:
            raise ValueError(
                f"core_attention_bias is not supported with cp_comm_type {self.cp_comm_type!r}: "
                "a rank has its own rows of it; take 'p2p' or 'all_gather'"
            )
        positions = layout.positions(transport.rank)
        shape = 1, self.num_heads, len(positions), layout.num_tokens
        if tuple(values.shape) != shape:
            raise ValueError(
                f"core_attention_bias is {list(values.shape)}, but must be [1, heads, this rank's "
                f"rows, all keys], {list(shape)}, the same for every batch entry"
            )
        whole = values.new_zeros((self.num_heads, layout.num_tokens, layout.num_tokens))
        return whole.index_copy(1, torch.as_tensor(positions, device=values.device), values[0])

    def _context_parallel(self, layout: Layout) -> ContextParallel:
        """The one of this layout; made anew where it changes."""
        if self._cp is None or self._cp.layout != layout:
            self._cp = ContextParallel(
                self._group,
                num_tokens=layout.num_tokens,
                strategy=self._strategy,
                layout=layout,
            )
        return self._cp


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


def _check_among(name: str, value: Any, values: tuple[str, ...]) -> None:
    if value not in values:
        raise ValueError(f"{name} ({value!r}) must be one of {', '.join(values)}")


def _refuse(given: dict[str, Any]) -> None:
    """Raise for arguments of TransformerEngine with values that tilewise does not take."""
    for name, value in given.items():
        allowed = ONLY.get(name, (None,))
        if isinstance(value, Tensor) or value not in allowed:
            raise ValueError(
                f"{name} of TransformerEngine's DotProductAttention is not supported by tilewise: "
                f"leave it {allowed[0]!r}"
            )


def _check_no_padding(attention_mask: Any, cu_seqlens: Tensor | None) -> None:
    masks = attention_mask if isinstance(attention_mask, tuple) else (attention_mask,)
    hides = any(mask is not None and bool(mask.any()) for mask in masks)
    if hides or cu_seqlens is not None:
        raise ValueError(
            "attn_mask_type 'padding' with a mask or cu_seqlens of its own for each batch entry is "
            'not supported; pack the sequences (qkv_format="thd")'
        )


Boundaries = tuple[Tensor | None, Tensor | None]


def _documents(
    lengths: Boundaries, padded: Boundaries, n: int, causal: bool
) -> tuple[Layout, Mask]:
    """The layout of packed documents as TransformerEngine splits them, and their mask."""
    if lengths[0] is None:
        raise ValueError('qkv_format "thd" needs cu_seqlens_q, the boundaries of the documents')
    for name, (own, of_keys) in {"": lengths, "_padded": padded}.items():
        if own is not None and of_keys is not None and not torch.equal(own, of_keys):
            raise ValueError(f"cu_seqlens_kv{name} must be as cu_seqlens_q{name}: self-attention")
    edges = Document(lengths[0]).cu_seqlens
    places = edges if padded[0] is None else Document(padded[0]).cu_seqlens
    layout = zigzag_documents(places, n)
    if places == edges:
        return layout, Causal() & Document(edges) if causal else Document(edges)
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
    return layout, Slices([(x, x, "causal" if causal else "full") for x in ranges])


def _with_window(mask: Mask, window: tuple[int, int] | None, causal: bool) -> Mask:
    """The mask within TransformerEngine's window_size, of which -1 is unbounded."""
    left, right = (None if x < 0 else x for x in window or (-1, -1))
    right = None if causal or (left is None and right == 0) else right
    if left is None and right is None:
        return mask
    near = Window(left, right)
    return near if mask == Full() else mask & near

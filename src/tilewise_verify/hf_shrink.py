"""A configuration of transformers made tiny, with all that decides how its model is split.

Kept: which kinds of layers there are, RoPE types, windows, experts and their routing, tied weights,
the ratio of query to key heads. Windows and the lengths at which a RoPE changes are so small that
NUM_TOKENS tokens pass them.
"""

import copy
import re
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, NamedTuple

from tilewise.integrations.transformers.rope import rope_parameters

NUM_TOKENS = 23
SWITCH = 10  # positions at which RoPE types that depend on the length change
WINDOW = 6
COMPRESSED = 3  # tokens of a window that gives one key: documents of a proof fill some
NUM_HEADS, HEAD_DIM = 4, 16
INDEX_HEADS = 16
HIDDEN, INNER, VOCABULARY, POSITIONS = NUM_HEADS * HEAD_DIM, 32, 128, 64

LAYERS = re.compile(r"(^|_)(layers|n_layer|num_layers|num_blocks)$")
HEADS = re.compile(r"(^|_)(heads?|attention_heads_per_layer)$")
KV_HEADS = re.compile(r"(kv|key_value)_heads|num_key_value_heads")
FEW = re.compile(
    r"per_tok(en)?$|top_?k$|moe_k$|_group$|first_k_dense|_step$|_interval$|max_window_la"
)
EXPERTS = re.compile(r"experts|n_experts|expert_num|expert_group")
LENGTH = re.compile(r"position_embeddings$|n_positions|n_ctx|max_seq|max_length|relative_positions")
NARROW = re.compile(r"window(_size|_len)?$|local_attention$|attention_chunk_size$")
PER_HEAD = re.compile(r"head_dim|head_size|d_head|dim_head|rotary_dim|kv_channels|d_kv|lora_rank")
WIDTH = re.compile(r"size|dim|dff|d_model|d_inner|n_embd|n_inner|ffn|rank|width|channels")
PERIODS = MappingProxyType(  # of which layers attend and have experts (Jamba)
    {
        "attn_layer_period": 3,
        "attn_layer_offset": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    }
)
STATE = re.compile(r"d_state$|state_size$")
GROUPS = re.compile(r"n_?groups$")
ZERO = re.compile(r"drop(?!less)|jitter|noise")


class _Scale(NamedTuple):
    """The scale with which one configuration's numbers are compared, and by which they
    are divided.
    """

    num_heads: int
    hidden: int
    divisor: int  # of widths within a head
    num_layers: int


def shrunk(config: Any) -> Any:
    """A tiny copy of a configuration; raises what the configuration raises if it cannot be."""
    config = copy.deepcopy(config)
    for one in _configs(config):
        _shrink(one)
    return config


def _configs(config: Any) -> Iterator[Any]:
    """A configuration and those within it."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_diff_dict"):
            yield from _configs(value)


def _shrink(config: Any) -> None:
    # Fields that differ by layer cannot be read from the configuration while it knows that.
    overrides = getattr(vars(config).pop("_heterogeneity_spec", None), "per_layer_overrides", {})
    kept, shared = _kept_layers(config, overrides)
    count, scale = _int(config, "num_hidden_layers"), _scale(config, len(kept))
    for name, value in list(vars(config).items()):
        if name.startswith("_") or isinstance(value, bool | str | None):
            continue
        if name == "num_kv_shared_layers":
            setattr(config, name, shared)
        elif name == "attn_layer_indices":
            setattr(config, name, [new for new, old in enumerate(kept) if old in value])
        elif name == "compress_rates" and isinstance(value, dict):
            setattr(config, name, {kind: min(rate, COMPRESSED) for kind, rate in value.items()})
        elif name in ("indexer_compress_ratio", "indexer_budget") and isinstance(value, int):
            setattr(config, name, min(value, COMPRESSED * (1 + name.endswith("budget"))))
        elif name == "ple_layer_ids" and isinstance(value, list):
            setattr(config, name, value[:1] and [1])
        elif name in PERIODS:
            setattr(config, name, min(value, PERIODS[name]))
        elif isinstance(value, list | tuple) and count and len(value) == count:
            setattr(config, name, [_resized(name, value[i], scale) for i in kept])
        else:
            setattr(config, name, _resized(name, value, scale))
    for one in rope_parameters(config):
        _shrink_rope(config, one, scale)
    if getattr(config, "attn_temperature_tuning", False):
        config.floor_scale = 4  # tokens after which queries grow
    _fit_heads(config)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    if overrides:
        config.per_layer_config = {
            new: _resized_layer(overrides[old], scale)
            for new, old in enumerate(kept)
            if old in overrides
        }


def _resized_layer(fields: dict[str, Any], scale: _Scale) -> dict[str, Any]:
    """The fields of a layer that has its own, whose number of heads may be one."""
    scale = scale._replace(num_heads=fields.get("num_attention_heads", scale.num_heads))
    return {name: _resized(name, value, scale) for name, value in fields.items()}


def _scale(config: Any, num_layers: int) -> _Scale:
    num_heads = _int(config, "num_attention_heads") or NUM_HEADS
    hidden = _int(config, "hidden_size") or HIDDEN
    head_dim = _int(config, "head_dim") or _int(config, "qk_rope_head_dim") or hidden // num_heads
    return _Scale(num_heads, hidden, max(1, head_dim // HEAD_DIM), num_layers)


def _kept_layers(config: Any, overrides: dict[int, Any]) -> tuple[list[int], int]:
    """The first layer of each kind, two of a kind alone; how many share keys with those before."""
    count = _int(config, "num_hidden_layers") or 2
    tables = [v for v in vars(config).values() if isinstance(v, list | tuple) and len(v) == count]
    tables.append([overrides.get(layer) for layer in range(count)])
    types = getattr(config, "layer_types", None) or [None] * count
    tables.append(types)  # some are properties
    kinds: dict[Any, int] = {}
    for layer in range(count):
        kinds.setdefault(tuple(str(table[layer]) for table in tables), layer)
    kept = sorted(kinds.values())
    if _int(config, "num_kv_shared_layers"):
        return kept * 2, len(kept)
    if "attn_layer_period" in vars(config) and "layers_block_type" not in vars(config):
        return list(range(3)), 0  # Jamba, see PERIODS
    if {types[layer] for layer in kept} > {"hybrid"}:  # layers that share weights with each other
        return kept * 2, 0
    return (kept if len(kept) > 1 else list(range(min(count, 2)))), 0


def _resized(name: str, value: Any, scale: _Scale) -> Any:
    """A field's value in the tiny configuration."""
    if isinstance(value, float) and ZERO.search(name):
        return 0.0
    if isinstance(value, float) and name.endswith("coef") and value:
        return 1.0  # so large that an auxiliary loss counted wrongly shows
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if value <= 0 or name.endswith(("token_id", "index", "_idx")):
        return min(value, VOCABULARY - 1)
    if LAYERS.search(name):
        return scale.num_layers
    if KV_HEADS.search(name):
        return NUM_HEADS if value == scale.num_heads else min(value, NUM_HEADS // 2)
    if HEADS.search(name):  # an indexer of few has many scores that are equal, 0
        return INDEX_HEADS if name.startswith("index") else NUM_HEADS
    if STATE.search(name) or GROUPS.search(name):
        return min(value, HEAD_DIM if STATE.search(name) else NUM_HEADS // 2)
    if FEW.search(name):
        return min(value, 1 if name == "topk_group" or "first_k" in name else 2)
    if NARROW.search(name):
        return min(value, WINDOW)
    if LENGTH.search(name):
        return min(value, SWITCH if name.startswith("original") else POSITIONS)
    if "vocab" in name:
        return min(value, VOCABULARY)
    if PER_HEAD.search(name):
        return max(2, value // scale.divisor)
    if WIDTH.search(name):
        whole = scale.num_heads * HEAD_DIM * scale.divisor
        return min(value, HIDDEN if value in (scale.hidden, whole) else INNER)
    return min(value, 4) if EXPERTS.search(name) else value


def _fit_heads(config: Any) -> None:
    """Set widths of heads that follow from the number of heads: of state spaces, and of Zamba."""
    hidden = _int(config, "hidden_size")
    inner = hidden * (_int(config, "mamba_expand") or _int(config, "expand"))
    for name in ("mamba_d_head", "mamba_head_dim", "mamba_headdim"):
        if _int(config, name):
            setattr(config, name, inner // NUM_HEADS)
    if _int(config, "expand") and not _int(config, "num_attention_heads"):  # Mamba2
        config.head_dim = inner // NUM_HEADS
    if _int(config, "mamba_d_ssm"):
        config.mamba_d_ssm = inner
    if _int(config, "attention_hidden_size"):  # of the tokens beside the hidden states
        config.attention_hidden_size = 2 * hidden
        config.attention_head_dim = 2 * hidden // NUM_HEADS
    if getattr(config, "hybrid_layer_ids", None):
        kinds = enumerate(config.layer_types)
        config.hybrid_layer_ids = [layer for layer, kind in kinds if kind == "hybrid"]


def _shrink_rope(config: Any, rope: dict[str, Any], scale: _Scale) -> None:
    if "original_max_position_embeddings" in rope:
        rope["original_max_position_embeddings"] = SWITCH
    if rope.get("rope_type") == "dynamic":
        config.max_position_embeddings = SWITCH
    for name, value in rope.items():
        if name in ("long_factor", "short_factor") and value:
            rope[name] = value[: max(1, len(value) // scale.divisor)]
        elif name == "mrope_section":
            rope[name] = [max(1, x // scale.divisor) for x in value]


def _int(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else 0

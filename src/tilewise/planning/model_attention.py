"""The attention layers of a model, read from the config.json of its checkpoint."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from tilewise.arguments import checks_arguments, require_range, shown, whole_number
from tilewise.masks.base import Causal, Mask, Window
from tilewise.planning.candidate import read_json
from tilewise.workload import Workload

WITH_SINKS = ("flint", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash")
"""Values of model_type that have layers whose softmax has a learned sink for each head."""

WINDOWED_ALL_OVER = ("mistral", "mixtral", "phi3", "starcoder2")
"""Values of model_type whose `sliding_window`, without `layer_types`, is that of every layer."""

OTHER_LAYERS = (
    *("index_topk", "index_head_dim", "linear_attn_config", "mamba_d_state", "ssm_state_size"),
    *("attn_type_list", "hybrid_override_pattern", "block_types", "attention_chunk_size"),
    "keep_window_size",
)
"""Fields of models with layers that are neither full nor sliding attention."""

UNEQUAL_LAYERS = (
    *("per_layer_config", "num_attention_heads_per_layer", "swa_num_attention_heads"),
    *("global_head_dim", "num_global_key_value_heads"),
)
"""Fields of models whose layers differ in heads or widths."""

HEAD_FIELDS = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "v_head_dim"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "attention_head_dim"),
)
"""Fields of a configuration that say its heads and their widths."""

OTHER_SOFTMAX = ("big_bird", "diffllama", "doge", "jetmoe")
"""Values of model_type whose attention is not one softmax over the keys that a query sees."""


@dataclass(frozen=True)
class ModelAttention:
    """Softmax attention of a model's layers, all causal.

    Args:
        v_head_dim: of v and out; None: head_dim.
        dtype: of q, k and v in training, whatever the checkpoint's.
        windows: (tokens that a query sees, itself among them, or None for all before it; number of
            such layers).
        has_sinks, has_softcap: whether the softmax has a sink per head, or scores are capped.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    dtype: str = "bfloat16"
    windows: tuple[tuple[int | None, int], ...] = ((None, 1),)
    has_sinks: bool = False
    has_softcap: bool = False

    @property
    def has_windows(self) -> bool:
        return any(window is not None for window, _ in self.windows)

    @property
    def num_layers(self) -> int:
        return sum(count for _, count in self.windows)

    def workloads(self, num_tokens: int) -> list[tuple[Workload, int]]:
        """One layer of each kind as a workload on a zigzag layout, and how many there are."""
        masks: Counter[Mask] = Counter()
        for window, count in self.windows:
            if window is None or window >= num_tokens:
                masks[Causal()] += count
            else:
                masks[Causal() & Window(window - 1, 0)] += count
        sizes = self.num_heads, self.num_kv_heads, self.head_dim
        words: dict[str, Any] = {"dtype": self.dtype, "v_head_dim": self.v_head_dim}
        return [(Workload(num_tokens, *sizes, mask=m, **words), n) for m, n in masks.items()]


@checks_arguments
def read_model(path: str | Path) -> ModelAttention:
    """The attention layers that a config.json of transformers describes.

        read_model("Qwen3-8B/config.json").num_kv_heads         # 8

    Raises:
        ValueError: naming the file and the field that is missing or wrong, or the kind of layer
            that is neither full nor sliding attention.
    """
    data = read_json(path)
    try:
        if not isinstance(data, dict):
            raise ValueError("the file must hold one object")
        config = cast("dict[str, Any]", data)
        inner = config.get("text_config")
        return _model(cast("dict[str, Any]", inner) if isinstance(inner, dict) else config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


class Heads(NamedTuple):
    """Heads of the softmax attention of a configuration, and their widths.

    Attributes:
        v_head_dim: of v and out; None: head_dim.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None


def heads_of(config: Mapping[str, Any]) -> Heads:
    """Read the heads of a configuration of transformers: the one reader of them.

    Args:
        config: HEAD_FIELDS of it; those it lacks may be None.
    Raises:
        ValueError: naming the field that is missing or wrong.
    """
    num_heads = _number(config, "num_attention_heads")
    num_kv_heads = _number(config, "num_key_value_heads", num_heads)
    v_head_dim = _number(config, "v_head_dim") if config.get("v_head_dim") else None
    if config.get("kv_lora_rank"):  # latent attention, expanded: every head has its keys and values
        num_kv_heads = num_heads
        head_dim = _number(config, "qk_nope_head_dim") + _number(config, "qk_rope_head_dim")
    elif config.get("head_dim") is not None:
        head_dim = _number(config, "head_dim")
    elif config.get("attention_head_dim") is not None:  # Zamba's attention reads two inputs
        head_dim = _number(config, "attention_head_dim")
    else:
        hidden_size = _number(config, "hidden_size")
        if hidden_size % num_heads:
            raise ValueError(
                f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads "
                f"({num_heads}), unless head_dim is given"
            )
        head_dim = hidden_size // num_heads
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_key_value_heads ({num_kv_heads}) must divide num_attention_heads ({num_heads})"
        )
    return Heads(num_heads, num_kv_heads, head_dim, v_head_dim)


def _model(config: Mapping[str, Any]) -> ModelAttention:
    heads = heads_of(config)
    kind = config.get("model_type")
    if kind in OTHER_SOFTMAX:
        raise ValueError(f"model_type ({kind}) has an attention of its own, which is not priced")
    for fields, what in (
        (OTHER_LAYERS, "layers that are neither full nor sliding attention"),
        (UNEQUAL_LAYERS, "layers that differ in heads or widths"),
    ):
        field_name = next((field for field in fields if config.get(field)), None)
        if field_name:
            raise ValueError(f"{field_name} means {what}, which are not priced")
    return ModelAttention(
        *heads,
        windows=_windows(config),
        has_sinks=kind in WITH_SINKS,
        has_softcap=bool(config.get("attn_logit_softcapping")),
    )


def _windows(config: Mapping[str, Any]) -> tuple[tuple[int | None, int], ...]:
    """Each window and how many layers have it; None is the window of full attention."""
    num_layers = _number(config, "num_hidden_layers")
    window = config.get("sliding_window")
    types = config.get("layer_types")
    if types is None and (window is None or config.get("use_sliding_window") is False):
        return ((None, num_layers),)
    if types is None and config.get("model_type") in WINDOWED_ALL_OVER:
        return ((_number(config, "sliding_window"), num_layers),)
    if types is None:
        raise ValueError(
            f"sliding_window ({shown(window)}) stands without layer_types, which say in which "
            "layers; transformers 5 writes them: AutoConfig.from_pretrained(...).save_pretrained()"
        )
    if not isinstance(types, list) or len(cast("list[Any]", types)) != num_layers:
        raise ValueError(f"layer_types must be a list of num_hidden_layers ({num_layers}) names")
    counts = Counter(map(str, cast("list[Any]", types)))
    other_types = sorted(counts.keys() - {"full_attention", "sliding_attention"})
    if other_types:
        raise ValueError(
            f"layer_types has {', '.join(other_types)}; only full_attention and sliding_attention "
            "are priced"
        )
    sliding, full = counts["sliding_attention"], counts["full_attention"]
    sliding_windows = [(_number(config, "sliding_window"), sliding)] if sliding else []
    return (*([(None, full)] if full else []), *sliding_windows)


def _number(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is None:
        raise ValueError(f"{name} is missing")
    number = whole_number(name, default if value is None else value)
    require_range(name, number, 1, 1 << 30)
    return number

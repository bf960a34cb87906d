"""Options that other libraries have under another name, and what each is called here."""

from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_DOCUMENTS = "mask=tw.Causal() & tw.Document(cu_seqlens), with boundaries of the whole sequence"
OURS: Mapping[str, str] = MappingProxyType(
    {
        # torch.nn.functional.scaled_dot_product_attention
        "is_causal": "mask=tw.Causal()",
        "attn_mask": "mask=, such as tw.Causal() & tw.Window(127, 0)",
        "scale": "softmax_scale=",
        "enable_gqa": "no option: k and v may have fewer heads than q",
        # flash-attn, ring-flash-attn, TransformerEngine, flex_attention
        "causal": "mask=tw.Causal()",
        "attention_mask": "mask=, such as tw.Causal() & tw.Document(cu_seqlens)",
        "window_size": "mask=tw.Causal() & tw.Window(left, 0)",
        "sliding_window": "mask=tw.Causal() & tw.Window(width - 1, 0)",
        "cu_seqlens": _DOCUMENTS,
        "cu_seqlens_q": _DOCUMENTS,
        "cu_seqlens_k": _DOCUMENTS,
        "cu_seqlens_kv": _DOCUMENTS,
        "max_seqlen": "no option: the mask says how long documents are",
        "max_seqlen_q": "no option: the mask says how long documents are",
        "max_seqlen_k": "no option: the mask says how long documents are",
        "block_mask": "mask=, such as tw.Causal() & tw.Document(cu_seqlens)",
        "attn_bias": "bias=",
        "core_attention_bias": "bias=",
        "position_bias": "bias=",
        "alibi_slopes": "bias=tw.alibi(slopes)",
        "dropout": "dropout_p=",
        "logits_soft_cap": "softcap=",
        "s_aux": "sink=",
        "sinks": "sink=",
        "process_group": "group=",
        "cp_group": "group=",
        "return_attn_probs": "return_lse=True; probabilities are never in one place",
    }
)
"""The other library's name, and ours as an error message says it."""


def explains_other_names(
    function: Callable[Parameters, Result],
) -> Callable[Parameters, Result]:
    """Make calls with another library's name for an option end in a TypeError that names ours."""

    @wraps(function)
    def call(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
        for name in options:
            if name in OURS:
                raise TypeError(
                    f"{function.__name__} has no option {name!r}; what it is called here: "
                    f"{OURS[name]}"
                )
        return function(*args, **options)

    return call

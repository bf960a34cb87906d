"""Small hybrid models of transformers, with the kinds of layers that published ones have."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import torch
import transformers
from support.hf_models import SIZES, VOCABULARY, Case, Result, errors, result, run_split, summed
from torch import Tensor

import tilewise as tw
from tilewise.integrations import hf

LINEAR, FULL = "linear_attention", "full_attention"
DELTA = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "layer_types": [LINEAR, FULL, LINEAR],
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 16}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 4}
KIMI = {
    **EXPERTS,
    "head_dim": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
PURE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
LFM = {"layer_types": ["conv", FULL, "conv"], "conv_L_cache": 3}
ZAMBA = {
    "num_key_value_heads": 4,
    "mamba_d_state": 8,
    "n_mamba_heads": 4,
    "use_mamba_kernels": False,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3Next": DELTA | SHARED,
    "Qwen3_5Text": DELTA,
    "Qwen3_5MoeText": DELTA | SHARED,
    "OlmoHybrid": DELTA | {"linear_num_key_heads": 4},
    "Bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "FalconH1": MAMBA2 | {"mamba_d_ssm": 64, "mamba_n_groups": 2},
    "GraniteMoeHybrid": MAMBA2
    | {"layer_types": [LINEAR, FULL, LINEAR], "num_local_experts": 2, "num_experts_per_tok": 1},
    "NemotronH": {
        "layer_types": [LINEAR, "mlp", FULL, LINEAR, "moe"],
        "num_hidden_layers": 5,
        "head_dim": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "Zamba2": ZAMBA
    | {"layer_types": [LINEAR, "hybrid", LINEAR, "hybrid"], "num_hidden_layers": 4}
    | {"hybrid_layer_ids": [1, 3], "mamba_headdim": 16, "mamba_ngroups": 2, "chunk_size": 4},
    "Mamba2": PURE
    | {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 4},
    "Jamba": {"mamba_d_state": 8, "mamba_dt_rank": 4}
    | {"num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 3, "attn_layer_offset": 1},
    "Mamba": PURE | {"state_size": 8},
    "FalconMamba": PURE | {"state_size": 8},
    "Zamba": ZAMBA | {"layer_types": [LINEAR, "hybrid", LINEAR, "hybrid"], "num_hidden_layers": 4},
    "RecurrentGemma": {
        "num_hidden_layers": 3,
        "block_types": ["recurrent", "recurrent", "attention"],
        "lru_width": 32,
        "attention_window_size": 6,
        "head_dim": 8,
    },
    "MiniMax": {
        "layer_types": [LINEAR, FULL, LINEAR],
        "head_dim": 8,
        "block_size": 4,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
    "Lfm2": LFM,
    "Lfm2Moe": LFM | EXPERTS | {"num_dense_layers": 1},
    "Lfm3": LFM | {"head_dim": 8},
    "KimiLinear": KIMI | {"layer_types": [LINEAR, FULL, LINEAR]},
    "BailingHybrid": KIMI
    | {"layer_types": [LINEAR, FULL, LINEAR], "n_group": 1, "num_expert_group": 1, "topk_group": 1},
}


def build(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model with weights of its own seed, so large that what a token sees matters."""
    made = getattr(transformers, f"{name}Config")(**SIZES | CONFIGS[name] | changes)
    torch.manual_seed(7)
    automatic: Any = transformers.AutoModelForCausalLM
    model = automatic.from_config(made, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, x in model.named_parameters():
            x.copy_(x + 0.1 * torch.randn(x.shape))
            if name.endswith(("A_log", "recurrent_param")):
                x.normal_(-3, 0.3)  # states decay so slowly that one that is lost shows
    return model.to(dtype).train()


def run_apart(model: Any, given: Case) -> Result:
    """Every document alone; the losses of all are one mean."""
    spans = list(pairwise(given.cu_seqlens))
    count = sum(b - a - 1 for a, b in spans)
    logits, total = list[Tensor](), torch.zeros(())
    for a, b in spans:
        ids = given.input_ids[:, a:b]
        more = {"use_cache": False, "num_items_in_batch": torch.tensor(count * len(ids))}
        out = model(input_ids=ids, labels=ids, **more)
        logits.append(out.logits)
        total = total + out.loss
    total.backward()
    return result(model, torch.cat(logits, 1), total)


def split_in_threads(whole: Any, given: Case, layout: tw.Layout, **options: Any) -> Result:
    """A model over the ranks of a layout, which are threads."""

    def on_rank(rank: int, group: Any) -> Result:
        cp = tw.ContextParallel(
            group, num_tokens=layout.num_tokens, mask=tw.Causal(), layout=layout, **options
        )
        model = hf.parallelize(copy.deepcopy(whole), cp, f"tilewise_{rank}")
        return run_split(model, cp, given)

    return summed(tw.loopback(layout.world_size, on_rank))


def wrong(whole: Any, given: Case, layout: tw.Layout, tolerance: float) -> dict[str, float]:
    """What of a split model is not what its documents give apart."""
    got = split_in_threads(whole, given, layout)
    want = run_apart(copy.deepcopy(whole), given)
    return {what: x for what, x in errors(got, want).items() if not x < tolerance}

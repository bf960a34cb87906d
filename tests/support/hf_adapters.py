"""Small models of transformers with PEFT's adapters of random weights."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import peft
import torch
from support.hf_models import build

LINEAR = ("q_proj", "v_proj", "down_proj")
TASK: dict[str, Any] = {"task_type": "CAUSAL_LM"}
COMMON = TASK | {"target_modules": list(LINEAR)}
LORA = COMMON | {"r": 4}

FITTING = MappingProxyType(
    {
        "LORA": lambda: peft.LoraConfig(**LORA),
        "all of LORA": lambda: peft.LoraConfig(
            **TASK, r=64, target_modules="all-linear", use_dora=True, modules_to_save=["lm_head"],
            rank_pattern={"q_proj": 3}, trainable_token_indices=[3, 9, 40],
        ),
        "LORA of one layer": lambda: peft.LoraConfig(
            **LORA | {"target_modules": ["embed_tokens", "gate_proj"]}, layers_to_transform=[2],
        ),
        "LORA of copied layers": lambda: peft.LoraConfig(
            **LORA, layer_replication=[[0, 2], [1, 3]], modules_to_save=["self_attn"]
        ),
        "VBLORA": lambda: peft.VBLoRAConfig(**COMMON, r=2, vector_length=8, num_vectors=8),
        "OFT": lambda: peft.OFTConfig(**COMMON, oft_block_size=8),
        "LOHA": lambda: peft.LoHaConfig(**COMMON, r=8),
        "ADAPTION_PROMPT": lambda: peft.AdaptionPromptConfig(
            **TASK, adapter_layers=3, adapter_len=4
        ),
    }
)  # fmt: skip
"""Configurations of adapters that can be split."""

WITH_REASONS = MappingProxyType(
    {
        "activated LORA": (
            lambda: peft.LoraConfig(**LORA, alora_invocation_tokens=[7]),
            r"LORA of PEFT \(r, alora_invocation_tokens\) split over ranks is not the unsplit",
        ),
        "activated LORA of biases": (
            lambda: peft.LoraConfig(**LORA, alora_invocation_tokens=[7]),
            r"Qwen2ForCausalLM with LORA of PEFT .* split over ranks is not the unsplit",
        ),
        "LILY": (lambda: peft.LilyConfig(**LORA, num_B=2), "LILY of PEFT .* is not the unsplit"),
        "PVERA": (lambda: peft.PveraConfig(**LORA), "PVERA of PEFT .* draws random numbers"),
        "LOKR with dropout": (
            lambda: peft.LoKrConfig(**LORA, rank_dropout=0.01),
            r"LOKR of PEFT .*rank_dropout \(0.01\) must be 0: it drops weights",
        ),
        "POLY": (lambda: peft.PolyConfig(**LORA), "POLY of PEFT .* needs task_ids"),
        "PREFIX_TUNING": (
            lambda: peft.PrefixTuningConfig(**TASK, num_virtual_tokens=3),
            "PREFIX_TUNING puts tokens of its own",
        ),
    }
)
REFUSED = MappingProxyType({kind: message for kind, (_, message) in WITH_REASONS.items()})
"""Adapters that cannot be split: what the error says."""


def adapted(kind: str, model: Any = None) -> Any:
    """A Llama, or another model, with an adapter in training mode whose weights matter."""
    make = FITTING[kind] if kind in FITTING else WITH_REASONS[kind][0]
    torch.manual_seed(3)
    name = "qwen2" if kind.endswith("biases") else "llama"
    made = peft.get_peft_model(build(name) if model is None else model, make())
    with torch.no_grad():
        for x in made.parameters():
            if x.requires_grad:
                x.add_(0.3 * torch.randn_like(x))
    return made.train()

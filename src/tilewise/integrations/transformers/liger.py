"""Liger's kernels in models that a Trainer splits (use_liger_kernel).

When training begins, transformers lets Liger replace functions of a model's layers, each of which
acts on a token by itself, and the model's forward, whose fused loss never holds logits. Split calls
hand that forward labels that were shifted over whole rows, and the count of the whole batch, so
that the losses of all ranks add up to the loss of the unsplit model.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

OLDEST = "0.8.5"  # the forward of some older ones shifts labels by itself
TRIED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
INSTEAD = (
    "leave it out; TRL's trainers for SFT, DPO, KTO and GRPO compute their losses in chunks, "
    "without whole logits, as they are"
)


def refused_liger(model: Any) -> str | None:
    """Why a model cannot be split with Liger's kernels; None if it can.

    Args:
        model: of transformers.
    """
    # FSDP2 gives a model a class made at run time.
    classes = (x for x in type(model).__mro__ if not x.__module__.startswith("torch.distributed"))
    name = next(classes).__name__
    if name not in TRIED:
        return (
            f"use_liger_kernel (True) cannot be honoured with cp_size for {name}: Liger's kernels "
            f"were tried in {', '.join(TRIED)} alone; {INSTEAD}"
        )
    try:
        installed = version("liger-kernel")
    except PackageNotFoundError:
        return None  # transformers says so
    if _numbers(installed) < _numbers(OLDEST):
        return (
            f"liger-kernel ({installed}) must be {OLDEST} or newer with use_liger_kernel and "
            f"cp_size: upgrade it, or {INSTEAD}"
        )
    return None


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(".")[:3] if part.isdigit()]

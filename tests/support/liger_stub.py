"""A stand-in for Liger on the CPU: a model's forward with the signature of liger-kernel 0.8.5."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def lce_forward(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    output_attentions: bool | None = None,
    output_hidden_states: bool | None = None,
    return_dict: bool | None = None,
    cache_position: Tensor | None = None,
    logits_to_keep: int | Tensor = 0,
    skip_logits: bool | None = None,
    **kwargs: Any,
) -> Any:
    """As Liger's: hidden states, then the loss of shift_labels where these are given."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    outputs = self.model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        return_dict=return_dict,
        **kwargs,
    )
    shift_labels = kwargs.pop("shift_labels", None)
    loss = logits = None
    labelled = labels is not None or shift_labels is not None
    skips = self.training and labelled if skip_logits is None else skip_logits
    if skips:
        loss = fused_loss(self, outputs[0], labels, shift_labels, **kwargs)
    else:
        logits = self.lm_head(outputs[0])
        if labelled:
            sizes = {"vocab_size": self.config.vocab_size}
            loss = self.loss_function(
                logits=logits, labels=labels, shift_labels=shift_labels, **sizes, **kwargs
            )
    return CausalLMOutputWithPast(loss=loss, logits=logits)


def fused_loss(
    model: Any,
    hidden_states: Tensor,
    labels: Tensor | None,
    shift_labels: Tensor | None,
    num_items_in_batch: Any = None,
    **_: Any,
) -> Tensor:
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
    logits = hidden_states.flatten(0, 1) @ model.lm_head.weight.T
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(logits, shift_labels.flatten(), reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def provide() -> None:
    """Let Trainers of this process apply the stand-in, in which training makes no logits."""
    import transformers.trainer as module

    def apply(model: Any, kernel_config: dict[str, Any] | None) -> None:
        fused = (kernel_config or {}).get("fused_linear_cross_entropy", True)
        if fused and type(model).__name__ == "LlamaForCausalLM":
            model.forward = MethodType(lce_forward, model)
            model.lm_head.register_forward_hook(_refuse_logits)

    module.apply_liger_kernel = apply


def _refuse_logits(module: torch.nn.Module, inputs: Any, logits: Tensor) -> None:
    assert not module.training, "a fused loss needs no logits"

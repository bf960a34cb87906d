"""PEFT's adapters on a split model: the unsplit model's loss and gradients."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")
pytest.importorskip("peft", reason="needs peft")

import peft
from support.hf_models import build, case, errors, run_split, run_whole, summed
from transformers import TrainingArguments

import tilewise as tw
from tilewise.integrations import hf

# PEFT 0.21 reads an attribute that transformers 5.23 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
N = 3
GIVEN = case((0, 5, 16, 22))


def _with_lora(seed: int = 3):
    torch.manual_seed(seed)
    targets = ["q_proj", "v_proj", "gate_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(build("qwen3"), config)
    with torch.no_grad():  # B starts at 0, where A has no gradient
        for name, x in model.named_parameters():
            if "lora_B" in name:
                x.normal_()
    return model


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_lora_before_and_after_parallelize(wrapped_first: bool):
    whole = _with_lora()
    want = run_whole(copy.deepcopy(whole), GIVEN)
    assert want.grads
    assert all("lora" in name for name in want.grads)

    def on_rank(rank, group):
        cp = tw.ContextParallel(group, num_tokens=22, mask=tw.Causal())
        model = copy.deepcopy(whole)
        hf.parallelize(model if wrapped_first else model.get_base_model(), cp, f"tilewise_{rank}")
        return run_split(model, cp, GIVEN)

    assert max(errors(summed(tw.loopback(N, on_rank)), want).values()) < 1e-5


def test_trainer_args_take_a_model_with_lora(tmp_path):
    cp = tw.ContextParallel(num_tokens=22, mask=tw.Causal())
    args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    model = _with_lora()
    assert hf.trainer_args(cp, model, args)["model"] is model


def test_tokens_that_peft_adds_are_refused():
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    cp = tw.ContextParallel(num_tokens=22, mask=tw.Causal())
    with pytest.raises(ValueError, match="PROMPT_TUNING puts tokens of its own before"):
        hf.parallelize(peft.get_peft_model(build("llama"), config), cp)

"""PEFT's adapters on a split model: the unsplit model's loss and gradients, or a refusal."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")
pytest.importorskip("peft", reason="needs peft")

import peft
import torch
from support.hf_adapters import COMMON, FITTING, REFUSED, adapted
from support.hf_models import build, case, errors, run_split, run_whole, summed
from transformers import TrainingArguments

import tilewise as tw
from tilewise.integrations import hf
from tilewise.integrations.transformers.forward import split_forward

# PEFT 0.21 reads an attribute that transformers 5.23 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
N = 3
GIVEN = case((0, 5, 16, 22))


def split_by_hand(whole: Any, *, wrapped_first: bool = True):
    def on_rank(rank, group):
        cp = tw.ContextParallel(group, num_tokens=22, mask=tw.Causal())
        model = copy.deepcopy(whole)
        hf.parallelize(model if wrapped_first else model.get_base_model(), cp, f"tilewise_{rank}")
        return run_split(model, cp, GIVEN)

    return summed(tw.loopback(N, on_rank))


@pytest.mark.parametrize("kind", FITTING)
def test_adapters_run_split_as_they_do_unsplit(kind: str):
    """Bias, embeddings, saved modules, dropout of rows and layers by number among them."""
    whole = adapted(kind)
    want = run_whole(copy.deepcopy(whole), GIVEN)
    assert want.grads
    assert max(errors(split_by_hand(whole), want).values()) < 1e-5


@pytest.mark.parametrize("kind", REFUSED)
def test_adapters_that_see_more_than_a_row_are_refused_by_name(kind: str):
    """Where whole rows are split in the model's forward, too."""
    whole, message = adapted(kind), REFUSED[kind]

    def on_rank(rank, group):
        cp = tw.ContextParallel(group, num_tokens=22, mask=tw.Causal())
        with pytest.raises(ValueError, match=message):
            hf.parallelize(copy.deepcopy(whole), cp, f"tilewise_{rank}")
        with pytest.raises(ValueError, match=message):
            split_forward(copy.deepcopy(whole), group)

    tw.loopback(2, on_rank)


def test_an_adapter_that_adds_to_the_loss_runs_without_labels_alone():
    """AdaLoRA, which calls the model in it past its hooks, whenever it was put around it."""
    config = peft.AdaLoraConfig(**COMMON, total_step=10)
    whole = peft.get_peft_model(build("llama"), config).train()
    want = whole(GIVEN.input_ids).logits
    want.square().sum().backward()
    grads = {n: x.grad for n, x in whole.named_parameters() if x.grad is not None}

    def on_rank(rank, group):
        cp = tw.ContextParallel(group, num_tokens=22, mask=tw.Causal())
        model = hf.parallelize(copy.deepcopy(whole), cp, f"tilewise_{rank}")
        model.zero_grad()
        logits = model(**hf.shard(cp, GIVEN.input_ids)).logits
        logits.square().sum().backward()
        bare = hf.parallelize(build("llama"), cp, f"late_{rank}")
        late = peft.get_peft_model(bare, config)
        for split in (model, late):
            with pytest.raises(ValueError, match=r"ADALORA of PEFT .* whole loss"):
                run_split(split, cp, GIVEN)
        return hf.unshard(cp, logits), [dict(model.named_parameters())[n].grad for n in grads]

    ranks = tw.loopback(N, on_rank)
    torch.testing.assert_close(ranks[0][0], want, rtol=1e-5, atol=1e-5)
    for name, *parts in zip(grads, *(found for _, found in ranks), strict=True):
        torch.testing.assert_close(sum(parts), grads[name], rtol=1e-4, atol=1e-4)


def test_several_kinds_of_adapters_in_a_model_run_split():
    whole = peft.get_peft_model(build("llama"), peft.LoraConfig(**COMMON), mixed=True)
    whole.add_adapter("other", peft.LoHaConfig(**COMMON | {"target_modules": ["o_proj"]}, r=2))
    whole.set_adapter(["default", "other"])
    want = run_whole(copy.deepcopy(whole.train()), GIVEN)
    assert max(errors(split_by_hand(whole), want).values()) < 1e-5


def test_a_model_that_gets_adapters_after_it_was_split_is_tried_when_it_runs():
    """Activated LoRA is refused then, and by hf.register, which tries no model."""
    want = run_whole(adapted("LORA"), GIVEN)
    assert max(errors(split_by_hand(adapted("LORA"), wrapped_first=False), want).values()) < 1e-5

    def on_rank(rank, group):
        cp = tw.ContextParallel(group, num_tokens=22, mask=tw.Causal())
        bare = hf.parallelize(build("llama"), cp, f"tilewise_{rank}")
        late = adapted("activated LORA", bare)
        with pytest.raises(
            ValueError, match=r"LORA of PEFT .*alora_invocation_tokens.* split over"
        ):
            run_split(late, cp, GIVEN)
        registered = adapted("LORA")
        registered.get_base_model().set_attn_implementation(hf.register(cp, f"by_hand_{rank}"))
        with pytest.raises(ValueError, match=r"LlamaAttention has adapters of PEFT.*parallelize"):
            run_split(registered, cp, GIVEN)

    tw.loopback(2, on_rank)


def test_adapters_that_were_put_into_a_module_around_a_model_are_refused():
    """Before the model is split and after: PEFT notes their settings on that module."""
    message = r"LlamaForCausalLM has adapters of PEFT \(default\) .* into a module around it"

    def on_rank(rank, group):
        cp = tw.ContextParallel(group, num_tokens=22, mask=tw.Causal())
        config = peft.LilyConfig(r=4, num_B=2, target_modules=["q_proj"])
        holder = torch.nn.ModuleDict({"model": build("llama")})
        late = hf.parallelize(holder["model"], cp, f"tilewise_{rank}")
        peft.inject_adapter_in_model(config, holder)
        with pytest.raises(ValueError, match=message):
            run_split(late, cp, GIVEN)
        with pytest.raises(ValueError, match=message):
            hf.parallelize(late, cp, f"tilewise_{rank}")

    tw.loopback(2, on_rank)


def test_trainer_args_take_a_model_with_lora(tmp_path):
    cp = tw.ContextParallel(num_tokens=22, mask=tw.Causal())
    args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    model = adapted("LORA")
    assert hf.trainer_args(cp, model, args)["model"] is model


def test_tokens_that_peft_adds_are_refused():
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    cp = tw.ContextParallel(num_tokens=22, mask=tw.Causal())
    with pytest.raises(ValueError, match="PROMPT_TUNING puts tokens of its own before"):
        hf.parallelize(peft.get_peft_model(build("llama"), config), cp)

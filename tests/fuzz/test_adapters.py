"""PEFT's adapters of any kind and setting: a split model is the unsplit one, or is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")
pytest.importorskip("peft", reason="needs peft")

import peft
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import examples
from support.hf_models import build, case, errors, run_split, run_whole, summed
from torch import nn

import tilewise as tw
from tilewise.integrations import hf

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns of settings that it draws
MODELS = ("llama", "qwen2", "qwen3", "gemma3", "gpt2")
TARGETS = {
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"),
}
NO_TARGETS = ("PROMPT", "PREFIX", "P_TUNING", "CPT", "CARTRIDGE", "SHADOW", "ADAPTION")
NEEDS = {  # of settings without which PEFT makes no adapter
    "ADALORA": {"total_step": 10},
    "OFT": {"r": 0, "oft_block_size": 8},
    "C3A": {"block_size": 8},
    "ROAD": {"group_size": 8},
    "VBLORA": {"vector_length": 8, "num_vectors": 8},
    "UNILORA": {"theta_d_length": 32},
    "FOURIERFT": {"n_frequency": 40},
    "WAVEFT": {"n_frequency": 40},
    "GRALORA": {"gralora_k": 2},
    "LILY": {"num_B": 2},
    "IA3": {"feedforward_modules": []},
    "TRAINABLE_TOKENS": {"token_indices": [3, 9]},
    "LN_TUNING": {"target_modules": ["input_layernorm", "ln_1"]},
    "ADAPTION_PROMPT": {"adapter_layers": 1, "adapter_len": 3},
    "CPT": {"cpt_token_ids": [1, 2], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 2]},
    "POLY": {"n_splits": 2},
}
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "r": st.integers(1, 5).map(lambda x: 2 * x),
    "bias": st.just("all"),
    "lora_bias": st.booleans(),
    "use_dora": st.booleans(),
    "use_rslora": st.booleans(),
    "alora_invocation_tokens": st.lists(st.integers(3, 49), min_size=1, max_size=3),
    "trainable_token_indices": st.lists(st.integers(3, 49), min_size=1, max_size=3, unique=True),
    "modules_to_save": st.sampled_from([["lm_head"], ["self_attn"], ["mlp"], ["norm"]]),
    "layer_replication": st.just([[0, 2], [0, 1]]),
    "layers_to_transform": st.lists(st.integers(0, 1), min_size=1, max_size=2, unique=True),
    "rank_dropout": st.just(0.3),
    "module_dropout": st.just(0.3),
    "decompose_both": st.booleans(),
    "init_weights": st.booleans(),
}


@st.composite
def adapters(draw: st.DrawFn) -> tuple[str, Any, dict[str, Any]]:
    """A model's name, a class of configurations, and what it is made of."""
    kinds = sorted(peft.PEFT_TYPE_TO_CONFIG_MAPPING, key=lambda kind: kind.value)
    kind = draw(st.sampled_from([kind for kind in kinds if kind.value not in ("XLORA", "ADAMSS")]))
    name, made = draw(st.sampled_from(MODELS)), peft.PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    fields = made.__dataclass_fields__
    given: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    if "target_modules" in fields and not kind.value.startswith(NO_TARGETS):
        names = TARGETS.get(name, TARGETS[""])
        given["target_modules"] = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    if kind.value == "TRAINABLE_TOKENS":
        given["target_modules"] = ["wte" if name == "gpt2" else "embed_tokens"]
    if "num_virtual_tokens" in fields:
        given["num_virtual_tokens"] = 3
    for setting in draw(st.lists(st.sampled_from(sorted(SETTINGS)), max_size=3, unique=True)):
        if setting in fields:
            given[setting] = draw(SETTINGS[setting])
    return name, made, given | NEEDS.get(kind.value, {})


def made_with(base: nn.Module, made: Any, given: dict[str, Any]) -> Any:
    """The model with its adapter, the same at every call."""
    torch.manual_seed(3)
    model: Any = peft.get_peft_model(base, made(**given))  # pyright: ignore
    noise = 0.01 if made is peft.RandLoraConfig else 0.2  # which grows its weights a hundredfold
    for module in model.modules():
        if isinstance(module, nn.Dropout):  # of rows
            module.p = 0.0
    with torch.no_grad():
        for x in model.parameters():
            if x.requires_grad:
                x.add_(noise * torch.randn_like(x))
    return model.train()


GIVEN = case((0, 17))


@examples(0.2)
@given(adapters(), st.booleans())
def test_split_is_unsplit_or_refused(drawn: tuple[str, Any, dict[str, Any]], late: bool):
    """late: the model is split before it gets the adapter."""
    name, *adapter = drawn
    try:
        whole = made_with(build(name), *adapter)
        want = run_whole(copy.deepcopy(whole), GIVEN)
    except Exception:  # settings that do not fit together
        return
    config = next(iter(whole.peft_config.values()))
    adds_tokens = config.is_prompt_learning

    def on_rank(rank, group):
        cp = tw.ContextParallel(group, num_tokens=17, mask=tw.Causal())
        try:
            if late:
                bare = hf.parallelize(build(name), cp, f"tilewise_{rank}")
                return run_split(made_with(bare, *adapter), cp, GIVEN)
            model = hf.parallelize(copy.deepcopy(whole), cp, f"tilewise_{rank}")
            return run_split(model, cp, GIVEN)
        except ValueError as refused:
            assert config.peft_type.value in str(refused) or (late and adds_tokens)
            return None

    ranks = tw.loopback(2, on_rank)
    if ranks[0] is not None:
        assert max(errors(summed(ranks), want).values()) < 3e-5

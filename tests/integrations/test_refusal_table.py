"""The table of refusals: each row refuses what it is for, by name and value, and nothing else."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

import tilewise as tw
from tilewise.integrations.transformers import refusals
from tilewise.integrations.transformers.liger import WithLiger
from tilewise.integrations.transformers.refusals import Refusal, check_allowed, refused

NOTHING: dict[str, Any] = {"n_gpu": 1, "use_vllm": False, "deepspeed": None}


def trainer(**args: Any) -> Any:
    return SimpleNamespace(
        args=SimpleNamespace(**{**NOTHING, **args}), accelerator=SimpleNamespace(num_processes=2)
    )


def of_class(name: str, module: str) -> Any:
    made = type(name, (), {"__module__": module})()
    made.args = SimpleNamespace(**NOTHING)
    return made


def sizes(**given: Any) -> Any:
    tp, sp = given.pop("tp", 1), given.pop("sp", 1)
    defaults = {"cp_handler": None, "strategy": "auto"}
    return SimpleNamespace(row_ranks=4, _sizes={"tp": tp, "sp": sp}, **defaults | given)


def launcher(kind: str, is_fsdp2: bool = False) -> Any:
    return SimpleNamespace(
        distributed_type=SimpleNamespace(value=kind),
        is_fsdp2=is_fsdp2,
        parallelism_config=SimpleNamespace(cp_size=4),
    )


completions = {"generation_batch_size": 8, "per_device_train_batch_size": 2}
completions |= {"steps_per_generation": 2}


@pytest.mark.parametrize(
    ("rows", "asked", "message"),
    [
        ("TRAINERS", of_class("Seq2SeqTrainer", "transformers"), "Seq2SeqTrainer cannot split"),
        ("TRAINERS", of_class("PPOTrainer", "trl.experimental.ppo"), "PPOTrainer cannot split"),
        ("TRAINERS", of_class("DPOTrainer", "trl.experimental.dpo"), "DPOTrainer cannot split"),
        ("LIGER", WithLiger("Gemma2ForCausalLM", "0.8.5"), r"use_liger_kernel \(True\) cannot"),
        ("LIGER", WithLiger("Qwen3ForCausalLM", "0.8.4"), r"liger-kernel \(0.8.4\) must be 0.8.5"),
        ("TRAINERS", trainer(deepspeed="a.json"), r"deepspeed \(a.json\) cannot .*; use DDP, or"),
        ("TRAINERS", trainer(n_gpu=2), "one process drives 2 GPUs; start one for each"),
        ("TRAINERS", trainer(use_vllm=True), r"use_vllm \(True\) cannot be honoured"),
        (
            "TRAINERS",
            trainer(num_generations=3, **completions),
            r"num_generations \(3\) must divide the 8 completions .* \(2\) on 2 ranks",
        ),
        ("SIZES", sizes(tp=2), r"cp_size \(4\) and tp_size \(2\) cannot both .*; set tp_size=1"),
        ("SIZES", sizes(sp=2), r"cp_size \(4\) and sp_size \(2\) cannot both"),
        ("SIZES", sizes(cp_handler=object()), "cp_handler is of accelerate's own"),
        (
            "SIZES",
            sizes(strategy={"0": tw.ring(4)}),
            r"strategy \(dict\) has a plan for each",
        ),
        ("LAUNCHERS", launcher("DEEPSPEED"), r"cp_size \(4\) must be 1 under DeepSpeed; use DDP"),
        ("LAUNCHERS", launcher("TP"), "must be 1 under tensor parallelism"),
        ("LAUNCHERS", launcher("MEGATRON_LM"), "must be 1 under Megatron-LM"),
        ("LAUNCHERS", launcher("XLA"), "must be 1 under XLA"),
        ("LAUNCHERS", launcher("FSDP"), "must be 1 under FSDP version 1; use DDP, or FSDP with"),
        ("LOADERS", True, r"dispatch_batches \(True\) must be False or None"),
    ],
)
def test_a_row_refuses_by_name_and_value(rows: str, asked: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        check_allowed(getattr(refusals, rows), asked)
    assert re.search(message, str(error.value))


@pytest.mark.parametrize(
    ("rows", "asked"),
    [
        ("TRAINERS", trainer()),
        ("TRAINERS", trainer(num_generations=4, **completions)),
        ("TRAINERS", of_class("SFTTrainer", "trl.trainer.sft_trainer")),
        ("TRAINERS", of_class("ORPOTrainer", "trl.experimental.orpo")),
        ("TRAINERS", of_class("OwnTrainer", "script")),
        ("TRAINERS", trainer(use_liger_kernel=True, neftune_noise_alpha=5.0)),
        ("LIGER", WithLiger("Qwen3ForCausalLM", "")),
        ("SIZES", sizes()),
        ("SIZES", sizes(strategy=tw.ring(4))),
        ("LAUNCHERS", launcher("FSDP", is_fsdp2=True)),
        ("LAUNCHERS", launcher("MULTI_GPU")),
        ("LOADERS", None),
    ],
)
def test_what_runs_is_not_refused(rows: str, asked: Any) -> None:
    assert refused(getattr(refusals, rows), asked) is None


def test_what_is_left_out_for_now_is_marked() -> None:
    tables = refusals.TRAINERS, refusals.SIZES, refusals.LAUNCHERS, refusals.MODELS
    later: list[Refusal] = [row for rows in tables for row in rows if row.later]
    words = "deepspeed", "tp_size", "a plan for each layer", "DeepSpeed", "tensor parallelism"
    assert len(later) == len(words)
    for row, word in zip(later, words, strict=True):
        assert word in row.message

"""Trainers whose rows are split over ranks take the steps of the unsplit run."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")
pytest.importorskip("trl", reason="needs trl")
pytest.importorskip("peft", reason="needs peft")

from peft import PeftModel
from processes.launcher import run_processes
from support.hf_models import build
from support.hf_trainers import Run, largest_difference, resume, train

from tilewise.integrations.transformers.images import MODELS

PACKED = {"packing": True, "num_train_epochs": 10}

NOISE = {"neftune_noise_alpha": 5.0}  # of NEFTune, on embeddings


def recomputed(reentrant: bool) -> dict:
    kind = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    return {"gradient_checkpointing": True, **kind}


BALANCED = {"router_aux_loss_coef": 0.5}  # a loss over all tokens' experts
# Batches of rows with up to five images, and of text alone. The rate is small because Gemma 4
# magnifies rounding, as does Qwen3-Next below.
WITH_IMAGES = {
    f"Trainer, images, {name}": Run(
        "images", name, {"learning_rate": 0.01}, changes={"dtype": torch.float32}
    )
    for name in MODELS
}
BY_PROCESSOR = {  # pictures and text, of which TRL's collators make batches by a processor
    f"{trainer.upper()}, images, {model}, {columns}": Run(
        f"{trainer} on images",
        model,
        {"learning_rate": 0.01},
        columns=columns,
        changes={"dtype": torch.float32},
    )
    for model in ("llava", "gemma3", "qwen2_5_vl")
    for trainer, columns in (("sft", "messages"), ("sft", "prompt"), ("dpo", "prompt"))
}
FEW = {
    "Trainer, accumulated, with metrics": Run(
        "trainer", args={"gradient_accumulation_steps": 2}, metrics=True
    ),
    "Trainer, logits reduced by token": Run("trainer", metrics=True, reduced="argmax"),
    "Trainer, logits reduced with labels": Run("trainer", metrics=True, reduced="right"),
    "SFT, packed, LoRA": Run("sft", "gemma3", PACKED, lora=True),
    "SFT, padded, sinks": Run("sft", "gpt_oss", BALANCED, columns="prompt"),
    "Trainer, tokens masked by workers": Run(
        "trainer", args={"dataloader_num_workers": 2}, masked=True
    ),
    "Trainer, evaluated first": Run("trainer", evaluates_first=True),
    "SFT, packed, noise": Run("sft", args=PACKED | NOISE, uneven=True),
    "DPO": Run("dpo", "qwen2"),
    "GRPO": Run("grpo"),
    "Async GRPO": Run("async_grpo", "qwen3"),
    "Trainer, fused loss": Run("trainer", args={"use_liger_kernel": True}, metrics=True),
    "Reward": Run("reward", "gemma2"),
    "Trainer, images": WITH_IMAGES["Trainer, images, qwen3_vl"],
    "SFT, images": BY_PROCESSOR["SFT, images, qwen2_5_vl, messages"],
}
MANY = {
    **{f"SFT, packed, {m}": Run("sft", m, PACKED) for m in (
        "llama", "qwen2", "qwen3", "mistral", "gemma2", "cohere2", "granite", "deepseek_v3", "gpt2",
        "mixtral",
    )},
    "SFT, accumulated, experts": Run(
        "sft", "mixtral", BALANCED | {"gradient_accumulation_steps": 2}
    ),
    "DPO, experts": Run("dpo", "mixtral", BALANCED),
    "KTO, experts": Run("kto", "gpt_oss", BALANCED),
    "GRPO, experts": Run("grpo", "mixtral", BALANCED),
    **{f"SFT, padded, {m}": Run("sft", m) for m in ("gemma3", "gpt2", "opt")},
    **{f"DPO, {m}": Run("dpo", m) for m in ("llama", "gemma3", "gpt_oss", "mistral")},
    # What TRL makes in chunks of the head, beside log-probabilities.
    "SFT, in chunks": Run("sft", args={"loss_type": "chunked_nll"}),
    "DPO, weighted": Run("dpo", args={"use_weighting": True, "ld_alpha": 0.5}),
    "DPO, padding-free, two losses": Run(
        "dpo", args={"padding_free": True, "loss_type": ["sigmoid", "sft"]}
    ),
    "GRPO, entropies": Run("grpo", args={"entropy_coef": 0.02, "top_entropy_quantile": 0.6}),
    "KTO, apo": Run("kto", args={"loss_type": "apo_zero_unpaired"}),
    "KTO": Run("kto"),
    "ORPO": Run("orpo"),
    "CPO": Run("cpo", "qwen2"),
    "GKD, given completions": Run("gkd", args={"lmbda": 0.0}),
    "GKD, the student's": Run("gkd", args={"lmbda": 0.5}),
    "GKD, the teacher's": Run("gkd", "gemma3", {"lmbda": 0.0, "seq_kd": True}),
    "GRPO, near its reference, LoRA": Run("grpo", args={"beta": 0.04}, lora=True),
    "Trainer, a loss of one's own": Run(
        "trainer", args={"gradient_accumulation_steps": 2}, own_loss=True
    ),
    "compiled by inductor": Run(
        "trainer", args={"torch_compile": True}, changes={"num_hidden_layers": 1}
    ),
    "compiled, evaluated first": Run(
        "trainer",
        args={"torch_compile": True, "torch_compile_backend": "aot_eager"},
        evaluates_first=True,
    ),
    "RLOO": Run("rloo", "qwen3"),
    "Trainer, Llama 4's chunks": Run("trainer", "llama4"),
    "Trainer, gated delta rules": Run("trainer", "Qwen3Next", {"learning_rate": 0.01}),
    "SFT, padded, Mamba2": Run("sft", "Bamba"),
    "SFT, padding-free": Run("sft", args={"padding_free": True, "max_length": None}),
    "SFT, wrapped": Run("sft", args=PACKED | {"packing_strategy": "wrapped"}),
    "SFT, split documents": Run(
        "sft", args=PACKED | {"packing_strategy": "bfd_split", "max_length": 16}
    ),
    "SFT, messages": Run("sft", columns="messages"),
    "SFT, tokenised": Run("sft", columns="input_ids"),
    "SFT, a stream": Run("sft", iterable=True),
    "SFT, dft": Run("sft", args={"loss_type": "dft"}),
    "SFT, smoothed": Run("sft", args={"label_smoothing_factor": 0.1}),
    "Trainer, smoothed": Run("trainer", args={"label_smoothing_factor": 0.1}),
    "Trainer, noise": Run("trainer", "gemma3", NOISE | {"gradient_accumulation_steps": 2}),
    "SFT, padding-free, noise, LoRA": Run(
        "sft", args=NOISE | {"padding_free": True, "max_length": None}, lora=True
    ),
    "Trainer, noise, recomputed": Run("trainer", args=NOISE | recomputed(False)),
    "Trainer, images, noise": Run(
        "images", "qwen3_vl", NOISE | {"learning_rate": 0.01}, changes={"dtype": torch.float32}
    ),
    "Trainer, Liger's layers": Run(
        "trainer",
        args={
            "use_liger_kernel": True,
            "liger_kernel_config": {"fused_linear_cross_entropy": False},
        },
    ),
    "SFT, Liger's layers": Run("sft", args=PACKED | {"use_liger_kernel": True}),
    "Trainer, fused loss, accumulated": Run(
        "trainer", args={"use_liger_kernel": True, "gradient_accumulation_steps": 2}
    ),
    "Async GRPO, nothing shared": Run("async_grpo", shared=0),
    "Async GRPO, within a budget": Run(
        "async_grpo", args={"token_budget": 90, "gradient_accumulation_steps": 2}
    ),
    "Async GRPO, windows": Run("async_grpo", "gemma3"),
    "Async GRPO, experts": Run("async_grpo", "mixtral", BALANCED),
    "Async GRPO, an epoch": Run("async_grpo", args={"max_steps": -1, "num_train_epochs": 0.5}),
    "GRPO, noise": Run("grpo", args=NOISE),
    "Trainer, means of ranks": Run("trainer", args={"average_tokens_across_devices": False}),
    "checkpointing, reentrant": Run("trainer", args=recomputed(True)),
    "checkpointing": Run("trainer", args=recomputed(False)),
    "compiled": Run("trainer", args={"torch_compile": True, "torch_compile_backend": "aot_eager"}),
    "SFT, compiled": Run("sft", args={"torch_compile": True, "torch_compile_backend": "eager"}),
    **WITH_IMAGES,
    **BY_PROCESSOR,
}  # fmt: skip


OF_PADDING = ("logits/chosen", "logits/rejected")
"""What ORPO and CPO log of padding too, which has no logits here."""
OF_FIRST = ("batch/", "sample/", "reward")
"""What the first process of async GRPO alone logs, as it alone reads samples."""


def compare(got: dict, want: dict, *, tolerance: float = 1e-5, but: tuple[str, ...] = ()) -> None:
    assert "error" not in want, want
    assert "error" not in got, got
    for name in ("loss", "grad_norm"):
        assert got[name] == pytest.approx(want[name], rel=tolerance, abs=tolerance), name
    assert largest_difference(got["parameters"], want["parameters"]) < tolerance
    for name in ("logged", "evaluated"):
        mine, others = (
            {key: x for key, x in one[name].items() if not key.startswith(but)}
            for one in (got, want)
        )
        assert mine == pytest.approx(others, rel=10 * tolerance, abs=tolerance), name
    assert got["batch"] == want["batch"]


def check(runs: dict[str, Run], world_size: int, folder, **sizes: int) -> None:
    """Every run split as sizes say, beside the same run on as many processes as have own rows."""
    whole = world_size // sizes["cp_size"]
    want = run_processes(whole, train, whole, runs, str(folder))[0]
    split = {name: run.split(**sizes) for name, run in runs.items()}
    ranks = run_processes(world_size, train, world_size, split, str(folder))
    for rank, got in enumerate(ranks):
        for name in runs:
            but = OF_PADDING if runs[name].trainer in ("orpo", "cpo") else ()
            but = OF_FIRST if runs[name].trainer == "async_grpo" and rank else but
            compare(got[name], want[name], but=but)


def test_two_ranks_take_the_steps_of_one_process(tmp_path):
    check(FEW, 2, tmp_path, cp_size=2)


def test_two_rows_of_two_ranks_take_the_steps_of_two_processes(tmp_path):
    names = "Trainer, accumulated, with metrics", "Trainer, logits reduced by token"
    check({name: FEW[name] for name in names}, 4, tmp_path, cp_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, len(MANY), 6))
def test_many_runs(start: int, tmp_path):
    names = list(MANY)[start : start + 6]
    check({name: MANY[name] for name in names}, 2, tmp_path, cp_size=2)


@pytest.mark.slow
def test_three_ranks_take_the_steps_of_one_process(tmp_path):
    names = (f"Trainer, images, {name}" for name in ("qwen2_vl", "gemma3", "llava_next"))
    runs = {name: WITH_IMAGES[name] for name in names}
    others = "SFT, packed, noise", "Trainer, noise", "Async GRPO, windows"
    check(runs | {name: (FEW | MANY)[name] for name in others}, 3, tmp_path, cp_size=3)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"cp_size": 4}, {"cp_size": 2, "dp_shard_size": 2}], ids=str)
def test_four_ranks(sizes: dict, tmp_path):
    grpo = {"per_device_train_batch_size": 2, "generation_batch_size": 8}  # of two groups
    runs = {name: FEW[name] for name in ("SFT, packed, LoRA", "DPO", "GRPO", "Async GRPO")}
    check(runs | {"GRPO, groups over ranks": Run("grpo", args=grpo)}, 4, tmp_path, **sizes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_a_run_resumes_in_the_middle_of_an_epoch_and_its_adapters_load_unsplit(tmp_path):
    run = Run("sft", "gemma3", PACKED, lora=True).split(2)
    for found in run_processes(2, resume, 2, run, str(tmp_path)):
        assert largest_difference(found["resumed"], found["whole"]) == 0
    loaded = PeftModel.from_pretrained(build("gemma3"), str(tmp_path / "checkpoint-5"))
    adapters = {k: x.detach() for k, x in loaded.named_parameters() if "lora" in k}
    trained = {k: found["whole"][k] for k in adapters}
    assert adapters and largest_difference(adapters, trained) == 0


@pytest.mark.parametrize(
    "state_dict_type",
    ["FULL_STATE_DICT", pytest.param("SHARDED_STATE_DICT", marks=pytest.mark.slow)],
)
def test_a_run_under_fsdp2_resumes_from_files_that_one_rank_wrote(state_dict_type: str, tmp_path):
    run = Run("trainer", args={"optim": "adamw_torch"}).split(2)
    for found in run_processes(2, resume, 2, run, str(tmp_path), state_dict_type):
        assert largest_difference(found["resumed"], found["whole"]) == 0
    if state_dict_type == "FULL_STATE_DICT":
        saved = torch.load(tmp_path / "checkpoint-5" / "pytorch_model_fsdp.bin")
        assert largest_difference(saved, found["whole"]) == 0


@pytest.mark.slow
def test_bf16_is_within_rounding(tmp_path):
    runs = {"SFT": Run("sft", args=PACKED | {"bf16": True}), "DPO": Run("dpo", args={"bf16": True})}
    (want,) = run_processes(1, train, 1, runs, str(tmp_path))
    split = {name: run.split(2) for name, run in runs.items()}
    for got in run_processes(2, train, 2, split, str(tmp_path)):
        for name in runs:
            assert got[name]["loss"] == pytest.approx(want[name]["loss"], rel=1e-2)
            assert got[name]["grad_norm"] == pytest.approx(want[name]["grad_norm"], rel=5e-2)


def test_trainers_and_settings_that_cannot_be_split_are_refused_before_the_first_batch(tmp_path):
    runs = {
        "fused": Run("trainer", "gemma3", {"use_liger_kernel": True}).split(2),
        "prompt": Run("sft", prompt_tuning=True).split(2),
    }
    first, second = run_processes(2, train, 2, runs, str(tmp_path))
    assert first == second
    assert "use_liger_kernel (True) cannot be honoured" in first["fused"]["error"]
    assert "for Gemma3ForCausalLM: Liger's kernels were tried in" in first["fused"]["error"]
    assert "PROMPT_TUNING puts tokens of its own" in first["prompt"]["error"]


def test_completions_are_counted_by_row_where_rows_were_split_after_parsing():
    from tilewise.integrations.transformers.internals import count_completions
    from tilewise.integrations.transformers.refusals import TRAINERS, refused

    given = {"per_device_train_batch_size": 4, "world_size": 4, "steps_per_generation": 2}
    args = SimpleNamespace(**given, generation_batch_size=32, num_generations=8)
    count_completions(args, 2)
    assert args.generation_batch_size == 16
    trainer = SimpleNamespace(args=args, accelerator=SimpleNamespace(num_processes=2))
    assert refused(TRAINERS, trainer) is None
    args.num_generations = 5
    text = r"num_generations \(5\) must divide the 16 completions .* \(4\) on 2 ranks .* \(2\)"
    assert re.search(text, str(refused(TRAINERS, trainer)))
    args.use_vllm = True
    assert "use_vllm (True) cannot be honoured" in str(refused(TRAINERS, trainer))


def test_an_older_liger_is_refused():
    from tilewise.integrations.transformers import liger, refusals

    for installed, refused in (
        ("0.5.10", True),
        ("0.8.4.dev1", True),
        ("0.8.5", False),
        ("1", False),
    ):
        asked = liger.WithLiger("LlamaForCausalLM", installed)
        error = str(refusals.refused(refusals.LIGER, asked))
        assert (f"liger-kernel ({installed}) must be" in error) == refused


def test_trainers_that_nobody_tried_are_refused_by_name():
    from transformers import Seq2SeqTrainer

    from tilewise.integrations.transformers.refusals import TRAINERS, refused

    trainer = Seq2SeqTrainer.__new__(Seq2SeqTrainer)
    trainer.args = None  # pyright: ignore
    assert "Seq2SeqTrainer cannot split its rows" in str(refused(TRAINERS, trainer))

"""The Trainer of transformers over a split sequence takes the same steps as over a whole one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

from processes.launcher import run_processes
from support.hf_models import SIZES
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import tilewise as tw
from tilewise.integrations import hf

NUM_TOKENS, STEPS = 61, 4


def documents() -> list[dict[str, Any]]:
    """Of many lengths; every third one padded on its right, as a tokenizer does."""
    make = torch.Generator().manual_seed(1)
    made = []
    for index, length in enumerate(torch.randint(3, 30, (40,), generator=make).tolist()):
        ids = torch.randint(3, 50, (length,), generator=make)
        padding = 5 * (index % 3 == 0)
        mask = torch.nn.functional.pad(torch.ones_like(ids), (0, padding))
        made.append(
            {"input_ids": torch.nn.functional.pad(ids, (0, padding)), "attention_mask": mask}
        )
    return made


def train(rank: int, world_size: int, num_cp: int, folder: str, options: dict) -> dict[str, list]:
    """Losses, gradient norms and the loss of evaluation."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # asked for, not used: it is joined
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ.update(address | ranks)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    fixed = {"report_to": "none", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    fixed |= {"max_steps": STEPS, "logging_steps": 1, "learning_rate": 1e-2}
    args = TrainingArguments(folder, **fixed, **options)
    mesh = init_device_mesh("cpu", (world_size // num_cp, num_cp), mesh_dim_names=("dp", "cp"))
    cp = tw.ContextParallel(mesh["cp"], num_tokens=NUM_TOKENS, mask=tw.Causal())
    data = {"train_dataset": documents(), "eval_dataset": documents()[:7]}
    trainer = Trainer(**hf.trainer_args(cp, model, args, **data))
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return {
        "loss": [log["loss"] for log in logs],
        "grad_norm": [log["grad_norm"] for log in logs],
        "eval_loss": [trainer.evaluate()["eval_loss"]],
    }


def test_split_training_is_training_on_one_process(tmp_path: Path):
    options = {"gradient_accumulation_steps": 2}
    (want,) = run_processes(1, train, 1, 1, str(tmp_path), options)
    for got in run_processes(2, train, 2, 2, str(tmp_path), options):
        for what, values in want.items():
            assert got[what] == pytest.approx(values, rel=1e-5), what


def test_packed_documents_have_the_loss_of_documents_one_by_one(tmp_path: Path):
    want_model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.load_state_dict(want_model.state_dict())
    cp = tw.ContextParallel(num_tokens=NUM_TOKENS, mask=tw.Causal())
    args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True)
    some = documents()[:2]
    trainer = Trainer(**hf.trainer_args(cp, model, args, eval_dataset=some))
    got = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        logits = [
            want_model(x["input_ids"][None], attention_mask=x["attention_mask"][None]).logits[0]
            for x in some
        ]
    kept = [int(x["attention_mask"].sum()) for x in some]
    each = [
        torch.nn.functional.cross_entropy(y[: n - 1], x["input_ids"][1:n], reduction="sum")
        for x, y, n in zip(some, logits, kept, strict=True)
    ]
    want = sum(each) / (sum(kept) - len(kept))
    assert got == pytest.approx(float(want), rel=1e-5)
    assert args.per_device_train_batch_size == 8  # the caller's are left alone


def test_arguments_that_a_split_sequence_cannot_honour(tmp_path: Path):
    cp = tw.ContextParallel(num_tokens=NUM_TOKENS, mask=tw.Causal())
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    raw = [{"text": "not tokenised"}]
    trainer = Trainer(
        **hf.trainer_args(cp, LlamaForCausalLM(LlamaConfig(**SIZES)), args, train_dataset=raw)
    )
    with pytest.raises(ValueError, match=r"an example has no input_ids: tokenise"):
        trainer.train()

    def on_rank(rank: int, group) -> None:
        plain = TrainingArguments(str(tmp_path), use_cpu=True)
        split = tw.ContextParallel(group, num_tokens=NUM_TOKENS, mask=tw.Causal())
        with pytest.raises(ValueError, match=f"process 0 of 1 is rank {rank} of 2"):
            hf.trainer_args(split, LlamaForCausalLM(LlamaConfig(**SIZES)), plain)

    tw.loopback(2, on_rank)

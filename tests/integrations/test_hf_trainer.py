"""The Trainer of transformers over a split sequence takes the same steps as over a whole one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

from accelerate.data_loader import IterableDatasetShard
from processes.launcher import run_processes
from support.hf_models import SIZES
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import tilewise as tw
from tilewise.integrations import hf
from tilewise.integrations.hf_trainer import PackedSequences, arguments

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "num_cp", "options"),
    [
        (2, 2, {"gradient_accumulation_steps": 2}),
        (4, 2, {}),
        (2, 2, {"bf16": True, "gradient_accumulation_steps": 2}),
    ],
    ids=["accumulated", "data parallel", "mixed precision"],
)
def test_split_training_is_training_on_one_process(
    world_size: int, num_cp: int, options: dict, tmp_path: Path
):
    accumulated = options.get("gradient_accumulation_steps", 1) * world_size // num_cp
    alone = {**options, "gradient_accumulation_steps": accumulated}
    tolerance = 1e-2 if "bf16" in options else 1e-4
    (want,) = run_processes(1, train, 1, 1, str(tmp_path), alone)
    ranks = run_processes(world_size, train, world_size, num_cp, str(tmp_path), options)
    for got in ranks:
        for what in ("loss", "grad_norm"):
            assert got[what] == pytest.approx(want[what], rel=tolerance), what
        if world_size == num_cp:  # else the last sequence is evaluated twice
            assert got["eval_loss"] == pytest.approx(want["eval_loss"], rel=tolerance / 10)


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


def test_every_rank_of_a_sequence_reads_it_and_every_document_is_read_once_an_epoch():
    given = {"num_copies": 2, "num_readers": 4}
    orders = []
    for epoch in range(2):
        data = PackedSequences(documents(), NUM_TOKENS, **given, seed=3)
        data.set_epoch(epoch)
        items = list(data)
        assert len(items) == len(data)
        assert all(a is b for a, b in zip(items[::2], items[1::2], strict=True))
        orders.append([len(x["input_ids"]) for sequence in items[::2] for x in sequence])
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    assert sorted(orders[0]) == sorted(len(x["input_ids"]) for x in documents())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_accelerate_deals_the_same_sequences_to_ranks_of_one(num_workers: int):
    """Two ranks a sequence, two sequences a step; also where workers read in turns."""
    data = PackedSequences(documents(), NUM_TOKENS, num_copies=2, num_readers=4)
    assert len(data.groups) % 2 == 0
    got = []
    for process in range(4):
        shard = IterableDatasetShard(data, num_processes=4, process_index=process)
        loader = DataLoader(shard, num_workers=num_workers, collate_fn=_lengths)
        got.append([lengths for (lengths,) in loader])
    assert got[0] == got[1] and got[2] == got[3]
    want = _lengths([[data.documents[i] for i in group] for group in data.groups])
    assert [x for pair in zip(got[0], got[2], strict=True) for x in pair] == want


def _lengths(batch: list) -> list:
    return [[len(document["input_ids"]) for document in sequence] for sequence in batch]


def test_a_model_whose_class_disowns_num_items_in_batch_is_given_it(tmp_path: Path):
    """Else the Trainer takes the mean over ranks' shares of the loss."""

    class Disowns(LlamaForCausalLM):
        accepts_loss_kwargs = False

    cp = tw.ContextParallel(num_tokens=NUM_TOKENS, mask=tw.Causal())
    args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True)
    trainer = Trainer(**hf.trainer_args(cp, Disowns(LlamaConfig(**SIZES)), args))
    assert trainer.model_accepts_loss_kwargs


def test_noise_on_embeddings_is_that_of_the_whole_sequence(tmp_path: Path):
    def on_rank(rank: int, group) -> float:
        layout = tw.contiguous(NUM_TOKENS, 2)
        cp = tw.ContextParallel(group, num_tokens=NUM_TOKENS, mask=tw.Causal(), layout=layout)
        place = {"world_size": 2, "process_index": rank}
        given_class = type("OfTwo", (TrainingArguments,), place)
        given = given_class(str(tmp_path), use_cpu=True, neftune_noise_alpha=5.0)
        args = arguments(cp, given, {}, masked=False)["args"]
        assert given.neftune_noise_alpha == 5.0
        return args.neftune_noise_alpha / layout.size(rank) ** 0.5

    assert tw.loopback(2, on_rank) == pytest.approx([5.0 / NUM_TOKENS**0.5] * 2)


def test_arguments_that_a_split_sequence_cannot_honour(tmp_path: Path):
    cp = tw.ContextParallel(num_tokens=NUM_TOKENS, mask=tw.Causal())
    args = TrainingArguments(str(tmp_path), use_cpu=True, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match=r"label_smoothing_factor \(0.1\) must be 0"):
        hf.trainer_args(cp, LlamaForCausalLM(LlamaConfig(**SIZES)), args)

    def on_rank(rank: int, group) -> None:
        plain = TrainingArguments(str(tmp_path), use_cpu=True)
        split = tw.ContextParallel(group, num_tokens=NUM_TOKENS, mask=tw.Causal())
        with pytest.raises(ValueError, match=f"process 0 of 1 is rank {rank} of 2"):
            hf.trainer_args(split, LlamaForCausalLM(LlamaConfig(**SIZES)), plain)

    tw.loopback(2, on_rank)

"""Train a small Llama with the Trainer of transformers, its sequence split over ranks.

    torchrun --nproc-per-node 4 examples/hf_trainer.py

The text is Python's own standard library: documents of any length, those of a batch packed into one
row. Then rank 0 trains the same model with nothing split and prints both losses of every step. One
argument is not what any other Trainer script has: parallelism_config.
"""

import argparse
import copy
import logging
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from tilewise.integrations.accelerate import ParallelismConfig
from tilewise_tools import demo

Examples = list[dict[str, list[int]]]
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)


def documents(longest: int, count: int) -> Examples:
    """Texts of Python's standard library as bytes, those that fit."""
    texts = [text for text in demo.documents() if len(text) <= longest][:count]
    return [{"input_ids": list(text)} for text in texts]


def train_split(model: LlamaForCausalLM, args: argparse.Namespace) -> list[float]:
    """Losses of every step, by transformers' Trainer; under torchrun over all ranks."""
    options = TrainingArguments(
        output_dir="out/hf_trainer",
        parallelism_config=ParallelismConfig(cp_size=args.cp_size),
        per_device_train_batch_size=args.documents_per_step,
        max_steps=args.steps,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        train_sampling_strategy="sequential",  # train_whole reads in order
        use_cpu=True,
        ddp_find_unused_parameters=False,
    )
    texts = documents(args.longest, args.steps * args.documents_per_step)
    trainer = Trainer(
        model, options, train_dataset=texts, data_collator=DataCollatorWithFlattening()
    )
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def train_whole(model: LlamaForCausalLM, args: argparse.Namespace) -> Iterator[float]:
    """The same losses with nothing split: attention of transformers, a loop, AdamW."""
    collate = DataCollatorWithFlattening()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    texts = documents(args.longest, args.steps * args.documents_per_step)
    for start in range(0, len(texts), args.documents_per_step):
        loss = model(**collate(texts[start : start + args.documents_per_step])).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield float(loss.detach())


def main(argv: list[str] | None = None) -> None:
    """Train split, train whole, compare."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--cp-size", type=int, help="ranks that share a row; None: all")
    parser.add_argument("--longest", type=int, default=1000, help="tokens of a document at most")
    parser.add_argument("--documents-per-step", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    args = parser.parse_args(argv)
    args.cp_size = args.cp_size or int(os.environ.get("WORLD_SIZE", "1"))
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    other = copy.deepcopy(model)
    split = train_split(model, args)
    if dist.is_initialized() and dist.get_rank():
        return
    whole = list(train_whole(other, args))
    for step, (a, b) in enumerate(zip(split, whole, strict=True), start=1):
        print(f"step {step:2}: loss {a:.6f} split, {b:.6f} whole")
    worst = max(abs(a - b) / b for a, b in zip(split, whole, strict=True))
    print(f"largest relative difference {worst:.1e}")
    if not worst < 1e-5:
        raise SystemExit("split and unsplit training differ")


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

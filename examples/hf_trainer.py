"""Train a small Llama with the Trainer of transformers, its sequence split over ranks.

    torchrun --nproc-per-node 4 examples/hf_trainer.py

The text is Python's own standard library: documents of any length, packed into sequences. Then rank
0 trains the same model with nothing split and prints both losses of every step. Two lines are not
what any other Trainer script has: ContextParallel and hf.trainer_args.
"""

import argparse
import copy
import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import tilewise as tw
from tilewise.integrations import hf
from tilewise.integrations.data import ShardingCollator, pack
from tilewise.tools import demo

Examples = list[dict[str, Tensor]]
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)


def documents(num_tokens: int, count: int) -> Examples:
    """Texts of Python's standard library as bytes, those that fit."""
    texts = [text for text in demo.documents() if len(text) <= num_tokens][:count]
    return [{"input_ids": torch.tensor(list(text))} for text in texts]


def train_split(model: LlamaForCausalLM, args: argparse.Namespace) -> list[float]:
    """Losses of every step, by transformers' Trainer; under torchrun over all ranks."""
    options = TrainingArguments(
        output_dir="out/hf_trainer",
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
    texts = documents(args.num_tokens, args.documents)
    cp = tw.ContextParallel(num_tokens=args.num_tokens, mask=tw.Causal())
    trainer = Trainer(**hf.trainer_args(cp, model, options, train_dataset=texts))
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def train_whole(model: LlamaForCausalLM, args: argparse.Namespace) -> Iterator[float]:
    """The same losses with nothing split: attention of transformers, a loop, AdamW."""
    collate = ShardingCollator(tw.contiguous(args.num_tokens, 1), 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    texts = documents(args.num_tokens, args.documents)
    sequences = pack(map(len, (text["input_ids"] for text in texts)), args.num_tokens)
    for sequence in sequences[: args.steps]:
        loss = model(**collate([texts[index] for index in sequence])).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield float(loss.detach())


def main(argv: list[str] | None = None) -> None:
    """Train split, train whole, compare."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--num-tokens", type=int, default=1021, help="need not divide by the ranks")
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    args = parser.parse_args(argv)
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

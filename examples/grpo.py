"""TRL's GRPO with LoRA, every row split over ranks.

    torchrun --nproc-per-node 4 examples/grpo.py --cp-size 2

Completions are generated unsplit; policy and reference run over the rows of prompts and completions
split. Model and data are those of sft_lora.py: tiny, random, and nothing is downloaded.
"""

import argparse
import logging
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig
from sft_lora import CONFIG, texts, tokenizer
from transformers import Gemma3ForCausalLM
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from tilewise.integrations.accelerate import ParallelismConfig


def distinct(completions: list[str], **_: Any) -> list[float]:
    """The reward of a completion: how many of its words are distinct."""
    return [float(len(set(completion.split()))) for completion in completions]


def train(args: argparse.Namespace) -> list[float]:
    """The mean reward of every step."""
    settings: dict[str, Any] = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    torch.manual_seed(0)
    trainer = GRPOTrainer(
        Gemma3ForCausalLM(CONFIG),
        reward_funcs=distinct,
        args=GRPOConfig(
            "out/grpo",
            parallelism_config=ParallelismConfig(cp_size=args.cp_size),
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=32,
            beta=0.04,
            max_steps=args.steps,
            learning_rate=1e-2,
            logging_steps=1,
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
            **settings,
        ),
        train_dataset=texts(100).rename_column("text", "prompt"),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    return [log["reward"] for log in trainer.state.log_history if "reward" in log]


def main(argv: list[str] | None = None) -> None:
    """Train, and print the rewards from rank 0."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--cp-size", type=int, help="ranks that share each row")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args(argv)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    rewards = train(args)
    if not (dist.is_initialized() and dist.get_rank()):
        print("rewards", " ".join(f"{reward:.4f}" for reward in rewards))


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

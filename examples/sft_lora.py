"""TRL's SFT with packing and LoRA, every row split over ranks.

    torchrun --nproc-per-node 4 examples/sft_lora.py --cp-size 2

One argument is not in any other script: parallelism_config. The model is tiny and random, the data
are words, and nothing is downloaded. Processes that --cp-size leaves are data-parallel.
"""

import argparse
import logging
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from tilewise.integrations.accelerate import ParallelismConfig

WORDS = 96
CONFIG = Gemma3TextConfig(
    vocab_size=WORDS + 4,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    sliding_window=16,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Words w0, w1, ... and four special tokens."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(WORDS))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def texts(count: int) -> Dataset:
    """Texts of 10 to 80 words, in which each word is followed by the next one."""
    make = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 81, (count,), generator=make).tolist()
    starts = torch.randint(0, WORDS, (count,), generator=make).tolist()
    words = [
        [(start + i) % WORDS for i in range(n)] for start, n in zip(starts, lengths, strict=True)
    ]
    return Dataset.from_dict({"text": [" ".join(f"w{i}" for i in text) for text in words]})


def train(args: argparse.Namespace) -> list[float]:
    """The loss of every step."""
    settings: dict[str, Any] = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    torch.manual_seed(0)
    trainer = SFTTrainer(
        Gemma3ForCausalLM(CONFIG),
        SFTConfig(
            "out/sft_lora",
            parallelism_config=ParallelismConfig(cp_size=args.cp_size),
            packing=True,
            max_length=256,
            max_steps=args.steps,
            learning_rate=1e-2,
            logging_steps=1,
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
            **settings,
        ),
        train_dataset=texts(400),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def main(argv: list[str] | None = None) -> None:
    """Train, and print the losses from rank 0."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--cp-size", type=int, help="ranks that share each row")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args(argv)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    losses = train(args)
    if not (dist.is_initialized() and dist.get_rank()):
        print("losses", " ".join(f"{loss:.6f}" for loss in losses))


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

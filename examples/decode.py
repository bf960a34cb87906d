"""Continue texts with the model that train_lm trained, its caches split over ranks.

    torchrun --nproc-per-node 4 examples/train_lm.py --steps 300 --save out/model.pt
    torchrun --nproc-per-node 4 examples/decode.py --model out/model.pt

Prompts of different length are one batch. Their tokens are prefilled in chunks, sharded over the
ranks; then each new token is decoded on every rank, against keys that stay where they are: only
(out, lse) of one token travels. Rank 0 also continues each prompt by itself, with nothing split and
nothing cached; the tokens must be the same. Plain python is one rank.
"""

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

import tilewise as tw
from tilewise.expressions import read_plan
from tilewise.transport.protocol import Transport
from tilewise.transport.resolve import transport_for

try:
    from examples.train_lm import Attention, Config, Llama, Whole, ranks
except ModuleNotFoundError:  # run as a script: the path has this folder, not the one above it
    from train_lm import Attention, Config, Llama, Whole, ranks

PROMPTS = (
    "def read(self, size=-1):\n",
    'class Path(PurePath):\n    """A path that can be opened and listed.\n\n    Its methods ask',
    "import os\nimport sys\nfrom collections import deque\n\n\ndef walk(top, topdown=True",
)


@dataclass(frozen=True)
class Continued:
    """What was decoded, and what it took on this rank.

    Attributes:
        tokens: the new ones of each prompt.
        seconds: of the decoding steps alone.
        sent, gathering: bytes that this rank sent for decoding, and would have sent at the last
            step to bring every rank all keys and values.
    """

    tokens: list[list[int]]
    seconds: float
    sent: int
    gathering: int


class Cached:
    """The model and a cache for each of its layers."""

    def __init__(self, model: Llama, batch: int, num_tokens: int, group: Transport) -> None:
        self.model, self.group = model, group
        c, weight = model.config, model.embedding.weight
        sizes = {"num_kv_heads": c.num_kv_heads, "head_dim": c.head_dim, "batch": batch}
        kind = {"dtype": weight.dtype, "device": weight.device, "group": group}
        self.caches = [tw.KVCache(num_tokens, **sizes, **kind) for _ in model.blocks]

    def prefill(self, tokens: list[list[int]], plan: tw.Plan) -> None:
        """Cache the next tokens of each sequence."""
        chunk = self.caches[0].chunk([len(part) for part in tokens])
        packed = torch.tensor([token for part in tokens for token in part])
        caches = iter(self.caches)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return next(caches).prefill(q, k, v, chunk, plan=plan)

        position_ids = chunk.position_ids(self.group.rank)
        self.model(chunk.layout.shard(packed, self.group.rank), position_ids, attend)

    def decode(self, tokens: Tensor) -> Tensor:
        """Cache one token of each sequence; the logits of what follows, the same on every rank."""
        caches = iter(self.caches)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return next(caches).decode(q[:, None], k[:, None], v[:, None])[:, 0]

        return self.model(tokens, torch.tensor(self.caches[0].lengths), attend)

    def gathering(self) -> int:
        """Bytes that this rank sends to bring every rank all keys and values; counted, not used."""
        before = self.group.bytes_sent
        for cache in self.caches:
            layout = cache.chunk([0] * cache.shape.batch).kv_layout
            for x in cache.stored():
                whole = tw.ContextParallel(
                    self.group, num_tokens=layout.num_tokens, layout=layout
                ).unshard(x)
                assert len(whole) == sum(cache.lengths)
        return self.group.bytes_sent - before


def chunks(prompts: list[list[int]], size: int) -> Iterator[list[list[int]]]:
    """Of every prompt its next `size` tokens, all but the last, which the first step decodes."""
    longest = max(map(len, prompts)) - 1
    for start in range(0, longest, size):
        yield [prompt[:-1][start : start + size] for prompt in prompts]


@torch.no_grad()
def continued(
    model: Llama, prompts: list[list[int]], args: argparse.Namespace, group: Transport
) -> Continued:
    """Every prompt continued by greedy decoding, over the ranks of a group."""
    capacity = max(map(len, prompts)) + args.num_tokens
    cached = Cached(model, len(prompts), capacity, group)
    plan = read_plan(args.strategy, group.world_size)
    for chunk in chunks(prompts, args.chunk):
        cached.prefill(chunk, plan)
    before, start = group.bytes_sent, time.perf_counter()
    steps = [torch.tensor([prompt[-1] for prompt in prompts])]
    for _ in range(args.num_tokens):
        steps.append(cached.decode(steps[-1]).argmax(-1))
    seconds, sent = time.perf_counter() - start, group.bytes_sent - before
    tokens = torch.stack(steps[1:], 1).tolist()
    return Continued(tokens, seconds, sent, cached.gathering())


@torch.no_grad()
def unsplit(model: Llama, prompt: list[int], num_tokens: int) -> list[int]:
    """As continued, for one prompt in this process: all tokens anew for each, without a cache."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        attention: Attention = Whole().attention(tw.Causal(), len(tokens))
        logits = model(torch.tensor(tokens), torch.arange(len(tokens)), attention)
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]


def load(path: Path) -> Llama:
    """The model that train_lm --save wrote.

    Raises:
        SystemExit: if it is not there, with the command that makes it.
    """
    if not path.exists():
        raise SystemExit(
            f"no model at {path}; train one: python examples/train_lm.py --save {path}"
        )
    saved = torch.load(path)
    model = Llama(Config(**saved["config"]))
    model.load_state_dict(saved["model"])
    return model.to(saved["model"]["embedding.weight"].dtype)


def report(found: Continued, prompts: list[str], console: Console) -> None:
    """The texts, tokens per second, and bytes per token of all ranks' average."""
    for prompt, tokens in zip(prompts, found.tokens, strict=True):
        text = bytes(tokens).decode(errors="replace")
        console.rule(style="dim")
        console.print(prompt, style="bold", end="", markup=False, highlight=False)
        console.print(text, markup=False, highlight=False)
    console.rule(style="dim")
    num_steps, num_tokens = len(found.tokens[0]), sum(map(len, found.tokens))
    console.print(f"{num_tokens / found.seconds:,.0f} tokens a second, {len(prompts)} at a time")
    sent, gathering = (summed(x) for x in (found.sent, found.gathering))
    per_step = sent / num_steps
    console.print(
        f"{per_step:,.0f} bytes a step over all {ranks()[1]} ranks; gathering the cache on every "
        f"rank, at its last length: {gathering:,.0f}"
    )


def summed(x: int) -> int:
    """Over all ranks."""
    total = torch.tensor(x)
    if dist.is_initialized():
        dist.all_reduce(total)
    return int(total)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("out/model.pt"))
    parser.add_argument("--num-tokens", type=int, default=200, help="new ones of each prompt")
    parser.add_argument("--chunk", type=int, default=32, help="tokens of a prompt at a time")
    parser.add_argument("--strategy", default="ring", help='of prefill, as in "mesh(4, q_tile=2)"')
    parser.add_argument("--prompt", action="append", help="a text to continue; may be repeated")
    parser.add_argument("--compare", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> Continued:
    """Load, continue, report, compare."""
    args = arguments(argv)
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo")
    console = Console(quiet=ranks()[0] != 0)
    model, texts = load(args.model), args.prompt or [*PROMPTS]
    prompts = [[*text.encode()] for text in texts]
    found = continued(model, prompts, args, transport_for(None))
    report(found, texts, console)
    if ranks()[0] == 0 and args.compare:
        whole = [unsplit(model, prompt, args.num_tokens) for prompt in prompts]
        same = whole == found.tokens
        console.print(f"as unsplit greedy decoding, token for token: {'yes' if same else 'NO'}")
        if not same:
            raise SystemExit("split and unsplit decoding differ")
    if dist.is_initialized():
        dist.barrier()
    return found


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

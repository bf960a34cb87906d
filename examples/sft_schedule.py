"""Fine-tune on documents of long-tailed lengths over dp x cp ranks with FSDP2, stop, and resume.

    torchrun --nproc-per-node 4 examples/sft_schedule.py --steps 20
    torchrun --nproc-per-node 4 examples/sft_schedule.py --steps 40 --resume

Lengths are those of a corpus (`tw.lengths`), the text is Python's standard library. There is no dp
and no cp to choose: `tw.schedule` spreads every document over the ranks that it needs, with as many
tokens on all ranks in every step, so that FSDP2 sees equal shapes. Worker processes choose the
documents, plan and collate (`step.prepare`). A checkpoint has the schedule's state beside model and
optimizer. At the end rank 0 trains the same model with nothing split, on plain dense attention of
torch, and both loss curves must agree to rounding. The model is train_lm's, checkpoints are
fsdp_cp's. Plain python is one rank.
"""

import argparse
import json
import os
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader

import tilewise as tw
from tilewise.batches.schedule import BatchStep, StepStream
from tilewise.integrations.data import ShardingCollator
from tilewise_tools import demo

try:
    from examples import fsdp_cp, train_lm
except ModuleNotFoundError:  # run as a script: the path has this folder, not the one above it
    import fsdp_cp
    import train_lm

Shares = tuple[dict[str, Any], train_lm.Attention, dict[str, Tensor]]
"""The schedule's state after a step, this process's attention, and what the model is called with.
"""


class Corpus:
    """Documents of a corpus's lengths, and the steps that they make on all ranks.

    Attributes:
        lengths: of the documents, none longer than a step.
        dtype: of the model, by name.
        state: of the schedule, after the last step that was trained.
    """

    state: dict[str, Any]

    def __init__(self, args: argparse.Namespace, world_size: int) -> None:
        room = world_size * args.tokens_per_rank
        total = (args.steps + 5) * room  # enough for the last step to look ahead as the first did
        cu = tw.lengths.sample(args.corpus, total, seed=args.seed, cap=room)
        self.lengths, self.dtype = np.diff(cu).tolist(), args.dtype
        self.starts = np.array(cu) % (1 << 20)
        self.text = np.frombuffer(b"\n".join(demo.documents()), np.uint8)
        config = train_lm.Config()
        self.steps: StepStream = tw.schedule(
            self.lengths,
            world_size=world_size,
            tokens_per_rank=args.tokens_per_rank,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            machine=tw.Machine.preset("cpu-gloo"),
            seed=args.seed,
        )

    def examples(self, step: BatchStep) -> list[dict[str, Tensor]]:
        places = [self.starts[i] + np.arange(self.lengths[i]) for i in step.documents]
        texts = [self.text[place % len(self.text)].astype(np.int64) for place in places]
        return [{"input_ids": torch.from_numpy(text)} for text in texts]


class ForRank:
    """A worker's collate function: what one rank needs of a step."""

    def __init__(self, corpus: Corpus, rank: int) -> None:
        self.corpus, self.rank = corpus, rank

    def __call__(self, step: BatchStep) -> tuple[dict[str, Any], tw.Plan, dict[str, Tensor]]:
        batch = ShardingCollator(step.layout, self.rank)(self.corpus.examples(step))
        return step.state, step.prepare(self.rank, dtype=self.corpus.dtype), batch


class AllRanks:
    """Every step split over all ranks; parameters sharded over them."""

    def __init__(self, workers: int) -> None:
        self.rank, self.world_size = train_lm.ranks()
        self.workers = workers

    def place(self, model: train_lm.Llama) -> None:
        if self.world_size == 1:
            return
        mesh = init_device_mesh("cpu", (self.world_size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def batches(self, corpus: Corpus) -> Iterator[Shares]:
        collate = ForRank(corpus, self.rank)
        loader = DataLoader(
            corpus.steps, batch_size=None, num_workers=self.workers, collate_fn=collate
        )
        for state, prepared, batch in loader:
            yield state, partial(tw.attention, plan=prepared), batch

    def sum(self, x: Tensor) -> None:
        if self.world_size > 1:
            dist.all_reduce(x)


class Whole:
    """One process with every token of a step, and torch's own attention."""

    world_size = 1

    def place(self, model: train_lm.Llama) -> None:
        """Parameters stay whole."""

    def batches(self, corpus: Corpus) -> Iterator[Shares]:
        for step in corpus.steps:
            layout = tw.contiguous(step.num_tokens, 1)
            batch = ShardingCollator(layout, 0)(corpus.examples(step))
            yield step.state, train_lm.Whole().attention(step.mask, step.num_tokens), batch

    def sum(self, x: Tensor) -> None:
        """There is one share."""


Way = AllRanks | Whole


def train_step(
    model: train_lm.Llama,
    optimizer: fsdp_cp.Optimizer,
    way: Way,
    attention: train_lm.Attention,
    batch: dict[str, Tensor],
) -> float:
    """One step; the loss is the mean over all labels of the step, of all ranks."""
    optimizer.zero_grad()
    tokens, labels, position_ids = (
        batch[name][0] for name in ("input_ids", "shift_labels", "position_ids")
    )
    logits = model(tokens, position_ids, attention)
    total = F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
    loss = total / batch["num_items_in_batch"]
    # Each rank has a share of the mean, and shares add up; FSDP averages, hence the factor.
    (loss * way.world_size).backward()
    optimizer.step()
    mean = loss.detach()
    way.sum(mean)
    return float(mean)


def train(
    model: train_lm.Llama,
    optimizer: fsdp_cp.Optimizer,
    way: Way,
    corpus: Corpus,
    steps: range,
    console: Console,
) -> list[float]:
    """The losses of the schedule's next steps; corpus.state is its state after them."""
    losses = []
    for state, attention, batch in islice(way.batches(corpus), len(steps)):
        losses.append(train_step(model, optimizer, way, attention, batch))
        corpus.state = state
        console.print(f"step {state['steps']}: loss {losses[-1]:.3f} nats per byte")
    return losses


def state_file(args: argparse.Namespace, step: int) -> Path:
    """Where the schedule's state after a number of steps is."""
    return args.out / f"schedule-{step:06}.json"


def compare(split: list[float], steps: range, args: argparse.Namespace) -> float:
    """Train with nothing split from the first step on; the largest relative loss difference."""
    corpus, way = Corpus(args, train_lm.ranks()[1]), Whole()
    model, optimizer = fsdp_cp.start(way, args)
    quiet = Console(quiet=True)
    whole = train(model, optimizer, way, corpus, range(steps.stop), quiet)[steps.start :]
    a, b = torch.tensor([split, whole], dtype=torch.float64)
    worst = float(((a - b) / b).abs().max())
    found = {"steps": [steps.start, steps.stop], "split": split, "whole": whole, "worst": worst}
    (args.out / "losses.json").write_text(json.dumps(found, indent=2) + "\n")
    return worst


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = fsdp_cp.parser_of(__doc__, "out/sft_schedule")
    parser.add_argument("--tokens-per-rank", type=int, default=256)
    parser.add_argument("--corpus", choices=tw.lengths.corpora(), default="pile")
    parser.add_argument("--workers", type=int, default=2, help="processes that plan, of each rank")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Train or resume, save, compare."""
    args = arguments(argv)
    way, console = AllRanks(args.workers), Console(quiet=train_lm.ranks()[0] != 0)
    model, optimizer = fsdp_cp.start(way, args)
    first = fsdp_cp.resume(model, optimizer, args.out) if args.resume else 0
    steps = range(first, args.steps)
    if not steps:
        raise SystemExit(f"--steps ({args.steps}) must be more than the {first} of the checkpoint")
    corpus = Corpus(args, way.world_size)
    if first:
        corpus.steps.load_state_dict(json.loads(state_file(args, first).read_text()))
    losses = train(model, optimizer, way, corpus, steps, console)
    if way.rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        state_file(args, args.steps).write_text(json.dumps(corpus.state))
    fsdp_cp.save(model, optimizer, args.steps, args.out)
    if args.compare and way.rank == 0:
        worst = compare(losses, steps, args)
        console.print(f"largest relative difference of losses to unsplit training: {worst:.1e}")
        if not worst <= train_lm.TOLERANCES[args.dtype][0]:
            raise SystemExit("split and unsplit training differ")
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

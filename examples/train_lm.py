"""Train a small byte-level language model with its sequence split over ranks, on real text.

    torchrun --nproc-per-node 4 examples/train_lm.py --steps 60

The model is a small Llama (RoPE, grouped queries, RMSNorm, SwiGLU), the text Python's own standard
library, each top-level definition a document, packed end to end and masked apart. Then rank 0
trains the same model with nothing split, on plain dense attention of torch, and both loss curves
must agree to rounding; a plot (by matplotlib, of the extra `report`) and a JSON file of them are
written. Plain python is one rank.

A run may stop and go on, also on another number of ranks. With `--reduction canonical` that changes
no bit of the losses:

    torchrun --nproc-per-node 2 examples/train_lm.py --steps 30 --save out/half.pt
    torchrun --nproc-per-node 4 examples/train_lm.py --steps 60 --resume out/half.pt
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise as tw
from tilewise import lengths
from tilewise.expressions import read_plan
from tilewise_tools import demo
from tilewise_tools.doctor import require

PLAIN = tw.wire.Plain("bfloat16")
WIRES = {
    "none": tw.wire.Wires(),
    "bfloat16": tw.wire.Wires(PLAIN, PLAIN, PLAIN),
    "float8": tw.wire.Wires(tw.wire.Float8(), tw.wire.Float8(), PLAIN),
}
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Run = Callable[..., Any]
"""Runs a layer on tensors of rows: (layer, *tensors)."""
# Largest difference of a loss, relative, and of a parameter. The default run over 4 ranks has
# 2.9e-16 and 3.7e-14; with --dtype float32 1.5e-7 and 4.4e-5. Longer runs drift further.
TOLERANCES = {"float64": (1e-13, 1e-10), "float32": (1e-4, 1e-2)}


@dataclass(frozen=True)
class Config:
    """The model's shape."""

    width: int = 96
    num_layers: int = 3
    num_heads: int = 6
    num_kv_heads: int = 2
    hidden: int = 256
    vocabulary: int = 256

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads


class Projections(nn.Module):
    """Queries, keys and values of normalised rows; RoPE turns the first two."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        c = config
        self.head_dim = c.head_dim
        self.norm = nn.RMSNorm(c.width, eps=1e-6)
        self.q = nn.Linear(c.width, c.num_heads * c.head_dim, bias=False)
        self.kv = nn.Linear(c.width, 2 * c.num_kv_heads * c.head_dim, bias=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.norm(x)
        turn = angles(position_ids, self.head_dim).to(y.dtype)
        q = self.q(y).unflatten(-1, (-1, self.head_dim))
        k, v = self.kv(y).unflatten(-1, (-1, self.head_dim)).chunk(2, -2)
        return rotated(q, turn), rotated(k, turn), v


class Update(nn.Module):
    """What attention found, then a SwiGLU on normalised rows, each added to the stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        c = config
        self.out = nn.Linear(c.num_heads * c.head_dim, c.width, bias=False)
        self.norm = nn.RMSNorm(c.width, eps=1e-6)
        self.up = nn.Linear(c.width, 2 * c.hidden, bias=False)
        self.down = nn.Linear(c.hidden, c.width, bias=False)

    def forward(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.out(attended.flatten(-2))
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Head(nn.Module):
    """Logits of normalised rows, by the embedding's own weight."""

    def __init__(self, config: Config, embedding: nn.Embedding) -> None:
        super().__init__()
        self.norm, self.embedding = nn.RMSNorm(config.width, eps=1e-6), embedding

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) @ self.embedding.weight.T


class Losses(nn.Module):
    """The loss of each token; 0 where its label is -100."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)


LOSSES = Losses()


def run_whole(module: nn.Module, *inputs: Tensor) -> Any:
    """Run a layer that treats each token by itself on all rows at once."""
    return module(*inputs)


class Block(nn.Module):
    """Attention and a SwiGLU, each on normalised input and added to the stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.project, self.update = Projections(config), Update(config)

    def forward(self, x: Tensor, position_ids: Tensor, attention: Attention, run: Run) -> Tensor:
        q, k, v = run(self.project, x, position_ids)
        return run(self.update, x, attention(q, k, v))


class Llama(nn.Module):
    """Tokens [num_tokens] and their positions to logits [num_tokens, vocabulary].

    Its layers but attention treat each token by itself; `run` may run them on blocks of tokens.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.num_layers)])
        self.head = Head(config, self.embedding)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(
        self, tokens: Tensor, position_ids: Tensor, attention: Attention, run: Run = run_whole
    ) -> Tensor:
        x = run(self.embedding, tokens)
        for block in self.blocks:
            x = block(x, position_ids, attention, run)
        return run(self.head, x)


def angles(position_ids: Tensor, head_dim: int) -> Tensor:
    """Cosines and sines of RoPE's angles, fp64 [2, num_tokens, 1, head_dim / 2]."""
    rates = 10000.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turned = position_ids[:, None, None] * rates
    return torch.stack([turned.cos(), turned.sin()])


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """RoPE: each pair of features (i, i + head_dim / 2) turned by its angle."""
    (a, b), (cos, sin) = x.chunk(2, -1), turn
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@dataclass(frozen=True)
class Batch:
    """One packed sequence: every tensor [num_tokens]; labels -100 at each document's end."""

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    mask: tw.masks.Mask


def batches(num_tokens: int, seed: int) -> Iterator[Batch]:
    """Packed documents without end, in a seeded order."""
    texts = demo.documents()
    make = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randint(len(texts), (num_tokens,), generator=make).tolist()
        packed, cu_seqlens = demo.pack((texts[i] for i in order), num_tokens)
        tokens = torch.from_numpy(packed.astype("int64"))
        yield Batch(
            tokens,
            lengths.shift_labels(tokens, cu_seqlens),
            torch.from_numpy(lengths.position_ids(cu_seqlens)),
            tw.Causal() & tw.Document(cu_seqlens),
        )


class Whole:
    """Nothing split: this process has every token and torch's own attention."""

    def shard(self, x: Tensor) -> Tensor:
        return x

    def attention(self, mask: tw.masks.Mask, num_tokens: int) -> Attention:
        positions = torch.arange(num_tokens)
        allowed = torch.as_tensor(mask.dense(positions, positions))

        def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads_first = (x.transpose(0, 1) for x in (q, k, v))
            out = F.scaled_dot_product_attention(*heads_first, attn_mask=allowed, enable_gqa=True)
            return out.transpose(0, 1)

        return dense

    def run(self, module: nn.Module, *inputs: Tensor) -> Any:
        return module(*inputs)

    def mean(self, losses: Tensor, count: Tensor) -> Tensor:
        return losses.sum() / count

    def sum_gradients(self, model: nn.Module) -> None:
        """This process has all of them."""


class Split:
    """The sequence split over the ranks of the default group, if there is one."""

    def __init__(
        self,
        num_tokens: int,
        strategy: str,
        wire: str = "none",
        reduction: Literal["fast", "canonical"] = "fast",
    ) -> None:
        self.wire = WIRES[wire]
        plan = "auto" if strategy == "auto" else read_plan(strategy, ranks()[1])
        self.cp = tw.ContextParallel(
            num_tokens=num_tokens, mask=tw.Causal(), strategy=plan, reduction=reduction
        )
        self.run = self.cp.by_blocks
        self.mean = self.cp.mean
        self.sum_gradients = self.cp.sum_gradients

    def shard(self, x: Tensor) -> Tensor:
        return self.cp.shard(x, dim=0)

    def attention(self, mask: tw.masks.Mask, num_tokens: int) -> Attention:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.cp.attention(q, k, v, mask=mask, wire=self.wire)

        return attend


Way = Whole | Split
SETTINGS = ("num_tokens", "dtype", "learning_rate", "seed")
"""Arguments that a run that goes on has in common with the one that stopped."""


class Trained(NamedTuple):
    """A model after some steps, and the loss of each step so far."""

    model: Llama
    optimizer: torch.optim.AdamW
    losses: list[float]

    def save(self, args: argparse.Namespace) -> None:
        """Write all that a run needs to go on; the first rank alone does."""
        args.save.parent.mkdir(parents=True, exist_ok=True)
        run = {"config": asdict(self.model.config), "losses": self.losses}
        run |= {name: getattr(args, name) for name in SETTINGS}
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(run | states, args.save)

    def resume(self, args: argparse.Namespace) -> None:
        """Take over the state that a run has written; every rank does."""
        if not args.resume.exists():
            raise SystemExit(f"no run at {args.resume}; stop one with --save {args.resume}")
        saved = torch.load(args.resume)
        for name in SETTINGS:
            if saved[name] != getattr(args, name):
                raise SystemExit(
                    f"--{name.replace('_', '-')} ({getattr(args, name)}) was {saved[name]} in the "
                    f"run that wrote {args.resume}; go on with the same"
                )
        if len(saved["losses"]) > args.steps:
            raise SystemExit(
                f"--steps ({args.steps}) must be at least {len(saved['losses'])}, the steps of the "
                f"run that wrote {args.resume}"
            )
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.losses.extend(saved["losses"])


def ranks() -> tuple[int, int]:
    """This process's rank and their number."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def train_step(model: Llama, optimizer: torch.optim.AdamW, way: Way, b: Batch) -> float:
    """One step; the loss is the mean over all labelled tokens of the whole sequence."""
    tokens, labels, position_ids = map(way.shard, (b.tokens, b.labels, b.position_ids))
    logits = model(tokens, position_ids, way.attention(b.mask, len(b.tokens)), way.run)
    loss = way.mean(way.run(LOSSES, logits, labels), (labels != -100).sum())
    optimizer.zero_grad()
    loss.backward()
    way.sum_gradients(model)
    optimizer.step()
    return float(loss.detach())


def train(
    way: Way, args: argparse.Namespace, on_step: Callable[[int, float], None], resume: bool = True
) -> Trained:
    """The trained model and its losses; the same on every rank.

    Args:
        on_step: called with the number of steps done and the last one's loss.
        resume: go on from args.resume, if there is one.
    """
    torch.manual_seed(args.seed)
    model = Llama(Config()).to(getattr(torch, args.dtype))
    options = {"lr": args.learning_rate, "betas": (0.9, 0.95), "weight_decay": 0.1}
    run = Trained(model, torch.optim.AdamW(model.parameters(), **options), [])
    if resume and args.resume:
        run.resume(args)
    for batch in islice(batches(args.num_tokens, args.seed), len(run.losses), args.steps):
        run.losses.append(train_step(model, run.optimizer, way, batch))
        on_step(len(run.losses), run.losses[-1])
    return run


def with_progress(way: Way, args: argparse.Namespace, title: str, resume: bool = True) -> Trained:
    """train, with a progress bar on rank 0."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    loss = TextColumn("loss {task.fields[loss]:.3f}")
    console = Console(stderr=True, quiet=ranks()[0] != 0)
    with Progress(*columns, loss, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(title, total=args.steps, loss=float("nan"))
        return train(way, args, lambda n, x: progress.update(task, completed=n, loss=x), resume)


def plot(split: list[float], whole: list[float], title: str, path: Path) -> None:
    """Both curves, and their difference below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 5))
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    steps = range(1, len(split) + 1)
    above.plot(steps, whole, color="0.75", linewidth=5, label="nothing split, dense attention")
    above.plot(steps, split, color="tab:blue", linewidth=1.5, label=title)
    above.set_ylabel("loss (nats per byte)")
    above.legend(frameon=False)
    differences = [abs(a - b) for a, b in zip(split, whole, strict=True)]
    below.plot(steps, differences, ".", color="tab:red", markersize=4)
    below.set(xlabel="step", ylabel="|difference|", ylim=(0, max(*differences, 1e-16) * 1.2))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def compare(model: Llama, split: list[float], args: argparse.Namespace, console: Console) -> None:
    """Train with nothing split, write both curves, and fail if losses or parameters differ."""
    other, _, whole = with_progress(Whole(), args, "nothing split", resume=False)
    a, b = torch.tensor([split, whole], dtype=torch.float64)
    worst = float(((a - b) / b).abs().max())  # torch's max keeps nan, Python's may drop it
    a, b = (nn.utils.parameters_to_vector(m.parameters()).detach() for m in (model, other))
    drift = float((a - b).abs().max())
    args.out.mkdir(parents=True, exist_ok=True)
    plot(split, whole, f"split over {ranks()[1]} ranks", args.out / "losses.png")
    values = {"num_ranks": ranks()[1], "arguments": {k: str(v) for k, v in vars(args).items()}}
    values |= {"largest_relative_loss_difference": worst, "largest_parameter_difference": drift}
    values |= {"split": split, "whole": whole}
    (args.out / "losses.json").write_text(json.dumps(values, indent=2) + "\n")
    console.print(f"largest difference: losses {worst:.1e} relative, parameters {drift:.1e}")
    console.print(f"wrote losses.png and losses.json in {args.out}")
    limits = TOLERANCES[args.dtype]
    if args.wire == "none" and not (worst <= limits[0] and drift <= limits[1]):
        raise SystemExit(f"split and unsplit training differ: more than {limits}")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--num-tokens", type=int, default=1021, help="need not divide by the ranks")
    parser.add_argument("--strategy", default="auto", help='as in "ulysses(2, inner=ring(2))"')
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--wire", choices=WIRES, default="none", help="what travels, rounded to")
    parser.add_argument(
        "--reduction",
        choices=("fast", "canonical"),
        default="fast",
        help="canonical: the same bits at any split",
    )
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--save", type=Path, help="write the trained model to this file")
    parser.add_argument("--resume", type=Path, help="go on with the run that wrote this file")
    parser.add_argument("--out", type=Path, default=Path("out/train_lm"))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Train, save, compare."""
    args = arguments(argv)
    if args.compare:
        require("matplotlib", "the plot of both curves")
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo")
    console = Console(quiet=ranks()[0] != 0)
    way = Split(args.num_tokens, args.strategy, args.wire, args.reduction)
    run = with_progress(way, args, f"split over {ranks()[1]}")
    console.print(f"loss {run.losses[0]:.3f} to {run.losses[-1]:.3f} nats per byte")
    if ranks()[0] == 0 and args.save:
        run.save(args)
    if ranks()[0] == 0 and args.compare:
        compare(run.model, run.losses, args, console)
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

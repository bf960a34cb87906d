"""Train with FSDP2 and context parallelism on a 2-D mesh, stop, and resume on the same curve.

    torchrun --nproc-per-node 4 examples/fsdp_cp.py --steps 20
    torchrun --nproc-per-node 4 examples/fsdp_cp.py --steps 40 --resume

The mesh is dp x cp: ranks along dp have different sequences, ranks along cp parts of the same one.
Parameters and the optimizer's state are sharded over all ranks. Model and text are train_lm's.
Checkpoints are those of torch.distributed.checkpoint: a run may resume on another mesh. At the end
rank 0 trains the same model with nothing split, on plain dense attention of torch, and both loss
curves must agree to rounding. Plain python is one rank.
"""

import argparse
import json
import os
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import tilewise as tw

try:
    from examples import train_lm
except ModuleNotFoundError:  # run as a script: the path has this folder, not the one above it
    import train_lm

Optimizer = torch.optim.AdamW


class Unsplit(train_lm.Whole):
    """One process: every sequence and every token."""

    num_ranks = 1

    def sum(self, x: Tensor) -> None:
        """Nothing is split."""

    def mine(self, sequences: list[train_lm.Batch]) -> list[train_lm.Batch]:
        return sequences

    def place(self, model: train_lm.Llama) -> None:
        """Parameters stay whole."""


class Grid:
    """All ranks as dp x cp: sequences split along one axis, their tokens along the other."""

    def __init__(self, num_tokens: int, cp_size: int) -> None:
        self.num_ranks = dist.get_world_size()
        if self.num_ranks % cp_size:
            raise SystemExit(f"--cp ({cp_size}) must divide the number of ranks ({self.num_ranks})")
        shape = (self.num_ranks // cp_size, cp_size)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
        self.cp = tw.ContextParallel(self.mesh["cp"], num_tokens=num_tokens, mask=tw.Causal())

    def mine(self, sequences: list[train_lm.Batch]) -> list[train_lm.Batch]:
        """The sequences of this rank's row of the mesh."""
        rows = self.mesh["dp"].size()
        if len(sequences) % rows:
            raise SystemExit(f"--sequences ({len(sequences)}) must be a multiple of dp ({rows})")
        return sequences[self.mesh["dp"].get_local_rank() :: rows]

    def shard(self, x: Tensor) -> Tensor:
        return self.cp.shard(x, dim=0)

    def attention(self, mask: tw.masks.Mask, num_tokens: int) -> train_lm.Attention:
        return lambda q, k, v: self.cp.attention(q, k, v, mask=mask)

    def sum(self, x: Tensor) -> None:
        """Sum over all ranks, in place."""
        dist.all_reduce(x)

    def place(self, model: train_lm.Llama) -> None:
        """Shard the parameters over all ranks: those along cp, too, need each only a part."""
        everyone = init_device_mesh("cpu", (self.num_ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=everyone)
        fully_shard(model, mesh=everyone)


Way = Unsplit | Grid


def train_step(model: nn.Module, optimizer: Optimizer, way: Way, b: list[train_lm.Batch]) -> float:
    """One step on some sequences; the loss is the mean over all their labelled tokens."""
    num_labels = sum(int((one.labels != -100).sum()) for one in b)
    optimizer.zero_grad()
    loss = torch.zeros((), dtype=torch.float64)
    for one in way.mine(b):
        tokens, labels, position_ids = map(way.shard, (one.tokens, one.labels, one.position_ids))
        logits = model(tokens, position_ids, way.attention(one.mask, len(one.tokens)))
        total = F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
        # Each rank has a share of the mean, and shares add up; FSDP averages, hence the factor.
        (total / num_labels * way.num_ranks).backward()
        loss += total.detach() / num_labels
    optimizer.step()
    way.sum(loss)
    return float(loss)


def start(way: Way, args: argparse.Namespace) -> tuple[train_lm.Llama, Optimizer]:
    """The model before its first step, placed on the ranks, and its optimizer."""
    torch.manual_seed(args.seed)
    model = train_lm.Llama(train_lm.Config()).to(getattr(torch, args.dtype))
    way.place(model)
    options = {"lr": args.learning_rate, "betas": (0.9, 0.95), "weight_decay": 0.1}
    return model, Optimizer(model.parameters(), **options)


def train(
    model: nn.Module,
    optimizer: Optimizer,
    way: Way,
    steps: range,
    args: argparse.Namespace,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """The losses of some steps; a step's sequences do not depend on where the run began."""
    n = args.sequences
    stream = islice(train_lm.batches(args.num_tokens, args.seed), n * steps.start, None)
    losses = []
    for step in steps:
        losses.append(train_step(model, optimizer, way, list(islice(stream, n))))
        on_step(step, losses[-1])
    return losses


def save(model: nn.Module, optimizer: Optimizer, step: int, folder: Path) -> None:
    """Write a checkpoint after a number of steps; every rank writes its shards."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": step}
    dcp.save(state, checkpoint_id=folder / f"step-{step:06}")


def resume(model: nn.Module, optimizer: Optimizer, folder: Path) -> int:
    """Load the latest checkpoint into model and optimizer; the number of steps it has seen."""
    found = sorted(folder.glob("step-*"))
    if not found:
        raise SystemExit(f"no checkpoint in {folder}; run without --resume first")
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id=found[-1])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return state["step"]


def compare(
    weights: Mapping[str, Any], split: list[float], steps: range, args: argparse.Namespace
) -> dict[str, Any]:
    """Train with nothing split from the first step on; both curves and how far they are apart."""
    way = Unsplit()
    model, optimizer = start(way, args)
    whole = train(model, optimizer, way, range(steps.stop), args)[steps.start :]
    a, b = torch.tensor([split, whole], dtype=torch.float64)
    drift = max(float((p.detach() - weights[n]).abs().max()) for n, p in model.named_parameters())
    return {
        "steps": [steps.start, steps.stop],
        "split": split,
        "whole": whole,
        "largest_relative_loss_difference": float(((a - b) / b).abs().max()),
        "largest_parameter_difference": drift,
    }


def parser_of(description: str | None, out: str) -> argparse.ArgumentParser:
    """What every run that stops and resumes asks for."""
    parser = argparse.ArgumentParser(description=str(description).split("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="in all, those before --resume too")
    parser.add_argument("--resume", action="store_true", help="from the latest checkpoint")
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, default=Path(out))
    return parser


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, "out/fsdp_cp")
    parser.add_argument("--cp", type=int, default=2, help="ranks that share a sequence")
    parser.add_argument("--sequences", type=int, default=2, help="per step, on all ranks together")
    parser.add_argument("--num-tokens", type=int, default=509, help="need not divide by --cp")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Train or resume, save, compare."""
    args = arguments(argv)
    way = Grid(args.num_tokens, args.cp) if dist.is_initialized() else Unsplit()
    console = Console(quiet=train_lm.ranks()[0] != 0)
    model, optimizer = start(way, args)
    first = resume(model, optimizer, args.out) if args.resume else 0
    steps = range(first, args.steps)
    if not steps:
        raise SystemExit(f"--steps ({args.steps}) must be more than the {first} of the checkpoint")
    losses = train(
        model,
        optimizer,
        way,
        steps,
        args,
        lambda step, loss: console.print(f"step {step + 1}: loss {loss:.3f} nats per byte"),
    )
    save(model, optimizer, args.steps, args.out)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if args.compare and train_lm.ranks()[0] == 0:
        found = compare(weights, losses, steps, args)
        (args.out / "losses.json").write_text(json.dumps(found, indent=2) + "\n")
        worst, drift = (found[f"largest_{x}_difference"] for x in ("relative_loss", "parameter"))
        console.print(f"largest difference: losses {worst:.1e} relative, parameters {drift:.1e}")
        limits = train_lm.TOLERANCES[args.dtype]
        if not (worst <= limits[0] and drift <= limits[1]):
            raise SystemExit(f"split and unsplit training differ: more than {limits}")
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

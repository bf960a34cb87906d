"""NeMo Automodel's sharder contract on tilewise: its own unit tests, and a split model.

    git clone https://github.com/NVIDIA-NeMo/Automodel
    python -m benchmarks.slots.automodel Automodel

The clone's `tests/unit_tests/distributed/test_cp_sharder.py` runs unchanged, with our index map in
place of its head-tail one. Then a Qwen2 of two layers in fp64 trains a step on two gloo processes
through Automodel's `ContextParallelSharder`, against the same step of whole rows.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.integrations import automodel
from tilewise.transport.processes import run_ranks
from tilewise_tools.naming import Parser, run_script

RANKS, BATCH = 2, 2
LENGTHS = (22, 13, 22)
"""Tokens of the rows of three steps: padded to 24, to 16, and 24 again."""
BOUND = 1e-10
UNIT_TESTS = "tests/unit_tests/distributed/test_cp_sharder.py"


def pytest_configure() -> None:
    """As a plugin of pytest: Automodel's head-tail layout is ours."""
    from nemo_automodel.components.distributed.context_parallel import (  # pyright: ignore[reportMissingImports]
        sharder,
    )

    sharder.round_robin_local_indices = automodel.local_token_global_indices


def model_of() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
        layer_types=["full_attention", "sliding_attention"], sliding_window=5,
        use_sliding_window=True,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).double()


def batch_of(length: int) -> dict[str, Tensor]:
    """A batch with labels that are shifted already, and padding at the end of its second row."""
    ids = torch.arange(BATCH * length).mul(7).remainder(31).view(BATCH, length)
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    seen = torch.ones_like(ids)
    seen[1, -3:], labels[1, -4:] = 0, -100
    return {"input_ids": ids, "labels": labels, "attention_mask": seen}


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100
    )


def step(rank: int, clone: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logits of each batch, gathered by the sharder, and gradients summed over the ranks."""
    sys.path.insert(0, clone)
    from nemo_automodel.components.distributed.context_parallel import (  # pyright: ignore[reportMissingImports]
        ContextParallelSharder,
    )
    from nemo_automodel.components.distributed.context_parallel.utils import (  # pyright: ignore[reportMissingImports]
        attach_context_parallel_hooks,
    )
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "cp"))
    model = model_of()
    attach_context_parallel_hooks(model)  # as Automodel does where cp_size > 1
    model, found = automodel.parallelize(model, mesh), []
    for length in LENGTHS:
        batch = batch_of(length)
        sharder = ContextParallelSharder(model, mesh, batch)
        context, batch = sharder.shard(batch)
        labels = batch.pop("labels")
        with context():
            logits = model(**batch).logits
        loss_of(logits, labels).backward()
        found.append(sharder.gather_token_tensor(logits.detach(), trim=True))
        again = sharder.shard_token_tensor(found[-1], fill=0)
        assert torch.equal(again[:, : length // 4], logits[:, : length // 4])
    grads = {name: x.grad for name, x in model.named_parameters()}
    for grad in grads.values():
        dist.all_reduce(grad)
    return found, grads


def distance(clone: str) -> float:
    """The largest difference of logits at tokens and of gradients from whole rows."""
    model, wanted = model_of(), []
    for length in LENGTHS:
        batch = batch_of(length)
        labels = batch.pop("labels")
        logits = model(**batch).logits
        loss_of(logits, labels).backward()
        wanted.append((logits.detach(), batch["attention_mask"].bool()))
    apart = [0.0]
    for found, grads in run_ranks(RANKS, step, clone, timeout_seconds=400):
        for got, (logits, seen) in zip(found, wanted, strict=True):
            apart.append(float((got - logits)[seen].abs().max()))
        for name, x in model.named_parameters():
            apart.append(float((grads[name] - x.grad).abs().max()))
    return max(apart)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("clone", type=Path)
    clone = parser.parse_args().clone.resolve()
    paths = [str(clone), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.slots.automodel"]
    command += ["--noconftest", "-p", "no:cacheprovider", UNIT_TESTS]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "NO_VCS_VERSION": "1"}
    tests = subprocess.run(command, cwd=clone, env=environment, check=False)
    worst = distance(str(clone))
    print(f"logits and gradients differ by {worst:.3g} at most")
    sys.exit(tests.returncode or worst > BOUND)


if __name__ == "__main__":
    run_script(main)

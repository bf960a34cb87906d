"""torchtitan's page, tried: its diff on a copy of the release, and a step of training.

    python -m venv titan && titan/bin/pip install torchtitan==0.3.0 tilewise
    titan/bin/python -m benchmarks.slots.torchtitan

It needs an environment of its own (datasets below 4.8), or torchtitan's folder on the path. The
lines of docs/integrations/torchtitan.md that begin with - must stand in the release as they are.
Then torchtitan's llama3, of two layers in fp32, goes through its own post_dataloading_process and
parallelize_llama on two gloo processes, with attn_backend "flex" and "varlen" and packed documents:
loss and every gradient against the model on each document by itself. FSDP2 needs NCCL and is left
out.
"""

from __future__ import annotations

import importlib
import re
import shutil
import sys
import tempfile
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.transport.processes import run_ranks
from tilewise_tools.naming import Parser, run_script

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "torchtitan.md"
RANKS, BATCH = 2, 2
TOKENS = 28
DOCUMENTS = ((0, 9, 28), (0, 4, 20, 28))
BOUND = 2e-6


def patched(into: Path, page: str) -> None:
    """A copy of the installed torchtitan with the first diff of the page."""
    spec = find_spec("torchtitan")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("torchtitan is not installed; pip install torchtitan==0.3.0")
    shutil.copytree(spec.submodule_search_locations[0], into / "torchtitan")
    (diff,) = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)[:1]
    for part in re.split(r"^--- ", diff, flags=re.MULTILINE)[1:]:
        name, _, lines = part.partition("\n")
        path = into / name
        before, after = (
            "\n".join(line[1:] for line in lines.splitlines() if line.startswith(sign))
            for sign in "-+"
        )
        text = path.read_text()
        if text.count(before) != 1:
            sys.exit(f"{name} has {text.count(before)} times, not once:\n{before}")
        path.write_text(text.replace(before, after))


def model_of(backend: str) -> Any:
    llama3 = importlib.import_module("torchtitan.models.llama3")
    config = llama3.model_registry("debugmodel", attn_backend=backend).model
    config.layers = config.layers[:2]
    model = config.build()
    torch.manual_seed(0)
    with torch.no_grad():
        for x in model.parameters():
            torch.nn.init.normal_(x, std=0.05)
    return config, model


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions in each document, and labels within it."""
    ids = torch.arange(BATCH * TOKENS).mul(37).remainder(2000).view(BATCH, TOKENS)
    labels, positions = ids.roll(-1, 1), torch.zeros_like(ids)
    for row, edges in enumerate(DOCUMENTS):
        for start, stop in pairwise(edges):
            positions[row, start:stop] = torch.arange(stop - start)
            labels[row, stop - 1] = -100
    return ids, positions, labels


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100
    )


def step(rank: int, folder: str, backend: str) -> tuple[float, dict[str, Tensor]]:
    """This rank's loss, and whole gradients, through torchtitan."""
    sys.path.insert(0, folder)
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # of sizes of 1
    vars(importlib.import_module("torchtitan.distributed.parallel_dims"))["device_type"] = "cpu"
    importlib.import_module("torch._dynamo").config.disable = True  # it compiles its masks
    configs = importlib.import_module("torchtitan.config")
    dims = importlib.import_module("torchtitan.distributed").ParallelDims
    parallelism = configs.ParallelismConfig(
        context_parallel_degree=RANKS, spmd_backend="partial_dtensor"
    )
    parallel_dims = dims.from_config(parallelism, RANKS)
    parallel_dims.build_mesh()
    config, model = model_of(backend)
    parallelize = importlib.import_module("torchtitan.models.llama3.parallelize")
    # It sums by an operation that gloo lacks.
    vars(parallelize)["apply_fsdp_to_decoder"] = lambda *_, **__: None
    training = configs.TrainingConfig(mixed_precision_param="float32")
    model = parallelize.parallelize_llama(
        model,
        parallel_dims=parallel_dims,
        training=training,
        parallelism=parallelism,
        compile_config=configs.CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    trainer = importlib.import_module("torchtitan.trainer").Trainer
    state = SimpleNamespace(
        model_config=config,
        model_parts=[model],
        parallel_dims=parallel_dims,
        device=torch.device("cpu"),
        config=SimpleNamespace(parallelism=parallelism),
        ntokens_seen=0,
    )
    ids, positions, labels = batch()
    given = {"input": ids, "positions": positions}
    inputs, labels, more = trainer.post_dataloading_process(state, given, labels)
    loss = loss_of(model(inputs, **more), labels)
    loss.backward()
    grads = {name: x.grad for name, x in model.named_parameters()}
    for grad in grads.values():
        dist.all_reduce(grad)
    return float(loss.detach()), grads


def whole(rank: int, folder: str) -> tuple[float, dict[str, Tensor]]:
    """The same of torchtitan's model on each document by itself, with torch's own attention."""
    sys.path.insert(0, folder)
    _, model = model_of("varlen")
    for layer in model.layers.values():
        layer.attention.inner_attention.forward = _causal
    ids, _, labels = batch()
    total = 0.0
    for row, edges in enumerate(DOCUMENTS):
        for start, stop in pairwise(edges):
            tokens = ids[row : row + 1, start:stop]
            positions = torch.arange(stop - start)[None]
            loss = loss_of(model(tokens, positions=positions), labels[row : row + 1, start:stop])
            loss.backward()
            total += float(loss.detach())
    return total, {name: x.grad for name, x in model.named_parameters()}


def _causal(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    options = {"is_causal": True, "enable_gqa": True}
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def main() -> None:
    Parser(description=__doc__).parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory() as place:
        patched(Path(place), PAGE.read_text(encoding="utf-8"))
        ((loss, wanted),) = run_ranks(1, whole, place, timeout_seconds=1500)
        for backend in ("flex", "varlen"):
            results = run_ranks(RANKS, step, place, backend, timeout_seconds=1500)
            apart = [abs(sum(own for own, _ in results) - loss) / abs(loss)]
            for _, grads in results:
                assert grads.keys() == wanted.keys()
                for name, x in wanted.items():
                    apart.append(float((grads[name] - x).abs().max() / x.abs().max()))
            print(f"{backend}: loss and gradients differ by {max(apart):.3g} of the largest entry")
            worst = max(worst, *apart)
    sys.exit(0 if worst <= BOUND else 1)


if __name__ == "__main__":
    run_script(main)

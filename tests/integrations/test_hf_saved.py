"""A split model that is pickled is the unsplit one, and can be split again."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")
pytest.importorskip("peft", reason="needs peft")

from support.hf_adapters import adapted
from support.hf_models import build, case
from support.hybrid_models import build as hybrid

import tilewise as tw
from tilewise.integrations import hf
from tilewise.integrations.transformers.forward import split_forward

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
BY_LENGTH = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
MODELS: dict[str, Any] = {
    "rope by length": lambda: build("llama", rope_parameters=BY_LENGTH, max_position_embeddings=6),
    "adapter": lambda: adapted("LORA"),
    "states": lambda: hybrid("Qwen3Next"),
}


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["parallelize", "forward"])
def test_a_pickled_model_is_unsplit_and_splits_again(name: str, way: str):
    whole, ids = MODELS[name]().eval(), case((0, 12)).input_ids
    want = whole(ids, use_cache=False).logits.detach()

    def run(model: Any, group: Any, label: str) -> torch.Tensor:
        if way == "forward":
            split_forward(model, group)
            return model(ids).logits.detach()
        cp = tw.ContextParallel(group, num_tokens=12, mask=tw.Causal())
        out = hf.parallelize(model, cp, label)(**hf.shard(cp, ids)).logits.detach()
        return hf.unshard(cp, out)

    def on_rank(rank: int, group: Any) -> list[torch.Tensor]:
        model = copy.deepcopy(whole)
        results = [run(model, group, f"split_{rank}")]
        again = saved(model)
        base = again.get_base_model() if name == "adapter" else again
        assert base.config._attn_implementation == "eager"
        results.append(again(ids, use_cache=False).logits.detach())
        results.append(run(copy.deepcopy(model), group, f"split_{rank}"))
        results.append(run(again, group, f"again_{rank}"))
        return results

    for results in tw.loopback(2, on_rank):
        assert all((got - want).abs().max() < 1e-5 for got in results)


ANOTHER_PROCESS = """
import sys, torch
path, ids = sys.argv[1], torch.arange(2, 14)[None]
model = torch.load(path, weights_only=False)
print(model.config._attn_implementation, float(model(ids, labels=ids).loss))
print(model.generate(ids, max_new_tokens=2, do_sample=False).shape[1])
"""


@pytest.mark.parametrize("way", ["parallelize", "forward"])
def test_another_process_loads_the_unsplit_model(way: str, tmp_path: Path):
    whole, ids = build("llama").eval(), torch.arange(2, 14)[None]
    want = float(whole(ids, labels=ids).loss.detach())

    def on_rank(rank: int, group: Any) -> None:
        model = copy.deepcopy(whole)
        if way == "forward":
            split_forward(model, group)
        else:
            cp = tw.ContextParallel(group, num_tokens=12, mask=tw.Causal())
            hf.parallelize(model, cp, f"saved_{rank}")
        if rank == 1:
            torch.save(model, tmp_path / "model.pt")

    tw.loopback(2, on_rank)
    command = [sys.executable, "-c", ANOTHER_PROCESS, str(tmp_path / "model.pt")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    attention, loss, length = done.stdout.split()
    assert (attention, length) == ("eager", "14")
    assert float(loss) == pytest.approx(want, rel=1e-6)

"""hf.unsplit: a split model runs on whole rows on one rank, without the others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")
pytest.importorskip("peft", reason="needs peft")

from processes.launcher import run_processes
from support.hf_adapters import adapted
from support.hf_models import build, case
from support.hybrid_models import build as hybrid

import tilewise as tw
from tilewise.integrations import hf
from tilewise.integrations.transformers.forward import split_forward

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
BY_LENGTH = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
MODELS: dict[str, Any] = {
    "llama": lambda: build("llama"),
    "rope by length": lambda: build("llama", rope_parameters=BY_LENGTH, max_position_embeddings=6),
    "adapter": lambda: adapted("LORA"),
    "states": lambda: hybrid("Qwen3Next"),
}
N = 3


def split(model: Any, group: Any, way: str, name: str) -> tw.ContextParallel:
    cp = tw.ContextParallel(group, num_tokens=12, mask=tw.Causal())
    if way == "forward":
        split_forward(model, group)
    else:
        hf.parallelize(model, cp, name)
    return cp


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["parallelize", "forward"])
def test_a_call_on_some_ranks_has_the_unsplit_loss_logits_and_gradients(name: str, way: str):
    whole, ids = MODELS[name]().eval(), case((0, 12)).input_ids
    want = whole(ids, labels=ids, use_cache=False)
    want.loss.backward()

    def on_rank(rank: int, group: Any) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(whole)
        model.zero_grad()
        cp = split(model, group, way, f"unsplit_{rank}")
        results = {}
        if rank != 1:  # ranks 0 and 2 alone
            with hf.unsplit(model):
                out = model(ids, labels=ids, use_cache=False)
                out.loss.backward()
            grads = {n: x.grad for n, x in model.named_parameters() if x.grad is not None}
            results = {"loss": out.loss.detach(), "logits": out.logits.detach(), **grads}
        given = hf.shard(cp, ids) if way == "parallelize" else {"input_ids": ids}
        again = model(**given).logits.detach()  # split anew, on all ranks
        return results | {"again": hf.unshard(cp, again) if way == "parallelize" else again}

    grads = {n: x.grad for n, x in whole.named_parameters() if x.grad is not None}
    expected = {"loss": want.loss, "logits": want.logits, **grads}
    for rank, got in enumerate(tw.loopback(N, on_rank)):
        assert (got.pop("again") - want.logits).abs().max() < 1e-5
        assert got.keys() == ({} if rank == 1 else expected).keys()
        assert all((x - expected[n]).abs().max() < 1e-6 for n, x in got.items())


def test_a_model_that_has_a_split_name_from_the_start_and_one_that_is_not_split():
    whole, ids = build("llama").eval(), case((0, 12)).input_ids
    want = whole(ids).logits

    def on_rank(rank: int, group: Any) -> torch.Tensor | None:
        cp = tw.ContextParallel(group, num_tokens=12, mask=tw.Causal())
        model = copy.deepcopy(whole)
        model.set_attn_implementation(hf.register(cp, f"named_{rank}"))
        if rank:
            return None
        with hf.unsplit(model), hf.unsplit(whole):
            return torch.stack([model(ids).logits, whole(ids).logits])

    both = tw.loopback(2, on_rank)[0]
    assert both is not None and (both - want).abs().max() < 1e-5


def test_an_error_within_leaves_the_model_split():
    model = build("llama")
    hf.parallelize(model, tw.ContextParallel(num_tokens=12, mask=tw.Causal()), "left")
    with pytest.raises(ZeroDivisionError), hf.unsplit(model):
        assert model.config._attn_implementation == "eager"
        _ = 1 / 0
    assert model.config._attn_implementation == "left"


def test_after_set_attn_implementation_one_rank_runs_alone_with_labels():
    """What the model checks of split calls, of labels and lengths, it does not check there."""
    whole, ids = MODELS["rope by length"]().eval(), case((0, 12)).input_ids
    want = whole(ids, labels=ids).loss

    def on_rank(rank: int, group: Any) -> torch.Tensor | None:
        model = copy.deepcopy(whole)
        split(model, group, "parallelize", f"made_whole_{rank}")
        if rank:
            return None
        model.set_attn_implementation("sdpa")
        return model(ids, labels=ids).loss

    loss = tw.loopback(2, on_rank)[0]
    assert loss is not None and abs(loss - want) < 1e-6


def under_fsdp(_: int) -> list[str]:
    from torch.distributed.fsdp import fully_shard

    told = []
    for way in ("parallelize", "forward"):
        model = build("llama")
        split(model, torch.distributed.group.WORLD, way, way)
        fully_shard(model)
        try:
            with hf.unsplit(model):
                told.append("taken")
        except ValueError as error:
            told.append(str(error))
    return told


def test_sharded_parameters_are_refused():
    for told in run_processes(1, under_fsdp)[0]:
        assert "cannot run unsplit on one rank under FSDP" in told
        assert "embed_tokens.weight each rank has a part. Call the model on every rank" in told

"""accelerate with a ParallelismConfig of ours: sizes, models in a loop of one's own, refusals."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

from processes.launcher import run_processes
from support.hf_models import VOCABULARY, build

import tilewise as tw
from tilewise.integrations.accelerate import ParallelismConfig

ROWS, COLUMNS = 3, 19


def batch() -> dict[str, Tensor]:
    """Three rows, padded on the right, the left, and on both sides."""
    make = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCABULARY, (ROWS, COLUMNS), generator=make)
    mask = torch.ones_like(ids)
    mask[0, 12:] = mask[1, :4] = mask[2, :3] = mask[2, 17:] = 0
    ids = ids * mask
    labels = ids.masked_fill(mask == 0, -100)
    labels[torch.arange(ROWS), mask.argmax(1)] = -100  # predicted from padding
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def on_processes(fn: Any, world_size: int, *args: Any) -> list:
    return run_processes(world_size, _joined, world_size, fn, *args)


def _joined(rank: int, world_size: int, fn: Any, *args: Any) -> Any:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # asked for, not used: it is joined
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ.update(address | ranks)
    torch.set_num_threads(1)
    return fn(rank, *args)


def accelerator(**sizes: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {n.removeprefix("module."): p.grad for n, p in model.named_parameters()}
    return {name: x.clone() for name, x in found.items() if x is not None}


def close(got: Tensor, want: Tensor) -> None:
    """Gradients within rounding, which is relative to the largest where they cancel."""
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


def own_loop(rank: int) -> dict[str, Any]:
    """Calls of a prepared model, as a script makes them."""
    whole = build("gemma3")
    cp = accelerator(cp_size=2)
    model = cp.prepare(copy.deepcopy(whole))
    given = batch()
    out = model(**given)
    cp.backward(out.loss)
    found: dict[str, Any] = {"loss": out.loss.detach(), "gradients": gradients(model)}
    model.zero_grad()
    out = model(**given)  # a loss of the user's own, of logits beside the model's loss
    entropy = torch.logsumexp(out.logits, -1)[:, :-1].mean() + 2 * out.logits[:, 3].square().mean()
    cp.backward(entropy)
    found |= {"logits with labels": out.logits + 0, "gradients beside": gradients(model)}
    model.zero_grad()
    given.pop("labels")
    out = model(**given, output_hidden_states=True)
    out.logits.square().mean().backward()  # the user's own loss
    found |= {"logits": out.logits.detach(), "gradients of logits": gradients(model)}
    found["hidden"] = out.hidden_states[1].detach()
    with torch.no_grad():
        found["some"] = model(**given, logits_to_keep=4).logits
        found["tuple"] = len(model(**batch(), return_dict=False))
    bare = cp.unwrap_model(model).eval()
    ids = given["input_ids"][:1, :9]
    found["generated"] = bare.generate(ids, max_new_tokens=5, do_sample=False)
    found["uncached"] = bare.generate(ids, max_new_tokens=5, do_sample=False, use_cache=False)
    found["counts"] = cp.num_processes, cp.process_index, cp.gather(torch.tensor([rank])).tolist()
    with cp.split_between_processes(["a", "b"]) as share:
        found["share"] = share
    found["sum"] = float(cp.reduce(torch.tensor(3.0)))
    found["saved"] = dict(cp.get_state_dict(model).items())
    return found


def test_a_loop_of_ones_own_has_whole_results_and_gradients():
    model = build("gemma3")
    given = batch()
    want = model(**given)
    want.loss.backward()
    want_gradients = gradients(model)
    model.zero_grad()
    labels = given.pop("labels")
    out = model(**given, output_hidden_states=True)
    kept = given["attention_mask"][..., None].float()
    # Where padding is, transformers has a result that depends on its kernel, and we have 0.
    ((out.logits * kept).square().mean()).backward()
    ids = given["input_ids"][:1, :9]
    want_of_logits = gradients(model)
    model.zero_grad()
    logits = model(**given).logits * kept
    (torch.logsumexp(logits, -1)[:, :-1].mean() + 2 * logits[:, 3].square().mean()).backward()
    generated = model.eval().generate(ids, max_new_tokens=5, do_sample=False)
    for rank, got in enumerate(on_processes(own_loop, 2)):
        assert got["loss"] == pytest.approx(float(want.loss.detach()), rel=1e-6)
        for name, x in want_gradients.items():
            close(got["gradients"][name], x)
        for name, x in want_of_logits.items():
            close(got["gradients of logits"][name], x)
        for name, x in gradients(model).items():
            close(got["gradients beside"][name], x)
        assert torch.equal(got["logits with labels"], got["logits"])
        torch.testing.assert_close(
            got["logits"], (out.logits * kept).detach(), rtol=1e-4, atol=1e-5
        )
        hidden = (out.hidden_states[1] * kept).detach()
        torch.testing.assert_close(got["hidden"], hidden, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got["some"], got["logits"][:, -4:], rtol=1e-5, atol=1e-6)
        assert got["tuple"] == 2
        assert torch.equal(got["generated"], generated)
        assert torch.equal(got["uncached"], generated)
        assert got["counts"] == (1, rank, [0])  # one process alone is 0, and writes
        assert got["share"] == ["a", "b"]
        assert got["sum"] == 3.0
        assert got["saved"].keys() == model.state_dict().keys()
    assert labels.shape == (ROWS, COLUMNS)


class Critic(nn.Module):
    """A head of its own on a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.head = model, nn.Linear(model.config.hidden_size, 1)  # pyright: ignore
        nn.init.normal_(self.head.weight, generator=torch.Generator().manual_seed(4))

    def forward(self, **given: Tensor) -> Tensor:
        hidden = self.model(**given).last_hidden_state
        kept = given["attention_mask"][..., None]
        return (self.head(hidden) * kept).square().sum() / kept.sum()


def held(rank: int) -> dict[str, Any]:
    """A model within another module is split; of what is not, there is word."""
    cp = accelerator(cp_size=2)
    whole = Critic(build("llama").model)
    model = cp.prepare(copy.deepcopy(whole))
    bare = cp.unwrap_model(model)
    rows: list[int] = []
    bare.model.norm.register_forward_hook(lambda *x: rows.append(x[-1].shape[1]))
    given = {k: x for k, x in batch().items() if k != "labels"}
    loss = model(**given)
    cp.backward(loss)
    found: dict[str, Any] = {"loss": loss.detach(), "gradients": gradients(model), "rows": rows}
    for module in (nn.Linear(2, 2), nn.ModuleList([build("llama"), build("qwen2")])):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            cp.prepare_model(module)
        found[type(module).__name__] = [str(x.message) for x in said if "split" in str(x.message)]
    return found


def test_a_model_within_another_module_is_split_and_what_is_not_is_said():
    want = Critic(build("llama").model)
    given = {k: x for k, x in batch().items() if k != "labels"}
    loss = want(**given)
    loss.backward()
    ranks = on_processes(held, 2)
    tokens = int(given["attention_mask"].sum())
    assert sum(rows for got in ranks for rows in got["rows"]) == tokens
    assert max(rows for got in ranks for rows in got["rows"]) < tokens
    for got in ranks:
        assert got["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
        for name, x in gradients(want).items():
            close(got["gradients"][name], x)
    (none,), (two,) = ranks[0]["Linear"], ranks[0]["ModuleList"]
    assert "Linear is not split: each of the 2 ranks" in none and "it holds none" in none
    assert "it holds LlamaForCausalLM, Qwen2ForCausalLM" in two


def sharded(rank: int) -> dict[str, Any]:
    """FSDP2 over dp_shard x cp, in a loop of one's own."""
    from torch.distributed.fsdp import fully_shard

    cp = accelerator(cp_size=2, dp_shard_size=2)
    model = cp.prepare_model(build("qwen2"), evaluation_mode=True)
    mesh = cp.torch_device_mesh["dp_shard_cp"]
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    given = batch()
    with cp.split_between_processes([0, 1]) as (row,):  # a data-parallel rank has its own row
        pass
    out = model(**{name: x[row : row + 1] for name, x in given.items()})
    out.loss.backward()
    found = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
    return {"gradients": found, "row": row, "loss": out.loss.detach()}


@pytest.mark.slow
def test_fsdp2_averages_over_data_parallel_and_cp_ranks():
    model = build("qwen2")
    losses = [model(**{n: x[row : row + 1] for n, x in batch().items()}).loss for row in range(2)]
    torch.stack(losses).mean().backward()
    ranks = on_processes(sharded, 4)
    assert [got["row"] for got in ranks] == [0, 0, 1, 1]
    for got in ranks:
        assert got["loss"] == pytest.approx(float(losses[got["row"]].detach()), rel=1e-6)
        for name, x in gradients(model).items():
            close(got["gradients"][name], x)


def refused(rank: int) -> dict[str, str]:
    """The message of each call that cannot be split."""
    found = {}

    def call(name: str, fn: Any) -> None:
        try:
            fn()
        except ValueError as error:
            found[name] = str(error)

    call("sizes", lambda: accelerator(cp_size=3))
    cp = accelerator(cp_size=2)
    model = cp.prepare_model(build("llama"), evaluation_mode=True)
    given = batch()
    ids, mask = given["input_ids"], given["attention_mask"]
    call("other rows", lambda: model(ids + (rank == 1)))
    call("one rank alone", lambda: model(ids, attention_mask=mask[:, : COLUMNS - (rank == 1)]))
    holes = mask.clone()
    holes[0, 5] = 0
    call("holes", lambda: model(ids, attention_mask=holes))
    call("labels at padding", lambda: model(ids, attention_mask=mask, labels=ids))
    call("scores", lambda: model(ids, output_attentions=True))
    call("images", lambda: model(ids, pixel_values=torch.zeros(1, 3, 8, 8)))
    jumps = torch.arange(COLUMNS).expand(ROWS, -1) % 7
    call("documents and mask", lambda: model(ids, position_ids=jumps, attention_mask=mask * 0 + 1))
    cut = torch.tensor([0, 7])
    call("boundaries", lambda: model(ids[:1], cu_seq_lens_q=cut))
    from transformers import RwkvConfig, RwkvForCausalLM

    rwkv = RwkvForCausalLM(RwkvConfig(vocab_size=9, hidden_size=8, num_hidden_layers=2))
    call("recurrence", lambda: cp.prepare(rwkv))
    return found


def test_what_cannot_be_split_is_refused_alike_on_all_ranks():
    first, second = on_processes(refused, 2)
    assert first == second
    wanted = {
        "sizes": "cp_size (3) must divide the number of processes (2)",
        "other rows": "ranks disagree on tokens of the batch",
        "one rank alone": "rank 1: attention_mask has the shape (3, 18), but must have (3, 19)",
        "holes": "attention_mask of row 0 hides the token after column 4",
        "labels at padding": "labels are predicted from padding",
        "scores": "output_attentions=True cannot be honoured by a split model",
        "images": "pixel_values cannot be split",
        "documents and mask": "position_ids of row 0 start again after column 6",
        "boundaries": "cu_seq_lens_q goes from 0 to 7 in a batch of 1 rows of 19 tokens",
        "recurrence": "the model carries a state along the sequence",
    }
    assert first.keys() == wanted.keys()
    for name, text in wanted.items():
        assert text in first[name], first[name]


def test_sizes_come_from_the_environment_of_the_launcher(monkeypatch):
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "4")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    config = ParallelismConfig()
    assert (config.cp_size, config.dp_shard_size, config.total_size) == (4, 2, 8)
    assert not config.cp_enabled
    assert config.active_mesh_dims == ["dp_shard", "cp"]
    assert config.dp_shard_cp_dim_names == config.dp_cp_dim_names == ["dp_shard", "cp"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"cp_size": 0}, r"cp_size \(0\) must be at least 1"),
        ({"cp_size": 2, "tp_size": 2}, r"cp_size \(2\) and tp_size \(2\) cannot both be above 1"),
        ({"cp_size": 2, "sp_size": 2}, r"cp_size \(2\) and sp_size \(2\) cannot both"),
        ({"cp_size": 2, "cp_handler": object()}, "cp_handler is of accelerate's own"),
        ({"cp_size": 2, "strategy": [tw.ring(2)]}, r"strategy \(list\) has a plan for each layer"),
        ({"cp_size": 2, "strategy": tw.ring(4)}, "strategy is for 4 ranks, cp_size is 2"),
    ],
)
def test_sizes_that_cannot_be_combined(sizes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        ParallelismConfig(**sizes)


def test_sizes_are_given_by_name_and_shown():
    with pytest.raises(ValueError, match=r"sizes \(2\) must be given by name: .*cp_size=2"):
        ParallelismConfig(2)
    config = ParallelismConfig(cp_size=2, strategy=tw.ring(2))
    assert repr(copy.deepcopy(config)) == (
        f"ParallelismConfig(cp_size=2, strategy={tw.ring(2)!r}, reduction='fast')"
    )


def test_cp_size_of_1_is_accelerates_own():
    config = ParallelismConfig(dp_replicate_size=2)
    assert not config.splits_forward
    assert config.non_dp_dim_names == []

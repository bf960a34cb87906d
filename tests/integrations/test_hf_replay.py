"""Index replay: choices of keys that a caller hands to the layers of a split model."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

import transformers
from support.indexer_models import CU_SEQLENS, NAMES, WITH_SHARED, alone, build, compare, ids

import tilewise as tw
from tilewise.integrations import hf
from tilewise.integrations.transformers.forward import split_forward

K = 6
LAYOUTS = (tw.contiguous(40, 2), tw.zigzag(40, 3), tw.zigzag(40, 4))


def drawn_choices(layers: int, cu_seqlens: tuple[int, ...] = CU_SEQLENS) -> list[Tensor]:
    """Of each layer [1, tokens, K]: visible keys of each query in any order, fewer for some."""
    make = torch.Generator().manual_seed(11)
    found = torch.full((layers, 1, cu_seqlens[-1], K), -1)
    for start, stop in pairwise(cu_seqlens):
        for row in range(start, stop):
            for layer in range(layers):
                seen = start + torch.randperm(row - start + 1, generator=make)[:K]
                found[layer, 0, row, : len(seen)] = seen
    return [*found]


def choosing_layers(model: Any) -> list[Any]:
    layers = [
        x for x in model.modules() if isinstance(getattr(x, "indexer", None), torch.nn.Module)
    ]
    assert layers
    return layers


def loss_of_choices(model: Any, tokens: Tensor, choices: list[Tensor]) -> Tensor:
    """The loss of the unsplit model's documents, each alone, whose indexers return the choices."""
    count, total = tokens.shape[1] - len(CU_SEQLENS) + 1, torch.zeros(())
    for start, stop in pairwise(CU_SEQLENS):
        for layer, x in zip(choosing_layers(model), choices, strict=True):
            own = x[:, start:stop]
            own = torch.where(own < 0, own[..., :1], own) - start  # a key named twice is one key
            layer.indexer.forward = lambda *_, own=own, **__: own
        row = tokens[:, start:stop]
        out = model(row, labels=row, num_items_in_batch=torch.tensor(count), use_cache=False)
        total = total + out.loss
    return total


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("name", NAMES)
def test_a_choice_of_the_caller_is_attended_to(name: str, layout: tw.Layout):
    """Loss and each gradient, of a choice that no indexer would make."""
    whole, tokens = build(name), ids()
    choices = drawn_choices(len(choosing_layers(whole)))
    oracle = copy.deepcopy(whole)
    want = loss_of_choices(oracle, tokens, choices)
    want.backward()

    def on_rank(rank: int, group: Any) -> tuple[float, dict[str, Tensor]]:
        cp = tw.ContextParallel(group, num_tokens=40, mask=tw.Causal(), layout=layout)
        model = hf.parallelize(copy.deepcopy(whole), cp, f"replay_{rank}")
        given = hf.shard(cp, tokens, labels=tokens, cu_seqlens=CU_SEQLENS, indices=choices)
        out = model(**given)
        out.loss.backward()
        grads = {n: x.grad for n, x in model.named_parameters() if x.grad is not None}
        return float(out.loss.detach()), grads

    losses, grads = zip(*tw.loopback(layout.world_size, on_rank), strict=True)
    compare(oracle, [*losses], [*grads], want.detach())
    assert abs(float(want.detach()) - float(alone(whole, tokens[0], CU_SEQLENS).detach())) > 1e-3


@pytest.mark.parametrize(("name", "fields"), WITH_SHARED)
def test_what_a_model_chose_is_recorded_and_replayed(name: str, fields: dict[str, Any]):
    """Recorded on two ranks, and replayed on three, where indexers that choose would fail."""
    whole, tokens = build(name, **fields).eval(), ids()

    def run(rank: int, group: Any, layout: tw.Layout, choices: Any) -> tuple[Tensor, list[Tensor]]:
        cp = tw.ContextParallel(group, num_tokens=40, mask=tw.Causal(), layout=layout)
        model = hf.parallelize(copy.deepcopy(whole), cp, f"recorded_{rank}")
        if choices is not None:
            cp.index = None  # pyright: ignore[reportAttributeAccessIssue]
        with torch.no_grad(), hf.record_indices() as found:
            out = model(**hf.shard(cp, tokens, cu_seqlens=CU_SEQLENS, indices=choices)).logits
        return hf.unshard(cp, out), [hf.unshard(cp, x) for x in found]

    first = tw.loopback(2, lambda rank, group: run(rank, group, tw.zigzag(40, 2), None))
    want, choices = first[0]
    assert len(choices) == len(choosing_layers(whole))
    assert all(x.shape == (1, 40, 5) and x.dtype == torch.int64 for x in choices)
    layout = tw.contiguous(40, 3)
    for out, again in tw.loopback(3, lambda rank, group: run(rank, group, layout, choices)):
        assert (out - want).abs().max() < 1e-5
        assert all(torch.equal(a, b) for a, b in zip(again, choices, strict=True))


def test_recomputed_layers_keep_the_choice():
    """Checkpoints run layers again in backward, after the call that had the choice has ended."""
    whole, tokens = build("GlmMoeDsa"), ids()
    choices = drawn_choices(len(choosing_layers(whole)))
    oracle = copy.deepcopy(whole)
    want = loss_of_choices(oracle, tokens, choices)
    want.backward()

    def on_rank(rank: int, group: Any) -> tuple[float, dict[str, Tensor]]:
        cp = tw.ContextParallel(group, num_tokens=40, mask=tw.Causal(), layout=tw.zigzag(40, 2))
        model = hf.parallelize(copy.deepcopy(whole), cp, f"recomputed_{rank}")
        model.activation_checkpointing_enable({"use_reentrant": False})
        given = hf.shard(cp, tokens, labels=tokens, cu_seqlens=CU_SEQLENS, indices=choices)
        out = model(**given)
        out.loss.backward()
        grads = {n: x.grad for n, x in model.named_parameters() if x.grad is not None}
        return float(out.loss.detach()), grads

    losses, grads = zip(*tw.loopback(2, on_rank), strict=True)
    compare(oracle, [*losses], [*grads], want.detach())


def test_whole_rows_have_choices_of_their_own():
    """The split in a model's forward: positions in each row, of which one is padded."""
    whole, tokens = build("DeepseekV32").eval(), ids(2)
    kept = torch.ones_like(tokens)
    kept[1, 30:] = 0
    layers = len(choosing_layers(whole))
    rows = [drawn_choices(layers, (0, 40)), drawn_choices(layers, (0, 30, 40))]
    choices = [torch.cat(pair) for pair in zip(*rows, strict=True)]
    oracle = copy.deepcopy(whole)
    for layer, x in zip(choosing_layers(oracle), choices, strict=True):
        layer.indexer.forward = lambda *_, x=x, **__: torch.where(x < 0, x[..., :1], x)
    want = oracle(tokens, use_cache=False).logits.detach()

    def on_rank(rank: int, group: Any) -> Tensor:
        model = copy.deepcopy(whole)
        split_forward(model, group)
        with pytest.raises(ValueError, match="indices are for a split call"):
            model(tokens, use_cache=True, indices=choices)
        with pytest.raises(ValueError, match="indices have 77, but must be positions of tokens"):
            model(tokens, indices=[torch.full_like(choices[0], 77), *choices[1:]])
        return model(tokens, attention_mask=kept, indices=choices).logits.detach()

    for found in tw.loopback(2, on_rank):
        assert ((found - want) * kept[..., None]).abs().max() < 1e-5


WRONG = (
    (lambda x: x[:-1], "indices has 1 of 2: pass the choice of each layer"),
    (lambda x: 3, "indices has no list of 2"),
    (lambda x: [x[0], x[1][:, 1:]], r"indices\[1\] is torch.int64 .* whole numbers \[1, 20, 'k'\]"),
    (lambda x: [x[0].float(), x[1]], r"indices\[0\] is torch.float32"),
    (lambda x: [x[0] + 100, x[1]], "chooses key 1.., which must be from 0 to 39"),
    (lambda x: [x[0].clamp(min=0).fill_(39), x[1]], r"chooses key 39, which .Causal\(\) .* hides"),
    (lambda x: [x[0].fill_(-1), x[1].fill_(30)], "chooses key 30, which"),
)


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_wrong_choice_of_one_rank_is_named_on_all(change: Any, message: str):
    whole, tokens = build("DeepseekV32").eval(), ids()
    choices = drawn_choices(2)

    def on_rank(rank: int, group: Any) -> None:
        cp = tw.ContextParallel(group, num_tokens=40, mask=tw.Causal(), layout=tw.contiguous(40, 2))
        model = hf.parallelize(copy.deepcopy(whole), cp, f"wrong_{rank}")
        given = hf.shard(cp, tokens, cu_seqlens=CU_SEQLENS, indices=choices)
        if rank == 0:
            given["indices"] = change([x.clone() for x in given["indices"]])
        with torch.no_grad(), pytest.raises(ValueError, match=f"rank 0: .*{message}"):
            model(**given)

    tw.loopback(2, on_rank)


def test_rows_of_a_batch_keep_their_choice_to_their_documents():
    """A mask for each row: a key of another document is refused, though it is a past one."""
    whole, tokens = build("DeepseekV32").eval(), ids(2)
    edges = (0, 40), (0, 23, 40)
    positions = torch.stack([torch.from_numpy(tw.lengths.position_ids(x)) for x in edges])
    rows = [drawn_choices(2, x) for x in edges]
    good = [torch.cat(pair) for pair in zip(*rows, strict=True)]
    bad = [x.clone() for x in good]
    bad[0][1, 39, 0] = 2

    def on_rank(rank: int, group: Any) -> None:
        cp = tw.ContextParallel(group, num_tokens=40, mask=tw.Causal(), layout=tw.contiguous(40, 2))
        model = hf.parallelize(copy.deepcopy(whole), cp, f"batch_{rank}")
        given = {"input_ids": cp.shard(tokens, 1), "position_ids": cp.shard(positions, 1)}
        with torch.no_grad():
            model(**given, use_cache=False, indices=hf.shard(cp, tokens, indices=good)["indices"])
            with pytest.raises(ValueError, match=r"position 39 chooses key 2, which .* hides"):
                model(
                    **given, use_cache=False, indices=hf.shard(cp, tokens, indices=bad)["indices"]
                )

    tw.loopback(2, on_rank)


def test_shard_refuses_choices_that_are_none():
    with pytest.raises(ValueError, match=r"indices\[0\] is torch.int64 \[1, 8, 3\]"):
        cp = tw.ContextParallel(tw.loopback(1, lambda rank, group: group)[0], num_tokens=9)
        hf.shard(cp, torch.zeros(1, 9, dtype=torch.int64), indices=[torch.zeros(1, 8, 3).long()])


def test_a_model_without_indexers_takes_no_choice():
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    whole = transformers.LlamaForCausalLM(config)

    def on_rank(rank: int, group: Any) -> None:
        cp = tw.ContextParallel(group, num_tokens=40, mask=tw.Causal(), layout=tw.contiguous(40, 2))
        model = hf.parallelize(copy.deepcopy(whole), cp, f"llama_{rank}")
        with pytest.raises(ValueError, match="LlamaForCausalLM has no layer with an indexer"):
            model(**hf.shard(cp, ids(), indices=drawn_choices(1)))

    tw.loopback(2, on_rank)


def test_a_call_that_was_refused_leaves_no_choice_behind():
    """Labels that were sharded by hand are refused after the call has taken the choice."""
    whole, tokens = build("DeepseekV32").eval(), ids()
    choices = drawn_choices(2, (0, 40))

    def on_rank(rank: int, group: Any) -> Tensor:
        cp = tw.ContextParallel(group, num_tokens=40, mask=tw.Causal(), layout=tw.contiguous(40, 2))
        model = hf.parallelize(copy.deepcopy(whole), cp, f"left_{rank}")
        given = hf.shard(cp, tokens, indices=choices)
        with torch.no_grad():
            with pytest.raises(ValueError, match="labels"):
                model(**given, labels=given["input_ids"])
            return hf.unshard(cp, model(**hf.shard(cp, tokens)).logits)

    with torch.no_grad():
        want = whole(tokens, use_cache=False).logits
    for found in tw.loopback(2, on_rank):
        assert (found - want).abs().max() < 1e-5

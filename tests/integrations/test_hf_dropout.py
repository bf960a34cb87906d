"""Dropout modules of a split model: the same numbers at any number of ranks and any layout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")
pytest.importorskip("peft", reason="needs peft")

from support.hf_adapters import adapted
from support.hf_models import build, case

import tilewise as tw
from tilewise.integrations import hf
from tilewise.integrations.transformers.dropout import RowDropout
from tilewise.integrations.transformers.forward import split_forward

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning"),
]
N = 12
MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: build("gpt2", resid_pdrop=0.3, embd_pdrop=0.2, attn_pdrop=0.0),
    "LoRA": lambda: with_dropout(adapted("LORA"), 0.4),
    "head": lambda: head(0.5),
}
Run = dict[str, Tensor]


def with_dropout(model: Any, p: float) -> Any:
    for module in model.modules():
        for name, adapters in module.named_children():
            if name == "lora_dropout":
                for adapter in adapters:
                    adapters[adapter] = nn.Dropout(p)
    return model


def head(p: float) -> Any:
    from transformers import LlamaConfig, LlamaForTokenClassification

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "head_dim": 8}
    more: dict[str, Any] = {"classifier_dropout": p}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=50, num_hidden_layers=2, **sizes, **more)
    return LlamaForTokenClassification(config)


def run(
    whole: Any, ids: Tensor, ranks: int, layout: Any, way: str, change: Any = lambda _: None
) -> Run:
    """Logits and summed gradients of one training call, of torch's seed 5."""
    torch.manual_seed(5)

    def on_rank(rank: int, group: Any) -> tuple[Tensor, Run]:
        model = copy.deepcopy(whole).train()
        change(model)
        if way == "forward":
            split_forward(model, group)
            logits = model(input_ids=ids).logits
            logits.square().sum().div(group_size(group)).backward()
        else:
            cp = tw.ContextParallel(group, num_tokens=N, layout=layout(N, ranks))
            hf.parallelize(model, cp, f"drops_{rank}")
            mine = model(**hf.shard(cp, ids)).logits
            mine[:, : cp.layout.size(rank)].square().sum().backward()
            logits = hf.unshard(cp, mine)
        grads = {n: x.grad for n, x in model.named_parameters() if x.grad is not None}
        return logits.detach(), grads

    results = tw.loopback(ranks, on_rank)
    summed = {n: sum(grads[n] for _, grads in results) for n in results[0][1]}
    return {"logits": results[0][0], **summed}  # pyright: ignore[reportReturnType]


def group_size(group: Any) -> int:
    return tw.ContextParallel(group, num_tokens=N).world_size


def largest(got: Run, want: Run) -> float:
    assert got.keys() == want.keys()
    return max(
        float((got[n] - x).abs().max() / x.abs().max().clamp(min=1)) for n, x in want.items()
    )


@pytest.mark.parametrize("name", MODELS)
def test_the_same_numbers_at_any_split(name: str):
    whole, ids = MODELS[name](), case((0, N)).input_ids
    one = run(whole, ids, 1, tw.contiguous, "parallelize")
    for ranks, layout in ((2, tw.zigzag), (3, tw.contiguous), (4, tw.striped)):
        assert largest(run(whole, ids, ranks, layout, "parallelize"), one) < 1e-5
    for ranks in (2, 3):
        assert largest(run(whole, ids, ranks, None, "forward"), one) < 1e-5
    plain = run(whole, ids, 1, tw.contiguous, "parallelize", nn.Module.eval)
    assert float((plain["logits"] - one["logits"]).abs().max()) > 1e-3


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("way", ["parallelize", "forward"])
@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_drops_the_same_again(name: str, way: str, reentrant: bool):
    whole, ids = MODELS[name](), case((0, N)).input_ids

    def checkpointed(model: Any) -> None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    want = run(whole, ids, 3, tw.zigzag, way)
    got = run(whole, ids, 3, tw.zigzag, way, checkpointed)
    assert largest(got, want) < 1e-6


def test_two_calls_before_backward_drop_apart_and_again_as_before():
    whole = MODELS["gpt2"]()
    short, long = torch.arange(2, 9)[None], torch.arange(3, 14)[None]

    def steps(again: bool) -> list[Run]:
        torch.manual_seed(1)

        def on_rank(rank: int, group: Any) -> Run:
            model = copy.deepcopy(whole).train()
            split_forward(model, group)
            if again:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            losses = [model(input_ids=x).logits.square().sum() for x in (short, long, short)]
            assert abs(float((losses[0] - losses[2]).detach())) > 1e-3  # another seed for each call
            torch.stack(losses).sum().backward()
            return {n: x.grad for n, x in model.named_parameters() if x.grad is not None}

        return tw.loopback(2, on_rank)

    for got, want in zip(steps(True), steps(False), strict=True):
        assert largest(got, want) < 1e-6


def test_a_checkpoint_within_a_layer_is_refused_and_unsplit_calls_run():
    whole, ids = MODELS["gpt2"](), case((0, N)).input_ids
    cp = tw.ContextParallel(num_tokens=N)
    model = hf.parallelize(copy.deepcopy(whole).train(), cp, "inner")
    inner = model.transformer.h[0].mlp
    forward = inner.forward
    inner.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    loss = model(**hf.shard(cp, ids)).logits.sum()
    with pytest.raises(ValueError, match=r"checkpoint by model\.gradient_checkpointing_enable"):
        loss.backward()
    with hf.unsplit(model):
        model(ids).logits.sum().backward()


def test_modules_that_do_not_see_text_and_other_models_stay_as_they_are():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    images: dict[str, Any] = {"mm_tokens_per_image": 4, "image_token_id": 49}
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=text | heads,
            vision_config=vision | {"image_size": 8, "patch_size": 4},
            **images,
        )
    ).train()
    model.model.vision_tower.added = nn.Dropout(0.5)
    model.model.language_model.layers[0].added = nn.Dropout(0.5)
    cp = tw.ContextParallel(num_tokens=N, mask=tw.Causal())
    hf.parallelize(model, cp, "images_drop")
    model(**hf.shard(cp, case((0, N)).input_ids))
    assert type(model.model.vision_tower.added) is nn.Dropout
    assert type(model.model.language_model.layers[0].added) is RowDropout
    other = RowDropout(0.5)
    torch.manual_seed(3)
    got = other(torch.ones(2, 3, 4))
    torch.manual_seed(3)
    assert torch.equal(got, nn.functional.dropout(torch.ones(2, 3, 4), 0.5))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of dynamo
@pytest.mark.parametrize("again", [False, True])
def test_compiled_it_drops_the_same(again: bool):
    whole, ids = MODELS["gpt2"](), case((0, N)).input_ids
    cp = tw.ContextParallel(num_tokens=N, mask=tw.Causal(), strategy=tw.ring(1))

    def step(backend: str | None) -> Run:
        model = hf.parallelize(copy.deepcopy(whole).train(), cp, "compiled_drops")
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if backend:
            model.compile(backend=backend)
        torch.manual_seed(5)
        logits = model(**hf.shard(cp, ids)).logits
        logits.square().sum().backward()
        return {n: x.grad for n, x in model.named_parameters() if x.grad is not None}

    assert largest(step("eager"), step(None)) < 1e-6

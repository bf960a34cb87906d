"""Images whose tokens see each other, split over ranks: Gemma 3 with its vision tower."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

import transformers
from support.hf_models import VOCABULARY, Result, config, errors, summed
from transformers import Gemma3Config, Gemma3ForConditionalGeneration
from transformers import masking_utils as mu

import tilewise as tw
from tilewise.integrations import hf
from tilewise.integrations.data import ShardingCollator
from tilewise.integrations.transformers.forward import split_forward
from tilewise.integrations.transformers.masks import read_mask

NUM_TOKENS = 35
IMAGE = VOCABULARY - 1
STARTS = (2, 14, 18, 27)  # of images of 4 tokens; the second and the third see each other
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "image_size": 8}
MAKE = torch.Generator().manual_seed(4)
IDS = torch.randint(3, VOCABULARY - 5, (1, NUM_TOKENS), generator=MAKE)
for at in STARTS:
    IDS[:, at : at + 4] = IMAGE
TYPES = (IDS == IMAGE).long()
LABELS = IDS.masked_fill(IDS == IMAGE, -100)
PIXELS = torch.randn(len(STARTS), 3, 8, 8, generator=MAKE).double()
BLOCKS = tw.masks.causal_with_blocks(NUM_TOKENS, [(2, 6), (14, 22), (27, 31)])


@pytest.fixture(autouse=True)
def all_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and RoPE of transformers compute in fp32, whatever the model's dtype."""
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "float", lambda x: to(x, torch.float64))


def build() -> Any:
    text = config("gemma3").to_dict()
    tokens: dict[str, Any] = {"image_token_id": IMAGE, "boi_token_index": 48, "eoi_token_index": 47}
    vision = VISION | {"num_attention_heads": 2, "patch_size": 4}
    made = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **tokens)
    torch.manual_seed(7)
    model = Gemma3ForConditionalGeneration._from_config(
        made, attn_implementation="sdpa", dtype=torch.float64
    )
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.1 * torch.randn_like(x))
    return model


def run(model: Any, cp: tw.ContextParallel | None, images: bool, **inputs: Any) -> Result:
    """Loss, logits and gradients, of the whole sequence or of this rank."""
    if images:
        seen = model.get_image_features(PIXELS, return_dict=True)
        if cp is not None:
            mine = cp.shard(TYPES[0].cumsum(0) - 1, 0)[cp.shard(TYPES[0], 0) == 1]
            seen.pooler_output = seen.pooler_output.flatten(0, 1)[mine][None]
        inputs["mm_encoder_outputs"] = {"image": seen}
    out = model(**inputs)
    out.loss.backward()
    logits = out.logits if cp is None else hf.unshard(cp, out.logits)
    grads = {
        name: torch.zeros_like(x) if x.grad is None else x.grad
        for name, x in model.named_parameters()
    }
    return Result(logits.detach(), out.loss.detach(), grads)


def split(world_size: int, images: bool, given: dict[str, Any], **options: Any) -> Result:
    whole = build()

    def on_rank(rank: int, group: Any) -> Result:
        cp = tw.ContextParallel(group, **{"num_tokens": NUM_TOKENS, "mask": tw.Causal(), **options})
        model, name = copy.deepcopy(whole), hf.register(cp, f"tilewise_{rank}")
        model.set_attn_implementation({"text_config": name})
        return run(model, cp, images, **hf.shard(cp, **given))

    return summed(tw.loopback(world_size, on_rank))


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (4, {}),
        (3, {"layout": tw.striped(NUM_TOKENS, 3)}),
        pytest.param(
            3, {"layout": tw.balanced(BLOCKS, NUM_TOKENS, 3, chunk=2)}, marks=pytest.mark.slow
        ),
        pytest.param(4, {"strategy": tw.ring(4), "mask": BLOCKS}, marks=pytest.mark.slow),
        pytest.param(11, {}, marks=pytest.mark.slow),
    ],
)
def test_images_see_each_other_over_ranks(world_size: int, options: dict):
    given = {"input_ids": IDS, "labels": LABELS, "token_type_ids": TYPES}
    want = run(build(), None, True, use_cache=False, **given)
    got = split(world_size, True, given, **options)
    assert max(errors(got, want).values()) < 1e-10
    assert float(want.grads["model.multi_modal_projector.mm_input_projection_weight"].norm()) > 0


def test_rows_with_images_and_of_text_become_documents():
    """Each row has images elsewhere or none, and padding on its right."""
    rows, kept = IDS.view(5, 7), torch.tensor([7, 7, 6, 4, 7])
    mask = (torch.arange(7) < kept[:, None]).long()
    given = {"input_ids": rows, "labels": LABELS.view(5, 7).masked_fill(mask == 0, -100)}
    given |= {"token_type_ids": TYPES.view(5, 7) * mask}
    want = run(build(), None, False, attention_mask=mask, use_cache=False, **given)
    got = split(3, False, given | {"attention_mask": mask})
    logits = torch.cat([want.logits[row, :n] for row, n in enumerate(kept)])
    assert (got.logits[0, : len(logits)] - logits).abs().max() < 1e-10
    assert max(errors(got, want._replace(logits=got.logits)).values()) < 1e-10


def test_a_model_for_images_is_proven_and_keeps_the_attention_of_its_vision():
    cp = tw.ContextParallel(num_tokens=NUM_TOKENS, mask=tw.Causal())
    model = hf.parallelize(build(), cp, "tilewise_images")
    names = model.config.text_config._attn_implementation, model.config.vision_config
    assert (names[0], names[1]._attn_implementation) == ("tilewise_images", "sdpa")


def test_the_collator_packs_token_types():
    """Given whole to every rank, as boundaries of documents are."""
    examples = [
        {"input_ids": [5, 9, 9], "token_type_ids": [0, 1, 1]},
        {"input_ids": [9, 9, 6, 0], "token_type_ids": [1, 1, 0, 0], "attention_mask": [1, 1, 1, 0]},
    ]
    for rank in range(2):
        share = ShardingCollator(tw.zigzag(8, 2), rank)(examples)
        assert share["token_type_ids"].tolist() == [[0, 1, 1, 1, 1, 0, 0, 0]]
    with pytest.raises(ValueError, match=r"token_type_ids have \[3\] tokens, input_ids \[3, 4\]"):
        ShardingCollator(tw.zigzag(8, 2), 0)([examples[0], {"input_ids": [1, 2, 3, 4]}])


def test_blocks_that_one_mask_cannot_stand_for_are_refused():
    """A rank's own types, other images in each row; blocks are cut where documents end."""
    numbers = torch.tensor([[-1, 0, 0, -1, 1, 1], [-1, 0, 0, 0, -1, -1]])
    for ids, tokens, message in (
        (numbers, 6, "rows of the batch have images at different tokens"),
        (numbers[:1], 11, "told of 6 tokens .* the sequence has 11; pass token_type_ids of the"),
    ):
        with pytest.raises(ValueError, match=message):
            read_mask(mu.blockwise_overlay(ids), (0, tokens))
    seen = mu.or_masks(mu.causal_mask_function, mu.blockwise_overlay(numbers[:1]))
    assert read_mask(seen, (0, 6)) == tw.masks.causal_with_blocks(6, [(1, 3), (4, 6)])
    text = mu.or_masks(mu.causal_mask_function, mu.blockwise_overlay(-torch.ones(1, 6)))
    assert read_mask(text, (0, 6)) == tw.Causal()
    apart = mu.blockwise_overlay(torch.tensor([[0, 0, -1, 0]]))  # of a prefix in two pieces
    dense = read_mask(apart, (0, 4)).dense(range(4), range(4)).astype(int).tolist()
    assert dense == [[1, 1, 0, 1], [1, 1, 0, 1], [0] * 4, [1, 1, 0, 1]]


def counting_model(name: str) -> Any:
    """A model that counts three positions for each token of an image."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = config("qwen3").to_dict() | {"rope_parameters": rope}
    vision: dict[str, Any] = {"depth": 1, "hidden_size": 16, "intermediate_size": 24}
    vision |= {"num_heads": 2, "patch_size": 4, "embed_dim": 16, "out_hidden_size": 32}
    vision |= {"deepstack_visual_indexes": [0]} if name == "Qwen3VL" else {}
    if name == "Qwen2VL":
        vision |= {"hidden_size": 32, "mlp_ratio": 2}
    if name != "Qwen3VL":
        text["model_type"] = "qwen2_5_vl_text" if "5" in name else "qwen2_vl_text"
    made = getattr(transformers, f"{name}Config")
    torch.manual_seed(7)
    return getattr(transformers, f"{name}ForConditionalGeneration")._from_config(
        made(text_config=text, vision_config=vision, image_token_id=IMAGE),
        attn_implementation="eager",
        dtype=torch.float64,
    )


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL"])
def test_images_need_the_positions_of_the_whole_sequence_however_they_come(name: str):
    """Features, token types or embeddings: with one-dimensional positions all are refused, with
    those of get_rope_index all are the unsplit model. Pixels and text alone need none.
    """
    whole = counting_model(name)
    ids = IDS.masked_fill(IDS == IMAGE, 3)
    ids[:, 2:6] = IMAGE  # all on rank 0
    pixels = torch.randn(16, 96, generator=torch.Generator().manual_seed(1)).double()
    grid, types = torch.tensor([[1, 4, 4]]), (ids == IMAGE).int()
    pictures: dict[str, Any] = {"pixel_values": pixels, "image_grid_thw": grid}
    want = whole(ids, labels=ids, mm_token_type_ids=types, **pictures).loss.detach()
    text = ids.masked_fill(ids == IMAGE, 4)
    want_text = whole(text, labels=text).loss.detach()
    positions, _ = whole.model.get_rope_index(ids, types, grid)
    whole.model.rope_deltas = None
    seen = whole.model.get_image_features(pixels, grid, return_dict=True)
    given = {"mm_encoder_outputs": {"image": seen}}
    routes = {"pixels": pictures, "features": given, "types": {**given, "image_grid_thw": grid}}
    if name != "Qwen3VL":  # which adds features to more layers than the first
        routes["embeddings"] = {}

    def on_rank(rank: int, group: Any) -> list[torch.Tensor]:
        layout = tw.contiguous(NUM_TOKENS, 2)
        cp = tw.ContextParallel(group, num_tokens=NUM_TOKENS, mask=tw.Causal(), layout=layout)
        model = hf.parallelize(copy.deepcopy(whole), cp, f"tilewise_{rank}")
        losses = [model(**hf.shard(cp, text, labels=text)).loss.detach()]
        for route, brought in routes.items():
            inputs: dict[str, Any] = {**hf.shard(cp, ids, labels=ids)}
            inputs |= brought if rank == 0 or route == "pixels" else {}
            if route == "pixels":
                inputs["mm_token_type_ids"] = types
                losses.append(model(**inputs).loss.detach())
                continue
            if route == "types":
                inputs["mm_token_type_ids"] = cp.shard(types, 1)
            if route == "embeddings":
                embeds = whole.get_input_embeddings()(ids).detach()
                embeds[ids == IMAGE] = torch.cat(list(seen.pooler_output)).detach()
                inputs = {**inputs, "inputs_embeds": cp.shard(embeds, 1)}
                del inputs["input_ids"]
            three = {"position_ids": cp.shard(positions, 2)}
            losses.append(model(**inputs | three).loss.detach())
            for flat in (inputs, {**inputs, "position_ids": None})[: 1 + (route == "types")]:
                with pytest.raises(ValueError, match=r"three positions.*get_rope_index"):
                    model(**flat)
            if route == "embeddings":
                with pytest.raises(ValueError, match=r"three positions.*get_rope_index"):
                    rows = copy.deepcopy(whole)
                    split_forward(rows, group)
                    rows(inputs_embeds=embeds)
        return losses

    got = torch.stack([torch.stack(x) for x in tw.loopback(2, on_rank)]).sum(0)
    assert (got - torch.stack([want_text, *[want] * len(routes)])).abs().max() < 1e-6

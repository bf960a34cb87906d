"""Models for images: rows with images, videos and text, split with whole pixels on every rank."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

import transformers
from support.hf_images import IMAGE, THREE, batch, build
from support.hf_models import build as build_text
from support.hf_models import config
from torch import Tensor

import tilewise as tw
from tilewise.integrations import hf
from tilewise.integrations.transformers.forward import split_forward
from tilewise.integrations.transformers.images import MODELS

Found = tuple[Tensor, dict[str, Tensor | None]]


@pytest.fixture(autouse=True)
def all_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and RoPE of transformers compute in fp32, whatever the model's dtype."""
    to: Any = torch.Tensor.to

    def kept(x: Tensor, *args: Any, **given: Any) -> Tensor:
        return to(x, *[torch.float64 if a is torch.float32 else a for a in args], **given)

    monkeypatch.setattr(torch.Tensor, "to", kept)
    monkeypatch.setattr(torch.Tensor, "float", lambda x: to(x, torch.float64))


def found(model: Any, inputs: dict[str, Any]) -> Found:
    """The loss, and the gradient of each parameter."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: x.grad for name, x in model.named_parameters()}


def in_forward(whole: Any, inputs: dict[str, Any], world_size: int, **given: Any) -> Found:
    """Whole rows in, as a Trainer's: the loss of each rank, the mean of their gradients."""

    def on_rank(_: int, group: Any) -> Found:
        model = copy.deepcopy(whole)
        split_forward(model, group)
        return found(model, {**inputs, **given})

    losses, grads = zip(*tw.loopback(world_size, on_rank), strict=True)
    assert all(torch.equal(x, losses[0]) for x in losses)
    return losses[0], {name: mean(name, grads, world_size) for name in grads[0]}


def in_own_loop(whole: Any, inputs: dict[str, Any], world_size: int) -> Found:
    """This rank's rows in: sums of losses and gradients."""

    def on_rank(rank: int, group: Any) -> Found:
        mask = inputs.get("attention_mask")
        num_tokens = inputs["input_ids"].shape[1] if mask is None else int(mask.sum())
        cp = tw.ContextParallel(group, num_tokens=num_tokens, mask=tw.Causal())
        model = hf.parallelize(copy.deepcopy(whole), cp, f"tilewise_{rank}")
        return found(model, hf.shard(cp, **inputs))

    losses, grads = zip(*tw.loopback(world_size, on_rank), strict=True)
    return torch.stack(losses).sum(), {name: mean(name, grads, 1) for name in grads[0]}


def mean(name: str, grads: Any, count: int) -> Tensor | None:
    """The sum over ranks, divided by count; every rank has a gradient, or none has."""
    shares = [x[name] for x in grads]
    if shares[0] is None:
        assert all(x is None for x in shares), name
        return None
    return torch.stack(shares).sum(0) / count


def same(got: Found, want: Found) -> None:
    tolerance = 1e-7 if "model.visual.embeddings.position_embedding.weight" in want[1] else 1e-9
    assert abs(float(got[0] - want[0])) < tolerance
    assert got[1].keys() == want[1].keys()
    for name, x in want[1].items():
        share = got[1][name]
        assert (share is None) == (x is None), name
        if x is not None and share is not None:
            assert float((share - x).abs().max()) < tolerance * max(1, float(x.abs().max())), name


@pytest.mark.parametrize("name", MODELS)
def test_rows_with_images_beside_text_are_the_unsplit_model(name: str):
    """Rows of two images, of none and of three, then of text alone: loss and each gradient, the
    tower's too. A batch of text leaves the tower without gradients.
    """
    whole = build(name)
    for images in ([2, 0, 3], [0, 0]):
        inputs = batch(whole, images)
        want = found(whole, inputs)
        same(in_forward(whole, inputs, 2), want)
        same(in_own_loop(whole, inputs, 3), want)
        tower = [x for k, x in want[1].items() if "vis" in k and x is not None]
        assert bool(tower) == (sum(images) > 0)


@pytest.mark.slow
@pytest.mark.parametrize("images", [[1], [5], [4, 1]])
@pytest.mark.parametrize("name", MODELS)
def test_any_number_of_images(name: str, images: list[int]):
    whole = build(name)
    inputs = batch(whole, images, seed=3)
    want = found(whole, inputs)
    for world_size in (2, 3):
        same(in_forward(whole, inputs, world_size), want)
        same(in_own_loop(whole, inputs, world_size), want)


@pytest.mark.parametrize("name", [*THREE, "gemma4", "llava_onevision"])
def test_videos_are_the_unsplit_model(name: str):
    """Beside images, where the model itself takes both in a batch."""
    whole = build(name)
    inputs = batch(whole, [0, 0] if name.startswith("glm") else [0, 2], videos=[2, 1])
    want = found(whole, inputs)
    same(in_forward(whole, inputs, 3), want)
    same(in_own_loop(whole, inputs, 2), want)


def _work_of_towers(whole: Any, inputs: Any, world_size: int) -> list[int]:
    """Patches, or crops, that each rank's tower computes in a split call."""
    seen = [0] * world_size

    def on_rank(rank: int, group: Any) -> None:
        model = copy.deepcopy(whole)
        split_forward(model, group)
        parts = dict(model.named_modules())
        (tower,) = (x for k, x in parts.items() if k in ("model.visual", "model.vision_tower"))

        def count(_: Any, args: tuple[Tensor, ...], given: dict[str, Any]) -> None:
            seen[rank] += len(args[0] if args else given["pixel_values"])

        tower.register_forward_pre_hook(count, with_kwargs=True)
        model(**inputs)

    tw.loopback(world_size, on_rank)
    return seen


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["qwen3_vl", "llava_next", "llava_onevision", "gemma4"])
def test_towers_are_level(name: str, world_size: int):
    """Each image is run by one rank, so that ranks differ by the largest one at most."""
    whole, make = build(name), torch.Generator().manual_seed(world_size)
    for seed in range(4):
        images = torch.randint(1, 6, (2,), generator=make).tolist()
        inputs = batch(whole, images, seed=seed)
        seen = _work_of_towers(whole, inputs, world_size)
        work = [1] * sum(images)
        if name == "qwen3_vl":
            work = inputs["image_grid_thw"].prod(-1).tolist()
        if name.startswith("llava"):
            own = [n == 1 or name == "llava_next" for n in images for _ in range(n)]
            crops = {(8, 16): 3, (16, 8): 3, (12, 16): 5}
            sizes = map(tuple, inputs["image_sizes"].tolist())
            work = [crops[x] if cut else 1 for x, cut in zip(sizes, own, strict=True)]
        nothing = max(0, world_size - len(work)) * min(work)  # of ranks without an image
        again = world_size * (name == "llava_onevision")  # at most, of uncropped ones
        assert sum(work) + nothing <= sum(seen) <= sum(work) + nothing + again
        assert max(seen) <= sum(work) / world_size + max(work), (images, seen)
        assert max(seen) <= 1.3 * sum(work) / world_size or len(work) < 3 * world_size


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "gemma4"])
def test_a_video_is_split_by_frames(name: str):
    """One of two frames, and beside it one of three."""
    whole = build(name)
    a_frame = 1 if name == "gemma4" else 16
    for videos, frames in (([1], [1, 1]), ([2], [3, 2])):
        inputs = batch(whole, [0], videos=videos)
        want = found(whole, inputs)
        same(in_forward(whole, inputs, 3), want)
        same(in_own_loop(whole, inputs, 2), want)
        assert _work_of_towers(whole, inputs, 2) == [a_frame * n for n in frames]


@pytest.mark.parametrize("images", [[1, 2], [3], [1, 1, 0, 4]])
def test_images_that_are_alone_in_their_row_are_cropped(images: list[int]):
    """LLaVA-OneVision's, which counts images of rows."""
    whole = build("llava_onevision")
    inputs = batch(whole, images)
    want = found(whole, inputs)
    for world_size in (2, 3):
        same(in_forward(whole, inputs, world_size), want)


def test_crops_one_after_another_are_split_by_image():
    whole = build("llava_next")
    inputs = batch(whole, [0, 3])
    want = found(whole, inputs)
    crops = [x[:n] for x, n in zip(inputs["pixel_values"], (3, 3, 5), strict=True)]
    inputs["pixel_values"] = torch.cat(crops)
    same(in_forward(whole, inputs, 2), want)
    assert sorted(_work_of_towers(whole, inputs, 2)) == [5, 6]


@pytest.mark.parametrize("name", ["qwen3_vl", "llava_next"])
def test_fewer_images_than_ranks(name: str):
    whole = build(name)
    few = batch(whole, [0, 2])
    want = found(whole, few)
    same(in_forward(whole, few, 3), want)
    same(in_own_loop(whole, few, 3), want)


def test_padding_on_the_left_is_the_unsplit_model():
    whole = build("qwen2_5_vl")
    inputs = batch(whole, [1, 3])
    for name in ("input_ids", "attention_mask", "labels", "mm_token_type_ids"):
        x, kept = inputs[name], inputs["attention_mask"][0].sum()
        inputs[name] = torch.stack([x[0].roll(len(x[0]) - int(kept)), x[1]])
    inputs["labels"][0, inputs["attention_mask"][0].argmax()] = -100  # predicted from padding
    same(in_forward(whole, inputs, 2), found(whole, inputs))


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma4", "llava"])
def test_packed_rows_count_positions_in_each_document(name: str):
    """One row of documents with several images each is the batch of these as rows."""
    whole = build(name)
    inputs = batch(whole, [2, 0, 1])
    kept = inputs["attention_mask"].bool()
    inputs["labels"][:, 0] = -100
    want = found(whole, inputs)
    packed = {k: x[kept][None] if x.shape[:2] == kept.shape else x for k, x in inputs.items()}
    del packed["attention_mask"]
    ends = torch.cat([torch.zeros(1), kept.sum(1).cumsum(0)]).int()
    same(in_forward(whole, packed, 2, cu_seq_lens_q=ends, cu_seq_lens_k=ends), want)
    same(in_own_loop(whole, {**packed, "cu_seqlens": ends}, 2), want)
    if name == "qwen3_vl":  # positions of one's own: of text, and three for images
        counted = {k: inputs[k] for k in ("input_ids", "mm_token_type_ids", "image_grid_thw")}
        three, _ = whole.model.get_rope_index(**counted, attention_mask=inputs["attention_mask"])
        text = (kept.cumsum(1) - 1)[None]
        positions = torch.cat([text, three])[:, kept][:, None]
        same(in_forward(whole, packed, 3, position_ids=positions), want)


def test_rows_of_one_batch_are_split_alike_in_a_loop_of_ones_own():
    """A batch of rows without padding, each with images at other tokens."""
    whole = build("qwen2_vl")
    inputs = batch(whole, [2, 2])
    kept = int(inputs["attention_mask"].sum(1).min())
    tokens = {k: x for k, x in inputs.items() if x.shape[:1] == (2,) and x.ndim == 2}
    cut = {k: x[:, :kept] for k, x in tokens.items() if k != "attention_mask"}
    rows = {**inputs, **cut}
    del rows["attention_mask"]
    assert int((rows["input_ids"] == IMAGE).sum()) == int((inputs["input_ids"] == IMAGE).sum())
    same(in_own_loop(whole, rows, 3), found(whole, rows))


def features_of(out: Any) -> Tensor:
    """[number of tokens, hidden] of all images; before transformers 5.24 in another place."""
    found = out.image_outputs.pooler_output if "image_outputs" in out else out.image_hidden_states
    return torch.cat([x.flatten(0, -2) for x in found]) if "image_outputs" in out else found[...]


def test_whole_features_come_back_with_their_gradient():
    """Features that a call on whole rows returns, in a loss of the caller's own."""
    for name in ("llava", "gemma3"):
        whole = build(name)
        inputs = batch(whole, [2, 1])
        del inputs["labels"]

        def seen(model: Any, inputs: dict[str, Any] = inputs) -> Found:
            out = model(**inputs)
            features = features_of(out)
            loss = features.square().mean() + out.logits[:, 2].mean()
            loss.backward()
            grads = {k: x.grad for k, x in model.named_parameters()}
            return features.detach(), grads

        def on_rank(_: int, group: Any, whole: Any = whole, seen: Any = seen) -> Found:
            model = copy.deepcopy(whole)
            split_forward(model, group)
            return seen(model)

        want = seen(copy.deepcopy(whole))
        features, grads = zip(*tw.loopback(2, on_rank), strict=True)
        assert all((x - want[0]).abs().max() < 1e-9 for x in features)
        got = torch.zeros(()), {k: mean(k, grads, 2) for k in grads[0]}
        same(got, (torch.zeros(()), want[1]))


@pytest.mark.parametrize("own_loop", [False, True])
def test_a_tower_that_drops_drops_alike_on_every_rank(own_loop: bool):
    """Tokens of a single image lie on several ranks, so their features are of one draw."""
    whole = build("llava")
    whole.config.vision_config.attention_dropout = 0.5
    for module in whole.model.vision_tower.modules():
        if hasattr(module, "dropout"):
            module.dropout = 0.5
    inputs = batch(whole, [1])
    seen: dict[int, Tensor] = {}

    def on_rank(rank: int, group: Any) -> None:
        cp = tw.ContextParallel(group, num_tokens=inputs["input_ids"].shape[1], mask=tw.Causal())
        model = copy.deepcopy(whole)
        tower = model.model.vision_tower
        tower.register_forward_hook(lambda *x: seen.update({rank: x[2].last_hidden_state.detach()}))
        if own_loop:
            hf.parallelize(model, cp, f"tilewise_{rank}")(**hf.shard(cp, **inputs))
        else:
            split_forward(model, group)
            model(**inputs)

    tw.loopback(2, on_rank)
    assert torch.equal(seen[0], seen[1])
    still = whole.eval().model.vision_tower(inputs["pixel_values"]).last_hidden_state
    assert not torch.equal(seen[0], still)


def changed(inputs: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    made = {**inputs, name: value}
    return {k: x for k, x in made.items() if x is not None}


def wrong_inputs(model: Any) -> dict[str, tuple[dict[str, Any], str]]:
    """Batches of three rows, the first of text, and what is said of them."""
    inputs = batch(model, [0, 1, 2])
    types, grid = inputs["mm_token_type_ids"], inputs["image_grid_thw"]
    larger, cut = grid.clone(), inputs["input_ids"].clone()
    larger[1] = torch.tensor([1, 2, 8])
    cut[2, cut[2] == IMAGE] = 7
    return {
        "no grid": (changed(inputs, "image_grid_thw", None), "image_grid_thw is not given.*row 1"),
        "no types": (changed(inputs, "mm_token_type_ids", None), "mm_token_type_ids is not.*row 1"),
        "another grid": (
            changed(inputs, "image_grid_thw", larger[[0, 2, 1]]),
            "patches of pixels, but image_grid_thw makes|row 2 has",
        ),
        "grids of other tokens": (
            changed(
                changed(inputs, "image_grid_thw", grid[:2]),
                "pixel_values",
                inputs["pixel_values"][: int(grid[:2].prod(-1).sum())],
            ),
            r"row 2 has 4 image tokens after 4 of rows before it, but image_grid_thw makes images "
            r"of \[4, 2\] tokens, 6 in all",
        ),
        "too few pixels": (
            changed(inputs, "pixel_values", inputs["pixel_values"][:-4]),
            "patches of pixels, but image_grid_thw makes",
        ),
        "types of other tokens": (
            changed(inputs, "mm_token_type_ids", types.roll(1, 1)),
            r"mm_token_type_ids is 0 at token \d+ of row 1",
        ),
        "images cut off": (changed(inputs, "input_ids", cut), r"row 2 has 0 image tokens|of row 2"),
    }


@pytest.mark.parametrize("own_loop", [False, True])
def test_images_that_do_not_fit_are_refused_with_their_row_on_every_rank(own_loop: bool):
    whole = build("qwen2_5_vl")
    for inputs, message in wrong_inputs(whole).values():
        errors = refusals(whole, [inputs] * 2, own_loop)
        assert len(errors) == 2
        assert len(set(errors)) == 1, errors
        said = re.sub(r"document (.) \(row . of an attention_mask\)", r"row \1", errors[0])
        assert re.search(message, said), said


def refusals(whole: Any, inputs_by_rank: list[dict[str, Any]], own_loop: bool) -> list[str]:
    """What each rank says, without its own number."""
    said: list[str] = []

    def on_rank(rank: int, group: Any) -> None:
        inputs, model = inputs_by_rank[rank], copy.deepcopy(whole)
        try:
            if own_loop:
                num_tokens = int(inputs["attention_mask"].sum())
                cp = tw.ContextParallel(group, num_tokens=num_tokens, mask=tw.Causal())
                hf.parallelize(model, cp, f"tilewise_{rank}")(**hf.shard(cp, **inputs))
            else:
                split_forward(model, group)
                model(**inputs)
        except ValueError as error:
            said.append(str(error).split("\nraised on")[0])

    tw.loopback(len(inputs_by_rank), on_rank)
    return said


def test_features_that_do_not_fill_their_tokens_are_refused_with_their_row():
    whole = build("llava")
    inputs = batch(whole, [1, 2])
    inputs["pixel_values"] = inputs["pixel_values"][:2]
    for own_loop in (False, True):
        errors = refusals(whole, [inputs] * 2, own_loop)
        assert len(errors) == 2
        assert len(set(errors)) == 1
        assert re.search(r"row 1.* has 8 image tokens after 4 of rows before it", errors[0])
        assert "image features makes images of [4, 4] tokens, 8 in all" in errors[0]


def test_positions_that_a_processor_dropped_and_other_images_on_a_rank_are_refused():
    whole = build("qwen3_vl")
    inputs = batch(whole, [0, 2])
    flat = torch.arange(inputs["input_ids"].shape[1])[None].expand(2, -1)
    embeds = whole.get_input_embeddings()(inputs["input_ids"]).detach()
    others = {**inputs, "pixel_values": inputs["pixel_values"] + 1}
    without = {k: x for k, x in inputs.items() if k not in ("pixel_values", "image_grid_thw")}
    cases: list[tuple[list[dict[str, Any]], bool, str]] = [
        ([{**inputs, "position_ids": flat}] * 2, False, "one position for each token, but row 1"),
        (
            [changed({**inputs, "inputs_embeds": embeds}, "input_ids", None)] * 2,
            False,
            "images need input_ids",
        ),
        ([{**inputs, "position_ids": flat[None].expand(2, -1, -1)}] * 2, False, r"\[3 or 4, 2, "),
    ]
    for own_loop in (False, True):
        cases.append(([inputs, others], own_loop, "ranks disagree on images|images"))
        cases.append(([inputs, without], own_loop, "images"))
    for by_rank, own_loop, message in cases:
        errors = refusals(whole, by_rank, own_loop)
        assert len(errors) == 2, message
        assert all(re.search(message, error) for error in errors), errors


def test_models_that_nobody_tried_are_refused_by_name():
    """Text models, and those whose layers attend to images beside the text."""
    ids = torch.arange(3, 12)[None]
    pixels = {"pixel_values": torch.zeros(1, 3, 8, 8), "aspect_ratio_ids": torch.ones(1, 1).long()}
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pixels}
    own = {name: x for name, x in inputs.items() if name != "aspect_ratio_ids"}
    text = config("llama").to_dict() | {"model_type": "mllama_text_model"}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "image_size": 8}
    vision |= {"attention_heads": 2, "num_global_layers": 1, "patch_size": 4}
    vision |= {"vision_output_dim": 32, "intermediate_layers_indices": [0]}
    made = transformers.MllamaConfig(
        vision_config=vision, text_config=text | {"cross_attention_layers": [1]}
    )
    mllama: Any = transformers.MllamaForConditionalGeneration(made)
    mllama = mllama.to(torch.float64)
    for kind, model in (("llama", build_text("llama", dtype=torch.float64)), ("mllama", mllama)):
        errors = refusals(model, [inputs] * 2, False) + refusals(model, [own] * 2, True)
        assert len(errors) == 4
        for error in errors:
            assert f"pixel_values cannot be split in a model of type {kind}" in error
            assert "cp_size=1" in error

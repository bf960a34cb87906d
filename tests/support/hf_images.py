"""Tiny models of transformers for images, one of each type, and batches of rows with images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from support.hf_models import SIZES, VOCABULARY, config
from torch import Tensor, nn

IMAGE, VIDEO = VOCABULARY - 1, VOCABULARY - 2
START, END = 45, 46  # of an image
MERGE = 2
GRIDS = ((1, 4, 4), (1, 2, 4), (1, 4, 2), (1, 6, 2), (1, 4, 6))  # of images, in turn
THREE = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "glm4v",
    "glm46v",
)  # models that count three positions
SIDE = 8  # of a square image
CLIP = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "image_size": SIDE}
CLIP |= {"num_attention_heads": 2, "patch_size": 4}
CHANNELS = 3 * 2 * 2**2  # numbers of a patch: colours, frames, pixels


def build(name: str, dtype: Any = torch.float64) -> Any:
    """A model with weights of its own seed, in training mode."""
    torch.manual_seed(7)
    made = _config(name)
    model_class: Any = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(made)]
    model = model_class._from_config(made, attn_implementation="sdpa", dtype=dtype)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.1 * torch.randn_like(x))
    return model.train()


def _config(name: str) -> Any:
    tokens: dict[str, Any] = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    if name in THREE:
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
        text = config("qwen3").to_dict() | {"rope_parameters": rope}
        text["model_type"] = f"{name}_text"
        vision: dict[str, Any] = {"depth": 2, "hidden_size": 16, "intermediate_size": 24}
        vision |= {"num_heads": 2, "patch_size": 2, "spatial_merge_size": MERGE}
        vision["out_hidden_size"] = 32
        match name:
            case "qwen2_vl":
                vision |= {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
            case "qwen2_5_vl":
                vision |= {"window_size": 8, "fullatt_block_indexes": [1]}
            case "qwen3_vl":
                vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
            case "glm4v" | "glm46v":
                text["model_type"] = "glm4v_text"
                rope["partial_rotary_factor"] = 1.0
                vision["image_size"] = SIDE
        return _class(name)(text_config=text, vision_config=vision, **tokens)
    tokens |= {"image_token_index": IMAGE, "video_token_index": VIDEO}
    match name:
        case "gemma3":
            text, vision = config("gemma3").to_dict(), CLIP
            tokens["mm_tokens_per_image"] = 4
        case "gemma4":
            text = SIZES | {"head_dim": 8, "global_head_dim": 8, "sliding_window": 4}
            text |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
            text |= {"num_hidden_layers": 4, "use_bidirectional_attention": "vision"}
            text |= {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 4}
            vision = CLIP | {"head_dim": 8, "num_key_value_heads": 2, "pooling_kernel_size": 2}
            vision |= {"position_embedding_size": 16, "patch_size": 2}
            tokens |= {"audio_config": None, "audio_token_id": VOCABULARY - 3}
        case _:
            text = config("llama").to_dict()
            vision = CLIP | {"model_type": "clip_vision_model", "projection_dim": 16}
            tokens["vision_feature_select_strategy"] = "default"
            tokens["image_grid_pinpoints"] = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [16, 16]]
    return _class(name)(text_config=text, vision_config=vision, **tokens)


def _class(name: str) -> type:
    return transformers.CONFIG_MAPPING[name]


def batch(model: Any, images: Sequence[int], *, videos: Sequence[int] = (), seed: int = 0) -> Any:
    """Rows with a number of images each, padded on the right, and what a processor makes beside.

    Args:
        images: of each row.
        videos: of each row, after its images.
    """
    make = torch.Generator().manual_seed(seed)
    name, dtype = model.config.model_type, next(model.parameters()).dtype
    pictures = {
        "image": _pixels(name, images, make, dtype),
        "video": _videos(name, sum(videos), make, dtype),
    }
    kinds = [
        ["image"] * count + ["video"] * clips
        for count, clips in zip(images, videos or [0] * len(images), strict=True)
    ]
    sizes = {kind: iter(_sizes(model, kind, given)) for kind, given in pictures.items()}
    rows, types = [], []
    for row in kinds:
        parts = [_text(int(torch.randint(2, 7, (), generator=make)), make)]
        numbers = [torch.zeros(len(parts[0]))]
        for kind in row:
            for tokens in next(sizes[kind]):
                token = VIDEO if kind == "video" and not name.startswith("glm") else IMAGE
                parts += [torch.tensor([START, *[token] * tokens, END]), _text(2, make)]
                number = 2 if kind == "video" else 1
                numbers.append(torch.tensor([0, *[number] * tokens, 0, 0, 0]))
        rows.append(torch.cat(parts))
        types.append(torch.cat(numbers).long())
    columns = max(map(len, rows))
    ids, numbers = (
        torch.stack([nn.functional.pad(x, (0, columns - len(x))) for x in made])
        for made in (rows, types)
    )
    mask = torch.stack([(torch.arange(columns) < len(x)).long() for x in rows])
    placed = (ids == IMAGE) | (ids == VIDEO)
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    given["labels"] = ids.masked_fill(placed | (mask == 0), -100)
    if name in THREE or name == "gemma4":
        given["mm_token_type_ids"] = numbers
    elif name == "gemma3":
        given["token_type_ids"] = placed.long()
    return given | pictures["image"] | pictures["video"]


def _text(length: int, make: torch.Generator) -> Tensor:
    return torch.randint(3, 40, (length,), generator=make)


def _pixels(name: str, rows: Sequence[int], make: torch.Generator, dtype: Any) -> dict[str, Tensor]:
    """Images of several sizes, where models take these; rows: how many each has."""
    count = sum(rows)
    if not count:
        return {}
    if name in THREE:
        grid = torch.tensor([GRIDS[i % len(GRIDS)] for i in range(count)])
        patches = torch.randn(int(grid.prod(-1).sum()), CHANNELS, generator=make).to(dtype)
        return {"pixel_values": patches, "image_grid_thw": grid}
    if name == "gemma4":
        shapes = [((4, 4), (2, 4), (4, 2))[i % 3] for i in range(count)]
        places = torch.full((count, 16, 2), -1)
        for at, (height, width) in zip(places, shapes, strict=True):
            number = torch.arange(height * width)
            at[: len(number)] = torch.stack([number % width, number // width], -1)
        pixels = torch.rand(count, 16, 12, generator=make).to(dtype)
        return {"pixel_values": pixels, "image_position_ids": places}
    if name in ("llava_next", "llava_onevision"):
        shapes = [((8, 16), (16, 8), (12, 16))[i % 3] for i in range(count)]
        pixels = torch.randn(count, 5, 3, SIDE, SIDE, generator=make).to(dtype)
        given = {"pixel_values": pixels, "image_sizes": torch.tensor(shapes)}
        if name == "llava_onevision":  # it crops an image that is alone in its row
            given["batch_num_images"] = torch.tensor([x for x in rows if x])
        return given
    return {"pixel_values": torch.randn(count, 3, SIDE, SIDE, generator=make).to(dtype)}


def _videos(name: str, count: int, make: torch.Generator, dtype: Any) -> dict[str, Tensor]:
    """Videos of two or three frames (of models that count three positions) or of two."""
    if not count:
        return {}
    if name in THREE:
        grid = torch.tensor([(2 + i % 2, 4, 4) for i in range(count)])
        patches = torch.randn(int(grid.prod(-1).sum()), CHANNELS, generator=make).to(dtype)
        return {"pixel_values_videos": patches, "video_grid_thw": grid}
    if name == "gemma4":
        frames = torch.tensor([2 + i % 2 for i in range(count)])
        places = torch.tensor([(i % 4, i // 4) for i in range(16)]).repeat(int(frames.sum()), 1, 1)
        pixels = torch.rand(len(places), 16, 12, generator=make).to(dtype)
        given = {"pixel_values_videos": pixels, "video_position_ids": places}
        return given | {"num_frames_per_video": frames}
    pixels = torch.randn(count, 2, 3, SIDE, SIDE, generator=make).to(dtype)
    return {"pixel_values_videos": pixels}


def _sizes(model: Any, kind: str, given: dict[str, Tensor]) -> list[list[int]]:
    """Tokens of each image; of each video those of its frames, where text parts these."""
    if not given:
        return []
    tower = getattr(model.model, f"get_{kind}_features")
    with torch.no_grad():
        found = tower(**given, return_dict=True).pooler_output
    parts = kind == "video" and model.config.model_type in ("qwen3_vl", "glm4v", "glm46v")
    frames = given["video_grid_thw"][:, 0].tolist() if parts else [1] * len(found)
    return [[len(x) // n] * n for x, n in zip(found, frames, strict=True)]


def merged(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A batch of batches of one row each, as a collator makes it."""
    columns = max(x["input_ids"].shape[1] for x in rows)
    names = {name: None for row in rows for name in row}
    made: dict[str, Any] = {}
    for name in names:
        found = [row[name] for row in rows if name in row]
        if name in ("input_ids", "attention_mask", "labels", "token_type_ids", "mm_token_type_ids"):
            fill = -100 if name == "labels" else 0
            found = [nn.functional.pad(x, (0, columns - x.shape[1]), value=fill) for x in found]
        made[name] = torch.cat(found)
    return made

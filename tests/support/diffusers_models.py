"""Tiny models of diffusers with random weights, and whole inputs of any shape for them."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Any]

FLUX: dict[str, Any] = {
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
}
WAN: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 32,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
IMAGE: dict[str, Any] = {"image_dim": 16, "added_kv_proj_dim": 24}


def _normal(draw: Random, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(draw.randrange(1 << 30)))


def flux() -> nn.Module:
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    return FluxTransformer2DModel(**FLUX, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8))


def flux_inputs(draw: Random) -> Inputs:
    """A text of any length beside an image of at least 6 tokens."""
    height, width, text = draw.randint(3, 6), draw.randint(2, 5), draw.randint(1, 9)
    ids = torch.zeros(height * width, 3)
    ids[:, 1], ids[:, 2] = (
        torch.arange(height * width) // width,
        torch.arange(height * width) % width,
    )
    return {
        "hidden_states": _normal(draw, 2, height * width, 4),
        "encoder_hidden_states": _normal(draw, 2, text, 32),
        "pooled_projections": _normal(draw, 2, 32),
        "timestep": torch.tensor([0.5, 0.7]),
        "img_ids": ids,
        "txt_ids": torch.zeros(text, 3),
    }


def wan(*, image: bool = False) -> nn.Module:
    """Wan; with image: it also attends to an image that it begins with."""
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    return WanTransformer3DModel(**WAN, cross_attn_norm=True, **(IMAGE if image else {}))


def wan_inputs(draw: Random, *, image: bool = False, token_times: bool = False) -> Inputs:
    """A video of at least 8 tokens; token_times: with a time for each of them."""
    frames, height, width = draw.randint(2, 4), 2 * draw.randint(2, 3), 2 * draw.randint(2, 4)
    inputs = {
        "hidden_states": _normal(draw, 2, 4, frames, height, width),
        "encoder_hidden_states": _normal(draw, 2, 512 if image else draw.randint(1, 9), 16),
        "timestep": torch.tensor([500, 700]),
    }
    if token_times:
        inputs["timestep"] = (500 * _normal(draw, 2, frames * height * width // 4)).abs().long()
    if image:
        inputs["encoder_hidden_states_image"] = _normal(draw, 2, 7, 16)
    return inputs


def flux2() -> nn.Module:
    from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel

    return Flux2Transformer2DModel(
        **FLUX, timestep_guidance_channels=32, axes_dims_rope=(4, 4, 4, 4)
    )


def flux2_inputs(draw: Random) -> Inputs:
    inputs = flux_inputs(draw)
    del inputs["pooled_projections"]
    num_text = len(inputs["txt_ids"])
    image, text = torch.zeros(2, len(inputs["img_ids"]), 4), torch.zeros(2, num_text, 4)
    image[..., :3], text[..., 3] = inputs["img_ids"], torch.arange(num_text)
    return {**inputs, "guidance": torch.tensor([1.0, 2.0]), "img_ids": image, "txt_ids": text}


def chrono_edit() -> nn.Module:
    from diffusers.models.transformers.transformer_chronoedit import ChronoEditTransformer3DModel

    return ChronoEditTransformer3DModel(**WAN, **IMAGE)


def qwen_image() -> nn.Module:
    from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
    )


def qwen_image_inputs(draw: Random) -> Inputs:
    """A text of at least 6 tokens, without padding."""
    height, width = draw.randint(3, 6), draw.randint(2, 5)
    return {
        "hidden_states": _normal(draw, 2, height * width, 16),
        "encoder_hidden_states": _normal(draw, 2, draw.randint(6, 12), 32),
        "timestep": torch.tensor([0.5, 0.7]),
        "img_shapes": [[(1, height, width)]] * 2,
    }

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


def ovis_image() -> nn.Module:
    from diffusers.models.transformers.transformer_ovis_image import OvisImageTransformer2DModel

    return OvisImageTransformer2DModel(**FLUX, out_channels=4, axes_dims_rope=(4, 4, 8))


def longcat_image() -> nn.Module:
    from diffusers.models.transformers.transformer_longcat_image import (
        LongCatImageTransformer2DModel,
    )

    return LongCatImageTransformer2DModel(**FLUX, axes_dims_rope=[4, 4, 8])


def unpooled_inputs(draw: Random) -> Inputs:
    """Those of a Flux that is told nothing of the text as a whole."""
    inputs = flux_inputs(draw)
    del inputs["pooled_projections"]
    return inputs


def flux2() -> nn.Module:
    from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel

    return Flux2Transformer2DModel(
        **FLUX, timestep_guidance_channels=32, axes_dims_rope=(4, 4, 4, 4)
    )


def flux2_inputs(draw: Random) -> Inputs:
    inputs = unpooled_inputs(draw)
    num_text = len(inputs["txt_ids"])
    image, text = torch.zeros(2, len(inputs["img_ids"]), 4), torch.zeros(2, num_text, 4)
    image[..., :3], text[..., 3] = inputs["img_ids"], torch.arange(num_text)
    return {**inputs, "guidance": torch.tensor([1.0, 2.0]), "img_ids": image, "txt_ids": text}


def skyreels(**options: Any) -> nn.Module:
    from diffusers.models.transformers.transformer_skyreels_v2 import SkyReelsV2Transformer3DModel

    return SkyReelsV2Transformer3DModel(**WAN, **options)


def forcing_inputs(draw: Random) -> Inputs:
    """A video with a time for each of its frames, of which there are an even number."""
    inputs = wan_inputs(draw)
    frames = 2 * draw.randint(1, 2)
    height, width = inputs["hidden_states"].shape[3:]
    return {
        **inputs,
        "hidden_states": _normal(draw, 2, 4, frames, height, width),
        "timestep": (500 * _normal(draw, 2, frames)).abs().long(),
        "enable_diffusion_forcing": True,
    }


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


def padding(draw: Random, length: int) -> Tensor:
    """A mask [2, length] with some ones: at the end of one entry, anywhere in the other."""
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[0, draw.randint(1, length) :] = 0
    mask[1, draw.sample(range(length), draw.randint(0, length - 1))] = 0
    return mask


def qwen_image_inputs(draw: Random, *, padded: bool = False) -> Inputs:
    height, width, text = draw.randint(3, 6), draw.randint(2, 5), draw.randint(1, 12)
    inputs = {
        "hidden_states": _normal(draw, 2, height * width, 16),
        "encoder_hidden_states": _normal(draw, 2, text, 32),
        "timestep": torch.tensor([0.5, 0.7]),
        "img_shapes": [[(1, height, width)]] * 2,
    }
    return inputs | ({"encoder_hidden_states_mask": padding(draw, text)} if padded else {})


def ltx() -> nn.Module:
    from diffusers.models.transformers.transformer_ltx import LTXVideoTransformer3DModel

    return LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=12,
        cross_attention_dim=24,
        num_layers=2,
        caption_channels=16,
    )


def ltx_inputs(draw: Random) -> Inputs:
    frames, height, width = draw.randint(1, 3), draw.randint(2, 3), draw.randint(2, 4)
    text = draw.randint(1, 9)
    return {
        "hidden_states": _normal(draw, 2, frames * height * width, 4),
        "encoder_hidden_states": _normal(draw, 2, text, 16),
        "timestep": torch.tensor([500, 700]),
        "encoder_attention_mask": padding(draw, text),
        "num_frames": frames,
        "height": height,
        "width": width,
    }


def ltx2(*, rope_type: str = "interleaved", **options: Any) -> nn.Module:
    from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformer3DModel

    return LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=12,
        cross_attention_dim=24,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=16,
        num_layers=2,
        caption_channels=16,
        rope_type=rope_type,
        **options,
    )


def ltx2_inputs(draw: Random, *, token_times: bool = False) -> Inputs:
    """A video with its sound; token_times: with a time for each token of the video."""
    inputs, sound = ltx_inputs(draw), draw.randint(2, 7)
    inputs |= {
        "audio_hidden_states": _normal(draw, 2, sound, 4),
        "audio_encoder_hidden_states": _normal(draw, 2, 5, 16),
        "audio_num_frames": sound,
        "audio_encoder_attention_mask": padding(draw, 5),
    }
    if token_times:
        shape = inputs["hidden_states"].shape[:2]
        inputs["audio_timestep"] = inputs["timestep"]
        inputs["timestep"] = (500 * _normal(draw, *shape)).abs()
    return inputs


def minimax_h3() -> nn.Module:
    from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Transformer3DModel

    return MiniMaxH3Transformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        ffn_dim=32,
        in_channels=4,
        audio_in_channels=4,
        text_dim=16,
        freq_dim=32,
        time_embed_hidden_dim=32,
        time_embed_dim=16,
        rope_freq_dim=2,
    )


def minimax_h3_inputs(draw: Random) -> Inputs:
    """Text, sound and video of one sequence, in any order."""
    video, text, sound = draw.randint(4, 12), draw.randint(1, 6), draw.randint(1, 5)
    num_tokens = video + text + sound
    order = torch.tensor(draw.sample(range(num_tokens), num_tokens))
    places = [x.sort().values for x in order.split([video, text, sound])]
    tags = torch.zeros(num_tokens, dtype=torch.long)
    tags[places[1]], tags[places[2]] = 1, 2
    return {
        "hidden_states": _normal(draw, 1, video, 16),
        "audio_hidden_states": _normal(draw, 1, sound, 4),
        "encoder_hidden_states": _normal(draw, 1, text, 16),
        "timestep": torch.tensor([0.5, 0.7]),
        "timestep_indices": torch.arange(num_tokens) % 2,
        "token_tags": tags,
        "position_ids": _normal(draw, num_tokens, 3).abs(),
        "video_indices": places[0],
        "text_indices": places[1],
        "audio_indices": places[2],
    }


HUNYUAN: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 1,
    "num_refiner_layers": 1,
    "text_embed_dim": 16,
}


def hunyuan_video(**options: Any) -> nn.Module:
    from diffusers.models.transformers.transformer_hunyuan_video import (
        HunyuanVideoTransformer3DModel,
    )

    return HunyuanVideoTransformer3DModel(
        **HUNYUAN,
        num_single_layers=1,
        pooled_projection_dim=8,
        rope_axes_dim=(4, 4, 4),
        **options,
    )


def hunyuan_video_inputs(draw: Random) -> Inputs:
    """A video beside a text that is padded at its end, each batch entry's by another length."""
    frames, height, width = draw.randint(1, 3), 2 * draw.randint(2, 3), 2 * draw.randint(1, 4)
    text = draw.randint(1, 9)
    return {
        "hidden_states": _normal(draw, 2, 4, frames, height, width),
        "timestep": torch.tensor([500, 700]),
        "encoder_hidden_states": _normal(draw, 2, text, 16),
        "encoder_attention_mask": _ending(draw, text),
        "pooled_projections": _normal(draw, 2, 8),
        "guidance": torch.tensor([1000.0, 2000.0]),
    }


def _ending(draw: Random, length: int) -> Tensor:
    """A mask [2, length] that hides the end of one entry."""
    lengths = torch.tensor([draw.randint(1, length), length])
    return (torch.arange(length) < lengths[:, None]).long()


def hunyuan_video15() -> nn.Module:
    from diffusers.models.transformers.transformer_hunyuan_video15 import (
        HunyuanVideo15Transformer3DModel,
    )

    sizes: dict[str, Any] = {**HUNYUAN, "num_layers": 2, "rope_axes_dim": (4, 4, 4)}
    return HunyuanVideo15Transformer3DModel(**sizes, text_embed_2_dim=8, image_embed_dim=8)


def hunyuan_video15_inputs(draw: Random, *, image: bool = True) -> Inputs:
    """A video beside two texts and an image; without one all its numbers are 0."""
    inputs, glyphs = hunyuan_video_inputs(draw), draw.randint(1, 5)
    del inputs["pooled_projections"], inputs["guidance"]
    return {
        **inputs,
        "timestep": torch.tensor([500.0, 700.0]),
        "encoder_hidden_states_2": _normal(draw, 2, glyphs, 8),
        "encoder_attention_mask_2": padding(draw, glyphs),
        "image_embeds": image * _normal(draw, 2, 3, 8),
    }


def hunyuan_image(**options: Any) -> nn.Module:
    from diffusers.models.transformers.transformer_hunyuanimage import (
        HunyuanImageTransformer2DModel,
    )

    return HunyuanImageTransformer2DModel(
        **HUNYUAN, num_single_layers=1, rope_axes_dim=(6, 6), **options
    )


def hunyuan_image_inputs(draw: Random, *, glyphs: bool = False) -> Inputs:
    """A picture beside a text, and beside the text of its glyphs."""
    inputs = hunyuan_video15_inputs(draw)
    inputs["hidden_states"] = _normal(draw, 2, 4, draw.randint(3, 5), draw.randint(2, 5))
    del inputs["image_embeds"]
    if not glyphs:
        del inputs["encoder_hidden_states_2"], inputs["encoder_attention_mask_2"]
    return inputs


def framepack() -> nn.Module:
    from diffusers.models.transformers.transformer_hunyuan_video_framepack import (
        HunyuanVideoFramepackTransformer3DModel,
    )

    sizes: dict[str, Any] = {**HUNYUAN, "num_layers": 2}
    return HunyuanVideoFramepackTransformer3DModel(
        **sizes,
        num_single_layers=2,
        pooled_projection_dim=8,
        rope_axes_dim=(4, 4, 4),
        has_image_proj=True,
        image_proj_dim=8,
        has_clean_x_embedder=True,
    )


def framepack_inputs(draw: Random, *, num_entries: int = 2) -> Inputs:
    """A video behind its history, beside an image and a text."""
    inputs = hunyuan_video_inputs(draw)
    frames, height, width = inputs["hidden_states"].shape[2:]
    inputs["image_embeds"] = _normal(draw, 2, 3, 8)
    for name, count in {"clean": 1, "history_2x": 2, "history_4x": 4}.items():
        inputs[f"latents_{name}"] = _normal(draw, 2, 4, count, height, width)
    inputs = {name: x[:num_entries] for name, x in inputs.items()}
    for name, count in {"clean": 1, "history_2x": 2, "history_4x": 4}.items():
        inputs[f"indices_latents_{name}"] = torch.arange(count)
    return {**inputs, "indices_latents": torch.arange(20, 20 + frames)}


def longcat_audio(**options: Any) -> nn.Module:
    from diffusers.models.transformers.transformer_longcat_audio_dit import (
        LongCatAudioDiTTransformer,
    )

    model = LongCatAudioDiTTransformer(
        dit_dim=24, dit_depth=2, dit_heads=2, dit_text_dim=16, latent_dim=4, **options
    )
    for parameter in model.parameters():  # many are zeros at first
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def longcat_audio_inputs(draw: Random, *, padded: bool = False) -> Inputs:
    sound, text = draw.randint(6, 14), draw.randint(1, 9)
    inputs = {
        "hidden_states": _normal(draw, 2, sound, 4),
        "encoder_hidden_states": _normal(draw, 2, text, 16),
        "encoder_attention_mask": padding(draw, text).bool(),
        "timestep": torch.tensor([0.5, 0.7]),
        "latent_cond": _normal(draw, 2, sound, 4),
    }
    return inputs | ({"attention_mask": _ending(draw, sound).bool()} if padded else {})


def helios(*, guidance_cross_attn: bool = True, **options: Any) -> nn.Module:
    from diffusers.models.transformers.transformer_helios import HeliosTransformer3DModel

    return HeliosTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_dim=(4, 4, 4),
        guidance_cross_attn=guidance_cross_attn,
        **options,
    )


def helios_inputs(draw: Random) -> Inputs:
    """A video with some or none of its history."""
    frames, height, width = draw.randint(1, 3), 4 * draw.randint(1, 2), 4 * draw.randint(1, 2)
    inputs = {
        "hidden_states": _normal(draw, 2, 4, frames, height, width),
        "timestep": torch.tensor([500, 700]),
        "encoder_hidden_states": _normal(draw, 2, draw.randint(1, 9), 16),
        "indices_hidden_states": torch.arange(20, 20 + frames).expand(2, -1),
    }
    for name, frames in {"short": 1, "mid": 2, "long": 8}.items():
        if draw.random() < 0.7 or (name != "short" and "latents_history_short" in inputs):
            inputs[f"latents_history_{name}"] = _normal(draw, 2, 4, frames, height, width)
            inputs[f"indices_latents_history_{name}"] = torch.arange(frames).expand(2, -1)
        if "latents_history_short" not in inputs:
            break
    return inputs

"""Models of diffusers 0.42 that tests compare with one process, and what each layer attends to.

A sequence is named by the tensors whose rows it is made of, in their order: an argument by its
name, an output by its module's.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from tilewise.integrations.diffusers.internals import Cuts, Gather, Split


class Attends(NamedTuple):
    """Tensors that the queries and the keys of an attention layer are rows of.

    One that is never split is whole on every rank.
    """

    queries: tuple[str, ...]
    keys: tuple[str, ...]


class ModelSplit(NamedTuple):
    """The part of a class's split that its own plan does not say.

    Attributes:
        layers: by a part of the layer's path, the first that fits. None: the layer's keys are whole
            on every rank, so that it stays as it is.
        splits: tensors that are split beside those of the plan.
        whole_outputs: modules whose output every rank computes whole.
        cuts: in place of the class's plan, if it has none, or one for other sizes of it.
        gathers_within: what is gathered goes on in the model, whole on every rank, before it is
            split again, so that gradients of it are shares.
        output: the split tensor whose rows are gathered.
        leading: arguments of modules that count rows from the first on, such as those of the first
            frame; each rank gets how many of them are its own.
        refused: values of the model's configuration that cannot be split, with the reason.
    """

    layers: Mapping[str, Attends | None]
    splits: tuple[Split, ...] = ()
    whole_outputs: tuple[str, ...] = ()
    cuts: Cuts | None = None
    gathers_within: bool = False
    output: str = "hidden_states"
    leading: tuple[str, ...] = ()
    refused: tuple[tuple[str, object, str], ...] = ()


_ITSELF = Attends(("hidden_states",), ("hidden_states",))
_WITH_TEXT = Attends(*2 * (("encoder_hidden_states", "hidden_states"),))
_TO_TEXT = Attends(("hidden_states",), ("encoder_hidden_states",))
_TO_VIDEO = Attends(("audio_hidden_states",), ("hidden_states",))
_BESIDE_TEXT = Attends(*2 * (("x_embedder", "encoder_hidden_states"),))
_BEFORE_TEXT = Attends(*2 * (("hidden_states", "encoder_hidden_states"),))

_FLUX = Cuts(
    (
        *(Split("", name, None, 1, 3) for name in ("hidden_states", "encoder_hidden_states")),
        *(Split("", name, None, 0, 2) for name in ("img_ids", "txt_ids")),
    ),
    (Gather("proj_out", 0, 1),),
)
_FRAMEPACK = Cuts(
    (
        Split("transformer_blocks.0", "hidden_states", None, 1, 3),
        *(
            Split(f"{blocks}.*", name, part, 0, 2)
            for blocks, name in (
                ("transformer_blocks", "freqs_cis"),
                ("single_transformer_blocks", "image_rotary_emb"),
            )
            for part in (0, 1)
        ),
    ),
    (Gather("single_transformer_blocks.-1", 0, 1),),
)
_LONGCAT_AUDIO = Cuts(
    (
        Split("blocks.0", "hidden_states", None, 1, 3),
        Split("blocks.*", "mask", None, 1, 2),
        *(Split("blocks.*", "rope", part, 0, 2) for part in (0, 1)),
    ),
    (Gather("blocks.-1", 0, 1),),
)
_SKYREELS = Cuts(
    (
        *(Split("rope", part, None, 1, 4) for part in (0, 1)),
        Split("blocks.0", "hidden_states", None, 1, 3),
        Split("blocks.*", "temb", None, 2, 4),  # a time for each token
    ),
    (Gather("norm_out", 0, 1),),  # what comes next is scaled by the times of all tokens
)

_HELIOS = Cuts(
    (
        Split("blocks.*.attn1", "hidden_states", None, 1, 3),
        Split("blocks.*.attn1", "rotary_emb", None, 1, 3),
        Split("blocks.*.attn2", "hidden_states", None, 1, 3),
        Split("blocks.*.ffn", "hidden_states", None, 1, 3),
    ),
    tuple(Gather(f"blocks.*.{layer}", 0, 1) for layer in ("attn1", "attn2", "ffn")),
)
_HUNYUAN = ModelSplit(
    {"attn": _BESIDE_TEXT},
    cuts=Cuts(
        (
            Split("x_embedder", 0, None, 1, 3),
            *(Split("rope", part, None, 0, 2) for part in (0, 1)),
        ),
        (Gather("proj_out", 0, 1),),
    ),
    output="x_embedder",
)

MODELS: Mapping[str, ModelSplit] = MappingProxyType(
    {
        "ChronoEditTransformer3DModel": ModelSplit({"attn1": _ITSELF, "attn2": None}),
        "Flux2Transformer2DModel": ModelSplit({"attn": _WITH_TEXT}),
        "FluxTransformer2DModel": ModelSplit({"attn": _WITH_TEXT}),
        "HeliosTransformer3DModel": ModelSplit(
            {"attn1": _ITSELF, "attn2": None},
            whole_outputs=("proj_out",),
            cuts=_HELIOS,
            gathers_within=True,
            refused=(("is_amplify_history", True, "scales keys by their place in the whole"),),
        ),
        "HunyuanImageTransformer2DModel": _HUNYUAN,
        "HunyuanVideo15Transformer3DModel": _HUNYUAN,
        "HunyuanVideoFramepackTransformer3DModel": ModelSplit(
            {"attn": _BEFORE_TEXT},
            whole_outputs=("proj_out",),
            cuts=_FRAMEPACK,
            gathers_within=True,
        ),
        "HunyuanVideoTransformer3DModel": _HUNYUAN._replace(leading=("num_tokens",)),
        "LongCatAudioDiTTransformer": ModelSplit(
            {"self_attn": _ITSELF, "cross_attn": None},
            whole_outputs=("proj_out",),
            cuts=_LONGCAT_AUDIO,
            gathers_within=True,
        ),
        "LongCatImageTransformer2DModel": ModelSplit({"attn": _WITH_TEXT}, cuts=_FLUX),
        "LTX2VideoTransformer3DModel": ModelSplit(
            {
                "attn1": _ITSELF,
                "attn2": _TO_TEXT,
                "video_to_audio_attn": _TO_VIDEO,
                **dict.fromkeys(("audio_attn1", "audio_attn2", "audio_to_video_attn")),
            },
            (
                Split("", "timestep", None, 1, 2),
                Split("", "video_keyframes_mask", None, 1, 3),
                *(Split("rope", part, None, 2, 4) for part in (0, 1)),
                *(Split("cross_attn_rope", part, None, 1, 3) for part in (0, 1)),
                *(Split("cross_attn_rope", part, None, 2, 4) for part in (0, 1)),
            ),
            ("audio_proj_out",),
        ),
        "LTXVideoTransformer3DModel": ModelSplit(
            {"attn1": _ITSELF, "attn2": _TO_TEXT}, (Split("", "timestep", None, 1, 2),)
        ),
        "MiniMaxH3Transformer3DModel": ModelSplit({"token_refiner": None, "attn": _ITSELF}),
        "OvisImageTransformer2DModel": ModelSplit({"attn": _WITH_TEXT}, cuts=_FLUX),
        "QwenImageTransformer2DModel": ModelSplit({"attn": _WITH_TEXT}),
        "SkyReelsV2Transformer3DModel": ModelSplit(
            {"attn1": _ITSELF, "attn2": None},
            whole_outputs=("proj_out",),
            cuts=_SKYREELS,
            gathers_within=True,
        ),
        "WanTransformer3DModel": ModelSplit({"attn1": _ITSELF, "attn2": None}),
    }
)

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
        refused: values of the model's configuration that cannot be split, with the reason.
    """

    layers: Mapping[str, Attends | None]
    splits: tuple[Split, ...] = ()
    whole_outputs: tuple[str, ...] = ()
    cuts: Cuts | None = None
    gathers_within: bool = False
    output: str = "hidden_states"
    refused: tuple[tuple[str, object, str], ...] = ()


_ITSELF = Attends(("hidden_states",), ("hidden_states",))
_WITH_TEXT = Attends(*2 * (("encoder_hidden_states", "hidden_states"),))
_TO_TEXT = Attends(("hidden_states",), ("encoder_hidden_states",))
_TO_VIDEO = Attends(("audio_hidden_states",), ("hidden_states",))
_BESIDE_TEXT = Attends(*2 * (("x_embedder", "encoder_hidden_states"),))

_HELIOS = Cuts(
    (
        Split("blocks.*.attn1", "hidden_states", None, 1, 3),
        Split("blocks.*.attn1", "rotary_emb", None, 1, 3),
        Split("blocks.*.attn2", "hidden_states", None, 1, 3),
        Split("blocks.*.ffn", "hidden_states", None, 1, 3),
    ),
    tuple(Gather(f"blocks.*.{layer}", 0, 1) for layer in ("attn1", "attn2", "ffn")),
)
_HUNYUAN_VIDEO = Cuts(
    (
        Split("x_embedder", 0, None, 1, 3),
        *(Split("rope", part, None, 0, 2) for part in (0, 1)),
    ),
    (Gather("proj_out", 0, 1),),
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
        "HunyuanVideoTransformer3DModel": ModelSplit(
            {"attn": _BESIDE_TEXT},
            cuts=_HUNYUAN_VIDEO,
            output="x_embedder",
            refused=(
                ("image_condition_type", "token_replace", "treats the first frame's rows apart"),
            ),
        ),
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
        "QwenImageTransformer2DModel": ModelSplit({"attn": _WITH_TEXT}),
        "WanTransformer3DModel": ModelSplit({"attn1": _ITSELF, "attn2": None}),
    }
)

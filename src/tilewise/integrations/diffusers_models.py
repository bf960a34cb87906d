"""Models of diffusers 0.42 that tests compare with one process, and what each layer attends to.

A sequence is named by the arguments whose rows it is made of, in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from tilewise.integrations.diffusers_internals import Split


class Attends(NamedTuple):
    """Arguments that the queries and the keys of an attention layer are rows of.

    An argument that is never split is whole on every rank.
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
    """

    layers: Mapping[str, Attends | None]
    splits: tuple[Split, ...] = ()
    whole_outputs: tuple[str, ...] = ()


_ITSELF = Attends(("hidden_states",), ("hidden_states",))
_WITH_TEXT = Attends(*2 * (("encoder_hidden_states", "hidden_states"),))
_TO_TEXT = Attends(("hidden_states",), ("encoder_hidden_states",))
_TO_VIDEO = Attends(("audio_hidden_states",), ("hidden_states",))

MODELS: Mapping[str, ModelSplit] = MappingProxyType(
    {
        "ChronoEditTransformer3DModel": ModelSplit({"attn1": _ITSELF, "attn2": None}),
        "Flux2Transformer2DModel": ModelSplit({"attn": _WITH_TEXT}),
        "FluxTransformer2DModel": ModelSplit({"attn": _WITH_TEXT}),
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

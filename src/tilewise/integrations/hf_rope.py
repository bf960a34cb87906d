"""RoPE that depends on more than one's rows: on the largest position, or on where images are.

"dynamic" and "longrope" of transformers take the largest position of the tokens at hand. Hooks on
the modules that compute cosines and sines add the largest position of all ranks to these, and take
its cosines and sines away again. Models with a get_rope_index (Qwen-VL) count three positions for
each token of an image, from all tokens before it: images are refused where these are not given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.context_parallel import ContextParallel
from tilewise.transport.agreement import agree, agree_on_largest
from tilewise.transport.resolve import transport_for

IMAGES = re.compile("pixel_values|grid_thw|features")


def rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """Those of all layers, or of each type of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    for one in (found,) if "rope_type" in found else found.values():
        if isinstance(one, dict) and "rope_type" in one:
            yield one


class RopeLengths:
    """The lengths that RoPE of the models that run over one ContextParallel depends on.

    agreed says whether the ranks took one length in this forward pass.
    """

    def __init__(self, cp: ContextParallel):
        self.cp, self.agreed = cp, False

    def agree_in(self, model: nn.Module) -> None:
        """Make a model take the largest position of all ranks; refuse images without positions."""
        if any(hasattr(module, "get_rope_index") for module in model.modules()):
            if not hasattr(model, "_tilewise_lengths"):
                model.register_forward_pre_hook(_refuse_flat_images, with_kwargs=True)
            model._tilewise_lengths = self  # pyright: ignore[reportArgumentType]
        for module in model.modules():
            kinds = getattr(module, "rope_type", "")
            kinds = list(kinds.values()) if isinstance(kinds, dict) else [kinds]
            if any(isinstance(kind, str) and _depends(kind) for kind in kinds):
                if not hasattr(module, "_tilewise_lengths"):
                    module.register_forward_pre_hook(_with_last, with_kwargs=True)
                    module.register_forward_hook(_without_last)
                module._tilewise_lengths = self  # pyright: ignore[reportArgumentType]

    def __deepcopy__(self, memo: dict[int, Any]) -> RopeLengths:
        """A copied model has the same registration."""
        return self

    def largest(self, position: int) -> int:
        self.agreed = True
        return agree_on_largest(transport_for(self.cp.group), "largest position", position)

    def refused(self, config: Any, position_ids: Tensor | None) -> str | None:
        """Return whether RoPE has other frequencies on this rank than on another, and what helps.

        All ranks call it, before the first attention of a forward pass.
        """
        if self.agreed or not any(_depends(rope["rope_type"]) for rope in rope_parameters(config)):
            return None
        if position_ids is None:
            position_ids = self.cp.position_ids
        own = int(position_ids.max()) if position_ids.numel() else 0
        largest = agree_on_largest(transport_for(self.cp.group), "largest position", own)
        if _regime(config, own + 1) == _regime(config, largest + 1):
            return None
        return (
            f"RoPE of this model depends on the largest position, which is {own} on this rank and "
            f"{largest} on another; make the model run by hf.parallelize(model, cp), with which "
            "ranks agree on it"
        )


def _depends(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"


def _regime(config: Any, length: int) -> list[int | bool]:
    """Return the part of a length on which the frequencies depend."""
    return [
        length > rope["original_max_position_embeddings"]
        if rope["rope_type"] == "longrope"
        else max(length, config.max_position_embeddings)
        for rope in rope_parameters(config)
        if _depends(rope["rope_type"])
    ]


def _refuse_flat_images(module: Any, _: Any, given: dict[str, Any]) -> None:
    images = [name for name, x in given.items() if x is not None and IMAGES.search(name)]
    ids = given.get("position_ids")
    if images and (ids is None or ids.ndim != 3):
        transport = transport_for(module._tilewise_lengths.cp.group)
        error = (
            f"{images[0]} is given, and this model counts three positions for each token of an "
            "image, from those of all tokens before it; pass position_ids of its get_rope_index "
            "for the whole sequence, sharded: cp.shard(position_ids, 2), and cu_seq_lens_q"
        )
        agree(transport, None, error)


def _with_last(module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    ids = given["position_ids"] if "position_ids" in given else args[1]
    largest = module._tilewise_lengths.largest(int(ids.max()))
    ids = torch.cat([ids, ids.new_full((*ids.shape[:-1], 1), largest)], -1)
    if "position_ids" in given:
        return args, given | {"position_ids": ids}
    return (args[0], ids, *args[2:]), given


def _without_last(_: nn.Module, args: Any, result: Any) -> Any:
    if isinstance(result, Tensor):
        return result[..., :-1, :]
    return tuple(x[..., :-1, :] for x in result)

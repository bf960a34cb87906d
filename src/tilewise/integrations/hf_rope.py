"""RoPE whose frequencies depend on the largest position: that of all ranks, not of one's rows.

"dynamic" and "longrope" of transformers take the largest position of the tokens at hand. Hooks on
the modules that compute cosines and sines add the largest position of all ranks to these, and take
its cosines and sines away again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.context_parallel import ContextParallel
from tilewise.transport.agreement import agree_on_largest
from tilewise.transport.resolve import transport_for


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
        """Make a model's modules that depend on the largest position take that of all ranks."""
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
        """Whether RoPE has other frequencies on this rank than on another, and what helps.

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
    """What of a length the frequencies depend on."""
    return [
        length > rope["original_max_position_embeddings"]
        if rope["rope_type"] == "longrope"
        else max(length, config.max_position_embeddings)
        for rope in rope_parameters(config)
        if _depends(rope["rope_type"])
    ]


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

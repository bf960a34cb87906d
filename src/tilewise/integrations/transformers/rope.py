"""RoPE that depends on more than one's rows: on the largest position, or on where images are.

"dynamic" and "longrope" of transformers take the largest position of the tokens at hand. Hooks on
the modules that compute cosines and sines add the largest position of all ranks to these, and take
its cosines and sines away again. Models with a get_rope_index (Qwen-VL) count three positions for
each token of an image, from all tokens before it: where these are not given, their text model must
get what its own embedding made of tokens, in which there are no images.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import tilewise as tw
from tilewise.integrations.transformers.saved import NotSaved, Shared
from tilewise.transport.agreement import agree, agree_on_largest

FLAT_IMAGES = (
    "the text model gets other inputs than the embeddings of input_ids, or positions that were "
    "counted on this rank's rows; it counts three positions for each token of an image, from those "
    "of all tokens before it: pass position_ids of its get_rope_index for the whole sequence, "
    "sharded: cp.shard(position_ids, 2), and cu_seq_lens_q, after hf.parallelize"
)


def rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the RoPE parameters of a configuration: one for all layers, or one for each type of
    layer.
    """
    found = getattr(config, "rope_parameters", None) or {}
    for one in (found,) if "rope_type" in found else found.values():
        if isinstance(one, dict) and "rope_type" in one:
            yield one


class RopeLengths(Shared):
    """The lengths that RoPE of the models that run over one ContextParallel depends on.

    agreed says whether the ranks took one length in this forward pass.

    Args:
        name: under which the ContextParallel is registered with transformers.
    """

    def __init__(self, cp: tw.ContextParallel, name: str = ""):
        self.cp, self.name, self.agreed = cp, name, False

    def splits(self, config: Any) -> bool:
        """Return whether calls of the text model of a configuration are split."""
        return config._attn_implementation == self.name

    def agree_in(self, model: Any) -> None:
        """Make a model take the largest position of all ranks; refuse images without positions."""
        counting = [module for module in model.modules() if hasattr(module, "get_rope_index")]
        if counting:
            _watch_images(model, counting, self)
        for module in model.modules():
            kinds = getattr(module, "rope_type", "")
            kinds = list(kinds.values()) if isinstance(kinds, dict) else [kinds]
            if any(isinstance(kind, str) and _depends(kind) for kind in kinds):
                if not hasattr(module, "_tilewise_lengths"):
                    module.register_forward_pre_hook(_with_last, with_kwargs=True)
                    module.register_forward_hook(_without_last)
                text = model.config.get_text_config(decoder=True)
                module._tilewise_lengths = self, text  # pyright: ignore[reportArgumentType]

    def largest(self, position: int) -> int:
        self.agreed = True
        return agree_on_largest(
            tw.transport.transport_for(self.cp.group), "largest position", position
        )

    def refused(self, config: Any, position_ids: Tensor | None) -> str | None:
        """Return whether RoPE has other frequencies on this rank than on another, and what helps.

        All ranks call it, before the first attention of a forward pass.
        """
        if self.agreed or not any(_depends(rope["rope_type"]) for rope in rope_parameters(config)):
            return None
        if position_ids is None:
            position_ids = self.cp.position_ids
        own = int(position_ids.max()) if position_ids.numel() else 0
        largest = agree_on_largest(
            tw.transport.transport_for(self.cp.group), "largest position", own
        )
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
    """Return what the RoPE frequencies depend on at a length: equal values, equal frequencies."""
    return [
        length > rope["original_max_position_embeddings"]
        if rope["rope_type"] == "longrope"
        else max(length, config.max_position_embeddings)
        for rope in rope_parameters(config)
        if _depends(rope["rope_type"])
    ]


class _Images(NotSaved):
    """Inputs of a model that counts positions of images, and those that its text model gets.

    Attributes:
        text: the text model.
        given: position_ids of the calls in progress of modules that count, the outermost first.
        embedded: the last result of the embedding of tokens.
    """

    def __init__(self, text: Any, lengths: RopeLengths):
        self.text, self.lengths = text, lengths
        self.given: list[Any] = []
        self.embedded: Tensor | None = None


def _watch_images(model: Any, counting: list[nn.Module], lengths: RopeLengths) -> None:
    """Refuse calls that bring images without their three positions.

    Args:
        counting: the modules that can count them.
    """
    hooked = hasattr(model, "_tilewise_images")
    if hooked and model._tilewise_images is not None:
        model._tilewise_images.lengths = lengths
        return
    config = model.config.get_text_config(decoder=True)
    inner = (x for x in model.modules() if getattr(x, "config", None) is config)
    *_, text = (model, *(x for x in inner if hasattr(x, "get_input_embeddings")))
    images = _Images(text, lengths)
    for module in {id(x): x for x in (model, text, *counting)}.values():
        module._tilewise_images = images  # pyright: ignore[reportArgumentType]
    if hooked:  # a pickled model has the hooks
        return
    for module in counting:
        module.register_forward_pre_hook(_counts_begin, with_kwargs=True)
        module.register_forward_hook(_counts_end, always_call=True)
    text.register_forward_pre_hook(_refuse_flat_images, with_kwargs=True)


def _counts_begin(module: Any, _: Any, given: dict[str, Any]) -> None:
    images: _Images | None = module._tilewise_images
    if images is None:
        return
    images.given.append(given.get("position_ids"))
    embedding = images.text.get_input_embeddings()  # PEFT may have put another in its place
    if "_tilewise_images" not in vars(embedding):
        embedding.register_forward_hook(_embedded)
    embedding._tilewise_images = images


def _counts_end(module: Any, *_: Any) -> None:
    images: _Images | None = module._tilewise_images
    if images is not None:
        images.given.pop()
        images.embedded = None


def _embedded(module: Any, _: Any, result: Tensor) -> None:
    images: _Images | None = module._tilewise_images
    if images is not None:
        images.embedded = result


def _refuse_flat_images(text: Any, _: Any, given: dict[str, Any]) -> None:
    images: _Images | None = text._tilewise_images
    if images is None or not images.lengths.splits(text.config):
        return
    ids, embeds = given.get("position_ids"), given.get("inputs_embeds")
    first = images.given[0] if images.given else ids
    if first is not None and first.ndim == 3:
        return
    foreign = embeds is not None and embeds is not images.embedded
    if foreign or (ids is not None and ids.ndim == 3):
        agree(tw.transport.transport_for(images.lengths.cp.group), None, FLAT_IMAGES)


def _lengths_of(module: Any) -> RopeLengths | None:
    """The lengths on which ranks agree in a module that computes cosines, if its model is split."""
    lengths, config = module._tilewise_lengths
    return lengths if lengths is not None and lengths.splits(config) else None


def _with_last(module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    lengths = _lengths_of(module)
    if lengths is None:
        return None
    ids = given["position_ids"] if "position_ids" in given else args[1]
    largest = lengths.largest(int(ids.max()))
    ids = torch.cat([ids, ids.new_full((*ids.shape[:-1], 1), largest)], -1)
    if "position_ids" in given:
        return args, given | {"position_ids": ids}
    return (args[0], ids, *args[2:]), given


def _without_last(module: nn.Module, args: Any, result: Any) -> Any:
    if _lengths_of(module) is None:
        return None
    if isinstance(result, Tensor):
        return result[..., :-1, :]
    return tuple(x[..., :-1, :] for x in result)

"""Images and videos in a split call: features of this rank's tokens, and positions of whole rows.

    pixels     -> this rank's images -> the model's tower -> features of this rank's tokens
    whole rows -> the model's get_rope_index -> positions of this rank's tokens

Images are assigned to ranks, and a rank runs the model's tower on its own. Features then go to the
ranks that have their tokens, and their gradients back, so that the gradients of the tower's
parameters add up over ranks, as those of all others do. One image, and images that cannot be told
apart, are computed on every rank. Models that count three positions for each token do so once, by
document.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import tilewise as tw
from tilewise.integrations.data import OF_IMAGES
from tilewise.integrations.seeds import agreed_seed
from tilewise.integrations.transformers.image_shares import GRIDS, KINDS, PIXELS, images_of
from tilewise.integrations.transformers.saved import not_compiled
from tilewise.masks.base import as_ints
from tilewise.transport.agreement import agree, settled
from tilewise.transport.means import on_every_rank

MODELS = (  # model types whose tower and text model tests compare with the unsplit model's
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "glm46v"),
    *("gemma3", "gemma4", "llava", "llava_next", "llava_onevision"),
)
KIND_IDS = "mm_token_type_ids"
SHOWN = 8  # images in an error


class WholeTokens(NamedTuple):
    """The tokens of a batch that every rank knows.

    Args:
        ids: [batch, num_tokens], in the order of the layout.
        types: of their kind, 0 for text, as ids; None: not given.
        edges: boundaries of documents in the flattened ids.
        names: of the documents, in errors.
    """

    ids: Tensor
    types: Tensor | None
    edges: Sequence[int]
    names: Sequence[str]


def has_images(given: Mapping[str, Any]) -> bool:
    """Return whether a call brings images or videos, and not this rank's features of them."""
    features = given.get("mm_encoder_outputs")
    return not features and any(given.get(name) is not None for name in (*PIXELS, *GRIDS))


def fusing_model(base: Any) -> Any:
    """The module that puts features of images among embeddings of tokens; None: of a text model."""
    return next((x for x in base.modules() if hasattr(x, "get_placeholder_mask")), None)


def refused_images(called: Any, given: Mapping[str, Any]) -> str | None:
    """Why a call of a model with images is not split; None if it is.

    Args:
        called: the model, or what PEFT made of it.
    """
    kind, names = called.config.model_type, [x for x in (*PIXELS, *GRIDS) if x in given]
    takes_features = fusing_model(called) is not None
    if kind in MODELS and takes_features:
        return None
    other = "hf.parallelize takes features of this rank's tokens as mm_encoder_outputs, and "
    return (
        f"{', '.join(names)} cannot be split in a model of type {kind}, which no test compares "
        f"with the unsplit model (those of type {', '.join(MODELS)} are); "
        f"{other * takes_features}cp_size=1 splits nothing"
    )


def fields_of_images(given: Mapping[str, Any]) -> str:
    """Facts of a call's images that ranks must have in common: shapes, and sums of their bits."""
    found = {name: x for name, x in sorted(given.items()) if name in OF_IMAGES and x is not None}
    return ", ".join(
        f"{name} {list(x.shape)} {_bits(x)}" if isinstance(x, Tensor) else f"{name} {x}"
        for name, x in found.items()
    )


def _bits(x: Tensor) -> int:
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = x.detach().contiguous().flatten().view(words[x.element_size()])
    return int(bits.sum(dtype=torch.int64))


class ImageFeatures(NamedTuple):
    """Features of the images of a batch.

    Args:
        rows: [number of tokens here, hidden].
        owners: whose layout says which rank has which; None: every rank has all.
        counts: tokens of each image of the batch.
    """

    rows: Tensor
    owners: tw.ContextParallel | None
    counts: list[int]


class SplitImages:
    """The images of one split call.

    Args:
        base: the model.
        cp: which tokens each rank owns.

    Attributes:
        features: of images and of videos, where the model's tower has run.
        seed: of a tower that drops.
        towers_run: a tower is running.
    """

    def __init__(self, base: Any, cp: tw.ContextParallel, tokens: WholeTokens) -> None:
        self.model, self.cp, self.tokens = fusing_model(base), cp, tokens
        self.transport = tw.transport.transport_for(cp.group)
        self.features: dict[str, ImageFeatures] = {}
        self.seed: int | None = None
        self.towers_run = False

    def positions(self, given: Mapping[str, Any], *, flat: bool = False) -> Tensor | None:
        """[3, batch, num_tokens] of a model that counts three for each token; None: of others.

        Args:
            given: the arguments of the model's call.
            flat: it has positions of its own, one for each token.
        Raises:
            ValueError: naming the row, for what does not fit together.
        """
        if not hasattr(self.model, "get_rope_index"):
            return None
        if flat:
            raise ValueError(
                f"position_ids have one position for each token, but {self._first()} has images, "
                f"of which {type(self.model).__name__} counts three for each token: leave "
                "position_ids out (cu_seq_lens_q says where packed documents end), or pass "
                "[3, rows, columns]"
            )
        for kind, pixels, grid in zip(KINDS, PIXELS, GRIDS, strict=True):
            if given.get(pixels) is not None or given.get(grid) is not None:
                self._check_grid(kind, grid, given.get(grid), given.get(pixels))
        ids, types = self.tokens.ids.flatten(), self._checked_types().flatten()
        cut = [
            nn.utils.rnn.pad_sequence([x[a:b] for a, b in pairwise(self.tokens.edges)], True)
            for x in (ids, types, torch.ones_like(ids))
        ]
        count = self.model.get_rope_index
        known = _parameters(count).keys() & {*GRIDS, "second_per_grid_ts"}
        grids = {name: given.get(name) for name in sorted(known)}
        try:
            found, _ = count(cut[0], **{KIND_IDS: cut[1], "attention_mask": cut[2]}, **grids)
        except (RuntimeError, StopIteration, TypeError, ValueError) as error:
            raise ValueError(
                f"{type(self.model).__name__} cannot count the positions of images by "
                f"{KIND_IDS} and {', '.join(x for x in grids if grids[x] is not None)}: {error!r}; "
                f"{self._first()} is the first row with images"
            ) from error
        return found[:, cut[2].bool()].unflatten(1, self.tokens.ids.shape)

    def _check_grid(self, kind: str, name: str, grid: Any, pixels: Any) -> None:
        if not isinstance(grid, Tensor) or grid.ndim != 2 or grid.shape[1] != 3:
            shape = list(grid.shape) if isinstance(grid, Tensor) else type(grid).__name__
            raise ValueError(
                f"{name} is {'not given' if grid is None else shape}, but must be [number of "
                f"{kind}s, 3], which the processor returns beside the pixels: {self._first()} has "
                "images, whose positions follow from it"
            )
        patches = int(grid.prod(-1).sum())
        if isinstance(pixels, Tensor) and len(pixels) != patches:
            raise ValueError(
                f"the {kind}s have {len(pixels)} patches of pixels, but {name} makes {patches}: "
                f"give those of the same {kind}s; {self._first()} is the first row with images"
            )
        merge = self.model.config.vision_config.spatial_merge_size
        self._check_filled(kind, (grid.prod(-1) // merge**2).tolist(), name)

    def _checked_types(self) -> Tensor:
        types, ids = self.tokens.types, self.tokens.ids
        if types is None:
            raise ValueError(
                f"{KIND_IDS} is not given, by which {type(self.model).__name__} counts three "
                f"positions for each token of an image: {self._first()} has images. Pass what the "
                "processor returns beside input_ids"
            )
        if types.shape != ids.shape:
            raise ValueError(
                f"{KIND_IDS} has the shape {list(types.shape)}, but the whole rows have "
                f"{list(ids.shape)} tokens; pass that of whole rows, on every rank"
            )
        wrong = (types != 0) != (self._places["image"] | self._places["video"])
        if bool(wrong.any()):
            at = int(wrong.flatten().nonzero()[0])
            number = sum(edge <= at for edge in self.tokens.edges) - 1
            raise ValueError(
                f"{KIND_IDS} is {int(types.flatten()[at])} at token "
                f"{at - self.tokens.edges[number]} of {self.tokens.names[number]}, whose id "
                f"({int(ids.flatten()[at])}) says otherwise: cut, pad and pack it as input_ids"
            )
        return types

    def _first(self) -> str:
        """The name of the first document with images."""
        places = (self._places["image"] | self._places["video"]).flatten()
        found = zip(pairwise(self.tokens.edges), self.tokens.names, strict=True)
        return next((name for (a, b), name in found if bool(places[a:b].any())), "no row")

    @cached_property
    def _places(self) -> dict[str, Tensor]:
        """Tokens [batch, num_tokens] whose embeddings are features of images, and of videos."""
        ids, find = self.tokens.ids, self.model.get_placeholder_mask
        asked = _parameters(find).get("image_features")
        if asked is not None and asked.default is asked.empty:  # it knows images alone
            found = ids == self.model.config.image_token_id, ids != ids
        else:
            found = find(ids, inputs_embeds=ids.new_zeros(*ids.shape, 1))
        return {kind: x.view_as(ids) for kind, x in zip(KINDS, found, strict=False)}

    def _check_filled(self, kind: str, counts: Sequence[int], source: str) -> None:
        """Raise ValueError unless each document's tokens are those of whole images.

        Args:
            counts: tokens of each image.
            source: where counts come from.
        """
        placed = nn.functional.pad(self._places[kind].flatten().cumsum(0), (1, 0))
        until = placed.cpu()[list(self.tokens.edges)].tolist()
        ends, total = {0, *accumulate(counts)}, sum(counts)
        cut = (x not in ends for x in until[1:])
        wrong = next((number for number, is_cut in enumerate(cut) if is_cut), None)
        if wrong is None and until[-1] == total:
            return
        if wrong is None:  # images are left over
            wrong = len(self.tokens.names) - 1
        name, seen, have = self.tokens.names[wrong], until[wrong], until[wrong + 1] - until[wrong]
        more = ", ..." if len(counts) > SHOWN else ""
        raise ValueError(
            f"{name} has {have} {kind} tokens after {seen} of rows before it, but {source} makes "
            f"{kind}s of [{', '.join(map(str, counts[:SHOWN]))}{more}] tokens, {total} in "
            f"all: give the {kind}s in the order of rows, each row its own, and cut no row within "
            "one"
        )

    def features_of(self, kind: str, tower: Callable[..., Any], named: dict[str, Any]) -> Any:
        """The result of a tower, with the features of this rank's tokens alone.

        Args:
            named: the tower's arguments, of all images.
        """
        images = images_of(kind, named, self.model.config)
        if images is None or len(images.work) == 1 or self.cp.world_size == 1:
            with self._draws():
                result = settled(self.transport, lambda: self._checked(kind, tower(**named)))
            shares = None
        else:
            shares = images.shares(self.cp.world_size)
            given = images.some(shares[self.cp.rank])
            result = settled(self.transport, lambda: self._checked(kind, tower(**given)))
        found, layers = result.pooler_output, getattr(result, "deepstack_features", None) or []
        parts = [_flat(x) for x in (found, *layers)]
        rows, counts, owners = torch.cat(parts, -1), [x.shape[:-1].numel() for x in found], None
        if images is not None and shares is not None:
            counts, owners = self._owners(counts, shares, rows.device)
            rows, counts = rows[: owners.layout.size(self.cp.rank)], images.whole_counts(counts)
        self._check_filled(kind, counts, f"{kind} features")
        self.features[kind] = ImageFeatures(rows[:, : parts[0].shape[-1]], owners, counts)
        places = self._places[kind]
        numbers = (places.flatten().cumsum(0) - 1).view_as(places)
        mine = self.cp.shard(numbers, 1)[self.cp.shard(places, 1)]
        own = rows.index_select(0, mine) if owners is None else owners.gather_rows(rows, mine)
        first, *others = own.split([x.shape[-1] for x in parts], -1)
        result.pooler_output = _like(found, first)
        if layers:
            result.deepstack_features = [_like(*pair) for pair in zip(layers, others, strict=True)]
        return result

    def _checked(self, kind: str, result: Any) -> Any:
        if hasattr(result, "pooler_output"):
            return result
        raise ValueError(
            f"{type(self.model).__name__} returned {type(result).__name__} for its {kind}s, "
            "which has no pooler_output; transformers 5.23 and later have"
        )

    def _owners(
        self, counts: list[int], shares: list[list[int]], device: torch.device
    ) -> tuple[list[int], tw.ContextParallel]:
        """Tokens of all images, and which rank has the features of which.

        Args:
            counts: tokens of this rank's images.
            shares: numbers of each rank's images.
        """
        share = shares[self.cp.rank]
        own = torch.zeros(sum(map(len, shares)), dtype=torch.int64, device=device)
        own[share] = own.new_tensor(counts[: len(share)])
        whole = torch.stack(on_every_rank(self.transport, own)).sum(0).tolist()
        starts = [0, *accumulate(whole)]
        rows = [[x for i in share for x in range(starts[i], starts[i + 1])] for share in shares]
        layout = tw.Layout.from_positions(rows, name="images")
        return whole, tw.ContextParallel(self.cp.group, num_tokens=starts[-1], layout=layout)

    @contextmanager
    def _draws(self) -> Iterator[None]:
        """A tower that drops drops the same on every rank inside."""
        if self.seed is None:
            yield
            return
        device = next(self.model.parameters()).device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            yield


def _flat(features: Any) -> Tensor:
    """[number of tokens, hidden] of features of images."""
    if isinstance(features, Tensor):
        return features.flatten(0, -2)
    return torch.cat([x.flatten(0, -2) for x in features])


def _like(features: Any, rows: Tensor) -> Any:
    """Rows as if they were features of one image, in the form of a tower's."""
    return rows[None] if isinstance(features, Tensor) else (rows,)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


@contextmanager
def images_split(images: SplitImages) -> Iterator[None]:
    """The towers of a model return the features of this rank's tokens inside."""
    model, names = images.model, {f"get_{kind}_features": kind for kind in KINDS}
    images.seed = agreed_seed(images.cp.group) if _drops(model) else None
    kept = {name: kind for name, kind in names.items() if hasattr(model, name)}
    for name, kind in kept.items():
        setattr(model, name, partial(_own_features, images, kind, getattr(model, name)))
    try:
        yield
    finally:
        for name in kept:
            delattr(model, name)


@not_compiled
def _own_features(
    images: SplitImages, kind: str, tower: Callable[..., Any], *args: Any, **given: Any
) -> Any:
    if images.towers_run:  # get_video_features of some models calls get_image_features
        return tower(*args, **given)
    names = [*_parameters(tower)]
    known = {*names, "return_dict"}  # what else the call has is of its text
    named = dict(zip(names, args, strict=False))
    named |= {name: x for name, x in given.items() if name in known}
    images.towers_run = True
    try:
        return images.features_of(kind, tower, named)
    finally:
        images.towers_run = False


def _drops(model: Any) -> bool:
    """Return whether the tower of a model draws random numbers."""
    found = vars(model.config.vision_config).items()
    return model.training and any("drop" in k and isinstance(v, float) and v > 0 for k, v in found)


@contextmanager
def images_of_call(
    called: Any, cp: tw.ContextParallel, args: tuple[Any, ...], given: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The named arguments of a call of a loop of one's own: this rank's tokens beside the pixels of
    whole rows. Inside, the model runs with those that this yields.

    Args:
        called: the model, or what PEFT made of it.
        args: input_ids at most.
    """
    # Of a model of PEFT the model in it is called, too, when its towers are split already.
    if not has_images(given) or "get_image_features" in vars(fusing_model(called) or called):
        yield given
        return
    transport = tw.transport.transport_for(cp.group)
    cu_seqlens = settled(transport, lambda: _checked_call(called, args, given))
    fields = {"call": "images, which every rank has to get", "images": fields_of_images(given)}
    agree(transport, fields, None, "always")
    ids = args[0] if args else given["input_ids"]
    ids = cp.gather(ids[:, : cp.layout.size(cp.rank)], 1)
    edges = [row * cp.num_tokens + x for row in range(len(ids)) for x in cu_seqlens[:-1]]
    numbers = range(len(cu_seqlens) - 1)  # rows that hf.shard packed by their attention_mask, too
    names = [
        f"document {number} of row {row}" if len(numbers) > 1 else f"row {row}"
        for row in range(len(ids))
        for number in numbers
    ]
    if len(ids) == 1 < len(numbers):
        names = [f"document {number} (row {number} of an attention_mask)" for number in numbers]
    tokens = WholeTokens(ids, given.get(KIND_IDS), [*edges, ids.numel()], names)
    images, own = SplitImages(called, cp, tokens), {**given}
    positions = given.get("position_ids")
    if positions is None or positions.ndim != 3:
        three = settled(transport, lambda: images.positions(given))
        if three is not None:
            mine = cp.shard(three, 2)
            own["position_ids"] = mine if mine.shape[2] else three[..., :1] * 0
    with images_split(images):
        yield own


def _checked_call(called: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> tuple[int, ...]:
    """cu_seqlens of a call with pixels."""
    error, cu_seqlens = refused_images(called, given), given.get("cu_seq_lens_q")
    (ids, *_) = [*args, given.get("input_ids")]
    if error is None and (not isinstance(ids, Tensor) or cu_seqlens is None):
        error = (
            "pixels come without input_ids and cu_seq_lens_q, which say which tokens are of an "
            "image and where rows end; call the model with what hf.shard returns"
        )
    if error is not None:
        raise ValueError(error)
    return as_ints(cu_seqlens, "cu_seq_lens_q")

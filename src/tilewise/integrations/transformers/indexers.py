"""Layers of transformers whose indexer chooses the keys of each query, run split.

    DeepSeek V3.2, GLM 5 (MoE), Hunyuan V4, A.X K2, dots3: an attention module with an `indexer`

An indexer asks a cache for the keys of all tokens, scores them and takes the best. In a split call
the cache is ours, and what it returns stands for the keys of all ranks: the indexer's own code runs
on, what it does to the scores is noted, and its top-k is `cp.index`. Other code than
sum(weights relu(scale q . k)) is refused by name. Where keys and values are expanded from latents,
latents travel to the queries that chose them, and are expanded there.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilewise.integrations.transformers.attention import LayerMask, refuse
from tilewise.integrations.transformers.chosen_keys import EXPANDS, kept_apart
from tilewise.integrations.transformers.replay import record
from tilewise.integrations.transformers.saved import not_compiled
from tilewise.integrations.transformers.states import CACHES


def wire_indexers(base: nn.Module) -> None:
    """Hook the layers of a model that have an indexer, or use the choice of another layer's.

    Those with an indexer of their own are numbered: `_tilewise_indexer`, -1 of others.
    """
    layers = [module for module in base.modules() if hasattr(module, "indexer")]
    choosing = [module for module in layers if isinstance(module.indexer, nn.Module)]
    for module in layers:
        if hasattr(module, "_tilewise_indexer"):
            continue
        number = choosing.index(module) if module in choosing else -1
        module._tilewise_indexer = number  # pyright: ignore[reportArgumentType]
        if chooses_compressed(module):
            continue
        module.register_forward_pre_hook(_before_attention, with_kwargs=True)
        module.register_forward_hook(_after_attention, always_call=True)
        if isinstance(module.indexer, nn.Module):
            module.indexer.register_forward_pre_hook(_before_indexer, with_kwargs=True)


def chooses_compressed(module: Any) -> bool:
    """Return whether a module's indexer chooses compressed keys, or blocks by these: others wire
    such layers.
    """
    return hasattr(module, "compress_rate") or hasattr(module.indexer, "compress_ratio")


@not_compiled
def _before_attention(module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    mask = next((x for x in (*args, *given.values()) if isinstance(x, LayerMask)), None)
    if mask is None:
        return
    hidden = args[0] if args else given["hidden_states"]
    mask.whole(len(hidden), given)  # an indexer is not told of documents
    mask.of_indexer = IndexMask(mask, module._tilewise_indexer)
    chooses = module.indexer is not None or given.get("prev_topk_indices") is not None
    if chooses and hasattr(module, EXPANDS):
        setattr(module, EXPANDS, kept_apart)


@not_compiled
def _after_attention(module: Any, *_: Any) -> None:
    vars(module).pop(EXPANDS, None)


@not_compiled
def _before_indexer(_: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    mask = next((x for x in (*args, *given.values()) if isinstance(x, IndexMask)), None)
    if mask is None:
        return None
    name = next((name for name in CACHES if name in given), CACHES[0])
    return args, given | {name: _KeysOfAllRanks(mask)}


class _Stand:
    """A stand-in for a tensor, which refuses what it does not know."""

    mask: IndexMask
    what: str

    def refuse(self, what: str) -> NoReturn:
        refuse(
            self.mask.layer.cp,
            f"an indexer of the model {what}, which tilewise does not know: it runs indexers that "
            "take the largest sums of weights * relu(scale * q . k) under the layer's mask",
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.refuse(f"reads {name} of its {self.what}")

    def _unknown(self, *_: Any) -> NoReturn:
        self.refuse("adds to its scores, or compares them")

    __add__ = __radd__ = __sub__ = __rsub__ = __truediv__ = __neg__ = __getitem__ = _unknown
    __gt__ = __ge__ = __lt__ = __le__ = __matmul__ = __and__ = __or__ = _unknown

    @classmethod
    def __torch_function__(
        cls, function: Any, _: Any, args: tuple[Any, ...] = (), given: Any = None
    ) -> Any:
        stand = next(x for x in args if isinstance(x, _Stand))
        if function is torch.matmul and isinstance(stand, IndexKeys):
            return stand.scores(args[0])
        if function is torch.matmul and isinstance(stand, IndexScores):
            return stand.weighted(args[0])
        if function in (F.relu, torch.relu) and isinstance(stand, IndexScores):
            return stand.raised()
        return stand.refuse(f"calls {getattr(function, '__name__', function)}")


class IndexMask(_Stand):
    """The mask of a layer as its indexer gets it: True where a key is visible.

    Attributes:
        number: of the layer, among those with an indexer.
    """

    dtype = torch.bool
    what = "mask"

    def __init__(self, layer: LayerMask, number: int) -> None:
        self.layer, self.mask, self.number = layer, self, number

    def __invert__(self) -> IndexMask:
        return self


class _KeysOfAllRanks(NamedTuple):
    """A cache that gives an indexer a stand-in for the keys of all ranks."""

    mask: IndexMask

    def update_indexer(self, k: Tensor, _: int) -> IndexKeys:
        return IndexKeys(self.mask, k)


class IndexKeys(_Stand):
    """Index keys [batch, rows, width] of this rank, which stand for those of all."""

    what = "keys"

    def __init__(self, mask: IndexMask, k: Tensor) -> None:
        self.mask, self.k = mask, k

    def transpose(self, *dims: int) -> IndexKeys:
        return self if sorted(dims) == [-2, -1] else self.refuse(f"transposes its keys by {dims}")

    def unsqueeze(self, dim: int) -> IndexKeys:
        return self if dim == 1 else self.refuse(f"unsqueezes its keys at {dim}")

    def float(self) -> IndexKeys:
        return IndexKeys(self.mask, self.k.float())

    def scores(self, q: Tensor) -> IndexScores:
        return IndexScores(self.mask, q, self.k)


class IndexScores(_Stand):
    """Scores of an indexer, as far as they have been written down.

    Attributes:
        q, k: [batch, rows, heads, width] and [batch, rows, width].
        factor: by which products are multiplied.
        is_raised: negative products are 0.
        weights: of heads, [batch, rows, heads].
        is_masked: hidden keys are left out.
    """

    what = "scores"

    def __init__(self, mask: IndexMask, q: Tensor, k: Tensor) -> None:
        self.mask, self.q, self.k = mask, q, k
        self.factor, self.is_raised, self.is_masked = 1.0, False, False
        self.weights: Tensor | None = None

    def __mul__(self, factor: Any) -> IndexScores:
        if not isinstance(factor, int | float) or factor <= 0:
            return self.refuse(f"multiplies its scores by {factor!r}")
        self.factor *= factor
        return self

    __rmul__ = __mul__

    def raised(self) -> IndexScores:
        self.is_raised = True
        return self

    def weighted(self, weights: Tensor) -> IndexScores:
        if not self.is_raised or self.weights is not None or weights.shape[-2] != 1:
            return self.refuse("weighs its heads before relu")
        self.weights = weights.squeeze(-2)
        return self

    def squeeze(self, dim: int) -> IndexScores:
        return self if dim == -2 else self.refuse(f"squeezes its scores at {dim}")

    def masked_fill(self, mask: Any, value: float) -> IndexScores:
        if mask is not self.mask or value != -torch.inf:
            return self.refuse("masks its scores by another mask")
        self.is_masked = True
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:2], self.mask.layer.cp.num_tokens)

    def topk(self, k: int, dim: int = -1) -> _Top:
        if self.weights is None or not self.is_masked or dim != -1:
            return self.refuse("chooses before it has weighed and masked its scores")
        handed = self.mask.layer.handed
        if handed is None:
            chosen = self._choice(k, self.weights * self.factor)
        else:
            chosen = handed[self.mask.number]
        record(self.mask.number, chosen)
        return _Top(chosen)

    def _choice(self, k: int, weights: Tensor) -> Tensor:
        """Global positions [batch, rows, k] of the keys that this rank's queries choose."""
        cp, mask = self.mask.layer.cp, self.mask.layer.settled
        # A rank without tokens runs the model on one row of padding.
        spare = self.q.shape[1] if cp.layout.size(cp.rank) == 0 else 0
        q, keys, weights = (x[:, spare:] for x in (self.q, self.k, weights))
        if isinstance(mask, list):
            entries = [slice(row, row + 1) for row in range(len(mask))]
            pairs = zip(entries, mask, strict=True)
            chosen = torch.cat([cp.index(q[e], keys[e], weights[e], k, mask=m) for e, m in pairs])
        else:
            chosen = cp.index(q, keys, weights, k, mask=mask)
        return F.pad(chosen, (0, 0, spare, 0), value=-1)


class _Top(NamedTuple):
    """The result of top-k of which an indexer reads the indices."""

    indices: Tensor

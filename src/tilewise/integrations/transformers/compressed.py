"""Layers of DeepSeek V4, which attend to a window of tokens and to compressed keys, run split.

    compressor   windows of tokens -> one key each, by the layer's own code (HCA: windows of 128
                 that every later query sees; CSA: of 4, of which an indexer chooses)
    attention    of the window (cp.attention) and of the compressed keys, merged, then the sink

A compressor keeps unfinished windows in a cache between calls. In a split call the cache is ours:
it hands the compressor whole windows of one document each, those whose last token this rank has,
and takes the keys that it makes. The indexer's scores are sum(weights * relu(q . k)), as `indexers`
has them, and its choice is the same at any split.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import tilewise as tw
from tilewise.execution.sinks import with_sink
from tilewise.indexed import entries as of_entries
from tilewise.integrations.transformers.attention import LayerMask, refuse
from tilewise.integrations.transformers.indexers import IndexKeys, IndexMask, IndexScores
from tilewise.integrations.transformers.replay import record
from tilewise.integrations.transformers.saved import not_compiled
from tilewise.transport.agreement import settled


class EntriesOfRow(NamedTuple):
    """Compressed keys of a layer for one row of the batch.

    Attributes:
        own: those that this rank made, [entries, head_dim].
        chosen: numbers of entries that each of this rank's queries attends to, [rows, k]; None:
            to all that it sees.
        entries: of all ranks.
    """

    own: Tensor
    chosen: Tensor | None
    entries: of_entries.Entries


class CompressedKeys(NamedTuple):
    """Compressed keys that a layer attends to beside those of tokens.

    Attributes:
        rows: of each row of the batch; None where no document fills a window.
    """

    rows: list[EntriesOfRow | None]

    def attend(
        self,
        cp: tw.ContextParallel,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: tw.masks.Mask | list[tw.masks.Mask],
        options: dict[str, Any],
    ) -> Tensor:
        """out [batch, rows, heads, head_dim] of queries that see a window and compressed keys.

        Args:
            q, k, v: [batch, rows, heads, head_dim] of this rank.
            mask: of the tokens, or one for each row of the batch.
            options: of cp.attention.
        """
        if options["dropout_p"] or options["softcap"] is not None:
            refuse(cp, "layers with compressed keys take no dropout and no softcap; set them to 0")
        transport, scale = tw.transport.transport_for(cp.group), options["softmax_scale"]
        out, lse = cp.attention(q, k, v, mask=mask, softmax_scale=scale, return_lse=True)
        results = list[tuple[Tensor, Tensor]]()
        for entry, keys in enumerate(self.rows):
            result = out[entry], lse[entry]
            if keys is not None:
                given = keys.own, keys.chosen, keys.entries, scale, transport
                result = of_entries.with_entries(*result, q[entry], *given)
            results.append(result)
        outs, lses = (torch.stack(x) for x in zip(*results, strict=True))
        sink = options["sink"]
        return outs if sink is None else with_sink(outs, lses, sink)[0]


def wire_compressors(base: nn.Module) -> None:
    """Hook the layers of a model whose attention may have compressed keys."""
    for module in base.modules():
        if "compressor" not in dir(module) or hasattr(module, "_tilewise_compressor"):
            continue
        module._tilewise_compressor = True  # pyright: ignore[reportArgumentType]
        module.register_forward_pre_hook(_before_attention, with_kwargs=True)
        module.register_forward_hook(_after_attention, always_call=True)


@not_compiled
def _before_attention(module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    mask = next((x for x in (*args, *given.values()) if isinstance(x, LayerMask)), None)
    if mask is None:
        return
    hidden = args[0] if args else given["hidden_states"]
    mask.whole(len(hidden), given)  # a compressor is not told of documents
    if module.compressor is None:
        return
    if isinstance(mask.cp.mask, tw.Slices):
        refuse(
            mask.cp,
            f"{type(module).__name__} compresses windows of a document's tokens, which cp.mask of "
            "Slices (a tree, say) does not tell; make cp with tw.Causal()",
        )
    vars(module.compressor)["forward"] = partial(_compressed, module.compressor, mask)


@not_compiled
def _after_attention(module: Any, *_: Any) -> None:
    if module.compressor is not None:
        vars(module.compressor).pop("forward", None)


def _compressed(
    compressor: Any,
    mask: LayerMask,
    hidden_states: Tensor,
    q_residual: Tensor,
    position_ids: Tensor,
    _: Any,
    layer_idx: int,
) -> tuple[Tensor, None]:
    """In place of a compressor's forward: its keys are noted on the mask, and it returns none."""
    found = list[EntriesOfRow | None]()
    for entry in range(len(hidden_states)):
        documents = mask.documents[entry if len(mask.documents) > 1 else 0]
        own = slice(entry, entry + 1)
        positions = position_ids[own] if len(position_ids) > 1 else position_ids
        entries = of_entries.entries_of(
            mask.cp.layout, mask.cp.rank, documents, compressor.compress_rate
        )
        if entries is None:
            found.append(None)
            continue
        cache = _WindowCache(compressor, mask, entries, entry)
        rows = hidden_states[own], q_residual[own], positions
        type(compressor).forward(compressor, *rows, cache, layer_idx)
        found.append(cache.result())
    mask.compressed = CompressedKeys(found)
    if getattr(compressor, "indexer", None) is not None:
        record(compressor._tilewise_indexer, _choices(found, hidden_states, compressor.indexer))
    return hidden_states.new_zeros((len(hidden_states), 1, 0, compressor.head_dim)), None


def _choices(found: list[EntriesOfRow | None], hidden: Tensor, indexer: Any) -> Tensor:
    """Entries that each query of the batch chose, [batch, rows, k], -1 for none."""
    shape = *hidden.shape[1:2], indexer.index_topk
    chosen = torch.full((len(found), *shape), -1, device=hidden.device)
    for row, keys in zip(chosen, found, strict=True):
        if keys is not None and keys.chosen is not None:
            row[: len(keys.chosen), : keys.chosen.shape[1]] = keys.chosen[:, : shape[1]]
    return chosen


class _WindowCache:
    """A cache that hands a compressor the whole windows of this rank's entries, and no others."""

    def __init__(
        self, compressor: Any, mask: LayerMask, entries: of_entries.Entries, entry: int
    ) -> None:
        self.compressor, self.mask, self.entries, self.entry = compressor, mask, entries, entry
        self.overlapping = getattr(compressor, "indexer", None) is not None
        self.windows = of_entries.windows_of(entries, mask.cp.rank, overlapping=self.overlapping)
        self.layers = self
        self.own: Tensor | None = None
        self.chosen: Tensor | None = None

    def __getitem__(self, _: int) -> _WindowCache:
        return self

    def store_compression_weights(
        self, name: str, kv: Tensor, gate: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Windows of keys and gates, [1, windows * rate, width] each, and how far each window's
        position is from that of its place here.
        """
        cp, windows, rate = self.mask.cp, self.windows, self.entries.rate
        rows = torch.cat([kv, gate], -1)[0, : cp.layout.size(cp.rank)]
        with torch.set_grad_enabled(torch.is_grad_enabled() and name != "indexer"):
            fetched = cp.gather_rows(rows, windows.tokens.flatten().to(kv.device))
            kv, gate = fetched.split([kv.shape[-1], gate.shape[-1]], -1)
            if self.overlapping:  # of no window before a document's first one nothing counts
                first = torch.from_numpy(windows.is_first).to(gate.device)
                half = torch.arange(gate.shape[-1], device=gate.device) < gate.shape[-1] // 2
                hidden = first.repeat_interleave(rate)[:, None] & half
                gate = gate.masked_fill(hidden, -torch.inf)
        shift = (windows.in_document - torch.arange(len(windows.numbers))) * rate
        return kv[None], gate[None], shift.to(kv.device)

    def update_overlap_state(self, *_: Any) -> tuple[None, None]:
        return None, None

    def update_compressor_states(self, name: str, compressed: Tensor) -> Any:
        kept = torch.from_numpy(self.windows.kept).to(compressed.device)
        own = compressed[0].index_select(0, kept)
        if name == "indexer":
            return _EntryKeys(self, own)
        self.own = own
        return compressed[:, :0]

    def choose(self, q: Tensor, own: Tensor, weights: Tensor) -> None:
        """Choose entries for this rank's queries, [rows, heads, width], of index keys of entries.

        Args:
            own: index keys of this rank's entries, [entries, width].
            weights: [rows, heads].
        """
        cp, number = self.mask.cp, self.compressor._tilewise_indexer
        transport = tw.transport.transport_for(cp.group)
        rows = cp.layout.size(cp.rank)
        if self.mask.handed is not None:
            handed = self.mask.handed[number][self.entry, :rows]
            given = handed, self.entries, cp.rank, cp.layout
            self.chosen = settled(transport, partial(of_entries.checked_entries, *given))
        else:
            k = self.compressor.indexer.index_topk
            given = q[:rows], own, weights[:rows], k, self.entries, transport
            self.chosen = of_entries.choose_entries(*given)

    def result(self) -> EntriesOfRow:
        assert self.own is not None, "the compressor updates its cache"
        return EntriesOfRow(self.own, self.chosen, self.entries)


class _EntryKeys(IndexKeys):
    """Index keys of entries, [1, this rank's entries, width], which stand for those of all."""

    def __init__(self, cache: _WindowCache, own: Tensor) -> None:
        super().__init__(IndexMask(cache.mask, -1), own[None])
        self.cache = cache

    @property
    def shape(self) -> tuple[int, ...]:
        return 1, 0, self.k.shape[-1]  # so that no table of queries and entries is made

    def float(self) -> _EntryKeys:
        return _EntryKeys(self.cache, self.k[0].float())

    def scores(self, q: Tensor) -> _EntryScores:
        return _EntryScores(self, q)


class _EntryScores(IndexScores):
    """Scores of entries as an unfinished expression: factors and heads' weights are noted, not
    applied.
    """

    def __init__(self, keys: _EntryKeys, q: Tensor) -> None:
        super().__init__(keys.mask, q, keys.k)
        self.cache, self.device = keys.cache, q.device

    def __mul__(self, factor: Any) -> IndexScores:
        if not isinstance(factor, Tensor):
            return super().__mul__(factor)
        if not self.is_raised or self.weights is not None or factor.shape[-1] != 1:
            return self.refuse("weighs its heads before relu")
        self.weights = factor.squeeze(-1)
        return self

    def sum(self, dim: int) -> IndexScores:
        return self if dim == 2 else self.refuse(f"adds its scores up along {dim}")

    def topk(self, k: int, dim: int = -1) -> Any:
        if self.weights is None or dim != -1:
            return self.refuse("chooses before it has weighed its scores")
        self.cache.choose(self.q[0], self.k[0], (self.weights * self.factor)[0])
        return _NoneOf(torch.full((*self.q.shape[:2], 1), -1, device=self.q.device))


class _NoneOf(NamedTuple):
    """The result of top-k that the compressor gets, which makes a mask of it: no entries."""

    indices: Tensor

"""transformers' two interfaces: the masks that a model asks for, and the attention of its layers.

A LayerMask goes from the one to the other. What cannot be honoured is refused on all ranks alike.
"""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

import tilewise as tw
from tilewise.execution.validation import MOST_SEEDS
from tilewise.integrations.seeds import agreed_seed, drawn_seed
from tilewise.integrations.transformers.adapters import names_in_layers
from tilewise.integrations.transformers.chosen_keys import attend_to_chosen
from tilewise.integrations.transformers.documents import (
    CuSeqlens,
    checked_documents,
    gathered_documents,
)
from tilewise.integrations.transformers.masks import (
    PADDED,
    documents_of,
    packs,
    parts,
    read_mask,
    refused_keyword,
)
from tilewise.integrations.transformers.refusals import refused_model
from tilewise.integrations.transformers.replay import handed_in
from tilewise.integrations.transformers.rope import RopeLengths
from tilewise.masks.base import as_ints
from tilewise.transport.agreement import agree
from tilewise.transport.loopback import LoopbackGroup

TEMPERED_TREE = (
    "attn_temperature_tuning counts a token's place in its document, which cp.mask of Slices (a "
    "tree, say) does not tell; set it to False"
)
UNREADABLE = "it makes a mask of its own from it, which tilewise cannot run"


class LayerMask:
    """The value that transformers hands from its mask interface to the attention of its layers.

    It holds the layers' mask without documents; the first layer that uses it settles these, with
    all ranks, so that one forward pass asks once.

    Args:
        mask: as read from the model's mask function.
        packs: whether that function keeps documents apart, as far as this rank's rows show.
        refused_length: from this rank's position_ids to what is wrong with the model's RoPE here.
        read: the mask for documents, whose chunks it counts; default: mask.
    """

    def __init__(
        self,
        cp: tw.ContextParallel,
        mask: tw.masks.Mask,
        packs: bool,
        refused_length: Callable[[Tensor | None], str | None] = lambda _: None,
        read: Callable[[tuple[int, ...]], tw.masks.Mask] | None = None,
    ):
        self.cp, self.mask, self.packs, self.refused_length = cp, mask, packs, refused_length
        self.read = read or (lambda _: mask)
        self.cu_seqlens: tuple[int, ...] | None = None  # in a model whose states are split, too
        self.settled: tw.masks.Mask | list[tw.masks.Mask] | None = None
        # of each row of the batch, or of all; once settled, except of Slices
        self.documents: tuple[CuSeqlens, ...] = ()
        self.seed: int | None = None  # of dropout, in the first layer that drops
        self.layers: dict[nn.Module, int] = {}  # those that drop, counted
        self.of_indexer: Any = None  # what a layer's indexer gets, where it runs split
        self.handed = handed_in()  # choices in place of the indexers' own
        self.chosen: Tensor | None = None  # positions that the layer in progress attends to alone
        self.compressed: Any = None  # keys of the layer in progress beside those of tokens

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"LayerMask has no attribute {name!r}")
        refuse(self.cp, f"the model reads {name} of its mask; {UNREADABLE}")

    def __getitem__(self, _: Any) -> Any:
        if self.of_indexer is not None:
            return self.of_indexer
        refuse(self.cp, f"the model cuts its mask; {UNREADABLE}")

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> NoReturn:
        raise ValueError(
            f"the model passes tilewise's mask to {function.__name__}: its attention does not go "
            "through transformers' AttentionInterface, so tilewise cannot reach it"
        )

    def whole(self, batch: int, given: Mapping[str, Any]) -> tw.masks.Mask | list[tw.masks.Mask]:
        """The mask with the batch's documents, or one for each row where these differ.

        Args:
            given: the keywords that the layer passes on.
        """
        if self.settled is not None:
            return self.settled
        # It exchanges and reads numbers, which no graph can hold.
        settle: Any = torch.compiler.disable(self._settle)
        settled: tw.masks.Mask | list[tw.masks.Mask] = settle(batch, given)
        self.settled = settled
        return settled

    def dropout_seed(self, module: nn.Module) -> int:
        """The seed of a layer in this forward pass, from rank 0's draw.

        A recomputed layer draws in vain, so that what else it draws is as in forward.
        """
        number = drawn_seed(self.cp.group)
        if self.seed is None:
            self.seed = agreed_seed(self.cp.group, number)
        return (self.seed + self.layers.setdefault(module, len(self.layers))) % MOST_SEEDS

    def _settle(self, batch: int, given: Mapping[str, Any]) -> tw.masks.Mask | list[tw.masks.Mask]:
        position_ids, cu_seqlens = given.get("position_ids"), given.get("cu_seq_lens_q")
        error = self.refused_length(position_ids)
        if error is not None:
            pass
        elif isinstance(self.cp.mask, tw.Slices):
            error = self._refused_slices(cu_seqlens)
        elif position_ids is not None and position_ids.ndim != 2:
            error = f"position_ids have {position_ids.ndim} dimensions; pass [batch, num_rows]"
        elif cu_seqlens is not None and position_ids is not None:
            error = checked_documents(self.cp, cu_seqlens, position_ids)
        elif cu_seqlens is None and position_ids is None and tw.Causal() in parts(self.mask):
            error = (
                "the model does not pass position_ids on to its attention, so its documents are "
                "not known; call it with what hf.shard returns, which has cu_seq_lens_q"
            )
        documents = {"cu_seq_lens_q": str(None if cu_seqlens is None else as_ints(cu_seqlens))}
        fields = {
            "mask": repr(self.mask),
            "position_ids": "none" if position_ids is None else "given",
        }
        try:
            agree(tw.transport.transport_for(self.cp.group), fields, error, "first", documents)
        except ValueError as differ:
            if "ranks disagree on cu_seq_lens_q" not in str(differ):
                raise
            raise ValueError(
                f"{differ}: a Trainer gives each process other examples, unless its arguments have "
                "a parallelism_config of tilewise.integrations.accelerate"
            ) from None
        if isinstance(self.cp.mask, tw.Slices):
            left = self._reach()
            return self.cp.mask if left is None else self.cp.mask.windowed(left)
        return self._with_documents(_documents(self, batch, position_ids, cu_seqlens))

    def _refused_slices(self, cu_seqlens: Tensor | None) -> str | None:
        """Why cp.mask, which says itself what each token sees, cannot stand for the layer's."""
        if self._reach() is None and self.mask != tw.Causal():
            return (
                f"a layer asks for {self.mask!r}, but cp.mask is Slices (of a tree, say), which "
                "takes the place of Causal() and of a causal window; use a model whose layers have "
                "no others, or another mask"
            )
        if cu_seqlens is not None:
            return (
                "the batch has cu_seq_lens_q and cp.mask is Slices: both say which tokens belong "
                "together; pass input_ids and position_ids alone"
            )
        return None

    def _reach(self) -> int | None:
        """Tokens before its own that a query of a causal window sees; None: no such mask."""
        match [x for x in parts(self.mask) if x != tw.Causal()]:
            case [tw.Window(left=int(left), right=None)] if tw.Causal() in parts(self.mask):
                return left
        return None

    def _with_documents(
        self, documents: tuple[CuSeqlens, ...]
    ) -> tw.masks.Mask | list[tw.masks.Mask]:
        wanted = documents_of(self.cp.mask)
        other = next((x for x in documents if wanted not in (None, x)), None)
        if other is not None:
            raise ValueError(
                f"cp.mask has documents {tw.Document(wanted)}, but the batch has "
                f"{tw.Document(other)}; pass position_ids that start at 0 in each document, or "
                "make cp with tw.Causal()"
            )
        return self.settle(*documents)

    def settle_tree(self, tree: tw.Tree) -> None:
        """Take the mask of a tree, whose paths stand for documents."""
        error = self._refused_slices(None)
        if error is not None:
            refuse(self.cp, error)
        left = self._reach()
        self.settled = tree.mask if left is None else tree.mask.windowed(left)

    def settle(self, *documents: CuSeqlens) -> tw.masks.Mask | list[tw.masks.Mask]:
        """Take these documents of the whole sequence, or of each row, and return the mask."""
        self.documents = tuple(dict.fromkeys(documents)) if len(set(documents)) == 1 else documents
        masks = [self._with_row(x) for x in self.documents]
        self.settled = masks[0] if len(masks) == 1 else masks
        return self.settled

    def _with_row(self, cu_seqlens: CuSeqlens) -> tw.masks.Mask:
        mask = self.read(cu_seqlens)
        return mask if len(cu_seqlens) == 2 else mask & tw.Document(cu_seqlens)


def _documents(
    layer: LayerMask, batch: int, position_ids: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[CuSeqlens, ...]:
    if cu_seqlens is not None:
        return (as_ints(cu_seqlens, "cu_seqlens"),)
    if position_ids is None:
        return ((0, layer.cp.layout.num_tokens),)
    found = gathered_documents(layer.cp, position_ids, batch)
    most = max(map(len, found))
    if most > 2:
        error, jumps = None, bool((position_ids.diff() != 1).any())
        if jumps and not layer.packs:
            error = (
                f"position_ids start {most - 1} documents, which transformers ignores here: "
                "it does in bidirectional masks, and where there is a cache or an attention_mask; "
                "pass use_cache=False and no attention_mask, or cu_seq_lens_q"
            )
        agree(tw.transport.transport_for(layer.cp.group), {"call": "documents"}, error, "first")
    return found


def _refuse_other_ranks(cp: tw.ContextParallel, thread: int) -> None:
    """Raise ValueError if the attention of one rank is called by another rank of a loopback.

    Ranks that are threads share transformers' registry, where a name may be another rank's.
    """
    if isinstance(cp.group, LoopbackGroup) and threading.get_ident() != thread:
        raise ValueError(
            f"a model on another rank uses the attention of rank {cp.rank}: ranks of a loopback "
            "share a name, or a model's configuration, which holds the name; give every rank a "
            "name and a copy of its own: "
            'hf.parallelize(copy.deepcopy(model), cp, f"tilewise_{rank}")'
        )


def masks_of(
    cp: tw.ContextParallel,
    lengths: RopeLengths,
    proven: bool,
    documents_of_call: Callable[[Any], tuple[int, ...] | None] = lambda _: None,
    stateless: bool = False,
) -> Callable[..., LayerMask]:
    """The mask interface: what a layer's mask function asks for, or a refusal.

    Args:
        documents_of_call: cu_seqlens of the call in progress of the model of a configuration, if
            its layers that carry a state are split; None: they are not.
    """
    thread = threading.get_ident()

    def make_mask(
        *,
        kv_length: int,
        mask_function: Callable[..., Any],
        q_length: int = 0,
        q_offset: int = 0,
        cache_position: Tensor | None = None,  # of the queries, in transformers 5.0
        **given: Any,
    ) -> LayerMask:
        _refuse_other_ranks(cp, thread)
        if cache_position is not None:
            q_length = len(cache_position)
            q_offset = int(cache_position[0]) if q_length else 0
        attention_mask = given.get("attention_mask")
        lengths.agreed, documents = False, None
        try:
            config = given["config"]
            documents = documents_of_call(config)
            splits_states = stateless or documents is not None
            error = refused_model(
                config,
                splits_states=splits_states,
                counts_routers=proven,
                moves_positions=proven,
            )
            error = error or _unproven(config, proven)
            mask = tw.Full() if error else read_mask(mask_function, (0, cp.layout.num_tokens))
        except ValueError as unread:
            error, mask = str(unread), tw.Full()
        error = error or refused_rows(cp, q_length, kv_length, int(q_offset))
        if error is None and attention_mask is not None and not bool(attention_mask.all()):
            error = PADDED
        if error:
            refuse(cp, error)
        refused_length = partial(lengths.refused, given["config"])
        read = partial(read_mask, mask_function)
        made = LayerMask(cp, mask, packs(mask_function), refused_length, read)
        made.cu_seqlens = documents
        return made

    return make_mask


def attention_of(cp: tw.ContextParallel, proven: bool) -> Callable[..., tuple[Tensor, None]]:
    """The attention interface: tensors [batch, heads, rows, head_dim], out [batch, rows, ...]."""
    thread = threading.get_ident()

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **given: Any,
    ) -> tuple[Tensor, None]:
        _refuse_other_ranks(cp, thread)
        if not isinstance(attention_mask, LayerMask):
            refuse(cp, _foreign(module, attention_mask))
        indices = given.pop("indices", None)  # of the keys that an indexer has chosen
        error = _unproven(module, proven)
        error = error or refused_keyword(module, attention_mask.mask, given, counts_routers=proven)
        if error is None and query.shape[2] != key.shape[2]:
            error = f"{key.shape[2]} keys for {query.shape[2]} queries: cross attention or a cache"
        if error:
            refuse(cp, f"{type(module).__name__}: {error}")
        mask = attention_mask.whole(len(query), given)
        tempered = getattr(module, "attn_temperature_tuning", False)
        if tempered and not getattr(module, "use_rope", True):
            if isinstance(mask, tw.Slices):
                refuse(cp, f"{type(module).__name__}: {TEMPERED_TREE}")
            query = _tempered(module, query, cp, attention_mask.documents)
        rows = cp.layout.size(cp.rank)
        # A rank without tokens runs the model on one row of padding, which never gets here.
        spare = query.shape[2] if rows == 0 else 0
        query, key, value = (x[:, :, spare:] for x in (query, key, value))
        dropout = float(given.get("dropout") or 0)
        options: dict[str, Any] = {
            "softmax_scale": given.get("scaling"),
            "sink": given.get("s_aux"),
            "softcap": given.get("softcap"),
            "dropout_p": dropout,
            "dropout_seed": attention_mask.dropout_seed(module) if dropout else None,
        }
        compressed, attention_mask.compressed = attention_mask.compressed, None
        indices = attention_mask.chosen if indices is None else indices
        attention_mask.chosen = None
        if compressed is not None:
            tensors = (x.transpose(1, 2) for x in (query, key, value))
            out = compressed.attend(cp, *tensors, mask, options)
        elif indices is not None:
            chosen = indices[:, spare:]
            out = attend_to_chosen(cp, module, query, key, value, chosen, mask, options)
        else:
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            out = cp.attention(q, k, v, mask=mask, **options)
        return nn.functional.pad(out, (0, 0, 0, 0, 0, spare)) if spare else out, None

    return attend


def _tempered(
    module: Any, query: Tensor, cp: tw.ContextParallel, documents: tuple[CuSeqlens, ...]
) -> Tensor:
    """Return Llama 4's queries, scaled by each token's place in its document.

    scale(place) = attn_scale * log1p(floor((place + 1) / floor_scale)) + 1. The layer has already
    multiplied by the scale of the row's number on this rank, which is divided out.

    Args:
        query: [batch, heads, rows, head_dim].
        documents: of each row of the batch, or of all.
    """
    if len(cp.position_ids) == 0:
        return query

    def places(cu_seqlens: CuSeqlens) -> Tensor:
        starts = torch.tensor(cu_seqlens)
        document = torch.searchsorted(starts, cp.position_ids, right=True) - 1
        return cp.position_ids - starts[document]

    def scales(x: Tensor) -> Tensor:
        steps = torch.floor((x.to(query.device, torch.float32) + 1.0) / module.floor_scale)
        return torch.log1p(steps) * module.attn_scale + 1.0

    ratio = scales(torch.stack([*map(places, documents)]))
    ratio = ratio / scales(torch.arange(len(cp.position_ids)))
    return (query * ratio[:, None, :, None]).to(query.dtype)


def _unproven(found: Any, proven: bool) -> str | None:
    """Why a model is not run whose code nobody tried; found: its configuration or attention."""
    if proven:
        return None
    if isinstance(found, nn.Module) and names_in_layers(found):
        return (
            f"{type(found).__name__} has adapters of PEFT, and whether these can be split is not "
            "known; hf.parallelize(model, cp) in place of hf.register tries them first"
        )
    if type(found).__module__.startswith("transformers."):
        return None
    return (
        f"{type(found).__name__} is not of transformers, and whether such a model can be split is "
        "not known; hf.parallelize(model, cp) in place of hf.register tries a tiny one first"
    )


def refused_rows(
    cp: tw.ContextParallel, q_length: int, kv_length: int, q_offset: int
) -> str | None:
    rows = cp.layout.size(cp.rank)
    if q_offset or kv_length != q_length:
        return (
            f"{kv_length} keys for {q_length} queries from position {q_offset} on: cross "
            "attention, past_key_values that hold tokens (use_cache), or an attention_mask that is "
            "not sharded; tilewise runs self-attention of the whole sequence, without a cache"
        )
    if q_length != max(rows, 1):
        one = " (models cannot run on none: hf.shard pads to one)" if rows == 0 else ""
        return (
            f"the model runs on {q_length} tokens, but the layout gives this rank {rows}{one}; "
            "call it with what hf.shard returns, or split a Trainer's rows by ParallelismConfig of "
            "tilewise.integrations.accelerate, in place of hf.parallelize. It runs on "
            "whole rows, in generate() too, within hf.unsplit(model), or for good after "
            "model.set_attn_implementation('sdpa')"
        )
    return None


def _foreign(module: nn.Module, attention_mask: Any) -> str:
    name = type(module).__name__
    if attention_mask is None:
        return f"{name} passes no mask: it does not ask transformers' mask interface for one"
    return (
        f"{name} passes an attention_mask of its own ({type(attention_mask).__name__}), which "
        "tilewise cannot read; leave it out, and pack rows of different lengths as documents"
    )


def refuse(cp: tw.ContextParallel, error: str) -> NoReturn:
    """Raise on every rank, wherever the others wait to agree."""
    agree(tw.transport.transport_for(cp.group), None, error)
    raise AssertionError("agree raises what it is given")

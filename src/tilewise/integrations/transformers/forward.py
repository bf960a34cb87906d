"""The split inside a model's forward: whole rows in, whole results of each token out.

    split_forward(model, group)      # every call of the model now runs over the group's ranks
    out = model(input_ids, labels=labels)     # whole rows, the same on all ranks
    out.loss.backward()              # mean of the gradients over ranks: those of the unsplit model

Hooks stand around the model's forward, whatever has been put in its place (TRL's fused head, say).
Before it they pack the rows into one and keep this rank's share, after it they put the results of
all ranks together. A call with a cache, and generate(), run unsplit on every rank.

All ranks get the same whole loss, so each calls backward on it. The backward pass of a whole result
keeps this rank's rows, times the number of ranks: the mean over ranks, which DDP and FSDP take, is
the unsplit gradient.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import tilewise as tw
from tilewise.arguments import Reduction
from tilewise.integrations.data import IGNORED, OF_IMAGES
from tilewise.integrations.transformers.attention import LayerMask, attention_of, masks_of
from tilewise.integrations.transformers.check import (
    base_model,
    refuse_new_adapters,
    refused_loss,
    wire_layers,
)
from tilewise.integrations.transformers.counted_positions import positions_moved, skips_padding
from tilewise.integrations.transformers.experts import ASKS, refused_router_loss
from tilewise.integrations.transformers.images import (
    KIND_IDS,
    ImageFeatures,
    SplitImages,
    WholeTokens,
    fields_of_images,
    has_images,
    images_split,
    refused_images,
)
from tilewise.integrations.transformers.labels import given_labels, is_masked
from tilewise.integrations.transformers.late_gather import LateGather
from tilewise.integrations.transformers.plan import choose_layouts, may_choose, work_to_plan
from tilewise.integrations.transformers.replay import INDICES, refuse_unsplit, wire_replay
from tilewise.integrations.transformers.rope import RopeLengths
from tilewise.integrations.transformers.row_functions import by_token
from tilewise.integrations.transformers.saved import (
    Shared,
    is_split,
    not_compiled,
    use_split_attention,
    whole_attention,
)
from tilewise.integrations.transformers.stand_ins import standing_in
from tilewise.integrations.transformers.states import (
    CACHES,
    StateLayers,
    documents_of_call,
    is_stateless,
    split_call,
    wire,
)
from tilewise.integrations.transformers.tree_rows import (
    OF_TREES,
    SEGMENTS,
    tree_of_call,
)
from tilewise.integrations.transformers.whole_rows import PackedRows, labels_of_rows, packed
from tilewise.plan.kept import RecentValues
from tilewise.tokens.moves import gather_moves
from tilewise.tokens.rows import move_rows
from tilewise.transport.agreement import agree, agree_on_largest, settled
from tilewise.transport.means import on_every_rank

Reduce = Callable[[Tensor, Any], Any]
KEPT = 64  # lengths of batches whose layout and plan are kept
PER_TOKEN = frozenset(  # results of each token, small enough to be whole on every rank
    ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "last_hidden_state")
)
READ = frozenset(  # arguments that say which tokens there are; the model gets this rank's share
    (
        *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels"),
        *("shift_labels", "token_type_ids", "mm_token_type_ids", "num_items_in_batch"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
        *(*CACHES, "use_cache", "return_dict", "logits_to_keep", "cache_position", INDICES),
        *OF_TREES,
    )
)
FEATURES = ("image_outputs", "video_outputs", "image_hidden_states", "video_hidden_states")
BESIDE_LOGITS = frozenset(("loss", "aux_loss", "logits", "router_logits", *CACHES))
COUNTS_TOKENS = ("opt",)  # model types that count positions without the padding before a row
ADVICE = MappingProxyType(
    {
        "output_attentions": "the scores are never in one place; leave it out",
        "pooler_output": "make the model without it: add_pooling_layer=False",
    }
)


def split_forward(
    model: nn.Module,
    group: Any,
    strategy: Literal["auto"] | tw.Plan = "auto",
    reduction: Reduction = "fast",
) -> None:
    """Make calls of a model run over the ranks of a group, after check_model.

    Args:
        model: of transformers, or one that PEFT made of it.
        group: ProcessGroup of the ranks that share each row.
        strategy, reduction: as ContextParallel takes them.
    Raises:
        ValueError: as of check_model and base_model. A model that only has a wrong loss is split,
            and its calls with labels are refused.
    """
    base = base_model(model)
    if getattr(base, "_tilewise_rows", None) is not None:
        split = base._tilewise_rows
    else:
        asked = getattr(base.config.get_text_config(decoder=True), ASKS, False)
        error = refused_router_loss(type(base)) if asked else None
        if error is not None:
            raise ValueError(error)
        split = SplitForward(base, group, strategy, reduction, refused_loss(model))
        base._tilewise_rows = split
        _use_attention(base)
        split.lengths.agree_in(base)
        if hasattr(base, "generate"):
            base.generate = partial(_generate_unsplit, base)
    refuse_new_adapters(model, group)
    called: Any
    for called in {id(x): x for x in (model, base)}.values():  # PEFT calls base.forward
        if not hasattr(called, "_tilewise_hooked"):
            called._tilewise_hooked = True
            called.register_forward_pre_hook(_before, with_kwargs=True, prepend=True)
            called.register_forward_hook(_after, with_kwargs=True, always_call=True)
            wire_replay(called, base, group)
        if called is not base:
            called._tilewise_rows = split


@contextmanager
def unsplit(model: nn.Module) -> Iterator[None]:
    """Calls of a split model run on whole rows inside, on this rank alone: no other rank need call.

        if rank == 0:
            with torch.no_grad(), hf.unsplit(model):
                print(model(tokens).loss)

    They have the attention that the model had before it was split, and its results are those of the
    unsplit model. Call backward inside, too. A model that is not split runs as it is.

    Args:
        model: as parallelize takes it, or the one that ParallelismConfig split, not its DDP.
    Raises:
        ValueError: under FSDP, where every rank has a part of each parameter.
    """
    base = base_model(model)
    sharded = next((name for name, x in base.named_parameters() if hasattr(x, "placements")), None)
    if sharded is not None:
        raise ValueError(
            f"{type(base).__name__} cannot run unsplit on one rank under FSDP: of parameters such "
            f"as {sharded} each rank has a part. Call the model on every rank: a call without "
            "labels returns whole logits"
        )
    with whole_attention(base):
        yield


@contextmanager
def whole_logits(wanted: bool = True, reduce: Reduce | None = None) -> Iterator[LogitsWanted]:
    """Calls with labels return the whole logits at once, and not when they are first used.

    Args:
        reduce: of logits and labels. If it acts on each token by itself, calls return its result in
            place of the logits, so that no rank holds these.
    """
    before, _state.logits = _state.logits, LogitsWanted(wanted, reduce)
    try:
        yield _state.logits
    finally:
        _state.logits = before


@dataclass
class LogitsWanted:
    """The logits that calls return.

    Args:
        whole, reduce: as whole_logits takes them.
        vocabulary: a row of logits without entries, of which a call has returned what reduce makes;
            None: it returned logits.
    """

    whole: bool
    reduce: Reduce | None = None
    vocabulary: Tensor | None = None


class _State(threading.local):
    """State of the thread that calls models.

    Attributes:
        call: the split call in progress; None: calls are not split.
        calls: one entry a hooked module in progress, with what ends with it; None where it is not
            split itself.
    """

    def __init__(self) -> None:
        self.call: SplitCall | None = None
        self.calls: list[tuple[SplitCall, ExitStack] | None] = []
        self.logits = LogitsWanted(False)


_state = _State()


def split_call_of_thread() -> SplitCall | None:
    """The split call that this thread runs; None: it runs none."""
    return _state.call


class _KnownLengths(RopeLengths):
    """RoPE lengths in a split forward: every rank knows the largest position from whole rows."""

    def largest(self, position: int) -> int:
        self.agreed = True
        return position if _state.call is None else _state.call.largest_position

    def splits(self, config: Any) -> bool:
        return _state.call is not None


@dataclass
class SplitCall:
    """A call of a model that runs split.

    Args:
        whole_labels: [rows, columns], shifted if the model shifts.
        cuts_last: results of each token have no last column, which predicts nothing.
        columns: of which logits are wanted; None: all.
        as_tuple: the caller asked for a tuple.
        images: which the call brings, if any.
        tree: that its row is, if it is one.
    """

    split: SplitForward
    cp: tw.ContextParallel
    rows: PackedRows
    largest_position: int
    whole_labels: Tensor | None
    cuts_last: bool
    columns: Tensor | None
    gathers_logits: bool
    as_tuple: bool
    images: SplitImages | None = None
    tree: tw.Tree | None = None

    def own_rows(self, x: Tensor) -> Tensor:
        """Return this rank's tokens [1, num_tokens, ...] of the batch [rows, columns, ...]; of a
        rank without tokens, one row of zeros.
        """
        return _Own(self.cp)(self.rows.take(x), 0)


class SplitForward(Shared):
    """The split of one model's calls: its group, strategy, and what is known of the model."""

    def __init__(
        self,
        base: Any,
        group: Any,
        strategy: Literal["auto"] | tw.Plan,
        reduction: Reduction = "fast",
        loss_refusal: str | None = None,
    ) -> None:
        text = base.config.get_text_config(decoder=True)
        self.group = group
        self.strategy: Literal["auto"] | tw.Plan = strategy
        self.reduction: Reduction = reduction
        self.loss_refusal = loss_refusal
        self.transport = tw.transport.transport_for(group)
        self.masked = is_masked(type(base))
        self.counts_kept = skips_padding(base) or text.model_type in COUNTS_TOKENS
        self.embeds_types = any("token_type_embeddings" in name for name, _ in base.named_modules())
        self.parameters = [*inspect.signature(type(base).forward).parameters][1:]
        wire(base)
        wire_layers(base)
        self.stateless = is_stateless(base)
        self.name, self.model_class = type(base).__name__, type(base)
        self.work = work_to_plan(base, self.transport.rank) if strategy == "auto" else None
        self.lengths = _KnownLengths(_GroupOnly(group))  # pyright: ignore[reportArgumentType]
        self._by_length: RecentValues[int, tw.ContextParallel] = RecentValues(KEPT)

    def for_length(self, num_tokens: int, device: str) -> tw.ContextParallel:
        """The layout and plan of rows of this length.

        Args:
            device: type of the device that the model runs on.
        """

        def make() -> tw.ContextParallel:
            cp = self._over_ranks(num_tokens, tw.Full() if self.masked else tw.Causal())
            if self.work is not None and may_choose(cp):
                # Batches differ in length: those up to the next power of two are planned alike.
                length = 1 << (num_tokens - 1).bit_length()
                choose_layouts(cp, self.work, self.name, device, length)
            return cp

        return self._by_length.get(num_tokens, make)

    def _over_ranks(self, num_tokens: int, mask: tw.masks.Mask) -> tw.ContextParallel:
        how: dict[str, Any] = {"strategy": self.strategy, "reduction": self.reduction}
        return tw.ContextParallel(self.group, num_tokens=num_tokens, mask=mask, **how)

    def starts(
        self, called: Any, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[SplitCall, dict[str, Any]]:
        """A call, and the arguments with which this rank's share of it runs.

        Args:
            called: the model, or what PEFT made of it.
        """
        given = dict(zip(self.parameters, args, strict=False)) | given
        call, inputs = settled(self.transport, lambda: self._share(called, given))
        fields = settled(self.transport, lambda: self._fields(call, given))
        agree(self.transport, fields, None, "always")
        return call, inputs

    def _fields(self, call: SplitCall, given: dict[str, Any]) -> dict[str, str]:
        """Return facts that must be equal on all ranks, as text by name.

        Rows are compared by sums that change with any token.
        """
        sums = []
        for name in ("input_ids", "labels", "shift_labels", "position_ids", *SEGMENTS):
            x = given.get(name)
            if x is not None:
                weights = torch.arange(1, x.numel() + 1, device=x.device)
                sums.append(f"{name} {int((x.flatten() * weights).sum())}")
        return {
            "call": "a model on whole rows",
            "shape of the batch": str(call.rows.shape),
            "tokens of the batch": ", ".join(sums),
            "documents": str(call.rows.cu_seqlens),
            "images": fields_of_images(given),
            "labels": "given" if call.whole_labels is not None else "none",
            "logits": "whole" if call.gathers_logits else "this rank's",
        }

    def _share(self, called: Any, given: dict[str, Any]) -> tuple[SplitCall, dict[str, Any]]:
        tokens = given.get("input_ids")
        if tokens is None:
            tokens = given.get("inputs_embeds")
        if not isinstance(tokens, Tensor) or tokens.ndim < 2:
            raise ValueError("pass input_ids [rows, columns], or inputs_embeds")
        if self.loss_refusal is not None and given_labels(given):
            raise ValueError(self.loss_refusal)
        error = refused_images(called, given) if has_images(given) else None
        if error is not None:
            raise ValueError(error)
        _refuse_others(given)
        error = refused_router_loss(self.model_class) if given.get(ASKS) else None
        if error is not None:
            raise ValueError(error)
        position_ids, three = given.get("position_ids"), None
        if isinstance(position_ids, Tensor) and position_ids.ndim == 3:  # [3 or 4, rows, columns]
            position_ids, three = _of_text_and_images(position_ids, tokens)
        tree = tree_of_call(called, given, tokens)
        rows = packed(
            tokens,
            given.get("attention_mask"),
            position_ids,
            given.get("cu_seq_lens_q") if tree is None else torch.tensor([0, tree.num_tokens]),
            counts_kept=self.counts_kept,
        )
        if tree is None:
            cp = self.for_length(rows.num_tokens, tokens.device.type)
        else:
            cp = self._over_ranks(rows.num_tokens, tree.mask)
        own = _Own(cp)
        inputs = {name: x for name, x in given.items() if name not in READ}
        for name in ("input_ids", "inputs_embeds"):
            if given.get(name) is not None:
                inputs[name] = own(rows.take(given[name]), 0)
        images = _images(called, cp, rows, given) if has_images(given) else None
        if three is not None:
            three = rows.take(three.movedim(0, -1)).movedim(-1, 0)
        elif images is not None:
            three = images.positions(given, flat=position_ids is not None)
        if three is None:
            inputs["position_ids"] = own(rows.position_ids[None], 0)
        else:
            inputs["position_ids"] = own(three.movedim(0, -1), 0).movedim(-1, 0)
        for name in ("token_type_ids", KIND_IDS):
            if given.get(name) is not None:
                whole = rows.take(given[name])
                inputs[name] = own(whole, 0) if self.embeds_types else whole
        if given.get(INDICES) is not None:
            inputs[INDICES] = [own(rows.take_positions(x), -1) for x in given[INDICES]]
        shifted, labels = given.get("shift_labels"), given.get("labels")
        whole_labels = None
        if shifted is not None or labels is not None:
            taken, whole_labels = (
                labels_of_rows(rows, shifted, shift=False)
                if shifted is not None
                else labels_of_rows(rows, labels, shift=not self.masked)  # type: ignore[arg-type]
            )
            inputs["labels"] = own(taken, IGNORED)
            if not self.masked:
                inputs["shift_labels"] = inputs["labels"]
            count = given.get("num_items_in_batch")
            if count is None:
                count = (whole_labels != IGNORED).sum()
                count = count.clamp(min=1) if given.get("fused_lm_head") else count
            inputs["num_items_in_batch"] = count
        if "use_cache" in self.parameters:
            inputs["use_cache"] = False
        inputs["return_dict"] = True
        fused = bool(given.get("fused_lm_head"))
        columns = _wanted_columns(given.get("logits_to_keep"), rows.shape[1])
        if columns is not None and not fused:
            inputs["logits_to_keep"] = _rows_of_columns(rows, cp, columns)[1]
        call = SplitCall(
            self,
            cp,
            rows,
            int((rows.position_ids if three is None else three).max()),
            whole_labels,
            cuts_last=fused and shifted is None,
            columns=columns,
            gathers_logits=whole_labels is None or _state.logits.whole,
            as_tuple=given.get("return_dict") is False,
            images=images,
            tree=tree,
        )
        return call, inputs

    def finishes(self, call: SplitCall, result: Any) -> Any:
        """Whole results in place of this rank's."""
        if not isinstance(result, Mapping):
            raise ValueError(
                f"the model returned {type(result).__name__}, not a ModelOutput: its results "
                "cannot be told apart"
            )
        reduced = self._reduced_logits(call, result)
        whole = {
            name: self._whole(call, name, x) if reduced is None or name != "logits" else reduced
            for name, x in result.items()
        }
        made = type(result)(**whole)  # pyright: ignore[reportCallIssue]
        return made.to_tuple() if call.as_tuple else made  # pyright: ignore

    def _reduced_logits(self, call: SplitCall, result: Mapping[str, Any]) -> Tensor | None:
        """Reduce logits by token and gather the results; None if the caller's function is not known
        to act by token.
        """
        wanted, x = _state.logits, result.get("logits")
        reduce = wanted.reduce
        others = {name for name, x in result.items() if x is not None} - BESIDE_LOGITS
        if reduce is None or x is None or others or call.columns is not None:
            return None
        made = by_token(reduce, x, call.whole_labels)
        refused = agree_on_largest(self.transport, "logits not reduced by token", int(made is None))
        if refused or made is None:
            wanted.reduce = None
            return None
        wanted.vocabulary = row = x.new_zeros((1, 1, x.shape[-1]))
        return call.rows.put(_gathered(made, call.cp), reduce(row, call.whole_labels)[0, 0])

    def _whole(self, call: SplitCall, name: str, x: Any) -> Any:
        match name:
            case "loss" | "aux_loss":  # 0, and no tensor, of a model without routers
                return _SumOverRanks.apply(x, self.transport) if isinstance(x, Tensor) else x
            case "label_mask":
                assert call.whole_labels is not None
                mask = call.whole_labels != IGNORED
                return mask[:, :-1] if call.cuts_last else mask
            case "logits":
                if x is None or call.gathers_logits:
                    return None if x is None else self._whole_logits(call, x)
                return LateGather(lambda: self._whole_logits(call, x))
            case "start_logits" | "end_logits":
                if call.rows.num_tokens < call.rows.shape[0] * call.rows.shape[1]:
                    raise ValueError(
                        f"{name} has no values at padding, which a softmax over a row would count: "
                        "give batches whose rows are equally long, one row at a time say"
                    )
                return call.rows.put(_gathered(x, call.cp))
            case "router_logits":  # of each layer [rows * columns, experts], 0 at padding
                return tuple(LateGather(partial(self._router_rows, call, layer)) for layer in x)
            case "hidden_states":
                return tuple(call.rows.put(_gathered(layer, call.cp)) for layer in x)
            case _ if name in FEATURES and call.images is not None:
                is_features = isinstance(x, Tensor)
                form = x if is_features else x.pooler_output
                features = call.images.features[name.partition("_")[0]]
                whole = LateGather(partial(_whole_features, features, form))
                return whole if is_features else type(x)(pooler_output=whole)
            case _ if name in CACHES:
                return None
            case _ if name in PER_TOKEN:
                rows = call.rows.put(_gathered(x, call.cp))
                return rows[:, :-1] if call.cuts_last else rows
        raise ValueError(
            f"the model returned {name}, which would be of this rank's tokens alone: "
            + ADVICE.get(name, "it is not known how to put it together; leave it out")
        )

    def _router_rows(self, call: SplitCall, x: Tensor) -> Tensor:
        return call.rows.put(_gathered(x[None], call.cp)).flatten(0, 1)

    def _whole_logits(self, call: SplitCall, x: Tensor) -> Tensor:
        if call.columns is None:
            return call.rows.put(_gathered(x, call.cp))
        layout, _ = _rows_of_columns(call.rows, call.cp, call.columns)
        # Where these columns hold padding alone there are no logits to gather.
        logits = x[0, :0] if layout is None else _gathered(x, call.cp, layout)[0]
        shape = call.rows.shape[0], len(call.columns)
        at = torch.isin(call.rows.kept % call.rows.shape[1], call.columns)
        kept = call.rows.kept[at]
        place = torch.searchsorted(call.columns, kept % call.rows.shape[1])
        place = place + kept // call.rows.shape[1] * shape[1]
        whole = logits.new_zeros((shape[0] * shape[1], *logits.shape[1:]))
        return whole.index_copy(0, place, logits).unflatten(0, shape)


class _GroupOnly(NamedTuple):
    """The part of a ContextParallel that RopeLengths needs where no length is known."""

    group: Any


class _Own(NamedTuple):
    """Function that cuts this rank's share of x along dimension 1.

    A rank without rows gets one row of padding, because models cannot run on none.
    """

    cp: tw.ContextParallel

    def __call__(self, x: Tensor, fill: int) -> Tensor:
        mine = self.cp.shard(x, 1)
        if mine.shape[1]:
            return mine
        return torch.full((1, 1, *x.shape[2:]), fill, dtype=x.dtype, device=x.device)


def _refuse_others(given: Mapping[str, Any]) -> None:
    """Refuse arguments of which it is not known whether they have a share for each rank."""
    for name, advice in ADVICE.items():
        if given.get(name):
            raise ValueError(f"{name}=True cannot be honoured by a split model: {advice}")
    others = [
        name
        for name, x in given.items()
        if name not in READ | OF_IMAGES and (isinstance(x, Tensor | list | tuple | dict))
    ]
    if others:
        raise ValueError(
            f"{', '.join(others)} cannot be split by tilewise in a model's forward; a split call "
            f"takes rows of tokens and {', '.join(sorted(OF_IMAGES))}"
        )


def _of_text_and_images(position_ids: Tensor, tokens: Tensor) -> tuple[Tensor | None, Tensor]:
    """Positions of text, if there are any, and the three of each token [3, rows, columns]."""
    if position_ids.shape[0] not in (3, 4) or position_ids.shape[1:] != tokens.shape[:2]:
        rows, columns = tokens.shape[:2]
        raise ValueError(
            f"position_ids have the shape {list(position_ids.shape)}, but must be three for each "
            f"token, or four with those of text first: [3 or 4, {rows}, {columns}]"
        )
    return (position_ids[0] if len(position_ids) == 4 else None), position_ids[-3:]


def _images(
    called: Any, cp: tw.ContextParallel, rows: PackedRows, given: Mapping[str, Any]
) -> SplitImages:
    """The images of a batch, in the order of its packed row."""
    if given.get("input_ids") is None:
        raise ValueError("images need input_ids, which say which tokens are theirs")
    types = given.get(KIND_IDS)
    if types is not None and tuple(types.shape) != rows.shape:
        raise ValueError(
            f"{KIND_IDS} has the shape {list(types.shape)}, but the batch has {list(rows.shape)}"
        )
    edges = rows.cu_seqlens
    numbers = [int(rows.kept[edge]) // rows.shape[1] for edge in edges[:-1]]
    names = [
        f"row {row}" if numbers.count(row) == 1 else f"row {row}, tokens {a} to {b - 1},"
        for row, (a, b) in zip(numbers, pairwise(edges), strict=True)
    ]
    types = None if types is None else rows.take(types)
    return SplitImages(called, cp, WholeTokens(rows.take(given["input_ids"]), types, edges, names))


def _wanted_columns(keep: Any, columns: int) -> Tensor | None:
    """The columns whose logits a caller wants, ascending; None: all."""
    if isinstance(keep, Tensor):
        chosen = torch.arange(columns, device=keep.device)[keep]
        if bool((chosen.diff() <= 0).any()):
            raise ValueError("logits_to_keep must name columns in ascending order, each once")
        return chosen
    return torch.arange(max(0, columns - keep), columns) if keep else None


def _rows_of_columns(
    rows: PackedRows, cp: tw.ContextParallel, columns: Tensor
) -> tuple[tw.Layout | None, Tensor]:
    """Return the layout of the tokens of some columns, None if these have no tokens, and this
    rank's rows of them.
    """
    wanted = torch.isin(rows.kept % rows.shape[1], columns.to(rows.kept.device)).cpu()
    number = wanted.cumsum(0) - 1
    by_rank = [cp.layout.positions(rank) for rank in range(cp.world_size)]
    order = [number[positions[wanted[positions]]] for positions in by_rank]
    layout = tw.Layout.from_positions(order, name="columns") if bool(wanted.any()) else None
    mine = wanted[by_rank[cp.rank]].nonzero().flatten()
    return layout, mine.to(rows.kept.device)


class _Whole(torch.autograd.Function):
    """[1, this rank's rows, ...] -> [1, all rows of a layout, ...]; backward keeps this rank's
    rows, times the number of ranks, without a message: all ranks have the same gradient of the
    whole.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layout: tw.Layout, transport: tw.transport.Transport
    ) -> Tensor:
        ctx.layout, ctx.rank, ctx.rows = layout, transport.rank, x.shape[1]
        mine = x.detach()[:, : layout.size(transport.rank)]
        # A copy, and no view: callers may change it in place.
        return move_rows(mine, gather_moves(layout, None), transport, 1).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, whole: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        mine = ctx.layout.shard(whole, ctx.rank, 1) * ctx.layout.world_size
        spare = ctx.rows - mine.shape[1]
        if spare:
            mine = torch.cat([mine, mine.new_zeros((1, spare, *mine.shape[2:]))], 1)
        return mine, None, None


def _gathered(x: Tensor, cp: tw.ContextParallel, layout: tw.Layout | None = None) -> Tensor:
    """Gather the rows of all ranks, in the order of the sequence.

    Args:
        layout: of the rows; None: that of cp.
    """
    given = layout or cp.layout, tw.transport.transport_for(cp.group)
    return _Whole.apply(x, *given)  # pyright: ignore[reportReturnType]


def _whole_features(features: ImageFeatures, form: Any) -> Any:
    """Features of all images, as one tensor or a tensor of each, as the form is."""
    rows, owners, counts = features
    whole = rows if owners is None else _gathered(rows[None], owners)[0]
    if not isinstance(form, Tensor):
        return whole.split(counts)
    return whole.unflatten(0, (len(counts), -1)) if form.ndim > whole.ndim else whole


class _SumOverRanks(torch.autograd.Function):
    """The sum of the ranks' shares; backward hands the gradient on, times the number of ranks."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, transport: Any) -> Tensor:
        ctx.world_size = transport.world_size
        shares = on_every_rank(transport, share.detach().reshape(1))
        return torch.stack(shares).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        return grad * ctx.world_size, None


def _runs_unsplit(given: Mapping[str, Any]) -> bool:
    """Return whether a call is one of generation: it has a cache, or asks for one."""
    cached = any(given.get(name) is not None for name in CACHES)
    return bool(cached or given.get("use_cache"))


@not_compiled
def _before(module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    if not is_split(module):
        _state.calls.append(None)
        return None
    split: SplitForward = module._tilewise_rows
    named = dict(zip(split.parameters, args, strict=False)) | given
    if _state.call is not None or split.transport.world_size == 1 or _runs_unsplit(named):
        refuse_unsplit(named)
        _state.calls.append(None)
        return None
    call, inputs = split.starts(module, args, given)
    stack = ExitStack()
    _state.calls.append((call, stack))
    _state.call = call
    stack.enter_context(standing_in(module, split.model_class, call.cp))
    if call.images is not None:
        stack.enter_context(images_split(call.images))
    # Positions that are given are those of the model's table.
    stack.enter_context(positions_moved(call.cp if named.get("position_ids") is None else None))
    states: StateLayers | None = getattr(module, "_tilewise_states", None)
    if states is not None:
        mask = stack.enter_context(split_call(states, call.cp, call.rows.cu_seqlens))
        if states.hands_mask:
            inputs["attention_mask"] = mask
    return (), inputs


@not_compiled
def _after(module: Any, args: Any, given: Any, result: Any) -> Any:
    entry = _state.calls.pop() if _state.calls else None
    if entry is None:
        return None
    call, stack = entry
    stack.close()
    _state.call = None
    return None if result is None else call.split.finishes(call, result)


def _generate_unsplit(self: Any, *args: Any, **given: Any) -> Any:
    with whole_attention(self):  # on every rank, so under FSDP as well
        return type(self).generate(self, *args, **given)


def _use_attention(base: Any) -> None:
    """Give a model an attention that is split in split calls, and what it was in others."""
    from transformers import AttentionInterface, AttentionMaskInterface

    beside = base.config.get_text_config(decoder=True)._attn_implementation
    # transformers looks for words such as "flash" in a name.
    name = f"tilewise_rows_{beside.encode().hex()}"
    AttentionInterface.register(name, _attention_beside(beside))
    AttentionMaskInterface.register(name, _masks_beside(beside))
    use_split_attention(base, name)


def _attention_beside(implementation: str) -> Callable[..., Any]:
    @torch.compiler.disable
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any
    ) -> Any:
        if isinstance(mask, LayerMask):  # also where a checkpoint runs a layer again
            return attention_of(mask.cp, True)(module, query, key, value, mask, **given)
        if _state.call is not None:
            return attention_of(_state.call.cp, True)(module, query, key, value, mask, **given)
        return _unsplit_attention(implementation, module)(module, query, key, value, mask, **given)

    return attend


def _unsplit_attention(implementation: str, module: nn.Module) -> Callable[..., Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if implementation in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[implementation]
    return sys.modules[type(module).__module__].eager_attention_forward


def _masks_beside(implementation: str) -> Callable[..., Any]:
    @torch.compiler.disable
    def make_mask(**given: Any) -> Any:
        call = _state.call
        if call is None:
            from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

            return ALL_MASK_ATTENTION_FUNCTIONS[implementation](**given)
        how = True, documents_of_call, call.split.stateless
        mask = masks_of(call.cp, call.split.lengths, *how)(**given)
        mask.settle(call.rows.cu_seqlens) if call.tree is None else mask.settle_tree(call.tree)
        return mask

    return make_mask

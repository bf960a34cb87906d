"""Data for a split sequence: each rank's share of a packed batch, labels shifted before sharding.

It stands beside hf.py because it needs no transformers: the keys are those its models take, the
values plain tensors.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

import tilewise as tw
from tilewise.arguments import (
    checks_arguments,
    entries,
    listed,
    require_dense,
    shown,
    whole_number,
    whole_numbers,
)

__all__ = ["IGNORED", "ShardingCollator", "TokenDataset", "pack", "shard_inputs"]

IGNORED = -100  # the label that no loss counts
TYPES = ("token_type_ids", "mm_token_type_ids")  # which every rank gets of the whole sequence
FILL = MappingProxyType({"input_ids": 0, "labels": IGNORED} | dict.fromkeys(TYPES, 0))
OF_IMAGES = frozenset(  # arguments of a model's call, beside its tokens; each rank gets them whole
    (
        *("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw"),
        *("second_per_grid_ts", "image_sizes", "image_sizes_videos", "batch_num_images"),
        *("image_position_ids", "video_position_ids", "num_frames_per_video"),
        *("vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio"),
    )
)
Inputs = dict[str, Tensor]


@checks_arguments
def shard_inputs(  # noqa: PLR0913 - what a batch consists of, by name
    layout: tw.Layout,
    rank: int,
    input_ids: Tensor,
    *,
    labels: Tensor | None = None,
    cu_seqlens: Any = None,
    attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    mm_token_type_ids: Tensor | None = None,
    shift_labels: bool = True,
) -> Inputs:
    """Return the arguments with which a model of transformers is called on one rank, from the whole
    batch.

    input_ids, position_ids (within each document), cu_seq_lens_q and _k (of the whole sequence),
    and with labels: labels, shift_labels (both shifted) and num_items_in_batch, by which each
    rank's loss is its share of the whole mean: shares, and gradients, add up over ranks. A rank
    without tokens gets one row of padding.

    Args:
        input_ids: [batch, num_tokens], the same on all ranks.
        labels: as input_ids, not shifted; -100 is ignored.
        cu_seqlens: boundaries of packed documents; default: one document.
        attention_mask: as input_ids, 0 where a row is padded on its right: the rows become the
            documents of one row of layout.num_tokens, without their padding and its labels.
        token_type_ids, mm_token_type_ids: as input_ids, where the model makes a mask of them
            (images of Gemma 3 and 4) or counts positions by them (Qwen-VL). They are returned
            whole, because the tokens of an image may lie on several ranks.
        shift_labels: False for a masked language model, which predicts labels where they are.
    """
    given = {"input_ids": input_ids, "labels": labels, "token_type_ids": token_type_ids}
    given["mm_token_type_ids"] = mm_token_type_ids
    columns = {name: x for name, x in given.items() if x is not None}
    for name, x in (columns | {"attention_mask": attention_mask}).items():
        if x is not None:
            require_dense(name, x)
    if attention_mask is not None:
        documents = _unpadded(columns, attention_mask, cu_seqlens)
        columns, cu_seqlens = _one_row(layout, documents, 0)
    input_ids, labels = columns["input_ids"], columns.get("labels")
    if input_ids.ndim != 2 or any(x.shape != input_ids.shape for x in columns.values()):
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in columns.items())
        raise ValueError(f"{shapes}: pass [batch, num_tokens] each, of one shape")
    boundaries = (
        (0, layout.num_tokens) if cu_seqlens is None else tw.Document(cu_seqlens).cu_seqlens
    )
    if boundaries[-1] != layout.num_tokens:
        raise ValueError(
            f"cu_seqlens ends at {boundaries[-1]}, but the layout has {layout.num_tokens} tokens; "
            "pass the boundaries of the whole sequence"
        )
    mine = layout.shard(input_ids, rank, 1)
    whole = {name: x for name, x in columns.items() if name in TYPES}
    if labels is None:
        return _inputs(layout, rank, boundaries, mine) | whole
    if shift_labels:
        labels = tw.lengths.shift_labels(labels, boundaries, IGNORED)
    count = (labels != IGNORED).sum()
    inputs = _inputs(layout, rank, boundaries, mine, (layout.shard(labels, rank, 1), count))
    if not shift_labels:
        del inputs["shift_labels"]
    return inputs | whole


@checks_arguments
def pack(document_lengths: Iterable[int], num_tokens: int) -> list[list[int]]:
    """Indices of documents that go into one sequence each, the fullest sequence that has room.

    A batch_sampler for a DataLoader whose collate_fn is a ShardingCollator.

    Raises:
        ValueError: if a document is longer than num_tokens.
    """
    groups: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, group), ascending
    whole_number("num_tokens", num_tokens)
    for index, length in enumerate(entries("document_lengths", document_lengths)):
        whole_number(f"length of document {index}", length, 0)
        if length > num_tokens:
            raise ValueError(
                f"document {index} has {length} tokens, more than num_tokens ({num_tokens}); "
                "cut it first"
            )
        at = bisect_left(room, (length, -1))
        left, group = room.pop(at) if at < len(room) else (num_tokens, len(groups))
        if group == len(groups):
            groups.append([])
        groups[group].append(index)
        insort(room, (left - length, group))
    return groups


class ShardingCollator:
    """Examples of any lengths, packed into one row of documents, to one rank's share of it.

    What is left of the row is one more document, of padding. Every rank gets the same examples.

    Args:
        layout, rank: as of the ContextParallel.
        pad_token_id: fills the row; its labels are ignored.
        shift_labels: False for a masked language model.
    """

    @checks_arguments
    def __init__(
        self, layout: tw.Layout, rank: int, *, pad_token_id: int = 0, shift_labels: bool = True
    ):
        whole_number("rank", rank, 0, layout.world_size - 1)
        self.layout, self.rank, self.pad_token_id = layout, rank, pad_token_id
        self.shift_labels = shift_labels

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> Inputs:
        """Inputs as of shard_inputs, batch 1.

        Args:
            examples: input_ids, and labels if they are not the same, each of any length; with
                token_type_ids all or none; with attention_mask: without what it says is padding on
                the right.
        """
        documents: dict[str, list[Tensor]] = {}
        for index, example in enumerate(listed("examples", examples, "dicts with input_ids")):
            if not isinstance(example, Mapping) or "input_ids" not in example:
                raise ValueError(
                    f"example {index} ({shown(example)}) must be a dict with input_ids"
                )
            refuse_images(example, f"example {index}")
            mask = example.get("attention_mask")
            kept = None
            if mask is not None:
                kept = _length(_row(f"attention_mask of example {index}", mask), index)
            for name, x in {"labels": example["input_ids"], **example}.items():
                if name in FILL:
                    row = _row(f"{name} of example {index}", x)
                    documents.setdefault(name, []).append(row[:kept])
        if not documents:
            raise ValueError("examples has 0 documents; give at least one")
        columns, cu_seqlens = _one_row(self.layout, documents, self.pad_token_id)
        options = {"cu_seqlens": cu_seqlens, "shift_labels": self.shift_labels}
        return shard_inputs(self.layout, self.rank, **columns, **options)


def refuse_images(example: Mapping[str, Any], name: str) -> None:
    """Raise ValueError if an example has images, which a collator that packs text would drop."""
    found = sorted(OF_IMAGES & example.keys())
    if found:
        raise ValueError(
            f"{name} has {', '.join(found)}, but this collator packs text alone: let your "
            "processor's collator make the batch; hf.shard, and a model that ParallelismConfig "
            "splits, take its columns as they are"
        )


def _row(name: str, numbers: Any) -> Tensor:
    """A list, array or tensor of whole numbers."""
    if not isinstance(numbers, Tensor) or numbers.ndim != 1 or numbers.is_meta:
        numbers = torch.from_numpy(whole_numbers(name, numbers))
    return numbers


def _unpadded(columns: Inputs, attention_mask: Tensor, cu_seqlens: Any) -> dict[str, list[Tensor]]:
    """The rows of a batch without their padding."""
    shapes = {name: tuple(x.shape) for name, x in columns.items()}
    if set(shapes.values()) != {tuple(attention_mask.shape)} or cu_seqlens is not None:
        raise ValueError(
            f"attention_mask {tuple(attention_mask.shape)} must have the shape of "
            f"{', '.join(f'{name} {shape}' for name, shape in shapes.items())}, and stand alone: "
            "it says where documents end, as cu_seqlens would"
        )
    kept = [_length(row, index) for index, row in enumerate(attention_mask)]
    return {
        name: [x[:n] for x, n in zip(rows, kept, strict=True)] for name, rows in columns.items()
    }


def _length(attention_mask: Tensor, row: int) -> int:
    """Return how many tokens stand before the padding."""
    length = int((attention_mask != 0).sum())
    if bool((attention_mask[:length] == 0).any()):
        raise ValueError(
            f"attention_mask of row {row} hides a token before its last one; only padding on the "
            "right can be left out: set the tokenizer's padding_side to 'right'"
        )
    return length


def _one_row(
    layout: tw.Layout, documents: Mapping[str, list[Tensor]], pad_token_id: int
) -> tuple[Inputs, list[int]]:
    """Documents one after the other, then padding: columns [1, num_tokens], and cu_seqlens."""
    counts, num_tokens = list(map(len, documents["input_ids"])), layout.num_tokens
    cu_seqlens = np.cumsum([0, *counts]).tolist()
    missing = num_tokens - cu_seqlens[-1]
    if missing < 0:
        raise ValueError(
            f"the {len(counts)} examples have {cu_seqlens[-1]} tokens, but the layout is "
            f"for {num_tokens}; group them with pack(lengths, {num_tokens})"
        )
    for name, pieces in documents.items():
        if list(map(len, pieces)) != counts:
            raise ValueError(
                f"{name} have {list(map(len, pieces))} tokens, input_ids {counts}; give every "
                "example both, of one length"
            )
    fill = FILL | {"input_ids": pad_token_id}
    columns = {
        name: torch.cat([*pieces, pieces[0].new_full((missing,), fill[name])])[None]
        for name, pieces in documents.items()
    }
    return columns, cu_seqlens + [num_tokens] * bool(missing)


class TokenDataset(Dataset[Inputs]):
    """Sequences of one long stream of tokens, of which each rank reads its own tokens only.

    Item i is this rank's share of tokens [i n, (i + 1) n), as of shard_inputs; what is left at the
    end is dropped. Use it with DataLoader(..., batch_size=None).

    Args:
        tokens: [num_tokens_in_all], sliceable; a np.memmap reads from disk what is asked for.
        cu_seqlens: document boundaries of the stream; default: one document per sequence.
    """

    @checks_arguments
    def __init__(self, tokens: Any, layout: tw.Layout, rank: int, cu_seqlens: Any = None):
        whole_number("rank", rank, 0, layout.world_size - 1)
        if not hasattr(tokens, "__getitem__") or not _is_sized(tokens):
            raise ValueError(f"tokens ({shown(tokens)}) must be an array [num_tokens_in_all]")
        self.tokens, self.layout, self.rank = tokens, layout, rank
        given = (0, len(tokens)) if cu_seqlens is None else tw.Document(cu_seqlens).cu_seqlens
        self.cu_seqlens = np.array(given)
        if self.cu_seqlens[-1] != len(tokens):
            raise ValueError(
                f"cu_seqlens ends at {self.cu_seqlens[-1]}, but there are {len(tokens)} tokens"
            )

    def __len__(self) -> int:
        return len(self.tokens) // self.layout.num_tokens

    def __getitem__(self, index: int) -> Inputs:
        if not 0 <= whole_number("index", index, None) < len(self):
            raise IndexError(f"item ({index}) must be in 0..{len(self) - 1}")
        num_tokens = self.layout.num_tokens
        start = index * num_tokens
        cuts = np.clip(self.cu_seqlens - start, 0, num_tokens)
        boundaries = tuple(np.unique([0, *cuts, num_tokens]).tolist())
        pieces = [self._read(start, *piece) for piece in self.layout.ranges(self.rank)]
        mine, following = (torch.cat([p[i] for p in pieces or [_nothing()]]) for i in range(2))
        ends = torch.isin(self.layout.positions(self.rank) + 1, torch.tensor(boundaries))
        labels = following.masked_fill(ends, IGNORED)[None]
        count = torch.tensor(num_tokens - (len(boundaries) - 1))
        return _inputs(self.layout, self.rank, boundaries, mine[None], (labels, count))

    def _read(self, start: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Tokens first..last of a sequence, and the one after each (of its last one: itself)."""
        stop = min(last + 1, self.layout.num_tokens)
        read = torch.from_numpy(whole_numbers("tokens", self.tokens[start + first : start + stop]))
        return read[: last - first], torch.cat([read, read[-1:]])[1 : last - first + 1]


def _is_sized(tokens: Any) -> bool:
    try:
        return len(tokens) >= 0 and not isinstance(tokens, str | bytes | Mapping)
    except (TypeError, OverflowError, RuntimeError):  # of an array of no dimensions, too
        return False


def _nothing() -> tuple[Tensor, Tensor]:
    return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)


def _inputs(
    layout: tw.Layout,
    rank: int,
    cu_seqlens: Sequence[int],
    input_ids: Tensor,
    labels: tuple[Tensor, Tensor] | None = None,
) -> Inputs:
    """Inputs from a rank's rows [batch, num_rows]; labels: shifted ones, and how many count.

    Position ids are where the input ids are, as a model reads both; boundaries are the host's.
    """
    position_ids = torch.from_numpy(tw.lengths.position_ids(cu_seqlens)[layout.rows(rank)])
    boundaries = torch.tensor(cu_seqlens, dtype=torch.int32)
    longest = int(boundaries.diff().max())
    padding = 0 if layout.size(rank) else 1
    inputs = {"input_ids": input_ids, "position_ids": position_ids[None].to(input_ids.device)}
    if labels is not None:
        inputs["labels"] = labels[0]
    inputs = {
        name: torch.nn.functional.pad(x, (0, padding), value=FILL.get(name, 0))
        for name, x in inputs.items()
    }
    if labels is not None:
        inputs |= {"shift_labels": inputs["labels"], "num_items_in_batch": labels[1]}
    inputs |= {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
    return inputs | {"max_length_q": torch.tensor(longest), "max_length_k": torch.tensor(longest)}

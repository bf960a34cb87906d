"""Whole rows of a batch as the one packed row that is split, and results of its tokens back.

A row without its padding is a document, so that rows of any lengths, padded on either side, are one
sequence of documents: what a layout can split. Nothing here knows of ranks or of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.integrations.data import IGNORED
from tilewise.masks.base import as_ints


@dataclass(frozen=True)
class PackedRows:
    """The tokens of a batch in the order of one packed row.

    Args:
        shape: (rows, columns) of the batch.
        kept: [num_tokens], where each token stood in the flattened batch; padding is left out.
        position_ids: [num_tokens], each token's position as its model counts.
        cu_seqlens: boundaries of documents in the packed row.
    """

    shape: tuple[int, int]
    kept: Tensor
    position_ids: Tensor
    cu_seqlens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the packed row."""
        return len(self.kept)

    def take(self, x: Tensor) -> Tensor:
        """[rows, columns, ...] -> [1, num_tokens, ...]."""
        return x.flatten(0, 1).index_select(0, self.kept.to(x.device))[None]

    def take_positions(self, x: Tensor) -> Tensor:
        """Positions in the packed row [1, num_tokens, k] from those in each row [rows, columns, k].

        Raises:
            ValueError: for a position that is no token's; -1 stands for none and stays.
        """
        columns, kept = self.shape[1], self.kept.to(x.device)
        if x.ndim != 3 or tuple(x.shape[:2]) != self.shape:
            raise ValueError(f"indices are {list(x.shape)}, but must be {[*self.shape, 'k']}")
        packed_place = kept.new_full((self.shape[0] * columns,), -1)
        packed_place[kept] = torch.arange(len(kept), device=x.device)
        own = self.take(x).long()
        wrong = (own < -1) | (own >= columns)
        places = packed_place[
            (own + (kept // columns * columns)[:, None]).clamp(min=0) % len(packed_place)
        ]
        wrong = wrong | ((own >= 0) & (places < 0))
        if bool(wrong.any()):
            raise ValueError(
                f"indices have {int(own[wrong][0])}, but must be positions of tokens in rows of "
                f"{columns} columns, or -1 for no key"
            )
        return torch.where(own < 0, -1, places)

    def put(self, x: Tensor, fill: Tensor | None = None) -> Tensor:
        """[1, num_tokens, ...] -> [rows, columns, ...]; differentiable.

        Args:
            fill: [...], at padding; None: 0.
        """
        if self.num_tokens == self.shape[0] * self.shape[1]:
            return x[0].unflatten(0, self.shape)
        size = (self.shape[0] * self.shape[1], *x.shape[2:])
        whole = x.new_zeros(size) if fill is None else fill.expand(size).clone()
        return whole.index_copy(0, self.kept.to(x.device), x[0]).unflatten(0, self.shape)


def packed(
    tokens: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    counts_kept: bool = False,
) -> PackedRows:
    """Read from a batch which tokens it has, where each stands, and which belong together.

    Args:
        tokens: [rows, columns, ...], the whole batch.
        attention_mask: [rows, columns], 0 at padding, on either side of a row.
        position_ids: [rows or 1, columns]; without an attention_mask a document starts wherever
            they do not go on, and beside one a row is one document, whatever they skip or repeat.
            None: the column of each token.
        cu_seqlens: boundaries of documents of a batch of one row, in place of position_ids'.
        counts_kept: positions that are not given count a row's tokens without its padding.
    Raises:
        ValueError: naming the argument that does not fit.
    """
    rows, columns = tokens.shape[:2]
    mask = _checked_mask(attention_mask, (rows, columns))
    kept = torch.arange(rows * columns, device=tokens.device)
    if mask is not None:
        kept = kept[mask.to(tokens.device).flatten() != 0]
    row, column = kept // columns, kept % columns
    new_row = row.diff() != 0
    holes = (column.diff() != 1) & ~new_row
    if bool(holes.any()):
        at = int(holes.nonzero()[0])
        raise ValueError(
            f"attention_mask of row {int(row[at])} hides the token after column {int(column[at])} "
            "but not a later one; only padding before and after a row's tokens can be left out"
        )
    if position_ids is None:
        positions, starts = column, new_row
        if counts_kept and len(kept):
            firsts = torch.cat([new_row.new_ones(1), new_row])
            positions = column - column[firsts.nonzero().flatten()][firsts.cumsum(0) - 1]
    else:
        positions = _checked_positions(position_ids, (rows, columns)).flatten()[kept]
        jumps = (positions.diff() != 1) & ~new_row
        again = jumps & (positions[1:] == 0) & (positions[:-1] != 0)
        if mask is not None and cu_seqlens is None and bool(again.any()):
            at = int(again.nonzero()[0])
            raise ValueError(
                f"position_ids of row {int(row[at])} start again after column {int(column[at])}, "
                "and there is an attention_mask, with which transformers reads no documents from "
                "position_ids; leave attention_mask out to keep the documents apart, or leave "
                "position_ids out to make the row one document"
            )
        starts = new_row if mask is not None else new_row | jumps
    if cu_seqlens is not None:
        edges = _checked_boundaries(cu_seqlens, rows, columns, len(kept))
    else:
        edges = (0, *(starts.nonzero().flatten() + 1).tolist(), len(kept))
    if len(kept) == 0:
        raise ValueError("the batch has no tokens: attention_mask is 0 everywhere")
    return PackedRows((rows, columns), kept, positions, edges)


def labels_of_rows(rows: PackedRows, labels: Tensor, *, shift: bool) -> tuple[Tensor, Tensor]:
    """Return the labels that the tokens of the packed row predict.

    Args:
        labels: [rows, columns].
        shift: a token predicts the label of the next column; False: its own.
    Returns:
        labels of the packed row, [1, num_tokens]; and of the whole batch, [rows, columns].
    Raises:
        ValueError: if a label would be predicted from padding.
    """
    if labels.shape != rows.shape:
        raise ValueError(
            f"labels have the shape {tuple(labels.shape)}, but the batch has {rows.shape}"
        )
    whole = labels
    if shift:
        whole = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    mine = rows.take(whole)
    lost = int((whole != IGNORED).sum()) - int((mine != IGNORED).sum())
    if lost:
        raise ValueError(
            f"{lost} labels are predicted from padding, which is left out: set labels to {IGNORED} "
            "at padding, and where rows are padded on the left at their first token too, or set "
            "the tokenizer's padding_side to 'right'"
        )
    return mine, whole


def _checked_mask(mask: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    if mask is None:
        return None
    if tuple(mask.shape) != shape:
        raise ValueError(
            f"attention_mask has the shape {tuple(mask.shape)}, but must have {shape}, 1 at tokens "
            "and 0 at padding; what each token sees comes from the model, documents from "
            "position_ids or cu_seq_lens_q"
        )
    return mask


def _checked_positions(position_ids: Tensor, shape: tuple[int, int]) -> Tensor:
    if position_ids.ndim != 2 or position_ids.shape[1] != shape[1]:
        raise ValueError(
            f"position_ids have the shape {tuple(position_ids.shape)}, but must have {shape}"
        )
    return position_ids.expand(shape)


def _checked_boundaries(
    cu_seqlens: Tensor, rows: int, columns: int, num_tokens: int
) -> tuple[int, ...]:
    edges = as_ints(cu_seqlens, "cu_seq_lens_q")
    if rows != 1 or num_tokens != columns or (edges[0], edges[-1]) != (0, columns):
        raise ValueError(
            f"cu_seq_lens_q goes from {edges[0]} to {edges[-1]} in a batch of {rows} rows of "
            f"{columns} tokens, {rows * columns - num_tokens} of them padding; it must go from 0 "
            "to the length of one row without padding"
        )
    return edges

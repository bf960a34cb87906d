"""Compressed keys: every full window of a document's tokens gives one entry, a key for all of them.

    tokens   | 0 1 2 3 | 4 5 6 7 | 8 9      windows of 4: two entries, and a rest that has none
    query 6 sees entry 0, query 7 sees 0 and 1: an entry is visible from its last token on

Entries are numbered over the whole sequence, document after document. Each is made by the rank that
has the last token of its window, of the rows of all of it, which that rank fetches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewise.compiler.row_moves import owners_of
from tilewise.indexed.choice import chosen_among
from tilewise.indexed.lists import attend_to_lists, list_kernel, proven
from tilewise.indexed.visible import VisibleKeys
from tilewise.layouts.layout import Layout
from tilewise.tokens.moves import gather_moves
from tilewise.tokens.named_rows import fetch_rows
from tilewise.tokens.rows import move_rows
from tilewise.transport.protocol import Transport

NO_WINDOW = -1


@dataclass(frozen=True, eq=False)
class Entries:
    """The entries of a sequence, for one rank.

    Attributes:
        rate: tokens of a window.
        layout: of the entries.
        starts: the first token of each entry's window, [entries].
        numbers: of each entry in its document, [entries].
        visible: entries that each of this rank's queries sees.
        first_tokens: the first token of each query's document that is in no window it sees, [rows].
    """

    rate: int
    layout: Layout
    starts: Tensor
    numbers: Tensor
    visible: VisibleKeys
    first_tokens: Tensor


@lru_cache(maxsize=64)
def entries_of(layout: Layout, rank: int, cu_seqlens: tuple[int, ...], rate: int) -> Entries | None:
    """The entries of packed documents; None if no document fills a window."""
    counts = np.diff(cu_seqlens) // rate
    firsts = np.concatenate([[0], counts.cumsum()])
    if not firsts[-1]:
        return None
    numbers = np.concatenate([np.arange(count) for count in counts])
    starts = np.repeat(np.asarray(cu_seqlens[:-1]), counts) + numbers * rate
    owner, _ = owners_of(layout)
    owners = owner[starts + rate - 1]
    by_rank = [np.flatnonzero(owners == peer) for peer in range(layout.world_size)]
    rows = layout.rows(rank)
    document = np.searchsorted(cu_seqlens, rows, side="right") - 1
    start = np.asarray(cu_seqlens)[document]
    complete = (rows - start + 1) // rate
    low = firsts[document]
    return Entries(
        rate,
        Layout.from_positions(by_rank, name="entries"),
        torch.from_numpy(starts),
        torch.from_numpy(numbers),
        VisibleKeys(*(torch.from_numpy(x)[None] for x in (low, low + complete))),
        torch.from_numpy(start + complete * rate),
    )


@dataclass(frozen=True, eq=False)
class Windows:
    """The windows that a rank compresses, in the order of its entries, and what these lean on.

    Attributes:
        numbers: of each window's entry; NO_WINDOW: rows of padding, which stand for no tokens.
        is_first: whether the next window is the first of its document, before which there is none.
        kept: windows that give this rank's entries.
        tokens: global positions of their tokens, [windows, rate]; -1 in padding.
        in_document: of each its number in its document, 0 of padding.
    """

    numbers: NDArray[np.int64]
    is_first: NDArray[np.bool_]
    kept: NDArray[np.int64]
    tokens: Tensor
    in_document: Tensor


def windows_of(entries: Entries, rank: int, *, overlapping: bool) -> Windows:
    """The windows of a rank's entries; never none, so that every rank takes part in backward.

    Args:
        overlapping: an entry also reads the window before its own, which then stands before it.
    """
    own, in_document = entries.layout.rows(rank).tolist(), entries.numbers.tolist()
    numbers, is_first, kept = list[int](), list[bool](), list[int]()
    for entry in own:
        first = in_document[entry] == 0
        if overlapping and (first or not numbers or numbers[-1] != entry - 1):
            numbers.append(NO_WINDOW if first else entry - 1)
            is_first.append(first)
        kept.append(len(numbers))
        numbers.append(entry)
        is_first.append(False)
    if not numbers:
        numbers, is_first = [NO_WINDOW], [False]
    number = torch.tensor(numbers)
    padding = number == NO_WINDOW
    tokens = entries.starts[number.clamp(min=0)][:, None] + torch.arange(entries.rate)
    return Windows(
        np.asarray(numbers),
        np.asarray(is_first),
        np.asarray(kept, np.int64),
        tokens.masked_fill(padding[:, None], -1),
        entries.numbers[number.clamp(min=0)].masked_fill(padding, 0),
    )


def all_visible(entries: Entries, device: torch.device) -> Tensor:
    """Every entry that each of this rank's queries sees, int32 [rows, most of them], then -1."""
    low, high = (x[0].to(device, torch.int32) for x in entries.visible)
    count = high - low
    most = int(count.max()) if len(count) else 0
    steps = torch.arange(most, dtype=torch.int32, device=device)
    return (low[:, None] + steps).masked_fill_(steps >= count[:, None], -1)


def checked_entries(chosen: Tensor, entries: Entries, rank: int, layout: Layout) -> Tensor:
    """Chosen entries [rows, k] from outside, if each is visible to its query and named once.

    Raises:
        ValueError: naming a query and its entry.
    """
    visible = VisibleKeys(*(x.to(chosen.device) for x in entries.visible))
    ordered = chosen.sort(-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    wrong = (chosen != -1) & ~visible.contain(chosen)
    for cells, values, why in (
        (wrong, chosen, "is hidden from it"),
        (twice, ordered[:, 1:], "it names twice"),
    ):
        if bool(cells.any()):
            row, column = cells.nonzero()[0].tolist()
            low, high = (int(x[0, row]) for x in visible)
            sees = f", which {why}: it sees {low} to {high - 1}, each once"
            raise ValueError(
                f"the query at position {int(layout.rows(rank)[row])} chooses compressed key "
                f"{int(values[row, column])}{sees if high > low else ', but sees none'}"
            )
    return chosen


def attend_to_entries(
    q: Tensor,
    own: Tensor,
    chosen: Tensor | None,
    entries: Entries,
    scale: float,
    transport: Transport,
) -> tuple[Tensor, Tensor]:
    """out and lse of queries [rows, heads, width] that attend to the entries chosen for them.

    Args:
        own: entries of this rank [entries, width], each a key and a value of all heads.
        chosen: numbers of entries [rows, k], -1 for none; None: all that a query sees.
    """
    if chosen is None:
        table = move_rows(own, gather_moves(entries.layout, None), transport, 0)
        places = all_visible(entries, q.device)
    else:
        verb = "compressed keys of a layer"
        rows = fetch_rows(own, chosen.to(q.device), entries.layout, transport, 0, verb=verb)
        table, places = rows.table, rows.places.sort(-1).values
    table = table[:, None]
    kernel = list_kernel(None, q.device.type, q.dtype, q.shape[-1], q.shape[-1])
    proven(kernel, q, 1, q.shape[-1])
    return attend_to_lists(q, table, table, places, scale, kernel)


def choose_entries(
    q: Tensor, own: Tensor, weights: Tensor, k: int, entries: Entries, transport: Transport
) -> Tensor:
    """Numbers of the entries that this rank's queries choose, [rows, k], then -1; no gradients.

    Args:
        q, weights: [rows, heads, width] and [rows, heads], as of cp.index.
        own: index keys of this rank's entries, [entries, width].
        k: up to the number of entries; more count as all.
    """
    with torch.no_grad():
        keys = move_rows(
            own.detach().contiguous(), gather_moves(entries.layout, None), transport, 0
        )
        most = min(k, entries.layout.num_tokens)
        return chosen_among(q, keys, weights, entries.visible, most)


def with_entries(  # noqa: PLR0913 - both sets of keys
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    own: Tensor,
    chosen: Tensor | None,
    entries: Entries,
    scale: float,
    transport: Transport,
) -> tuple[Tensor, Tensor]:
    """Attention to tokens, out and lse, and to entries beside them, as one.

    Args: as of `attend_to_entries`.
    """
    return merged(out, lse, *attend_to_entries(q, own, chosen, entries, scale, transport))


def merged(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to two disjoint sets of keys as one; lse is finite, other_lse may be -inf."""
    shares = torch.sigmoid(lse - other_lse), torch.sigmoid(other_lse - lse)
    both = out * shares[0][..., None] + other * shares[1][..., None]
    return both.to(out.dtype), torch.logaddexp(lse, other_lse)

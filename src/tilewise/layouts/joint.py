"""Joint layouts: tokens that every rank holds beside tokens that one rank holds."""

from typing import Any

import numpy as np

from tilewise.arguments import MOST_RANKS, MOST_TOKENS, whole_number, whole_numbers
from tilewise.layouts.layout import Layout, runs_of_positions


def joint(layout: Layout | int, replicated: Any) -> Layout:
    """Add tokens that every rank holds, such as the text beside the tokens of an image.

        tw.joint(tw.contiguous(4, 2), replicated=[0, 5])    # rank 0: 0 1 2 5; rank 1: 0 3 4 5

    A replicated token counts once as a key, and its row of out is complete on every rank. Each
    rank's gradient of its row is a share: their sum over the ranks is the gradient.

    Args:
        layout: of all other tokens, in order, each of which one rank holds. Or the number of ranks,
            if there are no others: the whole context of a cross-attention.
        replicated: positions in the joint sequence, in any order, a sequence or tensor of whole
            numbers; text before 100 other tokens is range(num_text), text after them range(100,
            100 + num_text).
    Returns:
        A layout of layout.num_tokens + len(replicated) tokens. A rank's rows stand as layout has
        them, and each replicated one before the first of them that follows it in the sequence.
    Raises:
        ValueError: for a position that is there twice or none of the sequence, and for a layout
            that does not give each token to exactly one rank.
    """
    shared = np.sort(whole_numbers("replicated", replicated))
    n, num_others = 0, 0
    if isinstance(layout, Layout):
        n, num_others = layout.world_size, layout.num_tokens
        if not layout.is_partition:
            raise ValueError(
                f"layout {layout!r} has {sum(layout.sizes)} rows for {num_others} tokens; every "
                "token must belong to exactly one rank: join all replicated tokens at once"
            )
    else:
        n = whole_number("layout, a Layout or a number of ranks,", layout, most=MOST_RANKS)
    num_tokens = whole_number("num_tokens", num_others + len(shared), most=MOST_TOKENS)
    if len(shared) and not 0 <= shared[0] <= shared[-1] < num_tokens:
        raise ValueError(
            f"replicated positions {shared[0]}..{shared[-1]} must lie in 0..{num_tokens - 1}: "
            f"{num_others} tokens of layout and {len(shared)} replicated"
        )
    twice = shared[1:][np.diff(shared) == 0]
    if len(twice):
        raise ValueError(f"replicated has position {twice[0]} twice; give each once")
    other_positions = np.delete(np.arange(num_tokens), shared)
    rows_by_rank = [
        other_positions[layout.rows(rank)] if isinstance(layout, Layout) else other_positions
        for rank in range(n)
    ]
    runs = [runs_of_positions(_with_replicated(rows, shared)) for rows in rows_by_rank]
    return Layout(num_tokens, runs, "joint")


def on_every_rank(positions: Any, layout: Layout) -> Layout:
    """The layout of these rows of a layout's sequence, in this order, on each of its ranks: of
    queries that all ranks hold. No rank holds another row.
    """
    runs = runs_of_positions(np.asarray(positions, np.int64))
    return Layout(layout.num_tokens, [runs] * layout.world_size, "queries")


def _with_replicated(rows: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """Insert each shared position before the first row that follows it in the sequence."""
    highest = np.maximum.accumulate(rows) if len(rows) else rows
    return np.insert(rows, np.searchsorted(highest, shared), shared)

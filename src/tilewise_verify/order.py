"""Facts about layers that go over tokens in order: states that are carried, short convolutions.

All that is known of a layer is which rows of its result change with which rows of its input, in
both models. If a row changes all later ones of its document, the layer carries a state; if it
changes a few, the layer has a convolution. If the split model's changes end early, the row at which
they end shows the fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise_verify.gradients import multiple
from tilewise_verify.tables import some

MOST_REACH = 16  # tokens, of a short convolution
MOST_PROBES = 64
SAME_SHAPE = 1e-3  # of the largest gradient
SURELY = 30.0  # times what rounding changes

Changes = Callable[[Sequence[int]], Tensor]
"""Function from changed rows of an input to the change of each row, in multiples of rounding."""


class PieceStarts(NamedTuple):
    """Starts of pieces of neighbouring tokens on the ranks, without 0, and the number of tokens."""

    starts: tuple[int, ...]
    num_tokens: int

    def begins_in(self, first: int, last: int) -> bool:
        """Return whether a piece begins in (after, upto]."""
        return any(first < start <= last for start in self.starts)


class Walk(NamedTuple):
    """Result of a walk along the sequence.

    Attributes:
        cuts: tokens that no earlier row reaches in the split model.
        borders: tokens that no earlier row reaches in the whole model: of documents.
        state_leaks: borders that the split model's rows reach over from anywhere.
        halo_leaks: borders that only the rows just before reach over.
        other_rows: whether rows behind a cut are reached once more: a rank's next piece.
    """

    cuts: list[int]
    borders: list[int]
    state_leaks: list[int]
    halo_leaks: list[int]
    other_rows: bool


def reach_of(whole: Changes, num_tokens: int) -> int | None:
    """The number of rows that a row reaches if all reach as many, and few; None for a state.

    -1 if rows reach earlier ones, or none: that is no layer that goes over tokens in order.
    """
    reaches = list[int]()
    for row in sorted({0, num_tokens // 3, num_tokens // 2, 2 * num_tokens // 3}):
        changed = whole((row,)) > SURELY
        if changed[:row].any():
            return -1
        reached_rows = changed[row + 1 :].nonzero()
        reaches.append(int(reached_rows.max()) + 1 if len(reached_rows) else 0)
    longest = max(reaches)
    if not longest:
        return -1
    # A document may end within the reach.
    is_constant = sum(reach == longest for reach in reaches) >= 2
    return longest if is_constant and longest <= min(MOST_REACH, num_tokens // 3 - 1) else None


def walk(whole: Changes, split: Changes, num_tokens: int) -> Walk:
    """Follow a state along the sequence in both models.

    It begins at the first token. Where the change that a row makes ends, the walk goes on from
    there.

    Args:
        whole, split: from changed rows of the input to the change of each row of the output.
    """
    result, row = Walk([], [], [], [], False), 0
    for _ in range(MOST_PROBES):
        if row >= num_tokens - 1:
            break
        want, got = whole((row,)) > SURELY, split((row,)) > 1
        stop = _first(~want, row + 1)
        split_stop = min(_first(~got, row + 1), stop)
        if split_stop < stop:
            result.cuts.append(split_stop)
            result = result._replace(other_rows=result.other_rows or bool(got[split_stop:].any()))
            row = split_stop
            continue
        if stop == num_tokens:
            break
        last_before_stop = stop - 1
        if last_before_stop > row and bool(whole((last_before_stop,))[stop] > SURELY):
            row = last_before_stop  # it only faded
            continue
        result.borders.append(stop)
        if got[stop:].any():
            result.state_leaks.append(stop)
        elif bool((split((last_before_stop,))[stop:] > 1).any()):
            result.halo_leaks.append(stop)
        row = stop
    return result


def facts_of_state(
    walked: Walk, passes_near: bool, has_halo: bool, pieces: PieceStarts
) -> dict[str, Any]:
    """Facts of a layer whose rows reach all later ones.

    Args:
        passes_near: whether the row before a cut reaches the one behind it, by a convolution.
        has_halo: whether the layer has a short convolution as well.
    """
    facts: dict[str, Any] = {"other_rows": True} if walked.other_rows else {}
    if walked.cuts:
        cuts_inside = [cut for cut in walked.cuts if cut not in pieces.starts]
        borders_kept = [border for border in walked.borders if border not in walked.state_leaks]
        if cuts_inside:
            facts["invented"] = (
                f"the state begins anew at positions {some(cuts_inside, 6)}, inside a document and "
                "inside a rank's tokens"
            )
        elif borders_kept and has_halo and not passes_near:
            facts["invented"] = (
                f"state and convolution begin anew at positions {some(walked.cuts, 6)}, where "
                "tokens of a rank begin, as at the borders of documents"
            )
        if not cuts_inside:
            facts["restarts"] = (
                f"no earlier token reaches those from {some(walked.cuts, 6)} on, though the "
                "document goes on"
            )
    if walked.state_leaks:
        facts["passes_borders"] = (
            f"the state passes the borders of documents at {some(walked.state_leaks, 6)}"
        )
    if walked.halo_leaks:
        facts["no_halo"] = (
            f"tokens at the borders of documents at {some(walked.halo_leaks, 6)} see those before, "
            "of another document"
        )
    return facts


def facts_of_convolution(
    whole: Changes, split: Changes, reach: int, pieces: PieceStarts
) -> dict[str, Any]:
    """Return facts about a layer each of whose rows changes only the next `reach` rows.

    Args:
        whole, split: from changed rows of the input to the change of each row of the output.
    """
    lost_pairs, extra_rows = list[tuple[int, int]](), list[int]()
    n = pieces.num_tokens
    for first in range(reach + 1):
        rows = tuple(range(first, n, reach + 1))
        want, got = whole(rows) > SURELY, split(rows) > 1
        for row in range(first + 1, n):
            source = row - (row - first) % (reach + 1)
            if source == row or bool(want[row]) == bool(got[row]):
                continue
            if want[row]:
                lost_pairs.append((source, row))
            else:
                extra_rows.append(row)
    facts: dict[str, Any] = {"other_rows": True} if lost_pairs and extra_rows else {}
    rows_inside = sorted({row for source, row in lost_pairs if not pieces.begins_in(source, row)})
    if rows_inside:
        facts["invented"] = (
            f"positions {some(rows_inside, 6)} do not see tokens before them, inside a document "
            "and inside a rank's tokens"
        )
    elif lost_pairs:
        facts["no_halo"] = _unseen(sorted({row for _, row in lost_pairs}))
    elif extra_rows:
        facts["no_halo"] = (
            f"tokens at {some(sorted(set(extra_rows)), 6)} see tokens of another document before "
            "theirs"
        )
    return facts


def facts_of_halo(want: Tensor, got: Tensor, starts: Sequence[int]) -> dict[str, Any]:
    """Return facts about a short convolution inside a layer with a state.

    Args:
        want, got: changes of each row of the result, when what the convolution reads is changed in
            the rows before starts.
        starts: first rows of pieces.
    """
    lost_starts = [
        start for start in starts if bool(want[start] > SURELY) and not bool(got[start] > 1)
    ]
    return {"no_halo": _unseen(lost_starts)} if lost_starts else {}


def facts_of_first_rows(
    wrong: Sequence[int], starts: Sequence[int], pieces: PieceStarts
) -> dict[str, Any]:
    """Return facts if only the first few rows of pieces deviate: a convolution lacks the rows
    before.

    Args:
        wrong: rows that deviate.
        starts: pieces that go on with a document.
    """
    edges, reachable_rows = [*pieces.starts, pieces.num_tokens], set[int]()
    for start in starts:
        stop = edges[edges.index(start) + 1]
        reachable_rows |= set(range(start, min(start + MOST_REACH, stop - 1)))
    return {"no_halo": _unseen(sorted(wrong))} if wrong and reachable_rows.issuperset(wrong) else {}


def facts_of_gradient(want: Tensor, got: Tensor, pieces: PieceStarts) -> dict[str, Any]:
    """Return facts about gradients at a layer's input, which should reach rows of earlier pieces.

    At the layer's output the first row of each piece alone has a gradient.

    Args:
        want, got: [num_tokens, numbers], of the unsplit and of the split model.
    """
    ratio = multiple(want, got, SAME_SHAPE)
    if ratio and abs(ratio - 1) > SAME_SHAPE:
        text = f"gradients at its input are {ratio:.4g} times what is right"
        return {"gradient_ratio": f"{text}, those at its output are right"}
    smallest_share, sizes, split_sizes = 1e-5, want.norm(dim=1), got.norm(dim=1)
    has_gradient = sizes > smallest_share * sizes.max()
    lost_rows = (
        (has_gradient & (split_sizes <= smallest_share * sizes)).nonzero().flatten().tolist()
    )
    if not lost_rows:
        return {}
    return {
        "state_gradient": f"{len(lost_rows)} of {pieces.num_tokens} rows, such as "
        f"{some(lost_rows, 4)}, get no gradient of the pieces of tokens behind theirs, whose "
        "values do depend on them"
    }


def short_columns(result: Tensor, leaves: dict[str, Tensor], row: int) -> dict[str, list[int]]:
    """Find columns of projections of which a row of the result reads only the few rows before it.

    Args:
        result: [num_tokens, numbers], in the graph of the leaves, [(1,) num_tokens, columns].
    Returns:
        numbers of such columns, by the name of the projection.
    """
    generator = torch.Generator().manual_seed(3)
    draw = torch.randn(result.shape[1:], generator=generator).to(result)
    grads = torch.autograd.grad((result[row] * draw).sum(), [*leaves.values()], allow_unused=True)
    columns_by_module: dict[str, list[int]] = {}
    for name, grad in zip(leaves, grads, strict=True):
        if grad is None:
            continue
        rows = grad.reshape(-1, grad.shape[-1])[: len(result)] != 0
        reads_near = rows[max(row - MOST_REACH, 0) : row].any(0)
        reads_far = rows[: max(row - MOST_REACH, 0)]
        columns = (reads_near & ~reads_far.any(0)).nonzero().flatten().tolist()
        if columns:
            columns_by_module[name] = columns
    return columns_by_module


def _unseen(rows: Sequence[int]) -> str:
    return (
        f"tokens at {some(rows, 6)}, where tokens of a rank begin, do not see the ones before, of "
        "another piece"
    )


def _first(holds: Tensor, start: int) -> int:
    """Return the first row from `start` on where `holds` is True, or the number of rows."""
    rows = holds[start:].nonzero()
    return start + int(rows[0]) if len(rows) else len(holds)

"""Facts about layers that go over tokens in order: states that are carried, short convolutions.

Nothing of a layer is known but which rows of its result change with which rows of its input, in
both models. A row that reaches all later ones of its document tells of a state; one that reaches a
few, of a convolution. Where a reach ends early in the split model, it says at which token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.verification.gradients import multiple
from tilewise.verification.tables import some

MOST_REACH = 16  # tokens, of a short convolution
MOST_PROBES = 64
SAME_SHAPE = 1e-3  # of the largest gradient
SURELY = 30.0  # times what rounding changes

Changes = Callable[[Sequence[int]], Tensor]
"""From the rows of an input that are changed to each row's change, in multiples of rounding."""


class Pieces(NamedTuple):
    """Where pieces of neighbouring tokens begin on the ranks, 0 left out, and how many tokens."""

    starts: tuple[int, ...]
    num_tokens: int

    def begins_in(self, after: int, upto: int) -> bool:
        """Return whether a piece begins in (after, upto]."""
        return any(after < start <= upto for start in self.starts)


class Walk(NamedTuple):
    """What a walk along the sequence found.

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
        behind = changed[row + 1 :].nonzero()
        reaches.append(int(behind.max()) + 1 if len(behind) else 0)
    most = max(reaches)
    if not most:
        return -1
    # A document may end within the reach.
    alike = sum(reach == most for reach in reaches) >= 2
    return most if alike and most <= min(MOST_REACH, num_tokens // 3 - 1) else None


def walk(whole: Changes, split: Changes, num_tokens: int) -> Walk:
    """Follow a state from the first token on, from each place on where a reach ends."""
    found, row = Walk([], [], [], [], False), 0
    for _ in range(MOST_PROBES):
        if row >= num_tokens - 1:
            break
        want, got = whole((row,)) > SURELY, split((row,)) > 1
        stop = _first(~want, row + 1)
        end = min(_first(~got, row + 1), stop)
        if end < stop:
            found.cuts.append(end)
            found = found._replace(other_rows=found.other_rows or bool(got[end:].any()))
            row = end
            continue
        if stop == num_tokens:
            break
        before = stop - 1
        if before > row and bool(whole((before,))[stop] > SURELY):
            row = before  # it only faded
            continue
        found.borders.append(stop)
        if got[stop:].any():
            found.state_leaks.append(stop)
        elif bool((split((before,))[stop:] > 1).any()):
            found.halo_leaks.append(stop)
        row = stop
    return found


def facts_of_state(
    walked: Walk, passes_near: bool, has_halo: bool, pieces: Pieces
) -> dict[str, Any]:
    """Facts of a layer whose rows reach all later ones.

    Args:
        passes_near: whether the row before a cut reaches the one behind it, by a convolution.
        has_halo: whether the layer has a short convolution as well.
    """
    facts: dict[str, Any] = {"other_rows": True} if walked.other_rows else {}
    if walked.cuts:
        inside = [cut for cut in walked.cuts if cut not in pieces.starts]
        kept = [border for border in walked.borders if border not in walked.state_leaks]
        if inside:
            facts["invented"] = (
                f"the state begins anew at positions {some(inside, 6)}, inside a document and "
                "inside a rank's tokens"
            )
        elif kept and has_halo and not passes_near:
            facts["invented"] = (
                f"state and convolution begin anew at positions {some(walked.cuts, 6)}, where "
                "tokens of a rank begin, as at the borders of documents"
            )
        if not inside:
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
    whole: Changes, split: Changes, reach: int, pieces: Pieces
) -> dict[str, Any]:
    """Facts of a layer whose rows reach a few later ones."""
    lost, extra = list[tuple[int, int]](), list[int]()
    n = pieces.num_tokens
    for first in range(reach + 1):
        rows = tuple(range(first, n, reach + 1))
        want, got = whole(rows) > SURELY, split(rows) > 1
        for row in range(first + 1, n):
            source = row - (row - first) % (reach + 1)
            if source == row or bool(want[row]) == bool(got[row]):
                continue
            if want[row]:
                lost.append((source, row))
            else:
                extra.append(row)
    facts: dict[str, Any] = {"other_rows": True} if lost and extra else {}
    inside = sorted({row for source, row in lost if not pieces.begins_in(source, row)})
    if inside:
        facts["invented"] = (
            f"positions {some(inside, 6)} do not see tokens before them, inside a document and "
            "inside a rank's tokens"
        )
    elif lost:
        facts["no_halo"] = _unseen(sorted({row for _, row in lost}))
    elif extra:
        facts["no_halo"] = (
            f"tokens at {some(sorted(set(extra)), 6)} see tokens of another document before theirs"
        )
    return facts


def facts_of_halo(want: Tensor, got: Tensor, starts: Sequence[int]) -> dict[str, Any]:
    """Facts of a convolution within a layer with a state, whose queries read it.

    Args:
        want, got: changes where what the convolution reads is changed in the rows before starts.
    """
    lost = [start for start in starts if bool(want[start] > SURELY) and not bool(got[start] > 1)]
    return {"no_halo": _unseen(lost)} if lost else {}


def facts_of_first_rows(
    wrong: Sequence[int], starts: Sequence[int], pieces: Pieces
) -> dict[str, Any]:
    """Facts of rows computed early in a layer: a convolution's errors end a few tokens on.

    Args:
        wrong: rows that deviate.
        starts: pieces that go on with a document.
    """
    edges, reached = [*pieces.starts, pieces.num_tokens], set[int]()
    for start in starts:
        stop = edges[edges.index(start) + 1]
        reached |= set(range(start, min(start + MOST_REACH, stop - 1)))
    return {"no_halo": _unseen(sorted(wrong))} if wrong and reached.issuperset(wrong) else {}


def facts_of_gradient(want: Tensor, got: Tensor, pieces: Pieces) -> dict[str, Any]:
    """Facts of gradients at a layer's input where the first row of each piece alone has one at its
    output: [num_tokens, numbers].
    """
    ratio = multiple(want, got, SAME_SHAPE)
    if ratio and abs(ratio - 1) > SAME_SHAPE:
        text = f"gradients at its input are {ratio:.4g} times what is right"
        return {"gradient_ratio": f"{text}, those at its output are right"}
    least, sizes, found = 1e-5, want.norm(dim=1), got.norm(dim=1)
    some_there = sizes > least * sizes.max()
    lost = (some_there & (found <= least * sizes)).nonzero().flatten().tolist()
    if not lost:
        return {}
    return {
        "state_gradient": f"{len(lost)} of {pieces.num_tokens} rows, such as {some(lost, 4)}, get "
        "no gradient of the pieces of tokens behind theirs, whose values do depend on them"
    }


def short_columns(result: Tensor, leaves: dict[str, Tensor], row: int) -> dict[str, list[int]]:
    """Columns of projections that a row of the result reads of few earlier rows, and no others.

    Args:
        result: [num_tokens, numbers], in the graph of the leaves, [(1,) num_tokens, columns].
    """
    make = torch.Generator().manual_seed(3)
    draw = torch.randn(result.shape[1:], generator=make).to(result)
    grads = torch.autograd.grad((result[row] * draw).sum(), [*leaves.values()], allow_unused=True)
    found: dict[str, list[int]] = {}
    for name, grad in zip(leaves, grads, strict=True):
        if grad is None:
            continue
        rows = grad.reshape(-1, grad.shape[-1])[: len(result)] != 0
        near, far = rows[max(row - MOST_REACH, 0) : row].any(0), rows[: max(row - MOST_REACH, 0)]
        columns = (near & ~far.any(0)).nonzero().flatten().tolist()
        if columns:
            found[name] = columns
    return found


def _unseen(rows: Sequence[int]) -> str:
    return (
        f"tokens at {some(rows, 6)}, where tokens of a rank begin, do not see the ones before, of "
        "another piece"
    )


def _first(wanted: Tensor, start: int) -> int:
    """The first row from start on for which it holds; their number if there is none."""
    rows = wanted[start:].nonzero()
    return start + int(rows[0]) if len(rows) else len(wanted)

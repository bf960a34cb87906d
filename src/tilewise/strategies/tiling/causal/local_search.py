"""Give transfers of the busiest ranks to others that can do them in the same step.

An operand may come from any rank that had it when the step began; a partial may go to its owner, or
to any rank that sends its own later and has not gathered too many.
"""

from collections.abc import Iterator, Sequence
from heapq import nlargest
from typing import NamedTuple

import numpy as np

from tilewise.plan.builder import REACH

LEVEL = 1.02  # of the mean: ranks no busier than that are left alone


class TimedTransfer(NamedTuple):
    """One transfer of a piece's operand, or of its partial."""

    step: int
    piece: int
    partial: bool
    src: int
    dst: int


def level(
    transfers: Sequence[TimedTransfer],
    owners: Sequence[int],
    weights: np.ndarray,
    world_size: int,
    step_limit: float,
) -> list[TimedTransfer]:
    """Lower the most bytes sent by choice of sources, then the most received by choice of takers.

    Args:
        transfers: in the order of their steps.
        owners: of each piece.
        weights: bytes [passes, pieces, (operand, partial)]; a rank is as busy as in its busiest
            pass, compared with the mean of that pass.
        step_limit: no rank is given more bytes than that in one step, all passes together.
    """
    out = list(transfers)
    for partial in (False, True) if out else ():
        search = _Search(out, partial, owners, _Load(out, partial, weights, world_size), step_limit)
        search.descend(weights[:, :, int(partial)].sum(0).tolist())
    return out


class _Load:
    """Bytes that ranks send, or receive: by step, and by pass as a multiple of that pass's mean."""

    def __init__(
        self, transfers: list[TimedTransfer], into: bool, weights: np.ndarray, world_size: int
    ):
        step, piece, is_partial, src, dst = np.array(transfers, np.int64).T
        end, cost = (dst if into else src), weights[:, piece, is_partial]
        by_step = np.zeros((step.max() + 1, world_size))
        np.add.at(by_step, (step, end), cost.sum(0))
        total = np.array([np.bincount(end, pass_costs, world_size) for pass_costs in cost])
        scale = 1 / np.maximum(total.mean(1, keepdims=True), 1e-30)
        self.by_step: list[list[float]] = by_step.tolist()
        self.shares: list[list[float]] = (total * scale).T.tolist()
        self.costs: list[list[float]] = (weights[:, :, int(into)] * scale).T.tolist()
        self.least = [min(costs) for costs in self.costs]
        self.busy = [max(shares) for shares in self.shares]

    def after(self, rank: int, piece: int) -> float:
        """Return how busy the rank would be with one more transfer of this piece."""
        return max(map(sum, zip(self.shares[rank], self.costs[piece], strict=True)))

    def move(self, transfer: TimedTransfer, cost: float, src: int, dst: int) -> None:
        for rank, sign in ((src, -1), (dst, 1)):
            self.by_step[transfer.step][rank] += sign * cost
            rank_shares, change = self.shares[rank], self.costs[transfer.piece]
            rank_shares[:] = [x + sign * y for x, y in zip(rank_shares, change, strict=True)]
            self.busy[rank] = max(rank_shares)


class _Trees:
    """The trees by which partials go home, and how often each value was rounded on its way."""

    def __init__(self, transfers: list[TimedTransfer], num_pieces: int):
        self.next: list[dict[int, int]] = [{} for _ in range(num_pieces)]
        self.rounded: list[dict[int, int]] = [{} for _ in range(num_pieces)]
        for transfer in transfers:
            if transfer.partial:
                rounded = self.rounded[transfer.piece]
                rounded[transfer.src] = rounded.get(transfer.src, 0) + 1
                rounded[transfer.dst] = rounded.get(transfer.dst, 0) + rounded[transfer.src]
                self.next[transfer.piece][transfer.src] = transfer.dst

    def _way(self, piece: int, rank: int) -> Iterator[int]:
        while rank in self.next[piece]:
            yield rank
            rank = self.next[piece][rank]

    def fits(self, transfer: TimedTransfer, dst: int) -> bool:
        """Return whether values on the way from dst home stay within the limit of roundings."""
        rounded = self.rounded[transfer.piece]
        old_path = set(self._way(transfer.piece, transfer.dst))
        limit = REACH - rounded[transfer.src]
        return all(r in old_path or rounded[r] <= limit for r in self._way(transfer.piece, dst))

    def move(self, transfer: TimedTransfer, dst: int) -> None:
        rounded = self.rounded[transfer.piece]
        for start, sign in ((transfer.dst, -1), (dst, 1)):
            for rank in self._way(transfer.piece, start):
                rounded[rank] += sign * rounded[transfer.src]
        self.next[transfer.piece][transfer.src] = dst


class _Search:
    """Local search over one end of the transfers of one role."""

    def __init__(
        self, transfers: list, partial: bool, owners: Sequence[int], load: _Load, room: float
    ):
        self.transfers, self.load, self.room, self.partial = transfers, load, room, partial
        self.trees = _Trees(transfers, len(owners)) if partial else None
        self.mine: list[set[int]] = [set() for _ in load.busy]
        at_home = len(load.by_step) if partial else -1
        self.since: list[dict[int, int]] = [{home: at_home} for home in owners]
        for index, transfer in enumerate(transfers):
            if transfer.partial == partial:
                self.mine[transfer.dst if partial else transfer.src].add(index)
                self.since[transfer.piece][transfer.src if partial else transfer.dst] = (
                    transfer.step
                )

    def descend(self, costs: list[float]) -> None:
        """Move transfers of the busiest rank to less busy ranks that can do them, while that helps.

        Args:
            costs: bytes of each piece, all passes together.
        """
        busyness, queue = self.load.busy, set(range(len(self.mine)))
        while queue:
            rank, *second = nlargest(2, queue, key=busyness.__getitem__)
            target_busyness = max(LEVEL, busyness[second[0]]) if second else LEVEL
            if busyness[rank] <= LEVEL:
                break
            has_moved = False
            for _, index, other in sorted(self._options(rank, costs)):
                if has_moved and busyness[rank] <= target_busyness:
                    break
                has_moved |= self._move(index, rank, other, costs)
            if not has_moved:
                queue.discard(rank)

    def _options(self, rank: int, costs: list[float]) -> Iterator[tuple[float, int, int]]:
        busyness, is_partial = self.load.busy, self.partial
        for index in self.mine[rank]:
            transfer = self.transfers[index]
            capacity = self.room - costs[transfer.piece]
            busyness_limit = busyness[rank] - self.load.least[transfer.piece]
            loads = self.load.by_step[transfer.step]
            for other, ready_step in self.since[transfer.piece].items():
                can_take = busyness[other] < busyness_limit and (
                    ready_step > transfer.step if is_partial else ready_step < transfer.step
                )
                if (
                    can_take
                    and loads[other] <= capacity
                    and other not in (transfer.src, transfer.dst)
                ):
                    yield busyness[other], index, other

    def _move(self, index: int, rank: int, other: int, costs: list[float]) -> bool:
        """Let other do a transfer of rank's, if it can and would be less busy than rank is."""
        transfer = self.transfers[index]
        cost = costs[transfer.piece]
        if (
            (transfer.dst if self.partial else transfer.src) != rank
            or self.load.by_step[transfer.step][other] + cost > self.room
            or self.load.after(other, transfer.piece) >= self.load.busy[rank] - 1e-9
            or (self.trees is not None and not self.trees.fits(transfer, other))
        ):
            return False
        if self.trees is not None:
            self.trees.move(transfer, other)
        self.transfers[index] = (
            transfer._replace(dst=other) if self.partial else transfer._replace(src=other)
        )
        self.mine[rank].discard(index)
        self.mine[other].add(index)
        self.load.move(transfer, cost, rank, other)
        return True

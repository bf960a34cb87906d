"""List scheduling of transfers: readers pass on what they got, partials merge on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, product
from typing import NamedTuple

import numpy as np

from tilewise.plan.builder import REACH
from tilewise.plan.ir import Side
from tilewise.strategies.tiling.causal.blocks import Blocks, cells
from tilewise.strategies.tiling.causal.local_search import TimedTransfer, level

Pair = tuple[int, int]


class ChunkBytes(NamedTuple):
    """Bytes of one chunk by what travels; 0: it does not (KV partials in forward)."""

    q: float
    q_partial: float
    kv: float
    kv_partial: float


class Schedule(NamedTuple):
    """The transfers by step, and by step and rank the tiles: some Q pieces by some KV pieces."""

    pieces: tuple[ChunkRun, ...]
    transfers: tuple[TimedTransfer, ...]
    tiles: tuple[tuple[tuple[Cell, ...], ...], ...]


def schedule(
    blocks: Blocks,
    owner: Sequence[int],
    costs: Sequence[ChunkBytes],
    *,
    step_bytes: float,
    max_chunks: int = 2,
) -> Schedule:
    """Lay out who sends what to whom in which step, and when each tile runs.

    Args:
        blocks: disjoint rectangles of each rank.
        owner: the rank that owns each chunk.
        costs: bytes of one chunk in each pass that runs these steps; all passes are levelled.
        step_bytes: the most a rank sends, and receives, in a step, passes added, if no transfer is
            larger. Smaller steps overlap better; twice a Q shard is a good size.
        max_chunks: the longest piece. Short ones fill steps better, long ones make fewer transfers.
    """
    pieces = pieces_of(blocks, owner, max_chunks)
    weights = np.array(
        [
            [
                [(p.stop - p.start) * x[2 * p.side + is_partial] for is_partial in (0, 1)]
                for p in pieces
            ]
            for x in costs
        ]
    )
    scheduler = _Scheduler(pieces, weights.sum(0), readers_of(blocks, pieces, weights.sum(0)[:, 0]))
    transfers: list[TimedTransfer] = []
    tiles: list[tuple[tuple[Cell, ...], ...]] = []
    while scheduler.unfinished():
        step_capacity = _StepCapacity(len(blocks), step_bytes)
        sends = scheduler.operands(step_capacity, len(tiles)) + scheduler.partials(
            step_capacity, len(tiles)
        )
        tiles.append(tuple(rank.compute() for rank in scheduler.ranks))
        assert sends or any(tiles[-1]), "every step must move or compute something"
        scheduler.arrive(sends)
        transfers += sends
    for step_limit in (step_bytes, 2 * step_bytes):  # first what fits the steps, then the rest
        transfers = level(transfers, [p.owner for p in pieces], weights, len(blocks), step_limit)
    return Schedule(pieces, tuple(transfers), tuple(tiles))


class _StepCapacity:
    """Bytes each rank may still send and receive in a step; a larger transfer has one to itself."""

    def __init__(self, world_size: int, step_bytes: float):
        self.full = step_bytes
        self.out, self.into = [step_bytes] * world_size, [step_bytes] * world_size

    def pairs(self, srcs: Iterable[int], dsts: Iterable[int], cost: float) -> Iterator[Pair]:
        """Pairs of ranks of which one can still send this many bytes and the other receive them."""
        needed = min(cost, self.full) - 1e-9
        receivers = [r for r in dsts if self.into[r] >= needed]
        return product((r for r in srcs if self.out[r] >= needed) if receivers else (), receivers)

    def take(self, src: int, dst: int, cost: float) -> None:
        self.out[src] -= cost
        self.into[dst] -= cost


class _Scheduler:
    """All ranks while steps are laid out; loads include the bytes that are known beforehand."""

    def __init__(self, pieces: Sequence[ChunkRun], weights: np.ndarray, ranks: list[Reader]):
        self.pieces, self.ranks = pieces, ranks
        self.costs: list[list[float]] = weights.tolist()
        self.holders = [[p.owner] for p in pieces]
        self.unsent = [
            dict.fromkeys(p.readers, 1) if w[1] else {}
            for p, w in zip(pieces, self.costs, strict=True)
        ]  # readers whose partial is yet to leave, and how often its values will be rounded then
        self.sent, self.received = [0.0] * len(ranks), [0.0] * len(ranks)
        for p, w in zip(pieces, self.costs, strict=True):
            for rank in p.readers:
                self.received[rank] += w[0]
                self.sent[rank] += w[1]

    def unfinished(self) -> bool:
        return any(self.unsent) or any(rank.todo.any() for rank in self.ranks)

    def operands(self, capacity: _StepCapacity, step: int) -> list[TimedTransfer]:
        """In rounds, each rank takes the best it can get, from the holder that sends least."""
        transfers: list[TimedTransfer] = []
        asking_ranks = [r for r, rank in enumerate(self.ranks) if rank.missing.any()]
        while asking_ranks:
            served_transfers = [
                transfer for r in asking_ranks if (transfer := self._serve(r, capacity, step))
            ]
            asking_ranks = [transfer.dst for transfer in served_transfers]
            transfers += served_transfers
        return transfers

    def _serve(self, r: int, capacity: _StepCapacity, step: int) -> TimedTransfer | None:
        for piece in self.ranks[r].wishes() if capacity.into[r] > 0 else ():
            cost = self.costs[piece][0]
            able_pairs = capacity.pairs(self.holders[piece], (r,), cost)
            src = min((src for src, _ in able_pairs), key=lambda h: (self.sent[h], h), default=None)
            if src is not None:
                self.sent[src] += cost
                capacity.take(src, r, cost)
                self.ranks[r].expect(piece)
                return TimedTransfer(step, piece, False, src, r)
        return None

    def partials(self, capacity: _StepCapacity, step: int) -> list[TimedTransfer]:
        """Each finished partial goes to the owner or a reader yet to send, who receives least."""
        transfers: list[TimedTransfer] = []
        for piece, unsent_readers in enumerate(self.unsent):
            ready_readers = [r for r in unsent_readers if piece in self.ranks[r].finished]
            taken_from: set[int] = set()
            for r in sorted(ready_readers, key=lambda r: (-self.received[r], r)):
                dst = None if r in taken_from else self._taker(piece, r, capacity)
                if dst is not None:
                    num_rounded = unsent_readers.pop(r)
                    if dst in unsent_readers:
                        unsent_readers[dst] += num_rounded
                    taken_from.add(dst)
                    transfers.append(TimedTransfer(step, piece, True, r, dst))
        return transfers

    def _taker(self, piece: int, r: int, capacity: _StepCapacity) -> int | None:
        """The rank that takes a partial from a reader; None if nobody can in this step."""
        unsent_readers, cost = self.unsent[piece], self.costs[piece][1]
        limit = REACH - unsent_readers[r]
        later_readers = [d for d, rounded in unsent_readers.items() if d != r and rounded <= limit]
        able_pairs = capacity.pairs((r,), (self.pieces[piece].owner, *later_readers), cost)
        dst = min((dst for _, dst in able_pairs), key=lambda d: (self.received[d], d), default=None)
        if dst is not None:
            self.received[dst] += cost
            capacity.take(r, dst, cost)
        return dst

    def arrive(self, transfers: Iterable[TimedTransfer]) -> None:
        for transfer in transfers:
            if not transfer.partial:
                self.holders[transfer.piece].append(transfer.dst)
                self.ranks[transfer.dst].arrive(transfer.piece)


Cell = tuple[tuple[int, ...], tuple[int, ...]]
"""Pieces of Q by pieces of KV, all pairs: one tile."""


class ChunkRun(NamedTuple):
    """Neighbouring chunks of one side with one owner and the same readers; they travel together."""

    side: Side
    start: int
    stop: int
    owner: int
    readers: tuple[int, ...]


def pieces_of(blocks: Blocks, owner: Sequence[int], max_chunks: int) -> tuple[ChunkRun, ...]:
    """Group the chunks of each side by owner and readers, cut at the rectangles' edges.

    The owner itself is no reader.

    Args:
        max_chunks: the longest piece.
    """
    chunk_runs, chunks = [], range(len(owner))
    for side in Side:
        reads = np.zeros((len(owner), len(blocks)), bool)
        for rank, share in enumerate(blocks):
            for rect in share:
                reads[rect[2 * side] : rect[2 * side + 1], rank] = True
        reads[chunks, owner] = False
        edges = {
            edge for share in blocks for rect in share for edge in rect[2 * side : 2 * side + 2]
        }
        part_of_chunk = np.cumsum([i in edges or i % max_chunks == 0 for i in chunks]).tolist()
        keys = [(owner[i], part_of_chunk[i], reads[i].tobytes()) for i in chunks]
        for _, run in groupby(chunks, key=keys.__getitem__):
            first_chunk, *other_chunks = run
            readers = tuple(np.flatnonzero(reads[first_chunk]).tolist())
            chunk_runs.append(
                ChunkRun(
                    side,
                    first_chunk,
                    first_chunk + len(other_chunks) + 1,
                    owner[first_chunk],
                    readers,
                )
            )
    return tuple(chunk_runs)


class Reader:
    """A rank's Q pieces (first in ids) by its KV pieces: which are here, what can run.

    Args:
        ids: pieces.
        area: of each Q piece by each KV piece; 0 where nothing is computed.
        held: which of the ids are here from the start.
        costs: bytes of each id's operand.
    """

    def __init__(self, ids: np.ndarray, area: np.ndarray, held: np.ndarray, costs: np.ndarray):
        self.ids, self.area, self.costs = ids.tolist(), area, costs
        self.place = {piece: i for i, piece in enumerate(self.ids)}
        self.todo = area > 0
        self.have = held.copy()  # operands that are here
        self.missing = ~held  # and those not even on their way
        self.whole = np.concatenate([area.sum(1), area.sum(0)])
        self.gain = np.concatenate([area @ held[len(area) :], held[: len(area)] @ area])
        self.finished: set[int] = set()

    def wishes(self) -> list[int]:
        """Missing pieces, the most unlocked area per byte first, then the most area."""
        order = np.argsort(-(self.gain + 1e-3 * self.whole) / self.costs, kind="stable")
        return [self.ids[i] for i in order[self.missing[order]].tolist()]

    def expect(self, piece: int) -> None:
        """Count a piece as coming: it unlocks its row or column."""
        i, rows = self.place[piece], len(self.area)
        self.missing[i] = False
        if i < rows:
            self.gain[rows:] += self.area[i]
        else:
            self.gain[:rows] += self.area[:, i - rows]

    def arrive(self, piece: int) -> None:
        self.have[self.place[piece]] = True

    def compute(self) -> tuple[Cell, ...]:
        """Run what can run: columns with the same rows make one tile."""
        rows = len(self.area)
        ready = self.todo & self.have[:rows, None] & self.have[None, rows:]
        if not ready.any():
            return ()
        self.todo &= ~ready
        is_finished = np.concatenate([~self.todo.any(1), ~self.todo.any(0)])
        self.finished = {self.ids[i] for i in np.flatnonzero(is_finished).tolist()}
        columns: dict[bytes, list[int]] = {}
        for k in np.flatnonzero(ready.any(0)).tolist():
            columns.setdefault(ready[:, k].tobytes(), []).append(k)
        return tuple(
            (
                tuple(self.ids[i] for i in np.flatnonzero(np.frombuffer(key, bool)).tolist()),
                tuple(self.ids[rows + k] for k in ks),
            )
            for key, ks in columns.items()
        )


def readers_of(blocks: Blocks, pieces: Sequence[ChunkRun], costs: np.ndarray) -> list[Reader]:
    """The ranks' tables; costs are bytes of each piece's operand."""
    piece_of_chunk = np.zeros((2, max(p.stop for p in pieces)), np.int64)
    for i, p in enumerate(pieces):
        piece_of_chunk[p.side, p.start : p.stop] = i
    edges = np.array([p[1:3] for p in pieces], np.int64)
    owners = np.array([p.owner for p in pieces])
    readers = []
    for rank, share in enumerate(blocks):
        spans = [
            [np.unique(piece_of_chunk[s, r[2 * s] : r[2 * s + 1]]) for s in Side] for r in share
        ]
        rows, cols = (np.unique(np.concatenate([span[side] for span in spans])) for side in Side)
        is_computed = np.zeros((len(rows), len(cols)), bool)
        for qs, ks in spans:
            is_computed[np.ix_(np.searchsorted(rows, qs), np.searchsorted(cols, ks))] = True
        (q0, q1), (k0, k1) = edges[rows].T[:, :, None], edges[cols].T[:, None]
        ids, area = np.concatenate([rows, cols]), is_computed * cells(q0, q1, k0, k1)
        readers.append(Reader(ids, area, owners[ids] == rank, costs[ids]))
    return readers

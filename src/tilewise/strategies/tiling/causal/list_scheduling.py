"""Turn blocks dealt to ranks into steps in which readers pass operands on and merge partials.

An operand that k ranks read is copied k times whatever the tree; so any reader that has it may
forward it, and who does is chosen to level the bytes sent. A partial is sent once by each of its k
readers; so any reader that still has its own to send may take it in, and who does is chosen to
level the bytes received. Stands alone because it knows no mask and no plan: blocks and owners in,
steps out.

A step's transfers read values as they stood when it began; arrivals count from the next step; a
tile runs in the first step that begins with its operands there; a partial leaves in a later step
than its last tile and its last arrival.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tilewise.plan.builder import REACH
from tilewise.strategies.tiling.causal.local_search import Hop, level
from tilewise.strategies.tiling.causal.reading import Cell, Piece, Reader, pieces_of, readers_of
from tilewise.strategies.tiling.causal.rects import Blocks


class Costs(NamedTuple):
    """Bytes of one chunk by what travels; 0: it does not (KV partials in forward)."""

    q: float
    q_partial: float
    kv: float
    kv_partial: float


class Schedule(NamedTuple):
    """What travels when, and by step and rank the tiles: some Q pieces by some KV pieces."""

    pieces: tuple[Piece, ...]
    hops: tuple[Hop, ...]
    tiles: tuple[tuple[tuple[Cell, ...], ...], ...]


def schedule(
    blocks: Blocks,
    owner: Sequence[int],
    costs: Sequence[Costs],
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
            [[(p.stop - p.start) * cost[2 * p.side + late] for late in (0, 1)] for p in pieces]
            for cost in costs
        ]
    )
    run = _Run(pieces, weights.sum(0), readers_of(blocks, pieces, weights.sum(0)[:, 0]))
    hops: list[Hop] = []
    tiles: list[tuple[tuple[Cell, ...], ...]] = []
    while run.unfinished():
        room = _Room(len(blocks), step_bytes)
        sends = run.operands(room, len(tiles)) + run.partials(room, len(tiles))
        tiles.append(tuple(rank.compute() for rank in run.ranks))
        assert sends or any(tiles[-1]), "every step must move or compute something"
        run.arrive(sends)
        hops += sends
    for most in (step_bytes, 2 * step_bytes):  # first what fits the steps, then the rest
        hops = level(hops, [p.owner for p in pieces], weights, len(blocks), most)
    return Schedule(pieces, tuple(hops), tuple(tiles))


class _Room:
    """Bytes each rank may still send and receive in a step; a larger transfer has one to itself."""

    def __init__(self, world_size: int, step_bytes: float):
        self.full = step_bytes
        self.out, self.into = [step_bytes] * world_size, [step_bytes] * world_size

    def sources(self, ranks: Iterable[int], dst: int, cost: float) -> list[int]:
        """Those that can send so much to a rank."""
        least = min(cost, self.full) - 1e-9
        return [r for r in ranks if self.out[r] >= least] if self.into[dst] >= least else []

    def takers(self, src: int, ranks: Iterable[int], cost: float) -> list[int]:
        """Those that can receive so much from a rank."""
        least = min(cost, self.full) - 1e-9
        return [r for r in ranks if self.into[r] >= least] if self.out[src] >= least else []

    def take(self, src: int, dst: int, cost: float) -> None:
        self.out[src] -= cost
        self.into[dst] -= cost


class _Run:
    """All ranks while steps are laid out; loads include the bytes that are known beforehand."""

    def __init__(self, pieces: Sequence[Piece], weights: np.ndarray, ranks: list[Reader]):
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

    def operands(self, room: _Room, step: int) -> list[Hop]:
        """In rounds, each rank takes the best it can get, from the holder that sends least."""
        hops: list[Hop] = []
        asking = [r for r, rank in enumerate(self.ranks) if rank.missing.any()]
        while asking:
            served = [hop for r in asking if (hop := self._serve(r, room, step))]
            asking = [hop.dst for hop in served]
            hops += served
        return hops

    def _serve(self, r: int, room: _Room, step: int) -> Hop | None:
        for piece in self.ranks[r].wishes() if room.into[r] > 0 else ():
            cost = self.costs[piece][0]
            able = room.sources(self.holders[piece], r, cost)
            if able:
                src = min(able, key=lambda h: (self.sent[h], h))
                self.sent[src] += cost
                room.take(src, r, cost)
                self.ranks[r].expect(piece)
                return Hop(step, piece, False, src, r)
        return None

    def partials(self, room: _Room, step: int) -> list[Hop]:
        """Each finished partial goes to the owner or a reader yet to send, who receives least."""
        hops: list[Hop] = []
        for piece, waiting in enumerate(self.unsent):
            ready = [r for r in waiting if piece in self.ranks[r].finished]
            takers: set[int] = set()
            for r in sorted(ready, key=lambda r: (-self.received[r], r)):
                dst = None if r in takers else self._taker(piece, r, room)
                if dst is not None:
                    rounded = waiting.pop(r)
                    if dst in waiting:
                        waiting[dst] += rounded
                    takers.add(dst)
                    hops.append(Hop(step, piece, True, r, dst))
        return hops

    def _taker(self, piece: int, r: int, room: _Room) -> int | None:
        """Who takes a partial from a reader, None if nobody has room."""
        waiting, cost = self.unsent[piece], self.costs[piece][1]
        limit = REACH - waiting[r]
        others = [d for d, rounded in waiting.items() if d != r and rounded <= limit]
        able = room.takers(r, (self.pieces[piece].owner, *others), cost)
        if not able:
            return None
        dst = min(able, key=lambda d: (self.received[d], d))
        self.received[dst] += cost
        room.take(r, dst, cost)
        return dst

    def arrive(self, hops: Iterable[Hop]) -> None:
        for hop in hops:
            if not hop.partial:
                self.holders[hop.piece].append(hop.dst)
                self.ranks[hop.dst].arrive(hop.piece)

"""A schedule of pieces as the steps of a plan, one rank's at a time.

Stands alone because it knows of no mask: pieces become the chunks they are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from tilewise.plan.builder import Script, operand, partial
from tilewise.plan.ir import RankStep, Side
from tilewise.strategies.tiling.causal.list_scheduling import Schedule
from tilewise.strategies.tiling.causal.local_search import Hop
from tilewise.strategies.tiling.causal.reading import Piece


def script_of(schedule: Callable[[], Schedule], n: int) -> Callable[[int], tuple[RankStep, ...]]:
    """A pure function rank -> that rank's steps, whose shards are the schedule's chunks.

    Args:
        schedule: is called when the first rank's steps are asked for, and then no more.
    """

    @cache
    def by_rank() -> tuple[Schedule, list[list[Hop]]]:
        made = schedule()
        touching: list[list[Hop]] = [[] for _ in range(n)]
        for hop in made.hops:
            touching[hop.src].append(hop)
            touching[hop.dst].append(hop)
        return made, touching

    def script(rank: int) -> tuple[RankStep, ...]:
        (pieces, _, tiles), touching = by_rank()
        s = Script(rank)
        for hop in touching[rank]:
            piece, s = pieces[hop.piece], s.at(hop.step)
            for chunk in range(piece.start, piece.stop):
                item = (partial if hop.partial else operand)(piece.side, chunk)
                if hop.src == rank:
                    s.send(item, hop.dst)
                else:
                    s.recv(item, hop.src)
        for step, row in enumerate(tiles):
            for cell in row[rank]:
                q, kv = (_chunks(pieces[i] for i in cell[side]) for side in Side)
                s.at(step).tile(q, kv)
        return s.done()

    return script


def _chunks(pieces: Iterable[Piece]) -> list[int]:
    return [chunk for piece in pieces for chunk in range(piece.start, piece.stop)]

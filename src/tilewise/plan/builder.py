"""Writing one rank's part of a plan, step by step: what a strategy file is made of."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterable
from contextlib import contextmanager

from tilewise.arguments import MOST_RANKS, counted, shown, whole_number
from tilewise.plan.ir import Item, RankStep, Role, Rows, Side, Tile, Transfer, transfer_order

MOST_STEPS = 2 * MOST_RANKS
"""Of a rank: a ring of the most ranks there may be takes half as many."""

REACH = 8
"""Ranks whose contributions a travelling partial gathers before it goes home.

Every transfer rounds it to the wire dtype. Were it to gather those of all ranks, the error would
grow with the root of their number; this way it stays what it is for 8, for the same number of
transfers.
"""


def goes_home(index: int, last: int) -> bool:
    """Return whether a partial leaves the index-th reader of its shard for its home, not for the
    next.
    """
    return index == last or index % REACH == REACH - 1


def operand(side: Side, shard: int, heads: int = 0) -> Item:
    """The copied value of a shard: q, or k and v."""
    return Item(side, Role.OPERAND, shard, heads)


def partial(side: Side, shard: int, heads: int = 0) -> Item:
    """The moved and merged value of a shard: out and lse or dq; dk and dv."""
    return Item(side, Role.PARTIAL, shard, heads)


class RankBuilder:
    """Writes one rank's steps: what it computes, sends and receives in each.

        s = RankBuilder(rank)
        s.tile([rank], [rank])                              # its own query and KV shard
        s.send(operand(Side.KV, rank), rank - 1)      # under way meanwhile
        s.next()                                            # the next step begins
        steps = s.done()                                    # what a plan's script returns

    Transfers of a step read values as they stood when it began; what arrives counts from the next.
    """

    def __init__(self, rank: int):
        self.rank = rank
        self._steps: list[tuple[list[Tile], list[Transfer], list[Transfer]]] = [([], [], [])]
        self._now = 0

    def tile(self, q: Iterable[int], kv: Iterable[int], heads: int = 0) -> None:
        """Compute every q shard against every kv shard in this step."""
        try:
            tile = Tile(tuple(counted("q", q)), tuple(counted("kv", kv)), heads)
        except TypeError:
            raise ValueError(
                f"q ({shown(q)}) and kv ({shown(kv)}) must be lists of shards"
            ) from None
        self._steps[self._now][0].append(tile)

    def send(self, item: Item, dst: int, rows: Rows | None = None) -> None:
        """Send an item to rank dst in this step; rows: None, or the ranges of its rows that go."""
        self._steps[self._now][1].append(Transfer(item, self.rank, dst, rows))

    def recv(self, item: Item, src: int, rows: Rows | None = None) -> None:
        """Receive what rank src sends in the same step, the same item and rows."""
        self._steps[self._now][2].append(Transfer(item, src, self.rank, rows))

    def next(self) -> None:
        """Begin the next step."""
        self.at(self._now + 1)

    def at(self, step: int) -> RankBuilder:
        """Go on writing at a step, counted from 0."""
        while len(self._steps) <= whole_number("step", step, 0, MOST_STEPS):
            self._steps.append(([], [], []))
        self._now = step
        return self

    def done(self) -> tuple[RankStep, ...]:
        """The rank's steps, transfers in canonical order, without trailing empty steps."""
        while self._steps and not any(self._steps[-1]):
            self._steps.pop()
        return tuple(RankStep(tuple(t), _ordered(s), _ordered(r)) for t, s, r in self._steps)


def _ordered(transfers: list[Transfer]) -> tuple[Transfer, ...]:
    return tuple(sorted(transfers, key=transfer_order) if len(transfers) > 1 else transfers)


@contextmanager
def gc_paused() -> Generator[None]:
    """Context without cyclic garbage collection: plans and programs are many tuples and no cycle.

    The collector would search everything that is imported, several times, and find nothing: that
    took longer than making a program, and a sixth of a search by the planner.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

"""Row moves: which rows of a sequence every rank wants, and from whom they come.

A verb on tokens (halo, relayout, gather, roll) is such a value. What it does is linear, so its
backward pass is its transpose: gradients return the way the rows came, and are summed where several
ranks wanted a row. `row_code` writes either pass as a code.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewise.layouts.layout import Layout, Run, positions_of_runs
from tilewise.plan.ir import Plan

Rows = NDArray[np.int64]
FILL = -1
"""The position of a wanted row that no token has: it is filled with a value."""


class Arriving(NamedTuple):
    """Rows that one rank sends to another, each once, in the order of their positions.

    Attributes:
        peer: the rank at the other end.
        source_rows: of the owner, its rows that it sends; of the other, for every row that it
            wants of them, which of the message it is.
        wanted_rows: of the rank that gets them, its rows of the result; of the owner: empty.
    """

    peer: int
    source_rows: Rows
    wanted_rows: Rows
    num_rows: int


class RankMoves(NamedTuple):
    """One rank's part.

    Attributes:
        sends: to other ranks; source_rows are this rank's rows.
        recvs: from other ranks.
        own: its own rows that it wants itself; source_rows are its rows.
        filled_rows: rows of the result that are filled.
    """

    sends: tuple[Arriving, ...]
    recvs: tuple[Arriving, ...]
    own: Arriving
    filled_rows: Rows


class RowMoves:
    """Rows that every rank wants of a sequence, whoever owns them.

        moves = RowMoves("halo", layout, wanted)
        print(moves)                            # who sends how many rows to whom
        moves.rows_sent(0)

    Args:
        name: of the verb.
        layout: the owners of rows; every token has exactly one.
        arguments: of the verb, which ranks must have in common, by name.
        wanted: for each rank the positions that it wants, as runs in order; `FILL` with stride 0
            for rows that are filled. Positions may be wanted by several ranks, and several times.
    Raises:
        ValueError: if a wanted position is none of the sequence.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        wanted: Sequence[Sequence[Run]],
        **arguments: object,
    ):
        self.name, self.layout = name, layout
        self.arguments = {key: str(value) for key, value in arguments.items()}
        self.wanted = tuple(map(tuple, wanted))
        if not layout.is_partition:
            raise ValueError(
                f"{name} on {layout!r}: {sum(layout.sizes)} rows for {layout.num_tokens} tokens, "
                "but every token must belong to exactly one rank; on a joint layout take the "
                "tokens that one rank holds, under their own layout"
            )
        if len(self.wanted) != layout.world_size:
            raise ValueError(
                f"wanted is for {len(self.wanted)} ranks, but the layout for {layout.world_size}"
            )
        for rank, runs in enumerate(self.wanted):
            for start, num_rows, stride in runs:
                last = start + (num_rows - 1) * stride
                if start != FILL and not 0 <= start <= last < layout.num_tokens:
                    raise ValueError(
                        f"{name}: rank {rank} wants positions {start}..{last} of "
                        f"{layout.num_tokens} tokens"
                    )

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @cached_property
    def num_wanted(self) -> tuple[int, ...]:
        """Rows of each rank's result."""
        return tuple(sum(run.count for run in runs) for runs in self.wanted)

    def wanted_rows(self, rank: int) -> Rows:
        """Positions of a rank's result, int64; `FILL` where it is filled."""
        return positions_of_runs(self.wanted[rank])

    def of_rank(self, rank: int) -> RankMoves:
        """Return what one rank sends, receives and keeps."""
        owner, row = owners_of(self.layout)
        wanted = self.wanted_rows(rank)
        places = np.flatnonzero(wanted != FILL)
        owners = owner[wanted[places]]
        recvs: dict[int, Arriving] = {}
        for peer in np.unique(owners).tolist():
            mine = places[owners == peer]
            positions, source = np.unique(wanted[mine], return_inverse=True)
            source = row[positions][source] if peer == rank else source
            recvs[peer] = Arriving(peer, source, mine, len(positions))
        nothing = np.empty(0, np.int64)
        own = recvs.pop(rank, Arriving(rank, nothing, nothing, 0))
        filled = np.flatnonzero(wanted == FILL)
        return RankMoves(tuple(self._sends(rank)), tuple(recvs.values()), own, filled)

    def _sends(self, rank: int) -> list[Arriving]:
        owner, row = owners_of(self.layout)
        sends: list[Arriving] = []
        known: dict[tuple[Run, ...], Rows] = {}
        for peer in range(self.world_size):
            if peer == rank:
                continue
            if self.wanted[peer] not in known:
                positions = self.wanted_rows(peer)
                positions = positions[positions != FILL]
                known[self.wanted[peer]] = row[np.unique(positions[owner[positions] == rank])]
            rows = known[self.wanted[peer]]
            if len(rows):
                sends.append(Arriving(peer, rows, np.empty(0, np.int64), len(rows)))
        return sends

    @cached_property
    def num_rows(self) -> Rows:
        """Rows that each rank sends to each other one, [from, to]; 0 to itself."""
        owner, _ = owners_of(self.layout)
        n = self.world_size
        counts = np.zeros((n, n), np.int64)
        for rank in range(n):
            positions = np.unique(self.wanted_rows(rank))
            counts[:, rank] = np.bincount(owner[positions[positions != FILL]], minlength=n)
        np.fill_diagonal(counts, 0)
        return counts

    def rows_sent(self, rank: int, *, backward: bool = False) -> int:
        """Rows that a rank sends in a pass: times the bytes of a row, its bytes."""
        return int(self.num_rows[:, rank].sum() if backward else self.num_rows[rank].sum())

    def volume(self, row_bytes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes that each rank sends in the forward and in the backward pass.

        Args:
            row_bytes: of one row of the tensor.
        """
        ranks = range(self.world_size)
        forward = tuple(row_bytes * self.rows_sent(rank) for rank in ranks)
        return forward, tuple(row_bytes * self.rows_sent(rank, backward=True) for rank in ranks)

    def check(self) -> None:
        """Raise ValueError unless every row that is wanted arrives exactly once, from its owner."""
        parts = [self.of_rank(rank) for rank in range(self.world_size)]
        for rank, part in enumerate(parts):
            sources = [(x.peer, x.num_rows) for x in part.recvs]
            sent = [
                (peer, x.num_rows)
                for peer in range(self.world_size)
                for x in parts[peer].sends
                if x.peer == rank
            ]
            if sorted(sources) != sorted(sent):
                raise ValueError(f"{self.name}: rank {rank} expects {sources}, but gets {sent}")
            arrived = [x.wanted_rows for x in (*part.recvs, part.own)]
            rows = np.sort(np.concatenate([*arrived, part.filled_rows]))
            if not np.array_equal(rows, np.arange(self.num_wanted[rank])):
                raise ValueError(f"{self.name}: rank {rank} does not get each of its rows once")

    @cached_property
    def fingerprint(self) -> str:
        """A short text that differs between moves of different rows."""
        digest = blake2b(repr(self.wanted).encode(), digest_size=8).hexdigest()
        return f"{self.name} {digest} of {self.layout.fingerprint}"

    def __str__(self) -> str:
        """A table: rows that the rank of a line sends to the rank of a column."""
        counts = self.num_rows
        width = max(4, len(str(counts.max(initial=0))))
        head = " ".join(f"{peer:>{width}}" for peer in range(self.world_size))
        lines = [
            f"{rank:>4}  " + " ".join(f"{x or '.':>{width}}" for x in row)
            for rank, row in enumerate(counts.tolist())
        ]
        title = f"{self.name} over {self.layout!r}: rows to rank"
        return "\n".join([title, f"from  {head}", *lines])


@lru_cache(maxsize=64)
def owners_of(layout: Layout) -> tuple[Rows, Rows]:
    """Return the owner of each position, and its row there, of a layout that is a partition."""
    owner, row = np.empty((2, layout.num_tokens), np.int64)
    for rank in range(layout.world_size):
        rows = layout.rows(rank)
        owner[rows], row[rows] = rank, np.arange(len(rows))
    return owner, row


def share_moves(plan: Plan, layout: Layout) -> RowMoves | None:
    """Return the moves that give each rank all rows of out that it holds, from the owners of
    replicated tokens; None if each has computed its own.
    """
    by_owners = len(layout.replicated) and not plan.replicated_queries
    return _share_moves(layout) if by_owners else None


@lru_cache(maxsize=64)
def _share_moves(layout: Layout) -> RowMoves:
    return RowMoves("share", layout.owned, layout.runs)

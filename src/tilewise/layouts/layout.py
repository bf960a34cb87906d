"""The layout: which tokens a rank owns. Strategies never see it; a tile meets it in tiles/cover.

Its rows are runs, arithmetic progressions; `normal_runs` is the one way to write a sequence of
positions so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import chain, pairwise
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewise.arguments import (
    MOST_RANKS,
    MOST_TOKENS,
    brief,
    checks_arguments,
    listed,
    require_dense,
    require_type,
    shown,
    whole_number,
    whole_numbers,
)
from tilewise.opaque import OpaqueValue
from tilewise.plan.row_ranges import to_ranges

if TYPE_CHECKING:
    import torch


class Run(NamedTuple):
    """The positions start, start + stride, ... (count of them)."""

    start: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    stride: int = 1


class _Gaps(NamedTuple):
    """Neighbouring equal gaps between positions: their distance, and how many there are."""

    distance: int
    repeats: int


def normal_runs(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Return the runs that depend on the positions alone, not on how they were written.

    Positions that follow one another are one run, then three or more at an equal distance; what is
    left are runs of one position.
    """
    if not runs:
        return ()
    if _are_normal(runs):
        return tuple(runs)
    return tuple(_runs(runs[0].start, _joined(_gaps_of_runs(runs))))


def _are_normal(runs: Sequence[Run]) -> bool:
    """Return True if runs are surely normal: stride 1, two rows or more, and none continues the
    last.

    Other runs may be normal, too.
    """
    end = runs[0].start - 1
    for start, count, stride in runs:
        if stride != 1 or count < 2 or start == end:
            return False
        end = start + count
    return True


def positions_of_runs(runs: Iterable[Sequence[int]]) -> NDArray[np.int64]:
    """Return the positions of runs (start, count, stride), int64, in their order."""
    parts = [start + stride * np.arange(count, dtype=np.int64) for start, count, stride in runs]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def runs_of_positions(positions: NDArray[np.int64]) -> tuple[Run, ...]:
    """Return the normal runs of positions in any order.

    Args:
        positions: int64 [num_rows].
    """
    if not len(positions):
        return ()
    distances = np.diff(positions)
    edges = np.flatnonzero(np.diff(distances)) + 1
    starts = np.concatenate([[0], edges, [len(distances)]]).tolist()
    gaps = (_Gaps(int(distances[a]), b - a) for a, b in pairwise(starts) if a < b)
    return tuple(_runs(int(positions[0]), gaps))


def _gaps_of_runs(runs: Sequence[Run]) -> Iterator[_Gaps]:
    for run, after in pairwise(chain(runs, [None])):
        assert run is not None
        if run.count > 1:
            yield _Gaps(run.stride, run.count - 1)
        if after is not None:
            yield _Gaps(after.start - (run.start + (run.count - 1) * run.stride), 1)


def _joined(gaps: Iterable[_Gaps]) -> Iterator[_Gaps]:
    """Yield gaps with neighbours of equal distance joined into one."""
    distance, count = 0, 0
    for gap in gaps:
        if count and gap.distance != distance:
            yield _Gaps(distance, count)
            count = 0
        distance, count = gap.distance, count + gap.repeats
    if count:
        yield _Gaps(distance, count)


def _runs(first: int, gaps: Iterable[_Gaps]) -> Iterator[Run]:
    """The runs of positions that begin at first; neighbouring gaps differ in distance."""
    position, first_is_taken = first, False  # the gaps' first position, and whether a run has it
    for gap, after in pairwise(chain(gaps, [None])):
        assert gap is not None
        distance, last = gap.distance, position + gap.distance * gap.repeats
        begin, count = position + distance * first_is_taken, gap.repeats + 1 - first_is_taken
        if distance > 1 and after is not None and after.distance == 1:
            count -= 1  # the last position begins a run of neighbours
        if (distance == 1 and count > 1) or (distance > 1 and count > 2):
            yield Run(begin, count, distance)
            first_is_taken = begin + (count - 1) * distance == last
        else:
            yield from (Run(begin + i * distance, 1) for i in range(gap.repeats - first_is_taken))
            first_is_taken = False
        position = last
    if not first_is_taken:
        yield Run(position, 1)


def _run(shard: int, run: Any) -> Run:
    """Return a run read from (start, count, stride).

    Raises ValueError unless these are whole numbers.
    """
    try:
        return Run(*map(index, run))
    except TypeError:
        raise ValueError(
            f"shard {shard}: {brief(run)} must be a run of whole numbers, (start, count, stride)"
        ) from None


def _cut(piece: Any) -> tuple[int, int]:
    """Return a half-open range of rows read from a pair. Raises ValueError if it is no pair."""
    ends = [*map(int, whole_numbers("cut", piece))]
    if len(ends) != 2:
        raise ValueError(f"cut {ends} must be (start, stop)")
    return ends[0], ends[1]


class Layout(OpaqueValue):
    """Global positions of every shard's rows, in row order. A frozen, hashable value.

    Args:
        num_tokens: length of the whole sequence, at least 1.
        runs: per shard its rows as ascending arithmetic progressions; a shard may be empty.
        name: for messages; equality and hash ignore it. They ignore into which runs rows are cut,
            too.
    Raises:
        ValueError: if a run descends, repeats a position or leaves the sequence.
    """

    def __init__(self, num_tokens: int, runs: Iterable[Iterable[Run]], name: str = "layout"):
        self.num_tokens = whole_number("num_tokens", num_tokens)
        shards = (
            listed(f"shard {s}", x, "runs")
            for s, x in enumerate(listed("runs", runs, "runs, a list per shard"))
        )
        read = (tuple(_run(s, run) for run in shard) for s, shard in enumerate(shards))
        self.runs = tuple(tuple(run for run in shard if run.count) for shard in read)
        self.name = require_type(str, "name", name, "'layout'")
        self.sizes = tuple(sum(r.count for r in shard) for shard in self.runs)
        self.world_size = whole_number("world_size", len(self.runs))
        for shard, run in ((s, run) for s, runs in enumerate(self.runs) for run in runs):
            last = run.start + (run.count - 1) * run.stride
            if run.count < 1 or run.stride < 1 or not 0 <= run.start <= last < self.num_tokens:
                raise ValueError(
                    f"{name}: shard {shard} has {run}, but a run ascends within the positions "
                    f"0..{self.num_tokens - 1}; write descending rows as runs of one token each"
                )

    @classmethod
    @checks_arguments
    def from_positions(
        cls,
        positions_by_rank: Iterable[Any],
        num_tokens: int | None = None,
        name: str = "positions",
    ) -> Layout:
        """The layout of any positions, each rank's rows in the order given.

            tw.Layout.from_positions([[0, 1, 6, 7], [2, 3, 4, 5]]) == tw.zigzag(8, 2)

        Args:
            positions_by_rank: for every rank a sequence, array or tensor of whole numbers.
            num_tokens: length of the whole sequence; None: every token belongs to exactly one rank,
                so it is the number of positions.
        Raises:
            ValueError: if something else than whole numbers is among the positions, or without
                num_tokens, if a position is missing or given twice.
        """
        rows = [
            whole_numbers(f"positions of rank {rank}", rank_positions)
            for rank, rank_positions in enumerate(
                listed("positions_by_rank", positions_by_rank, "lists")
            )
        ]
        if num_tokens is None:
            everything = np.sort(np.concatenate(rows)) if rows else np.empty(0, np.int64)
            if (everything != np.arange(len(everything))).any():
                raise ValueError(_not_a_permutation(everything))
            num_tokens = len(everything)
        return Layout(num_tokens, map(runs_of_positions, rows), name)

    def size(self, shard: int) -> int:
        """Number of rows of a shard."""
        self._check_rank(shard)
        return self.sizes[shard]

    def rows(self, shard: int) -> NDArray[np.int64]:
        """Global positions of a shard's rows, int64."""
        self._check_rank(shard)
        return positions_of_runs(self.runs[shard])

    def ranges(self, shard: int) -> tuple[tuple[int, int], ...]:
        """A shard's positions as half-open ranges, neighbouring ones joined."""
        return to_ranges(self.rows(shard))

    def positions(self, shard: int) -> torch.Tensor:
        """Global positions of a shard's rows, a LongTensor [num_rows]."""
        return _tensor(self.rows(shard))

    def shard(self, x: Any, rank: int, dim: int = 0) -> Any:
        """The rows of the whole tensor x that a rank owns, along dim."""
        if not hasattr(x, "index_select"):
            raise ValueError(f"x ({shown(x)}) must be a torch.Tensor, as torch.as_tensor makes it")
        require_dense("x", x)
        if not -x.ndim <= whole_number("dim", dim, None) < x.ndim:
            raise ValueError(
                f"dim ({dim}) must be in {-x.ndim}..{x.ndim - 1} for a tensor {tuple(x.shape)}; "
                "name the one of its tokens"
            )
        if x.shape[dim] != self.num_tokens:
            raise ValueError(
                f"x has {x.shape[dim]} tokens along dim {dim}, but the layout is for "
                f"{self.num_tokens}; pass the whole sequence, or make the layout for this length"
            )
        return x.index_select(dim, self.positions(rank).to(x.device))

    def unshard(self, shards: Sequence[Any], dim: int = 0) -> Any:
        """The whole tensor, from every rank's rows in rank order; the inverse of shard.

        Rows of replicated tokens are rank 0's.
        """
        shards = listed("shards", shards, "tensors, one per rank")
        if not all(hasattr(x, "index_select") for x in shards):
            raise ValueError(f"shards ({brief([*map(shown, shards)])}) must be tensors")
        for shard, x in enumerate(shards):
            require_dense(f"shards[{shard}]", x)
        ndim = min((x.ndim for x in shards), default=1)
        whole_number("dim", dim, -ndim, ndim - 1)
        sizes = tuple(x.shape[dim] for x in shards)
        if sizes != self.sizes:
            raise ValueError(
                f"shards of {brief(sizes)} rows do not fit a layout of {self.sizes}; "
                "pass one per rank, in rank order"
            )
        import torch

        rows = np.concatenate([self.rows(s) for s in range(self.world_size)])
        order = np.argsort(rows, kind="stable")
        if len(self.replicated):  # the first rank's row of each
            order = order[np.diff(rows[order], prepend=-1) > 0]
        order = _tensor(order)
        return torch.cat(list(shards), dim).index_select(dim, order.to(shards[0].device))

    def cut(self, homes: Sequence[int], cuts: Sequence[tuple[int, int]]) -> Layout:
        """A finer layout: shard s is the half-open local row range cuts[s] of rank homes[s].

        Raises:
            ValueError: unless the ranges cover every rank's rows exactly once.
        """
        homes = [*map(int, whole_numbers("homes", homes))]
        cuts = [_cut(piece) for piece in listed("cuts", cuts, "(start, stop)")]
        if len(homes) != len(cuts):
            raise ValueError(f"{len(cuts)} cuts for {len(homes)} homes; give one each")
        for home in homes:
            self._check_rank(home)
        pieces: list[list[tuple[int, int]]] = [[] for _ in range(self.world_size)]
        for home, piece in zip(homes, cuts, strict=True):
            pieces[home].append(piece)
        for rank, ranges in enumerate(pieces):
            ends = [0, *(stop for _, stop in sorted(ranges))]
            if [start for start, _ in sorted(ranges)] != ends[:-1] or ends[-1] != self.sizes[rank]:
                raise ValueError(
                    f"the plan cuts rank {rank}'s rows at {sorted(ranges)}, but the layout gives "
                    f"it {self.sizes[rank]} rows; use the layout that the plan was made for"
                )
        runs = [_clip(self.runs[home], piece) for home, piece in zip(homes, cuts, strict=True)]
        return Layout(self.num_tokens, runs, f"{self.name} cut in {len(runs)}")

    def _check_rank(self, rank: int) -> None:
        whole_number("rank", rank, 0, self.world_size - 1)

    @cached_property
    def fingerprint(self) -> str:
        """A short text that differs between layouts of different tokens."""
        digest = blake2b(repr(self._key).encode(), digest_size=8).hexdigest()
        return f"{self!r} {digest}"

    @cached_property
    def is_partition(self) -> bool:
        """True if every token belongs to exactly one shard."""
        runs = sorted(run for shard in self.runs for run in shard)
        if all(run.stride == 1 for run in runs):
            ends = [0, *(run.start + run.count for run in runs)]
            return [*(run.start for run in runs), self.num_tokens] == ends
        rows = np.concatenate([self.rows(shard) for shard in range(self.world_size)])
        return len(rows) == self.num_tokens and bool((np.sort(rows) == np.arange(len(rows))).all())

    @cached_property
    def replicated(self) -> NDArray[np.int64]:
        """Positions that every rank holds, ascending, if each other token belongs to one rank.

        None of other layouts: of partitions, and of those in which some ranks share a token.
        """
        n, nothing = self.world_size, np.empty(0, np.int64)
        if n == 1 or sum(self.sizes) <= self.num_tokens:
            return nothing
        holders = np.zeros(self.num_tokens, np.int64)
        for shard in range(n):
            held_by_rank = np.bincount(self.rows(shard), minlength=self.num_tokens)
            if held_by_rank.max() > 1:
                return nothing
            holders += held_by_rank
        return np.flatnonzero(holders == n) if ((holders == 1) | (holders == n)).all() else nothing

    @cached_property
    def owned(self) -> Layout:
        """The partition in which each replicated token belongs to one of the ranks that hold it.

        A rank owns a row of replicated tokens, in order, that fills up ranks with few others.
        Layouts without replicated tokens are their own.
        """
        if not len(self.replicated):
            return self
        rows_of_one_owner = np.array(self.sizes) - len(self.replicated)
        owner = np.full(self.num_tokens, -1)
        owner[self.replicated] = np.repeat(
            np.arange(self.world_size), _filling_up(rows_of_one_owner, len(self.replicated))
        )
        rows = [self.rows(rank) for rank in range(self.world_size)]
        runs = [
            runs_of_positions(row[np.isin(owner[row], (-1, rank))]) for rank, row in enumerate(rows)
        ]
        return Layout(self.num_tokens, runs, f"{self.name} owned")

    def owned_rows(self, rank: int) -> torch.Tensor:
        """Return indices of a rank's rows that it has under `owned` too, a LongTensor."""
        return _tensor(np.flatnonzero(np.isin(self.rows(rank), self.owned.rows(rank))))

    @cached_property
    def _key(self) -> tuple[int, tuple[tuple[Run, ...], ...]]:
        return self.num_tokens, tuple(map(normal_runs, self.runs))

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"{self.name}({self.num_tokens}, {self.world_size})"


@checks_arguments
def contiguous(num_tokens: int, n: int) -> Layout:
    """Rank r owns the r-th of n neighbouring parts, which differ by at most one token."""
    return Layout(num_tokens, [[part] for part in _parts(num_tokens, _num_ranks(n))], "contiguous")


@checks_arguments
def zigzag(num_tokens: int, n: int) -> Layout:
    """Rank r owns parts r and 2n-1-r of 2n: equal work for every rank under a causal mask."""
    parts = _parts(num_tokens, 2 * _num_ranks(n))
    return Layout(num_tokens, [[parts[r], parts[2 * n - 1 - r]] for r in range(n)], "zigzag")


@checks_arguments
def striped(num_tokens: int, n: int) -> Layout:
    """Rank r owns the tokens t with t mod n = r."""
    _num_ranks(n)
    whole_number("num_tokens", num_tokens, most=MOST_TOKENS)
    return Layout(
        num_tokens, [[Run(r, len(range(r, num_tokens, n)), n)] for r in range(n)], "striped"
    )


def _parts(num_tokens: int, n: int) -> list[Run]:
    size, longer = divmod(whole_number("num_tokens", num_tokens), n)
    starts = [i * size + min(i, longer) for i in range(n + 1)]
    return [Run(a, b - a) for a, b in pairwise(starts)]


def _not_a_permutation(positions: NDArray[np.int64]) -> str:
    """Say which tokens sorted positions lack, have twice, or have without there being such."""
    n = len(positions)
    faults = (
        (np.setdiff1d(np.arange(n), positions), "lacks {}"),
        (positions[1:][np.diff(positions) == 0], "has {} twice"),
        (positions[(positions < 0) | (positions >= n)], "has {}, which is none of them"),
    )
    descriptions = [text.format(tokens[0]) for tokens, text in faults if len(tokens)]
    return (
        f"positions_by_rank has {n} positions, which must be 0..{n - 1}, each once, but "
        f"{', '.join(descriptions)}; give every token to exactly one rank, or pass num_tokens"
    )


def _tensor(positions: NDArray[np.int64]) -> torch.Tensor:
    import torch

    # torch declares no type for the array that it takes
    return torch.from_numpy(positions)  # pyright: ignore[reportUnknownMemberType]


def _clip(runs: Sequence[Run], piece: tuple[int, int]) -> list[Run]:
    clipped: list[Run] = []
    offset = 0
    for run in runs:
        first, last = max(piece[0] - offset, 0), min(piece[1] - offset, run.count)
        if first < last:
            clipped.append(Run(run.start + first * run.stride, last - first, run.stride))
        offset += run.count
    return clipped


def _filling_up(sizes: NDArray[np.int64], num_more: int) -> NDArray[np.int64]:
    """Shares of num_more, by rank, after which sizes are as equal as they can be."""
    ascending = np.sort(sizes)
    # To bring the i smallest to the size of the next takes so many.
    needed = np.arange(1, len(sizes) + 1) * np.append(ascending[1:], np.inf) - ascending.cumsum()
    filled = int(np.argmax(needed >= num_more)) + 1
    level, longer = divmod(num_more + int(ascending[:filled].sum()), filled)
    lowest = np.argsort(sizes, kind="stable")[:filled]
    shares = np.zeros(len(sizes), np.int64)
    shares[lowest] = level - sizes[lowest]
    shares[np.sort(lowest)[:longer]] += 1
    return shares


def _num_ranks(n: int) -> int:
    return whole_number("n", n, most=MOST_RANKS)

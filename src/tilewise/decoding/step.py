"""One decoding step on this rank: a few queries of every sequence against its cached keys.

The tree's program is built once and run at every step; only what a rank reads of its cache changes
with the lengths.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tilewise.compiler.codegen import pass_code
from tilewise.compiler.facts import CallTraits
from tilewise.decoding.chunk import num_held
from tilewise.execution.call import ResolvedCall
from tilewise.execution.forward_backward import code_traits, empty_results
from tilewise.execution.run import BoundCode, Pass
from tilewise.execution.sinks import with_sink
from tilewise.execution.workspace import WorkspacePool
from tilewise.kernels.merge import merge_into
from tilewise.kernels.protocol import (
    Kernel,
    Scores,
    accumulator_dtype,
    call_style,
    loadable,
    no_keys,
)
from tilewise.masks.base import Mask
from tilewise.masks.strips import Strips
from tilewise.plan.row_ranges import Ranges, count_rows, union
from tilewise.tiles.call_rows import CallStyle
from tilewise.tiles.calls import KernelCall, Kind
from tilewise.tiles.cover import tile_calls
from tilewise.transport.protocol import Transport

Tensors: TypeAlias = tuple[Tensor, ...]


class QuerySpan(NamedTuple):
    """Positions of a sequence's queries; its tokens up to the last of them are cached."""

    start: int
    stop: int


class CacheRead(NamedTuple):
    """One kernel call: of these sequences and heads (None: all), rows of q and of the cache."""

    sequences: slice
    call: KernelCall
    q_heads: slice | None = None
    kv_heads: slice | None = None


class RankReads(NamedTuple):
    """This rank and the number of ranks: rank r caches positions p with p mod world_size = r."""

    rank: int
    world_size: int

    def positions(self, length: int) -> np.ndarray:
        """Return the positions of a sequence's rows that are cached here."""
        return np.arange(self.rank, length, self.world_size, dtype=np.int64)

    def row(self, position: np.ndarray) -> np.ndarray:
        """The first row here that is at or after a position."""
        return -(-(position - self.rank) // self.world_size)


def reads(
    mask: Mask, places: Sequence[QuerySpan], here: RankReads, heads: tuple[int, int], cut: CallStyle
) -> Iterator[CacheRead]:
    """Yield the kernel calls of these queries on the keys that this rank has cached.

    Neighbouring sequences that need the same calls share them.

    Args:
        mask: of positions within a sequence.
        places: positions of the queries of each sequence.
        heads: num_heads and num_kv_heads.
        cut: how the kernel wants several queries' cells cut.
    """
    by_head: Sequence[Mask] | None = getattr(mask, "heads", None)
    if by_head is None:
        yield from _of_heads(mask, places, here, cut)
        return
    shared = heads[0] // heads[1]
    for i, one in enumerate(by_head):
        for read in _of_heads(one, places, here, cut):
            q_heads = slice(i * shared, (i + 1) * shared)
            yield read._replace(q_heads=q_heads, kv_heads=slice(i, i + 1))


def _of_heads(
    mask: Mask, places: Sequence[QuerySpan], here: RankReads, cut: CallStyle
) -> Iterator[CacheRead]:
    if all(place.stop - place.start <= 1 for place in places):
        found = _of_single_queries(mask.strips(), places, here)
    else:
        known = {
            place: tile_calls(
                np.arange(place.start, place.stop),
                here.positions(place.stop),
                mask,
                square_causal=cut.square_causal,
                whole_tile=cut.whole_tile,
            )
            for place in dict.fromkeys(places)
        }
        found = [known[place] for place in places]
    for calls, group in groupby(range(len(places)), found.__getitem__):
        which = [*group]
        for call in calls:
            yield CacheRead(slice(which[0], which[-1] + 1), call)


def _of_single_queries(
    strips: Strips, places: Sequence[QuerySpan], here: RankReads
) -> list[tuple[KernelCall, ...]]:
    """At most one call a sequence: a single query sees one interval of keys per strip."""
    at = np.array([place.start for place in places])[:, None]
    q0, q1, lo, lo_slope, hi, hi_slope = strips.columns
    held = np.array([num_held(place.stop, *here) for place in places])[:, None]
    starts = np.maximum(here.row(lo + lo_slope * at), 0)
    stops = np.minimum(here.row(hi + hi_slope * at), held)
    asked = np.array([place.stop > place.start for place in places])[:, None]
    seen = (q0 <= at) & (at < q1) & (starts < stops) & asked
    rows = zip(starts.tolist(), stops.tolist(), seen.tolist(), strict=True)
    ranges = (
        union((start, stop) for start, stop, seen in zip(*row, strict=True) if seen) for row in rows
    )
    return [(KernelCall(((0, 1),), found, Kind.FULL),) if found else () for found in ranges]


class DecodingPass:
    """The tree's pass over so many queries of every sequence; one serves all lengths.

    Args:
        problem: a call of a plan of replicated queries, which is not pruned.
        batch: number of sequences.
    """

    def __init__(
        self, problem: ResolvedCall, transport: Transport, batch: int, device: torch.device
    ):
        self._here, self._transport = RankReads(transport.rank, transport.world_size), transport
        self._problem = problem
        call = CallTraits(batch, prune=False, asks=True)
        traits = code_traits(problem, transport, device)
        code = pass_code(problem.passes, transport.rank, backward=False, call=call, traits=traits)
        self._bound = BoundCode(code, device, problem.kernel, problem.scores, WorkspacePool())

    def attend(
        self,
        q: Tensor,
        cached: tuple[Tensor, Tensor],
        places: Sequence[QuerySpan],
        mask: Mask,
        sink: Tensor | None = None,
    ) -> Tensor:
        """out of q [batch, num_queries, num_heads, head_dim], whose sequences stand at places."""
        payload, kernel = self._problem.passes[0].payload, self._problem.kernel
        heads = payload.num_heads, payload.num_kv_heads
        calls = [*reads(mask, places, self._here, heads, call_style(kernel))]
        rows = loadable(q).transpose(0, 1)
        step = _Step(kernel, self._problem.scores, (rows, *cached), calls)
        out, lse = empty_results(q, payload.v_head_dim)
        out = out if sink is None else out.to(lse.dtype)
        given = {"out": out.transpose(0, 1), "lse": lse.transpose(0, 1)}
        work = Pass(self._transport, self._problem.scores, ask=step.attend)
        self._bound.run(given, work)
        if sink is not None:
            out, _ = with_sink(out, lse, sink)
        return out.to(q.dtype)


class _Step:
    """One step's kernel calls, which read the cache in place.

    Args:
        tensors: queries [num_queries, batch, num_heads, head_dim], keys and values [rows, batch,
            num_kv_heads, head_dim].
        calls: on them.
    """

    def __init__(
        self,
        kernel: Kernel,
        scores: Scores,
        tensors: tuple[Tensor, Tensor, Tensor],
        calls: Sequence[CacheRead],
    ):
        self._kernel, self._scale, self._reads = kernel, scores.scale, calls
        self._extra_arguments = (scores,) if scores.needs else ()
        self._queries, *self._cached = tensors

    def attend(self) -> Tensors:
        """out and lse of all queries over what is cached here."""
        if len(self._reads) == 1 and self._is_all(self._reads[0]):
            dtype = accumulator_dtype(self._queries.dtype)
            out, lse = self._call(self._reads[0])
            return out.to(dtype), lse
        out, lse = no_keys(self._queries, self._cached[1])
        for read in self._reads:
            self._take_in(read, (out, lse), self._call(read))
        return out, lse

    def _take_in(self, read: CacheRead, partials: Tensors, values: Tensors) -> None:
        """Add a call's results to its rows, sequences and heads."""
        heads = read.q_heads or slice(None)
        for first, (start, stop) in _offsets(read.call.q):
            place = (slice(start, stop), read.sequences, heads)
            here = slice(first, first + stop - start)
            (out, lse), (new_out, new_lse) = (x[place] for x in partials), (x[here] for x in values)
            if len(self._queries) == 1:  # nothing is there yet: one call has all its keys
                out.copy_(new_out)
                lse.copy_(new_lse)
            else:
                merge_into(out, lse, new_out, new_lse)

    def _is_all(self, read: CacheRead) -> bool:
        """Return whether a call has all queries of all sequences and heads."""
        rows, batch = self._queries.shape[:2]
        whole = read.sequences == slice(0, batch) and read.q_heads is None
        return whole and read.call.q == ((0, rows),)

    def _call(self, read: CacheRead) -> Tensors:
        k, v = (_rows(x, read.call.k, read.sequences, read.kv_heads) for x in self._cached)
        queries = _rows(self._queries, read.call.q, read.sequences, read.q_heads)
        return self._kernel.forward(
            queries, k, v, read.call, self._scale, None, *self._extra_arguments
        )


def _rows(x: Tensor, ranges: Ranges, sequences: slice, heads: slice | None) -> Tensor:
    """Rows of some sequences and heads: a view if they lie side by side, else a copy."""
    pieces = [x[start:stop, sequences] for start, stop in ranges]
    rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return rows if heads is None else rows[:, :, heads]


def _offsets(ranges: Ranges) -> Iterator[tuple[int, tuple[int, int]]]:
    """Each range with its first row's place among all of them."""
    for i, one in enumerate(ranges):
        yield count_rows(ranges[:i]), one

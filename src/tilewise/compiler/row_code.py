"""The code of row moves: one rank's forward or backward pass over a tensor of rows."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np

from tilewise.arguments import item_bytes, require_range
from tilewise.compiler.code import Buffer, Code, Home, Ref, Refs, TensorSpec
from tilewise.compiler.ops import Copy, Fill, Merge, Message, Op, Post, Table, Wait
from tilewise.compiler.placement import Departures, placed
from tilewise.compiler.row_moves import Arriving, RankMoves, RowMoves, Rows
from tilewise.plan.payload import accumulator

MOST_SLICES = 16
"""Up to so many pieces of neighbouring rows are copied one by one, without a table of rows."""


def row_code(  # noqa: PLR0913 - what a code depends on, by name
    moves: RowMoves,
    rank: int,
    row_shape: tuple[int, ...],
    dtype: str,
    *,
    backward: bool = False,
    fill: float = 0.0,
    departs: Departures = Departures(1, True),  # noqa: B008 - a constant
) -> Code:
    """Return what one rank does in a pass: forward x -> out, backward dout -> dx.

    Args:
        row_shape: of a row of the tensor, without its tokens.
        dtype: of the tensor.
        fill: of rows that no token has; their gradient is dropped.
        departs: when the transport has sent what it was handed.
    Raises:
        ValueError: if there is no such rank.
    """
    require_range("rank", rank, 0, moves.world_size - 1)
    writer = _Writer(moves, rank, row_shape, dtype)
    if backward:
        writer.backward()
    else:
        writer.forward(fill)
    return writer.code(backward, departs)


class _Writer:
    """The operations of a pass, in order."""

    def __init__(self, moves: RowMoves, rank: int, row_shape: tuple[int, ...], dtype: str):
        self.moves, self.rank, self.row_shape, self.dtype = moves, rank, row_shape, dtype
        self.mine: RankMoves = moves.of_rank(rank)
        self.num_own, self.num_wanted = moves.layout.size(rank), moves.num_wanted[rank]
        self._tensors: list[TensorSpec] = []
        self._buffers: list[Buffer] = []
        self._ops: list[Op[Refs]] = []

    def code(self, backward: bool, departs: Departures) -> Code:
        tensors, buffers, ops = tuple(self._tensors), tuple(self._buffers), tuple(self._ops)
        offsets, num_bytes = placed(tensors, buffers, ops, departs)
        world = self.rank, self.moves.world_size, backward, 1
        return Code(*world, tensors, buffers, ops, offsets, num_bytes)

    def forward(self, fill: float) -> None:
        x, out = self._given("x", self.num_own), self._given("out", self.num_wanted)
        messages: dict[bytes, tuple[Ref, Ref]] = {}  # ranks that want the same rows share one
        leaving: list[tuple[int, Ref]] = []
        for sent in self.mine.sends:
            key = sent.source_rows.tobytes()
            if key not in messages:
                messages[key] = self._message(f"rows for {sent.peer}", sent.num_rows)
                label, rows = f"pack rows for rank {sent.peer}", np.arange(sent.num_rows)
                self._copy(label, (x, messages[key][0]), (sent.source_rows, rows))
            leaving.append((sent.peer, messages[key][1]))
        arriving = {
            recv.peer: self._message(f"rows of {recv.peer}", recv.num_rows)
            for recv in self.mine.recvs
        }
        self._post(leaving, [(peer, ref) for peer, (_, ref) in arriving.items()])
        own = self.mine.own
        self._copy("keep own rows", (x, out), (own.source_rows, own.wanted_rows))
        for (start, _), num_rows in _slices(self.mine.filled_rows, self.mine.filled_rows):
            part = (_part(out, start, num_rows),)
            self._ops.append(Fill("fill rows of no token", part, (fill,)))
        for number, recv in enumerate(self.mine.recvs):
            rows, message = arriving[recv.peer]
            self._wait(number, recv.peer, message)
            label = f"unpack rows of rank {recv.peer}"
            self._copy(label, (rows, out), (recv.source_rows, recv.wanted_rows))

    def backward(self) -> None:
        dout, dx = self._given("dout", self.num_wanted), self._given("dx", self.num_own)
        leaving: list[tuple[int, Ref]] = []
        for recv in self.mine.recvs:
            rows, message = self._message(f"gradients for {recv.peer}", recv.num_rows)
            self._sum_into(f"pack gradients for rank {recv.peer}", rows, dout, recv)
            leaving.append((recv.peer, message))
        arriving = {
            sent.peer: self._message(f"gradients of {sent.peer}", sent.num_rows)
            for sent in self.mine.sends
        }
        self._post(leaving, [(peer, ref) for peer, (_, ref) in arriving.items()])
        total = dx
        if self.mine.sends and accumulator(self.dtype) != self.dtype:
            total = self._memory("sum of gradients", self.num_own, accumulator(self.dtype))
        self._ops.append(Fill("keep own gradients", (total,), (0.0,)))
        own = self.mine.own
        self._add("keep own gradients", (dout, total), (own.wanted_rows, own.source_rows))
        for number, sent in enumerate(self.mine.sends):
            rows, message = arriving[sent.peer]
            self._wait(number, sent.peer, message)
            label = f"add gradients of rank {sent.peer}"
            self._add(label, (rows, total), (np.arange(sent.num_rows), sent.source_rows))
        if total != dx:
            self._ops.append(Copy("round the sum of gradients", (total,), (dx,)))

    # Memory

    def _given(self, name: str, num_rows: int) -> Ref:
        return self._tensor(name, num_rows, self.dtype, Home.GIVEN)

    def _memory(self, name: str, num_rows: int, dtype: str) -> Ref:
        return self._tensor(name, num_rows, dtype, Home.WORKSPACE)

    def _message(self, name: str, num_rows: int) -> tuple[Ref, Ref]:
        """Rows in the workspace, and the same memory as bytes."""
        rows = self._memory(name, num_rows, self.dtype)
        buffer = self._tensors[rows.tensor].buffer
        num_bytes = self._buffers[buffer].num_bytes
        spec = TensorSpec(name, buffer, 0, (num_bytes,), (1,), "uint8")
        self._tensors.append(spec)
        return rows, Ref(len(self._tensors) - 1)

    def _tensor(self, name: str, num_rows: int, dtype: str, home: Home) -> Ref:
        shape = (num_rows, *self.row_shape)
        strides = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        self._buffers.append(Buffer(name, prod(shape) * item_bytes(dtype), home))
        spec = TensorSpec(name, len(self._buffers) - 1, 0, shape, strides, dtype)
        self._tensors.append(spec._replace(strides=()) if home is Home.GIVEN else spec)
        return Ref(len(self._tensors) - 1)

    # Operations

    def _post(self, sends: list[tuple[int, Ref]], recvs: list[tuple[int, Ref]]) -> None:
        if sends or recvs:
            name, label = self.moves.name, f"post {len(sends)} sends, {len(recvs)} receives"
            leaving, arriving = (tuple((ref,) for _, ref in pairs) for pairs in (sends, recvs))
            to = tuple(Message(peer, 0, f"{name} to {peer}") for peer, _ in sends)
            of = tuple(Message(peer, 0, f"{name} of {peer}") for peer, _ in recvs)
            numbers = tuple(range(len(recvs)))
            self._ops.append(Post(label, 0, 0, leaving, arriving, to, of, numbers))

    def _wait(self, number: int, peer: int, message: Ref) -> None:
        self._ops.append(Wait(f"wait for rank {peer}", 0, (number,), ((message,),)))

    def _copy(self, label: str, ends: tuple[Ref, Ref], rows: tuple[Rows, Rows]) -> None:
        """target[target_rows[i]] = source[source_rows[i]]; no target row is named twice."""
        (source, target), (source_rows, target_rows) = ends, rows
        slices = _slices(source_rows, target_rows)
        if len(slices) <= MOST_SLICES:
            for (a, b), num_rows in slices:
                parts = (_part(source, a, num_rows),), (_part(target, b, num_rows),)
                self._ops.append(Copy(label, *parts))
            return
        chosen = self._chosen(label, source, source_rows)
        if _is_all(target_rows, self._num_rows(target)):
            self._ops.append(Copy(label, (chosen,), (target,)))
        else:
            table = Table.of(target_rows)
            self._ops.append(Copy(label, (chosen,), (target,), table, scatters=True))

    def _add(self, label: str, ends: tuple[Ref, Ref], rows: tuple[Rows, Rows]) -> None:
        """target[target_rows[i]] += source[source_rows[i]]."""
        (source, target), (source_rows, target_rows) = ends, rows
        slices = _slices(source_rows, target_rows)
        if len(slices) <= MOST_SLICES:
            for (a, b), num_rows in slices:
                parts = (_part(source, a, num_rows),), (_part(target, b, num_rows),)
                self._ops.append(Merge(label, *parts, by_lse=False))
            return
        chosen = self._chosen(label, source, source_rows)
        self._ops.append(Merge(label, (chosen,), (target,), False, Table.of(target_rows)))

    def _sum_into(self, label: str, message: Ref, dout: Ref, recv: Arriving) -> None:
        """Write a message of gradients: a row that is wanted several times has their sum."""
        rows = recv.wanted_rows, recv.source_rows
        if len(recv.wanted_rows) == recv.num_rows:
            self._copy(label, (dout, message), rows)
            return
        self._ops.append(Fill(label, (message,), (0.0,)))
        self._add(label, (dout, message), rows)

    def _chosen(self, label: str, source: Ref, rows: Rows) -> Ref:
        """The rows of a tensor that a table names, in its order."""
        if _is_all(rows, self._num_rows(source)):
            return source
        chosen = self._memory("chosen rows", len(rows), self._tensors[source.tensor].dtype)
        self._ops.append(Copy(label, (source,), (chosen,), Table.of(rows)))
        return chosen

    def _num_rows(self, ref: Ref) -> int:
        return self._tensors[ref.tensor].shape[0]


def _part(ref: Ref, start: int, num_rows: int) -> Ref:
    return Ref(ref.tensor, (start, start + num_rows, 1))


def _is_all(rows: Rows, num_rows: int) -> bool:
    """Return whether rows are all of a tensor, in order."""
    return len(rows) == num_rows and bool((rows == np.arange(num_rows)).all())


def _slices(a: Rows, b: Rows) -> list[tuple[tuple[int, int], int]]:
    """Rows that follow one another in both: ((first of a, first of b), number of rows)."""
    if not len(a):
        return []
    edges = np.flatnonzero((np.diff(a) != 1) | (np.diff(b) != 1)) + 1
    starts = [0, *edges.tolist(), len(a)]
    return [((int(a[i]), int(b[i])), j - i) for i, j in pairwise(starts)]

"""A stream of documents as training steps over all ranks: equal tokens, level work, few bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from itertools import count, islice, pairwise
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from tilewise.arguments import (
    MOST_RANKS,
    DtypeName,
    brief,
    checks_arguments,
    entries,
    of_kind,
    whole_number,
    whole_numbers,
)
from tilewise.compiler.rank_plan import RankPlan
from tilewise.execution.prepare import prepare
from tilewise.kernels.protocol import Kernel
from tilewise.layouts.balanced import balanced
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Causal, Document, Mask
from tilewise.plan.ir import Plan
from tilewise.simulation.machine import Machine
from tilewise.simulation.simulator import Simulation, simulate
from tilewise.strategies.needed import needed
from tilewise.workload import Workload

LOOKAHEAD = 4  # steps' worth of documents that one step is chosen from, by default
LEVEL = 1.02  # times the window's mean area that a step's documents may have, if others fit


class SchedulePosition(NamedTuple):
    """A place between two steps of a schedule.

    Attributes:
        steps: number of steps before it.
        documents_read: documents that were looked at so far, from the first one on.
        waiting: those among them that are in no step yet, in the stream's order.
        lengths: digest of the lengths of all that were read.
    """

    steps: int
    documents_read: int
    waiting: tuple[int, ...]
    lengths: str


@dataclass(frozen=True)
class BatchStep:
    """The documents of one training step, over all ranks as one sequence.

    Attributes:
        index: number of the step, from 0 on.
        documents: indices into the stream of lengths, in the order in which they are packed.
        cu_seqlens: where they start and end, and, where tokens are left over, the padding: one
            more document at the end.
        layer: the workload of a layer's attention, without mask and layout.
    """

    index: int
    documents: tuple[int, ...]
    cu_seqlens: tuple[int, ...]
    world_size: int
    layer: Workload = field(repr=False)
    machine: Machine = field(repr=False)
    position: SchedulePosition = field(repr=False)

    @property
    def state(self) -> dict[str, Any]:
        """The schedule's state after this step, for `load_state_dict`: plain numbers and texts."""
        return _state(self.position)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the step, padding among them."""
        return self.cu_seqlens[-1]

    @property
    def padding(self) -> int:
        """Tokens at the end that belong to no document."""
        return self.num_tokens - self.cu_seqlens[len(self.documents)]

    @cached_property
    def mask(self) -> Mask:
        return Causal() & Document(self.cu_seqlens)

    @cached_property
    def layout(self) -> Layout:
        """A layout with as many tokens on every rank, and level areas of attention."""
        return balanced(self.mask, self.num_tokens, self.world_size)

    @cached_property
    def plan(self) -> Plan:
        """The plan of both passes. Ranks that share no document neither send to nor wait for each
        other.
        """
        return needed(self.mask, self.layout, self.machine.node_size)

    @checks_arguments
    def prepare(
        self, rank: int, kernel: Kernel | str | None = None, dtype: DtypeName | None = None
    ) -> RankPlan:
        """Return what a rank needs for the step's attention, in both passes; it pickles.

        A DataLoader's worker makes it; `attention(q, k, v, plan=prepared, group=group)` then has
        nothing to plan, and mask and layout come with it. All ranks must get the same step.

        Args:
            kernel: as of attention, where that is given; None: the device's first choice.
            dtype: of q, k and v, by name; None: that of the step's workload.
        """
        documents = sha256(repr(self.documents).encode()).hexdigest()[:8]
        batch = f"step {self.index} ({len(self.documents)} documents, {documents})"
        work = replace(self.workload, dtype=self.layer.dtype if dtype is None else dtype)
        return prepare(work.resolve(self.plan), rank, batch, kernel)

    @property
    def workload(self) -> Workload:
        return replace(self.layer, mask=self.mask, layout=self.layout)

    @cached_property
    def simulation(self) -> Simulation:
        return simulate(self.plan, self.workload, self.machine)

    @property
    def seconds(self) -> float:
        """Simulated time of a layer's attention, forward and backward."""
        return self.simulation.seconds


class StepStream(IterableDataset[BatchStep]):
    """Training steps from a stream of documents; made by `schedule`.

    An IterableDataset: a DataLoader with workers plans ahead, each worker every num_workers-th
    step, in order.

        steps = tw.schedule(lengths, world_size=64, tokens_per_rank=8192, ...)
        def collate(step):      # in the worker; the plan is made here
            return step, step.plan, ShardingCollator(step.layout, rank)([...])
        DataLoader(steps, batch_size=None, num_workers=2, collate_fn=collate)
    """

    def __init__(
        self,
        lengths: Iterable[int],
        sizes: tuple[int, int],
        layer: Workload,
        machine: Machine,
        order: tuple[int | None, int],
    ):
        self._lengths, self._layer, self._machine = lengths, layer, machine
        self._world_size, self._num_tokens = sizes
        self._lookahead, self._seed = order
        self._first = self._last = SchedulePosition(0, 0, (), sha256().hexdigest())

    def __iter__(self) -> Iterator[BatchStep]:
        worker = get_worker_info()
        number, of = (worker.id, worker.num_workers) if worker else (0, 1)
        self._last = self._first
        for step in islice(self._steps(self._first), number, None, of):
            self._last = step.position
            yield step

    def state_dict(self) -> dict[str, Any]:
        """Return where the schedule stands: after the last step that it gave.

        It says which documents were given, in plain numbers and texts. Worker processes iterate
        over copies: with workers the state is `step.state` of the last step that came.

        Raises:
            ValueError: in one of several workers, which gives a part of the steps.
        """
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ValueError(
                f"this is worker {worker.id} of {worker.num_workers}, which gives a part of the "
                "steps; the state is step.state of the last step that came in the main process"
            )
        return _state(self._last)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the steps that were taken: every document that was in none is given once.

        The lengths must begin with those that were read. World size, tokens_per_rank, lookahead and
        seed may be others; with the same ones, steps are those of a run that never stopped. Every
        iteration begins there: for another epoch make another schedule.

        Args:
            state: of state_dict, or a step's.
        Raises:
            ValueError: if it is no such state; when steps are made, if the lengths are others.
        """
        self._first = self._last = _position(state)

    def _steps(self, position: SchedulePosition) -> Iterator[BatchStep]:
        stream, digest = enumerate(entries("lengths", self._lengths)), sha256()
        waiting = self._read_again(stream, digest, position)
        tokens, documents_read = sum(n for _, n in waiting), position.documents_read
        for number in count(position.steps):
            while tokens < self._num_tokens or not self._sees_enough(len(waiting), tokens):
                entry = next(stream, None)
                if entry is None:
                    break
                waiting.append((entry[0], self._checked(*entry)))
                digest.update(_as_bytes(waiting[-1][1]))
                documents_read += 1
                tokens += waiting[-1][1]
            if not waiting:
                if number == 0:
                    raise ValueError("lengths has 0 documents; give at least one")
                return
            # anew for each step, so that a run which goes on draws the same
            rng = np.random.default_rng((self._seed, number))
            chosen_lengths = _fill(waiting, self._num_tokens, rng)
            waiting = [entry for entry in waiting if entry[0] not in chosen_lengths]
            ends = np.cumsum([0, *chosen_lengths.values()]).tolist()
            tokens -= ends[-1]
            if ends[-1] < self._num_tokens:
                ends.append(self._num_tokens)
            left = tuple(i for i, _ in waiting)
            yield BatchStep(
                number,
                tuple(chosen_lengths),
                tuple(ends),
                self._world_size,
                self._layer,
                self._machine,
                SchedulePosition(number + 1, documents_read, left, digest.hexdigest()),
            )

    def _read_again(
        self, stream: Iterator[tuple[int, Any]], digest: Any, position: SchedulePosition
    ) -> list[tuple[int, int]]:
        """Read the documents that a position says were read; return index and length of the waiting
        ones.
        """
        left, waiting, found = {*position.waiting}, list[tuple[int, int]](), 0
        for i, length in islice(stream, position.documents_read):
            length = whole_number(f"length of document {i}", length)
            digest.update(_as_bytes(length))
            found += 1
            if i in left:
                waiting.append((i, self._checked(i, length)))
        if (found, digest.hexdigest()) != (position.documents_read, position.lengths):
            what = f"has {found}" if found < position.documents_read else "has other lengths"
            raise ValueError(
                f"the state was made after {position.documents_read} documents were read, but "
                f"lengths {what}; give the lengths that it was made with, from the first one on"
            )
        return waiting

    def _sees_enough(self, documents: int, tokens: int) -> bool:
        if self._lookahead is None:
            return tokens >= LOOKAHEAD * self._num_tokens
        return documents >= self._lookahead

    def _checked(self, i: int, length: Any) -> int:
        length = whole_number(f"length of document {i}", length)
        if length > self._num_tokens:
            raise ValueError(
                f"document {i} has {length} tokens, but a step holds {self._num_tokens} "
                f"({self._world_size} ranks of {self._num_tokens // self._world_size}); cut it, "
                "or raise tokens_per_rank"
            )
        return length


def _as_bytes(length: int) -> bytes:
    return length.to_bytes(8, "little")


def _state(position: SchedulePosition) -> dict[str, Any]:
    return {**position._asdict(), "waiting": [*position.waiting]}


def _position(state: Any) -> SchedulePosition:
    """The position of a state.

    Raises:
        ValueError: if it is none.
    """
    values = of_kind("state", state, Mapping[str, Any])
    missing = [name for name in SchedulePosition._fields if name not in values]
    if missing:
        raise ValueError(
            f"state (with {', '.join(map(str, values)) or 'nothing'}) lacks {', '.join(missing)}; "
            "pass what state_dict() or step.state gave, which says the documents that were given"
        )
    steps = whole_number("steps", values["steps"], 0)
    documents_read = whole_number("documents_read", values["documents_read"], steps)
    waiting = tuple(whole_numbers("waiting", values["waiting"]).tolist())
    fits = all(a < b for a, b in pairwise((-1, *waiting, documents_read)))
    if not fits or len(waiting) > documents_read - steps:
        raise ValueError(
            f"waiting ({brief(waiting)}) must be ascending numbers of documents below "
            f"documents_read ({documents_read}), and leave at least one for each of {steps} steps"
        )
    return SchedulePosition(
        steps, documents_read, waiting, of_kind("lengths", values["lengths"], str)
    )


@checks_arguments
def schedule(  # noqa: PLR0913 - a model layer, a world and a stream
    lengths: Iterable[int],
    *,
    world_size: int,
    tokens_per_rank: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    machine: Machine | None = None,
    lookahead: int | None = None,
    seed: int = 0,
) -> StepStream:
    """Training steps from a stream of documents, over all ranks (dp x cp) as one world.

    Every step has tokens_per_rank tokens on every rank, so pipelines, captured graphs and FSDP see
    equal shapes, and level work, because the layout deals the tokens of heavy and light documents.
    A long document spreads over the ranks that it needs, a short one over few. Documents are
    chosen from those next in the stream so that steps are full and alike in work; none waits
    for long, the oldest always goes first.

    Args:
        lengths: tokens of each document. An iterator is read once: give a list to iterate again.
        world_size: dp x cp.
        num_heads, num_kv_heads, head_dim, v_head_dim: of a layer's attention.
        machine: of whose nodes plans take care, and `BatchStep.seconds` is simulated on; None: the
            preset "h100x8".
        lookahead: from how many waiting documents a step is chosen (more, where so many do not
            fill it); default: as many as fill four steps.
        seed: of ties in the choice.
    Raises:
        ValueError: if there is no document, and, when it is met, for one that is empty or longer
            than a step.
    """
    world_size = whole_number("world_size", world_size, most=MOST_RANKS)
    tokens_per_rank = whole_number("tokens_per_rank", tokens_per_rank)
    whole_number("seed", seed, 0)
    machine = Machine.preset("h100x8") if machine is None else machine
    ahead = None if lookahead is None else whole_number("lookahead", lookahead)
    sizes = world_size, world_size * tokens_per_rank
    layer = Workload(
        num_tokens=sizes[1],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
    )
    return StepStream(lengths, sizes, layer, machine, (ahead, seed))


def _fill(waiting: list[tuple[int, int]], room: int, rng: np.random.Generator) -> dict[int, int]:
    """Index and length of the documents of a step; the first that waits is among them."""
    allowed = LEVEL * sum(n * n for _, n in waiting) * min(1.0, room / sum(n for _, n in waiting))
    chosen_lengths = {waiting[0][0]: waiting[0][1]}
    room -= waiting[0][1]
    area = waiting[0][1] ** 2
    for i, n in waiting[1:]:
        if n <= room and area + n * n <= allowed:
            chosen_lengths[i] = n
            room, area = room - n, area + n * n
    # What is left is filled by the longest that fit, in an order of chance where they are alike.
    rest = [(n, i) for i, n in waiting if i not in chosen_lengths]
    for at in sorted(rng.permutation(len(rest)), key=lambda at: -rest[at][0]):
        n, i = rest[at]
        if n <= room:
            chosen_lengths[i] = n
            room -= n
    return chosen_lengths

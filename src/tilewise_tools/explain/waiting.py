"""A recorded step as pieces of time of every rank, each wait with what the others did meanwhile.

A rank that waits for a message does so while its sender has not posted it, and then while the link
carries it. The first part is broken down further, by what the sender did in that time: it computed,
copied, was outside of attention, or waited for somebody in turn. So every second of waiting has a
cause that is no wait, and the pieces of a rank add up to its step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from tilewise_tools.explain.clocks import clocks
from tilewise_tools.explain.rows import OpRow, PassRow, Run, Sent, StepRow, WaitRow

KERNEL, COPY, OUTSIDE, LINK, WAIT = "kernel", "copy", "outside", "link", "wait"
KERNEL_OPS = ("Attend", "Expand", "Pull", "Ask")
SENDS = "wait for sends"


class Cause(NamedTuple):
    """The reason of a wait: another rank's work of a kind, or a link.

    Attributes:
        kind: KERNEL, COPY (with merges and posting), OUTSIDE (between passes, and their set-up), or
            LINK.
        rank: who did it; of a link its sender.
        peer: of a link its receiver.
    """

    kind: str
    rank: int
    peer: int = -1


class Piece(NamedTuple):
    """A part of a rank's time, in which it did one thing.

    Attributes:
        kind: KERNEL, COPY, OUTSIDE or WAIT.
        cause: of a WAIT.
        label: the operation's.
        place: of the pass in the step, and of the operation in the pass; -1: none.
    """

    start: float
    end: float
    kind: str
    cause: Cause | None = None
    label: str = ""
    place: tuple[int, int] = (-1, -1)

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Transit(NamedTuple):
    """A message, or several that were waited for as one, whose way somebody waited for.

    Attributes:
        seconds: from when both ends had posted it, and the link was free of earlier messages.
        waited: of these, the seconds for which a rank did nothing else.
    """

    src: int
    dst: int
    num_bytes: int
    seconds: float
    waited: float
    backward: bool


class RecordedStep(NamedTuple):
    """One step of all ranks on one scale of time.

    Attributes:
        pieces: of each rank, in order and without gaps.
        seconds: of the rank whose step takes longest.
        transits: messages that ranks waited for.
    """

    number: int
    pieces: tuple[tuple[Piece, ...], ...]
    transits: tuple[Transit, ...]

    @property
    def seconds(self) -> float:
        return max(some[-1].end - some[0].start for some in self.pieces)


class _Message(NamedTuple):
    """A message of a wait.

    Attributes:
        peer: the other end.
        peer_posted, both_posted: when the other end had posted it, and when both had.
    """

    src: int
    dst: int
    num_bytes: int
    peer: int
    peer_posted: float
    both_posted: float


class _Wait(NamedTuple):
    """A wait whose cause is not known yet."""

    start: float
    end: float
    messages: tuple[_Message, ...]
    label: str
    place: tuple[int, int]
    backward: bool


def recorded_steps(run: Run) -> list[RecordedStep]:
    """Return the steps to explain: all but the first of the run, if there are others."""
    numbers = [step for step in run.steps if step] or [*run.steps]
    offsets = [clock.offset for clock in clocks(run.ranks)]
    found = []
    for number in numbers:
        steps = [
            _shifted(rows.steps[number], offset)
            for rows, offset in zip(run.ranks, offsets, strict=True)
        ]
        posted = _posting_times(steps)
        ledger = _Ledger([[*_pieces(r, step, posted)] for r, step in enumerate(steps)])
        transits = tuple(ledger.explain())
        found.append(RecordedStep(number, tuple(map(tuple, ledger.pieces())), transits))
    return found


def _shifted(step: StepRow, offset: float) -> StepRow:
    """The step on rank 0's clock."""
    passes = tuple(
        one._replace(
            begin=one.begin - offset,
            marks=tuple(mark - offset for mark in one.marks),
            waits=tuple(
                wait._replace(start=wait.start - offset, end=wait.end - offset)
                for wait in one.waits
            ),
        )
        for one in step.passes
    )
    return StepRow(passes, step.begin - offset, step.end - offset)


# Posting

_Key = tuple[bool, int, int, int, str, int]
"""Of one end of a message: whether it is the sender's, the pass, source, destination, name, and how
many of the name came before."""


class _Counter:
    """Gives each message of a rank's pass the key by which both its ends know it.

    Ranks call one exchange of a team by different names: it is known by the team, and by how many
    came before.
    """

    def __init__(self, rank: int, place: int, one: PassRow) -> None:
        self._place = place
        self._names: dict[str, str] = {}
        self._counts: defaultdict[tuple[Any, ...], int] = defaultdict(int)
        for op in one.case.ops:
            if op.is_team and op.sends:
                team = tuple(sorted({rank, *(sent.peer for sent in op.sends)}))
                self._names[op.sends[0].what] = f"team {team}, exchange {self._counts[team]}"
                self._counts[team] += 1

    def key(self, is_send: bool, src: int, dst: int, what: str) -> _Key:
        name = self._names.get(what, what)
        counted = is_send, src, dst, name
        self._counts[counted] += 1
        return is_send, self._place, src, dst, name, self._counts[counted]


def _posting_times(steps: Sequence[StepRow]) -> dict[_Key, tuple[float, int]]:
    """Return the time at which each end of each message was posted, and its bytes."""
    found: dict[_Key, tuple[float, int]] = {}
    for rank, step in enumerate(steps):
        for place, one in enumerate(step.passes):
            counter = _Counter(rank, place, one)
            for op, start in zip(one.case.ops, one.marks, strict=False):
                rounds = _rounds(rank, one, op, start) if op.is_team else {}
                for peer, what, num_bytes in op.sends:
                    key = counter.key(True, rank, peer, what)
                    found[key] = rounds.get(peer, start), num_bytes
                for peer, what, num_bytes in op.recvs:
                    found[counter.key(False, peer, rank, what)] = start, num_bytes
    return found


def _rounds(rank: int, one: PassRow, op: OpRow, start: float) -> dict[int, float]:
    """Return the times at which an all-to-all that goes in rounds posted its sends, by peer.

    In round i a rank sends to the rank i places after it, once it has what the last round's peer
    sent: see transport.posted.PairwiseExchange.
    """
    team = sorted({rank, *(sent.peer for sent in op.sends)})
    own, times, before = team.index(rank), dict[int, float](), start
    ended = {
        peer: wait.end
        for wait in one.waits
        for peer, what in wait.messages
        if not wait.is_send and what == op.sends[0].what
    }
    for turn in range(1, len(team)):
        times[team[(own + turn) % len(team)]] = before
        before = max(before, ended.get(team[(own - turn) % len(team)], before))
    return times


# Pieces


def _pieces(
    rank: int, step: StepRow, posted: dict[_Key, tuple[float, int]]
) -> Iterator[Piece | _Wait]:
    """The pieces of a rank's step, in order, without gaps."""
    cursor = step.begin
    for place, one in enumerate(step.passes):
        yield Piece(cursor, one.marks[0], OUTSIDE)
        finder = _Messages(rank, place, one, posted)
        waits = deque(one.waits)
        ends = (*one.case.ops, OpRow("Sends", SENDS))
        for number, (op, (start, end)) in enumerate(zip(ends, pairwise(one.marks), strict=True)):
            where, at = (place, number), start
            inside: list[WaitRow] = []
            while waits and waits[0].end <= end:
                inside.append(waits.popleft())
            for wait in inside:
                messages = finder.waited_for(wait)
                if messages:
                    yield Piece(at, wait.start, COPY, None, op.label, where)
                    found = wait.start, wait.end, messages
                    yield _Wait(*found, op.label, where, one.case.backward)
                    at = wait.end
            rest = finder.awaited(op)
            if rest and not inside:
                yield _Wait(at, end, rest, op.label, where, one.case.backward)
            else:
                kind = KERNEL if op.kind in KERNEL_OPS else COPY
                yield Piece(at, end, kind, None, op.label, where)
        cursor = one.end
    yield Piece(cursor, step.end, OUTSIDE)


class _Messages:
    """Finds the messages of a rank's waits in one pass."""

    def __init__(
        self, rank: int, place: int, one: PassRow, posted: dict[_Key, tuple[float, int]]
    ) -> None:
        self._rank, self._posted, self._batched = rank, posted, one.case.batches_exchanges
        self._one_by_one = _Counter(rank, place, one)
        self._groups: dict[int, int] = {}  # by arrival
        self._in_group: list[tuple[_Message, ...]] = []
        self._sends: list[_Message] = []
        counter = _Counter(rank, place, one)
        for op in one.case.ops:
            sends = self._found(counter, True, op.sends)
            recvs = [self._found(counter, False, (received,)) for received in op.recvs]
            self._sends += sends
            for arrivals, places in op.groups:
                messages = [message for x in places for message in recvs[x]]
                self._groups |= dict.fromkeys(arrivals, len(self._in_group))
                self._in_group.append((*messages, *(sends if self._batched else ())))

    def waited_for(self, wait: WaitRow) -> tuple[_Message, ...]:
        """Return the messages of one wait of the transport."""
        sent = [Sent(peer, what, 0) for peer, what in wait.messages]
        return tuple(self._found(self._one_by_one, wait.is_send, sent))

    def awaited(self, op: OpRow) -> tuple[_Message, ...]:
        """Return the messages that an operation waits for all together.

        Messages that were already waited for one by one are left out.
        """
        if op.kind == "Sends":
            return tuple(self._sends) if self._batched else ()
        groups = dict.fromkeys(self._groups[x] for x in op.arrivals if x in self._groups)
        found: list[_Message] = []
        for group in groups:
            found += self._in_group[group]
            self._in_group[group] = ()
        return tuple(found)

    def _found(self, counter: _Counter, is_send: bool, messages: Sequence[Sent]) -> list[_Message]:
        found = []
        for peer, what, _ in messages:
            ends = (self._rank, peer) if is_send else (peer, self._rank)
            key = counter.key(is_send, *ends, what)
            own, other = self._posted.get(key), self._posted.get((not is_send, *key[1:]))
            if own and other:
                both = max(own[0], other[0])
                found.append(_Message(*ends, own[1], peer, other[0], both))
        return found


class _Ledger:
    """Pieces of all ranks, whose waits find their causes in the order in which they ended."""

    def __init__(self, entries: Sequence[Sequence[Piece | _Wait]]) -> None:
        self._entries = entries
        self._starts = [[entry.start for entry in some] for some in entries]
        self._causes: dict[tuple[int, int], list[Piece]] = {}
        self._link_free: dict[tuple[int, int], float] = {}

    def pieces(self) -> Iterator[list[Piece]]:
        """Yield the pieces of each rank; those of no duration are left out."""
        for rank in range(len(self._entries)):
            found: list[Piece] = []
            for number in range(len(self._entries[rank])):
                found += self._parts(rank, number)
            first, last = found[0], found[-1]
            yield [x for x in found if x.end > x.start] or [first, last]

    def explain(self) -> Iterator[Transit]:
        """Find the causes of all waits; yield the messages that were waited for alone."""
        waits = sorted(
            (entry.end, rank, number)
            for rank, some in enumerate(self._entries)
            for number, entry in enumerate(some)
            if isinstance(entry, _Wait)
        )
        for _, rank, number in waits:
            wait = self._entries[rank][number]
            assert isinstance(wait, _Wait)
            yield from self._transits(rank, wait)
            self._causes[rank, number] = [*self._caused(wait)]

    def _transits(self, rank: int, wait: _Wait) -> Iterator[Transit]:
        """The message of a wait for one link's arrivals."""
        arriving = [message for message in wait.messages if message.dst == rank]
        links = {(message.src, message.dst) for message in arriving}
        if len(links) != 1:
            return
        (link,) = links
        begun = max(max(x.both_posted for x in arriving), self._link_free.get(link, 0.0))
        num_bytes = sum(message.num_bytes for message in arriving)
        waited = wait.end - max(begun, wait.start)
        self._link_free[link] = wait.end
        if waited > 0 and num_bytes:
            yield Transit(*link, num_bytes, wait.end - begun, waited, wait.backward)

    def _caused(self, wait: _Wait) -> Iterator[Piece]:
        """The pieces of a wait, by the message that was ready last."""
        last = max(wait.messages, key=lambda x: (x.both_posted, x.num_bytes))
        ready = min(max(last.peer_posted, wait.start), wait.end)
        for start, end, cause in self._meanwhile(last.peer, wait.start, ready):
            yield Piece(start, end, WAIT, cause, wait.label, wait.place)
        link = Cause(LINK, last.src, last.dst)
        yield Piece(ready, wait.end, WAIT, link, wait.label, wait.place)

    def _meanwhile(
        self, rank: int, start: float, end: float
    ) -> Iterator[tuple[float, float, Cause]]:
        """Yield the work of a rank between two moments, its own waits by their causes."""
        if end <= start:
            return
        at, number = start, max(bisect_right(self._starts[rank], start) - 1, 0)
        entries = self._entries[rank]
        while number < len(entries) and entries[number].start < end:
            for part in self._parts(rank, number):
                begins, ends = max(part.start, at), min(part.end, end)
                if ends > begins:
                    if begins > at:
                        yield at, begins, Cause(OUTSIDE, rank)
                    yield begins, ends, part.cause or Cause(part.kind, rank)
                    at = ends
            number += 1
        if at < end:
            yield at, end, Cause(OUTSIDE, rank)

    def _parts(self, rank: int, number: int) -> list[Piece]:
        """Return the pieces of time of one entry of a rank.

        A wait whose causes are not known yet counts as time outside the rank. It ended after the
        wait that it is to explain, which happens only if the ranks' clocks are not quite alike.
        """
        entry = self._entries[rank][number]
        if isinstance(entry, Piece):
            return [entry]
        known = self._causes.get((rank, number))
        if known is None:
            cause = Cause(OUTSIDE, rank)
            return [Piece(entry.start, entry.end, WAIT, cause, entry.label, entry.place)]
        return known

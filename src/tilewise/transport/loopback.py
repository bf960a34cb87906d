"""A world in one process: ranks are threads that run one at a time, messages are copies.

On CUDA the scheduler orders only what ranks launch. Each rank has a stream of its own and one for
each of its lanes, and events order them: a copy waits for what sender and receiver had launched
when they posted it, a receiver's stream for the copy, a sender's before it may change what it sent.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import permutations
from threading import get_ident
from typing import NamedTuple, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tilewise.arguments import shown, whole_number
from tilewise.compiler.program import LAUNCHES_IN_FLIGHT
from tilewise.transport.agreement import agreement_of
from tilewise.transport.cooperative_threads import CooperativeScheduler
from tilewise.transport.protocol import Handle, Message, travelling
from tilewise.transport.streams import (
    Moment,
    Stream,
    current_moment,
    follow,
    forked,
    new_stream,
    on_stream,
)

Result = TypeVar("Result")

MOST_THREADS = 1 << 12
"""A thread a rank: more than any test has, and few enough for an operating system."""


def loopback(n: int, fn: "Callable[[int, LoopbackGroup], Result]") -> list[Result]:
    """Run fn(rank, group) on n ranks, each a thread of this process; return the n results.

    Threads are kept: those of the next call are the same ones.

    A rank runs until it has to wait for a message; then the next one that can go on runs, in the
    order in which they became able to. Grad mode and context variables are the caller's. Backward
    passes run in the rank's own thread. If CUDA is in use, every rank has a stream of its own on
    the current device; what the caller has launched comes before, what it launches after.

    Args:
        fn: its group has rank, world_size, bytes_sent and messages_sent (of this rank) and is
            accepted wherever a ProcessGroup is.
    Raises:
        ValueError: if n is less than 1 or above 4096, or fn is no function.
        RuntimeError: if every rank waits, naming ranks and the step and item they wait for.
        BaseException: what the lowest rank raised. The other ranks go on as far as they can and
            are then released from their waits.
    """
    n = whole_number("n", n, most=MOST_THREADS)
    if not callable(fn):
        raise ValueError(f"fn ({shown(fn)}) must be a function of rank and group")
    world = _World(n)
    results: list[Result | None] = [None] * n
    grad_enabled = torch.is_grad_enabled()

    def run(rank: int) -> None:
        # autograd's thread for a device is one for all ranks: a rank that waits in it for another
        # would wait for ever.
        autograd = torch.autograd.set_multithreading_enabled(False)
        with torch.set_grad_enabled(grad_enabled), autograd, fork():
            group = LoopbackGroup(world, rank)
            try:
                results[rank] = fn(rank, group)
            finally:
                group.close()

    with forked() as fork:
        world.scheduler.run(run, world.in_vain)
    return cast(list[Result], results)


class LoopbackGroup:
    """One rank's end of a loopback world: the group that it passes on, and its transport.

    A message is copied into the receiver's tensor when both sides have posted it. An exchange is
    one batch that is over as a whole, as on NCCL.
    """

    node_size: int | None = None
    receives_ahead = 0
    sends_in_flight = LAUNCHES_IN_FLIGHT

    def __init__(self, world: "_World", rank: int) -> None:
        self.rank = rank
        self.world_size = world.size
        self.bytes_sent = 0
        self.messages_sent = 0
        self._world = world
        self._all = _Outstanding(world.scheduler, rank)
        self._num_gathers = 0
        self._thread: int | None = get_ident()
        self._sending: defaultdict[int, deque[_Outstanding]] = defaultdict(deque)
        self.agreement = agreement_of(self)
        world.groups[rank] = self

    def close(self) -> None:
        """The rank has ended, though its thread goes on with others."""
        self._thread = None

    def _check_thread(self) -> None:
        """Raise RuntimeError if another rank's thread uses this group: its wait would never end."""
        if get_ident() != self._thread:
            raise RuntimeError(
                f"the group of rank {self.rank} is used outside of its rank, perhaps by another "
                "one: give every rank the group that loopback passes to it, and objects of its own "
                "that keep a group (a ContextParallel, a model and its config)"
            )

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], lane: int = 0) -> Handle:
        self._check_thread()
        sends = travelling(sends, self.rank, self.world_size)
        recvs = travelling(recvs, self.rank, self.world_size)
        self.bytes_sent += sum(message.tensor.nbytes for message in sends)
        self.messages_sent += len(sends)
        received = _Outstanding(self._world.scheduler, self.rank)
        for message in recvs:
            parcel = _Parcel(message, False, (self._all, received))
            self._world.post(_Route(message.peer, self.rank, lane, self.agreement.tag), parcel)
        for message in sends:
            parcel = _Parcel(message, True, (self._all, received))
            self._world.post(_Route(self.rank, message.peer, lane, self.agreement.tag), parcel)
        if sends:
            self._reap(lane, received)
        return received

    def _reap(self, lane: int, exchange: "_Outstanding") -> None:
        # No deadlock: programs launch in the plan's step order, so the peer of a send of an
        # earlier launch posts its receive without any launch of ours that is yet to come.
        launched = self._sending[lane]
        launched.append(exchange)
        while len(launched) > LAUNCHES_IN_FLIGHT:
            launched.popleft().wait()

    def gather_records(self, record: Tensor) -> list[Tensor]:
        self._check_thread()
        self._num_gathers += 1
        return self._world.gather(self._num_gathers, self.rank, record)

    def finish(self) -> None:
        self._all.wait()
        self._sending.clear()

    def begin_again(self, num_gathers: int) -> None:
        """Drop all messages that are under way."""
        self._all = _Outstanding(self._world.scheduler, self.rank)
        self._sending.clear()
        self._num_gathers = num_gathers


class _Route(NamedTuple):
    src: int
    dst: int
    lane: int
    tag: int  # of the call that a message is of


class _Parcel:
    """One side of a message, until it meets the other."""

    __slots__ = ("is_send", "message", "outstanding", "posted")

    def __init__(
        self, message: Message, is_send: bool, outstanding: "tuple[_Outstanding, ...]"
    ) -> None:
        self.message = message
        self.is_send = is_send
        self.outstanding = outstanding
        self.posted = current_moment(message.tensor.device)
        for messages in outstanding:
            messages.add(self)

    def close(self, copied: Moment | None) -> None:
        for messages in self.outstanding:
            messages.remove(self, copied)

    def __str__(self) -> str:
        _, peer, label = self.message
        return (
            f"until rank {peer} takes {label}" if self.is_send else f"for {label} from rank {peer}"
        )


class _Outstanding:
    """Parcels of one rank that have not met their other side, and the wait for them.

    The host waits until all have, the current stream then for their copies.
    """

    def __init__(self, scheduler: CooperativeScheduler, rank: int) -> None:
        self._scheduler = scheduler
        self._rank = rank
        self._parcels: dict[_Parcel, None] = {}
        self._copies: list[tuple[Moment, Tensor]] = []  # and the tensors, alive till then
        self._blocked = False

    def add(self, parcel: _Parcel) -> None:
        self._parcels[parcel] = None

    def remove(self, parcel: _Parcel, copied: Moment | None) -> None:
        del self._parcels[parcel]
        if copied is not None:
            self._copies.append((copied, parcel.message.tensor))
        if self._blocked and not self._parcels:
            self._blocked = False
            self._scheduler.wake(self._rank)

    def wait(self) -> None:
        if self._parcels:
            self._blocked = True
            try:
                self._scheduler.wait(self._rank, lambda: str(next(iter(self._parcels))))
            finally:
                self._blocked = False
        for copied, _ in self._copies:
            follow(copied)
        self._copies.clear()


class _World:
    """State that the ranks share; this is safe because one runs at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.scheduler = CooperativeScheduler(size)
        self.groups: WeakValueDictionary[int, LoopbackGroup] = WeakValueDictionary()
        self._boxes: dict[_Route, deque[_Parcel]] = {}
        self._boards: dict[int, dict[int, Tensor]] = {}
        self._streams: dict[tuple[int, int, torch.device], Stream | None] = {}

    def post(self, route: _Route, parcel: _Parcel) -> None:
        """Deliver if the other side is there, else leave the parcel in the route's box."""
        box = self._boxes.setdefault(route, deque())
        if not box or box[0].is_send == parcel.is_send:
            box.append(parcel)
            return
        other = box.popleft()
        send, receive = (parcel, other) if parcel.is_send else (other, parcel)
        source, target = send.message.tensor, receive.message.tensor
        if source.nbytes != target.nbytes:
            raise RuntimeError(
                f"rank {route.src} sends {source.nbytes} bytes ({send.message.label}), but rank "
                f"{route.dst} expects {target.nbytes} ({receive.message.label})"
            )
        with on_stream(self._stream(route, target.device)):
            follow(send.posted)
            follow(receive.posted)
            target.view(-1).copy_(source.view(-1), non_blocking=True)
            copied = current_moment(target.device)
        send.close(copied)
        receive.close(copied)

    def _stream(self, route: _Route, device: torch.device) -> Stream | None:
        """Return the stream on which the receiver's messages of this lane are copied; None on the
        CPU.
        """
        key = route.dst, route.lane, device
        if key not in self._streams:
            self._streams[key] = new_stream(device)
        return self._streams[key]

    def gather(self, number: int, rank: int, record: Tensor) -> list[Tensor]:
        board = self._boards.setdefault(number, {})
        board[rank] = record
        if len(board) < self.size:
            self.scheduler.wait(rank, lambda: f"for the agreement record of {self._missing(board)}")
        else:
            del self._boards[number]
            for other in board:
                if other != rank:
                    self.scheduler.wake(other)
        return [board[other] for other in range(self.size)]

    def in_vain(self) -> Exception | None:
        """Return the error that all ranks, which wait in vain, are to raise, if calls differ or one
        was refused.

        They may go on with other calls then: what is under way is forgotten.
        """
        groups = dict(self.groups)
        states = {rank: group.agreement.state() for rank, group in groups.items()}
        for rank, peer in permutations(sorted(groups), 2):
            found = groups[rank].agreement.conflict(rank, peer, states[peer])
            if found:
                self._boxes.clear()
                self._boards.clear()
                gathers = max(group._num_gathers for group in groups.values())
                number = 1 + max(state.number for state in states.values())
                for group in groups.values():
                    group.begin_again(gathers)
                    group.agreement.begin_again(number, found)
                return ValueError(found)
        return None

    def _missing(self, board: dict[int, Tensor]) -> str:
        return f"rank {next(rank for rank in range(self.size) if rank not in board)}"

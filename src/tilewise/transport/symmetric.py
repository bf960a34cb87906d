"""Messages inside a node as pushes into the receiver's memory, by copy engines: no multiprocessors.

Unproven: it has not run on a GPU. It is used where it is asked for by name.

A receiver's host tells the sender's, over gloo, where a message is to be put: in its workspace, if
that lies in symmetric memory, else in staging memory, from where it is copied. On the devices two
signals order what one launch sends from one rank to another. *Room*: the receiver's stream has done
with what lay there. *Data*: the sender's has put all of it. Both count messages, and only grow, so
none is ever set back. The host waits for other hosts, but for no device.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from enum import IntEnum
from socket import gethostname

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.compiler.program import LAUNCHES_IN_FLIGHT
from tilewise.transport.agreement import agree
from tilewise.transport.process_group import DistTransport
from tilewise.transport.protocol import Handle, Message, Transport, travelling
from tilewise.transport.streams import (
    Moment,
    Stream,
    current_moment,
    follow,
    is_capturing,
    new_stream,
    on_stream,
)
from tilewise.transport.symmetric_memory import SymmetricHeap, SymmetricMemory, lacking

HEAP_BYTES = 2**30
"""Symmetric memory of each rank, unless it is told."""


class Signal(IntEnum):
    """What a word that a peer writes counts: rooms it has for us, messages it has put here."""

    ROOM = 0
    DATA = 1


class _Pushing:
    """What one launch sends and receives, waited for as a whole.

    Args:
        recvs: messages, and the symmetric memory that each comes to: its own tensor or staging.
    """

    def __init__(
        self, transport: SymmetricTransport, recvs: Sequence[tuple[Message, Tensor]]
    ) -> None:
        self._transport, self._recvs = transport, recvs
        self._counts = {x.peer: transport.offered[x.peer] for x, _ in recvs}
        self.pushed: Moment | None = None
        self.sources: Sequence[Message] = ()  # kept alive until waited for
        self.waited = False

    def wait(self) -> None:
        if self.waited:
            return
        self.waited = True
        for peer, count in self._counts.items():
            self._transport.memory.wait_signal(peer, Signal.DATA, count)
        for message, room in self._recvs:
            if room is not message.tensor:
                message.tensor.view(-1).copy_(room)
                self._transport.staging.give(room)
        self.leave()
        self._recvs = ()

    def leave(self) -> None:
        """Let the current stream wait for what was sent."""
        follow(self.pushed)
        self.pushed, self.sources = None, ()


class SymmetricTransport:
    """The transport of ranks that share a node and can write to each other's memory.

    It runs the program that NCCL runs, with the same buffers. Graphs cannot capture it: at every
    replay the counts of messages would be those of the capture.

    Args:
        hosts: the same ranks' transport for tensors of the CPU, by which they agree.
        memory: symmetric memory of the same ranks.
    """

    receives_ahead = 0
    sends_in_flight = LAUNCHES_IN_FLIGHT
    node_size: int | None = None
    takes_teams = False

    def __init__(self, hosts: Transport, memory: SymmetricMemory) -> None:
        self.rank, self.world_size = hosts.rank, hosts.world_size
        self.bytes_sent = 0
        self.messages_sent = 0
        self.memory, self.hosts = memory, hosts
        self._heap = SymmetricHeap(memory)
        self.staging = _Staging(self._heap)
        self.offered: Counter[int] = Counter()  # by peer: messages that it was told a place for
        self._put: Counter[int] = Counter()  # by peer: messages that were pushed to it
        self._stream: Stream | None = None  # on which all is pushed
        self._under_way: deque[_Pushing] = deque()

    def __repr__(self) -> str:
        return (
            f"SymmetricTransport({self.world_size} ranks of one node, {self._heap.num_bytes} bytes "
            "of symmetric memory each)"
        )

    @property
    def process_group(self) -> object:
        """Whose agreement is that of this transport."""
        return getattr(self.hosts, "process_group", self.hosts)

    def gather_records(self, record: Tensor) -> list[Tensor]:
        return self.hosts.gather_records(record)

    def workspace(self, num_bytes: int) -> Tensor | None:
        """Memory that messages can be pushed to; None: too little is left, other memory will do.

        Half of all is left for staging.
        """
        if any(not one.waited for one in self._under_way):  # a pass that failed may be written to
            return None
        return self._heap.take(num_bytes, spare=self._heap.num_bytes // 2)

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], lane: int = 0) -> Handle:
        sends = travelling(sends, self.rank, self.world_size)
        recvs = travelling(recvs, self.rank, self.world_size)
        device = self.memory.own.device
        for tensor, _, label in (*sends, *recvs):
            if tensor.device != device:
                raise ValueError(
                    f"{label}: a tensor on {tensor.device} cannot be pushed; the symmetric memory "
                    f"of this rank is on {device}: move the tensors or set the device before"
                )
        if is_capturing(device):
            raise RuntimeError(
                "symmetric memory cannot be captured in a graph, whose replays would count no "
                "messages; pass the process group itself, for NCCL"
            )
        self.offered.update(message.peer for message in recvs)
        rooms = [(message, self.staging.room(message)) for message in recvs]
        launched = _Pushing(self, rooms)
        for peer in dict.fromkeys(message.peer for message in recvs):
            self.memory.write_signal(peer, Signal.ROOM, self.offered[peer])
        places = self._told(sends, rooms)
        if sends:
            self._push(launched, sends, places)
        self.bytes_sent += sum(message.tensor.nbytes for message in sends)
        self.messages_sent += len(sends)
        self._under_way.append(launched)
        leaving = [one for one in self._under_way if one.sources]
        for one in leaving[: -LAUNCHES_IN_FLIGHT or None]:
            one.leave()
        while self._under_way and self._under_way[0].waited:
            self._under_way.popleft()
        return launched

    def _told(
        self, sends: Sequence[Message], rooms: Sequence[tuple[Message, Tensor]]
    ) -> dict[int, Tensor]:
        """By peer [messages to it, 2]: place and number of bytes of each, as its host tells."""
        own: defaultdict[int, list[tuple[int | None, int]]] = defaultdict(list)
        for message, room in rooms:
            own[message.peer].append((self._heap.place(room), room.nbytes))
        counts = Counter(message.peer for message in sends)
        told = {peer: torch.tensor(places) for peer, places in own.items()}
        heard = {peer: torch.empty(n, 2, dtype=torch.int64) for peer, n in counts.items()}
        outgoing, incoming = (
            [Message(x.view(torch.uint8), peer, "places of messages") for peer, x in one.items()]
            for one in (told, heard)
        )
        self.hosts.exchange(outgoing, incoming).wait()
        return heard

    def _push(
        self, launched: _Pushing, sends: Sequence[Message], places: dict[int, Tensor]
    ) -> None:
        device = self.memory.own.device
        self._stream, ready = self._stream or new_stream(device), current_moment(device)
        with on_stream(self._stream):
            follow(ready)
            # each rank begins with another peer
            for peer in sorted(places, key=lambda peer: (peer - self.rank) % self.world_size):
                self._put[peer] += len(places[peer])
                self.memory.wait_signal(peer, Signal.ROOM, self._put[peer])
                mine = [message for message in sends if message.peer == peer]
                for message, (place, size) in zip(mine, places[peer].tolist(), strict=True):
                    if size != message.tensor.nbytes:
                        raise RuntimeError(
                            f"rank {self.rank} sends {message.tensor.nbytes} bytes "
                            f"({message.label}), but rank {peer} expects {size}"
                        )
                    target = self.memory.of(peer)[place : place + size]
                    target.copy_(message.tensor.view(-1), non_blocking=True)
                self.memory.write_signal(peer, Signal.DATA, self._put[peer])
            launched.pushed, launched.sources = current_moment(device), sends

    def finish(self) -> None:
        while self._under_way:
            self._under_way.popleft().wait()


class _Staging:
    """Symmetric memory for messages to other memory, in pieces that it keeps for later ones."""

    def __init__(self, heap: SymmetricHeap) -> None:
        self._heap = heap
        self._free: defaultdict[int, list[tuple[Tensor, Moment | None]]] = defaultdict(list)

    def room(self, message: Message) -> Tensor:
        """Where a message can be pushed: its tensor or as many bytes, the current stream's."""
        size = message.tensor.nbytes
        if self._heap.place(message.tensor) is not None:
            return message.tensor
        if self._free[size]:
            piece, moment = self._free[size].pop()
            follow(moment)
            return piece
        piece = self._heap.take(size)
        if piece is None:
            self._free.clear()  # of other sizes
            piece = self._heap.take(size)
        if piece is None:
            raise RuntimeError(
                f"{message.label}: to receive it {size} bytes of symmetric memory are needed, and "
                f"{self._heap.num_free} of {self._heap.num_bytes} are free; give more heap_bytes "
                "on every rank"
            )
        return piece

    def give(self, piece: Tensor) -> None:
        """The current stream has read it."""
        self._free[len(piece)].append((piece, current_moment(piece.device)))


def symmetric_transport(
    group: dist.ProcessGroup, heap_bytes: int = HEAP_BYTES
) -> SymmetricTransport:
    """A group's transport by symmetric memory, made by all of its ranks together.

    Args:
        heap_bytes: of symmetric memory on each rank: workspaces get up to half, staging the rest.
    Raises:
        ValueError: the same on every rank, if one of them cannot have symmetric memory, ranks are
            on several nodes, or they pass different heap_bytes.
    """
    hosts = DistTransport(group, cpu_only=True)
    error = lacking() or (None if heap_bytes > 0 else f"heap_bytes ({heap_bytes}) must be positive")
    fields = {"the node of symmetric memory": gethostname(), "heap_bytes": str(heap_bytes)}
    agree(hosts, fields, error and f"no symmetric memory: {error}")
    return SymmetricTransport(hosts, SymmetricMemory(group, heap_bytes))

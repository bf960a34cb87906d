"""Messages over torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors."""

import os
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from hashlib import blake2b
from time import sleep

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.compiler.program import LAUNCHES_IN_FLIGHT
from tilewise.transport.lost_rank import PATIENCE_SECONDS, LostRankError, failure_of
from tilewise.transport.nccl_batches import nccl_batches, post_batch
from tilewise.transport.nccl_groups import agreed_node_size, lane_group, records_group, team_group
from tilewise.transport.nodes import local_world_size, node_size_of
from tilewise.transport.protocol import Handle, Message, TeamSizes, shares_message, travelling

# Tags of our own, so that a caller's point-to-point messages in the group never match ours.
_RECORD_TAG = 7_416_000
_LANE_TAG = _RECORD_TAG + 1
_DIGEST_BYTES = 16
# As LAUNCHES_IN_FLIGHT, on gloo: it tells of a finished send only to a wait, which blocks the host.
# More than that one: the buffers of its passes are never bound ahead.
_UNWAITED = 2
_BRANCHES = 4
_DIGEST, _VERDICT = "agreement digest", "agreement verdict"


class _Posted:
    """One torch.distributed Work, waited for at most once (on gloo a second wait blocks)."""

    def __init__(
        self, work: dist.Work, messages: Sequence[Message], verb: str, group: dist.ProcessGroup
    ) -> None:
        self._work: dist.Work | None = work
        self._group = group
        self._messages: Sequence[Message] = messages  # keeps the tensors alive
        self._verb = verb

    @property
    def waited(self) -> bool:
        return self._work is None

    def wait(self, seconds: float = 0) -> None:
        """seconds: at most; 0: the group's timeout. Whom it fails for, it fails for all."""
        work, self._work = self._work, None
        if work is None:
            return
        try:
            work.wait(*([timedelta(seconds=seconds)] if seconds else []))
        except RuntimeError as error:
            raise failure_of(self._messages, self._verb, error, self._group) from error
        self._messages = ()


class _Shared:
    """A posted operation whose one buffer holds several messages' bytes, one after the other."""

    def __init__(self, posted: _Posted, arrived: Tensor, messages: Sequence[Message]) -> None:
        self._posted, self._arrived, self._messages = posted, arrived, messages

    @property
    def waited(self) -> bool:
        return self._posted.waited

    def wait(self, seconds: float = 0) -> None:
        if self.waited:
            return
        self._posted.wait(seconds)
        pieces = self._arrived.split([message.tensor.nbytes for message in self._messages])
        for message, piece in zip(self._messages, pieces, strict=True):
            message.tensor.view(-1).copy_(piece)
        self._messages = ()


class _Exchange:
    def __init__(self, receives: Sequence[_Posted | _Shared]) -> None:
        self._receives = receives

    def wait(self) -> None:
        for receive in self._receives:
            receive.wait()


class DistTransport:
    """The transport of one ProcessGroup; each object counts its own traffic.

    Receives are posted before sends: gloo's ready notification otherwise queues behind bulk data.
    On gloo a small exchange of a whole team is one all-to-all, which takes half the processor time
    of its messages (docs/execution.md); all else goes point to point, without packing.

    On an NCCL group the first object is made by all ranks together. It makes a communicator of our
    own for each lane, at high priority, and warms it up, without which a batch that involves only
    some ranks hangs; and a gloo group for the agreement records. torch keeps them under the group's
    name, so later objects find them. The caller's communicator is left alone.

    Args:
        group: a group that this process is in.
        node_size: neighbouring ranks of the group that share a node: messages between nodes get a
            lane of their own. None: on NCCL as torchrun says, if all
            nodes hold equally many neighbours; else one lane.

    Attributes:
        agreement_seconds: how long an agreement waits for a rank; 0: the group's timeout.
    """

    def __init__(self, group: dist.ProcessGroup, *, node_size: int | None = None) -> None:
        self.rank, self.world_size = group.rank(), group.size()
        self.bytes_sent = 0
        self.messages_sent = 0
        self.agreement_number: int | None = None  # of the last one, the same on all ranks
        self.agreement_seconds = 0.0
        config = str(dist.get_backend_config(group))
        self._backends = dict(part.split(":") for part in config.split(","))
        batched = self._backends.get("cuda") == "nccl"
        self.receives_ahead = 0 if batched else 1
        self.takes_teams = not batched
        self._records = group
        self._lanes = [group]
        self.node_size = node_size
        if batched and self.world_size > 1:
            if self._backends.get("cpu") != "gloo":
                self._records = records_group(group)
            if node_size is None:
                node_size = node_size_of(dist.get_process_group_ranks(group), local_world_size())
            self._lanes = [lane_group(group, 0)]
            self.node_size = agreed_node_size(group, self._lanes[0], node_size)
            if self.node_size:
                self._lanes.append(lane_group(group, 1))
        self._receiving: deque[_Posted | _Shared] = deque()
        self._sending: defaultdict[int, deque[Sequence[_Posted]]] = defaultdict(deque)

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], lane: int = 0) -> Handle:
        sends = travelling(sends, self.rank, self.world_size)
        recvs = travelling(recvs, self.rank, self.world_size)
        if not sends and not recvs:
            return _Exchange(())
        backend = self._backend([*sends, *recvs])
        self.bytes_sent += sum(message.tensor.nbytes for message in sends)
        if backend == "nccl":
            self.messages_sent += len(sends)
            sending = self._post_batches(sends, recvs, lane)
            receives = sending if recvs else []
        else:
            receives, sending = self._post_each(sends, recvs, self._lanes[0], _LANE_TAG + lane)
            self.messages_sent += len(sending)
        while self._receiving and self._receiving[0].waited:
            self._receiving.popleft()
        self._receiving.extend(receives)
        if sends:
            self._sending[lane].append(sending)
        self._reap(lane, LAUNCHES_IN_FLIGHT if backend == "nccl" else _UNWAITED)
        return _Exchange(receives)

    def exchange_all(
        self, leaving: Tensor, arriving: Tensor, sizes: TeamSizes, team: range, label: object
    ) -> Handle:
        messages = [
            Message(leaving if for_peer else arriving, peer, label)
            for peer, for_peer, from_peer in zip(team, *sizes, strict=True)
            if peer != self.rank and (for_peer or from_peer)
        ]
        self._backend([Message(leaving, self.rank, label)])
        self.bytes_sent += sum(sizes[0]) - sizes[0][self.rank - team.start]
        self.messages_sent += sum(
            size > 0 and peer != self.rank for peer, size in zip(team, sizes[0], strict=True)
        )
        group = team_group(self._lanes[0], team)
        work = group.alltoall_base(arriving.view(-1), leaving.view(-1), sizes[1], sizes[0])
        received = _Posted(work, messages, "exchanging with", self._lanes[0])
        self._receiving.append(received)
        return _Exchange([received])

    def gather_records(self, record: Tensor) -> list[Tensor]:
        if self._same_everywhere(record):
            return [record] * self.world_size
        # Point to point: gloo's all_gather is a ring, with a latency that grows with world size.
        records = [torch.empty_like(record) for _ in range(self.world_size)]
        records[self.rank] = record
        others = [peer for peer in range(self.world_size) if peer != self.rank]
        recvs = [Message(records[peer], peer, "agreement record") for peer in others]
        sends = [Message(record, peer, "agreement record") for peer in others]
        receives, sending = self._post_each(sends, recvs, self._records, _RECORD_TAG)
        for posted in (*receives, *sending):
            posted.wait()
        return records

    def _same_everywhere(self, record: Tensor) -> bool:
        """Whether all ranks have the same record; all of them get the same answer.

        Digests go up a tree, with whether all below were the same; the verdict comes down: few
        messages, 2 (n - 1), since where ranks share cores each one costs all of them. The verdict
        also numbers the agreement, or says which rank is lost.
        """
        digest = blake2b(record.numpy().tobytes(), digest_size=_DIGEST_BYTES).digest()
        first = self.rank * _BRANCHES + 1
        children = range(first, min(first + _BRANCHES, self.world_size))
        parent = (self.rank - 1) // _BRANCHES
        heard = [torch.empty(_DIGEST_BYTES + 1, dtype=torch.uint8) for _ in children]
        verdict = torch.zeros(3, dtype=torch.int64)  # same, the agreement's number, the rank lost
        coming = [Message(x, peer, _DIGEST) for x, peer in zip(heard, children, strict=True)]
        above = [Message(verdict, parent, _VERDICT)] if self.rank else []
        receives, _ = self._post_each((), [*coming, *above], self._records, _RECORD_TAG)
        failure = None
        for receive in receives[: len(coming)]:
            try:
                receive.wait(self.agreement_seconds)
            except RuntimeError as error:
                failure = failure or error
        same = failure is None and all(x.numpy().tobytes() == digest + b"\1" for x in heard)
        sending: list[_Posted] = []
        if self.rank and failure is None:
            told = torch.frombuffer(bytearray(digest + bytes([same])), dtype=torch.uint8)
            up = [Message(told, parent, _DIGEST)]
            sending += self._post_each(up, (), self._records, _RECORD_TAG)[1]
            receives[-1].wait(self.agreement_seconds)
        else:
            verdict[:2] = torch.tensor([same, int.from_bytes(os.urandom(4))])
            verdict[2] = failure.rank if isinstance(failure, LostRankError) else -1
        for child in children:
            with suppress(RuntimeError) if failure else nullcontext():
                down = [Message(verdict, child, _VERDICT)]
                sending += self._post_each(down, (), self._records, _RECORD_TAG)[1]
        if failure is not None or verdict[2] >= 0:
            for posted in sending:  # before this process ends
                with suppress(RuntimeError):
                    posted.wait()
            sleep(PATIENCE_SECONDS)  # what a process that ends has not delivered is lost
            raise failure or LostRankError(f"{_VERDICT}: rank {verdict[2]} failed", int(verdict[2]))
        self._sending[0].append(sending)  # waited for when later messages are
        self.agreement_number = int(verdict[1])
        return bool(verdict[0])

    def finish(self) -> None:
        while self._receiving:
            self._receiving.popleft().wait()
        for lane in tuple(self._sending):
            self._reap(lane, 0)

    def _backend(self, messages: Sequence[Message]) -> str:
        devices = sorted({message.tensor.device.type for message in messages})
        names = [self._backends.get(device, "none") for device in devices]
        if len(devices) > 1 or (devices[0], names[0]) in {("cuda", "gloo"), ("cpu", "nccl")}:
            raise ValueError(
                f"tensors on {' and '.join(devices)} cannot travel over {' and '.join(names)}; "
                "gloo carries CPU tensors, NCCL CUDA tensors: move the tensors or pass a group "
                "with the backend of their device"
            )
        if names[0] == "none":
            raise ValueError(
                f"the group has no backend for {devices[0]} tensors, it has {self._backends}"
            )
        return names[0]

    def _post_each(
        self, sends: Sequence[Message], recvs: Sequence[Message], group: dist.ProcessGroup, tag: int
    ) -> tuple[list[_Posted | _Shared], list[_Posted]]:
        receives: list[_Posted | _Shared] = []
        for mine in _shared(recvs):
            whole = mine[0]
            if len(mine) > 1:
                size = sum(message.tensor.nbytes for message in mine)
                whole = whole._replace(tensor=whole.tensor.new_empty(size))
            posted = _post(group.recv, whole, "receiving from", group, tag)
            receives.append(_Shared(posted, whole.tensor, mine) if len(mine) > 1 else posted)
        sending = []
        for mine in _shared(sends):
            whole = mine[0]
            if len(mine) > 1:
                whole = whole._replace(tensor=torch.cat([one.tensor.view(-1) for one in mine]))
            sending.append(_post(group.send, whole, "sending to", group, tag))
        return receives, sending

    def _post_batches(
        self, sends: Sequence[Message], recvs: Sequence[Message], lane: int
    ) -> list[_Posted]:
        group = self._lanes[lane % len(self._lanes)]
        posted = []
        for batch in nccl_batches(sends, recvs, self.rank, self.world_size):
            messages = [message for _, message in batch]
            posted.append(_Posted(post_batch(group, batch), messages, "exchanging with", group))
        return posted

    def _reap(self, lane: int, keep: int) -> None:
        # No deadlock: programs launch in the plan's step order, so the peer of a send of an
        # earlier launch posts its receive without any launch of ours that is yet to come.
        sending = self._sending[lane]
        while len(sending) > keep:
            for posted in sending.popleft():
                posted.wait()


def _shared(messages: Sequence[Message]) -> Sequence[Sequence[Message]]:
    """Messages by what is posted as one: small ones to or from one rank."""
    if len(messages) < 2:
        return [messages] if messages else ()
    by_peer: dict[int, list[Message]] = {}
    for message in messages:
        by_peer.setdefault(message.peer, []).append(message)
    found: list[Sequence[Message]] = []
    for mine in by_peer.values():
        if shares_message([message.tensor.nbytes for message in mine]):
            found.append(mine)
        else:
            found += [(message,) for message in mine]
    return found


def _post(
    start: Callable[[list[Tensor], int, int], dist.Work],
    message: Message,
    verb: str,
    group: dist.ProcessGroup,
    tag: int,
) -> _Posted:
    """Start one send or receive; gloo refuses it at once if the other end is known to be lost."""
    try:
        work = start([message.tensor], message.peer, tag)
    except RuntimeError as error:
        raise failure_of((message,), verb, error, group) from error
    return _Posted(work, (message,), verb, group)

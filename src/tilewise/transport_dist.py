"""Messages over torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors.

It stands alone because it holds every workaround for the backends, and nothing else does.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor

# Private in torch, but where torch itself keeps groups by name, until the world is destroyed.
from torch._C._distributed_c10d import _register_process_group, _resolve_process_group

from tilewise.messages import Handle, Message, travelling
from tilewise.program import CollectiveKind

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

# Tags of our own, so that a caller's point-to-point messages in the group never match ours.
_RECORD_TAG = 7_416_000
_LANE_TAG = _RECORD_TAG + 1
_DIGEST_BYTES = 16
# Sends of this many launches of a lane stay unwaited: gloo tells of a finished send only to a
# wait. By lane, since a slow link's sends last for many launches of a fast one.
_LAUNCHES_IN_FLIGHT = 2
# An NCCL group of operations fails above 256; half of them are sends.
_NCCL_PAIRS = 128


class _Posted:
    """One torch.distributed Work, waited for at most once (on gloo a second wait blocks)."""

    def __init__(self, work: dist.Work, messages: Sequence[Message], verb: str) -> None:
        self._work: dist.Work | None = work
        self._messages: Sequence[Message] = messages  # keeps the tensors alive
        self._verb = verb

    @property
    def waited(self) -> bool:
        return self._work is None

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return
        try:
            work.wait()
        except RuntimeError as error:
            first = self._messages[0]
            raise RuntimeError(
                f"{first.label}: {self._verb} rank {first.peer} failed: {error}"
            ) from error
        self._messages = ()


class _Exchange:
    def __init__(self, receives: Sequence[_Posted]) -> None:
        self._receives = receives

    def wait(self) -> None:
        for receive in self._receives:
            receive.wait()


class DistTransport:
    """The transport of one ProcessGroup; each object counts its own traffic.

    Receives are posted before sends: gloo's ready notification otherwise queues behind bulk data.
    Collectives are sent point to point: between gloo ranks on one host that is 2 to 6 times as
    fast as all_to_all_single and all_gather, needs no packing, and gloo's reduce_scatter sends
    twice the bytes.

    On an NCCL group the first object is made by all ranks together: it warms the communicator up,
    without which a batch that involves only some ranks hangs, and creates a gloo group for the
    agreement records. torch keeps both under the group's name, so later objects find them.

    Args:
        group: a group that this process is in.
        num_lanes: NCCL communicators, the same number on every rank; a lane beyond them shares
            one. gloo needs one group for all lanes.
    """

    def __init__(self, group: dist.ProcessGroup, *, num_lanes: int = 1) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = group.size()
        self.bytes_sent = 0
        self.messages_sent = 0
        config = str(dist.get_backend_config(group))
        self._backends = dict(part.split(":") for part in config.split(","))
        batched = self._backends.get("cuda") == "nccl"
        self.receives_ahead = 0 if batched else 1
        self._records = group
        self._lanes = [group]
        if batched and self.world_size > 1:
            self._lanes += [_companion(group, f"lane{i}", "nccl") for i in range(1, num_lanes)]
            if self._backends.get("cpu") != "gloo":
                self._records = _companion(group, "records", "gloo")
            for lane in self._lanes:
                _warm_up(lane)
        self._receiving: deque[_Posted] = deque()
        self._sending: defaultdict[int, deque[Sequence[_Posted]]] = defaultdict(deque)

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], lane: int = 0) -> Handle:
        sends = travelling(sends, self.rank, self.world_size)
        recvs = travelling(recvs, self.rank, self.world_size)
        if not sends and not recvs:
            return _Exchange(())
        backend = self._backend([*sends, *recvs])
        self.bytes_sent += sum(message.tensor.nbytes for message in sends)
        self.messages_sent += len(sends)
        if backend == "nccl":
            sending = self._post_batches(sends, recvs, lane)
            receives = sending if recvs else []
        else:
            receives, sending = self._post_each(sends, recvs, self._lanes[0], _LANE_TAG + lane)
        while self._receiving and self._receiving[0].waited:
            self._receiving.popleft()
        self._receiving.extend(receives)
        if sends:
            self._sending[lane].append(sending)
        self._reap(lane, _LAUNCHES_IN_FLIGHT)
        return _Exchange(receives)

    def collective(
        self,
        kind: CollectiveKind,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        lane: int = 0,
    ) -> Handle:
        return self.exchange(sends, recvs, lane)

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

        Digests go round by dissemination: in round i to rank + 2^i, with whether all heard of so
        far were the same. After ceil(log2 n) rounds a rank has heard of all, each compared with
        one already known to be the same. Whole records to everybody would be more bytes than the
        tensors of a large world, and n^2 messages.
        """
        digest = blake2b(record.numpy().tobytes(), digest_size=_DIGEST_BYTES).digest()
        hops = [1 << i for i in range((self.world_size - 1).bit_length())]
        heard = [torch.empty(_DIGEST_BYTES + 1, dtype=torch.uint8) for _ in hops]
        label = "agreement digest"
        sources = [(self.rank - hop) % self.world_size for hop in hops]
        recvs = [Message(room, src, label) for room, src in zip(heard, sources, strict=True)]
        receives, _ = self._post_each((), recvs, self._records, _RECORD_TAG)
        same, sending = True, []
        for hop, room, receive in zip(hops, heard, receives, strict=True):
            told = torch.frombuffer(bytearray(digest + bytes([same])), dtype=torch.uint8)
            message = Message(told, (self.rank + hop) % self.world_size, label)
            sending += self._post_each((message,), (), self._records, _RECORD_TAG)[1]
            receive.wait()
            same = same and room.numpy().tobytes() == digest + b"\1"
        for posted in sending:
            posted.wait()
        return same

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
    ) -> tuple[list[_Posted], list[_Posted]]:
        receives = []
        for message in recvs:
            work = dist.irecv(message.tensor, group=group, tag=tag, group_src=message.peer)
            receives.append(_Posted(_started(work), (message,), "receiving from"))
        sending = []
        for message in sends:
            work = dist.isend(message.tensor, group=group, tag=tag, group_dst=message.peer)
            sending.append(_Posted(_started(work), (message,), "sending to"))
        return receives, sending

    def _post_batches(
        self, sends: Sequence[Message], recvs: Sequence[Message], lane: int
    ) -> list[_Posted]:
        group = self._lanes[lane % len(self._lanes)]
        posted = []
        for batch in nccl_batches(sends, recvs, self.rank, self.world_size):
            operations = [
                dist.P2POp(
                    dist.isend if is_send else dist.irecv,
                    message.tensor,
                    group=group,
                    group_peer=message.peer,
                )
                for is_send, message in batch
            ]
            messages = [message for _, message in batch]
            posted += [
                _Posted(_started(work), messages, "exchanging with")
                for work in dist.batch_isend_irecv(operations)
            ]
        return posted

    def _reap(self, lane: int, keep: int) -> None:
        # No deadlock: programs launch in the plan's step order, so the peer of a send of an
        # earlier launch posts its receive without any launch of ours that is yet to come.
        sending = self._sending[lane]
        while len(sending) > keep:
            for posted in sending.popleft():
                posted.wait()


def nccl_batches(
    sends: Sequence[Message], recvs: Sequence[Message], rank: int, world_size: int
) -> list[list[tuple[bool, Message]]]:
    """Split an exchange into batches that NCCL takes, the same way on both ends of each message.

    The i-th message from rank a to rank b has the number i world_size + (b - a) mod world_size.
    Both ends know it, a rank has at most one send and one receive of a number, and all ranks
    run the batches in the order of their numbers, so no batch waits for a later one.

    Returns:
        Batches of at most 256 (is_send, message).
    """
    batches: dict[int, list[tuple[bool, Message]]] = {}
    for is_send, messages in ((True, sends), (False, recvs)):
        seen: Counter[int] = Counter()
        for message in messages:
            distance = (message.peer - rank if is_send else rank - message.peer) % world_size
            number = seen[message.peer] * world_size + distance
            seen[message.peer] += 1
            batches.setdefault(number // _NCCL_PAIRS, []).append((is_send, message))
    return [batches[number] for number in sorted(batches)]


def _companion(group: dist.ProcessGroup, name: str, backend: str) -> dist.ProcessGroup:
    """Return a second group of the same ranks, made by all of them together at first use."""
    alias = _alias(group, name)
    known = _registered(alias)
    if known is not None:
        return known
    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group(ranks, backend=backend, use_local_synchronization=True, group_desc=alias)
    assert isinstance(made, dist.ProcessGroup), "this rank is one of the group's"
    _register_process_group(alias, made)
    return made


def _warm_up(group: dist.ProcessGroup) -> None:
    alias = _alias(group, "warm")
    if _registered(alias) is None:
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
        _register_process_group(alias, group)


def _alias(group: dist.ProcessGroup, name: str) -> "GroupName":
    return cast("GroupName", f"tilewise/{name}/{group.group_name}")


def _registered(alias: "GroupName") -> dist.ProcessGroup | None:
    try:
        return _resolve_process_group(alias)
    except RuntimeError:
        return None


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "torch returns None only to ranks outside the group"
    return work

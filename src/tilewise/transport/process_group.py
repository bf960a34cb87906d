"""Messages over torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors."""

from collections import defaultdict, deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.compiler.facts import DEFAULT_TRAITS, CodeTraits, shares_message
from tilewise.compiler.program import LAUNCHES_IN_FLIGHT
from tilewise.plan.kept import KeptWith, RecentValues
from tilewise.transport.agreement import AGREEMENTS, TAG_BITS, Agreement
from tilewise.transport.marked_exchange import (
    EXCHANGES_KEPT,
    MARKED_BYTES,
    MARKED_BYTES_ON_A_HOST,
    MarkedBuffers,
    MarkedExchange,
)
from tilewise.transport.nccl_batches import nccl_batches, post_batch
from tilewise.transport.nccl_groups import agreed_node_size, gloo_group, lane_group
from tilewise.transport.nodes import host_digest, local_world_size, node_size_of
from tilewise.transport.posted import (
    SENDING,
    AllPosted,
    PairwiseExchange,
    Posted,
    WatchedGroup,
    wait_for,
)
from tilewise.transport.protocol import Handle, Message, TeamMessages, travelling
from tilewise.transport.watch import WATCHES, Watch

# Half of all tags are our own, so that a caller's messages in the group never match ours. Of such
# a tag TAG_BITS say which call a message is of, and the last ones its lane.
_OWN_TAGS, _LANE_BITS = 2**30, 30 - TAG_BITS
# As LAUNCHES_IN_FLIGHT, on gloo: it tells of a finished send only to a wait, which blocks the host,
# so one more launch is left to itself.
_UNWAITED = 2
# In rounds go messages of which the smallest is at least this share of the largest, and any up to a
# size. A round ends with its largest message: who is done with a small one meets others' next.
EVEN = 0.75
EVEN_IF_SMALL = 1 << 18
# Of exchanges of teams that go pairwise: their sends lie between those of other launches.
_PAIRWISE_LANE = 2
_RECORD_DIGEST_BYTES = 16


GLOO_TRAITS = CodeTraits(receives_ahead=1, takes_teams=True, sends_in_flight=_UNWAITED)
"""Facts of gloo on which the codes of passes depend; NCCL's, but for nodes, are DEFAULT_TRAITS."""


class _GroupFacts(NamedTuple):
    """Facts of a group that all its transports share.

    Attributes:
        backends: names, for each type of device.
        carried: those that carry tensors of the device.
        buffers: of marked exchanges.
        on_one_host: whether a team is, of those that have asked.
    """

    backends: dict[str, str]
    carried: dict[str, str]
    agreement: Agreement
    watch: Watch
    buffers: MarkedBuffers
    on_one_host: dict[range, bool]


def _facts_of(group: dist.ProcessGroup) -> _GroupFacts:
    backends = _backends_of(group)
    wrong = {("cuda", "gloo"), ("cpu", "nccl")}
    agreement = AGREEMENTS.of(group)
    watch = WATCHES.of(group, agreement)
    agreement.refusal = watch.refusal
    return _GroupFacts(
        backends,
        dict(backends.items() - wrong),
        agreement,
        watch,
        RecentValues(EXCHANGES_KEPT),
        {},
    )


def _backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    return dict(part.split(":") for part in str(dist.get_backend_config(group)).split(","))


_FACTS = KeptWith(_facts_of)


class DistTransport:
    """The transport of one ProcessGroup; each object counts its own traffic.

    Receives are posted before sends: gloo's ready notification otherwise queues behind bulk data.
    On gloo a small exchange of a whole team is one all-to-all, which takes half the processor time
    of its messages, a larger one a PairwiseExchange (docs/execution.md), from four times as many
    bytes on where the team is on one host; all else goes point to point, without packing.

    On an NCCL group the first object is made by all ranks together. It makes a communicator of our
    own for each lane, at high priority, and warms it up, without which a batch that involves only
    some ranks hangs. torch keeps them under the group's name, so later objects find them. The
    caller's communicator is left alone. Records go over gloo, by a group of our own beside it.

    Messages on gloo carry the digest of the calls that this rank has made, so that those of
    different calls do not match.

    Args:
        group: a group that this process is in.
        node_size: neighbouring ranks of the group that share a node: messages between nodes get a
            lane of their own. None: on NCCL as torchrun says, if all
            nodes hold equally many neighbours; else one lane.

    Attributes:
        process_group, agreement: the group, and what this rank knows of calls in it.
    """

    def __init__(self, group: dist.ProcessGroup, *, node_size: int | None = None) -> None:
        self.rank, self.world_size = group.rank(), group.size()
        self.bytes_sent = 0
        self.messages_sent = 0
        self.process_group = group
        self._facts = facts = _FACTS.of(group)
        self._backends, self._carried, self.agreement, self._watch, *_ = facts
        batched = self._backends.get("cuda") == "nccl"
        traits = DEFAULT_TRAITS if batched else GLOO_TRAITS
        self.receives_ahead = traits.receives_ahead
        self.sends_in_flight = traits.sends_in_flight
        self.takes_teams = traits.takes_teams
        self._lanes = [group]
        self.node_size = node_size
        if batched and self.world_size > 1:
            if node_size is None:
                node_size = node_size_of(dist.get_process_group_ranks(group), local_world_size())
            self._lanes = [lane_group(group, 0)]
            self.node_size = agreed_node_size(group, self._lanes[0], node_size)
            if self.node_size:
                self._lanes.append(lane_group(group, 1))
        self._link = WatchedGroup(self._lanes[0], self._watch)
        self._receiving: deque[Posted | PairwiseExchange | MarkedExchange] = deque()
        self._pairwise: PairwiseExchange | None = None  # the last one
        self._sending: defaultdict[int, deque[Sequence[Posted]]] = defaultdict(deque)

    def __repr__(self) -> str:
        names = ", ".join(f"{name} for {device}" for device, name in self._backends.items())
        return f"DistTransport({self.world_size} ranks, {names})"

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], lane: int = 0) -> Handle:
        sends = sends and travelling(sends, self.rank, self.world_size)
        recvs = recvs and travelling(recvs, self.rank, self.world_size)
        if not sends and not recvs:
            return AllPosted(())
        self.agreement.hold(launches=True)
        if self._pairwise:
            self._release(self._pairwise)
        backend = self._backend({message.tensor.device.type for message in (*sends, *recvs)})
        for message in sends:
            self.bytes_sent += message.tensor.nbytes
        if backend == "nccl":
            self.messages_sent += len(sends)
            sending = self._post_batches(sends, recvs, lane)
            receives = sending if recvs else []
        else:
            receives = self._post_each(recvs, False, lane) if recvs else []
            sending = self._post_each(sends, True, lane) if sends else []
            self.messages_sent += len(sending)
        while self._receiving and self._receiving[0].waited:
            self._receiving.popleft()
        self._receiving.extend(receives)
        if sends:
            self._sending[lane].append(sending)
            self._reap(lane, LAUNCHES_IN_FLIGHT if backend == "nccl" else _UNWAITED)
        return receives[0] if len(receives) == 1 else AllPosted(receives)

    def exchange_all(self, messages: TeamMessages) -> Handle:
        self.agreement.hold(launches=True)
        device, team = messages.leaving.device.type, messages.team
        if self._pairwise:
            self._release(self._pairwise)
        if device not in self._carried:
            self._backend({device})
        num_bytes = messages.most_bytes * (len(team) - 1)
        if num_bytes > MARKED_BYTES and (
            num_bytes > MARKED_BYTES_ON_A_HOST or not self._on_one_host(team)
        ):
            return self._in_rounds(messages)
        exchange = MarkedExchange(messages, self.agreement.mark, self._link, self._facts.buffers)
        self.bytes_sent += exchange.buffers.bytes_sent
        self.messages_sent += exchange.buffers.messages_sent
        self._receiving.append(exchange)
        return exchange

    def _on_one_host(self, team: range) -> bool:
        """Return whether the ranks of a team share a host; the first time they tell each other."""
        shared = self._facts.on_one_host.get(team)
        if shared is None:
            own = torch.frombuffer(bytearray(host_digest()), dtype=torch.uint8)
            sizes = (len(own),) * len(team)
            hosts = own.repeat(len(team))
            arriving = torch.empty_like(hosts)
            messages = TeamMessages(hosts, arriving, (sizes, sizes), team, "hosts", len(own))
            mark, buffers = self.agreement.mark, self._facts.buffers
            MarkedExchange(messages, mark, self._link, buffers).wait()
            shared = self._facts.on_one_host[team] = torch.equal(arriving, hosts)
        return shared

    def gather_records(self, record: Tensor) -> list[Tensor]:
        if self.world_size == 1:
            return [record]
        self.agreement.hold()
        try:
            return self._all_records(record)
        finally:
            self.agreement.release()

    def _all_records(self, record: Tensor) -> list[Tensor]:
        if record.numel() > _RECORD_DIGEST_BYTES:
            made = blake2b(record.numpy().tobytes(), digest_size=_RECORD_DIGEST_BYTES).digest()
            own = torch.frombuffer(bytearray(made), dtype=torch.uint8)
            if all(digest.numpy().tobytes() == made for digest in self._gathered(own)):
                return [record] * self.world_size
        return self._gathered(record)

    def _gathered(self, own: Tensor) -> list[Tensor]:
        group = gloo_group(self.process_group)
        found = [torch.empty_like(own) for _ in range(self.world_size)]
        work = group.allgather([found], [own])
        wait_for(work, (), "comparing with", WatchedGroup(group, self._watch))
        return found

    def finish(self) -> None:
        if self._pairwise:
            self._release(self._pairwise)
        for exchange in self._receiving:
            if not exchange.waited:
                exchange.wait()
        self._receiving.clear()
        for lane in tuple(self._sending):
            self._reap(lane, 0)
        self.agreement.release()

    def _backend(self, devices: set[str]) -> str:
        """The backend that carries tensors of these types of device."""
        if len(devices) == 1:
            (device,) = devices
            if device in self._carried:
                return self._carried[device]
        named = sorted(devices)
        names = [self._backends.get(device, "none") for device in named]
        if names == ["none"]:
            raise ValueError(
                f"the group has no backend for {named[0]} tensors, it has {self._backends}"
            )
        raise ValueError(
            f"tensors on {' and '.join(named)} cannot travel over {' and '.join(names)}; "
            "gloo carries CPU tensors, NCCL CUDA tensors: move the tensors or pass a group "
            "with the backend of their device"
        )

    def _in_rounds(self, messages: TeamMessages) -> PairwiseExchange:
        leaving, arriving, sizes, team, label, _ = messages
        sent, received = (
            [
                Message(part, peer, label) if part.nbytes else None
                for peer, part in zip(team, whole.view(-1).split([*of]), strict=True)
            ]
            for whole, of in zip((leaving, arriving), sizes, strict=True)
        )
        place, n = self.rank - team.start, len(team)
        mine, kept = sent[place], received[place]
        if mine and kept:
            kept.tensor.copy_(mine.tensor)
        rounds = [(sent[(place + i) % n], received[(place - i) % n]) for i in range(1, n)]
        self.bytes_sent += sum(x.tensor.nbytes for x, _ in rounds if x)
        self.messages_sent += sum(x is not None for x, _ in rounds)
        self._pairwise = exchange = PairwiseExchange(rounds, self._post_one)
        self._receiving.append(exchange)
        num_bytes = [x.tensor.nbytes if x else 0 for pair in rounds for x in pair]
        largest = max(num_bytes)
        if largest > EVEN_IF_SMALL and min(num_bytes) < EVEN * largest:
            self._release(exchange)
        return exchange

    def _release(self, pairwise: PairwiseExchange) -> None:
        pairwise.release()
        self._pairwise = None

    def _post_one(self, message: Message, is_send: bool) -> Posted:
        posted = self._post_each((message,), is_send, _PAIRWISE_LANE)
        if is_send:
            self._sending[_PAIRWISE_LANE].append(posted)
        return posted[0]

    def _post_each(self, messages: Sequence[Message], is_send: bool, lane: int) -> list[Posted]:
        """Start sends or receives; gloo refuses one if its other end is known to be lost."""
        group, tag = self._lanes[0], _OWN_TAGS + (self.agreement.tag << _LANE_BITS) + lane
        start, verb = (group.send, SENDING) if is_send else (group.recv, "receiving from")
        posted: list[Posted] = []
        for mine in _shared(messages):
            whole, several = mine[0].tensor, len(mine) > 1
            if several and is_send:
                whole = torch.cat([message.tensor.view(-1) for message in mine])
            elif several:
                whole = whole.new_empty(sum(message.tensor.nbytes for message in mine))
            try:
                work = start([whole], mine[0].peer, tag)
            except RuntimeError as error:
                raise self._watch.failure(group, mine, verb, error) from error
            posted.append(Posted(work, mine, verb, self._link, whole, several and not is_send))
        return posted

    def _post_batches(
        self, sends: Sequence[Message], recvs: Sequence[Message], lane: int
    ) -> list[Posted]:
        group = self._lanes[lane % len(self._lanes)]
        posted = []
        for batch in nccl_batches(sends, recvs, self.rank, self.world_size):
            messages = [message for _, message in batch]
            work = post_batch(group, batch)
            posted.append(
                Posted(work, messages, "exchanging with", WatchedGroup(group, self._watch))
            )
        return posted

    def _reap(self, lane: int, keep: int) -> None:
        # No deadlock: programs launch in the plan's step order, so the peer of a send of an
        # earlier launch posts its receive without any launch of ours that is yet to come.
        sending = self._sending[lane]
        while len(sending) > keep:
            for posted in sending.popleft():
                posted.wait()


def _shared(messages: Sequence[Message]) -> Sequence[Sequence[Message]]:
    """Group messages into those that are posted as one: small ones with the same peer."""
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

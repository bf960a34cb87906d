"""The protocol of transports: ranks hand them flat bytes, one peer, one label."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

import torch
from torch import Tensor


class Message(NamedTuple):
    """One tensor on its way to or from one peer.

    Args:
        tensor: contiguous uint8 of any shape; both ends name the same number of bytes.
        peer: the other end's rank in the group.
        label: what travels and when, for errors; its str is as "step 3, kv2".
    """

    tensor: Tensor
    peer: int
    label: object


class Handle(Protocol):
    """A launched exchange."""

    def wait(self) -> None:
        """Return once every receive of the exchange has arrived; again, at once.

        On CUDA the current stream waits, not the host.
        """
        ...


@runtime_checkable
class Transport(Protocol):
    """Moves messages between the ranks of one group.

    Messages between two ranks on one lane match in the order both ranks launch them, never in the
    order of their waits. Empty messages are skipped on both sides. A tensor that is sent stays
    unmodified until finish() returns; the transport keeps it alive. A transport for CUDA tensors
    also sees to it that it has left when LAUNCHES_IN_FLIGHT later launches with sends on its lane
    have returned and, if receives_ahead is 0, when a receive of its own launch has been waited for.
    There all this is order on the current stream, which the host does not wait for.

    Attributes:
        receives_ahead: launches by which a receive may be posted before its send's own launch;
            0: send and receive belong to the same launch on both ranks (NCCL).
        node_size: neighbouring ranks that share a node, if messages between nodes are to have a
            lane of their own; None: one lane for all.
        sends_in_flight: launches with sends on a lane that may be under way when a later one has
            returned; all earlier ones have left. Optional: without it, a sent tensor stays as it is
            until finish() returns.
        bytes_sent, messages_sent: totals of this object, without agreement records.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def receives_ahead(self) -> int: ...
    @property
    def node_size(self) -> int | None: ...
    @property
    def bytes_sent(self) -> int: ...
    @property
    def messages_sent(self) -> int: ...

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], lane: int = 0) -> Handle:
        """Launch sends and receives and return at once.

        Lanes are independent: a message on one never waits for another lane's.
        """
        ...

    def gather_records(self, record: Tensor) -> list[Tensor]:
        """Return every rank's record, by rank; all are uint8 on the CPU, of one agreed size."""
        ...

    def finish(self) -> None:
        """Return once everything launched has arrived, at both ends."""
        ...


TeamSizes: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


class _TeamFields(NamedTuple):
    leaving: Tensor
    arriving: Tensor
    sizes: TeamSizes
    team: range
    label: object
    most_bytes: int


class TeamMessages(_TeamFields):
    """Bytes that one rank of a team sends to and receives from all of it.

    Args:
        leaving, arriving: contiguous uint8, the bytes for and from each rank in turn.
        sizes: bytes for and from each rank of the team; what is for this one is copied.
        team: ranks of the group.
        label: as a Message's.
        most_bytes: about how many go from one rank to another at most. It is the same on all
            ranks: they choose a way by it.
    """

    @cached_property
    def contents(self) -> tuple[memoryview, memoryview]:
        """Bytes that leave and arrive, on the CPU: their slices cost less than those of tensors."""
        return self.leaving.numpy().reshape(-1).data, self.arriving.numpy().reshape(-1).data

    def with_others(self, rank: int) -> list[Message]:
        """A message for each other rank that this one sends to or receives from."""
        return [
            Message(self.leaving, peer, self.label)
            for peer, *num_bytes in zip(self.team, *self.sizes, strict=True)
            if peer != rank and any(num_bytes)
        ]


class TeamTransport(Transport, Protocol):
    """A transport that lets the ranks of a team exchange all at once: see TeamExchange.

    Attributes:
        takes_teams: whether it does, the same on all ranks.
    """

    takes_teams: bool

    def exchange_all(self, messages: TeamMessages) -> Handle:
        """Launch an exchange within a team, all of whose ranks call it, if only to send nothing."""
        ...


def team_transport(transport: Transport) -> TeamTransport | None:
    """The transport as one that takes teams' exchanges; None: they are for exchange."""
    takes = getattr(transport, "takes_teams", False)
    return cast(TeamTransport, transport) if takes else None


def travelling(messages: Iterable[Message], rank: int, world_size: int) -> list[Message]:
    """Return the messages that are not empty, each checked.

    Raises:
        ValueError: if a peer is this rank or outside the group, or a tensor is not flat bytes.
    """
    kept = []
    for message in messages:
        tensor, peer, label = message
        if not tensor.numel():
            continue
        if peer == rank or not 0 <= peer < world_size:
            raise ValueError(
                f"{label}: peer ({peer}) must be another rank of the group "
                f"(this is rank {rank} of {world_size}); what a rank owns stays at home"
            )
        if tensor.dtype is not torch.uint8 or not tensor.is_contiguous():
            raise ValueError(
                f"{label}: a message is contiguous uint8, not {tensor.dtype} with strides "
                f"{tensor.stride()}; use tensor.contiguous().view(torch.uint8)"
            )
        kept.append(message)
    return kept


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as a message has it: uint8, the last dimension as many times as wide.

    torch calls a tensor contiguous whatever the stride of a dimension of size 1 is, but a view of
    another dtype asks for 1 in the last one.
    """
    if tensor.stride(-1) != 1 and tensor.is_contiguous():
        tensor = tensor.as_strided(tensor.shape, (*tensor.stride()[:-1], 1))
    return tensor.view(torch.uint8)

"""Choose the transport that belongs to what a caller passes as `group`."""

from collections.abc import Sequence
from typing import TypeAlias

import torch.distributed as dist
from torch import Tensor

from tilewise.transport.process_group import DistTransport
from tilewise.transport.protocol import Handle, Message, Transport, travelling
from tilewise.transport.symmetric import HEAP_BYTES, symmetric_transport

Group: TypeAlias = dist.ProcessGroup | Transport | None
"""The ranks that share a sequence: a ProcessGroup, what loopback passes to a rank, a Transport of
one's own, or None: the default group, or one rank where torch.distributed is not initialised."""


class LocalTransport:
    """A world of one: nothing travels."""

    rank = 0
    world_size = 1
    receives_ahead = 0
    sends_in_flight = 0
    node_size = None
    bytes_sent = 0
    messages_sent = 0

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], lane: int = 0) -> Handle:
        travelling([*sends, *recvs], self.rank, self.world_size)
        return _Done()

    def gather_records(self, record: Tensor) -> list[Tensor]:
        return [record]

    def finish(self) -> None:
        return


class _Done:
    def wait(self) -> None:
        return


TRANSPORTS = ("default", "symmetric", "auto")


def transport_for(
    group: Group = None, transport: str = "default", *, heap_bytes: int = HEAP_BYTES
) -> Transport:
    """Return the transport of a group, to be passed as `group`.

    Args:
        group: None (the default group; one rank if torch.distributed is not initialised), a
            ProcessGroup, the group that loopback passes to a rank, or a Transport, which is
            returned as it is, so that its totals count what calls move:

                group = transport_for(process_group)
                attention(q, k, v, plan=plan, layout=layout, mask=mask, group=group)
                group.bytes_sent

        transport: "default": NCCL for tensors on CUDA, gloo for those on the CPU. "symmetric":
            pushes of copy engines inside a node, unproven (docs/gpu.md); all ranks of a process
            group ask for it together. "auto": that, where all of these hold, else the default,
            which then says why: every rank sees CUDA, this torch and cuda-bindings have what it
            takes, and all ranks are on one node.
        heap_bytes: of each rank's memory that "symmetric" lets the others write to.

    On an NCCL group the first call is collective: see DistTransport.

    Raises:
        ValueError: if group is something else, or this process is not in it; if transport has
            another name or cannot serve: the same on every rank.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport ({transport!r}) must be one of {', '.join(TRANSPORTS)}")
    if transport != "default":
        return _symmetric(group, heap_bytes, transport == "auto")
    if isinstance(group, DistTransport):
        return group
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return LocalTransport()
        group = dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        return DistTransport(group)
    if isinstance(group, Transport):
        return group
    raise ValueError(
        f"group ({type(group).__name__}) must be None, a ProcessGroup that this process is in, "
        "or the group that loopback passes"
    )


def _symmetric(group: Group, heap_bytes: int, or_default: bool) -> Transport:
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    reason = f"it is for a process group, and group is {type(group).__name__}"
    if isinstance(group, dist.ProcessGroup):
        try:
            return symmetric_transport(group, heap_bytes)
        except ValueError as error:
            reason = str(error)
    if not or_default:
        raise ValueError(f'transport "symmetric" cannot serve: {reason}')
    found = transport_for(group)
    if isinstance(found, DistTransport):
        found.declined = reason
    return found

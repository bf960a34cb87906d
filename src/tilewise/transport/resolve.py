"""Choose the transport that belongs to what a caller passes as `group`."""

import os
from collections.abc import Sequence
from typing import TypeAlias
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor

from tilewise.transport.nodes import launched_world_size
from tilewise.transport.process_group import DistTransport
from tilewise.transport.protocol import Handle, Message, Transport, travelling


class _ForkedGroups:
    """Groups that a process has from its parent, which forked it after it had joined them."""

    def __init__(self) -> None:
        self.groups = WeakSet[dist.ProcessGroup]()

    def note(self) -> None:
        if dist.is_available() and dist.is_initialized():
            self.groups.update(dist.distributed_c10d._world.pg_map)


_FORKED = _ForkedGroups()
os.register_at_fork(after_in_child=_FORKED.note)

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


def transport_for(group: Group = None) -> Transport:
    """Return the transport of a group, to be passed as `group`.

    Args:
        group: None (the default group; one rank if torch.distributed is not initialised), a
            ProcessGroup, the group that loopback passes to a rank, or a Transport, which is
            returned as it is, so that its totals count what calls move:

                group = transport_for(process_group)
                attention(q, k, v, plan=plan, layout=layout, mask=mask, group=group)
                group.bytes_sent

    On an NCCL group the first call is collective: see DistTransport.

    Raises:
        ValueError: if group is something else, or this process is not in it; if group is None, the
            launcher started several processes (WORLD_SIZE), and they have no process group yet.
    """
    if isinstance(group, DistTransport):
        return group
    if group is None:
        group = dist.group.WORLD
        if group is None:
            _refuse_lone_process_of_several()
            return LocalTransport()
    if isinstance(group, dist.ProcessGroup):
        if group in _FORKED.groups:
            raise ValueError(
                "this process was forked from one that had joined its group: no connection of the "
                "group works here, and a call would wait for ever. A data loader's worker needs no "
                "group: pass it cp.layout and cp.rank. Start ranks by torchrun, or by spawn, and "
                "call init_process_group in each"
            )
        return DistTransport(group)
    if isinstance(group, Transport):
        return group
    raise ValueError(
        f"group ({type(group).__name__}) must be None, a ProcessGroup that this process is in, "
        "or the group that loopback passes"
    )


def _refuse_lone_process_of_several() -> None:
    """Raise ValueError where a world of one would be a whole copy of the work on every process."""
    started = launched_world_size() or 1
    if started > 1:
        raise ValueError(
            "group is None and torch.distributed has no process group yet, but WORLD_SIZE is "
            f"{started}: each of the {started} processes would work alone. Call "
            "torch.distributed.init_process_group(), or make TrainingArguments, which calls it, "
            "before; unset WORLD_SIZE for a process that is to be alone"
        )

"""Another rank ended or does not answer: the error, and which rank the failure goes back to."""

from collections.abc import Sequence
from time import monotonic, sleep

import torch
import torch.distributed as dist

from tilewise.transport.nccl_groups import CPU, group_store
from tilewise.transport.protocol import Message, TeamMessages

NOTHING_TAG = 7_416_000
"""Of messages that nobody sends."""
_PATIENCE_SECONDS = 0.3  # for what another rank knows of a failure


class LostRankError(RuntimeError):
    """Another rank ended, or does not answer.

    Attributes:
        rank: which one it is, as far as this rank could learn; -1: not known.
    """

    def __init__(self, message: str, rank: int):
        super().__init__(message)
        self.rank = rank


def failure_of(
    messages: Sequence[Message] | TeamMessages,
    verb: str,
    error: OSError | RuntimeError,
    group: dist.ProcessGroup,
) -> LostRankError:
    """Return the error of an operation that failed, with the rank that failed first.

    If the operation is with several ranks, gloo's lost connections say which one failed.

    Args:
        messages: of the operation; none: all ranks of the group compare records.
    """
    peers = peers_of(messages, group) if messages else []
    whom = f"rank{'s' * (len(peers) > 1)} {', '.join(map(str, peers))}" if peers else "all ranks"
    label = "agreement"
    if messages:
        label = messages.label if isinstance(messages, TeamMessages) else messages[0].label
    suspects = peers if len(peers) == 1 else _out_of_reach(group)
    rank = _first_lost(group, suspects[0]) if suspects else -1
    also = f"; rank {rank} failed before" if rank != -1 and [rank] != peers else ""
    return LostRankError(f"{label}: {verb} {whom} failed{also}: {error}", rank)


def peers_of(messages: Sequence[Message] | TeamMessages, group: dist.ProcessGroup) -> list[int]:
    """The other ranks of an operation; without messages all of the group."""
    if not messages:
        return [rank for rank in range(group.size()) if rank != group.rank()]
    if isinstance(messages, TeamMessages):
        messages = messages.with_others(group.rank())
    return sorted({message.peer for message in messages})


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds after which gloo ends a wait in a group."""
    return group._get_backend(CPU).options._timeout.total_seconds()


def _out_of_reach(group: dist.ProcessGroup) -> list[int]:
    """Ranks to whom gloo has lost its connection: it refuses to receive from them."""
    if CPU not in group._device_types:
        return []
    found, nothing = [], torch.empty(1, dtype=torch.uint8)
    for peer in range(group.size()):
        if peer != group.rank():
            try:
                group.recv([nothing], peer, NOTHING_TAG)
            except RuntimeError:
                found.append(peer)
    return found


def _first_lost(group: dist.ProcessGroup, peer: int) -> int:
    """The rank that a failure goes back to.

    Every rank writes down in the group's store which one failed it first. One that wrote nothing
    was failed by nobody, and who waited for that writes the rank down as failed by itself.
    """
    store, own = group_store(group, "lost"), str(group.rank())
    try:
        if not store.check([own]) or store.get(own).decode() == own:
            store.set(own, str(peer))
        for _ in range(group.size()):
            until = monotonic() + _PATIENCE_SECONDS
            while not store.check([str(peer)]):
                if monotonic() > until:
                    store.set(str(peer), str(peer))  # so that the next one need not wait
                    return peer
                sleep(0.02)
            before, peer = peer, int(store.get(str(peer)))
            if peer == before:
                return peer
    except (RuntimeError, ValueError):  # the store is gone as well
        return peer
    return peer

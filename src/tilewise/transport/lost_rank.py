"""Another rank ended or does not answer: the error, and which rank the failure goes back to."""

from collections.abc import Sequence
from time import monotonic, sleep

import torch.distributed as dist

from tilewise.transport.nccl_groups import group_store
from tilewise.transport.protocol import Message

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
    messages: Sequence[Message], verb: str, error: OSError | RuntimeError, group: dist.ProcessGroup
) -> LostRankError:
    """One operation's failure; where it is with several ranks, it is not known whose."""
    peers = sorted({message.peer for message in messages})
    whom = f"rank{'s' * (len(peers) > 1)} {', '.join(map(str, peers))}"
    label = messages[0].label if messages else "an exchange of a team"
    rank = _first_lost(group, peers[0]) if len(peers) == 1 else -1
    also = f"; rank {rank} failed before" if rank not in (-1, *peers) else ""
    return LostRankError(f"{label}: {verb} {whom} failed{also}: {error}", rank)


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

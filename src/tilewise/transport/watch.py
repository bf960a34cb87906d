"""Ranks that wait long tell each other, in their group's store, which call they are in.

So ranks in different calls are found, whose messages never match, and so is what one rank found
wrong with its own input while the others went on. A rank that is late, or whose network is slow, is
waited for until the group's timeout.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Event, Lock, Thread
from time import monotonic, sleep
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from tilewise.transport import group_order
from tilewise.transport.agreement import Agreement, CallState, described
from tilewise.transport.lost_rank import (
    NOTHING_TAG,
    LostRankError,
    failure_of,
    peers_of,
    timeout_of,
)
from tilewise.transport.nccl_groups import group_store, team_groups
from tilewise.transport.protocol import Message, TeamMessages

PATIENCE_SECONDS = 5.0
"""A rank that waits longer says so, and asks what the others do."""
NOTICE_SECONDS = 10.0
"""After a longer wait the lowest rank that waits writes a line to stderr."""
_NOTICES_APART = 60.0
"""Seconds between two lines of a group at least."""
_ALONE = " Within tilewise.integrations.hf.unsplit(model) a model runs on one rank alone."
_LOOKS = 5  # within PATIENCE_SECONDS
_ASKED_AT_ONCE = 64  # other ranks, at a look: those of a large group are asked in turn
_VERDICT = "verdict"


class Watch:
    """Since when this rank waits for others of a process group, and why it waits in vain.

    A thread of this process looks at it, so a wait costs two writes.

    Attributes:
        since: of the wait under way, by monotonic(); 0: none is.
        messages: those of that wait; none: it is for all ranks.
        agreement: of the group.
    """

    def __init__(self, group: dist.ProcessGroup, agreement: Agreement) -> None:
        self.since = 0.0
        self.messages: Sequence[Message] | TeamMessages = ()
        self.agreement = agreement
        self._group = ref(group)
        self._published: CallState | None = None
        self._said = False
        self._turn = 0
        self._there: dict[int, bool] = {}  # whether others wait in this call or a later one
        self._noticed = -_NOTICES_APART

    def look(self, agreements: Mapping[dist.ProcessGroup, Agreement]) -> None:
        """Look whether this rank has waited long: then say so, and end all waits if they are in
        vain.

        Args:
            agreements: of all groups of this process.
        """
        group = self._group()
        if group is None:
            return
        since = self.since
        if since and monotonic() - since > PATIENCE_SECONDS:
            if self._in_vain(group) or self._in_another_order(group, agreements):
                end_waits(group)
            elif monotonic() - max(since + NOTICE_SECONDS, self._noticed + _NOTICES_APART) > 0:
                self._notice(group, since)
        elif self._published is not None:
            group_store(group, "calls").set(str(group.rank()), "")
            self._published = None
            if self._said:
                group_order.taken_back()
                self._said = False

    def failure(
        self,
        group: dist.ProcessGroup,
        messages: Sequence[Message] | TeamMessages,
        verb: str,
        error: RuntimeError,
    ) -> Exception:
        """Return the error to raise where an operation on a group failed; end the others' waits as
        well.

        Args:
            group: the watched one, or one of the same ranks that belongs to it.
        """
        since, self.since = self.since, 0.0
        watched = self._group() or group
        verdict = _verdict(watched)
        if verdict:
            failure = ValueError(verdict)
        elif since and self._absent(watched)[0] and monotonic() - since > timeout_of(group) / 2:
            failure = LostRankError(
                f"{self._waits(watched, since)} The group's timeout has ended the wait.",
                self._absent(watched)[0][0],
            )
        else:
            failure = failure_of(messages, verb, error, group)
        end_waits(watched)
        return failure

    def _absent(self, group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
        """Return the ranks that have not come to this call, as far as is known, and the other ranks
        that do not wait: these may have made the call and gone on.
        """
        silent = {rank for rank, there in self._there.items() if not there}
        absent = silent & {*peers_of(self.messages, group)} or silent
        return sorted(absent), sorted(silent - absent)

    def _waits(self, group: dist.ProcessGroup, since: float) -> str:
        """Say since when this rank waits in which call, and which ranks have not come to it."""
        absent, others = self._absent(group)
        more = f"; {_named(others)}, too, unless past it" if others else ""
        return (
            f"rank {group.rank()} has waited {monotonic() - since:.0f} s in "
            f"{described(self.agreement.state())}. Missing: {_named(absent)}, late or busy, or "
            f"without this call{more}. Every rank of the group must make it, not only those under "
            "`if rank == 0:`." + _ALONE * ("transformers" in sys.modules)
        )

    def _notice(self, group: dist.ProcessGroup, since: float) -> None:
        """Write on stderr for whom this rank waits, if no lower rank does it."""
        absent, _ = self._absent(group)
        lower = range(group.rank())
        if absent and all(self._there.get(rank) is False for rank in lower):
            sys.stderr.write(f"tilewise: {self._waits(group, since)}\n")
            sys.stderr.flush()
            self._noticed = monotonic()

    def refusal(self, what: str) -> ValueError:
        """Return the error to raise where this rank cannot take part in a call; it ends the others'
        waits, and they raise the same.
        """
        group = self._group()
        assert group is not None
        store = group_store(group, "calls")
        verdict = store.compare_set(_VERDICT, "", f"rank {group.rank()}: {what}").decode()
        end_waits(group)
        return ValueError(verdict)

    def in_another_call(self, peer: int) -> ValueError:
        """Return the error to raise where a peer sent a message of another call; both say which
        they are in.
        """
        group = self._group()
        assert group is not None
        until = monotonic() + 2 * PATIENCE_SECONDS
        verdict = self._in_vain(group)
        while not verdict and monotonic() < until:
            sleep(PATIENCE_SECONDS / 100)
            verdict = self._in_vain(group)
        end_waits(group)
        return ValueError(
            verdict
            or f"rank {peer} is in another call than rank {group.rank()}; run the same "
            "calls in the same order on every rank"
        )

    def _in_another_order(
        self, group: dist.ProcessGroup, agreements: Mapping[dist.ProcessGroup, Agreement]
    ) -> str | None:
        """Why ranks in two groups wait for each other; says in which group this one waits."""
        self._said = group_order.said(group, agreements)
        if not self._said:
            return None
        peers = peers_of(self.messages, group)
        verdict = group_order.other_order(group, peers)
        if verdict is None:
            return None
        return group_store(group, "calls").compare_set(_VERDICT, "", verdict).decode()

    def _in_vain(self, group: dist.ProcessGroup) -> str | None:
        """Why no rank can go on, once one of them knows it; says which call this one is in."""
        store, rank, size = group_store(group, "calls"), group.rank(), group.size()
        state = self.agreement.state()
        if state != self._published:
            store.set(str(rank), json.dumps(state))
            self._published, self._there = state, {}
        verdict = _verdict(group)
        if verdict:
            return verdict
        asked = min(size - 1, _ASKED_AT_ONCE)
        for i in range(asked):
            peer = (rank + 1 + (self._turn + i) % (size - 1)) % size
            text = store.get(str(peer)) if store.check([str(peer)]) else b""
            theirs = CallState(*json.loads(text)) if text else None
            self._there[peer] = theirs is not None and theirs.number >= state.number
            found = theirs and self.agreement.conflict(rank, peer, theirs)
            if found:  # of several the first one stays, for all
                return store.compare_set(_VERDICT, "", found).decode()
        self._turn = (self._turn + asked) % (size - 1)
        return None


class _Watches:
    """Watches of this process, by group, and the thread that looks at them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._by_group: WeakKeyDictionary[dist.ProcessGroup, Watch] = WeakKeyDictionary()
        self._thread: Thread | None = None
        self._ending = Event()
        os.register_at_fork(after_in_child=self.__init__)  # threads do not pass a fork
        atexit.register(self.end)

    def of(self, group: dist.ProcessGroup, agreement: Agreement) -> Watch:
        found = self._by_group.get(group)
        if found is not None:
            return found
        with self._lock:
            if self._thread is None:
                self._thread = Thread(target=self._run, name="tilewise watch", daemon=True)
                self._thread.start()
            return self._by_group.setdefault(group, Watch(group, agreement))

    def end(self) -> None:
        """End the thread before the interpreter does, which may abort in a call of torch's."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(PATIENCE_SECONDS)

    def _run(self) -> None:
        while not self._ending.wait(PATIENCE_SECONDS / _LOOKS):
            with self._lock:
                watches = dict(self._by_group)
            agreements = {group: watch.agreement for group, watch in watches.items()}
            for watch in watches.values():
                with suppress(RuntimeError):  # the store is gone, or the group is
                    watch.look(agreements)
            del watches, agreements


WATCHES = _Watches()


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def end_waits(group: dist.ProcessGroup) -> None:
    """Let all ranks that wait for this one fail as well: it sends no more.

    gloo closes all connections of a group at a timeout of one.
    """
    nothing = torch.empty(1, dtype=torch.uint8)
    for closing in (group, *team_groups(group)):
        for peer in range(closing.size()):
            if peer != closing.rank():
                with suppress(RuntimeError):  # closed, or not gloo
                    closing.recv([nothing], peer, NOTHING_TAG).wait(timedelta(milliseconds=1))


def _verdict(group: dist.ProcessGroup) -> str | None:
    """Why no rank can go on, if one has found it."""
    store = group_store(group, "calls")
    try:
        return store.get(_VERDICT).decode() if store.check([_VERDICT]) else None
    except RuntimeError:  # the store is gone: its process has ended
        return None

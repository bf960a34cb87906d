"""Small exchanges of a team over gloo: one all-to-all, each of whose pieces begins with a mark.

gloo gives collectives no tags. The mark says which call the sender is in: without it, exchanges of
two different calls would match. And gloo ends the process where more arrives than there is room
for, so each piece has room for the largest that any call may send.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from tilewise.plan.kept import RecentValues
from tilewise.transport.nccl_groups import gloo_group
from tilewise.transport.posted import WatchedGroup, wait_for
from tilewise.transport.protocol import TeamMessages

MARKED_BYTES = 2**18
"""An exchange in which a rank sends about so much at most is one all-to-all."""
MARKED_BYTES_ON_A_HOST = 2**20
"""The same where all ranks of the team are on one host, whose loopback loses no segments."""
_MARK_BYTES = 16
EXCHANGES_KEPT = 8
"""Kinds of exchanges of a group whose memory is kept."""

Sizes: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


def marked_sizes(sizes: Sizes, place: int) -> tuple[list[int], list[int]]:
    """Return the bytes of each piece as it leaves, and the room for each that arrives.

    Args:
        sizes, place: as the memory of an exchange takes them.
    """
    sent, received = sizes
    leaving = [_MARK_BYTES + size for size in sent]
    room = [_MARK_BYTES + max(x, 2 * MARKED_BYTES_ON_A_HOST) for x in received]
    leaving[place] = room[place] = 0  # the own piece is copied at once
    return leaving, room


class _Buffers:
    """The memory of one exchange: marks and pieces as they leave, and as they arrive.

    Args:
        sizes: bytes of the pieces for each rank of the team, and of those from each.
        place: of this rank in the team.

    Attributes:
        bytes_sent, messages_sent: to other ranks.
    """

    def __init__(self, sizes: Sizes, place: int) -> None:
        sent, received = sizes
        self.bytes_sent = sum(sent) - sent[place]
        self.messages_sent = len(sent) - sent.count(0) - (sent[place] > 0)
        self.leaving_sizes, self.room = marked_sizes(sizes, place)
        with torch.inference_mode(False):  # else later calls outside of it could not write
            self.leaving = torch.empty(sum(self.leaving_sizes), dtype=torch.uint8)
            self.arrived = torch.empty(sum(self.room), dtype=torch.uint8)
        self._leaving = _pieces(self.leaving, self.leaving_sizes, sent, place)
        self._arrived = _pieces(self.arrived, self.room, received, place)
        starts = sum(sent[:place]), sum(received[:place])
        self._own = [slice(start, start + sent[place]) for start in starts]

    def write(self, messages: TeamMessages, mark: bytes) -> None:
        """Put the mark before each piece of what leaves; the own piece is copied at once."""
        source, target = messages.contents
        for _, mark_place, piece, rows in self._leaving:
            mark_place[:] = mark
            piece[:] = source[rows]
        own, place = self._own
        target[place] = source[own]

    def read(self, messages: TeamMessages, mark: bytes) -> int | None:
        """Copy all pieces; returns the first rank of the team that sent another mark, if any."""
        _, target = messages.contents
        for place, mark_place, piece, rows in self._arrived:
            if mark_place != mark:
                return place
            target[rows] = piece
        return None


def _pieces(
    whole: Tensor, rooms: Sequence[int], sizes: Sequence[int], place: int
) -> list[tuple[int, memoryview, memoryview, slice]]:
    """Return for each other rank of the team its place there, its mark, its piece, and where the
    piece stands if all are joined.

    Args:
        place: of this rank.
    """
    content, pieces = whole.numpy().data, []
    starts, ends = accumulate(rooms, initial=0), accumulate(sizes)
    for peer, (start, size, end) in enumerate(zip(starts, sizes, ends, strict=False)):
        if peer != place:
            first = start + _MARK_BYTES
            rows = slice(end - size, end)
            pieces.append((peer, content[start:first], content[first : first + size], rows))
    return pieces


MarkedBuffers: TypeAlias = RecentValues[tuple[Sizes, int], list[_Buffers]]
"""Memory of a group that no exchange uses, by what it is for."""


class MarkedExchange:
    """An exchange under way; it is launched as it is made.

    Args:
        mark: of the call that this rank is in.
        link: the group, of which the team is a part.
        buffers: of the group.

    Attributes:
        buffers: its own.
    """

    def __init__(
        self, messages: TeamMessages, mark: bytes, link: WatchedGroup, buffers: MarkedBuffers
    ) -> None:
        group, sizes, team = link.group, messages.sizes, messages.team
        place = group.rank() - team.start
        self._free = buffers.get((sizes, place), list)
        self.buffers = own = self._free.pop() if self._free else _Buffers(sizes, place)
        own.write(messages, mark)
        self._messages, self._mark, self._link, self.waited = messages, mark, link, False
        self._work = gloo_group(group, team).alltoall_base(
            own.arrived, own.leaving, own.room, own.leaving_sizes
        )

    def wait(self) -> None:
        if self.waited:
            return
        self.waited = True
        wait_for(self._work, self._messages, "exchanging with", self._link)
        del self._work
        stranger = self.buffers.read(self._messages, self._mark)
        if stranger is not None:
            raise self._link.watch.in_another_call(self._messages.team[stranger])
        self._free.append(self.buffers)

"""Small exchanges of a team over gloo: one all-to-all, each of whose pieces begins with a mark.

gloo gives collectives no tags. The mark says which call the sender is in: without it, exchanges of
two different calls would match. And gloo ends the process where more arrives than there is room
for, so each piece has room for the largest that any call may send.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.plan.kept import KeptWith, RecentValues
from tilewise.transport.nccl_groups import gloo_group
from tilewise.transport.posted import Link, wait_for
from tilewise.transport.protocol import TeamMessages

MARKED_BYTES = 2**18
"""An exchange in which a rank sends about so much at most is one all-to-all."""
_MARK_BYTES = 16
_KINDS_KEPT = 8

Sizes: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


class _Buffers:
    """The memory of one exchange: marks and pieces as they leave, and as they arrive.

    Args:
        sizes: bytes of the pieces for each rank of the team, and of those from each.
        place: of this rank in the team.
    """

    def __init__(self, sizes: Sizes, place: int) -> None:
        self.leaving_sizes = [_MARK_BYTES + size for size in sizes[0]]
        self.room = [_MARK_BYTES + max(size, 2 * MARKED_BYTES) for size in sizes[1]]
        self.room[place] = self.leaving_sizes[place]
        with torch.inference_mode(False):  # else later calls outside of it could not write
            self.leaving = torch.empty(sum(self.leaving_sizes), dtype=torch.uint8)
            self.arrived = torch.empty(sum(self.room), dtype=torch.uint8)
        self._leaving = _pieces(self.leaving, self.leaving_sizes, sizes[0])
        self._arrived = _pieces(self.arrived, self.room, sizes[1])

    def write(self, leaving: Tensor, mark: bytes) -> None:
        """Put the mark before each piece of what leaves."""
        source = _content(leaving)
        for mark_place, piece, rows in self._leaving:
            mark_place[:] = mark
            piece[:] = source[rows]

    def read(self, arriving: Tensor, mark: bytes) -> int | None:
        """Copy all pieces; returns the first rank of the team that sent another mark, if any."""
        target = _content(arriving)
        for place, (mark_place, piece, rows) in enumerate(self._arrived):
            if mark_place != mark:
                return place
            target[rows] = piece
        return None


def _content(whole: Tensor) -> memoryview:
    """The bytes of a tensor: slices of it cost less than a tensor's."""
    return whole.numpy().reshape(-1).data


def _pieces(
    whole: Tensor, rooms: Sequence[int], sizes: Sequence[int]
) -> list[tuple[memoryview, memoryview, slice]]:
    """Return for each rank its mark, its piece, and where the piece stands if all are joined."""
    content = _content(whole)
    starts, ends = accumulate(rooms, initial=0), [*accumulate(sizes)]
    return [
        (
            content[start : start + _MARK_BYTES],
            content[start + _MARK_BYTES : start + _MARK_BYTES + size],
            slice(end - size, end),
        )
        for start, size, end in zip(starts, sizes, ends, strict=False)
    ]


def _pool(_: dist.ProcessGroup) -> RecentValues[tuple[Sizes, int], list[_Buffers]]:
    """The buffers that no exchange of a group uses, by what they are for."""
    return RecentValues(_KINDS_KEPT)


_POOLS = KeptWith(_pool)


class MarkedExchange:
    """An exchange under way; it is launched as it is made.

    Args:
        mark: of the call that this rank is in.
        link: the group, of which the team is a part.
    """

    def __init__(self, messages: TeamMessages, mark: bytes, link: Link) -> None:
        group, place = link.group, link.group.rank() - messages.team.start
        sizes = messages.sizes
        self._free = _POOLS.of(group).get((sizes, place), list)
        buffers = self._free.pop() if self._free else _Buffers(sizes, place)
        buffers.write(messages.leaving, mark)
        self._buffers, self._messages, self._mark, self._link = buffers, messages, mark, link
        self._work: dist.Work | None = gloo_group(group, messages.team).alltoall_base(
            buffers.arrived, buffers.leaving, buffers.room, buffers.leaving_sizes
        )

    @property
    def waited(self) -> bool:
        return self._work is None

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return
        wait_for(work, self._messages, "exchanging with", self._link)
        stranger = self._buffers.read(self._messages.arriving, self._mark)
        if stranger is not None:
            raise self._link.watch.in_another_call(self._messages.team[stranger])
        self._free.append(self._buffers)

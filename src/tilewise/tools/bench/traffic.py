"""Counting what a rank sends and how long it waits, without changing what it does.

Ours is counted on its transport. Another library's messages are operations of torch.distributed,
which a dispatch mode sees.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

# Private in torch, but where torch's functional collectives find a group by its name.
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise.tools.bench.contender import Traffic
from tilewise.transport.protocol import Handle, Message, TeamSizes, Transport, team_transport

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName


class _WatchedHandle:
    def __init__(self, handle: Handle, watch: WatchedTransport):
        self._handle, self._watch = handle, watch

    def wait(self) -> None:
        start = time.perf_counter()
        self._handle.wait()
        self._watch.waited_seconds += time.perf_counter() - start


class WatchedTransport:
    """A transport that also counts bytes by peer and the seconds spent in waits."""

    def __init__(self, transport: Transport):
        self._transport = transport
        self.rank, self.world_size = transport.rank, transport.world_size
        self.receives_ahead, self.node_size = transport.receives_ahead, transport.node_size
        self.takes_teams = team_transport(transport) is not None
        self.bytes_to: Counter[int] = Counter()
        self.messages_sent, self.waited_seconds = 0, 0.0

    @property
    def bytes_sent(self) -> int:
        return sum(self.bytes_to.values())

    def traffic(self) -> Traffic:
        """Totals so far."""
        return Traffic(dict(self.bytes_to), self.messages_sent, self.waited_seconds)

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], lane: int = 0) -> Handle:
        self._count(sends)
        return _WatchedHandle(self._transport.exchange(sends, recvs, lane), self)

    def exchange_all(
        self, leaving: Tensor, arriving: Tensor, sizes: TeamSizes, team: range, label: object
    ) -> Handle:
        teams = team_transport(self._transport)
        assert teams is not None
        for peer, num_bytes in zip(team, sizes[0], strict=True):
            if num_bytes and peer != self.rank:
                self.bytes_to[peer] += num_bytes
                self.messages_sent += 1
        return _WatchedHandle(teams.exchange_all(leaving, arriving, sizes, team, label), self)

    def gather_records(self, record: Tensor) -> list[Tensor]:
        return self._transport.gather_records(record)

    def finish(self) -> None:
        start = time.perf_counter()
        self._transport.finish()
        self.waited_seconds += time.perf_counter() - start

    def _count(self, sends: Sequence[Message]) -> None:
        for message in sends:
            if message.tensor.numel():
                self.bytes_to[message.peer] += message.tensor.nbytes
                self.messages_sent += 1


class CountOperations(TorchDispatchMode):
    """Counts what the operations of torch.distributed send while it is entered.

    Point-to-point sends and all-to-alls are counted as they are, per peer. Of another collective
    the least that any algorithm sends is counted, spread evenly over its group, as one message to
    each of the others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes_to: Counter[int] = Counter()
        self.messages = 0
        self.unknown: set[str] = set()

    def clear(self) -> None:
        """Count from here on."""
        self.bytes_to.clear()
        self.unknown.clear()
        self.messages = 0

    def traffic(self) -> Traffic | None:
        """None if there were operations whose bytes are not known."""
        return None if self.unknown else Traffic(dict(self.bytes_to), self.messages, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(kind not in PLAIN for kind in types):
            return NotImplemented  # DTensor, say, then issues the operations that it is made of
        space, _, name = func.name().partition("::")
        if space in ("c10d", "_c10d_functional"):
            self._count(name, args, functional=space != "c10d")
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple, *, functional: bool) -> None:
        flat = name.replace("_", "")
        if flat in ("send", "isend"):
            group = args[-1] if functional else args[1]
            peer = args[1] if functional else args[2]
            self._add(_ranks(group)[peer], _nbytes(args[0]))
        elif family := next((x for x in SHARES if flat.startswith(x)), None):
            group = args[-1] if functional else next(x for x in args if _is_group(x))
            sent = args[0] if functional or family == "allreduce" else args[1]
            splits = args[2] if functional else args[4:5]
            self._collective(family, _ranks(group), sent, splits)
        elif not flat.startswith(UNCOUNTED):
            self.unknown.add(name)

    def _collective(self, family: str, ranks: list[int], sent: Any, splits: Any) -> None:
        n = len(ranks)
        each = [SHARES[family](n) * _nbytes(sent)] * n
        if family == "alltoall" and not isinstance(sent, Tensor):
            each = [_nbytes(part) for part in sent]
        elif family == "alltoall":
            rows = splits[0] if splits and isinstance(splits[0], list | tuple) else splits
            if rows and sum(rows):
                each = [_nbytes(sent) * count / sum(rows) for count in rows]
        for rank, num_bytes in zip(ranks, each, strict=True):
            if rank != dist.get_rank():
                self._add(rank, round(num_bytes))

    def _add(self, peer: int, num_bytes: int) -> None:
        if num_bytes:
            self.bytes_to[peer] += num_bytes
            self.messages += 1


SHARES: Mapping[str, Callable[[int], float]] = MappingProxyType(
    {
        "allgather": lambda n: 1.0,
        "reducescatter": lambda n: 1 / n,
        "allreduce": lambda n: 2 / n,
        "alltoall": lambda n: 1 / n,
    }
)
"""What a rank of n sends to each of the others, as a share of its input."""
PLAIN = (Tensor, torch.nn.Parameter)
UNCOUNTED = (
    "barrier",
    "monitoredbarrier",
    "recv",
    "irecv",
    "waittensor",
    "checkfornan",
    "wraptensor",
)


def _is_group(x: object) -> bool:
    return isinstance(x, torch.ScriptObject) and "ProcessGroup" in x._type().qualified_name()


def _ranks(group: Any) -> list[int]:
    """Global ranks of a group, given as an operation gets it: boxed, or by name."""
    if isinstance(group, str):
        return dist.get_process_group_ranks(_resolve_process_group(cast("GroupName", group)))
    return dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))


def _nbytes(x: Any) -> int:
    if isinstance(x, Tensor):
        return x.nbytes
    return sum(map(_nbytes, x))

"""Counting what a rank sends and how long it waits, without changing what it does.

Ours is counted on its transport. Another library's messages are operations of torch.distributed,
which a dispatch mode sees.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

# Private in torch, but where torch's functional collectives find a group by its name.
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise.transport.protocol import Handle, Message, TeamMessages, Transport, team_transport
from tilewise_tools.bench.contender import Traffic

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName


class _Sent:
    """Totals of what one rank sent."""

    def __init__(self) -> None:
        self.bytes_to: Counter[int] = Counter()
        self.messages_sent = 0

    def add(self, peer: int, num_bytes: int) -> None:
        if num_bytes:
            self.bytes_to[peer] += num_bytes
            self.messages_sent += 1


class _WatchedHandle(NamedTuple):
    handle: Handle
    watch: WatchedTransport

    def wait(self) -> None:
        self.watch.timed(self.handle.wait)


class WatchedTransport(_Sent):
    """A transport that also counts bytes by peer and the seconds spent in waits."""

    def __init__(self, transport: Transport):
        super().__init__()
        self._transport = transport
        self.rank, self.world_size = transport.rank, transport.world_size
        self.receives_ahead, self.node_size = transport.receives_ahead, transport.node_size
        self.takes_teams = team_transport(transport) is not None
        self.waited_seconds = 0.0

    @property
    def bytes_sent(self) -> int:
        return sum(self.bytes_to.values())

    def traffic(self) -> Traffic:
        """Totals so far."""
        return Traffic(dict(self.bytes_to), self.messages_sent, self.waited_seconds)

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], lane: int = 0) -> Handle:
        for message in sends:
            self.add(message.peer, message.tensor.nbytes)
        return _WatchedHandle(self._transport.exchange(sends, recvs, lane), self)

    def exchange_all(self, messages: TeamMessages) -> Handle:
        teams = team_transport(self._transport)
        assert teams is not None
        for peer, num_bytes in zip(messages.team, messages.sizes[0], strict=True):
            self.add(peer, num_bytes if peer != self.rank else 0)
        return _WatchedHandle(teams.exchange_all(messages), self)

    def gather_records(self, record: Tensor) -> list[Tensor]:
        return self._transport.gather_records(record)

    def finish(self) -> None:
        self.timed(self._transport.finish)

    def timed(self, wait: Callable[[], None]) -> None:
        """Wait, and add the seconds to those spent so."""
        start = time.perf_counter()
        wait()
        self.waited_seconds += time.perf_counter() - start


class CountOperations(TorchDispatchMode):
    """Counts what the operations of torch.distributed send while it is entered.

    Point-to-point sends and all-to-alls are counted as they are, per peer. Of another collective
    the least that any algorithm sends is counted, spread evenly over its group, as one message to
    each of the others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        """Count from here on."""
        self._sent, self.unknown = _Sent(), set[str]()

    def traffic(self) -> Traffic | None:
        """None if there were operations whose bytes are not known."""
        sent = self._sent
        return None if self.unknown else Traffic(dict(sent.bytes_to), sent.messages_sent, None)

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
            self._sent.add(_ranks(group)[peer], _nbytes(args[0]))
        elif family := next((x for x in SHARES if flat.startswith(x)), None):
            group = args[-1] if functional else next(x for x in args if _is_group(x))
            operand = args[0] if functional or family == "allreduce" else args[1]
            splits = args[2] if functional else args[4:5]
            self._collective(family, _ranks(group), operand, splits)
        elif not flat.startswith(UNCOUNTED):
            self.unknown.add(name)

    def _collective(self, family: str, ranks: list[int], operand: Any, splits: Any) -> None:
        n = len(ranks)
        each = [SHARES[family](n) * _nbytes(operand)] * n
        if family == "alltoall" and not isinstance(operand, Tensor):
            each = [_nbytes(part) for part in operand]
        elif family == "alltoall":
            rows = splits[0] if splits and isinstance(splits[0], list | tuple) else splits
            if rows and sum(rows):
                each = [_nbytes(operand) * count / sum(rows) for count in rows]
        for rank, num_bytes in zip(ranks, each, strict=True):
            if rank != dist.get_rank():
                self._sent.add(rank, round(num_bytes))


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
    *("barrier", "monitoredbarrier", "recv", "irecv"),
    *("waittensor", "checkfornan", "wraptensor"),
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

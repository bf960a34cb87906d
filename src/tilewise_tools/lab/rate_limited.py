"""A transport that keeps to a NIC's speed by itself, for machines that cannot make a lab.

What goes to another host leaves in chunks, each when the token buckets of both ends' NICs allow
it. No wire is involved, so every row measured so says "rate-limited transport".
"""

import fcntl
import tempfile
import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from tilewise.transport.process_group import DistTransport
from tilewise.transport.protocol import Handle, Message, travelling

RATE_LIMITED = "rate-limited transport"
LINE_SHARE = 1448 / 1514  # of an Ethernet frame that TCP fills is payload
CHUNK_BYTES = 16 * 1024  # 2.6 ms at 50 Mbit/s: far below a message, far above a sleep's error
DEPTH_SECONDS = 0.01  # of each bucket: what a late wake-up may catch up on
_TAG = 7_417_000

Pair = tuple[int, int]  # peer, lane


class Nics(NamedTuple):
    """The NICs of all hosts, as the moments at which each is next free to send and to receive."""

    path: str  # of a file that all ranks share; two moments a host, on the monotonic clock
    ranks_per_host: int
    mbit: float  # of payload, for each NIC and direction

    def reserve(self, rank: int, pairs: Sequence[Pair], num_bytes: int) -> tuple[Pair, float]:
        """The pair that can send first, and the moment at which its bytes have left."""
        with open(self.path, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            moments = array("d", file.read())

            def ends(pair: Pair) -> tuple[int, int]:
                return 2 * (rank // self.ranks_per_host), 2 * (pair[0] // self.ranks_per_host) + 1

            def start(pair: Pair) -> float:
                return max(moments[end] for end in ends(pair))

            pair = min(pairs, key=start)
            begun = max(start(pair), time.monotonic() - DEPTH_SECONDS)
            left = begun + 8 * num_bytes / (self.mbit * 1e6)
            for end in ends(pair):
                moments[end] = left
            file.seek(0)
            file.write(moments)
        return pair, left


@contextmanager
def nics(hosts: int, ranks_per_host: int, mbit: float) -> Iterator[Nics]:
    """NICs that are free now, for as long as the block lasts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "nics"
        path.write_bytes(array("d", [0.0, 0.0]) * hosts)
        yield Nics(str(path), ranks_per_host, mbit)


class RateLimited:
    """Messages over gloo, as slow between hosts as their NICs would be."""

    receives_ahead = 1
    node_size: int | None = None

    def __init__(self, group: dist.ProcessGroup, speeds: Nics) -> None:
        self._group, self._nics = group, speeds
        self._records = DistTransport(group)
        self.rank, self.world_size = self._records.rank, self._records.world_size
        self.bytes_sent = self.messages_sent = 0
        self._queues: OrderedDict[Pair, deque[Tensor]] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1)
        self._pumping: list[Future[None]] = []
        self._sent: list[tuple[dist.Work | None, Tensor]] = []
        self._arrivals: list[_Arrival] = []

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], lane: int = 0) -> Handle:
        sends = travelling(sends, self.rank, self.world_size)
        tag = _TAG + lane
        arrival = _Arrival(
            dist.irecv(chunk, group=self._group, tag=tag, group_src=message.peer)
            for message in travelling(recvs, self.rank, self.world_size)
            for chunk in self._chunks(message)
        )
        self._arrivals.append(arrival)
        with self._lock:
            for message in sends:
                queue = self._queues.setdefault((message.peer, lane), deque())
                queue.extend(self._chunks(message))
        self.bytes_sent += sum(message.tensor.nbytes for message in sends)
        self.messages_sent += len(sends)
        if sends:
            self._pumping.append(self._thread.submit(self._pump))
        return arrival

    def gather_records(self, record: Tensor) -> list[Tensor]:
        return self._records.gather_records(record)

    def finish(self) -> None:
        for pumped in self._pumping:
            pumped.result()
        _Arrival(work for work, _ in self._sent).wait()
        for arrival in self._arrivals:
            arrival.wait()
        self._pumping, self._sent, self._arrivals = [], [], []

    def _chunks(self, message: Message) -> Sequence[Tensor]:
        flat = message.tensor.view(-1)
        return (flat,) if self._is_near(message.peer) else flat.split(CHUNK_BYTES)

    def _is_near(self, peer: int) -> bool:
        size = self._nics.ranks_per_host
        return peer // size == self.rank // size

    def _pump(self) -> None:
        """Send all that is queued, peers in turn, each chunk at its time."""
        while True:
            with self._lock:
                pairs = list(self._queues)
            near = [pair for pair in pairs if self._is_near(pair[0])]
            if not pairs:
                return
            if near:
                pair = near[0]
            else:
                pair, end = self._nics.reserve(self.rank, pairs, CHUNK_BYTES)
                time.sleep(max(0.0, end - time.monotonic()))
            with self._lock:
                queue = self._queues.pop(pair)
                chunk = queue.popleft()
                if queue:
                    self._queues[pair] = queue  # behind the others
            peer, lane = pair
            work = dist.isend(chunk, group=self._group, tag=_TAG + lane, group_dst=peer)
            self._sent.append((work, chunk))


class _Arrival:
    """Messages, each waited for at most once (on gloo a second wait blocks)."""

    def __init__(self, works: Iterable[dist.Work | None]) -> None:
        self._works = [work for work in works if work is not None]

    def wait(self) -> None:
        while self._works:
            self._works.pop(0).wait()

"""A tree of sockets among the processes of a group, over which they compare their records.

The group itself would do, and takes twelve times the processor time: docs/execution.md.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta
from hashlib import blake2b
from ipaddress import ip_address
from struct import Struct
from threading import Lock
from time import monotonic
from weakref import WeakKeyDictionary, finalize, ref

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from tilewise.transport.lost_rank import LostRankError, failure_of
from tilewise.transport.nccl_groups import CPU, CUDA, group_store
from tilewise.transport.protocol import Message

_BRANCHES = 4
_GREETING = Struct("<16si")  # the listener's secret, who connects
_REPORT = Struct("<16s?i")  # digest, whether all below have it, the rank lost
_VERDICT = Struct("<?Ii")  # whether all have the same, the agreement's number, the rank lost
_GREETING_SECONDS = 5.0  # for who has connected to say who it is
_NOBODY, _LABEL = -1, "agreement"
_LATER = 1.0  # seconds by which a rank waits longer than those from whom it hears who was late


class RecordTree:
    """This rank's sockets to the ranks below it and to the one above.

    The first object of a group is made by all of its ranks together. They meet where the group's
    store is: each listens where it reaches the store's host from.

    Attributes:
        number: of the last comparison, the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, seconds: float) -> None:
        """seconds: for which this rank waits for the others to come; 0: the group's timeout."""
        self.number: int | None = None
        self._group, self._lock, self._until = ref(group), Lock(), 0.0
        self._timeout = _timeout(group)
        self._rank, self._size = group.rank(), group.size()
        first = self._rank * _BRANCHES + 1
        self._below = range(first, min(first + _BRANCHES, self._size))
        self._above = (self._rank - 1) // _BRANCHES
        later = {peer: _height(peer, self._size) for peer in self._below}
        later[self._above] = _height(0, self._size) + 1
        self._later = {peer: _LATER * ranks for peer, ranks in later.items()}
        self._ends: dict[int, socket.socket] = {}
        try:
            self._connect(group_store(group, "records"), seconds or self._timeout)
        except (OSError, RuntimeError) as error:
            missing = [rank for rank in self._below if rank not in self._ends]
            waits_above = self._rank and self._above not in self._ends
            peer = self._above if waits_above or not missing else missing[0]
            _close(self._ends)
            raise _failure(peer, "connecting to", error, group) from error
        self.close = finalize(group, _close, self._ends)

    def _connect(self, store: Store, seconds: float) -> None:
        host, secret, own = _host(store), os.urandom(16), str(self._rank)
        family, here = _address_towards(host)
        with socket.create_server(("", 0), family=family) as listener:
            if self._below:
                store.set(own, f"{here} {listener.getsockname()[1]} {secret.hex()}")
            if self._rank:
                store.wait([str(self._above)], timedelta(seconds=seconds))
                there, port, theirs = store.get(str(self._above)).decode().split()
                # What the store's host calls itself; others know it by the store's name for it.
                there = host if ip_address(there).is_loopback else there
                end = socket.create_connection((there, int(port)), seconds)
                end.sendall(_GREETING.pack(bytes.fromhex(theirs), self._rank))
                self._keep(self._above, end)
            listener.settimeout(seconds)
            while not self._ends.keys() >= {*self._below}:
                end = listener.accept()[0]
                end.settimeout(min(seconds, _GREETING_SECONDS))
                with suppress(OSError):
                    greeting, rank = _GREETING.unpack(_read(end, _GREETING.size))
                    if greeting == secret and rank in self._below:  # else a stranger
                        self._keep(rank, end)
        if self._below:  # a later group of this name finds its own
            store.delete_key(own)

    def _keep(self, rank: int, end: socket.socket) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ends[rank] = end

    def records(self, record: bytes, seconds: float) -> list[bytes]:
        """Every rank's record, by rank; all are of one size.

        Digests go up and the verdict comes down, 2 (n - 1) short messages; where all have the
        same, that is all. The verdict also numbers the comparison, or says which rank is lost.

        Args:
            seconds: for which a rank is waited for; 0: the group's timeout.
        Raises:
            LostRankError: on every rank, if one of them does not answer.
        """
        with self._lock:
            self._until = monotonic() + (seconds or self._timeout)
            if self._same(record):
                return [record] * self._size
            return self._all(record)

    def _same(self, record: bytes) -> bool:
        digest = blake2b(record, digest_size=16).digest()
        same, failure, lost, number = True, None, _NOBODY, int.from_bytes(os.urandom(4))
        for peer in self._below:
            try:
                theirs, alike, of_them = _REPORT.unpack(self._hear(peer, _REPORT.size))
            except LostRankError as error:  # the others still have to hear of it
                failure, of_them, alike, theirs = failure or error, error.rank, False, b""
            same, lost = same and alike and theirs == digest, max(lost, of_them)
        if self._rank:
            try:
                self._tell(self._above, _REPORT.pack(digest, same, lost))
                verdict = self._hear(self._above, _VERDICT.size)
                same, number, lost = _VERDICT.unpack(verdict)
            except LostRankError as error:
                failure, lost = failure or error, error.rank
        for peer in self._below:
            with suppress(LostRankError):
                self._tell(peer, _VERDICT.pack(same, number, lost))
        if lost != _NOBODY:
            raise failure or LostRankError(f"{_LABEL}: rank {lost} failed", lost)
        self.number = number
        return same

    def _all(self, record: bytes) -> list[bytes]:
        """The table of all records, made by adding those below and passed down whole."""
        table = bytearray(self._size * len(record))
        table[self._rank * len(record) : (self._rank + 1) * len(record)] = record
        whole = np.frombuffer(table, np.uint8)
        for peer in self._below:
            whole |= np.frombuffer(self._hear(peer, len(table)), np.uint8)
        if self._rank:
            self._tell(self._above, table)
            table[:] = self._hear(self._above, len(table))
        for peer in self._below:
            self._tell(peer, table)
        return [bytes(table[i : i + len(record)]) for i in range(0, len(table), len(record))]

    def _tell(self, peer: int, data: bytes | bytearray) -> None:
        try:
            self._end(peer).sendall(data)
        except OSError as error:
            raise self._lost(peer, "sending to", error) from error

    def _hear(self, peer: int, size: int) -> bytes:
        try:
            end = self._end(peer)
            end.settimeout(max(self._until + self._later[peer] - monotonic(), 1e-3))
            return _read(end, size)
        except OSError as error:
            raise self._lost(peer, "receiving from", error) from error

    def _end(self, peer: int) -> socket.socket:
        if peer not in self._ends:
            raise ConnectionError("it did so before; make a new group of the ranks that are left")
        return self._ends[peer]

    def _lost(self, peer: int, verb: str, error: OSError) -> LostRankError:
        if peer in self._ends:  # what comes late would be taken for a later answer
            self._ends.pop(peer).close()
        group = self._group()
        assert group is not None
        return _failure(peer, verb, error, group)


class RecordTrees:
    """The tree of each group."""

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[dist.ProcessGroup, RecordTree] = WeakKeyDictionary()

    def of(self, group: dist.ProcessGroup, seconds: float) -> RecordTree:
        tree = self._made.get(group)
        if tree is None:
            tree = self._made[group] = RecordTree(group, seconds)
        return tree

    def close(self, group: dist.ProcessGroup) -> None:
        """Let the ranks beside this one know that it compares no more."""
        tree = self._made.get(group)
        if tree is not None:
            tree.close()


RECORD_TREES = RecordTrees()


def _height(rank: int, size: int) -> int:
    """How many ranks are below each other below this one."""
    first = rank * _BRANCHES + 1
    return 0 if first >= size else 1 + _height(first, size)


def _failure(
    peer: int, verb: str, error: OSError | RuntimeError, group: dist.ProcessGroup
) -> LostRankError:
    if isinstance(error, TimeoutError):
        text = "it is late, stopped, or not in a call that compares (validate='never', other code)"
        error = TimeoutError(text)
    return failure_of([Message(torch.empty(0), peer, _LABEL)], verb, error, group)


def _timeout(group: dist.ProcessGroup) -> float:
    """Seconds."""
    for device in (CPU, CUDA):
        with suppress(RuntimeError):  # of a device that the group has no backend for
            return group._get_backend(device).options._timeout.total_seconds()
    raise ValueError(f"the group {group} has no backend for CPU or CUDA tensors")


def _read(end: socket.socket, size: int) -> bytes:
    data = end.recv(size)
    while len(data) < size:
        more = end.recv(size - len(data))
        if not more:
            raise ConnectionError("it has closed the connection")
        data += more
    return data


def _close(ends: dict[int, socket.socket]) -> None:
    for end in ends.values():
        end.close()


def _host(store: Store) -> str:
    """Where a group's store is; this host for stores that are files."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store  # pyright: ignore[reportAttributeAccessIssue]
    return getattr(store, "host", None) or socket.gethostname()


def _address_towards(host: str) -> tuple[socket.AddressFamily, str]:
    """This host's address on the way to another one, or to itself."""
    with suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as asked:
                asked.connect(place)  # of datagrams: nothing is sent
                return family, asked.getsockname()[0]
    return socket.AF_INET, "127.0.0.1"

"""Linux network namespaces from inside: entering one, and reading or setting what belongs to it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

FOLDER = Path("/run/netns")  # where `ip netns` keeps them
_NEW_NETWORK, _NEW_HOSTNAME = 0x40000000, 0x04000000  # CLONE_NEWNET, CLONE_NEWUTS
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_Result = TypeVar("_Result")


class Counters(NamedTuple):
    """Bytes and packets of one interface: Ethernet frames, those that TCP left uncut as one."""

    received_bytes: int
    received_packets: int
    sent_bytes: int
    sent_packets: int


def inside(name: str, fn: Callable[[], _Result]) -> _Result:
    """fn's result in a namespace; the calling thread stays where it is."""

    def entered() -> _Result:
        _enter(name)
        return fn()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(entered).result()


def become_host(name: str, address: str) -> None:
    """Move this process, which has one thread, into a namespace, under its address as hostname.

    gloo listens on the address that the hostname stands for. The process ends with its parent.
    """
    _enter(name)
    _call("unshare", _NEW_HOSTNAME)
    socket.sethostname(address)
    _call("prctl", _SET_DEATH_SIGNAL, signal.SIGKILL)


def read_counters() -> dict[str, Counters]:
    """Of every interface in the calling thread's namespace."""
    found = {}
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]:
        interface, _, numbers = line.partition(":")
        values = [int(number) for number in numbers.split()]
        found[interface.strip()] = Counters(values[0], values[1], values[8], values[9])
    return found


def set_options(options: Iterable[tuple[str, str]]) -> None:
    """Set network options by their path under /proc/sys/net, in the calling thread's namespace."""
    for path, value in options:
        Path("/proc/sys/net", path).write_text(value)


def _enter(name: str) -> None:
    descriptor = os.open(FOLDER / name, os.O_RDONLY)
    try:
        _call("setns", descriptor, _NEW_NETWORK)
    finally:
        os.close(descriptor)


def _call(function: str, *args: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, function)(*args) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{function}{args}: {os.strerror(error)}")

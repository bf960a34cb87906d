"""The site of a lab: a bridge in a namespace of its own, and a namespace for each host.

host 0            host 1                 everything is in namespaces of ours,
[ranks 0..r-1]    [ranks r..2r-1]        so that the machine's own network
  eth0 (tbf)        eth0 (tbf)           sees none of it
    |                 |
  port0 (tbf)       port1 (tbf)
[ ------ bridge ------------- ]          the switch
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

MOST_HOSTS = 250  # the last number of an address
# 64 kB make the kernel cut every packet in software: 40 % slower on two cores.
BURST = "160kb"
# Deep enough never to drop: a dropped packet measures TCP, not the strategy.
LIMIT = "32mb"
HEADER_BYTES = 66  # Ethernet 14, IP 20, TCP 20 and its timestamps 12
CONGESTION = "reno"  # bbr paces by itself, which slows a ring and flatters a mesh
_OPTIONS = (
    ("ipv4/tcp_congestion_control", CONGESTION),
    ("ipv4/tcp_slow_start_after_idle", "0"),
    ("ipv6/conf/all/disable_ipv6", "1"),  # its announcements would be counted
)


class LabError(RuntimeError):
    """A lab cannot be made here; the message says what is missing."""


class NicTraffic(NamedTuple):
    """Bytes that one host's NIC moved since the lab was made, as its port of the switch counted
    them.

    Bytes are those of Ethernet frames: payload, headers and acknowledgements. Packets that TCP
    hands over uncut count as one, with one header.
    """

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int

    @property
    def sent_payload(self) -> int:
        """Bytes that TCP was given to send: no headers, no acknowledgements."""
        return self.sent_bytes - HEADER_BYTES * self.sent_packets

    def since(self, before: NicTraffic) -> NicTraffic:
        """Return what was added to an earlier reading."""
        return NicTraffic(*(b - a for a, b in zip(before, self, strict=True)))


class Site(NamedTuple):
    """The names and numbers of one lab; a rank's process gets it too."""

    name: str  # what the names of all its namespaces begin with
    hosts: int
    ranks_per_host: int
    mbit: float  # of every NIC and in each direction, 10^6 bits of Ethernet frames a second

    @property
    def world_size(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def switch(self) -> str:
        return f"{self.name}-switch"

    @property
    def namespaces(self) -> tuple[str, ...]:
        return (self.switch, *map(self.host, range(self.hosts)))

    def host(self, host: int) -> str:
        return f"{self.name}-host{host}"

    def enter(self, rank: int) -> None:
        """Make this process, which has one thread, a rank's: it moves to the rank's host.

        gloo listens on the address that the hostname stands for, so that is made the host's
        address. The process ends with its parent.
        """
        host = rank // self.ranks_per_host
        _enter(self.host(host))
        _call("unshare", _NEW_HOSTNAME)
        socket.sethostname(_address(host))
        _call("prctl", _SET_DEATH_SIGNAL, signal.SIGKILL)

    def counters(self) -> tuple[NicTraffic, ...]:
        """Return the counters of every host, read at the switch; any process of this machine may
        ask.
        """
        ports = inside(self.switch, read_counters)
        return tuple(ports[_port(host)] for host in range(self.hosts))


def missing() -> str | None:
    """Return what a lab needs and this machine lacks; None if it may work."""
    if sys.platform != "linux":
        return f"network namespaces need Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root; run it with sudo"
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"the command {command!r} is missing; install iproute2"
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    if CONGESTION not in allowed:
        return f"TCP {CONGESTION} is not in net.ipv4.tcp_allowed_congestion_control; add it"
    return None


def build(site: Site) -> None:
    """Make everything; what stands when it raises is demolish's to remove."""
    hosts = range(site.hosts)
    _batch("ip", [f"netns add {name}" for name in site.namespaces])
    switch = ["link add name bridge0 type bridge stp_state 0 mcast_snooping 0"]
    for host in hosts:
        switch += [
            f"link add name {_port(host)} type veth "
            f"peer name eth0 address {_mac(host)} netns {site.host(host)}",
            f"link set dev {_port(host)} master bridge0 up",
        ]
    inside(site.switch, _set_options)
    _batch("ip", [*switch, "link set dev bridge0 up"], site.switch)
    _batch("tc", [_bucket(_port(host), site.mbit) for host in hosts], site.switch)
    for host in hosts:
        name = site.host(host)
        inside(name, _set_options)
        neighbours = (
            f"neigh add {_address(other)} lladdr {_mac(other)} dev eth0 nud permanent"
            for other in hosts
            if other != host
        )
        addresses = ["link set dev lo up", f"addr add {_address(host)}/24 dev eth0"]
        _batch("ip", [*addresses, "link set dev eth0 up", *neighbours], name)
        _batch("tc", [_bucket("eth0", site.mbit)], name)


def demolish(namespaces: Sequence[str]) -> None:
    """Remove namespaces that were made for a lab, the switch first, and all that is in them."""
    known = {line.split()[0] for line in _batch("ip", ["netns list"]).splitlines() if line}
    for name in namespaces:
        if name not in known:
            continue
        # A namespace lives on while a process is in it; its links need not.
        links = [
            link for link in inside(name, read_counters) if link.startswith(("port", "bridge"))
        ]
        _batch("ip", [f"link delete dev {link}" for link in links], name)
        _batch("ip", [f"netns delete {name}"])


def _set_options() -> None:
    """Set what the calling thread's namespace has of _OPTIONS."""
    for name, value in _OPTIONS:
        path = Path("/proc/sys/net", name)
        if path.exists():
            path.write_text(value)


def _bucket(interface: str, mbit: float) -> str:
    rate = f"{round(mbit * 1e6)}bit"
    return f"qdisc add dev {interface} root tbf rate {rate} burst {BURST} limit {LIMIT}"


def _port(host: int) -> str:
    return f"port{host}"


def _address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def _mac(host: int) -> str:
    return f"02:77:00:00:00:{host + 1:02x}"


def _batch(command: str, lines: list[str], namespace: str | None = None) -> str:
    """Run lines of ip or tc, in a namespace."""
    where = ["-n", namespace] if namespace else []
    process = subprocess.run(
        [command, *where, "-batch", "-"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
    )
    if process.returncode:
        errors = " ".join(process.stderr.split())
        raise LabError(f"{command} in {namespace or 'this namespace'}: {errors}")
    return process.stdout


FOLDER = Path("/run/netns")  # where `ip netns` keeps them
_NEW_NETWORK, _NEW_HOSTNAME = 0x40000000, 0x04000000  # CLONE_NEWNET, CLONE_NEWUTS
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_Result = TypeVar("_Result")


def inside(name: str, fn: Callable[[], _Result]) -> _Result:
    """Call fn in a network namespace, return its result; the calling thread stays where it is."""

    def entered() -> _Result:
        _enter(name)
        return fn()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(entered).result()


def read_counters() -> dict[str, NicTraffic]:
    """Return the counters at the other end of every interface in the calling thread's namespace."""
    counters = {}
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]:
        interface, _, numbers = line.partition(":")
        values = [int(number) for number in numbers.split()]
        # What an interface receives the other end has sent.
        counters[interface.strip()] = NicTraffic(values[0], values[8], values[1], values[9])
    return counters


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

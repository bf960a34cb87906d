"""A lab as a context, and the records by which what a killed process left behind is removed."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tilewise.arguments import require_range
from tilewise.tools.lab.site import (
    FOLDER,
    MOST_HOSTS,
    LabError,
    NicTraffic,
    Site,
    build,
    demolish,
    missing,
)
from tilewise.transport.processes import gather_yields, run_ranks


class Lab:
    """Hosts on one machine, each with a NIC of a chosen speed, and ranks on them.

        with Lab(hosts=4, ranks_per_host=2, mbit=50) as lab:
            results = lab.run(fn, *args)

    Rank r is on host r // ranks_per_host. Ranks of one host reach each other at full speed. Every
    rank is a process whose default group is gloo over its host's NIC.

    Args:
        mbit: of each NIC and direction, 10^6 bits a second of Ethernet frames; of payload it
            carries 1448 / 1514.
    Raises:
        ValueError: where a number is out of range.
        LabError: on entry, where root, a command or a part of the kernel is missing.
    """

    def __init__(self, hosts: int, ranks_per_host: int = 1, *, mbit: float = 50.0) -> None:
        require_range("hosts", hosts, 1, MOST_HOSTS)
        require_range("ranks_per_host", ranks_per_host)
        require_range("mbit", mbit, 1, 100_000)
        self.hosts, self.ranks_per_host, self.mbit = hosts, ranks_per_host, mbit
        self._site: Site | None = None

    @property
    def site(self) -> Site:
        if self._site is None:
            raise ValueError("the lab is not there yet, or no more; use it inside 'with Lab(...)'")
        return self._site

    @property
    def world_size(self) -> int:
        return self.hosts * self.ranks_per_host

    def __enter__(self) -> Lab:
        clean()
        site = claim(self.hosts, self.ranks_per_host, self.mbit)
        try:
            build(site)
        except BaseException:
            release(site)
            raise
        self._site = site
        return self

    def __exit__(self, *_: object) -> None:
        site, self._site = self.site, None
        release(site)

    def run(self, fn: Callable[..., Any], *args: Any, timeout_seconds: float = 60.0) -> list[Any]:
        """fn(rank, *args) of every rank; see tilewise.transport.processes.run_ranks."""
        site = self.site
        return run_ranks(
            site.world_size, fn, *args, timeout_seconds=timeout_seconds, settle=site.enter
        )

    def gather_yields(
        self, fn: Callable[..., Iterator[Any]], *args: Any, timeout_seconds: float = 60.0
    ) -> Iterator[tuple[Any, ...]]:
        """What the generators fn(rank, *args) yield; see transport.processes.gather_yields."""
        site = self.site
        return gather_yields(
            site.world_size, fn, args, timeout_seconds=timeout_seconds, settle=site.enter
        )

    def counters(self) -> tuple[NicTraffic, ...]:
        """What each host's NIC has moved, counted at the switch; ranks call lab.site.counters."""
        return self.site.counters()


RECORDS = Path("/run/tilewise-lab")


def claim(hosts: int, ranks_per_host: int, mbit: float) -> Site:
    """A site whose names are free, recorded as this process's."""
    pid = os.getpid()
    with _locked():
        number = 0
        while _taken(f"tilewise-{pid}-{number}"):
            number += 1
        site = Site(f"tilewise-{pid}-{number}", hosts, ranks_per_host, mbit)
        record = {"pid": pid, "started": _started(pid), "namespaces": site.namespaces}
        unnamed = RECORDS / "unnamed"  # a record is there whole or not at all
        unnamed.write_text(json.dumps(record))
        unnamed.rename(_path(site.name))
    return site


def release(site: Site) -> None:
    """Remove a site and its record."""
    demolish(site.namespaces)
    _path(site.name).unlink()


def clean() -> list[str]:
    """Remove what labs of ended processes left behind; return their names.

    Raises:
        LabError: where root or a command is missing.
    """
    reason = missing()
    if reason:
        raise LabError(reason)
    removed = []
    with _locked():
        for path in sorted(RECORDS.glob("*.json")):
            record = json.loads(path.read_text())
            if _started(record["pid"]) != record["started"]:
                demolish(tuple(record["namespaces"]))
                path.unlink()
                removed.append(path.stem)
    return removed


@contextmanager
def _locked() -> Iterator[None]:
    """Alone among this machine's processes."""
    RECORDS.mkdir(exist_ok=True)
    with (RECORDS / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _taken(name: str) -> bool:
    return _path(name).exists() or any(FOLDER.glob(f"{name}-*"))


def _path(name: str) -> Path:
    return RECORDS / f"{name}.json"


def _started(pid: int) -> int | None:
    """When a process began, in clock ticks since boot: with its id, it names it for good."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])

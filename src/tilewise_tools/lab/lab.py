"""A lab as a context, and the records by which what a killed process left behind is removed."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from tilewise.arguments import require_range
from tilewise.transport.processes import gather_yields, run_ranks
from tilewise_tools.lab.site import (
    FOLDER,
    MOST_HOSTS,
    LabError,
    NicTraffic,
    Site,
    build,
    demolish,
    missing,
)


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
        site = _claimed(self.hosts, self.ranks_per_host, self.mbit)
        try:
            build(site)
        except BaseException:
            _remove(site.name, site.namespaces)
            raise
        self._site = site
        return self

    def __exit__(self, *_: object) -> None:
        site, self._site = self.site, None
        _remove(site.name, site.namespaces)

    def run(self, fn: Callable[..., Any], *args: Any, timeout_seconds: float = 60.0) -> list[Any]:
        """fn(rank, *args) of every rank; see tilewise.transport.processes.run_ranks."""
        words = {"timeout_seconds": timeout_seconds, "settle": self.site.enter}
        return run_ranks(self.world_size, fn, *args, **words)

    def gather_yields(
        self, fn: Callable[..., Iterator[Any]], *args: Any, timeout_seconds: float = 60.0
    ) -> Iterator[tuple[Any, ...]]:
        """Yield what the generators fn(rank, *args) yield; see
        transport.processes.gather_yields.
        """
        words = {"timeout_seconds": timeout_seconds, "settle": self.site.enter}
        return gather_yields(self.world_size, fn, args, **words)

    def counters(self) -> tuple[NicTraffic, ...]:
        """Return what each host's NIC has moved, counted at the switch; ranks call
        lab.site.counters.
        """
        return self.site.counters()


RECORDS = Path("/run/tilewise-lab")


def _claimed(hosts: int, ranks_per_host: int, mbit: float) -> Site:
    """A site whose names are free, recorded as this process's."""
    pid = os.getpid()
    with _locked():
        names = (f"tilewise-{pid}-{number}" for number in count())
        name = next(n for n in names if not (_path(n).exists() or any(FOLDER.glob(f"{n}-*"))))
        site = Site(name, hosts, ranks_per_host, mbit)
        record = {"pid": pid, "started": _started(pid), "namespaces": site.namespaces}
        unnamed = RECORDS / "unnamed"  # a record is there whole or not at all
        unnamed.write_text(json.dumps(record))
        unnamed.rename(_path(name))
    return site


def _remove(name: str, namespaces: Sequence[str]) -> None:
    """Remove a site, then its record."""
    demolish(namespaces)
    _path(name).unlink()


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
                _remove(path.stem, record["namespaces"])
                removed.append(path.stem)
    return removed


@contextmanager
def _locked() -> Iterator[None]:
    """Alone among this machine's processes."""
    RECORDS.mkdir(exist_ok=True)
    with (RECORDS / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _path(name: str) -> Path:
    return RECORDS / f"{name}.json"


def _started(pid: int) -> int | None:
    """Return when a process began, in clock ticks since boot: with its id, it names it for good."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])

"""Who owns which lab, on disk: so that what a killed process left behind is found and removed.

A lab's record is written before the first thing is made and names all that will be, so nothing
else is ever touched. It lies in /run, which like the namespaces does not survive a reboot.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tilewise.tools.lab.namespaces import FOLDER
from tilewise.tools.lab.site import LabError, Site, demolish, missing

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

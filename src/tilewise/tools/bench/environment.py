"""Where a figure was measured: versions, processor, clocks, commit, load of the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def versions(device: str) -> dict[str, str]:
    """What must be the same for a finished row to be taken as it is."""
    return {
        "tilewise": installed("tilewise"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu(),
    }


def environment(device: str) -> dict[str, Any]:
    """Fields of every row; what changes from row to row is asked anew each time."""
    known = versions(device)
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "tilewise_version": known["tilewise"],
        "torch_version": known["torch"],
        "python_version": known["python"],
        "os": platform.platform(),
        "cpu": _cpu(),
        "gpu": known["device"] if device == "cuda" else None,
        "cores": os.cpu_count(),
        "threads": 1,
        "mhz": _mhz(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def installed(package: str) -> str:
    """Its version; sources that are only on the path have none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


@cache
def _cpu() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _mhz() -> float | None:
    text = _cpuinfo("cpu MHz")
    return float(text) if text else None


def _cpuinfo(field: str) -> str | None:
    """The first value of a field of /proc/cpuinfo; None where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    found = (line.partition(":")[2].strip() for line in lines if line.startswith(field))
    return next(found, None)


@cache
def _commit() -> str | None:
    """The source tree's, asked once, with a + where it was changed; None outside of one."""
    here = Path(__file__).parent
    try:
        described = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--exclude=*", "--dirty=+"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except OSError:
        return None
    return described.stdout.strip() or None

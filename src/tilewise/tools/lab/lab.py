"""A lab as a context: made on entry, removed on exit, and ranks run in it in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from tilewise.tools.lab.leftovers import claim, clean, release
from tilewise.tools.lab.site import MOST_HOSTS, NicTraffic, Site, build
from tilewise.tools.processes import gather_yields, run_ranks


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
        if not 1 <= hosts <= MOST_HOSTS:
            raise ValueError(f"hosts ({hosts}) must be from 1 to {MOST_HOSTS}")
        if ranks_per_host < 1:
            raise ValueError(f"ranks_per_host ({ranks_per_host}) must be at least 1")
        if not 1 <= mbit <= 100_000:
            raise ValueError(f"mbit ({mbit}) must be from 1 to 100000")
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        site, self._site = self.site, None
        release(site)

    def run(self, fn: Callable[..., Any], *args: Any, timeout_seconds: float = 60.0) -> list[Any]:
        """fn(rank, *args) of every rank; see tilewise.processes.run_ranks."""
        site = self.site
        return run_ranks(
            site.world_size, fn, *args, timeout_seconds=timeout_seconds, settle=site.enter
        )

    def gather_yields(
        self, fn: Callable[..., Iterator[Any]], *args: Any, timeout_seconds: float = 60.0
    ) -> Iterator[tuple[Any, ...]]:
        """What the generators fn(rank, *args) yield; see tilewise.processes.gather_yields."""
        site = self.site
        return gather_yields(
            site.world_size, fn, args, timeout_seconds=timeout_seconds, settle=site.enter
        )

    def counters(self) -> tuple[NicTraffic, ...]:
        """What each host's NIC has moved, counted at the switch; ranks call lab.site.counters."""
        return self.site.counters()

"""Ranks that torchrun or a scheduler started, on any hosts: rank 0 runs the benchmark for all.

Every launched process keeps one rank process of its own, which joins the others' over the store
that the launcher has set up. So a contender that dies or hangs costs its own row here too.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from tilewise.transport.nodes import local_world_size
from tilewise.transport.processes import PlacedProcesses, RankError, RankFailure
from tilewise_tools.bench.case import LabNetwork
from tilewise_tools.bench.inputs import write_inputs
from tilewise_tools.bench.measure import Job
from tilewise_tools.bench.worlds import Answers, Blamed, World

_CONTROL_TIMEOUT = timedelta(days=7)  # rank 0 may be busy with what needs no ranks


class LaunchedWorld(World):
    """A world whose ranks are those of all launched processes, this one's among them."""

    def __init__(self, launched: Launched, timeout_seconds: float, device: str):
        super().__init__(launched.world_size, timeout_seconds, device)
        self.launched, self._starts = launched, 0

    def run(
        self, job: Job, progress: Callable[[int], object] = lambda _: None
    ) -> list[tuple[Any, ...]]:
        if self.launched.rank == 0:
            self.launched.broadcast((job, self.timeout_seconds, self.device))
        return super().run(replace(job, inputs=self.launched.inputs_of(job)), progress)

    def _started(self) -> Answers:
        """Return all ranks' answers, or how some failed; every launched process gets the same."""
        launched = self.launched
        self._starts += 1  # a world that starts again meets under another name
        store = launched.store.host, launched.store.port, f"bench {self.device} {self._starts}"
        gpus = launched.network.ranks_per_host if self.device == "cuda" else 0
        job = None
        with closing(
            self._processes(PlacedProcesses(1, launched.rank, self.world_size, store, gpus))
        ) as answers:
            while True:
                answer: tuple[Any, ...] = ()
                failures: tuple[RankFailure, ...] = ()
                try:
                    with suppress(StopIteration):
                        answer = answers.send(job)
                except RankError as error:
                    failures = error.failures
                found = launched.gather((answer, failures))
                failed = tuple(failure for _, many in found for failure in many)
                if failed or not all(answer for answer, _ in found):
                    raise RankError("some ranks failed", failed)
                job = yield tuple(answer[0] for answer, _ in found)


class Launched:
    """The processes that were launched together, and what they send each other.

    Attributes:
        network: hosts and ranks on each; one host is loopback.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        dist.init_process_group(
            "gloo",
            store=distributed_c10d.PrefixStore("control", store),
            rank=rank,
            world_size=world_size,
            timeout=_CONTROL_TIMEOUT,
        )
        local = local_world_size()
        host = self.rank // local if local else socket.gethostname()
        self._hosts = self.gather(host)
        counts = [self._hosts.count(one) for one in dict.fromkeys(self._hosts)]
        if len(set(counts)) > 1:
            raise ValueError(f"hosts have {counts} ranks; start as many on each")
        name = "loopback" if len(counts) == 1 else "cluster"
        self.network = LabNetwork(name, len(counts), counts[0])
        self._folder = tempfile.TemporaryDirectory()

    @classmethod
    def joined(cls) -> Launched | None:
        """These processes; None where nothing launched this one."""
        try:
            return cls(*next(rendezvous("env://")))
        except ValueError as error:
            if "RANK expected" in str(error):
                return None
            raise

    def close(self) -> None:
        """End the others' serving, if this is rank 0."""
        if self.rank == 0:
            self.broadcast(None)
        self._folder.cleanup()
        dist.destroy_process_group()

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, by rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> None:
        dist.broadcast_object_list([value])

    def inputs_of(self, job: Job) -> str:
        """A job's inputs on this host: where rank 0 left them, or made again by its first rank."""
        first, path = self._hosts.index(self._hosts[self.rank]), job.inputs
        if first == self.rank and first:
            path = str(Path(self._folder.name) / "inputs")
            write_inputs(job.case, job.case.make_mask(), job.timing.truth_pairs, Path(path))
        return self.gather(path)[first]

    def serve(self) -> None:
        """The life of all processes but rank 0's: its jobs, until it ends."""
        world: LaunchedWorld | None = None
        while True:
            message: list[Any] = [None]
            dist.broadcast_object_list(message)
            if world is not None and (message[0] is None or world.device != message[0][2]):
                world.close()
                world = None
            if message[0] is None:
                return
            job, *about = message[0]
            world = world or LaunchedWorld(self, *about)
            with suppress(Blamed):
                world.run(job)

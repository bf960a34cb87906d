"""Cases to rows, by processes that may crash or hang: every case gets its row, whatever happens."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

from benchmarks.gpu_parts.case import Case, Row
from benchmarks.gpu_parts.clocks import Clocks
from benchmarks.gpu_parts.worker import LostError, Worker

FIGURES = ("right", "_tflops", "_share", "_gain", "_passes_ms", "_tbps", "error", "skipped")
LAST_SECONDS = 8.0  # of the whole time, for what is under way to end
MOST_HUNG = 2  # cases of one kernel, which wait till their limits; no more of it after them


class Runner:
    """One run, to be closed: rows to a file as they come, a line for each on the screen.

    Args:
        answer: "module:function" that measures a case; see `Worker`.
        path: of the rows; what processes print goes beside it, to .log.
        seconds: for all.
        given: what every question holds beside the case.

    Attributes:
        stamp: what every row holds beside the case and its figures.
    """

    def __init__(self, answer: str, path: Path, seconds: float, given: Row):
        self.path, self.rows = path, list[Row]()
        self.clocks: Clocks | None = None
        self.stamp: Row = {}
        self._answer, self._given = answer, given
        self._began = time.monotonic()
        self._end = self._until = self._began + seconds - LAST_SECONDS
        self._hung: Counter[str] = Counter()
        self._workers: set[Worker] = set()
        self._spare: Worker | None = None
        self._lock = threading.Lock()
        self._log = path.with_suffix(".log")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        self._log.write_text("")

    def close(self) -> None:
        self._stop()
        if self.clocks is not None:
            self.clocks.close()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def ask(self, case: Case) -> Row:
        """One case in a process of its own, which is not kept."""
        self.run_lane([case])
        return self.rows[-1]

    def run(
        self,
        cases: Sequence[Case],
        at_once: int = 1,
        share: float = 1.0,
        seconds: float = math.inf,
    ) -> None:
        """All cases: in their order, or lane by lane, several lanes side by side.

        Args:
            share: of the time that is left; what does not fit into it is skipped.
            seconds: at most.
        """
        now = time.monotonic()
        self._until = now + min(share * (self._end - now), seconds)
        if at_once == 1:
            for _, lane in groupby(cases, lambda case: case.lane):
                self.run_lane(list(lane))
            return
        lanes: dict[str, list[Case]] = {}
        for case in cases:
            lanes.setdefault(case.lane, []).append(case)
        with ThreadPoolExecutor(at_once) as pool:
            try:
                list(pool.map(self.run_lane, lanes.values()))
            except BaseException:  # the pool would wait for lanes that nobody wants any more
                self._stop()
                raise

    def run_lane(self, cases: Sequence[Case]) -> None:
        """Cases in one process, one after another; in a fresh one after each that breaks it."""
        worker: Worker | None = None
        for case in cases:
            left = self._until - time.monotonic()
            reason = self._why_not(case, left)
            if reason is not None:
                self._write(case, {"skipped": reason})
                continue
            worker = worker or self._take()
            start = time.monotonic()
            row, healthy = self._figures(worker, case, min(case.limit, max(left, 1.0)))
            took = time.monotonic() - start
            if self.clocks is not None:
                row["clocks"] = self.clocks.during(start, start + took)
            self._write(case, {**row, "took_seconds": round(took, 2)})
            if not healthy:
                self._drop(worker)
                worker = None
        if worker is not None:
            self._drop(worker)

    def _stop(self) -> None:
        self._end = self._until = 0.0  # lanes that still run skip the rest
        for worker in [*self._workers, *filter(None, [self._spare])]:
            worker.end()

    def _why_not(self, case: Case, left: float) -> str | None:
        """Why a case is skipped, if it is."""
        if left < 0.8 * case.seconds:
            return f"no time left: it takes {case.seconds:.0f} s of {max(left, 0):.0f} s"
        if self._hung[case.subject] >= MOST_HUNG:
            return f"{MOST_HUNG} cases of {case.subject} gave no answer"
        return None

    def _figures(self, worker: Worker, case: Case, seconds: float) -> tuple[Row, bool]:
        question = {**self._given, "part": case.part, "options": case.options}
        try:
            return worker.ask(question, seconds)
        except LostError as lost:
            self._hung[case.subject] += lost.hung
            return {"error": str(lost)}, False

    def _take(self) -> Worker:
        """A process that has begun to import; and the next one begins, while this one works."""
        with self._lock:
            worker = self._spare or Worker(self._answer, self._log)
            self._spare = Worker(self._answer, self._log)
            self._workers.add(worker)
            return worker

    def _drop(self, worker: Worker) -> None:
        worker.end()
        self._workers.discard(worker)

    def _write(self, case: Case, found: Row) -> None:
        row = {"part": case.part, **case.options, **found, **self.stamp}
        with self._lock:
            self.rows.append(row)
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"[{self.elapsed:6.1f} s] {case.title}: {_brief(found)}", flush=True)


def _brief(row: Row) -> str:
    """What of a row goes on its line."""
    found = [
        f"{name} {value}"
        for name, value in row.items()
        if name.endswith(FIGURES) and isinstance(value, str | float | int)
    ]
    return ", ".join(found) or "done"

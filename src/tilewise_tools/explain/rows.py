"""Rows of a recorded run: a file for each rank, refused if the files do not fit together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tilewise.arguments import MOST_RANKS
from tilewise.recording import FOLDER, FORMAT

AGREED = MappingProxyType(
    {
        "version": "version of tilewise",
        "world_size": "number of ranks",
        "machine": "machine",
        "run": "run",
        "every": "number of steps of which one is recorded",
    }
)
"""Entries of a file's head that must be the same in the files of all ranks, and what they are."""


class Sent(NamedTuple):
    """A message of an operation: the rank at its other end, its name, and its bytes."""

    peer: int
    what: str
    num_bytes: int


class OpRow(NamedTuple):
    """One operation of a pass.

    Attributes:
        kind: "Attend", "Copy", "Post", "Wait", ...
        q, k, area, heads: of a kernel call.
        num_bytes: that another operation reads and writes.
        sends, recvs: of a Post; groups are those of its receives that are awaited together, as
            (arrivals, places in recvs).
        arrivals: of a Wait.
        is_team: a Post of which every rank of a team exchanges with all others.
    """

    kind: str
    label: str
    q: int = 0
    k: int = 0
    area: int = 0
    heads: int = 0
    num_bytes: int = 0
    sends: tuple[Sent, ...] = ()
    recvs: tuple[Sent, ...] = ()
    groups: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    arrivals: tuple[int, ...] = ()
    is_team: bool = False


class CaseRow(NamedTuple):
    """A pass of attention as one rank runs it.

    Attributes:
        batches_exchanges: sends and receives of an exchange end together, as on NCCL.
        about: entries of the file: plans, digests, workload, layout, ...
    """

    number: int
    backward: bool
    batches_exchanges: bool
    ops: tuple[OpRow, ...]
    about: dict[str, Any]

    @property
    def identity(self) -> tuple[Any, ...]:
        """Facts that must be the same on all ranks."""
        about = self.about
        return self.backward, about["digests"], about["layout_digest"], about["mask"]

    @property
    def plan(self) -> str:
        """The name of the plan of this pass."""
        return self.about["plans"][self.backward]


class WaitRow(NamedTuple):
    """A wait of the transport for messages that were waited for one by one.

    Attributes:
        start, end: of the wait.
    """

    is_send: bool
    messages: tuple[tuple[int, str], ...]  # peer, name
    start: float
    end: float


class PassRow(NamedTuple):
    """One recorded pass; all times are seconds by the rank's own clock.

    Attributes:
        begin: of its set-up.
        marks: before its first operation, after each, after the last send has left.
    """

    case: CaseRow
    begin: float
    marks: tuple[float, ...]
    waits: tuple[WaitRow, ...]

    @property
    def end(self) -> float:
        return self.marks[-1]


class StepRow(NamedTuple):
    """The passes of one rank in one step, and the borders of the step by the rank's own clock."""

    passes: tuple[PassRow, ...]
    begin: float
    end: float


class RankRows(NamedTuple):
    """Rows of one rank."""

    path: Path
    head: dict[str, Any]
    cases: tuple[CaseRow, ...]
    steps: dict[int, StepRow]

    @property
    def rank(self) -> int:
        return self.head["rank"]


class Run(NamedTuple):
    """A recorded run.

    Attributes:
        ranks: all of them, in order.
        steps: numbers of the steps that all ranks recorded whole.
        num_lost: lines that were not whole.
    """

    ranks: tuple[RankRows, ...]
    steps: tuple[int, ...]
    num_lost: int

    @property
    def head(self) -> dict[str, Any]:
        return self.ranks[0].head

    @property
    def world_size(self) -> int:
        return len(self.ranks)


def read_run(paths: Sequence[Path]) -> Run:
    """Read the rows of all ranks.

    Args:
        paths: a folder that tw.record has written, or the files.
    Raises:
        ValueError: if files are missing, hold something else, or are of different runs, versions,
            plans or machines; if no step was recorded whole.
    """
    files = [file for path in paths for file in _files_of(path)]
    found = [_read_rank(file) for file in files]
    ranks = tuple(sorted((rows for rows, _ in found), key=lambda rows: rows.rank))
    _check_ranks(ranks)
    common = set.intersection(*({*rows.steps} for rows in ranks))
    whole = [step for step in sorted(common) if _same_passes(ranks, step)]
    if not whole:
        every = ranks[0].head["every"]
        raise ValueError(
            f"no step was recorded whole on all ranks: one of every {every} steps is, the second "
            "one first; run longer, record with a smaller every, and call recorder.close() at the "
            "end of the run"
        )
    return Run(ranks, tuple(whole), sum(lost for _, lost in found))


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(path.glob("rank*.jsonl"))
        if not files:
            raise ValueError(f"{path} has no rank0.jsonl, rank1.jsonl, ... of tw.record in it")
        return files
    if not path.is_file():
        hint = f"; tw.record writes the folder {FOLDER!r} unless it is told another"
        raise ValueError(f"{path} is neither a folder of tw.record nor a file in one{hint}")
    return [path]


def _read_rank(path: Path) -> tuple[RankRows, int]:
    """The rows of a file, and how many of its lines are not whole."""
    head: dict[str, Any] | None = None
    cases: dict[int, CaseRow] = {}
    passes: dict[int, list[PassRow]] = {}
    borders: dict[str, dict[int, float]] = {"step": {}, "end": {}}
    lost = 0
    for row in _lines(path):
        if row is None:
            lost += 1
            continue
        try:
            match row.get("kind"):
                case "run":
                    head = row
                    _check_head(path, head)
                case "case":
                    cases[row["case"]] = _case(row)
                case "pass":
                    passes.setdefault(row["step"], []).append(_pass(row, cases))
                case "step" | "end" as border:
                    borders[border][row["step"]] = 1e-9 * row["ns"]
                case _:
                    lost += 1
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"{path} holds a row that tw.record does not write: {error!r}"
            ) from None
        if head is None:
            raise ValueError(f"{path} does not begin as a file of tw.record does")
    if head is None:
        raise ValueError(f"{path} is empty: its rank wrote nothing")
    steps: dict[int, StepRow] = {}
    for number, some in passes.items():
        begin, end = (borders[border].get(number) for border in ("step", "end"))
        if begin is not None and end is None:
            continue  # the run was ended within it
        steps[number] = StepRow(tuple(some), begin or some[0].begin, end or some[-1].end)
    return RankRows(path, head, tuple(cases.values()), steps), lost


def _lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """The rows of a file; None for a line that is no whole row."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            yield row if isinstance(row, dict) else None


def _check_head(path: Path, head: dict[str, Any]) -> None:
    if head.get("format") != FORMAT:
        raise ValueError(
            f"{path} has rows of format {head.get('format')!r}, but this version of tilewise reads "
            f"{FORMAT!r}; record anew with it"
        )
    own = version("tilewise")
    if head["version"] != own:
        raise ValueError(
            f"{path} was recorded by tilewise {head['version']}, but this is {own}, whose "
            "operations may be others; explain it with that version, or record anew"
        )
    if not 0 <= head["rank"] < head["world_size"] <= MOST_RANKS:
        raise ValueError(f"{path} is of rank {head['rank']} of {head['world_size']}")


def _check_ranks(ranks: Sequence[RankRows]) -> None:
    first = ranks[0]
    for rows in ranks[1:]:
        for name, meaning in AGREED.items():
            mine, other = first.head.get(name), rows.head.get(name)
            if mine != other:
                raise ValueError(
                    f"{rows.path} is of another {meaning} than {first.path}: "
                    f"{_brief(other)}, not {_brief(mine)}; give the files of one run alone"
                )
    numbers = [rows.rank for rows in ranks]
    for rows, following in pairwise(ranks):
        if rows.rank == following.rank:
            raise ValueError(f"{rows.path} and {following.path} are both of rank {rows.rank}")
    world_size = first.head["world_size"]
    missing = sorted({*range(world_size)} - {*numbers})
    if missing:
        names = ", ".join(map(str, missing[:8])) + ", ..." * (len(missing) > 8)
        raise ValueError(
            f"rows of rank {names} are missing, of {world_size}: add rank{missing[0]}.jsonl (a run "
            "on several hosts writes a folder on each)"
        )
    for rows in ranks[1:]:
        for mine, other in zip(first.cases, rows.cases, strict=False):
            if mine.identity != other.identity:
                raise ValueError(
                    f"{rows.path} has rows of another plan than {first.path}: "
                    f"{_case_text(other)}, not {_case_text(mine)}"
                )
            if mine.about["device"] != other.about["device"]:
                raise ValueError(
                    f"{rows.path} was recorded on another machine than {first.path}: on "
                    f"{other.about['device']}, not {mine.about['device']}"
                )


def _same_passes(ranks: Sequence[RankRows], step: int) -> bool:
    """Return whether all ranks ran the same passes in a step."""
    runs = {tuple(one.case.number for one in rows.steps[step].passes) for rows in ranks}
    return len(runs) == 1


def _case_text(case: CaseRow) -> str:
    return f"{case.plan} of {case.about['mask']} on {case.about['layout_digest']}"


def _brief(value: object) -> str:
    text = value[0] if isinstance(value, list) and value else value
    return str(text)[:80]


def _case(row: dict[str, Any]) -> CaseRow:
    ops = tuple(map(_op, row["ops"]))
    return CaseRow(row["case"], bool(row["backward"]), row["ahead"] == 0, ops, row)


def _op(row: dict[str, Any]) -> OpRow:
    sends, recvs = (tuple(Sent(*one) for one in row.get(side, ())) for side in ("sends", "recvs"))
    return OpRow(
        row["op"],
        row["label"],
        *(row.get(name, 0) for name in ("q", "k", "area", "heads")),
        num_bytes=row.get("bytes", 0),
        sends=sends,
        recvs=recvs,
        groups=tuple((tuple(a), tuple(b)) for a, b in row.get("groups", ())),
        arrivals=tuple(row.get("arrivals", ())),
        is_team=bool(row.get("team")),
    )


def _pass(row: dict[str, Any], cases: dict[int, CaseRow]) -> PassRow:
    case, begin = cases[row["case"]], row["begin"]
    if len(row["after"]) != len(case.ops) + 2:
        raise KeyError(f"{len(row['after'])} times of {len(case.ops)} operations")
    waits = tuple(
        WaitRow(
            bool(is_send),
            tuple((peer, what) for peer, what in messages),
            1e-9 * (begin + start),
            1e-9 * (begin + end),
        )
        for is_send, messages, start, end in row["waits"]
    )
    marks = tuple(1e-9 * (begin + after) for after in row["after"])
    return PassRow(case, 1e-9 * begin, marks, waits)

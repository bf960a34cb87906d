"""The results file: one JSON object per line, synced row by row, so that a crash costs no row."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tilewise_tools.bench.case import KINDS

FORMAT = 1
Row = dict[str, Any]


class ResultsFile(NamedTuple):
    """Contents of a results file: its whole rows, the last of each key, and how many were lost."""

    rows: list[Row]
    num_lost: int


def read_results(path: str | Path) -> ResultsFile:
    """All whole rows of a file, in order; a later row replaces an earlier one of the same key.

    Raises:
        ValueError: if the file cannot be read, holds no rows, or, naming the line, has one of an
            unknown kind.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    results = _parsed(data, path)
    if data.strip() and not results.rows:
        raise ValueError(
            f"{path} holds no rows of a benchmark; give a file that tilewise bench made"
        )
    return results


class Results:
    """A results file that is being written; only one run may write it at a time.

        with Results(path) as results:
            if not results.has(row["key"]):
                results.append(row)

    Attributes:
        rows: by key, what the file holds.
        num_lost: lines that were no whole row when the file was opened; a torn last one is removed.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.rows: dict[str, Row] = {}
        self.num_lost = 0
        self._file: BinaryIO | None = None

    def __enter__(self) -> Results:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = open(self.path, "a+b")
        except OSError as error:
            raise ValueError(f"{self.path} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.seek(0)
            data = file.read()
            results = _parsed(data, self.path)
            is_torn_row = b"\n" not in data and data.startswith(b"{")
            if data.strip() and not results.rows and not is_torn_row:
                raise ValueError(
                    f"{self.path} holds no rows of a benchmark; name another file with -o"
                )
            file.truncate(data.rfind(b"\n") + 1)
        except BlockingIOError:
            file.close()
            raise ValueError(
                f"{self.path} is being written by another run; wait for it, or name another with -o"
            ) from None
        except ValueError:
            file.close()
            raise
        self._file = file
        self.rows = {row["key"]: row for row in results.rows}
        self.num_lost = results.num_lost
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def has(self, key: str, only_ok: bool = False) -> bool:
        """Return whether the file holds a row of this key; with only_ok, one that is ok."""
        return key in self.rows and (not only_ok or self.rows[key]["outcome"] == "ok")

    def append(self, row: Row) -> None:
        """Write a row and return once it is on disk."""
        assert self._file is not None, "results are written inside their with block"
        self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.rows[row["key"]] = row


def _parsed(data: bytes, path: str | Path) -> ResultsFile:
    rows: dict[str, Row] = {}
    num_lost = 0
    whole_lines, _, torn = data.rpartition(b"\n")
    for number, line in enumerate(whole_lines.split(b"\n"), 1):
        row = _row(line)
        if row is not None:
            kind = row.get("kind")
            if isinstance(kind, str) and kind not in KINDS:
                raise ValueError(
                    f"{path}, line {number}: kind ({kind!r:.60}) must be one of {', '.join(KINDS)}"
                )
            rows[row["key"]] = row
        elif line.strip():
            num_lost += 1
    return ResultsFile(list(rows.values()), num_lost + bool(torn.strip()))


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    is_row = (
        isinstance(row, dict) and row.get("format") == FORMAT and isinstance(row.get("key"), str)
    )
    return row if is_row else None

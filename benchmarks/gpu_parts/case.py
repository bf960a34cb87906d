"""What is measured, as values: a case has a part, options that say all of it, and an estimate."""

from __future__ import annotations

from typing import Any, NamedTuple

Row = dict[str, Any]
GRACE = 60.0  # seconds: a kernel may have to be compiled after all, on a busy machine


class Case(NamedTuple):
    """One row of the result.

    Attributes:
        part: which function measures it, see bodies.py.
        options: what it gets, also the row's first fields; JSON.
        seconds: what it is expected to take on an H200.
        lane: cases of a lane share a process, one after another.
    """

    part: str
    options: Row
    seconds: float
    lane: str

    @property
    def title(self) -> str:
        """Its part and options: numbers and names as they are, of others those that are true."""
        words = []
        for name, value in self.options.items():
            if isinstance(value, bool) or not isinstance(value, str | int):
                words += [name] if value else []
            else:
                words.append(str(value))
        return " ".join([self.part, *words])

    @property
    def subject(self) -> str:
        """The part and the kernel it is about."""
        kernel = self.options.get("kernel") or self.options.get("contender", "")
        return f"{self.part} {kernel}".strip()

    @property
    def limit(self) -> float:
        """Seconds after which it counts as hanging."""
        return GRACE + 3 * self.seconds

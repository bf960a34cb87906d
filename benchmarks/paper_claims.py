"""What the papers claim, as values: figures, what is assumed to compare them, what was found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Claim(NamedTuple):
    """A figure of a paper beside ours.

    Attributes:
        claimed: by the paper; None: it gives no figure in text, and what says what it found.
        found: ours, on the machine named in where.
        best, best_plan: what our best plan reaches there.
        why: which assumption would explain the difference.
        topology: what a double ring reaches there, which sends a ring's bytes over more links.
        by_bytes: ours over the best plan of a ring's bytes (ring, double ring, all-gather); of a
            percentage the difference in points.
    """

    what: str
    claimed: float | None
    found: float
    unit: str
    where: str
    best: float
    best_plan: str
    why: str
    topology: float
    by_bytes: float

    @property
    def off(self) -> str:
        """By how much ours differs: points of a percentage, per cent of anything else."""
        if self.claimed is None:
            return ""
        if self.unit == "%":
            return f"{self.found - self.claimed:+.1f} points"
        return f"{100 * (self.found / self.claimed - 1):+.0f} %"


class Row(NamedTuple):
    """A line behind the claims: figures of one plan on one machine."""

    machine: str
    plan: str
    figures: dict[str, float]


@dataclass(frozen=True)
class Paper:
    """Claims of one paper, with everything assumed to simulate them.

    Args:
        unit: of the rows' figures.
    """

    name: str
    source: str
    unit: str
    claims: tuple[Claim, ...]
    rows: tuple[Row, ...]
    assumptions: tuple[str, ...]

    def records(self) -> list[dict[str, Any]]:
        """One record per claim and per row; the assumptions are in all of them."""
        about = {"paper": self.name, "source": self.source, "assumptions": list(self.assumptions)}
        claims = ({"kind": "claim", **claim._asdict(), "off": claim.off} for claim in self.claims)
        rows = ({"kind": "row", "unit": self.unit, **row._asdict()} for row in self.rows)
        return [{**about, **record} for record in (*claims, *rows)]


Study = Callable[[], Paper]

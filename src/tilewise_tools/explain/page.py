"""The page of a recorded run: where the step goes on each rank, causes, links, and lanes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType

from tilewise_tools.explain.explanation import PARTS, Explanation
from tilewise_tools.explain.waiting import COPY, KERNEL, OUTSIDE, WAIT, Piece
from tilewise_tools.report.drawing import (
    AROUND,
    Drawing,
    Words,
    axis,
    colour,
    from_zero,
    hover,
    time_axis,
)
from tilewise_tools.report.page import Fact, Figure, Page, Section, TextTable
from tilewise_tools.report.words import quantity

COLOURS = MappingProxyType({KERNEL: 0, WAIT: 1, COPY: 2, OUTSIDE: 4})
"""The palette's numbers."""
ROW = 44  # pixels
MOST_ROWS = 32
FINEST = 3000
"""Pieces shorter than this part of a step are joined with what comes before them, where that is of
the same kind."""


def page_of(explanation: Explanation) -> Page:
    """The page of an explanation."""
    run, seconds = explanation.run, explanation.seconds
    simulated = explanation.simulated_seconds
    facts = (
        Fact("step", quantity(seconds, "s"), f"mean of {len(explanation.steps)} recorded"),
        *(
            Fact(
                name,
                f"{100 * explanation.parts[part] / seconds:.0f} %",
                "of a rank's step, on average",
            )
            for part, name in PARTS.items()
        ),
        Fact("simulated", "-" if simulated is None else quantity(simulated, "s"), "its passes"),
        Fact("ranks", str(len(run.ranks))),
    )
    sections = (
        Section("lines", "In short", table=TextTable(("", ""), tuple(_lines(explanation)))),
        Section("ranks", "Where the step goes", figures=(_parts(explanation), _lanes(explanation))),
        Section("waits", "For whom ranks wait", table=_waits(explanation)),
        Section("links", "Links", LINKS_INTRO, table=_links(explanation)),
    )
    lost = run.num_lost
    notice = f"{lost} lines were not whole and left out." if lost else ""
    lead = f"{explanation.subjects[0].name}, {explanation.subjects[0].case.about['mask']}"
    shown = tuple(one for one in sections if one.figures or (one.table and one.table.rows))
    verdict = " ".join(f"{x[0].upper()}{x[1:].rstrip('.')}." for x in explanation.lines()[:2])
    return Page("Recorded run", "Where the step goes", lead, facts, shown, notice, verdict)


LINKS_INTRO = (
    "Bandwidth of large messages for which a rank waited; waited is in a step. Links for which "
    "nobody waited are left out."
)


def _lines(explanation: Explanation) -> Iterator[tuple[str, str]]:
    for line in explanation.lines():
        head, _, rest = line.partition(": ")
        yield head, rest


def _parts(explanation: Explanation) -> Figure:
    """A bar for each rank, by what it does."""
    ranks = [str(rank) for rank in range(len(explanation.by_rank))]
    bars: list[Words] = [
        {
            "type": "bar",
            "name": name,
            "x": ranks,
            "y": [one[part] for one in explanation.by_rank],
            "marker": {"color": colour(COLOURS[part])},
            **hover([f"{name}: {quantity(one[part], 's')}" for one in explanation.by_rank]),
        }
        for part, name in PARTS.items()
    ]
    x = axis("rank") | {"type": "category"}
    y = axis("a step") | from_zero(explanation.seconds, "s")
    layout = {"barmode": "stack", "yaxis": y, "xaxis": x}
    rows = tuple(
        (
            str(rank),
            *(quantity(one[part], "s") for part in PARTS),
            f"{explanation.kernels.slowness[rank]:.2f}",
        )
        for rank, one in enumerate(explanation.by_rank)
    )
    table = TextTable(("rank", *PARTS.values(), "kernels' slowness"), rows)
    caption = (
        "The mean of the recorded steps. A rank that ends before the longest one waits for it. "
        "Slowness: seconds of a rank's kernels over those of the usual rank for the same calls."
    )
    return Figure("parts", "Seconds of a step, by rank", caption, Drawing(bars, layout), table)


def _lanes(explanation: Explanation) -> Figure:
    """The last recorded step: what each rank did when, simulated lanes below the measured ones."""
    step = explanation.steps[-1]
    begin = min(pieces[0].start for pieces in step.pieces)
    shown = step.pieces[:MOST_ROWS]
    end = max(pieces[-1].end for pieces in shown if pieces)
    x, unit_seconds = time_axis(end - begin)
    bars: list[Words] = []
    for part, name in PARTS.items():
        drawn = [
            (rank, piece)
            for rank, pieces in enumerate(shown)
            for piece in _joined(pieces, explanation.seconds / FINEST)
            if piece.kind == part
        ]
        bars.append(
            {
                "type": "bar",
                "name": name,
                "orientation": "h",
                "y": [rank for rank, _ in drawn],
                "width": 0.7,
                "base": [(piece.start - begin) / unit_seconds for _, piece in drawn],
                "x": [piece.seconds / unit_seconds for _, piece in drawn],
                "marker": {"color": colour(COLOURS[part])},
                **hover([_note(piece) for _, piece in drawn]),
            }
        )
    names = [f"rank {rank}" for rank in range(len(shown))]
    rows = {"showgrid": False, "zeroline": False, "fixedrange": True, "autorange": "reversed"}
    layout = {
        "xaxis": x,
        "yaxis": axis("", ticks=tuple(enumerate(names))) | rows,
        "barmode": "overlay",
        "dragmode": "zoom",
    }
    caption = (
        "The last recorded step. Drag across to see a part of it; a bar says what was done, and of "
        "a wait for whom. The trace (--trace) has the simulated lanes beside these."
    )
    height = AROUND + 30 + ROW * len(names)
    return Figure("lanes", "What each rank did", caption, Drawing(bars, layout, height))


def _joined(pieces: Sequence[Piece], finest: float) -> Iterator[Piece]:
    """Pieces, the shortest joined with their like before them."""
    last: Piece | None = None
    for piece in pieces:
        is_like = last is not None and (last.kind, last.cause) == (piece.kind, piece.cause)
        if last is not None and is_like and piece.seconds < finest:
            last = last._replace(end=piece.end)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _note(piece: Piece) -> str:
    label = piece.label or PARTS[piece.kind]
    if piece.cause is None:
        return f"{label}: {quantity(piece.seconds, 's')}"
    kind, rank, peer = piece.cause
    whom = f"rank {rank} to rank {peer}" if peer >= 0 else f"rank {rank}, {PARTS[kind]}"
    return f"{label}: {quantity(piece.seconds, 's')} for {whom}"


def _waits(explanation: Explanation) -> TextTable:
    rows = []
    for (kind, rank, peer), seconds in sorted(explanation.waits.items(), key=lambda item: -item[1]):
        what = f"link to rank {peer}" if peer >= 0 else PARTS[kind]
        rows.append((str(rank), what, quantity(seconds, "s")))
    return TextTable(("rank", "what", "waited for it, mean over ranks"), tuple(rows))


def _links(explanation: Explanation) -> TextTable:
    rows = tuple(
        (
            str(rate.src),
            str(rate.dst),
            quantity(rate.bandwidth, "B/s"),
            quantity(rate.waited, "s"),
            f"{rate.slowness:.2f}",
        )
        for rate in sorted(explanation.links.values(), key=lambda rate: -rate.slowness)
    )
    return TextTable(("from", "to", "bandwidth", "waited", "usual link's over it"), rows)

"""One page in one file: words, tables and figures, and where there are charts what draws them.

It asks no network for anything, and forbids it to itself.
"""

import json
import re
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from importlib.metadata import version
from importlib.resources import files
from string import Template
from typing import NamedTuple

from tilewise_tools.doctor import require
from tilewise_tools.report.drawing import Cells, Drawing, as_texts
from tilewise_tools.report.words import NOTHING
from tilewise_verify.palette import SERIES, ink_on, variables

LONGEST_NUMBER = 24  # letters of a number with its unit
OPTION = re.compile(r"--[\w.-]+")


class Fact(NamedTuple):
    """A number of the page's head: what, how much, and what that means."""

    name: str
    value: str
    note: str = ""


class TextTable(NamedTuple):
    """Texts in columns."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Figure(NamedTuple):
    """A drawing with its words.

    Attributes:
        jumps: parts of the horizontal axis to zoom in on, by name.
    """

    name: str  # of its place on the page, and of the PNG that the page saves
    title: str
    caption: str  # what to see in it; read out where it cannot be seen
    drawing: Drawing | Cells
    rows: TextTable | None = None  # what it was drawn from
    jumps: tuple[tuple[str, float, float], ...] = ()


class Section(NamedTuple):
    """A part of the page."""

    name: str
    title: str
    intro: str = ""  # sentences before the figures
    figures: tuple[Figure, ...] = ()  # side by side where there is room and narrow is set
    table: TextTable | None = None  # shown as it is
    narrow: bool = False
    picture: str = ""  # SVG, shown as it is
    more: tuple[Figure, ...] = ()  # shown on demand


class Page(NamedTuple):
    """All that a page says."""

    kind: str  # what sort of report it is, above the title
    title: str
    lead: str
    facts: tuple[Fact, ...]
    sections: tuple[Section, ...]
    notice: str = ""  # something to know first, such as lost rows
    verdict: str = ""  # the answer, in a sentence or two


NO_SCRIPT = (
    '<noscript><p class="notice">The charts are drawn by the script in this file; the tables show '
    "the same numbers.</p></noscript>"
)


def written(page: Page) -> str:
    """Return the page as HTML; with charts it has plotly's script, 4.8 MB."""
    figures = (x for section in page.sections for x in (*section.figures, *section.more))
    scripts: list[str] = []
    before = ""
    if any(isinstance(figure.drawing, Drawing) for figure in figures):
        require("plotly", "a report's page")
        from plotly.offline import get_plotlyjs

        scripts = [get_plotlyjs().replace("\r\n", "\n"), _resource("page.js")]
        dark = f'<script type="application/json" id="dark-colours">{_json(dict(SERIES))}</script>'
        before = NO_SCRIPT + dark
    return Template(_resource("page.html")).substitute(
        kind=escape(page.kind),
        title=escape(page.title),
        verdict=page.verdict and f'<p class="verdict">{escape(page.verdict)}</p>',
        lead=escape(page.lead),
        notice=page.notice and f'<p class="notice" role="note">{escape(page.notice)}</p>',
        facts="".join(map(_fact, page.facts)),
        links=_links(page.sections),
        sections=before + "\n".join(map(_section, page.sections)),
        version=version("tilewise"),
        css=variables() + _resource("page.css"),
        sources=" ".join(map(_hash, scripts)) or "'none'",
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def _hash(script: str) -> str:
    """The source of a Content-Security-Policy that is this very script."""
    digest = b64encode(sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _resource(name: str) -> str:
    return files("tilewise_tools.report").joinpath(name).read_text(encoding="utf-8")


def _json(value: object) -> str:
    """JSON that may stand in a script element."""
    from plotly.utils import PlotlyJSONEncoder

    text = json.dumps(value, cls=PlotlyJSONEncoder, separators=(",", ":"))
    return text.replace("</", "<\\/").replace("<!--", "<\\!--")


def _links(sections: Sequence[Section]) -> str:
    links = "".join(f'<a href="#{escape(s.name)}">{escape(s.title)}</a>' for s in sections)
    return links and f'<nav aria-label="Parts of the page"><div>{links}</div></nav>'


def _breakable(name: str) -> str:
    """A name as HTML that may break after its underscores."""
    return escape(name).replace("_", "_<wbr>")


def _words(cell: str) -> str:
    """A cell's text as HTML, in which options of a command do not break after their dashes."""
    return OPTION.sub(r'<span class="whole">\g<0></span>', escape(cell))


def _fact(fact: Fact) -> str:
    note = f'<dd class="small">{escape(fact.note)}</dd>' if fact.note else ""
    return f"<div><dt>{escape(fact.name)}</dt><dd>{escape(fact.value)}</dd>{note}</div>"


def _section(section: Section) -> str:
    parts = [f'<section id="{escape(section.name)}"><h2>{escape(section.title)}</h2>']
    if section.intro:
        parts.append(f"<p>{escape(section.intro)}</p>")
    if section.table:
        parts.append(f'<div class="card"><div class="scroll">{_table(section.table)}</div></div>')
    if section.picture:
        parts.append(f'<div class="card"><div class="wide">{section.picture}</div></div>')
    if section.figures:
        inside = "".join(map(_figure, section.figures))
        parts.append(f'<div class="figures{" narrow" * section.narrow}">{inside}</div>')
    for figure in section.more:
        shown = f"<summary>{escape(figure.title)}</summary>{_figure(figure)}"
        parts.append(f'<details class="more">{shown}</details>')
    return "".join([*parts, "</section>"])


def _figure(figure: Figure) -> str:
    drawing = figure.drawing
    drawn = _cells(drawing) if isinstance(drawing, Cells) else _chart(figure, drawing)
    rows = figure.rows and f'<div class="scroll">{_table(figure.rows)}</div>'
    return (
        f"<figure><h3>{escape(figure.title)}</h3><figcaption>{escape(figure.caption)}</figcaption>"
        + drawn
        + (f"<details><summary>Numbers</summary>{rows}</details>" if rows else "")
        + "</figure>"
    )


def _chart(figure: Figure, drawing: Drawing) -> str:
    from plotly.graph_objects import Figure as PlotlyFigure

    data, layout, height = drawing
    # plotly packs arrays and refuses words it does not know; page.js has the template
    words = as_texts({"data": data, "layout": layout | {"template": "none"}})
    drawn = PlotlyFigure(words).to_plotly_json()
    size = f' data-height={height} style="height:{height}px"' if height else ""
    jumps = "".join(
        f'<button type="button" data-figure="{escape(figure.name)}" data-from="{start!r}" '
        f'data-to="{stop!r}">{escape(name)}</button>'
        for name, start, stop in figure.jumps
    )
    jumps = jumps and f'<div class="jumps">{jumps}</div>'
    return (
        f'{jumps}<div class="wide"><script type="application/json">{_json(drawn)}</script>'
        f'<div class="plot{"" if height else " square"}" id="{escape(figure.name)}" role="img" '
        f'aria-label="{escape(f"{figure.title}. {figure.caption}")}"'
        f"{' data-zoom=yes' * bool(jumps)}{size}></div></div>"
    )


def _cells(cells: Cells) -> str:
    """Return a table of coloured cells, with a key of the colours that it has."""

    def shown(level: int, text: str, note: str) -> str:
        if level < 0:
            return f'<td title="{escape(note)}"></td>'
        fill = cells.levels[level][1]
        style = f"background:{fill};color:{ink_on(fill)}"
        return f'<td style="{style}" title="{escape(note)}">{escape(text)}</td>'

    head = "".join(f"<th>{_breakable(name)}</th>" for name in ("", *cells.columns))
    body = "".join(
        f"<tr><th>{_breakable(name)}</th>{''.join(shown(*cell) for cell in line)}</tr>"
        for name, line in zip(cells.rows, cells.lines, strict=True)
    )
    used = sorted({level for line in cells.lines for level, *_ in line if level >= 0})
    key = "".join(
        f'<span><i style="background:{cells.levels[level][1]}"></i>'
        f"{escape(cells.levels[level][0])}</span>"
        for level in used
    )
    table = f'<table class="cells"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="wide">{table}</div><p class="key">{key}</p>'


def _table(table: TextTable) -> str:
    right = [all(map(_is_number, column)) for column in zip(*table.rows, strict=True)]

    def line(cells: tuple[str, ...], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=number' * number}>{_words(cell)}</{tag}>"
            for cell, number in zip(cells, right or [False] * len(cells), strict=True)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in table.rows)
    head = f"<thead><tr>{line(table.header, 'th')}</tr></thead>" * any(table.header)
    return f"<table>{head}<tbody>{body}</tbody></table>"


def _is_number(cell: str) -> bool:
    is_short = len(cell) <= LONGEST_NUMBER
    return not cell or (is_short and (cell[0].isdigit() or cell[0] in f"{NOTHING}-+"))

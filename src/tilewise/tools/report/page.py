"""One page in one file: words, tables and figures, with the script that draws them inside.

It asks no network for anything, and forbids it to itself.
"""

import json
from html import escape
from importlib.metadata import version
from importlib.resources import files
from typing import NamedTuple

from tilewise.tools.doctor import require
from tilewise.tools.report.chart import DARK, NOTHING, Figure, Section, Table
from tilewise.tools.report.plotly_figures import as_plotly, height, width

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
POLICY += "img-src data: blob:; base-uri 'none'; form-action 'none'"


class Fact(NamedTuple):
    """A number of the page's head: what, how much, and what that means."""

    name: str
    value: str
    note: str = ""


class Page(NamedTuple):
    """All that a page says."""

    kind: str  # what sort of report it is, above the title
    title: str
    lead: str
    facts: tuple[Fact, ...]
    sections: tuple[Section, ...]
    notice: str = ""  # something to know first, such as lost rows


def written(page: Page) -> str:
    """The page as HTML, plotly's script embedded once."""
    require("plotly", "a report's page")
    from plotly.offline import get_plotlyjs

    links = "".join(f'<a href="#{s.name}">{escape(s.title)}</a>' for s in page.sections)
    facts = "".join(_fact(fact) for fact in page.facts)
    sections = "\n".join(_section(section) for section in page.sections)
    notice = f'<p class="notice" role="note">{escape(page.notice)}</p>' if page.notice else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="color-scheme" content="light dark">
<title>{escape(page.title)} · tilewise</title>
<style>{_resource("page.css")}</style>
</head>
<body>
<header>
<p class="kind">{escape(page.kind)}</p>
<h1>{escape(page.title)}</h1>
<p class="lead">{escape(page.lead)}</p>
{notice}
<dl class="facts">{facts}</dl>
</header>
<nav aria-label="Parts of the page"><div>{links}</div></nav>
<main>
<noscript><p class="notice">The charts are drawn by the script in this file; the tables show
the same numbers.</p></noscript>
{sections}
</main>
<footer>Made by tilewise {version("tilewise")} as one file that loads nothing from the
network.</footer>
<script type="application/json" id="dark-colours">{_json(dict(DARK))}</script>
<script>{get_plotlyjs()}</script>
<script>{_resource("page.js")}</script>
</body>
</html>
"""


def _resource(name: str) -> str:
    return files("tilewise.tools.report").joinpath(name).read_text(encoding="utf-8")


def _json(value: object) -> str:
    """JSON that may stand in a script element."""
    from plotly.utils import PlotlyJSONEncoder

    text = json.dumps(value, cls=PlotlyJSONEncoder, separators=(",", ":"))
    return text.replace("</", "<\\/").replace("<!--", "<\\!--")


def _fact(fact: Fact) -> str:
    note = f'<dd class="small">{escape(fact.note)}</dd>' if fact.note else ""
    return f"<div><dt>{escape(fact.name)}</dt><dd>{escape(fact.value)}</dd>{note}</div>"


def _section(section: Section) -> str:
    parts = [f'<section id="{section.name}"><h2>{escape(section.title)}</h2>']
    if section.intro:
        parts.append(f"<p>{escape(section.intro)}</p>")
    if section.table:
        parts.append(f'<div class="card"><div class="scroll">{_table(section.table)}</div></div>')
    if section.picture:
        parts.append(f'<div class="card">{section.picture}</div>')
    if section.figures:
        inside = "".join(_figure(figure) for figure in section.figures)
        parts.append(f'<div class="figures{" narrow" * section.narrow}">{inside}</div>')
    return "".join([*parts, "</section>"])


def _figure(figure: Figure) -> str:
    drawing = as_plotly(figure.drawing)
    pixels = height(figure.drawing)
    said = escape(f"{figure.title}. {figure.caption}", quote=True)
    kind = "plot" if pixels else "plot square"
    least = width(figure.drawing)
    tall = f' data-height={pixels} style="height:{pixels}px;min-width:{least}px"' if pixels else ""
    jumps = "".join(
        f'<button type="button" data-figure="{figure.name}" data-from="{start!r}" '
        f'data-to="{stop!r}">{escape(name)}</button>'
        for name, start, stop in figure.jumps
    )
    rows = ""
    if figure.rows:
        table = _table(figure.rows)
        rows = f'<details><summary>Numbers</summary><div class="scroll">{table}</div></details>'
    return (
        f"<figure><h3>{escape(figure.title)}</h3><figcaption>{escape(figure.caption)}</figcaption>"
        + (f'<div class="jumps">{jumps}</div>' if jumps else "")
        + f'<div class="wide"><script type="application/json">{_json(drawing)}</script>'
        f'<div class="{kind}" id="{figure.name}" role="img" aria-label="{said}"'
        f"{' data-zoom=yes' * bool(jumps)}"
        f"{tall}></div></div>"
        f"{rows}</figure>"
    )


def _table(table: Table) -> str:
    right = [
        bool(table.rows) and all(_is_number(row[column]) for row in table.rows)
        for column in range(len(table.header))
    ]

    def line(cells: tuple[str, ...], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=number' * number}>{escape(cell)}</{tag}>"
            for cell, number in zip(cells, right, strict=True)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in table.rows)
    return f"<table><thead><tr>{line(table.header, 'th')}</tr></thead><tbody>{body}</tbody></table>"


def _is_number(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell[0] in f"{NOTHING}-+"

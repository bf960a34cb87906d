"""A hook of MkDocs: llms.txt, and beside each page of the site its Markdown.

The twin of https://.../planner/ is https://.../planner.md: the page's source, at its path in docs/,
so that links between pages hold. Of the API page, whose source only names things, it has their
signatures and docstrings. llms.txt lists the twins by the sections of the navigation (llmstxt.org).
"""

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

DIRECTIVE = re.compile(r"^::: ([\w.]+)\n(?:    .*\n|\n(?=    ))*", re.MULTILINE)
TABLE_OR_CODE = ("|", "`", "#", "!", "<", "-", " ")


def on_post_build(config: Any, **_: Any) -> None:
    """Write the twins and llms.txt into the built site."""
    docs, site = Path(config.docs_dir), Path(config.site_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for section, title, path in pages_of(config.nav):
        text = (docs / path).read_text(encoding="utf-8")
        twin = site / path
        twin.parent.mkdir(parents=True, exist_ok=True)
        twin.write_text(with_docstrings(text), encoding="utf-8")
        heading = f"## {section}"
        if heading not in lines:
            lines += ["", heading, ""] if lines[-1] else [heading, ""]
        about = first_sentence(text)
        base = config.site_url or ""
        lines.append(f"- [{title}]({base}{path})" + (f": {about}" if about else ""))
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def pages_of(nav: Any, section: str = "Start") -> Iterator[tuple[str, str, str]]:
    """Yield section, title and path of each page of a navigation, in order."""
    for entry in nav:
        ((title, value),) = entry.items()
        if isinstance(value, str):
            yield section, title, value
        else:
            yield from pages_of(value, title)


def first_sentence(text: str) -> str:
    """Return the first sentence of a page's running text, without links."""
    for paragraph in re.sub(r"```.*?```", "", text, flags=re.DOTALL).split("\n\n"):
        words = " ".join(paragraph.split())
        if words and not words.startswith(TABLE_OR_CODE):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", words)
            return re.split(r"(?<=[.:])\s", plain, maxsplit=1)[0]
    return ""


def with_docstrings(text: str) -> str:
    """Replace what mkdocstrings fills in by the signatures and docstrings of the names."""
    return DIRECTIVE.sub(lambda match: _described(match[1]) + "\n", text)


def _described(name: str) -> str:
    found = _find(name)
    try:
        signature = str(inspect.signature(found)) if callable(found) else ""
    except (TypeError, ValueError):
        signature = ""
    documented = inspect.getdoc(found) or ""
    return f"### `{name}`\n\n```text\n{name}{signature}\n\n{documented}\n```\n"


def _find(name: str) -> Any:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)

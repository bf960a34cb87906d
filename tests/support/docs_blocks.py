"""The code blocks of the documentation, and running them.

A ```python block runs after those before it on its page, in one namespace. A ```text block right
below one is what it prints. `python tests/support/docs_blocks.py` writes these outputs anew; look
at the difference before keeping it.
"""

import io
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: language, content, its place in the page, whether it is expected output."""

    language: str
    content: str
    start: int
    stop: int
    is_output: bool


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    for match in FENCED.finditer(text):
        language, content = match.groups()
        last = found[-1] if found else None
        below = last is not None and not text[last.stop + 4 : match.start()].strip()
        is_output = language == "text" and below and last.language == "python"
        found.append(Block(language, content, *match.span(2), is_output))
    return found


def run(page: Path) -> Iterator[tuple[Block, str | None]]:
    """Run a page; yield each block with what the python block above printed (None: nothing ran)."""
    text = page.read_text()
    namespace: dict[str, Any] = {"__name__": "documentation"}
    printed = None
    for block in blocks(text):
        if block.language == "python":
            output = io.StringIO()
            lines_above = "\n" * text.count("\n", 0, block.start)
            with redirect_stdout(output):
                exec(compile(lines_above + block.content, str(page), "exec"), namespace)
            printed = output.getvalue().rstrip() + "\n"
            yield block, None
        else:
            yield block, printed if block.is_output else None


def rewritten(page: Path) -> str:
    """The page with every output as it is now."""
    text = page.read_text()
    outputs = [(block, printed) for block, printed in run(page) if block.is_output]
    for block, printed in reversed(outputs):
        text = text[: block.start] + (printed or "") + text[block.stop :]
    return text


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # some blocks import benchmarks
    for path in PAGES:
        path.write_text(rewritten(path))

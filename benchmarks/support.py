"""The table of versions that tests have run with, in README and docs.

    python -m benchmarks.support --write
    python -m benchmarks.support --check         # exit 1, and the pages that differ

Its source is [tool.tilewise.support] in pyproject.toml: by package the lowest and the highest
version with which the tests passed.
"""

import sys
import tomllib
from pathlib import Path

from benchmarks.docs_tables import lines_of, replaced
from tilewise_tools.naming import Parser, run_script

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/versions.md")
TABLE = "support"


def support_versions() -> dict[str, tuple[str, str]]:
    """Return the lowest and the highest version that was tested, by package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {
        name: (low, high) for name, (low, high) in project["tool"]["tilewise"]["support"].items()
    }


def table() -> list[str]:
    """Return the table in Markdown."""
    rows = [(name, *versions) for name, versions in support_versions().items()]
    return lines_of(("package", "lowest tested", "highest tested"), rows)


def written(page: str) -> str:
    """Return a page's text with the table as it should be."""
    return replaced((ROOT / page).read_text(encoding="utf-8"), TABLE, table())


def main() -> None:
    parser = Parser(description=__doc__)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--write", action="store_true")
    either.add_argument("--check", action="store_true")
    options = parser.parse_args()
    old = [page for page in PAGES if written(page) != (ROOT / page).read_text(encoding="utf-8")]
    if options.write:
        for page in old:
            (ROOT / page).write_text(written(page), encoding="utf-8")
    elif options.check:
        sys.stdout.write("".join(f"{page}: {TABLE}\n" for page in old))
        sys.exit(bool(old))
    else:
        sys.stdout.write("\n".join(table()) + "\n")


if __name__ == "__main__":
    run_script(main)

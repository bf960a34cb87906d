"""Lines of code by package and folder, and whether each package keeps within its budget.

    python -m benchmarks.size            # a table; exit status 1 if a package is above its budget

A line of code has a token on it that is neither a comment nor part of a docstring: prose is free.
The budgets stand in pyproject.toml under [tool.tilewise.budget]. Whoever needs more raises one in a
commit of its own that says what the lines buy.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tilewise_tools.naming import Parser, run_script

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
APART = ("tilewise/integrations", "tilewise_verify", "tilewise_tools")
"""Packages and folders with a budget of their own; the rest of tilewise is the core."""
NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def code_lines(source: str) -> int:
    """Lines with code in the text of a module: without blanks, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                lines.difference_update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    return len(lines)


def by_folder(source: Path = SOURCE) -> Counter[str]:
    """Lines of code of each folder of each package; modules of a package itself under its name."""
    found: Counter[str] = Counter()
    for path in source.rglob("*.py"):
        folders = path.relative_to(source).parts[:-1]
        found["/".join(folders[:2])] += code_lines(path.read_text(encoding="utf-8"))
    return found


def by_package(folders: Mapping[str, int]) -> dict[str, int]:
    """Lines of code of what has a budget: the core, and each folder of APART."""
    packages = dict.fromkeys(("tilewise", *APART), 0)
    for folder, lines in folders.items():
        package = folder.partition("/")[0]
        packages[folder if folder in APART else package] += lines
    return packages


def budgets() -> dict[str, int]:
    """The budgets of pyproject.toml."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["tool"]["tilewise"]["budget"]


def over_budget(packages: Mapping[str, int], allowed: Mapping[str, int]) -> list[str]:
    """A sentence for each package that has more lines than its budget allows."""
    return [
        f"{name} has {lines} lines of code, {lines - allowed[name]} more than its budget of "
        f"{allowed[name]} in pyproject.toml: take something out, or raise the budget in a commit "
        "that says what the lines buy"
        for name, lines in packages.items()
        if lines > allowed[name]
    ]


def main() -> None:
    Parser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    folders, allowed = by_folder(), budgets()
    packages = by_package(folders)
    for folder, lines in sorted(folders.items(), key=lambda item: -item[1]):
        print(f"{folder:28}{lines:8}")
    print(f"\n{'package':28}{'lines':>8}{'budget':>8}")
    for name, lines in packages.items():
        print(f"{name:28}{lines:8}{allowed[name]:8}")
    problems = over_budget(packages, allowed)
    print(*problems, sep="\n")
    sys.exit(bool(problems))


if __name__ == "__main__":
    run_script(main)

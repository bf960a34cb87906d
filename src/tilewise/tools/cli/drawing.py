"""A plan's grid on a terminal: coloured, and cut into blocks of ranks that fit its width."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tilewise.plan.ir import Plan
from tilewise.plan.text import show

STYLES = (("x", "bold cyan"), ("*", "yellow"), ("!", "magenta"))  # a word that holds the sign
OPERAND = "green"
WIDEST_CELL = 28


def draw(plan: Plan, console: Console) -> None:
    """Print the grid; where the output is no terminal, exactly the text that parse reads."""
    text = show(plan)
    if not console.is_terminal:
        console.print(text, end="", soft_wrap=True, markup=False, highlight=False)
        return
    lines = text.splitlines()
    top = next(i for i, line in enumerate(lines) if line.lstrip().startswith("step"))
    for line in lines[:top]:
        console.print(line, markup=False, highlight=False, style="dim" if line != lines[0] else "")
    grid = [[cell.strip() for cell in line.split("|")] for line in lines[top:]]
    first = 1
    while first < len(grid[0]):
        count = _fitting(grid, first, console.width)
        console.print(_block(grid, range(first, first + count)))
        first += count
    console.print(
        "[bold cyan]q0xkv1[/] tile   [green]kv0>1[/] operand to rank 1   "
        "[yellow]kv0*>1[/] partial   [magenta]q0!>1[/] result",
        highlight=False,
    )


def _fitting(grid: list[list[str]], first: int, width: int) -> int:
    """How many columns from this one on fit beside the step numbers."""
    used, count = 8, 0
    for column in range(first, len(grid[0])):
        used += min(WIDEST_CELL, max(len(row[column]) for row in grid)) + 3
        if used > width and count:
            break
        count += 1
    return count


def _block(grid: list[list[str]], columns: range) -> Table:
    table = Table(show_lines=False, header_style="bold", row_styles=["", "on grey11"])
    table.add_column(grid[0][0], justify="right", no_wrap=True)
    for column in columns:
        table.add_column(grid[0][column], max_width=WIDEST_CELL)
    for row in grid[1:]:
        table.add_row(row[0], *(_cell(row[column]) for column in columns))
    return table


def _cell(words: str) -> Text:
    cell = Text()
    for i, word in enumerate(words.split()):
        style = next((style for sign, style in STYLES if sign in word), OPERAND)
        cell.append(f"{' ' * bool(i)}{word}", "dim" if word == "." else style)
    return cell

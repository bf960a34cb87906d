"""The parts of a plan (items, transfers, tiles and steps), and the names to write one of your own.

ir: the values; builder: one rank's steps, written; payload: the tensors of an item in each pass;
text, grid and json: written forms; shifts: ranks that are alike; kept: values derived from a plan.
"""

from tilewise.plan.builder import RankBuilder, operand, partial
from tilewise.plan.ir import Item, Plan, PlanError, Role, Side, Step, Tile, Transfer
from tilewise.plan.text import parse

__all__ = [
    "Item",
    "Plan",
    "PlanError",
    "RankBuilder",
    "Role",
    "Side",
    "Step",
    "Tile",
    "Transfer",
    "operand",
    "parse",
    "partial",
]

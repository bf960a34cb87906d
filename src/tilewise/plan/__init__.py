"""What a plan is: items, transfers, tiles and steps. What a plan of one's own is written with.

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

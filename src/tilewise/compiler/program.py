"""The program: what one rank does, in order, in four kinds of instruction.

The executor runs it, the simulator replays it; neither needs to know the strategy.
"""

from __future__ import annotations

from typing import NamedTuple

from tilewise.plan.ir import Item, Role, Rows, Tile, Transfer

LAUNCHES_IN_FLIGHT = 1
"""Launches of a lane whose sends are left to themselves.

By lane, since a slow link's sends last for many launches of a fast one.
"""


class Launch(NamedTuple):
    """Start sends and receives, in this order on both ends of every pair.

    A partial leaves its place at once; an operand's or result's buffer stays in use until sent.
    step is the plan's, for messages.
    """

    handle: int
    step: int
    lane: int
    sends: tuple[Transfer, ...]
    recvs: tuple[Transfer, ...]


class Wait(NamedTuple):
    """Let these receives of a launch arrive (by their place in recvs); partials are merged now."""

    handle: int
    arrivals: tuple[int, ...]


class Compute(NamedTuple):
    """Compute a tile into this rank's partials."""

    tile: Tile


class Free(NamedTuple):
    """Forget a received operand."""

    item: Item


Instruction = Launch | Wait | Compute | Free


class Program(NamedTuple):
    """One rank's instructions.

    arenas: received and own operands that tiles read together, all of which arrive before the first
    is freed, so that their rows can lie side by side in one buffer, in this order.
    """

    rank: int
    world_size: int
    instructions: tuple[Instruction, ...]
    arenas: tuple[tuple[Item, ...], ...]


def arrivals(program: Program) -> dict[Item, Rows | None]:
    """The operands that a program receives, and which of their rows."""
    return {
        hop.item: hop.rows
        for instruction in program.instructions
        if isinstance(instruction, Launch)
        for hop in instruction.recvs
        if hop.item.role is Role.OPERAND
    }

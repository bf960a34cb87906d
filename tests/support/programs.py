"""Which received operands a program's rank holds, instruction by instruction."""

from __future__ import annotations

from collections.abc import Iterator

from tilewise.compiler.lowering import tile_operands
from tilewise.compiler.program import Compute, Instruction, Launch, Program
from tilewise.plan.ir import Item, Role


def used(instruction: Instruction) -> set[Item]:
    """The items whose values an instruction needs."""
    match instruction:
        case Compute(tile):
            return set(tile_operands(tile))
        case Launch(sends=sends):
            items = {transfer.item for transfer in sends}
            results = {item for item in items if item.role is Role.RESULT}
            return items | {item._replace(role=Role.PARTIAL) for item in results}
    return set()


def received_operands(program: Program) -> dict[Item, int]:
    """The operands that a rank receives, by the place of the launch that posts their receive."""
    return {
        transfer.item: place
        for place, instruction in enumerate(program.instructions)
        if isinstance(instruction, Launch)
        for transfer in instruction.recvs
        if transfer.item.role is Role.OPERAND
    }


def last_uses(program: Program) -> dict[Item, int]:
    """The place of the last instruction that uses an item."""
    places = enumerate(program.instructions)
    return {item: place for place, instruction in places for item in used(instruction)}


def received_held(program: Program) -> Iterator[set[Item]]:
    """Yield after each launch the received operands that are there, or to come, and are used yet."""
    begin, end = received_operands(program), last_uses(program)
    for place, instruction in enumerate(program.instructions):
        if isinstance(instruction, Launch):
            yield {x for x, first in begin.items() if first <= place <= end.get(x, place)}

"""Programs of ranks: how long what they receive is held."""

from __future__ import annotations

from tilewise.compiler.lowering import tile_operands
from tilewise.compiler.program import Compute, Launch, Program
from tilewise.plan.ir import Item, Role


def operand_spans(program: Program) -> dict[Item, range]:
    """The instructions from a received operand's launch to its last use, both counted."""
    first: dict[Item, int] = {}
    last: dict[Item, int] = {}
    for number, instruction in enumerate(program.instructions):
        match instruction:
            case Launch(sends=sends, recvs=recvs):
                for transfer in recvs:
                    if transfer.item.role is Role.OPERAND:
                        first.setdefault(transfer.item, number)
                used = [transfer.item for transfer in sends]
            case Compute(tile):
                used = tile_operands(tile)
            case _:
                continue
        last.update((item, number) for item in used if item in first)
    return {item: range(start, last[item] + 1) for item, start in first.items()}


def most_held(program: Program) -> int:
    """Received operands of a rank at their most, those on their way included."""
    spans = operand_spans(program).values()
    return max(sum(i in span for span in spans) for i in range(len(program.instructions)))

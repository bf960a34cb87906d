"""What a program does not say of its own operands: when nobody needs their packed rows any more.

It frees only what it received. The executor and the simulator both look it up here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from tilewise.compiler.lowering import tile_operands
from tilewise.compiler.program import Collective, Free, Launch, Program, Run
from tilewise.plan.ir import Item, Role


class Lifetimes(NamedTuple):
    """Ends of operands that a rank does not receive.

    Attributes:
        sends: how often each is sent.
        with_free: received operand -> own ones in arenas that nobody needs once it is freed.
    """

    sends: Mapping[Item, int]
    with_free: Mapping[Item, tuple[Item, ...]]


def lifetimes(program: Program) -> Lifetimes:
    """Look a program through."""
    sends: Counter[Item] = Counter()
    freed: dict[Item, int] = {}
    used: dict[Item, int] = {}
    for place, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run):
            used.update(dict.fromkeys(tile_operands(instruction.tile), place))
        elif isinstance(instruction, Free):
            freed[instruction.item] = place
        elif isinstance(instruction, Launch | Collective):
            items = [hop.item for hop in instruction.sends if hop.item.role is Role.OPERAND]
            sends.update(items)
            used.update(dict.fromkeys(items, place))
    with_free: dict[Item, tuple[Item, ...]] = {}
    for own in (item for arena in program.arenas for item in arena if item not in freed):
        later = (item for item, place in freed.items() if place > used.get(own, -1))
        first = next(later, None)  # frees are in order
        if first is not None:
            with_free[first] = *with_free.get(first, ()), own
    own_sends = {item: count for item, count in sends.items() if item not in freed}
    return Lifetimes(own_sends, with_free)

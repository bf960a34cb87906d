"""Token counts that leave some ranks a token more than others, taken as the next that does not.

Ranks whose shards are equal are simulated once for all; a token more or less changes no choice.
"""

from __future__ import annotations

from dataclasses import replace

from tilewise.compiler.symmetry import all_alike
from tilewise.masks.base import Causal, Full
from tilewise.strategies.ring import ring
from tilewise.workload import LAYOUTS, Workload


def evened(work: Workload, world_size: int) -> Workload:
    """The workload with the next multiple of twice the ranks as its number of tokens.

    As it is if that makes ranks no more alike: for other masks than full and causal ones, and for
    layouts that are made otherwise.
    """
    layout = work.layout_for(world_size)
    tokens = -(-work.num_tokens // (2 * world_size)) * 2 * world_size
    named = dict(LAYOUTS).get(layout.name)
    if tokens == work.num_tokens or named is None or not isinstance(work.mask, Full | Causal):
        return work
    if layout != named(work.num_tokens, world_size):
        return work
    even = named(tokens, world_size)
    if all_alike(ring(world_size), work.mask, (even, even)) is None:
        return work
    return replace(work, num_tokens=tokens, layout=even)

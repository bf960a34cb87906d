"""The memory of one rank's pass, counted ahead: every buffer that the executor will take, in order.

    the caller's              the pass's buffers                kept for backward
    q, k, v, (out, dout, lse)  arenas, messages, partials,       operands that forward received
    and the results           copies of rows that lie apart

It stands alone because it makes one number of what simulation/walk.py finds (buffers, and when they are
needed) and simulation/copies.py (rows that calls copy). What kernels allocate inside is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from tilewise.compiler.lowering import lower
from tilewise.compiler.program import Program
from tilewise.plan.ir import Side
from tilewise.plan.payload import ITEM_BYTES, accumulator
from tilewise.simulation.copies import Copies, copies, whole
from tilewise.simulation.setting import Setting
from tilewise.simulation.walk import Look, Walk
from tilewise.simulation.zigzag_causal import Halves, Members

LOOKS = 8
"""Tiles that are looked at for what they copy: those that may take most."""


def peak_bytes(setting: Setting, program: Program, before: Program | None = None) -> int:
    """Most bytes that a rank holds at once in a pass, kernels' own apart.

    Args:
        before: the forward pass's program, of a backward pass that finds what that kept.
    """
    walk = Walk(setting, program)
    if before is not None:
        walk.find(before)
    walk.start()
    walk.follow()
    return _callers(setting, walk.own) + walk.kept + _most(walk)


def written_peaks(
    setting: Setting, programs: Mapping[int, Program], halves: Halves | None = None
) -> dict[int, int]:
    """Peak bytes by rank, of the ranks that others are relabelled from.

    Args:
        programs: theirs.
        halves: what of each transfer the others' masks leave; the most that one of them holds.
    """
    peaks = {}
    for rank, program in programs.items():
        before = None
        if setting.forward is not None:
            before = lower(setting.plan, rank, carries=setting.forward.carries)
        alone: list[tuple[Program, Program | None]] = [(program, before)]
        if halves is not None:
            members = Members(program, halves)
            kept = None if before is None else Members(before, halves)
            alone = [
                (members.program(member), kept and kept.program(member))
                for member in (kept or members).telling()
            ]
        peaks[rank] = max(peak_bytes(setting, *both) for both in alone)
    return peaks


def _callers(setting: Setting, own: Sequence[Sequence[int]]) -> int:
    """Bytes of the caller's: what a pass is given, and its results.

    Args:
        own: the rank's shards, by side.
    """
    (layouts, _, groups, _), payload = setting.table, setting.payload
    q, kv = (sum(map(layout.size, shards)) for layout, shards in zip(layouts, own, strict=True))
    tensors = 4 if payload.backward else 2  # q, out, dout, dq; k, v, dk, dv
    row_bytes = tensors * payload.head_dim * ITEM_BYTES(payload.dtype)
    lse_bytes = ITEM_BYTES(accumulator(payload.dtype))
    return q * groups.num_heads * (row_bytes + lse_bytes) + kv * groups.num_kv_heads * row_bytes


def _most(walk: Walk) -> int:
    """Most bytes of buffers at once: when one is lent, or when a tile's calls copy rows."""
    lent = accumulate(walk.bytes)
    ended = [0] * (len(walk.bytes) + 2)
    for number, end in enumerate(walk.ledger.ends()):
        ended[end] += walk.bytes[number]
    held = [now - gone for now, gone in zip(lent, accumulate(ended), strict=False)]
    best = max(held, default=0)
    looks = sorted(walk.looks, key=lambda look: held[look.number] + look.most, reverse=True)
    for look in looks[:LOOKS]:
        if held[look.number] + look.most <= best:
            break
        best = max(best, held[look.number] + _copied_bytes(walk, look))
    return best


def _copied_bytes(walk: Walk, look: Look) -> int:
    """What a tile's calls take beside what is held: the call that takes most."""
    table = walk.setting.table
    if walk.setting.everything:
        found = [whole(table, look.tile, look.places)]
    else:
        found = copies(table, look.tile, look.places, walk.zigzagged)
    return max((_call_bytes(walk, one) for one in found), default=0)


def _call_bytes(walk: Walk, call: Copies) -> int:
    total = 0.0
    for side in Side:
        width = sum(walk.widths(side))
        aside = call.aside[side] if walk.payload.backward else 0  # forward's are the kernel's own
        total += call.copied[side] * walk.read_bytes[side]
        total += (aside + call.merged[side]) * width * call.heads
    return int(total)

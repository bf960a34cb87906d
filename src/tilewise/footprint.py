"""The memory of one rank's pass, counted ahead: every buffer that the executor will take, in order.

    the caller's              the pass's buffers                kept for backward
    q, k, v, (out, dout, lse)  arenas, messages, partials,       operands that forward received
    and the results           copies of rows that lie apart

It replays a program as work.py does, with sizes for tensors and by the same ledger. What kernels
allocate inside is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from tilewise.copies import Copies, copies, whole
from tilewise.halves import Halves
from tilewise.layout import Layout
from tilewise.lowering import lower
from tilewise.members import Members
from tilewise.parts import Cut, Table
from tilewise.payload import ITEM_BYTES, accumulator, head_groups
from tilewise.plan import Plan, Side
from tilewise.program import Program
from tilewise.table import everything_needed
from tilewise.walk import Look, Setting, Walk
from tilewise.workload import Workload, saving

__all__ = ["Setting", "peak_bytes", "setting_of", "written_peaks"]

LOOKS = 8
"""Tiles that are looked at for what they copy: those that may take most."""


def setting_of(
    plan: Plan, work: Workload, layouts: tuple[Layout, Layout], backward: bool
) -> Setting:
    """What the ranks of a pass have in common; the plan is as it is lowered."""
    groups = head_groups(work.num_heads, work.num_kv_heads, plan.num_head_groups)
    gathered = saving(plan, work.save) == "gathered"
    return Setting(
        plan,
        Table(layouts, work.mask, groups, Cut()),
        work.payload(plan, backward),
        work.payload(plan, False) if backward and gathered else None,
        gathered and not backward,
        everything_needed(work.mask, *layouts),
    )


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
    (groups, payload), layouts = (setting.table.groups, setting.payload), setting.table.layouts
    q, kv = (sum(map(layout.size, shards)) for layout, shards in zip(layouts, own, strict=True))
    value = payload.head_dim * ITEM_BYTES(payload.dtype)
    q_tensors, kv_tensors = (4, 4) if payload.backward else (2, 2)
    q_bytes = groups.num_heads * (q_tensors * value + ITEM_BYTES(accumulator(payload.dtype)))
    return q * q_bytes + kv * kv_tensors * groups.num_kv_heads * value


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

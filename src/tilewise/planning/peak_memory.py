"""Peak memory of a pass: the executor runs it on shapes, and the buffers that it takes are placed.

See execution/prepare.py for how it runs. Counted is

    q, k, v, out, lse; in backward dout, dq, dk, dv too    the caller's tensors
    operands that forward keeps for backward               with save="gathered"
    the workspace that all buffers of the pass are placed in    see execution/memory_plan.py

and left out is what kernels allocate inside.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from tilewise.compiler.liveness import aligned
from tilewise.compiler.resolved import ResolvedPass
from tilewise.compiler.symmetry import all_alike, find_symmetry
from tilewise.execution.allocator import RecordingAllocator
from tilewise.execution.forward_backward import backward_pass, empty_results, forward_pass
from tilewise.execution.memory_plan import BufferSpec, places
from tilewise.execution.prepare import (
    NoKernel,
    NoTransport,
    Passes,
    expansion_on_shapes,
    operands_on_shapes,
)
from tilewise.execution.problem import Problem
from tilewise.kernels.scores import Scores
from tilewise.layouts.layout import zigzag
from tilewise.masks.base import Causal, Full
from tilewise.plan.ir import Plan
from tilewise.simulation.zigzag_causal import EXACT_RANKS, halves_of

SMALL_SHARD = 1024
"""Rows. Equal shards under a full or a causal mask are counted at this size, where tiles are cut as
those of larger shards are, and scaled: every buffer's bytes go with a shard's rows."""

LIKE_RANKS = 16
"""Ranks that differ only in which halves of shards they move are all looked at, up to so many; of
more a few, which need within some 2 % of what the rank needs that needs most."""


RANKS_A_COPY = 64
"""Ranks that are counted on one copy of a plan, with which the executor keeps their programs."""


class PassMemory:
    """Peak bytes of a plan's ranks in one pass; see the module.

    Args:
        passes: of a call: what forward keeps is for backward to say.
        backward: which of them.
    """

    def __init__(self, passes: Passes, *, backward: bool):
        self._backward, self._scale = backward, 1.0
        resolved = passes[backward]
        plan, mask, layouts, *_ = resolved
        alike, size = all_alike(plan, mask, layouts), layouts[0].size(0)
        if alike is not None and mask in (Full(), Causal()) and size > SMALL_SHARD:
            self._scale = size / SMALL_SHARD
            layout = zigzag(SMALL_SHARD * plan.world_size, plan.world_size)
            resolved = resolved._replace(layouts=(layout, layout))
        plan, self._ranks = _pruned(resolved, alike)
        scores = _scores(passes)
        small = _with(passes, plan=plan, layouts=resolved.layouts)
        self._problem = Problem(small, scores, prune=False, kernel=NoKernel())
        self._problem = self._problem._replace(expansion=expansion_on_shapes(passes))

    @cached_property
    def peak_bytes(self) -> int:
        """Of the rank that needs most."""
        return round(self._scale * self._most(self._ranks))

    def fits(self, memory: float) -> bool:
        """Whether no rank needs more: that takes less than to know what they need."""
        enough = int(memory / self._scale)
        return self._most(self._ranks, enough) <= enough

    def of_rank(self, rank: int) -> int:
        """Of one rank."""
        return round(self._scale * self._most([rank]))

    def _most(self, ranks: Sequence[int], enough: int = 0) -> int:
        """The highest figure of them, placed in falling order of what they need at most."""
        most = enough
        for first in range(0, len(ranks), RANKS_A_COPY):
            passes = self._problem.passes
            problem = self._problem._replace(passes=_with(passes, plan=_copy(passes[0].plan)))
            some = ranks[first : first + RANKS_A_COPY]
            asked = (_recorded(problem, rank, self._backward) for rank in some)
            bounded = [(held + _slots(buffers), held, buffers) for held, buffers in asked]
            for limit, held, buffers in sorted(bounded, key=itemgetter(0), reverse=True):
                if limit > most:
                    most = max(most, held + places(buffers, most - held)[1])
        return most


def _with(passes: Passes, **fields: Any) -> Passes:
    """Both with the same values: the pass that is not counted runs if it has the same plan."""
    forward, backward = passes
    return forward._replace(**fields), backward._replace(**fields)


def _pruned(resolved: ResolvedPass, alike: bool | None) -> tuple[Plan, Sequence[int]]:
    """What the mask leaves of a plan, and some ranks of which one needs most of all.

    Args:
        alike: as symmetry.all_alike says.
    """
    plan, layouts = resolved.plan, resolved.layouts
    symmetry = None if alike is None else find_symmetry(plan)
    if symmetry is not None and symmetry.members > 1:
        firsts = symmetry.firsts()
        if not alike:
            return plan, firsts
        halves = halves_of(plan, symmetry.plan_shifts, layouts[0].size(0))
        if halves.complete:
            members = (halves.members(first) for first in firsts)
            return halves.pruned(plan), [rank for ranks in members for rank in _some(ranks)]
        if plan.world_size > EXACT_RANKS:
            return plan, firsts
    return resolved.pruned, range(plan.world_size)


def _copy(plan: Plan) -> Plan:
    """The plan anew, with nothing kept."""
    return plan.changed() if plan.scripted else plan.changed(steps=plan.steps, script=None)


def _some(ranks: np.ndarray) -> list[int]:
    n = len(ranks)
    places = range(n) if n <= LIKE_RANKS else (0, 3, n // 4, n // 2, n - 1)
    return ranks[list(places)].tolist()


def rank_peak_bytes(problem: Problem, rank: int, backward: bool) -> int:
    """Peak bytes of one rank in a pass of a checked call on one sequence.

    Args:
        problem: of its kernel only counts how that wants tiles cut.
    """
    held, buffers = _recorded(problem, rank, backward)
    return held + places(buffers)[1]


def _recorded(problem: Problem, rank: int, backward: bool) -> tuple[int, list[BufferSpec]]:
    """Bytes of the caller's tensors, and the buffers that the pass takes."""
    asked: list[BufferSpec] = []
    problem = problem._replace(
        kernel=NoKernel(problem.kernel.square_causal, problem.kernel.whole_tile),
        allocator=lambda device: RecordingAllocator(device, asked.extend),
    )
    transport = NoTransport(rank, problem.passes[backward].plan.world_size)
    q, *kv = operands_on_shapes(problem, rank)
    (out, lse), kept = empty_results(q, problem.passes[0].payload.v_head_dim), []
    if problem.gathered or not backward:
        out, lse, kept = forward_pass(problem, transport, q, *kv, keep=True)
    held = [q, *kv, out, lse, *kept]
    if backward:
        asked.clear()
        dout = torch.empty_like(out)
        saved = q, *kv, out, lse
        gathered = kept[problem.scores.max_logit :]  # the largest scores are before
        held += [dout, *backward_pass(problem, transport, saved, gathered, (dout, None))]
    return sum(x.nbytes for x in held), asked


def _scores(passes: Passes) -> Scores:
    """What decides about buffers of them."""
    return Scores(1.0, max_logit=passes[0].payload.max_logit)


def _slots(asked: Sequence[BufferSpec]) -> int:
    """Bytes in which buffers have room if only those of one size take each other's places."""
    changes: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for buffer in asked:
        of_size = changes[aligned(buffer.num_bytes)]
        of_size[buffer.begin] += 1
        of_size[max((end for _, end in buffer.parts), default=buffer.begin)] -= 1
    return sum(
        size * max(accumulate(at[moment] for moment in sorted(at))) for size, at in changes.items()
    )

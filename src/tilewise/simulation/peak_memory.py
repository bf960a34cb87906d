"""Peak memory of a pass, from the codes of its ranks.

Counted is

    q, k, v, out, lse; in backward dout, dq, dk, dv too    the caller's tensors
    operands that forward keeps for backward               with save="gathered"
    the workspace of the pass's code                       all buffers, placed: see Code.num_bytes
    keys and values made of latents                        of one kernel call

and left out is what kernels allocate inside.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from tilewise.compiler.code import Code
from tilewise.compiler.codegen import pass_code
from tilewise.compiler.facts import CallTraits, CodeTraits, device_traits
from tilewise.compiler.pruning import all_alike
from tilewise.compiler.resolved import ResolvedPass
from tilewise.plan.ir import Plan, find_symmetry
from tilewise.simulation.halves import EXACT_RANKS, halves_of

LIKE_RANKS = 16
"""Up to this many ranks that differ only in the halves of shards that they move are all counted. Of
more, a few are: the largest of these is within some 2 % of the largest of all."""

HALVED_RANKS = 1024
"""With more ranks, all are taken to hold whole shards, also where a causal mask halves some."""


class PassMemory:
    """Peak bytes of a plan's ranks in one pass; see the module.

    Args:
        passes: of a call: what forward keeps is for backward to say.
        backward: which of them.
        device: "cpu" or "cuda".
        traits: of the transport and the kernel; None: of loopback, and of NCCL on one node.
    """

    def __init__(
        self,
        passes: tuple[ResolvedPass, ResolvedPass],
        *,
        backward: bool,
        device: str = "cpu",
        traits: CodeTraits | None = None,
    ):
        self._backward, self._traits = backward, traits or device_traits(device)
        self._prune = passes[1].then is not None
        if self._prune:  # the parts of a pass have plans of their own
            self._passes, self._ranks = passes, range(passes[0].plan.world_size)
            return
        resolved = passes[backward]
        plan, mask, layouts, *_ = resolved
        pruned, self._ranks = _pruned(resolved, all_alike(plan, mask, layouts))
        forward_pass, backward_pass = (one._replace(plan=pruned) for one in passes)
        self._passes = forward_pass, backward_pass

    @cached_property
    def peak_bytes(self) -> int:
        """Memory of the rank that needs most."""
        return max(map(self.of_rank, self._ranks))

    def fits(self, memory: float) -> bool:
        """Return whether no rank needs more than this memory; that takes less time than to find
        what they need.
        """
        return all(self.of_rank(rank) <= memory for rank in self._ranks)

    def sample(self, num_ranks: int) -> int:
        """Return the most that one of a few ranks needs: those that receive most in forward.

        With 8 of 32 ranks it was at least 97 % of peak_bytes, for every plan that was tried.
        """
        resolved = self._passes[0]

        def received(rank: int) -> int:
            steps = resolved.plan.rank_steps(rank)
            return sum(resolved.transfer_bytes(x) for step in steps for x in step.recvs)

        ranks = sorted(self._ranks, key=received, reverse=True)[:num_ranks]
        return max(map(self.of_rank, ranks))

    def of_rank(self, rank: int) -> int:
        """Return the memory of one rank."""
        return self._code(rank).peak_bytes

    @property
    def largest_code(self) -> Code:
        """The code of the rank that needs most."""
        return max(map(self._code, self._ranks), key=lambda code: code.peak_bytes)

    def _code(self, rank: int) -> Code:
        call = CallTraits(prune=self._prune, keep=self._passes[1].payload.saved)
        return pass_code(
            self._passes, rank, backward=self._backward, call=call, traits=self._traits
        )


def _pruned(resolved: ResolvedPass, alike: bool | None) -> tuple[Plan, Sequence[int]]:
    """Return the plan without what the mask makes needless, and ranks to look at.

    One of these ranks needs the most memory of all.

    Args:
        alike: as pruning.all_alike says.
    """
    plan, layouts = resolved.plan, resolved.layouts
    symmetry = None if alike is None else find_symmetry(plan)
    if symmetry is not None and symmetry.members > 1:
        representatives = symmetry.representatives()
        if not alike or plan.world_size > HALVED_RANKS:
            return plan, representatives
        halves = halves_of(plan, symmetry.plan_shifts, layouts[0].size(0))
        if halves.complete:
            members = (halves.members(first) for first in representatives)
            return halves.pruned(plan), [rank for ranks in members for rank in _some(ranks)]
        if plan.world_size > EXACT_RANKS:
            return plan, representatives
    return resolved.pruned, range(plan.world_size)


def _some(ranks: np.ndarray) -> list[int]:
    n = len(ranks)
    indices = range(n) if n <= LIKE_RANKS else (0, 3, n // 4, n // 2, n - 1)
    return ranks[list(indices)].tolist()

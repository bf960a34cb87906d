"""One rank's share of a plan, with what was derived from it: made ahead, pickled, run elsewhere."""

from __future__ import annotations

from functools import partial
from typing import Any

from tilewise.plan.cache import PlanCache
from tilewise.plan.ir import Plan, RankStep

SENT = ("program", "arriving", "lifetimes", "calls")
"""What goes to another process with the plan."""


class RankPlan(Plan):
    """A plan for one mask and layout as one rank needs it; `BatchStep.prepare` makes it.

    `attention` takes it in place of a plan, a mask and a layout. It pickles with what was derived
    from it, which then need not be derived again. Other ranks' steps are not in it.

    Args:
        rank: whose share it is.
        batch: words for what it is prepared for, on which ranks must agree.
        fingerprint: of the plan of all ranks.
        steps: this rank's.
        cache: what was derived.
        fields: as of Plan.
    """

    __slots__ = ("_fingerprint", "batch", "rank")
    _fingerprint: str
    batch: str
    rank: int

    def __init__(
        self,
        rank: int,
        batch: str,
        fingerprint: str,
        steps: tuple[RankStep, ...],
        cache: PlanCache | None = None,
        **fields: Any,
    ):
        def script(asked: int) -> tuple[RankStep, ...]:
            if asked != rank:
                raise ValueError(
                    f"{self.name} was prepared for rank {rank} alone and does not know rank "
                    f"{asked}'s steps; take the plan that it was prepared from"
                )
            return steps

        super().__init__(**fields, script=script)
        for name, value in (("rank", rank), ("batch", batch), ("_fingerprint", fingerprint)):
            object.__setattr__(self, name, value)
        if cache is not None:
            object.__setattr__(self, "_cache", cache)

    @property
    def fingerprint(self) -> str:
        """That of the plan of all ranks."""
        return self._fingerprint

    def _key(self) -> tuple:
        return self.fingerprint, self.rank, self.batch

    def __reduce__(self) -> tuple[Any, ...]:
        names = "name", "world_size", "num_head_groups", "owners", "cuts", "default_save", "traits"
        make = partial(RankPlan, **{name: getattr(self, name) for name in names})
        share = self.rank_steps(self.rank), self._cache.of(SENT)
        return make, (self.rank, self.batch, self.fingerprint, *share)

"""One rank's share of a plan, with what was derived from it: made ahead, pickled, run elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

from tilewise.plan.ir import Plan, PlanArguments, RankStep
from tilewise.plan.kept import KeptValues, keep_values, kept_values


@dataclass(frozen=True, init=False, eq=False, repr=False)
class RankPlan(Plan):
    """A plan for one mask and layout as one rank needs it; `BatchStep.prepare` makes it.

    `attention` takes it in place of a plan, a mask and a layout. It pickles with what was derived
    from it, which then need not be derived again. Other ranks' steps are not in it.

    Args:
        rank: whose share it is.
        batch: words for what it is prepared for, on which ranks must agree.
        fingerprint: of the plan of all ranks.
        own_steps: this rank's.
        derived: the functions whose values go to another process with it, and what they derived.
        fields: as of Plan.
    """

    rank: int
    batch: str
    derived_by: tuple[Callable[..., object], ...]
    _fingerprint: str

    def __init__(
        self,
        rank: int,
        batch: str,
        fingerprint: str,
        own_steps: tuple[RankStep, ...],
        derived: Mapping[Callable[..., object], KeptValues],
        **fields: Unpack[PlanArguments],
    ):
        name = fields.get("name")

        def script(asked: int) -> tuple[RankStep, ...]:
            if asked != rank:
                raise ValueError(
                    f"{name} was prepared for rank {rank} alone and does not know rank "
                    f"{asked}'s steps; take the plan that it was prepared from"
                )
            return own_steps

        arguments: PlanArguments = {**fields, "script": script}
        super().__init__(**arguments)
        vars(self).update(
            rank=rank, batch=batch, derived_by=tuple(derived), _fingerprint=fingerprint
        )
        for function, values in derived.items():
            keep_values(self, function, values)

    @property
    def fingerprint(self) -> str:
        """That of the plan of all ranks."""
        return self._fingerprint

    def _key(self) -> tuple[Hashable, ...]:
        return self.fingerprint, self.rank, self.batch

    def __reduce__(self) -> tuple[Any, ...]:
        names = "name", "world_size", "num_head_groups", "owners", "cuts", "default_save", "traits"
        make = partial(RankPlan, **{name: getattr(self, name) for name in names})
        derived = {function: kept_values(self, function) for function in self.derived_by}
        steps = self.rank_steps(self.rank)
        return make, (self.rank, self.batch, self.fingerprint, steps, derived)

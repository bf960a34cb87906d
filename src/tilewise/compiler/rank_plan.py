"""One rank's share of a plan, with the codes of its passes: made ahead, pickled, run elsewhere."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Unpack

from tilewise.compiler.code import CODE_FORMAT, Code, check_format
from tilewise.compiler.facts import CallTraits, CodeTraits
from tilewise.plan.ir import Plan, PlanArguments, RankStep
from tilewise.plan.payload import HeadGroups, Payload


class PassKind(NamedTuple):
    """The pass that a code was generated for, beside the plan, the mask and the layout."""

    backward: bool
    payload: Payload
    groups: HeadGroups
    call: CallTraits

    def __str__(self) -> str:
        payload, groups = self.payload, self.groups
        widths = "/".join(map(str, dict.fromkeys((payload.head_dim, payload.v_head_dim))))
        return (
            f"a batch of {self.call.batch}, {groups.num_heads} heads, {groups.num_kv_heads} KV "
            f"heads of {widths} in {payload.dtype}, wires {payload.wires}{self._extras}"
        )

    @property
    def _extras(self) -> str:
        """Say what a call asks for beyond what is usual."""
        call, payload = self.call, self.payload
        extras = {
            'save="gathered"': call.keep or payload.saved,
            "dropout or bias": call.places,
            "max_logit": payload.max_logit,
            "prune=False": not call.prune,
        }
        return "".join(f", {name}" for name, asked in extras.items() if asked)


class PreparedCode(NamedTuple):
    """A code, and what it is for."""

    kind: PassKind
    traits: CodeTraits
    code: Code


@dataclass(frozen=True, init=False, eq=False, repr=False)
class RankPlan(Plan):
    """A plan for one mask and layout as one rank needs it; `BatchStep.prepare` makes it.

    `attention` takes it in place of a plan, a mask and a layout. It pickles with the codes of both
    passes. Other ranks' steps are not in it.

    Args:
        rank: whose share it is.
        batch: words for what it is prepared for, on which ranks must agree.
        fingerprint: of the plan of all ranks.
        own_steps: this rank's.
        codes: of its passes, on the transports and kernels that it may meet.
        fields: as of Plan.
    """

    rank: int
    batch: str
    codes: tuple[PreparedCode, ...]
    _fingerprint: str

    def __init__(
        self,
        rank: int,
        batch: str,
        fingerprint: str,
        own_steps: tuple[RankStep, ...],
        codes: tuple[PreparedCode, ...],
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
        vars(self).update(rank=rank, batch=batch, codes=codes, _fingerprint=fingerprint)

    @property
    def fingerprint(self) -> str:
        """That of the plan of all ranks."""
        return self._fingerprint

    def code_for(self, kind: PassKind, traits: CodeTraits) -> Code | None:
        """The code of a pass; None where the transport or the kernel is not one prepared for.

        Raises:
            ValueError: if it was prepared for tensors of other shapes.
        """
        mine = [one for one in self.codes if one.kind == kind]
        if not mine:
            known = next(one.kind for one in self.codes if one.kind.backward == kind.backward)
            raise ValueError(
                f"{self.name} was prepared ({self.batch}) for {known}, but is called with {kind}; "
                "prepare the step for these (step.prepare has dtype=, the schedule the rest)"
            )
        return next((one.code for one in mine if one.traits == traits), None)

    def _key(self) -> tuple[Hashable, ...]:
        return self.fingerprint, self.rank, self.batch

    def __reduce__(self) -> tuple[Any, ...]:
        fields = self._arguments()
        del fields["steps"], fields["script"]
        make = partial(_read, **fields)
        steps = self.rank_steps(self.rank)
        own = self.rank, self.batch, self.fingerprint, steps, self.codes
        return make, (CODE_FORMAT, *own)


def _read(
    code_format: int,
    rank: int,
    batch: str,
    fingerprint: str,
    own_steps: tuple[RankStep, ...],
    codes: tuple[PreparedCode, ...],
    **fields: Unpack[PlanArguments],
) -> RankPlan:
    check_format(code_format)
    return RankPlan(rank, batch, fingerprint, own_steps, codes, **fields)

"""The check of a canonical call's codes: nothing is merged, and each row is computed once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tilewise.arguments import checks_arguments
from tilewise.compiler.code import Attend, Code, Merge, Ref, SumHeads
from tilewise.compiler.codegen import CallTraits, pass_code
from tilewise.plan.ir import Plan
from tilewise.workload import Workload


@checks_arguments
def check_canonical(plan: Plan, work: Workload, backward_plan: Plan | None = None) -> None:
    """Return None if a plan's results have the same bits at any split, gradients too.

        tw.all_gather(4).check_canonical(work)      # of a workload with reduction="canonical"

    It looks at the codes of all ranks: no partial result is added to another, and each row of a
    result is written by one kernel call that adds to nothing. That a kernel's rows do not depend on
    each other is for tests of the kernel.

    Args:
        plan: of both passes, or of the forward pass.
        backward_plan: None: plan.
    Raises:
        ValueError: if some results are merged, or a plan does not fit the workload.
    """
    passes = work.resolve(plan, backward_plan)
    for rank in range(plan.world_size):
        for backward in (False, True):
            keep = passes[1].payload.saved and not backward
            check_code(pass_code(passes, rank, backward=backward, call=CallTraits(keep=keep)))


def check_code(code: Code) -> None:
    """Raise ValueError if a code merges results, or computes a row twice."""
    where = f"rank {code.rank}, {'backward' if code.backward else 'forward'}"
    written: Counter[tuple[int, int]] = Counter()
    for number, op in enumerate(code.ops):
        adds = isinstance(op, Attend) and any(result.adds for result in op.results)
        if isinstance(op, Merge | SumHeads) or adds:
            raise ValueError(
                f"{where}, op {number}: {type(op).__name__.lower()} adds partial results, whose "
                "bits depend on how rows are split"
            )
        if isinstance(op, Attend):
            written.update(_rows(code, (ref for result in op.results for ref in result.refs)))
    twice = sum(count > 1 for count in written.values())
    if twice:
        raise ValueError(f"{where}: {twice} rows of results are computed more than once")


def _rows(code: Code, refs: Iterable[Ref]) -> Iterable[tuple[int, int]]:
    """Rows of tensors, as (tensor, row)."""
    for ref in refs:
        for row in range(*(ref.rows or (0, code.tensors[ref.tensor].shape[0], 1))):
            yield ref.tensor, row

"""Methods of `Plan` that need what stands above it: written forms, compiler and workload.

A plan knows neither, so `Plan` declares these methods and this module, which `import tilewise`
brings in, sets them. Each is a function of the module that it is imported from.
"""

from tilewise.compiler.checker import check
from tilewise.compiler.lowering import lower
from tilewise.compiler.pruning import prune
from tilewise.plan.ir import Plan
from tilewise.plan.json import from_json, to_json
from tilewise.plan.text import show
from tilewise.workload import Workload, plan_code


def _check_canonical(plan: Plan, work: Workload, backward_plan: Plan | None = None) -> None:
    from tilewise.exact.check import check_canonical  # of a fast workload there is none

    check_canonical(plan, work, backward_plan)


Plan.check = check
Plan.pruned = prune
Plan.program = lower
Plan.code = plan_code
Plan.check_canonical = _check_canonical
Plan.to_json = to_json
Plan.from_json = staticmethod(from_json)


def _text(self: Plan) -> str:
    return show(self)


Plan.__str__ = _text

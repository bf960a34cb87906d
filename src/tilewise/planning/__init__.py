"""The search for the fastest plan, its bounds, and its answer.

options: what is tried; bounds, plan_bounds: least times; pass_model: a pass on a machine, as these
see it; trials: one pass of the options; teams: a rough trial of a split by heads; pairs: both
passes; reasons, candidate: the answer and its file; elsewhere: what other libraries do nearest.
"""

from tilewise.planning.candidate import Candidate, load_candidate

__all__ = ["Candidate", "load_candidate"]

"""The compiler: a plan is made ready for heads, mask and layout, checked, pruned, lowered to code.

resolved: a plan with heads, mask and layout; checker: is the plan right; pruning: what the mask
makes needless; lowering and program: what one rank does, in order; codegen and passes: the
operations (ops) of a rank's pass, written on a draft that has no memory yet; placement: where each
buffer lies in memory; code: the result. row_moves and row_code do the same for rows of tokens;
rank_plan: codes made ahead for one rank.
"""

from tilewise.compiler.program import Program
from tilewise.compiler.pruning import droppable

__all__ = ["Program", "droppable"]

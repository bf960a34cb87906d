"""The compiler: a plan is made ready for heads, mask and layout, checked, pruned, lowered to code.

shards: the tokens of a plan's shards; liveness: until when buffers are needed; symmetry:
which ranks are alike; program: the result, what one rank does.
"""

from tilewise.compiler.program import Program
from tilewise.compiler.pruning import droppable

__all__ = ["Program", "droppable"]

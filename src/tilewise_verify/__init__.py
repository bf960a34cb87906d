"""Is the split model the same model: what a black box attends to, and where two runs differ.

`effective_mask.py` reads weights of attention out of any function. `parity.py` compares a split
model with the unsplit one: `ranks.py` runs it, `by_value.py` sends it to processes, `records.py`
keeps what passes its modules, `comparison.py` matches rows, `diagnosis.py` finds the first layer
that deviates, `attention_path.py` the attention in it and `weights.py` its weights. `tables.py` and
`gradients.py` say in which facts two results differ; `causes.py` is the closed list and the table
from facts to causes.
"""

from tilewise_verify.effective_mask import EffectiveMask
from tilewise_verify.gradient_bound import ErrorBound, error_bound
from tilewise_verify.parity import ParityReport

__all__ = ["EffectiveMask", "ErrorBound", "ParityReport", "error_bound"]

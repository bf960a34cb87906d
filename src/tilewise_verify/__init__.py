"""Is the split model the same model: what a black box attends to, and where two runs differ.

`effective_mask.py` reads weights of attention out of any function. `parity.py` compares a split
model with the unsplit one: `ranks.py` runs it, `by_value.py` sends it to processes, `records.py`
keeps what passes its modules, `comparison.py` matches rows, `diagnosis.py` finds the first layer
that deviates, `attention_path.py` the attention in it and `weights.py` its weights. `tables.py` and
`gradients.py` say in which facts two results differ; `causes.py` is the closed list and the table
from facts to causes.
`pytest_plugin.py` is the fixture cp_parity, and `cp_parity.py` what it runs. `flash_attn_shim.py`
computes flash_attn's functions on a CPU.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise_verify.effective_mask import EffectiveMask
    from tilewise_verify.gradient_bound import ErrorBound, error_bound
    from tilewise_verify.parity import ParityReport

__all__ = ["EffectiveMask", "ErrorBound", "ParityReport", "error_bound"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: pytest loads this package in every run."""
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = {"EffectiveMask": "effective_mask", "ParityReport": "parity"}
    value = getattr(import_module(f"{__name__}.{module.get(name, 'gradient_bound')}"), name)
    return globals().setdefault(name, value)

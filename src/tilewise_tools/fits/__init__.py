"""Memory of a training step of a transformers model before it runs: how long a sequence fits.

`setting.py` says how the model is trained, `model.py` makes it without memory, `ledger.py` counts
what its code holds, `step.py` runs one step of it, `attention.py` has our own bytes, `parts.py` the
formulas and `longest.py` the search.
"""

"""Is the split model the same model: what a black box attends to, and where two runs differ.

`effective_mask.py` reads weights of attention out of any function; `tables.py` and `gradients.py`
say in which facts two tables, two sets of gradients differ; `causes.py` is the closed list of
causes and the table from facts to them.
"""

"""The papers' studies: `simulated.py` and `memory.py` make the tables of `table.py`."""

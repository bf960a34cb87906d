"""Python's cyclic garbage collector, at rest while many values without cycles are made."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """No cyclic garbage collection: plans and programs are many tuples and no cycle.

    The collector would search everything that is imported, several times, and find nothing: that
    took longer than making a program, and a sixth of a search by the planner.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

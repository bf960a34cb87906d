"""What is kept with a plan: values derived from it, and memory that its passes use again.

Of each kind the most recently used values are kept. In one table for all kinds, many programs
would drive out the pruned plan that they were made from.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Literal

Kind = Literal[
    # of the plan alone
    "hash",
    "fingerprint",
    "by rank",  # explicit steps, cut by rank
    "weighed",  # some ranks' steps, for a planner's bounds
    "collective",  # what all ranks call a part of a step
    "partial hops",  # of any share of a partial, one after the other
    # of the plan and heads, a mask and layouts
    "tuned",  # the plan made anew, by heads
    "cells",  # what the mask leaves of the table
    "exact",  # whether for any mask and layout
    "checked",
    "pruned",
    "halves",  # rows of every transfer under a causal mask
    # of calls that differ in the values of tensors alone
    "problems",  # by rank
    "problem",
    "record",  # what ranks compare before a pass
    "pass",
    # of one rank's pass
    "program",
    "arriving",
    "lifetimes",
    "calls",  # of tiles
    "binder",  # the same on a device
    "bindings",  # buffers of its passes, recorded and played
    "binding",
    "pool",  # memory that passes take one after the other
    # of decoding
    "decoding",  # passes over a cache, by number of queries
    "mask",  # the first of equal masks, which has what was derived from it
]
"""What a key of a kind must hold: all but the plan that the value depends on."""


class PlanCache:
    """One table per kind; in each the least recently used value goes first."""

    __slots__ = ("_tables",)

    def __init__(self) -> None:
        self._tables: dict[Kind, OrderedDict[Hashable, Any]] = {}

    def get(self, kind: Kind, key: Hashable, build: Callable[[], Any], keep: int) -> Any:
        """The value of a key, built if it is not there.

        Args:
            keep: values of this kind that stay.
        """
        table = self._tables.setdefault(kind, OrderedDict())
        if key in table:
            table.move_to_end(key)
            return table[key]
        value = table[key] = build()
        while len(table) > keep:
            table.popitem(last=False)
        return value

    def of(self, kinds: Iterable[Kind]) -> "PlanCache":
        """A cache with the tables of some kinds."""
        cache = PlanCache()
        cache._tables = {kind: self._tables[kind] for kind in kinds if kind in self._tables}
        return cache

"""Values derived from a plan, or from another object, kept for as long as that lives.

`kept_with_plan` stands above each function that derives one. A plan is found by identity: its hash
may build the steps of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from threading import Lock
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar
from weakref import WeakKeyDictionary, ref

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Arguments = ParamSpec("Arguments")


class _Entry(Generic[Key, Value]):
    """A key, its value, and when it was asked for last."""

    __slots__ = ("key", "turn", "value")

    def __init__(self, key: Key, value: Value, turn: int):
        self.key, self.value, self.turn = key, value, turn


class RecentValues(Generic[Key, Value]):
    """A table of the values whose keys were asked for last.

    Args:
        keep: number of values that stay.
    """

    def __init__(self, keep: int):
        self.keep = keep
        self._entries: dict[Key, _Entry[Key, Value]] = {}
        self._newest: _Entry[Key, Value] | None = None
        self._turn = 0
        self._lock = Lock()

    def newest(self, key: Hashable) -> Value | None:
        """Return the value that was asked for last, if it is that of an equal key.

        Parts of a key that are the same objects are equal without a look at them: no hash is made.
        """
        newest = self._newest
        return newest.value if newest is not None and newest.key == key else None

    def get(self, key: Key, build: Callable[[], Value]) -> Value:
        """Return the value of a key, built if it is not there.

        Threads that build the same value at once all get the first that is ready.
        """
        entry = self._entries.get(key) or self._added(key, build())
        self._turn += 1
        entry.turn, self._newest = self._turn, entry
        return entry.value

    def _added(self, key: Key, value: Value) -> _Entry[Key, Value]:
        with self._lock:
            entry = self._entries.setdefault(key, _Entry(key, value, self._turn + 1))
            while len(self._entries) > self.keep:
                del self._entries[min(self._entries.values(), key=_turn_of).key]
        return entry


def _turn_of(entry: _Entry[Any, Any]) -> int:
    return entry.turn


class KeptWith(Generic[Value]):
    """A value for each object, made at first use and kept for as long as the object lives.

    Args:
        make: makes the value of an object.
    """

    def __init__(self, make: Callable[[Any], Value]):
        self._make = make
        self._values: WeakKeyDictionary[Any, Value] = WeakKeyDictionary()

    def of(self, owner: object) -> Value:
        """Return the value of an object."""
        value = self._values.get(owner)
        if value is None:
            value = self._values[owner] = self._make(owner)
        return value


class Ranked(Protocol):
    """A value that is kept for every rank of its world: a plan, which this module stands below."""

    @property
    def world_size(self) -> int: ...


class PlanTables(Generic[Key, Value]):
    """A table for every plan that lives, found by the plan's identity.

    Args:
        keep: number of values that stay, of a plan or, with each_rank, of each of its ranks.
    """

    def __init__(self, keep: int, each_rank: bool):
        self.keep, self.each_rank = keep, each_rank
        self._tables: dict[int, tuple[ref[Ranked], RecentValues[Key, Value]]] = {}

    def of(self, plan: Ranked) -> RecentValues[Key, Value]:
        """Return the table of a plan."""
        number = id(plan)
        if number not in self._tables:
            tables = self._tables

            def forget(_: ref[Ranked]) -> None:  # is called before another object gets this id
                tables.pop(number, None)

            keep = self.keep * plan.world_size if self.each_rank else self.keep
            tables.setdefault(number, (ref(plan, forget), RecentValues(keep)))
        return self._tables[number][1]


Owner = TypeVar("Owner", bound=Ranked)
Derive = Callable[Concatenate[Owner, Arguments], Value]


def kept_with_plan(
    keep: int = 8, *, each_rank: bool = False
) -> Callable[[Derive[Owner, Arguments, Value]], Derive[Owner, Arguments, Value]]:
    """Keep what a function of a plan and hashable arguments returns.

    What is kept must not hold its plan, which would then never be freed.

    Args:
        keep: number of arguments, the most recent ones, whose values stay.
        each_rank: keep as many for every rank of the plan: in `loopback` all ranks share it.
    """

    def decorate(derive: Derive[Owner, Arguments, Value]) -> Derive[Owner, Arguments, Value]:
        tables: PlanTables[Hashable, Value] = PlanTables(keep, each_rank)

        @wraps(derive)
        def kept(plan: Owner, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
            key = (args, *sorted(kwargs.items())) if kwargs else args
            return tables.of(plan).get(key, lambda: derive(plan, *args, **kwargs))

        return kept

    return decorate

"""Facts of a split model that are not saved with it: a pickled model is the unsplit one.

torch.save(model) writes no group of processes. Hooks are functions of modules, which pickle by
name, and do nothing where the facts that they read are None.
"""

from __future__ import annotations

import copy
from typing import Any


class NotSaved:
    """A value that is kept on a split model; where the model is unpickled it is None."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = object.__new__(type(self))
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made


class Shared(NotSaved):
    """A value that copies of a model share, since a process group cannot be copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


class SplitName(str):
    """The name of an attention that is split; where its model is unpickled, that of the former.

    Attributes:
        unsplit: the attention that the model had before it was split.
    """

    unsplit: str

    def __new__(cls, name: str, before: str) -> SplitName:
        made = super().__new__(cls, name)
        made.unsplit = before.unsplit if isinstance(before, SplitName) else before
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.unsplit,)

    def __deepcopy__(self, memo: dict[int, Any]) -> SplitName:
        return self

    def __copy__(self) -> SplitName:
        return self

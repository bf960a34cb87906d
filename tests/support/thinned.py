"""Cases of which quick runs take some, and slow runs the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], step: int = 2, of: int = 0) -> list[Any]:
    """All cases; those that are not at a multiple of step, counted from `of`, are slow.

    A case is one value; for several arguments a plain tuple of them.
    """
    return [case if number % step == of else _slow(case) for number, case in enumerate(cases)]


def _slow(case: Any) -> Any:
    values = case if type(case) is tuple else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)

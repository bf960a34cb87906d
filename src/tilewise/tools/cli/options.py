"""Commands with more options than a function should take: the fields of one value."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def command_of(options: Callable[..., Any], run: Callable[[Any], None]) -> Callable[..., None]:
    """A command that makes a value of its options and runs with it.

    Args:
        options: a NamedTuple, annotated as a command's arguments are, in a file without postponed
            annotations.
        run: its name and docstring are the command's.
    """

    def command(**words: Any) -> None:
        run(options(**words))

    command.__name__, command.__doc__ = run.__name__, run.__doc__
    command.__signature__ = inspect.signature(options)  # pyright: ignore[reportFunctionMemberAccess]
    command.__annotations__ = get_type_hints(options, include_extras=True)
    return command

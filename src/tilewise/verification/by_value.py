"""Functions and classes that another process cannot import by name, sent as their code.

They are those within functions, and those of a session without a file. What else a function of a
file needs, the other process finds by importing the file.
"""

from __future__ import annotations

import builtins
import importlib
import io
import marshal
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BY_NAME = frozenset(("builtins", "types", __name__))


def dumps(value: Any) -> bytes:
    """Pickle a value.

    Raises:
        ValueError: naming what cannot be sent, and what to do.
    """
    file = io.BytesIO()
    try:
        _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(
            f"model, inputs and split cannot be sent to other processes ({error}); make what "
            'cannot be sent inside split, or pass backend="loopback"'
        ) from error
    return file.getvalue()


def is_installed(module: str) -> bool:
    """Whether a module is part of an installed package, which every process can import."""
    path = getattr(sys.modules.get(module), "__file__", None)
    return path is not None and "site-packages" in Path(path).parts


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not isinstance(obj, types.FunctionType | type) or obj.__module__ in BY_NAME:
            return NotImplemented
        in_file = hasattr(sys.modules.get(obj.__module__), "__file__")
        typed = obj.__module__ == "__main__" and not in_file
        within = "<" in obj.__qualname__  # <locals>, <lambda>
        if is_installed(obj.__module__) or not (within or typed):
            return NotImplemented
        if isinstance(obj, type):
            state = {k: v for k, v in vars(obj).items() if k not in ("__dict__", "__weakref__")}
            return type(obj), (obj.__name__, obj.__bases__, {}), state, None, None, _fill_class
        cells, names = obj.__closure__ or (), set(() if in_file else _names(obj.__code__))
        state = {
            "globals": {n: obj.__globals__[n] for n in names if n in obj.__globals__},
            "cells": [cell.cell_contents for cell in cells],
            "defaults": (obj.__defaults__, obj.__kwdefaults__),
        }
        make = marshal.dumps(obj.__code__), obj.__module__ if in_file else None, len(cells)
        return _function, make, state, None, None, _fill_function


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _function(code: bytes, module: str | None, num_cells: int) -> Any:
    empty = {"__builtins__": builtins}
    where = empty if module is None else vars(importlib.import_module(module))
    cells = tuple(types.CellType() for _ in range(num_cells))
    return types.FunctionType(marshal.loads(code), where, closure=cells)


def _fill_function(function: Any, state: dict[str, Any]) -> None:
    function.__globals__.update(state["globals"])
    function.__defaults__, function.__kwdefaults__ = state["defaults"]
    for cell, value in zip(function.__closure__ or (), state["cells"], strict=True):
        cell.cell_contents = value


def _fill_class(made: type, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(made, name, value)

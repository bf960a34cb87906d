"""Functions and classes that another process cannot import by name, sent as their code.

They are those within functions, those of a session without a file, and those of a test that pytest
imported by its path; what they need of the globals around them goes with them.
"""

from __future__ import annotations

import builtins
import importlib
import io
import marshal
import pickle
import sys
import types
from typing import Any


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


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if isinstance(obj, types.ModuleType):
            return importlib.import_module, (obj.__name__,)
        if not isinstance(obj, types.FunctionType | type) or _has_a_name(obj):
            return NotImplemented
        if isinstance(obj, type):
            state = {k: v for k, v in vars(obj).items() if k not in ("__dict__", "__weakref__")}
            return type(obj), (obj.__name__, obj.__bases__, {}), state, None, None, _fill_class
        state = {
            "globals": {n: obj.__globals__[n] for n in _names(obj.__code__) & {*obj.__globals__}},
            "cells": [cell.cell_contents for cell in obj.__closure__ or ()],
            "defaults": (obj.__defaults__, obj.__kwdefaults__),
        }
        make = marshal.dumps(obj.__code__), len(state["cells"])
        return _function, make, state, None, None, _fill_function


def _has_a_name(obj: Any) -> bool:
    """Return whether others can import it: not <locals>, <lambda> or an interactive name."""
    is_interactive = obj.__module__ == "__main__" and not hasattr(
        sys.modules["__main__"], "__file__"
    )
    return not is_interactive and "<" not in obj.__qualname__ and _is_importable(obj.__module__)


def _is_importable(name: str) -> bool:
    """Return whether a module is found by its name; one that pytest imported by its path is not."""
    module = sys.modules.get(name)
    if name == "__main__" or getattr(module, "__file__", None) is None:
        return True  # the file that runs, or a module that is made, not found
    path = None
    for end in (*(at for at, sign in enumerate(name) if sign == "."), len(name)):
        finders = (finder.find_spec(name[:end], path) for finder in sys.meta_path)
        spec = next(filter(None, finders), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return True


def _names(code: types.CodeType) -> set[str]:
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return {*code.co_names}.union(*map(_names, inner))


def _function(code: bytes, num_cells: int) -> Any:
    cells = tuple(types.CellType() for _ in range(num_cells))
    return types.FunctionType(marshal.loads(code), {"__builtins__": builtins}, closure=cells)


def _fill_function(function: Any, state: dict[str, Any]) -> None:
    function.__globals__.update(state["globals"])
    function.__defaults__, function.__kwdefaults__ = state["defaults"]
    for cell, value in zip(function.__closure__ or (), state["cells"], strict=True):
        cell.cell_contents = value


def _fill_class(cls: type, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(cls, name, value)

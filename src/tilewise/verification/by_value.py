"""Functions and classes of a user's file, sent to another process that cannot import the file.

pickle sends functions by name. Here a function that is nested goes as its code, and a module that
is no part of an installed package as its file, which the other process runs once.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import io
import marshal
import pickle
import sys
import types
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

LOCAL = "<locals>"


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
        if not isinstance(obj, types.FunctionType | type) or obj.__module__ in _BY_NAME:
            return NotImplemented
        module = sys.modules.get(obj.__module__)
        path = getattr(module, "__file__", None)
        if is_installed(obj.__module__) or (
            path is None and module is not None and obj.__module__ != "__main__"
        ):
            return NotImplemented
        nested = LOCAL in obj.__qualname__ or "<lambda>" in obj.__qualname__ or path is None
        if not nested:
            return _named, (obj.__module__, path, obj.__qualname__)
        if isinstance(obj, type):
            state = {k: v for k, v in vars(obj).items() if k not in ("__dict__", "__weakref__")}
            make = type(obj), obj.__name__, obj.__bases__
            return _class, make, state, None, None, _fill_class
        names = set(_names(obj.__code__)) if path is None else ()
        state = {
            "globals": {n: obj.__globals__[n] for n in names if n in obj.__globals__},
            "cells": [cell.cell_contents for cell in obj.__closure__ or ()],
            "defaults": (obj.__defaults__, obj.__kwdefaults__),
        }
        make = marshal.dumps(obj.__code__), obj.__module__, path, len(obj.__closure__ or ())
        return _function, make, state, None, None, _fill_function


_BY_NAME = frozenset(("builtins", "types", __name__))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _module(name: str, path: str) -> Any:
    """The module of a file: as it is imported here, or run from the file."""
    if name in sys.modules:
        return sys.modules[name]
    try:
        found = importlib.import_module(name)
        if Path(found.__file__ or "") == Path(path):
            return found
    except ImportError:
        pass
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _named(module: str, path: str | None, qualname: str) -> Any:
    found = importlib.import_module(module) if path is None else _module(module, path)
    return attrgetter(qualname)(found)


def _function(code: bytes, module: str, path: str | None, num_cells: int) -> Any:
    where = {"__builtins__": builtins} if path is None else vars(_module(module, path))
    cells = tuple(types.CellType() for _ in range(num_cells))
    return types.FunctionType(marshal.loads(code), where, closure=cells)


def _fill_function(function: Any, state: dict[str, Any]) -> None:
    function.__globals__.update(state["globals"])
    function.__defaults__, function.__kwdefaults__ = state["defaults"]
    for cell, value in zip(function.__closure__ or (), state["cells"], strict=True):
        cell.cell_contents = value


def _class(kind: Any, name: str, bases: tuple[type, ...]) -> Any:
    return kind(name, bases, {})


def _fill_class(made: type, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(made, name, value)

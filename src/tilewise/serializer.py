"""Values as the plain ones of JSON and TOML: texts, numbers, lists and objects, and back.

The annotations of a class are the format of its file. A value is written as the arguments that make
it, an object with an entry for each:

    write(Link(1e9))                                    {"bandwidth": 1e9, "latency": 0.0}
    read(Link, {"bandwidth": "1"}, "machine.inside")    ValueError: machine.inside.bandwidth ('1')
                                                        must be a finite number, not text

- A NamedTuple is written as the list of its values, and an Enum as its name.
- Objects of classes that stand for one another (masks, wires) have the entry "kind", which is the
  name of the class. The argument `kinds` lists these classes.
- A field of a dataclass that == ignores is not written. Its metadata may have "entry", the name in
  the file, and "words", two texts that stand for False and True.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import lru_cache
from itertools import count, repeat
from types import MappingProxyType, NoneType
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

import numpy as np

T = TypeVar("T")
Kinds = tuple[type, ...]

_SCALARS = MappingProxyType(
    {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}
)


def write(value: Any, kinds: Kinds = ()) -> Any:
    """Return a value as texts, numbers, lists and dicts; bools of an array are 0 and 1."""
    match value:
        case Enum():
            return value.name
        case np.ndarray():
            return (value.astype(int) if value.dtype == bool else value).tolist()
        case list() | tuple():
            return [write(entry, kinds) for entry in cast("Sequence[Any]", value)]
        case dict():
            return {name: write(entry, kinds) for name, entry in cast("Any", value).items()}
        case _ if is_dataclass(value):
            own = {
                name: write(entry.of(value), kinds) for name, entry in _entries(type(value)).items()
            }
            return {"kind": type(value).__name__, **own} if type(value) in kinds else own
    return value


def read(kind: type[T], data: Any, place: str, kinds: Kinds = ()) -> T:
    """Return the value of this type that `write` wrote.

    Args:
        kind: a class, or an annotation such as tuple[int, ...].
        place: what errors call the value.
    Raises:
        ValueError: "plan.steps[0].transfers[2].src ('x') must be a whole number, not text";
            "machine has no field 'node_sise'; did you mean node_size?"; "plan lacks name".
    """
    try:
        return _read(kind, data, kinds)
    except _ReadError as refusal:
        raise ValueError(place + refusal.path + refusal.reason) from None


class _ReadError(Exception):
    """A value that cannot be read. Its path grows at the front on the way out."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason, self.path = reason, ""


def _refused(data: Any, wanted: str) -> _ReadError:
    text = repr(data)
    return _ReadError(f" ({text if len(text) <= 60 else f'{text[:57]}...'}) must be {wanted}")


class _Entry(NamedTuple):
    """An argument of a class, and what a file has in its place."""

    argument: str
    kind: Any
    required: bool
    words: Sequence[str]

    def of(self, value: Any) -> Any:
        own = getattr(value, self.argument)
        return self.words[own] if self.words else own


@lru_cache(maxsize=256)
def _entries(kind: type) -> dict[str, _Entry]:
    """The entries of a class's object, by name."""
    by_name = {field.name: field for field in fields(kind)} if is_dataclass(kind) else {}
    hints = get_type_hints(kind if issubclass(kind, tuple) else kind.__init__)
    found: dict[str, _Entry] = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        field = by_name.get(name)
        if field is None or field.compare is not False:
            metadata: Mapping[str, Any] = field.metadata if field else {}
            words = metadata.get("words", ())
            own_kind = Literal[words] if words else hints[name]
            required = parameter.default is parameter.empty
            found[metadata.get("entry", name)] = _Entry(name, own_kind, required, words)
    return found


@lru_cache(maxsize=1024)
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)


def _read(kind: Any, data: Any, kinds: Kinds) -> Any:
    if kind in _SCALARS:
        return _scalar(kind, data)
    origin, inner = _parts(kind)
    if origin is Literal:
        return _word(data, {word: word for word in inner})
    if NoneType in inner:  # X | None
        return None if data is None else _read(inner[0], data, kinds)
    if origin is dict:
        parts = ((name, inner[1], entry) for name, entry in _object(data).items())
        return dict(zip(data, _read_all(parts, kinds), strict=True))
    if origin is tuple and inner[-1] is not ...:
        entries = _listed(data, len(inner))
        return tuple(_read_all(zip(count(), inner, entries, strict=False), kinds))
    if origin is not None:  # tuple[X, ...], Iterable[X], Sequence[X]
        return tuple(_read_all(zip(count(), repeat(inner[0]), _listed(data), strict=False), kinds))
    if kind is Any:
        return data
    if issubclass(kind, Enum):
        return _word(data, kind.__members__)
    if issubclass(kind, tuple) and not isinstance(data, dict):
        names = _entries(kind)
        return _made(kind, dict(zip(names, _listed(data, len(names)), strict=True)), kinds)
    by_name = {x.__name__: x for x in kinds if issubclass(x, kind)}
    if not by_name:
        return _made(kind, _object(data), kinds)
    if "kind" not in _object(data):
        raise _ReadError(f" lacks kind, one of {', '.join(by_name)}")
    (name,) = _read_all([("kind", Literal[tuple(by_name)], data["kind"])], kinds)
    rest = {name: entry for name, entry in data.items() if name != "kind"}
    return _made(by_name[name], rest, kinds)


def _read_all(parts: Iterable[tuple[str | int, Any, Any]], kinds: Kinds) -> list[Any]:
    """The values of parts (name or number, type, data); an error says at which it is."""
    values: list[Any] = []
    part: tuple[str | int, Any, Any] = ("", None, None)
    try:
        for part in parts:
            values.append(_read(part[1], part[2], kinds))
    except _ReadError as error:
        error.path = (f"[{part[0]}]" if isinstance(part[0], int) else f".{part[0]}") + error.path
        raise
    return values


def _made(kind: type, data: Mapping[str, Any], kinds: Kinds) -> Any:
    """An object of a class, of its entries."""
    entries = _entries(kind)
    for name in data:
        if name not in entries:
            near = get_close_matches(name, entries, 1, 0.7)
            hint = f"did you mean {near[0]}?" if near else f"its fields are {', '.join(entries)}"
            raise _ReadError(f" has no field {name!r}; {hint}")
    parts = ((name, entries[name].kind, entry) for name, entry in data.items())
    values = zip(map(entries.__getitem__, data), _read_all(parts, kinds), strict=True)
    arguments = {x.argument: value == x.words[1] if x.words else value for x, value in values}
    if len(data) < len(entries):
        missing = [name for name, x in entries.items() if x.required and name not in data]
        if missing:
            raise _ReadError(f" lacks {', '.join(missing)}")
    try:
        return kind(**arguments)
    except ValueError as error:
        raise _ReadError(f": {error}") from None


def _scalar(kind: type, data: Any) -> Any:
    wanted = _SCALARS[kind]
    is_number = isinstance(data, int | float) and not isinstance(data, bool)
    if kind in (str, bool) and isinstance(data, kind):
        return data
    if kind is int and is_number and (isinstance(data, int) or data.is_integer()):
        return int(data)
    if kind is float and is_number and abs(data) <= sys.float_info.max:
        return float(data)
    is_text = kind in (int, float) and isinstance(data, str)
    raise _refused(data, f"{wanted}, not text" if is_text else wanted)


def _word(data: Any, values: Mapping[str, Any]) -> Any:
    if not isinstance(data, str) or data not in values:
        raise _refused(data, f"one of {', '.join(values)}")
    return values[data]


def _listed(data: Any, size: int | None = None) -> Sequence[Any]:
    if not isinstance(data, list | tuple) or size not in (None, len(cast("Any", data))):
        raise _refused(data, "a list" if size is None else f"a list of {size}")
    return cast("Sequence[Any]", data)


def _object(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise _refused(data, "an object")
    return cast("dict[str, Any]", data)

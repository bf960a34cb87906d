"""Objects of files outside the package, as a user names them: module:name, or FILE.py:name."""

import hashlib
import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any


def is_outside(text: str) -> bool:
    """Whether a text names an object of a module or file rather than one of the library."""
    module, colon, name = text.partition(":")
    return bool(colon) and name.isidentifier() and "(" not in module


def module_of(text: str) -> ModuleType:
    """A module by its name, also one of the working directory; or a file that ends in .py.

    Ranks import it again by its name: its folder is put on the path, which they inherit.

    Raises:
        ValueError: if it cannot be imported, with the line that failed.
    """
    path = Path(text)
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise ValueError(f"{text} is no file; write FILE.py:name with a path from {Path.cwd()}")
    folder = str(path.resolve().parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        module = importlib.import_module(path.stem if is_file else text)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        at = "" if "importlib" in last.filename else f" ({last.filename}, line {last.lineno})"
        said = f"{type(error).__name__}: {error}{at}"
        raise ValueError(f"{text} is no module that can be imported: {said}") from None
    if is_file and Path(module.__file__ or "").resolve() != path.resolve():
        raise ValueError(f"{text}: another module is named {path.stem}; rename the file")
    return module


def load(text: str) -> Any:
    """What "module:name" or "FILE.py:name" names.

    Raises:
        ValueError: saying what the module has instead.
    """
    where, _, name = text.rpartition(":")
    module = module_of(where)
    if not hasattr(module, name):
        names = ", ".join(x for x in vars(module) if not x.startswith("_")) or "nothing"
        raise ValueError(f"{where} has no {name!r}; it has {names}")
    return getattr(module, name)


def version(text: str) -> str:
    """What changes when the file behind a text does: 8 digits of its content."""
    content = Path(module_of(text.rpartition(":")[0]).__file__ or "").read_bytes()
    return hashlib.blake2b(content, digest_size=4).hexdigest()

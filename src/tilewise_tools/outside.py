"""Objects of files outside the package, as a user names them: module:name, or FILE.py:name."""

import hashlib
import importlib
import sys
import traceback
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tilewise.arguments import require_type
from tilewise.kernels.protocol import Kernel
from tilewise.kernels.registry import given_kernel, kernel_named
from tilewise.kernels.self_check import check_kernel, place
from tilewise.plan.ir import Plan
from tilewise_tools.bench.environment import installed


def is_outside(text: str) -> bool:
    """Return whether a text names an object of a module or file rather than one of the library."""
    module, colon, name = text.partition(":")
    return bool(colon) and name.isidentifier() and "(" not in module


def require_no_file(text: str, what: str) -> None:
    """Refuse the name of a file alone where an expression is wanted.

    Args:
        what: the object of a Python file that can be named instead.
    """
    if Path(text).suffix == ".py":
        raise ValueError(f"{text} is a whole file; write {text}:name of {what}")


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
    except (Exception, SystemExit) as error:
        raise ValueError(f"{text} is no module that can be imported: {_said(error)}") from None
    if is_file and Path(module.__file__ or "").resolve() != path.resolve():
        raise ValueError(f"{text}: another module is named {path.stem}; rename the file")
    return module


def load(text: str) -> Any:
    """Load the object that "module:name" or "FILE.py:name" names.

    Raises:
        ValueError: saying what the module has instead.
    """
    where, _, name = text.rpartition(":")
    module = module_of(where)
    if not hasattr(module, name):
        names = ", ".join(x for x in vars(module) if not x.startswith("_")) or "nothing"
        raise ValueError(f"{where} has no {name!r}; it has {names}")
    return getattr(module, name)


def plan_of(text: str, world_size: int | None, ranks_option: str = "--world-size") -> Plan:
    """The plan that "module:name" names, or that a function of that name makes for so many ranks.

    Raises:
        ValueError: if it is none, or for another number of ranks.
    """
    loaded = load(text)
    if callable(loaded):
        if world_size is None:
            raise ValueError(f"{text} is a function of the number of ranks; add {ranks_option}")
        loaded = called(text, loaded, world_size)
    plan = require_type(Plan, text, loaded, "tw.ring(n), or a function of the number of ranks")
    if world_size not in (None, plan.world_size):
        raise ValueError(
            f"{text} is for {plan.world_size} ranks, but {ranks_option} is {world_size}"
        )
    return plan


def called(text: str, make: Callable[..., Any], *given: Any) -> Any:
    """Call the function that "module:name" names, and return its result.

    Raises:
        ValueError: if it is no function, or if it raises, with its line.
    """
    if not callable(make):
        raise ValueError(f"{text} is no function, but {type(make).__name__}")
    try:
        return make(*given)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{text} failed: {_said(error)}") from error


def _said(error: BaseException) -> str:
    """Return the text of an error of code outside the package, with the line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_theirs = "importlib" not in last.filename and last.filename != __file__
    at = f" ({last.filename}, line {last.lineno})" if is_theirs else ""
    return f"{type(error).__name__}: {error}{at}"


def version(text: str) -> str:
    """Return 8 digits of the content of the file behind a text, which change when the file does."""
    content = Path(module_of(text.rpartition(":")[0]).__file__ or "").read_bytes()
    return hashlib.blake2b(content, digest_size=4).hexdigest()


def version_of(*names: str | None) -> str:
    """Return the library's version and, for each name of a file outside the package, that file's
    hash.
    """
    return " ".join([installed("tilewise"), *(version(n) for n in names if n and is_outside(n))])


def kernel_of(name: str) -> Kernel:
    """The kernel that a registered name, "module:name" or "FILE.py:name" stands for; of a class
    of a file, an instance."""
    if not is_outside(name):
        return kernel_named(name)
    loaded = load(name)
    try:
        return given_kernel(loaded() if isinstance(loaded, type) else loaded)
    except (TypeError, ValueError) as error:
        kind = loaded if isinstance(loaded, type) else type(loaded)
        raise ValueError(f"{name}{place(kind)}: {error}") from None


@lru_cache(maxsize=256)
def check_kernel_of(name: str, version: str, asked: tuple[str, torch.dtype, int, bool]) -> None:
    """Check a kernel of a file outside the package, once for each version, call type and device."""
    if is_outside(name) and (asked[0] == "cpu" or torch.cuda.is_available()):
        check_kernel(kernel_of(name), *asked[:3], backward=asked[3])

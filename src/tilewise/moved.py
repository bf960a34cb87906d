"""Packages that have moved can be imported by their old paths, which give the same modules."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _OldPath(MetaPathFinder, Loader):
    """Import modules below an old path from the new one."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec of what lies below the old path; other modules are found by others."""
        return ModuleSpec(fullname, self) if fullname.startswith(f"{self.old}.") else None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new path in the place of the empty one that was made."""
        name = module.__name__
        sys.modules[name] = import_module(self.new + name.removeprefix(self.old))


def moved(old: str, new: str) -> None:
    """Let the package that is now `new` be imported as `old` as well, with all of its modules."""
    sys.meta_path.insert(0, _OldPath(old, new))  # before the finder of files makes second copies
    sys.modules[old] = import_module(new)

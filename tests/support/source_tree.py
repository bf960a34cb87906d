"""The sources of the three packages as syntax trees, and what the guard rails ask of them."""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Module(NamedTuple):
    name: str
    path: Path

    @property
    def tree(self) -> ast.Module:
        return _parsed(self.path)

    @property
    def folder(self) -> str:
        """The folder or module directly under the package: tilewise.kernels for its files."""
        return ".".join(self.name.split(".")[:2])

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT))


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def read(path: Path) -> Module:
    parts = path.relative_to(SOURCES).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Module(name, path)


MODULES = tuple(read(path) for path in sorted(SOURCES.rglob("*.py")))
NAMES = frozenset(module.name for module in MODULES)


def at_import(tree: ast.AST, *, bodies: bool = False, typing: bool = False) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported; with bodies also those inside functions.

    What stands under `if TYPE_CHECKING` never runs; with typing it is among them.
    """
    yield tree
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, FUNCTIONS) and not bodies:
            yield node
        elif (
            not typing
            and isinstance(node, ast.If)
            and ast.unparse(node.test).endswith("TYPE_CHECKING")
        ):
            for other in node.orelse:
                yield from at_import(other, bodies=bodies)
        else:
            yield from at_import(node, bodies=bodies, typing=typing)


def imports(module: Module, *, bodies: bool = False, typing: bool = False) -> set[str]:
    """Full names of the modules a module imports; `from a import b` is a.b if that is a module."""
    found = set()
    for node in at_import(module.tree, bodies=bodies, typing=typing):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                is_package = module.path.name == "__init__.py"
                above = module.name.split(".")
                above = above[: len(above) - node.level + is_package]
                base = ".".join([*above, base] if base else above)
            inside = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in NAMES else base for name in inside}
    return found


@cache
def imported(name: str) -> frozenset[str]:
    """What the module of a full name imports."""
    (module,) = [module for module in MODULES if module.name == name]
    return frozenset(imports(module))


def reached(name: str) -> set[str]:
    """The package's modules that importing one brings in, itself included.

    Parents count, but for tilewise itself: its __init__ brings in everything by design.
    """
    seen, todo = set(), [name]
    while todo:
        name = todo.pop()
        if name in NAMES and name not in seen:
            seen.add(name)
            todo += imported(name)
            parent = name.rpartition(".")[0]
            todo += [parent] if parent != "tilewise" else []
    return seen


def top(names: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def docstrings(tree: ast.AST) -> list[ast.Constant]:
    """Strings that stand alone as statements: docstrings, of values too."""
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    return [v for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)]


def words(tree: ast.AST, *, strings: bool = True) -> set[str]:
    """Every identifier of a tree, and its strings except docstrings."""
    found = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    found |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    found |= {n.name for n in ast.walk(tree) if isinstance(n, ast.alias)}
    if strings:
        docs = {id(text) for text in docstrings(tree)}
        constants = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in docs)
        found |= {n.value for n in constants if isinstance(n.value, str)}
    return found


def named(name: str) -> Module:
    """The module tilewise.<name>."""
    (module,) = [module for module in MODULES if module.name == f"tilewise.{name}"]
    return module

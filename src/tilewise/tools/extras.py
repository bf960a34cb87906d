"""What the extras of pyproject.toml bring, and what is said where one is missing."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple


class Extra(NamedTuple):
    """A package that an extra brings.

    Attributes:
        name: the extra's, in pyproject.toml.
        use: what the package is for.
    """

    name: str
    module: str
    use: str

    @property
    def is_here(self) -> bool:
        """Whether it is installed; asked without importing it."""
        return find_spec(self.module) is not None

    @property
    def install(self) -> str:
        return f"pip install 'tilewise[{self.name}]'"


EXTRAS = (
    Extra("report", "plotly", "pages of tilewise report"),
    Extra("report", "matplotlib", "PNG files of masks: tilewise mask --png"),
    Extra("partition", "mtkahypar", "hypergraph partitioning, to compare plans with"),
    Extra("solver", "ortools", "optimal mesh schedules, to compare plans with"),
    Extra("hf", "transformers", "Hugging Face models"),
)


class MissingExtraError(ImportError):
    """A package of an extra is needed and not installed."""


def require(module: str, what: str) -> None:
    """Refuse to go on without a package of an extra.

    Args:
        what: what needs it, as in "tilewise report".
    Raises:
        MissingExtraError: with the command that installs it, in one line.
    """
    (extra,) = (extra for extra in EXTRAS if extra.module == module)
    if not extra.is_here:
        raise MissingExtraError(f"{what} needs {module}: {extra.install}")

"""Attention inside a module, found by what it does, whatever its parts are called.

The result is a product of v and weights that q and k decide. So if all projections give zero, it
changes with v alone. Otherwise a row of q changes only its own row of the result, and a row of k
changes others too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from tilewise_verify.records import LeafSetting, OutputSetting, Record, rows_of_one
from tilewise_verify.row_probe import RowProbe
from tilewise_verify.weights import (
    Read,
    UnreadableError,
    Weights,
    read_weights,
    width_of_head,
)

Run = Callable[[OutputSetting | LeafSetting | RowProbe], torch.Tensor]
"""Function from a setting to rows of the whole sequence [num_tokens, numbers]; it may raise
UnreadableError."""

ANCESTORS = 3  # modules around a layer, in which its projections may lie


class PathPart(NamedTuple):
    """Columns of a module's output."""

    module: str
    columns: tuple[int, ...]


class Path(NamedTuple):
    """The path through a layer's attention: where q, k and v enter, where the result is read, and
    what was read there.
    """

    q: list[PathPart]
    k: list[PathPart]
    v: PathPart
    read: str
    head_dim: int
    weights: Weights


def find_path(
    layer: str, whole: Record, run: Run, num_tokens: int, projection: str | None = None
) -> Path | None:
    """The path of attention in a layer; or from projections around it to its output.

    Args:
        layer: "" for the model itself.
        projection: a projection whose input deviates, which is read first.
    """
    names_in_order, names = list(whole.outputs), layer.split(".")
    if projection in whole.projections:
        earlier_modules = names_in_order[: names_in_order.index(projection)]
        inner_projections = [name for name in earlier_modules if projects(name, whole, num_tokens)]
        inner_projections = [
            name for name in inner_projections if not layer or name.startswith(f"{layer}.")
        ]
        with suppress(UnreadableError):
            if path := _path(inner_projections, projection, run, num_tokens):
                return path
    for scope in [*(".".join(names[:i]) for i in range(len(names), 0, -1)), ""][:ANCESTORS]:
        candidates = (
            names_in_order if scope == layer else names_in_order[: names_in_order.index(layer)]
        )
        inner_projections = [
            name
            for name in candidates
            if projects(name, whole, num_tokens) and (not scope or name.startswith(f"{scope}."))
        ]
        for read in (*(inner_projections[-1:] if scope == layer else ()), f"{layer}()"):
            with suppress(UnreadableError):
                parts = [name for name in inner_projections if name != read]
                if path := _path(parts, read, run, num_tokens):
                    return path
    return None


def projects(name: str, whole: Record, num_tokens: int) -> bool:
    """Return whether a module is a projection that gives rows of the sequence."""
    output = whole.outputs[name]
    return name in whole.projections and rows_of_one(output, num_tokens) is not None


def _path(parts: Sequence[str], read: str, run: Run, num_tokens: int) -> Path | None:
    """The path through some projections to a result, if its weights are those of a softmax."""
    values = [
        part for part, is_own_row in _columns(parts, read, run, num_tokens, 0.0) if not is_own_row
    ]
    if not values:
        return None
    v, q, k = values[-1], [], []
    for part, is_own_row in _columns(parts, read, run, num_tokens, 1.0):
        other_columns = (c for c in part.columns if part.module != v.module or c not in v.columns)
        (q if is_own_row else k).append(PathPart(part.module, tuple(other_columns)))
    q, k = ([part for part in kind if part.columns] for kind in (q, k))
    reader, width = read_by(v, read, run), len(v.columns)
    head_dim = width_of_head(reader, num_tokens, width)
    weights = read_weights(reader, num_tokens, width, head_dim)
    weight_table = weights.weights
    is_softmax = bool((weight_table > -0.02).all() and (weight_table.sum(-1) < 1.05).all())
    return Path(q, k, v, read, head_dim, weights) if q and is_softmax else None


def read_by(v: PathPart, read: str, run: Run) -> Read:
    """Return a function from values of v to the result."""
    return lambda values: run(OutputSetting(*v, values, read))


def _columns(
    parts: Sequence[str], read: str, run: Run, num_tokens: int, times: float
) -> Iterator[tuple[PathPart, bool]]:
    """Yield columns that change the result, and True if a row of them changes its own row alone."""
    setting = LeafSetting(parts, read, times)
    result = run(setting)[::2]
    generator = torch.Generator().manual_seed(2)
    draw = torch.randn(result.shape, generator=generator).to(result)
    leaves = setting.leaves
    try:
        grads = torch.autograd.grad((result * draw).sum(), [*leaves.values()], allow_unused=True)
    except RuntimeError as error:
        raise UnreadableError("nothing there has a gradient") from error
    for name, grad in zip(leaves, grads, strict=True):
        rows = None if grad is None else rows_of_one(grad, num_tokens)
        if rows is None:
            continue
        changes = rows.double().abs().nan_to_num()
        smallest_change = 1e-6 * changes.max()
        everywhere, of_other_rows = (x.amax(0) > smallest_change for x in (changes, changes[1::2]))
        for is_own_row, columns in ((True, everywhere & ~of_other_rows), (False, of_other_rows)):
            if columns.any():
                yield PathPart(name, tuple(columns.nonzero().flatten().tolist())), is_own_row

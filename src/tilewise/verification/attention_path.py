"""Attention inside a module, found by what it does, whatever its parts are called.

Where all projections give zero, the result changes with v alone: it is a product of v and weights
that q and k decide. Elsewhere a row of q changes its own row of the result, one of k others too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from tilewise.verification.records import LeafSetting, OutputSetting, Record, rows_of_one
from tilewise.verification.row_probe import RowProbe
from tilewise.verification.weights import (
    Read,
    UnreadableError,
    Weights,
    read_weights,
    width_of_head,
)

Run = Callable[[OutputSetting | LeafSetting | RowProbe], torch.Tensor]
"""What a setting reads: rows of the whole sequence [num_tokens, numbers]; or UnreadableError."""

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
    before, names = list(whole.outputs), layer.split(".")
    if projection in whole.projections:
        earlier = before[: before.index(projection)]
        inside = [name for name in earlier if projects(name, whole, num_tokens)]
        inside = [name for name in inside if not layer or name.startswith(f"{layer}.")]
        with suppress(UnreadableError):
            if path := _path(inside, projection, run, num_tokens):
                return path
    for scope in [*(".".join(names[:i]) for i in range(len(names), 0, -1)), ""][:ANCESTORS]:
        known = before if scope == layer else before[: before.index(layer)]
        inside = [
            name
            for name in known
            if projects(name, whole, num_tokens) and (not scope or name.startswith(f"{scope}."))
        ]
        for read in (*(inside[-1:] if scope == layer else ()), f"{layer}()"):
            with suppress(UnreadableError):
                parts = [name for name in inside if name != read]
                if path := _path(parts, read, run, num_tokens):
                    return path
    return None


def projects(name: str, whole: Record, num_tokens: int) -> bool:
    """Return whether a module is a projection that gives rows of the sequence."""
    given = whole.outputs[name]
    return name in whole.projections and rows_of_one(given, num_tokens) is not None


def _path(parts: Sequence[str], read: str, run: Run, num_tokens: int) -> Path | None:
    """Weights of attention are shares of 1 that queries decide, unlike those of a scan."""
    values = [part for part, own in _columns(parts, read, run, num_tokens, 0.0) if not own]
    if not values:
        return None
    v, q, k = values[-1], [], []
    for part, own in _columns(parts, read, run, num_tokens, 1.0):
        left = (c for c in part.columns if part.module != v.module or c not in v.columns)
        (q if own else k).append(PathPart(part.module, tuple(left)))
    q, k = ([part for part in kind if part.columns] for kind in (q, k))
    reader, width = read_by(v, read, run), len(v.columns)
    head_dim = width_of_head(reader, num_tokens, width)
    found = read_weights(reader, num_tokens, width, head_dim)
    shares = found.weights
    is_softmax = bool((shares > -0.02).all() and (shares.sum(-1) < 1.05).all())
    return Path(q, k, v, read, head_dim, found) if q and is_softmax else None


def read_by(v: PathPart, read: str, run: Run) -> Read:
    """The result for values of v."""
    return lambda values: run(OutputSetting(*v, values, read))


def _columns(
    parts: Sequence[str], read: str, run: Run, num_tokens: int, times: float
) -> Iterator[tuple[PathPart, bool]]:
    """Columns that change the result, and whether a row of them changes its own row alone."""
    setting = LeafSetting(parts, read, times)
    result = run(setting)[::2]
    make = torch.Generator().manual_seed(2)
    draw = torch.randn(result.shape, generator=make).to(result)
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
        least = 1e-6 * changes.max()
        everywhere, others = (x.amax(0) > least for x in (changes, changes[1::2]))
        for own, columns in ((True, everywhere & ~others), (False, others)):
            if columns.any():
                yield PathPart(name, tuple(columns.nonzero().flatten().tolist())), own

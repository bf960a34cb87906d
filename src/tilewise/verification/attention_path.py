"""Attention inside a module, found by what it does: linear in v, mixing rows, q changing its own.

No names of modules are needed: of all projections, v is the one that the result is linear in and
whose rows reach others; q changes its own row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.verification.records import OutputSetting, Record, rows_of_one
from tilewise.verification.weights import (
    Heads,
    Read,
    UnreadableError,
    Weights,
    find_heads,
    read_weights,
)

Run = Callable[[OutputSetting], Tensor]
"""What a setting reads: rows of the whole sequence [num_tokens, numbers]; or UnreadableError."""

ANCESTORS = 3  # modules around a layer, in which its projections may lie
MOST_HEADS = 128  # between whose columns v is looked for


class PathPart(NamedTuple):
    """Columns of a module's output, and their rows [num_tokens, columns] in the unsplit model."""

    module: str
    columns: tuple[int, ...]
    rows: Tensor

    def reader(self, run: Run, read: str) -> Read:
        """What is read somewhere, by what these columns are set to."""
        return lambda values: run(OutputSetting(self.module, self.columns, values, read))


class Path(NamedTuple):
    """Where v enters a layer's attention, where its result is read, and what was read there."""

    v: PathPart
    read: str
    candidates: tuple[PathPart, ...]  # of q and k
    heads: Heads
    weights: Weights


def find_path(layer: str, whole: Record, run: Run, num_tokens: int) -> Path | None:
    """The path of attention in a layer; or from projections around it to its output.

    Weights of attention are shares of 1 that queries decide, unlike those of a scan.
    """
    before = list(whole.outputs)
    parts = {}
    for name in before:
        rows = rows_of_one(whole.outputs[name], num_tokens) if name in whole.projections else None
        if rows is not None:
            parts[name] = PathPart(name, tuple(range(whole.outputs[name].shape[-1])), rows)
    names = layer.split(".")
    scopes = [".".join(names[:i]) for i in range(len(names), 0, -1)]
    for scope in [*scopes, ""][:ANCESTORS]:
        known = before if scope == layer else before[: before.index(layer)]
        inside = [x for x in known if x in parts and (not scope or x.startswith(f"{scope}."))]
        for read in (*(inside[-1:] if scope == layer else ()), f"{layer}()"):
            others = [parts[name] for name in inside if name != read]
            for part in reversed(others):
                with suppress(UnreadableError):
                    path = _path(part, read, others, run, num_tokens)
                    if path and q_and_k(path, run)[0]:
                        return path
    return None


def _path(
    part: PathPart, read: str, others: list[PathPart], run: Run, num_tokens: int
) -> Path | None:
    """Attention whose v is in a projection, if it is."""
    whole = part.reader(run, read)
    given = whole(part.rows)
    if not _reaches(given - whole(part.rows - _first_rows(part.rows))):
        return None
    for v, rest in _columns(len(part.columns), given.shape[1]):
        value, *beside = (PathPart(part.module, c, part.rows[:, list(c)]) for c in (v, *rest))
        reader = value.reader(run, read)
        with suppress(UnreadableError):
            if not _is_linear(reader, value.rows):
                continue
            heads = find_heads(reader, num_tokens, len(v))
            found = read_weights(reader, num_tokens, heads)
            shares = found.weights
            if bool((shares > -0.02).all() and (shares.sum(-1) < 1.05).all()):
                candidates = (*beside, *(x for x in others if x is not part))
                return Path(value, read, candidates, heads, found)
    return None


Columns = tuple[int, ...]


def _columns(width: int, result: int) -> Iterator[tuple[Columns, tuple[Columns, ...]]]:
    """Where v may stand among a projection's columns, and where q and k then do.

    In each of some equal groups of columns, which are heads or all there is, v stands last: after
    q and k, or after k, which may be as wide as v or not.
    """
    yield tuple(range(width)), ()
    tried = set()
    for count in (n for n in range(1, min(width, MOST_HEADS + 1)) if width % n == 0):
        group, out = width // count, result // count
        # v as wide as k: after all of q, or without q; as wide as the result, and k the rest
        for size, keys in (
            ((group - out) // 2, (group - out) // 2),
            (group // 2, group // 2),
            (out, group - out),
        ):
            if min(size, keys) < 1 or result % size or (count, size) in tried:
                continue
            tried.add((count, size))
            edges = 0, group - size - keys, group - size, group
            table = torch.arange(width).view(count, group)
            parts = (tuple(table[:, a:b].flatten().tolist()) for a, b in pairwise(edges))
            q, k, v = parts
            yield v, tuple(x for x in (q, k) if x)


def _first_rows(x: Tensor) -> Tensor:
    """Zero but for the first third of the rows."""
    return x * (torch.arange(len(x)) < len(x) // 3)[:, None]


def _reaches(change: Tensor) -> bool:
    """Whether a change of the first rows shows in others."""
    return bool((change[len(change) // 3 :].abs() > 1e-6 * change.abs().max()).any())


def _is_linear(read: Read, rows: Tensor) -> bool:
    """Whether the result is linear in these columns, and the first rows reach others."""
    values = torch.randn(rows.shape, generator=torch.Generator().manual_seed(2)).double()
    nothing, once, twice = (read(x * _first_rows(values)) for x in (0, 1, 2))
    change = once - nothing
    error = float((twice - nothing - 2 * change).abs().max())
    return error <= 0.02 * float(change.abs().max()) and _reaches(change)


def q_and_k(path: Path, run: Run) -> tuple[PathPart | None, PathPart | None]:
    """The columns whose row changes its own row of the result alone, and those of keys."""
    found: dict[bool, PathPart] = {}
    for part in path.candidates:
        moved, at = part.rows.clone(), len(part.rows) // 3
        make = torch.Generator().manual_seed(3)
        moved[at] += part.rows.std() * torch.randn(moved.shape[1], generator=make)
        with suppress(UnreadableError):
            before, after = map(part.reader(run, path.read), (part.rows, moved))
            change = (after - before).abs().amax(1)
            others = torch.cat([change[:at], change[at + 1 :]]).max()
            if float(change.max()) > 0:
                found.setdefault(float(others) <= 1e-3 * float(change.max()), part)
    return found.get(True), found.get(False)

"""Attention inside a module, found by what it does: linear in v, mixing rows, q changing its own.

No names of modules are needed: of all projections, v is the one that the result is linear in and
whose rows reach others; q changes its own row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tilewise.verification.records import Record, Setting

Run = Callable[[Setting], Tensor | None]
"""What a setting reads: rows of the whole sequence [num_tokens, numbers]; None if it fails."""

ANCESTORS = 3  # modules around a layer, in which its projections may lie


class Part(NamedTuple):
    """Columns of a module's output."""

    module: str
    columns: tuple[int, ...]


class Path(NamedTuple):
    """Where v enters a layer's attention and its result can be read."""

    v: Part
    read: str
    candidates: tuple[Part, ...]  # of q and k


class Weights(NamedTuple):
    """Weights [num_heads, num_tokens, num_tokens], and the columns of v that each head reads."""

    weights: Tensor
    sources: tuple[tuple[int, ...], ...]
    is_exact: bool  # whether no attention reads as exactly 0

    def allowed(self, eps: float) -> Tensor:
        """Which weights are more than what rounding leaves of a zero, beside the row's largest."""
        least = 1e-30 if self.is_exact else eps
        return self.weights > self.weights.amax(-1, keepdim=True).clamp(min=1e-30) * least


def find_path(
    model: nn.Module, layer: str, whole: Record, run: Run, num_tokens: int
) -> Path | None:
    """The path of attention in a layer; or from projections around it to its output."""
    modules, before = dict(model.named_modules()), list(whole.outputs)
    for scope in _around(layer):
        prefix = f"{scope}." if scope else ""
        inside = [
            name
            for name in (before if scope == layer else before[: before.index(layer)])
            if name.startswith(prefix)
            and getattr(getattr(modules.get(name), "weight", None), "ndim", 0) == 2
            and not isinstance(modules[name], nn.Embedding)
            and whole.outputs[name].shape[-2] == num_tokens
        ]
        for read in (*(inside[-1:] if scope == layer else ()), f"{layer}()"):
            for name in reversed([x for x in inside if x != read]):
                path = _path(name, read, inside, whole, run)
                if path is not None:
                    return path
    return None


def _around(layer: str) -> list[str]:
    """A module's name and those around it, the whole model's "" included."""
    names = layer.split(".")
    found = [".".join(names[: len(names) - i]) for i in range(len(names))]
    return [*found, ""][:ANCESTORS]


def _path(name: str, read: str, inside: list[str], whole: Record, run: Run) -> Path | None:
    width = whole.outputs[name].shape[-1]
    probe = run(Setting(name, (), torch.zeros(len(_rows(whole, name)), 0), read))
    if probe is None:
        return None
    for v, others in _columns(width, probe.shape[1]):
        if _is_value(Setting(name, v, _rows(whole, name)[:, list(v)], read), run):
            rest = [Part(x, tuple(range(whole.outputs[x].shape[-1]))) for x in inside]
            rest = [part for part in rest if part.module not in (name, read)]
            return Path(Part(name, v), read, (*(Part(name, c) for c in others), *rest))
    return None


def _columns(
    width: int, result: int
) -> Iterator[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]:
    """Where v may stand among a projection's columns, and where q and k then do."""
    every = tuple(range(width))
    yield every, ()
    if width > result and (width - result) % 2 == 0:  # q, then k, then v
        kv = (width - result) // 2
        yield every[-kv:], (every[: width - 2 * kv], every[width - 2 * kv : -kv])
    if width % 2 == 0:  # k, then v
        yield every[width // 2 :], (every[: width // 2],)
    if width == 3 * result:  # q, k, v of one head after the other
        for size in (d for d in range(1, result) if result % d == 0):
            thirds = torch.arange(width).view(-1, 3, size).unbind(1)
            q, k, v = (tuple(x.flatten().tolist()) for x in thirds)
            yield v, (q, k)


def _rows(whole: Record, name: str) -> Tensor:
    return (
        whole.outputs[name].flatten(0, -3)[0]
        if whole.outputs[name].ndim > 2
        else whole.outputs[name]
    )


def _is_value(setting: Setting, run: Run) -> bool:
    """Whether the result is linear in these columns, and a row of them reaches other rows."""
    n = len(setting.values)
    make = torch.Generator().manual_seed(2)
    values = torch.randn(setting.values.shape, generator=make, dtype=torch.float64)
    values[n // 3 :] = 0
    nothing, once, twice = (run(setting._replace(values=x * values)) for x in (0, 1, 2))
    if nothing is None or once is None or twice is None:
        return False
    change = once - nothing
    size = float(change.abs().max())
    linear = float((twice - nothing - 2 * change).abs().max()) <= 0.02 * size
    return size > 0 and linear and bool((change[n // 3 :].abs() > 1e-6 * size).any())


def is_attention(weights: Weights, path: Path, whole: Record, run: Run) -> bool:
    """Whether weights are shares of 1 that queries decide, unlike those of a scan."""
    shares, sums = weights.weights, weights.weights.sum(-1)
    return bool((shares > -0.02).all() and (sums < 1.05).all()) and bool(
        q_and_k(path, whole, run)[0]
    )


def q_and_k(path: Path, whole: Record, run: Run) -> tuple[Part | None, Part | None]:
    """The columns whose row changes its own row of the result alone, and those of keys."""
    found: dict[bool, Part] = {}
    for part in path.candidates:
        rows = _rows(whole, part.module)[:, list(part.columns)]
        moved, at = rows.clone(), len(rows) // 3
        moved[at] += rows.std() * torch.randn(
            rows.shape[1], generator=torch.Generator().manual_seed(3)
        )
        settings = (Setting(part.module, part.columns, x, path.read) for x in (rows, moved))
        before, after = map(run, settings)
        if before is None or after is None or before.shape != after.shape:
            continue
        change = (after - before).abs().amax(1)
        others = torch.cat([change[:at], change[at + 1 :]]).max()
        if float(change.max()) > 0:
            found.setdefault(float(others) <= 1e-3 * float(change.max()), part)
    return found.get(True), found.get(False)


def read_weights(
    path: Path, run: Run, num_tokens: int, heads: Weights | None = None
) -> Weights | None:
    """The weights of a layer's attention, by one-hot values.

    Args:
        heads: of the unsplit model, whose columns of the result are grouped by head.
    """
    width = len(path.v.columns)

    def read(values: Tensor) -> Tensor | None:
        return run(Setting(path.v.module, path.v.columns, values, path.read))

    ones = torch.ones(num_tokens, width, dtype=torch.float64)
    nothing, sums, codes = read(0 * ones), read(ones), read(ones * (1 + torch.arange(width)))
    if nothing is None or sums is None or codes is None:
        return None
    sums, codes = sums - nothing, codes - nothing
    column = (codes / sums - 1).nanmedian(0).values.nan_to_num(nan=-1).round().long()
    groups = _groups(read, ones, nothing) if heads is None else _split(column, heads.sources)
    sources = tuple(tuple(column[list(group)].tolist()) for group in groups)
    if any(not 0 <= c < width for group in sources for c in group) and heads is None:
        return None
    size, slots = min(map(len, groups)), torch.zeros(width, dtype=torch.int64)
    for group in sources if heads is None else heads.sources:
        slots[torch.tensor(group)] = torch.arange(len(group))
    tables = []
    for start in range(0, num_tokens, size):
        values = torch.zeros_like(ones)
        keys = start + slots
        kept = (slots < size) & (keys < num_tokens)
        values[keys[kept], kept.nonzero().flatten()] = 1
        got = read(values)
        if got is None:
            return None
        places = [[g[i] for i in range(len(g))] for g in groups]
        table = torch.zeros(
            len(groups), num_tokens, min(size, num_tokens - start), dtype=torch.float64
        )
        for h, group in enumerate(places):
            for o in group:
                slot = int(slots[column[o].clamp(0, width - 1)])
                if slot < table.shape[2]:
                    table[h, :, slot] = (got - nothing)[:, o]
        tables.append(table)
    return Weights(torch.cat(tables, -1), sources, not nothing.any())


def _groups(
    read: Callable[[Tensor], Tensor | None], ones: Tensor, nothing: Tensor
) -> list[list[int]]:
    """Columns of the result by head: those of one are equal if all columns of v are."""
    rows = torch.randn(
        len(ones), 1, generator=torch.Generator().manual_seed(4), dtype=torch.float64
    )
    got = read(ones * rows)
    assert got is not None
    marks = got - nothing
    groups: list[list[int]] = []
    for o in range(marks.shape[1]):
        last = marks[:, groups[-1][0]] if groups else None
        if last is not None and float((marks[:, o] - last).abs().max()) <= 1e-4 * float(
            last.abs().max()
        ):
            groups[-1].append(o)
        else:
            groups.append([o])
    return groups


def _split(column: Tensor, sources: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    sizes = [len(group) for group in sources]
    return [list(range(sum(sizes[:i]), sum(sizes[: i + 1]))) for i in range(len(sizes))]

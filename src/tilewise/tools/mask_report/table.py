"""Rows of the tables over masks: the 14 patterns, and documents by corpus.

figures.py counts one mask; this says which masks are drawn and how seeds are combined.
"""

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from tilewise import lengths, masks
from tilewise.compiler.lowering import lower
from tilewise.tools.mask_report.figures import (
    LAYOUTS,
    PLANS,
    MaskCase,
    RankLoad,
    imbalance,
    kernel_calls,
    load,
    planned,
)
from tilewise.tools.mask_report.named import drawn

FIXED = ("full", "causal", "sliding_window", "sliding_window_causal")  # the same with every seed
CORPORA = (("prolong512k", 4, 0.0), ("pile", 4, 0.0), ("prolong512k", 1, 0.6), ("pile", 1, 0.6))
"""Corpus, how many longest documents fill a sequence, share of the benchmark's long documents."""


class PatternRow(NamedTuple):
    """One pattern with one seed.

    Attributes:
        bytes, areas: by plan, shares of the ring's bytes, and largest over mean area.
        calls, waste: by plan, kernel calls of a rank on average, computed over allowed cells.
    """

    mask: str
    area: float  # share of all pairs that is allowed
    imbalance: dict[str, float]  # by layout, each rank computing its own queries
    bytes: dict[str, RankLoad]
    areas: dict[str, float]
    calls: dict[str, float]
    waste: dict[str, float]


def pattern_row(name: str, case: MaskCase, seed: int) -> PatternRow:
    """All figures of a pattern."""
    mask, n, num_tokens = drawn(name, case.num_tokens, seed), case.world_size, case.num_tokens
    area = mask.area((0, num_tokens), (0, num_tokens)) / num_tokens**2
    even = {layout: imbalance(mask, make(mask, num_tokens, n)) for layout, make in LAYOUTS.items()}
    row = PatternRow(name, area, even, {}, {}, {}, {})
    for who in PLANS:
        plan, layout = planned(mask, case, who)
        row.bytes[who], row.areas[who] = load(plan, mask, layout, case)
        row.calls[who], wasted = kernel_calls(plan, mask, layout)
        row.waste[who] = wasted.ratio
    return row


def seeds_of(name: str, num_seeds: int) -> range:
    """The seeds worth drawing: one, where nothing is drawn."""
    return range(1 if name in FIXED else num_seeds)


def joined(rows: Sequence[PatternRow]) -> PatternRow:
    """One pattern over its seeds: means of areas, bytes and calls, the worst of all ratios."""
    first = rows[0]

    def over(what: str, how: Any) -> dict[str, float]:
        columns = [getattr(row, what) for row in rows]
        return {key: float(how([column[key] for column in columns])) for key in columns[0]}

    moved = {
        who: RankLoad(*np.mean([row.bytes[who] for row in rows], axis=0).tolist())
        for who in first.bytes
    }
    return PatternRow(
        first.mask,
        float(np.mean([row.area for row in rows])),
        over("imbalance", max),
        moved,
        over("areas", max),
        over("calls", np.mean),
        over("waste", max),
    )


class DocumentRow(NamedTuple):
    """Causal documents of one draw."""

    corpus: str
    mix: float
    world_size: int
    heads: str
    seed: int
    bytes: dict[str, RankLoad]  # by plan, as in PatternRow
    imbalance: float  # of tiled, largest over mean area
    waste: float  # of tiled, computed over allowed cells
    seconds: float  # to plan tiled: layout, plan and one rank's program


def document_row(corpus: tuple[str, int, float], case: MaskCase, seed: int) -> DocumentRow:
    """All figures of one draw of causal documents.

    Args:
        corpus: one of CORPORA.
    """
    name, share, mix = corpus
    cap = case.num_tokens // share
    mask = masks.causal_document(lengths.sample(name, case.num_tokens, seed=seed, cap=cap, mix=mix))
    start = perf_counter()
    plan, layout = planned(mask, case, "tiled")
    lower(plan, 0)
    seconds = perf_counter() - start
    plans = {who: planned(mask, case, who) for who in PLANS[:-1]} | {"tiled": (plan, layout)}
    loads = {who: load(plan, mask, layout, case) for who, (plan, layout) in plans.items()}
    moved, uneven = {who: found for who, (found, _) in loads.items()}, loads["tiled"][1]
    waste = kernel_calls(plan, mask, layout)[1].ratio
    heads = f"{case.num_heads}:{case.num_kv_heads}"
    return DocumentRow(name, mix, case.world_size, heads, seed, moved, uneven, waste, seconds)


def span(values: Sequence[float]) -> str:
    """The least and the most of some shares: one number if they read alike."""
    low, high = (f"{x:.3f}" for x in (min(values), max(values)))
    return low if low == high else f"{low}-{high}"


def by_draw(rows: Sequence[DocumentRow]) -> Iterator[list[DocumentRow]]:
    """Rows that differ in their seed alone, together."""
    for key in dict.fromkeys(row[:4] for row in rows):
        yield [row for row in rows if row[:4] == key]

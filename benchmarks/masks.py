"""Balance, bytes and kernel calls of every mask pattern, or of documents of every corpus.

python -m benchmarks.masks [--documents] [--seeds 1] [--json]
python -m benchmarks.masks --pictures docs/img

These are the tables and the pictures of docs/masks_gallery.md.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.table import Table

from tilewise import lengths, masks
from tilewise.arguments import require_range
from tilewise.compiler.lowering import lower
from tilewise.expressions import read_heads
from tilewise.layouts.layout import Layout, zigzag
from tilewise.masks.base import Mask
from tilewise.plan.ir import Plan
from tilewise.plan.payload import head_groups
from tilewise.strategies import catalog
from tilewise.strategies.mesh import mesh
from tilewise.strategies.ring import ring
from tilewise_tools.cli.group import OneCommand
from tilewise_tools.cli.mask import MaskOptions
from tilewise_tools.cli.mask import mask as draw_mask
from tilewise_tools.cli.options import AsJson, command_of, option
from tilewise_tools.cli.output import (
    counted,
    print_json,
    refusing_bad_input,
    table_console,
    table_of,
)
from tilewise_tools.mask_report.figures import (
    LAYOUTS,
    MaskCase,
    RankLoad,
    Waste,
    imbalance,
    load,
    moved,
    report,
    total,
)
from tilewise_tools.mask_report.named import DRAWN, drawn

COMPARED = {name: LAYOUTS[name] for name in ("contiguous", "zigzag", "striped", "balanced")}
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


MESHES = 2  # tile shapes tried, those nearest to the best for a full mask
PLANS = ("ring", "mesh", "needed", "tiled")


def planned(mask: Mask, case: MaskCase, name: str) -> tuple[Plan, Layout]:
    """A plan of PLANS with the layout that it is at home on; of the meshes the one that sends
    least."""
    if name not in PLANS:
        raise ValueError(f"plan {name!r} is not known; take one of {', '.join(PLANS)}")
    n, num_tokens, kv_bytes = case.world_size, case.num_tokens, case.kv_bytes
    for entry in catalog.MASK_AWARE:
        if entry.name == name:
            layout = entry.layout(mask, num_tokens, n, kv_bytes)
            return entry.plan(mask, layout, kv_bytes), layout
    layout = zigzag(num_tokens, n)
    if name == "ring":
        return ring(n), layout
    best = math.sqrt(n * case.num_kv_heads / case.num_heads)
    tiles = sorted(catalog.tile_sizes(n), key=lambda a: abs(math.log(a / best)))
    return min(
        (mesh(n, q_tile=a) for a in tiles[:MESHES]),
        key=lambda plan: sum(moved(plan, case.workload(mask, layout)).sent),
    ), layout


MAX_RANKS = 8
"""Ranks, evenly spread, of which kernel_calls counts the calls."""


def kernel_calls(plan: Plan, mask: Mask, layout: Layout) -> tuple[float, Waste]:
    """Calls per rank on average, and the waste of all, over at most MAX_RANKS ranks."""
    n = plan.world_size
    ranks = sorted({i * n // MAX_RANKS for i in range(MAX_RANKS)}) if n > MAX_RANKS else range(n)
    waste = total(report(mask, layout, plan, ranks=ranks))
    return waste.num_calls / len(ranks), waste


def pattern_row(name: str, case: MaskCase, seed: int) -> PatternRow:
    """All figures of a pattern."""
    mask, n, num_tokens = drawn(name, case.num_tokens, seed), case.world_size, case.num_tokens
    area = mask.area((0, num_tokens), (0, num_tokens)) / num_tokens**2
    even = {layout: imbalance(mask, make(mask, num_tokens, n)) for layout, make in COMPARED.items()}
    row = PatternRow(name, area, even, {}, {}, {}, {})
    for who in PLANS:
        plan, layout = planned(mask, case, who)
        row.bytes[who], row.areas[who] = load(plan, mask, layout, case)
        row.calls[who], wasted = kernel_calls(plan, mask, layout)
        row.waste[who] = wasted.ratio
    return row


def seeds_of(name: str, num_seeds: int) -> range:
    """The seeds worth drawing: one, where nothing is drawn."""
    return range(num_seeds if name in DRAWN else 1)


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


PICTURED_TOKENS, PICTURED_RANKS, PICTURED_SEED = "8192", 8, 5
MORE_PICTURES = (("causal", "zigzag"), ("causal", "tiled"), ("causal_document", "tiled"))
PIPED_WIDTH = 130
PATTERNS = (16,), 4096, ("32:32",)
DOCUMENTS = (8, 64), 8192, ("64:64", "64:8")
"""Numbers of ranks, tokens of each, heads."""
MOST_RANKS = 512


class MasksOptions(NamedTuple):
    """The subject of the tables, or where pictures go; None: the default of that kind of table."""

    world_size: Annotated[int | None, option("Ranks. Default: 16; with --documents 8 and 64.")] = (
        None
    )
    tokens_per_rank: Annotated[int | None, option("Default: 4096; with --documents 8192.")] = None
    heads: Annotated[
        str | None, option("Query:KV heads. Default: 32:32; with --documents 64:64 and 64:8.")
    ] = None
    head_dim: Annotated[int, option("Elements of a head, bf16.")] = 128
    seeds: Annotated[int, option("Draws of what is random, from seed 0.")] = 5
    documents: Annotated[
        bool, option("Causal documents by corpus, not the patterns.", "--documents")
    ] = False
    pictures: Annotated[
        Path | None,
        option("Draw the gallery's pictures into this folder instead.", file_okay=False),
    ] = None
    as_json: AsJson = False


def _masks(options: MasksOptions) -> None:
    """Balance, bytes and kernel calls of every mask pattern, or of document corpora."""
    if options.pictures is not None:
        draw_pictures(options.pictures)
        return
    with refusing_bad_input():
        cases = _cases(options)
        require_range("seeds", options.seeds)
    seeds = range(options.seeds)
    if options.documents:
        wanted = list(product(cases, CORPORA, seeds))
        names = [f"{one[0]}, {case.world_size} ranks, seed {seed}" for case, one, seed in wanted]
        rows = counted((document_row(one, case, seed) for case, one, seed in wanted), names)
    else:
        drawn = [(name, x) for name in masks.ALL_NAMES for x in seeds_of(name, len(seeds))]
        names = [f"{name}, seed {seed}" for name, seed in drawn]
        rows = counted((pattern_row(name, cases[0], seed) for name, seed in drawn), names)
    rows = list(rows)
    if options.as_json:
        print_json([_plain(row) for row in rows])
        return
    console = table_console(PIPED_WIDTH)
    for part in _shown(rows, cases[0], options.seeds):
        console.print(part, highlight=False)


def _cases(options: MasksOptions) -> list[MaskCase]:
    ranks, tokens, heads = DOCUMENTS if options.documents else PATTERNS
    if options.world_size is not None:
        ranks = (options.world_size,)
    if options.tokens_per_rank is not None:
        tokens = options.tokens_per_rank
    if options.heads is not None:
        heads = (options.heads,)
    require_range("world_size", max(ranks), 1, MOST_RANKS)
    require_range("tokens_per_rank", tokens, 1, 1 << 20)
    require_range("head_dim", options.head_dim, 1, 1 << 12)
    pairs = [read_heads(text) for text in heads]
    for pair in pairs:
        head_groups(*pair, 1)
    return [MaskCase(n, n * tokens, *pair, options.head_dim) for n in ranks for pair in pairs]


def _shown(
    rows: Sequence[PatternRow | DocumentRow], case: MaskCase, num_seeds: int
) -> Iterator[str | Table]:
    """The tables and the words before each."""
    tokens, dim = case.num_tokens // case.world_size, case.head_dim
    if documents := [row for row in rows if isinstance(row, DocumentRow)]:
        yield (
            f"Causal documents, {tokens:,} tokens on every rank, heads of {dim}, bf16; least and "
            f"most of {num_seeds} seeds. Documents\nare at most a quarter of the sequence; with "
            "mix 0.6 of the tokens are in documents of 8192 to 30000, and none is cut.\n\n"
            "Bytes sent in forward as a share of a ring that sends all keys to everybody: mean "
            "over ranks; below it, the most\nthat one sends or receives. ring and mesh run on "
            "zigzag, needed on balanced, tiled on tiled_layout.\n"
        )
        yield _document_table(documents)
        return
    found = [row for row in rows if isinstance(row, PatternRow)]
    lines = [joined([row for row in found if row.mask == name]) for name in masks.ALL_NAMES]
    yield (
        f"{case.num_tokens:,} tokens on {case.world_size} ranks, {case.num_heads}:"
        f"{case.num_kv_heads} heads of {dim}, bf16; {num_seeds} seeds: area, bytes "
        "and calls are means, the others the worst.\n\nUnder a layout's name: largest over mean "
        "area of ranks that compute their own queries. Calls: kernel calls of a rank.\nWaste: "
        "computed over allowed cells. ring and mesh run on zigzag, needed on balanced, tiled on "
        "tiled_layout.\n"
    )
    yield _evenness(lines)
    yield (
        "\nBytes sent in forward as a share of a ring that sends all keys to everybody: mean over "
        "ranks / the most that\none sends or receives. In brackets largest over mean area.\n"
    )
    yield _bytes(lines)


def _evenness(rows: list[PatternRow]) -> Table:
    table = table_of(
        "mask", "area %", *COMPARED, *(f"{who}\ncalls, waste" for who in PLANS), no_wrap=False
    )
    for row in rows:
        table.add_row(
            row.mask,
            f"{100 * row.area:.3g}",
            *(f"{row.imbalance[layout]:.2f}" for layout in COMPARED),
            *(f"{row.calls[who]:.0f}, {row.waste[who]:.2f}" for who in PLANS),
        )
    return table


def _bytes(rows: list[PatternRow]) -> Table:
    table = table_of("mask", *PLANS)
    for row in rows:
        table.add_row(
            row.mask,
            *(
                f"{row.bytes[who].mean:.3f} / {row.bytes[who].busiest:.3f} ({row.areas[who]:.2f})"
                for who in PLANS
            ),
        )
    return table


def _document_table(rows: list[DocumentRow]) -> Table:
    table = table_of(
        "documents", "ranks", "heads", *PLANS, "tiled:\nimbalance", "\nwaste", "\nseconds"
    )
    for mine in by_draw(rows):
        first = mine[0]
        cells = [
            f"{span([row.bytes[who].mean for row in mine])}\n"
            f"{span([row.bytes[who].busiest for row in mine])}"
            for who in PLANS
        ]
        table.add_row(
            first.corpus + ", mix" * bool(first.mix),
            str(first.world_size),
            first.heads,
            *cells,
            f"{max(row.imbalance for row in mine):.2f}",
            f"{max(row.waste for row in mine):.2f}",
            f"{max(row.seconds for row in mine):.2f}",
        )
    return table


def _plain(row: PatternRow | DocumentRow) -> dict:
    return row._asdict() | {"bytes": {who: x._asdict() for who, x in row.bytes.items()}}


def draw_pictures(folder: Path) -> None:
    """Draw every pattern under balanced, and a few under other layouts."""
    for name, layout in (*((name, "balanced") for name in masks.ALL_NAMES), *MORE_PICTURES):
        path = folder / f"mask_{name}{'' if layout == 'balanced' else '_' + layout}.png"
        seed = PICTURED_SEED if name in DRAWN else None
        draw_mask(MaskOptions(name, PICTURED_TOKENS, PICTURED_RANKS, layout, seed, png=path))


app = typer.Typer(
    add_completion=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=OneCommand)(command_of(_masks, MasksOptions))

if __name__ == "__main__":
    app()

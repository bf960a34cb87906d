"""tilewise masks: what every pattern, or documents of every corpus, cost under each plan."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Annotated, NamedTuple

from rich.table import Table

from tilewise import masks as patterns
from tilewise.arguments import require_range
from tilewise.expressions import read_heads
from tilewise.plan.payload import head_groups
from tilewise.tools.cli.options import AsJson, command_of, option
from tilewise.tools.cli.output import (
    counted,
    print_json,
    refusing_bad_input,
    table_console,
    table_of,
)
from tilewise.tools.mask_report.figures import LAYOUTS, PLANS, MaskCase
from tilewise.tools.mask_report.table import (
    CORPORA,
    DocumentRow,
    PatternRow,
    by_draw,
    document_row,
    joined,
    pattern_row,
    seeds_of,
    span,
)

PIPED_WIDTH = 130
PATTERNS = (16,), 4096, ("32:32",)
DOCUMENTS = (8, 64), 8192, ("64:64", "64:8")
"""Numbers of ranks, tokens of each, heads."""
MOST_RANKS = 512


class MasksOptions(NamedTuple):
    """Options of `tilewise masks`: the table's subject. None: as the kind of table likes it."""

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
    as_json: AsJson = False


def masks(options: MasksOptions) -> None:
    """Balance, bytes and kernel calls of all 14 patterns, or of document corpora."""
    with refusing_bad_input():
        cases = _cases(options)
        require_range("seeds", options.seeds)
    seeds = range(options.seeds)
    if options.documents:
        wanted = list(product(cases, CORPORA, seeds))
        names = [f"{one[0]}, {case.world_size} ranks, seed {seed}" for case, one, seed in wanted]
        rows = counted((document_row(one, case, seed) for case, one, seed in wanted), names)
    else:
        drawn = [(name, x) for name in patterns.ALL_NAMES for x in seeds_of(name, len(seeds))]
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
    lines = [joined([row for row in found if row.mask == name]) for name in patterns.ALL_NAMES]
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
        "mask", "area %", *LAYOUTS, *(f"{who}\ncalls, waste" for who in PLANS), no_wrap=False
    )
    for row in rows:
        table.add_row(
            row.mask,
            f"{100 * row.area:.3g}",
            *(f"{row.imbalance[layout]:.2f}" for layout in LAYOUTS),
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


masks_command = command_of(masks, MasksOptions)

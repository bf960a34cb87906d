"""tilewise mask: one mask drawn and counted."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import typer
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from tilewise import masks
from tilewise.arguments import require_range
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Mask
from tilewise.masks.components import row_areas
from tilewise.masks.patterns import OF_DOCUMENTS
from tilewise.plan.ir import Plan
from tilewise.strategies.needed import needed
from tilewise.strategies.tiled import tiled, tiled_layout
from tilewise_tools.cli.options import TOKENS, AsJson, command_of, option, read_count
from tilewise_tools.cli.output import (
    as_bytes,
    check_writable,
    print_json,
    print_plain,
    refusing_bad_input,
    working,
)
from tilewise_tools.doctor import require
from tilewise_tools.mask_report.figures import LAYOUTS, MaskCase, imbalance, load
from tilewise_tools.mask_report.named import CORPUS, DRAWN, Axes, mask_of
from tilewise_tools.mask_report.view import MaskView, colours, draw, painted, view
from tilewise_tools.naming import require_png
from tilewise_verify.palette import ink_on, rank_colours

SIGNS = "0123456789abcdefghijklmnopqrstuvwxyz"
NUMBERED = 16
WHITE = 1.0


def as_signs(mask_view: MaskView) -> str:
    """Queries downward, keys to the right; two rows of cells a line, as letters are tall.

    The sign of the rank that computes a cell, "." where nothing is allowed. Beyond 36 ranks signs
    come again.
    """
    lines = [f"    {_signs(mask_view.owners)}", ""]
    for i in range(0, len(mask_view.owners), 2):
        upper, lower = mask_view.ranks[i : i + 2][[0, -1]]
        row = np.where(upper < 0, lower, upper)
        lines.append(f"{_signs(mask_view.owners[i : i + 1])}   {_signs(row)}")
    return "\n".join(lines) + "\n"


def as_blocks(mask_view: MaskView, n: int) -> Text:
    """Return a mask as text in colours; each character shows two cells, one above the other."""
    cells = painted(mask_view, n)
    owned = colours(n)[mask_view.owners]
    gap = np.full((len(owned), 1, 3), WHITE)
    table = np.concatenate([owned[:, None], gap, cells], 1)
    if len(table) % 2:
        table = np.concatenate([table, np.full_like(table[:1], WHITE)])
    text = Text()
    for upper, lower in zip(table[::2], table[1::2], strict=True):
        for above, below in zip(upper, lower, strict=True):
            text.append("▀", Style(color=_color(above), bgcolor=_color(below)))
        text.append("\n")
    if n <= NUMBERED:
        for rank, colour in enumerate(rank_colours(n)):
            text.append(f" {rank} ", Style(color=ink_on(colour), bgcolor=colour))
        text.append("\n")
    return text


def _signs(ranks: np.ndarray) -> str:
    return "".join("." if rank < 0 else SIGNS[rank % len(SIGNS)] for rank in ranks.tolist())


def _color(rgb: np.ndarray) -> Color:
    red, green, blue = (int(255 * part + 0.5) for part in rgb.tolist())
    return Color.from_rgb(red, green, blue)


CELLS, TEXT_CELLS = (360, 180), 64  # a picture's table has 360 x 360 pixels
MOST_TOKENS = 1 << 26  # each one's rank is kept
MOST_BYTES = 120_000  # of a picture; a speckled one is drawn with larger cells
HEADS, HEAD_DIM = 32, 128


class MaskOptions(NamedTuple):
    """Options of `tilewise mask`: what is drawn, and where it goes."""

    name: Annotated[
        str,
        typer.Argument(
            help=f"One of {', '.join(masks.ALL_NAMES)}; or an expression, as in 'causal & "
            "window(1023, 0)'; or FILE.py:name, a mask or a function of num_tokens."
        ),
    ]
    num_tokens: Annotated[str, option(TOKENS)] = "64K"
    world_size: Annotated[int, option("Ranks, up to 1024.")] = 8
    layout: Annotated[
        Literal["balanced", "zigzag", "zigzag_documents", "contiguous", "striped", "tiled"],
        option("Who owns which tokens; with tiled, also who computes which cell."),
    ] = "balanced"
    seed: Annotated[
        int | None, option("Of a pattern's documents and random parameters.", min=0)
    ] = None
    corpus: Annotated[str | None, option("Of a pattern's document lengths; or a CSV.")] = None
    png: Annotated[Path | None, option("Write a picture here instead of text.", dir_okay=False)] = (
        None
    )
    as_json: AsJson = False


def mask(options: MaskOptions) -> None:
    """Draw a mask with rank ownership: as a picture, or as text."""
    name, png = options.name, options.png
    with refusing_bad_input({"world_size": "--world-size", "corpus": "--corpus"}):
        if png:
            require("matplotlib", "tilewise mask --png")
            check_writable("--png", png, options)
            require_png("--png", png)
        with working(f"{name} on {options.world_size} ranks"):
            drawn_mask, layout, plan, figures = _measured(options)
    n = options.world_size
    mean, busiest, ring = (as_bytes(figures[f"{x}_bytes"]) for x in ("mean", "busiest", "ring"))
    title = (
        name,
        f"{layout.num_tokens:,} tokens on {n} ranks, {options.layout}",
        f"area {100 * figures['area'] / layout.num_tokens**2:.3g} % of all pairs, imbalance "
        f"{figures['imbalance']:.2f}",
        f"{figures['plan']} sends {mean} a rank, busiest {busiest}, a ring {ring}",
    )
    if png:
        for cells in CELLS:
            draw(view(drawn_mask, layout, cells, plan), n, title, png)
            if png.stat().st_size <= MOST_BYTES:
                break
    if options.as_json:
        print_json(figures)
    elif png:
        print_plain(f"{png}: {as_bytes(png.stat().st_size)}")
    else:
        _print(title, view(drawn_mask, layout, TEXT_CELLS, plan), n)


def _measured(options: MaskOptions) -> tuple[Mask, Layout, Plan | None, dict[str, Any]]:
    """The mask, its layout, the plan that says who computes what, and what --json prints."""
    n, num_tokens = options.world_size, read_count("--num-tokens", options.num_tokens)
    require_range("--num-tokens", num_tokens, 1, MOST_TOKENS)
    require_range("world_size", n, 1, 1024)
    words = set(re.findall(r"\w+", options.name))
    for name, value, patterns in (
        ("--seed", options.seed, DRAWN),
        ("--corpus", options.corpus, OF_DOCUMENTS),
    ):
        if value is not None and not words & set(patterns):
            raise ValueError(f"{name} is of patterns that are drawn: {', '.join(patterns)}")
    mask = mask_of(options.name, num_tokens, options.seed or 0, Axes(corpus=options.corpus))
    case = MaskCase(n, num_tokens, HEADS, HEADS, HEAD_DIM)
    if options.layout == "tiled":
        layout = tiled_layout(mask, num_tokens, n, kv_bytes=case.kv_bytes)
        plan = tiled(mask, layout, kv_bytes=case.kv_bytes)
        moves, uneven = load(plan, mask, layout, case)
    else:
        layout = LAYOUTS[options.layout](mask, num_tokens, n)
        plan = needed(mask, layout)
        moves, uneven = load(plan, mask, layout, case)[0], imbalance(mask, layout)
    areas = row_areas(mask, num_tokens)
    given = options._asdict() | {"seed": options.seed or 0, "png": options.png and str(options.png)}
    given["corpus"] = options.corpus or CORPUS
    del given["as_json"]
    figures = given | {
        "num_tokens": num_tokens,
        "area": mask.area((0, num_tokens), (0, num_tokens)),
        "imbalance": uneven,
        "plan": "tiled" if options.layout == "tiled" else "needed",
        "mean_bytes": moves.mean * case.ring_bytes,
        "busiest_bytes": moves.busiest * case.ring_bytes,
        "ring_bytes": case.ring_bytes,
        "tokens": layout.sizes,
        "areas_of_own_queries": [float(areas[layout.rows(r)].sum()) for r in range(n)],
    }
    return mask, layout, plan if options.layout == "tiled" else None, figures


def _print(title: tuple[str, ...], mask_view: MaskView, n: int) -> None:
    console = Console()
    for i, line in enumerate(title):
        console.print(line, style="bold" if i == 0 else "", highlight=False, markup=False)
    if console.is_terminal and console.color_system:
        console.print(as_blocks(mask_view, n), soft_wrap=True)
    else:
        print_plain(as_signs(mask_view))


mask_command = command_of(mask, MaskOptions)

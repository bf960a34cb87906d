"""A mask drawn: in text, and as a picture."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tilewise.compiler.pruning import shard_layouts
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Mask
from tilewise.plan.ir import Plan, Side
from tilewise_tools.doctor import require
from tilewise_verify.palette import GROUNDS, ink_on, rank_colours, rgb

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Array = np.ndarray
SAMPLES = (0.5, 0.2, 0.8)  # places within a cell where a plan is asked who computes it


class MaskView(NamedTuple):
    """Cells between edges, queries by keys.

    Attributes:
        owners: int [cells], whose the cell's tokens are; of several ranks each gets its share of
            neighbouring cells.
    """

    edges: Array  # of the cells on both sides, from 0 to num_tokens
    shares: Array  # float [cells, cells], allowed part of a cell's pairs
    ranks: Array  # int [cells, cells], who computes the cell, -1 where nothing is allowed
    owners: Array


def view(mask: Mask, layout: Layout, cells: int, plan: Plan | None = None) -> MaskView:
    """A mask seen through at most this many cells a side.

    Args:
        plan: who computes what; None: each rank its own queries.
    """
    num_tokens = layout.num_tokens
    edges = np.linspace(0, num_tokens, min(cells, num_tokens) + 1).astype(np.int64)
    sizes = np.diff(edges)
    shares = np.asarray(mask.areas(edges, edges), float) / np.outer(sizes, sizes)
    owners = _owners_of_cells(owner_of_tokens(layout), edges, layout.world_size)
    if plan is None:
        ranks = np.broadcast_to(owners[:, None], shares.shape)
    else:
        ranks = _computed(plan, layout, edges, owners)
    return MaskView(edges, shares, np.where(shares > 0, ranks, -1), owners)


def owner_of_tokens(layout: Layout) -> Array:
    """The shard of every token, int64 [num_tokens]."""
    owner = np.zeros(layout.num_tokens, np.int64)
    for shard in range(layout.world_size):
        owner[layout.rows(shard)] = shard
    return owner


def _owners_of_cells(owner: Array, edges: Array, n: int) -> Array:
    """Return an owner for each cell, so that ranks get cells in proportion to their tokens."""
    chosen = np.zeros(len(edges) - 1, np.int64)
    due = np.zeros(n)
    for i, (start, stop) in enumerate(pairwise(edges.tolist())):
        share = np.bincount(owner[start:stop], minlength=n) / (stop - start)
        due += share
        chosen[i] = np.where(share > 0, due, -np.inf).argmax()
        due[chosen[i]] -= 1
    return chosen


def _computed(plan: Plan, layout: Layout, edges: Array, owners: Array) -> Array:
    """Return the rank that computes each cell, looked up at a few of its tokens.

    Cells that none of these tokens show are given to the owner of their queries.
    """
    sides = shard_layouts(plan, layout)
    (table,) = assigned(plan, 1, range(plan.world_size))
    q_shard, k_shard = (owner_of_tokens(side) for side in sides)
    sampled_tokens = [edges[:-1] + (part * np.diff(edges)).astype(np.int64) for part in SAMPLES]
    ranks = np.full((len(owners), len(owners)), -1)
    for q, k in ((q, k) for q in sampled_tokens for k in sampled_tokens):
        computing_ranks = table[np.ix_(q_shard[q], k_shard[k])]
        ranks = np.where(ranks < 0, computing_ranks, ranks)
    return np.where(ranks < 0, owners[:, None], ranks)


def assigned(plan: Plan, groups: int, ranks: Iterable[int]) -> list[Array]:
    """int32 [query shards, KV shards] per head group: which of the ranks computes it, -1: none."""
    shape = [plan.num_shards(side) for side in Side]
    tables = [np.full(shape, -1, np.int32) for _ in range(groups)]
    for rank in ranks:
        for tile in (tile for step in plan.rank_steps(rank) for tile in step.tiles):
            if tile.heads < groups:
                tables[tile.heads][np.ix_(tile.q, tile.kv)] = rank
    return tables


INCHES, TABLE, DPI = 3.6, 3.0, 120  # width; that of the table, 360 pixels at a whole one
LEFT, BELOW = 0.3, 0.24  # inches beside and below the table, for the names of its axes
INK, QUIET, FRAME = (GROUNDS[name][0] for name in ("ink", "quiet", "frame"))
FAINTEST = 0.3  # of a colour, where a cell has any allowed pair
STRIP = 1 / 30  # of the table's side
LEVELS = 5  # of paleness: few, so that a picture of many partial cells stays small
NUMBERED = 16  # ranks up to which a key names them


def colours(n: int) -> np.ndarray:
    """Return red, green and blue of every rank, float [n, 3]."""
    return np.array([rgb(colour) for colour in rank_colours(n)])


def painted(mask_view: MaskView, n: int) -> np.ndarray:
    """float [cells, cells, 3]: the colour of who computes a cell, paler where less is allowed."""
    level = (np.ceil(mask_view.shares * LEVELS) - 1) / (LEVELS - 1)
    strength = np.where(mask_view.shares > 0, FAINTEST + (1 - FAINTEST) * level, 0)[..., None]
    return 1 - strength * (1 - colours(n)[mask_view.ranks])


def draw(mask_view: MaskView, n: int, title: tuple[str, ...], path: Path) -> None:
    """Write a PNG.

    Args:
        n: number of ranks.
        title: lines; the first is the name.
    """
    require("matplotlib", "a picture of a mask")
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    side = (1 + 2 * STRIP) * TABLE
    top, foot = 0.2 * (len(title) - 1) + 0.4, BELOW + (0.24 if n <= NUMBERED else 0.04)
    height = side + top + foot
    figure = Figure(figsize=(INCHES, height), dpi=DPI)
    axes = figure.add_axes((LEFT / INCHES, foot / height, side / INCHES, side / height))
    axes.axis("off")
    axes.imshow(painted(mask_view, n), extent=(0, 1, 1, 0), interpolation="nearest")
    owned = colours(n)[mask_view.owners]
    axes.imshow(owned[:, None], extent=(-2 * STRIP, -STRIP, 1, 0), interpolation="nearest")
    axes.imshow(owned[None], extent=(0, 1, -STRIP, -2 * STRIP), interpolation="nearest")
    axes.set(xlim=(-2 * STRIP, 1), ylim=(1, -2 * STRIP), aspect="equal")
    frame = Rectangle((0, 0), 1, 1, fill=False, linewidth=0.6, edgecolor=FRAME, clip_on=False)
    axes.add_patch(frame)
    for i, line in enumerate(title):
        y = 1 - (0.17 + 0.2 * i) / height
        weight, size = ("bold", 9) if i == 0 else ("normal", 7)
        looks = {"fontsize": size, "fontweight": weight, "color": INK}
        figure.text(0.5, y, line, ha="center", va="center", **looks)
    names = {"fontsize": 7.5, "color": QUIET, "ha": "center", "va": "center"}
    last = f"token 0 to {mask_view.edges[-1] - 1:,}"
    middle = (LEFT + side / 2 + STRIP * TABLE) / INCHES
    figure.text(middle, (foot - BELOW / 2) / height, f"keys, {last}", **names)
    down = (foot + TABLE / 2) / height
    figure.text(LEFT / 2 / INCHES, down, f"queries, {last}", rotation=90, **names)
    if n <= NUMBERED:
        _key(figure, n, height)
    figure.savefig(path, metadata={"Software": None}, pil_kwargs={"optimize": True})


def _key(figure: Figure, n: int, height: float) -> None:
    """A numbered square for every rank, below the table."""
    from matplotlib.patches import Rectangle

    width = 0.19 / INCHES
    for rank, colour in enumerate(rank_colours(n)):
        left = 0.5 + (rank - n / 2) * width
        box = Rectangle((left, 0.07 / height), width * 0.92, 0.15 / height, color=colour)
        figure.add_artist(box)
        place = left + width * 0.46, 0.14 / height, str(rank)
        figure.text(*place, ha="center", va="center", fontsize=6.5, color=ink_on(colour))

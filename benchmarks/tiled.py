"""What `tiled` moves, beside the best zigzag mesh: the mean and the busiest rank.

    python benchmarks/tiled.py --causal [--ranks 64,256] [--json]
    python benchmarks/tiled.py --picture docs/img/tiled_causal.png

Bytes are those of the plan that attention runs (tw.volume; received ones counted alike): bf16,
head_dim 128, lse and delta included. One plan serves both passes. The mesh is the best a x b tile
of that pass: x (2 + l) + y 2 r shards in forward, x (3 + 2 l) + y 4 r in backward. Pruning spares
the mesh's mean, not its busiest rank, some halves of KV shards: "pruned" is our mean beside that of
the best mesh so pruned.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

import tilewise as tw
from tilewise.arguments import require_range
from tilewise_tools.doctor import require
from tilewise_tools.mask_report.figures import moved
from tilewise_tools.naming import Parser, new_file, run_script, whole_numbers
from tilewise_verify.palette import chart_style, rank_colours

RANKS = (8, 16, 32, 48, 64, 96, 128, 256)
HEADS = ((64, 64), (64, 16), (64, 8))  # query heads, KV heads: MHA, 32:8 as well, 64:8
TOKENS, HEAD_DIM = 1024, 128  # per rank; the ratios do not depend on either


class Row(NamedTuple):
    """Bytes of one pass, as multiples of the best mesh's on every rank; area as max / mean."""

    ranks: int
    num_heads: int
    num_kv_heads: int
    backward: bool
    mean: float
    sent: float
    received: float
    pruned: float | None
    area: float
    steps: int
    seconds: float


def workload(n: int, num_heads: int, num_kv_heads: int, layout: str = "contiguous") -> tw.Workload:
    return tw.Workload(
        n * TOKENS, num_heads, num_kv_heads, HEAD_DIM, mask=tw.Causal(), layout=layout
    )


def mesh_bytes(n: int, r: float, backward: bool, a: int) -> float:
    """What every rank of an a x n / a zigzag mesh sends and receives, in query shards."""
    x, y, lse = a - 1, n // a - 1, 4 / (2 * HEAD_DIM)
    return x * (3 + 2 * lse) + y * 4 * r if backward else x * (2 + lse) + y * 2 * r


def best_mesh(n: int, r: float, backward: bool) -> float:
    return min(mesh_bytes(n, r, backward, a) for a in range(1, n + 1) if n % a == 0)


def pruned_mesh(work: tw.Workload, n: int, r: float, backward: bool) -> float:
    """Mean bytes of the best pruned mesh, the unread halves of its KV shards left out."""
    near = [
        a
        for a in range(1, n + 1)
        if n % a == 0 and mesh_bytes(n, r, backward, a) < 1.35 * best_mesh(n, r, backward)
    ]
    return min(float(np.mean(tw.volume(tw.mesh(n, q_tile=a), work)[backward])) for a in near)


def rows(n: int, num_heads: int, num_kv_heads: int, prune: bool) -> Iterator[Row]:
    """Both passes of one plan."""
    work, zigzag = (workload(n, num_heads, num_kv_heads, x) for x in ("contiguous", "zigzag"))
    layout, r = work.layout_for(n), num_kv_heads / num_heads
    start = time.process_time()
    plan = tw.tiled(tw.Causal(), layout, kv_bytes=2 * r)
    steps = max(len(plan.rank_steps(rank)) for rank in range(n))
    seconds = time.process_time() - start
    for backward in (False, True):
        found = moved(plan, work, backward=backward)
        mesh = best_mesh(n, r, backward) * TOKENS * num_heads * HEAD_DIM * 2
        yield Row(
            n,
            num_heads,
            num_kv_heads,
            backward,
            float(np.mean(found.sent)) / mesh,
            max(found.sent) / mesh,
            max(found.received) / mesh,
            float(np.mean(found.sent)) / pruned_mesh(zigzag, n, r, backward) if prune else None,
            found.imbalance,
            steps,
            seconds,
        )


def line(row: Row) -> str:
    pruned = "" if row.pruned is None else f"{row.pruned:.3f}"
    return (
        f"{row.ranks:5} {row.num_heads:4}:{row.num_kv_heads:<3} "
        f"{'backward' if row.backward else 'forward':8} {row.mean:6.3f} {row.sent:6.3f} "
        f"{row.received:9.3f} {pruned:>7} {row.area:6.3f} {row.steps:6} {row.seconds:8.2f}"
    )


def picture(path: Path) -> None:
    """Who computes what on 32 ranks, one colour a rank, for two ratios of heads."""
    require("matplotlib", "--picture")
    from matplotlib import rcParams
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    n = 32
    shades = ListedColormap(rank_colours(n))
    rcParams.update(chart_style())
    layout = tw.contiguous(n * 4, n)
    figure = Figure(figsize=(9, 4.6))
    titles = {2.0: "as many KV heads as query heads", 0.5: "4 query heads per KV head"}
    for axes, (kv_bytes, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        table = np.full((n * 4, n * 4), np.nan)
        plan = tw.tiled(tw.Causal(), layout, kv_bytes=kv_bytes)
        for rank in range(n):
            for step in plan.rank_steps(rank):
                for tile in step.tiles:
                    table[np.ix_(tile.q, tile.kv)] = rank
        table[np.triu_indices(n * 4, 1)] = np.nan
        axes.imshow(table, cmap=shades, interpolation="nearest", extent=(0, n, n, 0))
        axes.set(title=title, xlabel="key shard")
        axes.set_ylabel("query shard")
        axes.grid(visible=False)
    figure.tight_layout()
    figure.savefig(path, dpi=80, metadata={"Software": None})


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--causal", action="store_true", help="the table (the default)")
    parser.add_argument(
        "--picture", type=new_file, metavar="PNG", help="draw who computes what instead"
    )
    parser.add_argument("--ranks", type=whole_numbers, default=",".join(map(str, RANKS)))
    parser.add_argument("--no-pruned", action="store_true", help="skip the pruned meshes")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    require_range("--ranks", min(given.ranks), least=2)
    if given.picture:
        picture(given.picture)
        return
    if not given.json:
        print("ranks  heads  pass       mean   sent  received  pruned   area  steps  seconds")
    for n in given.ranks:
        for heads in HEADS:
            for row in rows(n, *heads, prune=not given.no_pruned):
                print(json.dumps(row._asdict()) if given.json else line(row), flush=True)


if __name__ == "__main__":
    run_script(main)

"""How far mesh schedules are from the best possible program: time over the optimum.

    python benchmarks/greedy.py [--tiles 2x4,4x8] [--ratios 0.5,1,2] [--every] [--json]

A tile of a query shards x b KV shards on one port, bytes as in
strategies/mesh_schedules/model.py: backward doubles what queries carry and sends KV partials
too. The ratio is all blocks' seconds over all messages'. The optimum is that of mesh_optimum.py.
"greedy" is the default schedule, "paced"
greedy for that very ratio, "best" the best of these, "eager", "kv_first" and "gather".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.mesh_optimum import optimum
from tilewise.arguments import require_range
from tilewise.plan.payload import ShardWeights
from tilewise.strategies.mesh_schedules.greedy import greedy_tile_steps, stepwise_tile_steps
from tilewise.strategies.mesh_schedules.model import seconds_of, transfer_bytes
from tilewise_tools.naming import Parser, run_script

TILES = tuple((a, b) for a in (2, 3, 4) for b in range(2, 9))
RATIOS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 0.7, 1.0, 1.4, 2.0, 4.0, 8.0, 16.0)
KV_BYTES = (2.0, 0.5, 0.25)  # MHA; 4 and 8 query heads a KV head


class Row(NamedTuple):
    """Times of one tile at one ratio, as multiples of the optimum (of a bound if not proven)."""

    rows: int
    columns: int
    kv_bytes: float
    backward: bool
    ratio: float
    proven: bool
    greedy: float
    paced: float
    best: float
    best_schedule: str


def costs_of(kv_bytes: float, backward: bool) -> ShardWeights:
    return ShardWeights(2, kv_bytes, 1, kv_bytes) if backward else ShardWeights(1, kv_bytes, 1, 0)


def measure(shape: tuple[int, int], costs: ShardWeights, ratio: float) -> Row:
    blocks = shape[0] * shape[1]
    total = transfer_bytes(shape, costs)
    block = max(1, round(64 * ratio * total / blocks)) / 64  # small numbers for the solver
    schedules = {
        "greedy": greedy_tile_steps(shape, costs),
        "paced": greedy_tile_steps(shape, costs, pace=block * blocks / total),
        "eager": stepwise_tile_steps(*shape, "eager", costs),
        "kv_first": stepwise_tile_steps(*shape, "kv_first", costs),
    }
    times = {name: seconds_of(tile_steps, costs, block) for name, tile_steps in schedules.items()}
    times["gather"] = total + blocks * block
    best = min(times, key=lambda name: times[name])
    least = optimum(shape, costs, block, times[best])
    greedy, paced, fastest = (times[name] / least.seconds for name in ("greedy", "paced", best))
    what = *shape, costs.kv, costs.kv_partial > 0, ratio, least.proven
    return Row(*what, greedy, paced, fastest, best)


def table(tiles: list[tuple[int, int]], ratios: list[float]) -> Iterator[Row]:
    for shape in tiles:
        for kv_bytes in KV_BYTES:
            for backward in (False, True):
                for ratio in ratios:
                    yield measure(shape, costs_of(kv_bytes, backward), ratio)


def line(row: Row) -> str:
    return (
        f"{row.rows}x{row.columns:<3} {row.kv_bytes:8} "
        f"{'backward' if row.backward else 'forward':8} {row.ratio:7.4f} {row.greedy:7.3f} "
        f"{row.paced:6.3f} {row.best:6.3f} {row.best_schedule:10}"
        f"{'' if row.proven else ' (over a bound)'}"
    )


def summary(name: str, rows: list[Row]) -> str:
    cells = []
    for what in ("greedy", "paced", "best"):
        over = [getattr(row, what) for row in rows]
        within = sum(x <= 1.05 for x in over)
        cells.append(f"{max(over):.3f} {sum(over) / len(over):.4f} {within:6}")
    unproven = sum(not row.proven for row in rows)
    return f"{name:5} {len(rows):5} {unproven:8} | {' | '.join(cells)}"


def print_table(tiles: list[tuple[int, int]], ratios: list[float], every: bool) -> None:
    print("tile   rows unproven | greedy: worst, mean, within 1.05 | paced | best")
    rows = list[Row]()
    for shape in tiles:
        rows += (found := list(table([shape], ratios)))
        if every:
            print(*map(line, found), sep="\n")
        print(summary(f"{shape[0]}x{shape[1]}", found), flush=True)
    print(summary("all", rows))


def read_tile(text: str) -> tuple[int, int]:
    """Rows and columns of a tile that --tiles names, as in 4x8."""
    match = re.fullmatch(r"([1-9]\d?)x([1-9]\d?)", text)
    if not match:
        raise ValueError(f"--tiles ({text!r}) must be rows x columns from 1 to 99, such as 4x8")
    return int(match[1]), int(match[2])


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiles", default=",".join(f"{a}x{b}" for a, b in TILES))
    parser.add_argument("--ratios", default=",".join(map(str, RATIOS)))
    parser.add_argument("--every", action="store_true", help="print every row, not only tiles")
    parser.add_argument("--json", action="store_true", help="every row as a line of JSON")
    given = parser.parse_args()
    tiles = [read_tile(tile) for tile in given.tiles.split(",")]
    try:
        ratios = [float(ratio) for ratio in given.ratios.split(",")]
    except ValueError:
        raise ValueError(f"--ratios ({given.ratios!r}) must be numbers, as in 0.5,1,2") from None
    require_range("--ratios", min(ratios), least=0)
    if given.json:
        for row in table(tiles, ratios):
            print(json.dumps(row._asdict()), flush=True)
    else:
        print_table(tiles, ratios, given.every)


if __name__ == "__main__":
    run_script(main)

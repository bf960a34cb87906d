"""How far mesh schedules are from the best possible: time over the optimum, by CP-SAT.

    python benchmarks/greedy.py [--tiles 2x4,4x8] [--ratios 0.5,1,2] [--json]

A tile of a query shards x b KV shards on one port, bytes as in mesh_pacing.py: backward doubles
what queries carry and sends KV partials too. The ratio is all blocks' seconds over all messages'.
The optimum is a lower bound for the simulator (mesh_optimal.py), so 1.05 is 5 % at most. "greedy"
is the default schedule, "best" the best of it, "eager"
and "kv_first".
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from tilewise.strategies.mesh_optimal import optimum
from tilewise.strategies.mesh_pacing import Beat, Costs, seconds_of
from tilewise.strategies.mesh_schedule import paced_beats, stepwise_beats

TILES = ((2, 2), (2, 4), (2, 8), (3, 3), (3, 5), (3, 8), (4, 4), (4, 6), (4, 8))
RATIOS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 0.7, 1.0, 1.4, 2.0, 4.0, 8.0, 16.0)
KV_BYTES = (2.0, 0.5)  # MHA; 4 query heads a KV head


class Row(NamedTuple):
    """Times of one tile at one ratio, as multiples of the optimum."""

    rows: int
    columns: int
    kv_bytes: float
    backward: bool
    ratio: float
    proven: bool
    greedy: float
    best: float
    best_schedule: str


def costs_of(kv_bytes: float, backward: bool) -> Costs:
    return Costs(2, kv_bytes, 1, kv_bytes) if backward else Costs(1, kv_bytes, 1, 0)


@cache
def schedules(rows: int, columns: int, costs: Costs) -> dict[str, list[Beat]]:
    steps = {name: stepwise_beats(rows, columns, name, costs) for name in ("eager", "kv_first")}
    return {"greedy": paced_beats(rows, columns, costs), **steps}


def measure(rows: int, columns: int, costs: Costs, ratio: float) -> Row:
    moved = (rows - 1) * (costs.q + costs.q_partial)
    moved += (columns - 1) * (costs.kv + costs.kv_partial)
    block = ratio * moved / (rows * columns)
    block = max(1, round(block * 64)) / 64  # few different times: small numbers for the solver
    least = optimum(rows, columns, costs, block)
    times = {
        name: seconds_of(beats, costs, block) / least.seconds
        for name, beats in schedules(rows, columns, costs).items()
    }
    best = min(times, key=lambda name: times[name])
    backward = costs.kv_partial > 0
    return Row(
        *(rows, columns, costs.kv, backward, ratio),
        *(least.proven, times["greedy"], times[best], best),
    )


def table(tiles: list[tuple[int, int]], ratios: list[float]) -> Iterator[Row]:
    for rows, columns in tiles:
        for kv_bytes in KV_BYTES:
            for backward in (False, True):
                for ratio in ratios:
                    yield measure(rows, columns, costs_of(kv_bytes, backward), ratio)


def line(row: Row) -> str:
    return (
        f"{row.rows}x{row.columns:<3} {row.kv_bytes:8} "
        f"{'backward' if row.backward else 'forward':8} {row.ratio:7.4f} {row.greedy:7.3f} "
        f"{row.best:6.3f} {row.best_schedule:10}{'' if row.proven else ' (bound not proven)'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiles", default=",".join(f"{a}x{b}" for a, b in TILES))
    parser.add_argument("--ratios", default=",".join(map(str, RATIOS)))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    tiles = [(int(a), int(b)) for a, b in (tile.split("x") for tile in given.tiles.split(","))]
    if not given.json:
        print("tile  kv_bytes pass       ratio  greedy   best schedule")
    rows = []
    for row in table(tiles, [float(ratio) for ratio in given.ratios.split(",")]):
        rows.append(row)
        print(json.dumps(row._asdict()) if given.json else line(row), flush=True)
    if not given.json:
        for what in ("greedy", "best"):
            over = [getattr(row, what) for row in rows]
            near = sum(x <= 1.05 for x in over)
            print(f"{what}: {max(over):.3f} at most, {near} of {len(over)} within 1.05")


if __name__ == "__main__":
    main()

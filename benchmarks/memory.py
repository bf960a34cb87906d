"""Memory against time of a mesh whose ranks may hold few shards.

    python benchmarks/memory.py [--ranks 256] [--q-tile 8] [--machine h100x8] [--json]
    python benchmarks/memory.py --picture docs/img/mesh_memory.png

Simulated: forward and backward each with its own schedule under the same bound; peak bytes are the
busiest rank's. The last row holds all shards of its tile.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import tilewise as tw
from tilewise.expressions import read_heads
from tilewise.simulation.peak_memory import PassMemory
from tilewise.simulation.simulator import simulate_pass
from tilewise.strategies.mesh_schedules.greedy import least_held
from tilewise_tools.doctor import require
from tilewise_tools.naming import Parser, naming, new_file, require_png, run_script, whole_number
from tilewise_verify.palette import chart_style


class Row(NamedTuple):
    """One bound: seconds and peak bytes of the passes."""

    held: int
    forward_seconds: float
    forward_bytes: int
    backward_seconds: float
    backward_bytes: int


def rows(work: tw.Workload, machine: tw.Machine, n: int, q_tile: int) -> Iterator[Row]:
    kv_bytes = 2 * work.num_kv_heads / work.num_heads
    shape = q_tile, n // q_tile
    for held in range(least_held(*shape), sum(shape) + 1):
        found: list[float | int] = []
        for backward in (False, True):
            plan = tw.mesh(n, q_tile, kv_bytes=kv_bytes, backward=backward, held=held)
            timeline, _ = simulate_pass(plan, work, machine, backward)
            memory = PassMemory(work.resolve(plan), backward=backward)
            found += [timeline.seconds, memory.peak_bytes]
        yield Row(held, *found)  # pyright: ignore[reportArgumentType]


def picture(path: Path, table: list[Row], title: str) -> None:
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams.update(chart_style())
    figure = Figure(figsize=(7, 3.6))
    axes = figure.subplots()
    for what, points in (
        ("forward", [(r.forward_bytes, r.forward_seconds) for r in table]),
        ("backward", [(r.backward_bytes, r.backward_seconds) for r in table]),
    ):
        size, seconds = zip(*sorted(points), strict=True)
        axes.plot([x / 1e9 for x in size], [x * 1e3 for x in seconds], "o-", ms=3, label=what)
    axes.set(xlabel="peak memory of a rank, GB", ylabel="milliseconds", title=title)
    axes.set_ylim(bottom=0)
    axes.legend(loc="center right")
    figure.tight_layout()
    figure.savefig(path, dpi=80, metadata={"Software": None})


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=whole_number, default=256)
    parser.add_argument("--q-tile", type=whole_number, default=8)
    parser.add_argument("--machine", default="h100x8")
    parser.add_argument("--num-tokens", type=whole_number, default=1 << 20)
    parser.add_argument("--heads", default="32:32", help="query heads : KV heads")
    parser.add_argument("--picture", type=new_file, metavar="PNG", help="draw the curve too")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.picture:
        require("matplotlib", "--picture")
        require_png("--picture", given.picture)
    with naming("--heads"):
        heads, kv_heads = read_heads(given.heads)
        work = tw.Workload(given.num_tokens, heads, kv_heads, 128, mask=tw.Causal())
    with naming("--machine"):
        machine = tw.Machine.preset(given.machine)
    table = []
    for row in rows(work, machine, given.ranks, given.q_tile):
        if not table and not given.json:
            print("held  forward ms  forward MB  backward ms  backward MB")
        table.append(row)
        text = (
            f"{row.held:4} {row.forward_seconds * 1e3:11.3f} {row.forward_bytes / 1e6:11.1f} "
            f"{row.backward_seconds * 1e3:12.3f} {row.backward_bytes / 1e6:12.1f}"
        )
        print(json.dumps(row._asdict()) if given.json else text, flush=True)
    if given.picture:
        shape = f"{given.q_tile} x {given.ranks // given.q_tile}"
        picture(given.picture, table, f"mesh {shape}, {given.machine}, {given.num_tokens} tokens")


if __name__ == "__main__":
    run_script(main, world_size="--ranks", num_tokens="--num-tokens", q_tile="--q-tile")

"""Pictures of the strategies' pages, drawn from small plans: what is computed and sent, and when.

    python -m benchmarks.strategy_pictures docs/img

Two SVG files a strategy. `plan_<name>.svg`: left the table of query shards x KV shards, a colour
per rank that computes the cell; right the ranks' steps, with an arrow for each transfer.
`timeline_<name>.svg`: both passes as simulated on two nodes that have one NIC each.
"""

from collections.abc import Iterator
from dataclasses import replace
from html import escape
from pathlib import Path

import tilewise as tw
from tilewise_tools.naming import Parser, run_script
from tilewise_tools.report.drawing import colour
from tilewise_tools.report.timeline import LANE_NAMES, LANES, OWN, timeline
from tilewise_tools.report.words import in_words, quantity
from tilewise_verify.palette import GROUNDS, SERIES, ink_on, paler, rank_colours

DOCUMENTS = tw.Causal() & tw.Document([0, 96, 128, 288, 320, 512])
TOKENS = 512
PLANS = {
    "ring": tw.ring(4),
    "all_gather": tw.all_gather(4),
    "double_ring": tw.double_ring(2, 2),
    "balanced_ring": tw.balanced_ring(5),
    "attention2d": tw.attention2d(2, 2),
    "mesh": tw.mesh(6, q_tile=2),
    "ulysses": tw.ulysses(2, inner=tw.ring(2)),
    "hierarchical": tw.hierarchical(tw.ring(2, moves="q"), tw.ring(2)),
    "needed": tw.needed(DOCUMENTS, tw.balanced(DOCUMENTS, TOKENS, 4, chunk=32)),
    "tiled": tw.tiled(DOCUMENTS, tw.tiled_layout(DOCUMENTS, TOKENS, 4)),
    "tree": tw.tree(4),
}
CELL, MOST_CELLS, BOX, ROW = 34, 8, (128, 30), 62  # pixels; shards that are written out
Q, KV, INK, QUIET = SERIES[1][0], SERIES[0][0], GROUNDS["ink"][0], GROUNDS["quiet"][0]


def svg(width: float, height: float, parts: list[str], label: str) -> str:
    """A drawing on a light ground, so that it can be read on dark pages too."""
    heads = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
        f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{shade}"/></marker>'
        for name, shade in (("q", Q), ("kv", KV))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'role="img" aria-label="{escape(label, quote=True)}" font-family="system-ui,sans-serif" '
        f'font-size="11"><defs>{heads}</defs><rect width="100%" height="100%" rx="8" '
        f'fill="#fbfcfe"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def box(x: float, y: float, size: tuple[float, float], fill: str, more: str = "") -> str:
    wide, high = size
    place = f'x="{x:.4g}" y="{y:.4g}" width="{wide:.4g}" height="{high:.4g}"'
    return f'<rect {place} fill="{fill}" {more}/>'


def text(x: float, y: float, words: str, fill: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{fill}" text-anchor="{anchor}">{escape(words)}</text>'


def shades(n: int) -> list[str]:
    """The ranks' colours, a little paler than in other pictures: large areas."""
    return [paler(colour, 0.15) for colour in rank_colours(n)]


def shards(numbers: tuple[int, ...]) -> str:
    if len(numbers) > 2:
        return f"{numbers[0]}..{numbers[-1]}" if len(numbers) > 3 else ",".join(map(str, numbers))
    return ",".join(map(str, numbers))


def table(plan: tw.Plan, left: float, top: float) -> Iterator[str]:
    """Who computes which cell; head groups side by side in a cell."""
    groups, fills = plan.num_head_groups, shades(plan.world_size)
    rows, columns = (len(holders) for holders in plan.owners)
    side = CELL if max(rows, columns) <= MOST_CELLS else CELL * MOST_CELLS / max(rows, columns)
    done: dict[tuple[int, int, int], int] = {}
    for rank in range(plan.world_size):
        for tile in (tile for step in plan.rank_steps(rank) for tile in step.tiles):
            done |= {(q, k, tile.heads): rank for q in tile.q for k in tile.kv}
    wide = side / groups
    for (q, k, heads), rank in sorted(done.items()):
        x, y = left + k * side + heads * wide, top + q * side
        yield box(x, y, (wide, side), fills[rank], 'stroke="#fff"')
        if side == CELL:
            yield text(x + wide / 2, y + side / 2 + 4, str(rank), ink_on(fills[rank]))
    if side == CELL:
        yield from (text(left - 12, top + q * side + 21, f"q{q}", Q) for q in range(rows))
        yield from (text(left + (k + 0.5) * side, top - 6, f"kv{k}", KV) for k in range(columns))
    else:
        yield text(left - 12, top + 12, "q", Q)
        yield text(left + 8, top - 6, "kv", KV)
    yield text(left, top + rows * side + 18, "number and colour: the rank", QUIET, "start")


def steps(plan: tw.Plan, left: float, top: float) -> Iterator[str]:
    """Time runs downward: a box per rank and step, an arrow per transfer to the next step."""
    wide, high = BOX
    fills = shades(plan.world_size)
    every = [plan.rank_steps(rank) for rank in range(plan.world_size)]

    def place(rank: int, number: int) -> tuple[float, float]:
        return left + rank * (wide + 14), top + number * ROW

    for rank, mine in enumerate(every):
        yield text(place(rank, 0)[0] + wide / 2, top - 8, f"rank {rank}")
        for number, step in enumerate(mine):
            x, y = place(rank, number)
            fill = fills[rank] if step.tiles else "#eef1f5"
            yield box(x, y, BOX, fill, 'rx="5"')
            said = " ".join(f"q{shards(t.q)} x kv{shards(t.kv)}" for t in step.tiles[:2])
            more = f" +{len(step.tiles) - 2}" * (len(step.tiles) > 2)
            yield text(x + wide / 2, y + 19, said[:19] + more, ink_on(fill))
            by_peer: dict[tuple[int, str], list[tw.plan.Transfer]] = {}
            for transfer in step.sends:
                kind = "q" if transfer.item.side is tw.plan.Side.Q else "kv"
                by_peer.setdefault((transfer.dst, kind), []).append(transfer)
            for index, ((dst, kind), transfers) in enumerate(sorted(by_peer.items())):
                x1 = x + wide * (index + 1) / (len(by_peer) + 1)
                x2, y2 = place(dst, number + 1)
                x2 += wide * (0.3 if x1 < x2 else 0.7)
                dash = (
                    ""
                    if any(transfer.item.role is tw.plan.Role.OPERAND for transfer in transfers)
                    else "4 3"
                )
                shade = Q if kind == "q" else KV
                yield (
                    f'<path d="M{x1:.4g} {y + high:.4g}L{x2:.4g} {y2 - 1:.4g}" stroke="{shade}" '
                    f'stroke-dasharray="{dash}" marker-end="url(#{kind})" stroke-width="1.4"/>'
                )
    foot = place(0, max(map(len, every)))[1] + 18
    said = "orange: query side, blue: keys and values; dashed: partial results, on their way home"
    yield text(left, foot, said, QUIET, "start")


def drawn(plan: tw.Plan) -> str:
    rows = len(plan.owners[0])
    big = rows <= MOST_CELLS
    left = 34 + (CELL * len(plan.owners[1]) if big else CELL * MOST_CELLS) + 50
    number = max(len(plan.rank_steps(rank)) for rank in range(plan.world_size))
    height = max(64 + (rows if big else MOST_CELLS) * CELL, 62 + number * ROW)
    parts = [*table(plan, 34, 30), *steps(plan, left, 30)]
    width = max(left + plan.world_size * (BOX[0] + 14) + 10, left + 380)
    words = f"{in_words(plan.name.partition('((')[0])}: who computes which cells, and what is sent"
    return svg(width, height, parts, words)


def times(plan: tw.Plan) -> str:
    """Two nodes of NVLink with one NIC each; a rank has 8192 tokens."""
    h100 = tw.Machine.preset("h100x8-1nic")
    n = plan.world_size
    machine = replace(h100, node_size=max(2, n // 2 if n % 2 == 0 else n), nics=1)
    mask, layout = plan.made_for or (tw.Full(), tw.contiguous(8192 * n, n))
    if plan.made_for:  # short documents: slower links, so that messages can be seen
        machine = machine.scaled(0.3)
    if plan.name.startswith("balanced_ring"):
        mask = tw.Causal()
    work = tw.Workload(layout.num_tokens, 32, 8, 128, mask=mask, layout=layout)
    found = tw.simulate(plan, work, machine, exact=True)
    chart = timeline(found)
    wide, high, left = 760, 40, 60
    scale = wide / chart.end
    parts = []
    links = [lane for lane in chart.lanes if lane not in OWN]
    for row, (rank, _) in enumerate(chart.ranks):
        parts.append(text(left - 8, 44 + row * high + 12, f"rank {rank}", anchor="end"))
    for bar in chart.bars:
        y = 44 + bar.row * high + (0 if bar.lane in OWN else 19 + 7 * links.index(bar.lane))
        thick = 17 if bar.lane in OWN else 6
        size, fill = (max(bar.seconds * scale, 0.6), thick), colour(LANES[bar.lane])
        edge = 'stroke="#fbfcfe" stroke-width="0.4"'
        parts.append(box(left + bar.start * scale, y, size, fill, edge))
    turn = left + chart.turn * scale
    foot = 44 + len(chart.ranks) * high
    parts.append(f'<path d="M{turn:.1f} 26V{foot}" stroke="{QUIET}" stroke-dasharray="3 3"/>')
    for x, name, seconds in (
        (left, "forward", found.forward_seconds),
        (turn + 6, "backward", found.backward_seconds),
    ):
        parts.append(text(x, 36, f"{name} {quantity(seconds, 's')}", anchor="start"))
    x = left
    for lane in chart.lanes:
        name = LANE_NAMES.get(lane, lane)
        parts.append(box(x, 8, (10, 10), colour(LANES[lane])))
        parts.append(text(x + 15, 17, name, anchor="start"))
        x += 40 + 7 * len(name)
    return svg(
        left + wide + 16, foot + 10, parts, f"{in_words(plan.name.partition('((')[0])} in time"
    )


def main() -> None:
    arguments = Parser(description=__doc__)
    arguments.add_argument("folder", type=Path)
    folder = arguments.parse_args().folder
    if not folder.is_dir():
        arguments.error(f"folder: {folder} is no folder; make it first")
    for name, plan in PLANS.items():
        (folder / f"plan_{name}.svg").write_text(drawn(plan), encoding="utf-8")
        (folder / f"timeline_{name}.svg").write_text(times(plan), encoding="utf-8")


if __name__ == "__main__":
    run_script(main)

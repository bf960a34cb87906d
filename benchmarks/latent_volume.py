"""Bytes of latents against those of the keys and values that they stand for, per strategy.

    python benchmarks/latent_volume.py        # the table of docs/wires.md

The shape is DeepSeek-V3's: 128 heads of 192 (k) and 128 (v), a latent of 512, a rotary key of 64.
What the busiest rank sends in a forward and a backward pass is counted, of a full mask; a causal
one leaves out the same share of both.
"""

from collections.abc import Iterator
from typing import NamedTuple

import tilewise as tw
from tilewise_tools.naming import Parser

HEADS, HEAD_DIM, V_HEAD_DIM, LATENT = 128, 192, 128, 512 + 64
TOKENS = 1 << 18
LATENT_WIRE = tw.wire.Latent(
    num_kv_heads=HEADS, head_dim=HEAD_DIM, v_head_dim=V_HEAD_DIM, width=LATENT
)


class Row(NamedTuple):
    """Bytes that the busiest rank sends in both passes."""

    num_ranks: int
    strategy: str
    expanded: int
    latent: int

    @property
    def ratio(self) -> float:
        return self.expanded / self.latent


def plans(n: int) -> Iterator[tw.Plan]:
    """Plans for so many ranks, a square number."""
    side = round(n**0.5)
    yield tw.ring(n)
    yield tw.ring(n, moves="q")
    yield tw.all_gather(n)
    yield tw.mesh(n, q_tile=side, schedule="gather")
    yield tw.mesh(n, q_tile=2, schedule="gather")
    yield tw.ulysses(8, inner=tw.ring(n // 8))
    most = min(n, HEADS)
    yield tw.ulysses(most, inner=tw.ring(n // most)) if n > most else tw.ulysses(most)


def most_sent(plan: tw.Plan, wire: tw.wire.Latent | None) -> int:
    work = tw.Workload(TOKENS, HEADS, HEADS, HEAD_DIM, v_head_dim=V_HEAD_DIM, wire=wire)
    forward, backward = tw.volume(plan, work)
    return max(map(sum, zip(forward, backward, strict=True)))


def rows() -> list[Row]:
    return [
        Row(n, plan.name, most_sent(plan, None), most_sent(plan, LATENT_WIRE))
        for n in (64, 256)
        for plan in plans(n)
    ]


def table(found: list[Row]) -> str:
    lines = [
        "| ranks | strategy | k and v, GB | latents, GB | times fewer |",
        "|---:|---|---:|---:|---:|",
    ]
    for row in found:
        sizes = f"{row.expanded / 1e9:.2f} | {row.latent / 1e9:.2f} | {row.ratio:.1f}"
        lines.append(f"| {row.num_ranks} | `{row.strategy}` | {sizes} |")
    return "\n".join(lines)


if __name__ == "__main__":
    Parser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    print(table(rows()))

"""The tiled plan and layout of the plain causal mask."""

from collections.abc import Callable
from functools import cache

import numpy as np

from tilewise.layouts.layout import Layout, contiguous, zigzag
from tilewise.masks.base import Causal, Mask
from tilewise.plan.builder import RankBuilder, operand, partial
from tilewise.plan.ir import Plan, RankStep, Side, Traits
from tilewise.strategies.tiling.causal.blocks import areas, causal_blocks, foreign, score
from tilewise.strategies.tiling.causal.list_scheduling import ChunkBytes, Schedule, schedule
from tilewise.strategies.tiling.routing import LSE, touching


def script_of(schedule: Callable[[], Schedule], n: int) -> Callable[[int], tuple[RankStep, ...]]:
    """A pure function rank -> that rank's steps, whose shards are the schedule's chunks.

    Args:
        schedule: is called when the first rank's steps are asked for, and then no more.
    """

    @cache
    def by_rank():
        made_schedule = schedule()
        return made_schedule, touching(made_schedule.transfers, n)

    def script(rank: int) -> tuple[RankStep, ...]:
        (pieces, _, tiles), transfers = by_rank()
        s = RankBuilder(rank)
        for transfer in transfers[rank]:
            piece, s = pieces[transfer.piece], s.at(transfer.step)
            for chunk in range(piece.start, piece.stop):
                item = (partial if transfer.partial else operand)(piece.side, chunk)
                if transfer.src == rank:
                    s.send(item, transfer.dst)
                else:
                    s.recv(item, transfer.src)
        for step, row in enumerate(tiles):
            for cell in row[rank]:
                q, kv = ([c for i in cell[x] for c in range(*pieces[i][1:3])] for x in Side)
                s.at(step).tile(q, kv)
        return s.done()

    return script


CHUNKS = 4  # a shard, if it has so many tokens: areas within 3 % need so many, more cost messages


def suits(mask: Mask, layout: Layout) -> bool:
    """Return whether this construction is made for a mask and a layout."""
    n = layout.world_size
    return (
        mask == Causal() and layout.num_tokens >= n and layout == contiguous(layout.num_tokens, n)
    )


def triangle_plan(mask: Mask, layout: Layout, kv_bytes: float) -> Plan:
    """Equal areas and few, level bytes for a mask and a layout that suit; one plan, both passes.

    Args:
        kv_bytes: bytes of a KV shard per byte of a query shard, 2 num_kv_heads / num_heads.
    """
    n, c = layout.world_size, _num_chunks(layout)
    homes = tuple(chunk // c for chunk in range(n * c))
    sizes = [layout.size(rank) for rank in homes]
    cuts = tuple((size * (i % c) // c, size * (i % c + 1) // c) for i, size in enumerate(sizes))
    owners = tuple((home,) for home in homes)
    traits = Traits(made_for=(mask, layout), proven=True)
    name = f"tiled({mask!r}, contiguous({layout.num_tokens}, {n}), kv_bytes={float(kv_bytes)})"
    script = script_of(lambda: _schedule(n, c, homes, kv_bytes), n)
    return Plan(name, n, 1, (owners, owners), script=script, cuts=cuts, traits=traits)


def triangle_loads(layout: Layout, kv_bytes: float) -> tuple[np.ndarray, np.ndarray]:
    """For each rank of triangle_plan: units received in forward (rows of q), and allowed pairs."""
    n, c, rows = layout.world_size, _num_chunks(layout), layout.num_tokens / layout.world_size
    blocks = causal_blocks(n, c, *_costs(kv_bytes))
    received = (2 + LSE) * foreign(blocks, c, 0) + kv_bytes * foreign(blocks, c, 1)
    return rows * received, (rows / c) ** 2 * areas(blocks)


def triangle_layout(num_tokens: int, n: int, kv_bytes: float) -> Layout:
    """Neighbouring tokens on every rank, or zigzag where moving only keys and values costs less.

    That is so for few ranks and few KV heads: a foreign query shard costs as much as 1 / r foreign
    KV shards. Under zigzag rank i reads the keys of all but the last i of 2n half-shards.
    """
    layout = contiguous(num_tokens, n)
    if num_tokens < n:
        return layout
    c, (q_cost, kv_cost) = _num_chunks(layout), _costs(kv_bytes)
    tiled = score(causal_blocks(n, c, q_cost, kv_cost), c, q_cost, kv_cost)
    only_kv = kv_cost * ((n - 1) * 3 / 4 + (n - 1))
    return layout if tiled <= only_kv else zigzag(num_tokens, n)


def _num_chunks(layout: Layout) -> int:
    return min(CHUNKS, layout.num_tokens // layout.world_size)


def _passes(kv_bytes: float) -> tuple[ChunkBytes, ChunkBytes]:
    """Bytes of what travels of a shard, forward and backward, in those of a query shard."""
    forward = ChunkBytes(1.0, 1.0 + LSE, kv_bytes, 0.0)
    backward = ChunkBytes(2.0 + 2 * LSE, 1.0, kv_bytes, kv_bytes)
    return forward, backward


def _costs(kv_bytes: float) -> tuple[float, float]:
    """Bytes that one foreign Q (KV) shard costs in both passes together."""
    passes = _passes(kv_bytes)
    return sum(p.q + p.q_partial for p in passes), sum(p.kv + p.kv_partial for p in passes)


def _schedule(n: int, c: int, homes: tuple[int, ...], kv_bytes: float) -> Schedule:
    passes = _passes(kv_bytes)
    return schedule(
        causal_blocks(n, c, *_costs(kv_bytes)),
        homes,
        [ChunkBytes(*(x / c for x in costs)) for costs in passes],
        step_bytes=2 * sum(costs.q for costs in passes),
        max_chunks=max(1, c // 2),
    )

"""Ulysses: an all-to-all trades sequence shards for heads, then any plan runs per head group.

Rank = inner_rank * degree + head_rank. The ranks of one inner rank exchange their shards so that
each holds all of theirs for its own heads; the inner plan then runs between equal head ranks.
Source: DeepSpeed-Ulysses (arXiv 2309.14509); with an inner ring it is USP (2405.07719), with an
inner mesh a three-dimensional split of heads x queries x keys.
"""

from __future__ import annotations

from tilewise.plan import Plan, RankStep, Side, Transfer, own_shards
from tilewise.script import Script, operand, partial
from tilewise.strategies.ring import ring


def ulysses(degree: int, inner: Plan | None = None) -> Plan:
    """Split heads by degree around an inner plan (None: one rank).

    Bytes per rank: (degree - 1) / degree of one shard of each side and partial, and inner's.

    Args:
        degree: must divide num_heads, and divide or be divided by num_kv_heads; that is checked
            where head counts are known.
        inner: a plan over whole shards, each owned by one rank; its world size times degree is
            this plan's. Outer shard s belongs to inner shard s div degree.
    """
    inner = ring(1) if inner is None else inner
    if degree < 1:
        raise ValueError(f"degree ({degree}) must be at least 1")
    if inner.owners != own_shards(inner.world_size) or inner.cuts is not None:
        raise ValueError(
            f"ulysses needs an inner plan in which rank r owns shard r, unlike {inner.name}"
        )
    groups, n = inner.num_head_groups, degree * inner.world_size

    def widen(shards: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(shard * degree + part for shard in shards for part in range(degree))

    def script(rank: int) -> tuple[RankStep, ...]:
        s, (inner_rank, head_rank) = Script(rank), divmod(rank, degree)
        team = [peer for peer in widen((inner_rank,)) if peer != rank]

        def of(peer: int) -> range:
            """The head groups that a peer computes."""
            return range(peer % degree * groups, (peer % degree + 1) * groups)

        def copies(hop: Transfer):
            """One inner hop: the same for each of the inner shard's outer shards."""
            heads = head_rank * groups + hop.item.heads
            for outer in widen((hop.item.shard,)):
                item = hop.item._replace(shard=outer, heads=heads)
                yield item, hop.src * degree + head_rank, hop.dst * degree + head_rank

        for peer in team:
            for side in Side:
                for heads in of(peer):
                    s.send(operand(side, rank, heads), peer)
                for heads in of(rank):
                    s.recv(operand(side, peer, heads), peer)
        s.next()
        for step in inner.rank_steps(inner_rank):
            for tile in step.tiles:
                s.tile(widen(tile.q), widen(tile.kv), head_rank * groups + tile.heads)
            for hop in step.sends:
                for item, _, dst in copies(hop):
                    s.send(item, dst)
            for hop in step.recvs:
                for item, src, _ in copies(hop):
                    s.recv(item, src)
            s.next()
        for peer in team:
            for side in Side:
                for heads in of(rank):
                    s.send(partial(side, peer, heads), peer)
                for heads in of(peer):
                    s.recv(partial(side, rank, heads), peer)
        return s.done()

    name = (
        f"ulysses({degree}, inner={inner.name})" if inner.world_size > 1 else f"ulysses({degree})"
    )
    # Alone, what is gathered is as large as what was given away: keeping it takes no extra memory.
    save = "gathered" if inner.world_size == 1 else inner.default_save
    return Plan(name, n, degree * groups, own_shards(n), script=script, default_save=save)

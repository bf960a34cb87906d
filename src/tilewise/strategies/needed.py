"""Only what is needed: every rank computes its own queries, each k, v range goes only to readers.

The gradients return the way the values came. A rank's sources are dealt to a few stages of equal
size, nearest first, so that what has arrived is computed while the rest is under way.
Source: the group cast of MagiAttention (SandAI 2025).
"""

from tilewise.arguments import require_type
from tilewise.layouts.cells import cells
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Mask
from tilewise.plan.builder import RankBuilder, operand, partial
from tilewise.plan.ir import Plan, RankStep, Rows, Side, Traits, own_shards
from tilewise.plan.row_ranges import count_rows, whole_or

STAGES = 4


def needed(mask: Mask, layout: Layout) -> Plan:
    """Send each rank the rows of k and v that its queries see, and nothing else.

    Bytes: the fewest of all plans in which no query travels.

    Args:
        mask, layout: the plan is for these only; ranks own rows as layout says.
    """
    require_type(Layout, "layout", layout)
    require_type(Mask, "mask", mask).check_tokens(layout.num_tokens)
    n = layout.world_size
    table = cells(mask, layout, layout)
    readers: list[list[int]] = [[] for _ in range(n)]
    stages: list[list[list[int]]] = []
    for rank in range(n):
        sources = [(rank + d) % n for d in range(1, n) if (rank, (rank + d) % n) in table]
        for source in sources:
            readers[source].append(rank)
        stages.append(_dealt(sources, [count_rows(table[rank, s].k_rows) for s in sources]))

    def rows(reader: int, source: int) -> Rows | None:
        return whole_or(table[reader, source].k_rows, layout.size(source))

    def script(rank: int) -> tuple[RankStep, ...]:
        s = RankBuilder(rank)
        if (rank, rank) in table:
            s.tile((rank,), (rank,))
        for stage, sources in enumerate(stages[rank]):
            for source in sources:
                s.at(stage).recv(operand(Side.KV, source), source, rows(rank, source))
                s.at(stage + 2).send(partial(Side.KV, source), source, rows(rank, source))
            s.at(stage + 1).tile((rank,), sources)
        for reader in readers[rank]:
            stage = next(i for i, sources in enumerate(stages[reader]) if rank in sources)
            s.at(stage).send(operand(Side.KV, rank), reader, rows(reader, rank))
            s.at(stage + 2).recv(partial(Side.KV, rank), reader, rows(reader, rank))
        return s.done()

    name, traits = f"needed({mask!r}, {layout!r})", Traits(made_for=(mask, layout), proven=True)
    return Plan(name, n, 1, own_shards(n), script=script, traits=traits)


def _dealt(sources: list[int], sizes: list[int]) -> list[list[int]]:
    """Sources in order, in at most STAGES parts of about equal size."""
    total, so_far = sum(sizes), 0
    parts: dict[int, list[int]] = {}
    for source, size in zip(sources, sizes, strict=True):
        parts.setdefault(so_far * STAGES // total, []).append(source)
        so_far += size
    return list(parts.values())

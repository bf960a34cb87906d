"""Layers whose indexer chooses a few keys for each query, as the planner prices them.

A rank gets the index keys that its queries see, and the rows of the keys chosen for them; nothing
of these depends on a plan. Which rows those are is known only when the layer runs. It is taken that
queries of a rank name as many different keys as they can: top_k a query, but no more than they see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from tilewise.arguments import ITEM_BYTES, whole_number
from tilewise.compiler.row_moves import RowMoves
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Causal
from tilewise.simulation.machine import Machine
from tilewise.simulation.row_moves import simulate_moves
from tilewise.tokens.moves import gather_moves

BLOCK = 64  # queries of a list kernel's block: an assumption that is the same for every choice
PLACE_BYTES = 4  # of a row that a rank asks for


@dataclass(frozen=True)
class IndexedLayer:
    """A layer of attention to keys that an indexer chooses.

    Args:
        num_heads, head_dim, v_head_dim: of its attention.
        row_width: numbers of a key that travel: the width of its latent, or of k and v together.
        index_heads, index_dim: of the indexer; 0 where the layer uses another layer's choice.
        top_k: keys of a query.
        tokens_of_index_key: how many tokens share one key of the indexer.
    """

    num_heads: int
    head_dim: int
    v_head_dim: int
    row_width: int
    index_heads: int
    index_dim: int
    top_k: int
    tokens_of_index_key: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 0 if field.name in ("index_heads", "index_dim") else 1
            whole_number(field.name, getattr(self, field.name), least)


def indexed_cost(
    layer: IndexedLayer,
    make: Callable[[int, int], Layout],
    num_tokens: int,
    world_size: int,
    dtype: str,
    machine: Machine,
) -> tuple[float, int]:
    """Seconds of both passes of one layer under a causal mask, on equal shards, and bytes of the
    rank that sends most.

    Args:
        make: the layout, of (num_tokens, world_size).
    """
    shares, item_bytes = 2 * world_size, ITEM_BYTES(dtype)
    share_rows = -(-num_tokens // shares)
    layout = make(shares, world_size)  # one row stands for all of a share
    seen = gather_moves(layout, Causal())
    index_keys = -(-share_rows // layer.tokens_of_index_key)
    index_bytes = index_keys * layer.index_dim * item_bytes
    named = min(1.0, layer.top_k / world_size)  # of all rows, by num_tokens / world_size queries
    row_bytes = round(named * share_rows * layer.row_width * item_bytes)
    place_bytes = round(named * share_rows * PLACE_BYTES)
    moves: list[tuple[RowMoves, int, bool]] = [
        (seen, index_bytes, False),
        (seen, place_bytes, True),  # places travel to the owners
        (seen, row_bytes, False),
        (seen, row_bytes, True),
    ]
    seconds = sum(
        simulate_moves([move], size, machine, backward=back).seconds for move, size, back in moves
    )
    volumes = [move.volume(size)[back] for move, size, back in moves]
    sent_bytes = max(map(sum, zip(*volumes, strict=True)))
    seconds += _local_seconds(layer, layout, share_rows, dtype, machine)
    return seconds, sent_bytes


def _local_seconds(
    layer: IndexedLayer, layout: Layout, share_rows: int, dtype: str, machine: Machine
) -> float:
    """Return the seconds of kernels on the rank with most scores.

    They are the indexer's scores in forward, and attention to the chosen keys in both passes.
    """
    pairs = max(
        sum((share + 0.5) * share_rows**2 for share in layout.rows(rank).tolist())
        for rank in range(layout.world_size)
    )
    num_queries, num_keys = 2 * share_rows, layout.num_tokens * share_rows
    forward, backward = (machine.kernel(dtype, x) for x in (False, True))
    scores = 2 * layer.index_heads * layer.index_dim * pairs / layer.tokens_of_index_key
    keys = min(layer.top_k, num_keys)
    products = 2 * layer.num_heads * (layer.head_dim + layer.v_head_dim) * num_queries * keys
    return (
        scores / forward.speed(num_queries, num_keys)
        + products / forward.speed(BLOCK, keys)
        + 2.5 * products / backward.speed(BLOCK, keys)  # scores again, and four products
    )

"""The greedy schedule of the Mesh-Attention paper, reconstructed, to compare others with.

Source: summaries and two figures of Mesh-Attention (arXiv 2512.20968): one transfer at a time, the
receive that unlocks most blocks per byte, delayed compute. Which block comes first, and what
happens at ties, is ours.
"""

from functools import lru_cache

from tilewise.plan.payload import ShardWeights
from tilewise.strategies.mesh_schedules.greedy import (
    NEVER,
    TileSteps,
    stepwise_tile_steps,
    with_kv_partials,
)
from tilewise.strategies.mesh_schedules.model import Block, Move, tile_steps_of, transfer_bytes


@lru_cache(maxsize=256)
def paper_tile_steps(shape: tuple[int, int], costs: ShardWeights) -> TileSteps:
    """The steps of a tile by the paper's rule, one transfer a step.

    1. A partial leaves as soon as its row (column) is done; of two, that of more bytes.
    2. Else the shard arrives that unlocks most blocks per byte of it and its partial; KV if equal.
    3. Beside a transfer run as many blocks as it takes time, those of the next partial first; the
       others are kept for later transfers (delayed compute).
    4. Where no transfer is possible, the blocks run that the next partial needs.

    Args:
        shape: query and KV shards of the tile.
        costs: relative bytes of what travels. All blocks are taken to last as long as all
            transfers, where orders differ most; with another ratio the rule was no better there.
    """
    if min(shape) == 1:
        return tuple(stepwise_tile_steps(*shape, "eager", costs))  # a ring has no choice
    tile_steps = tile_steps_of(_PapersRule(shape, costs).steps())
    return tuple(tile_steps if costs.kv_partial else with_kv_partials(tile_steps, *shape))


class _PapersRule:
    def __init__(self, shape: tuple[int, int], costs: ShardWeights):
        self.shape, self.costs = shape, costs
        self.block = transfer_bytes(shape, costs) / (shape[0] * shape[1])
        self.held, self.sent = [1, 1], [0, 0]
        self.blocks_left = [shape[1]] * shape[0], [shape[0]] * shape[1]
        self.ready: set[Block] = {(0, 0)}

    def steps(self) -> list[tuple[list[list[Block]], list[int]]]:
        steps: list[tuple[list[list[Block]], list[int]]] = []
        covered_blocks = 0.0  # blocks that transfers had time for and that are not computed
        while (move := self._next_move()) or any(self._next_lines()):
            if move is None:
                side, line = min(self._next_lines(), key=self._left_per_byte)
                steps.append(([self._take([x for x in self.ready if x[side] == line])], [0] * 4))
                continue
            covered_blocks += self.costs[move[0]] / self.block
            ready_blocks = sorted(self.ready, key=self._due)
            blocks = self._take(ready_blocks[: int(covered_blocks + 1e-9)])
            covered_blocks = (
                covered_blocks - len(blocks) if len(ready_blocks) > len(blocks) else 0.0
            )
            kinds = [0] * 4
            kinds[move[0]] = move[1]
            steps.append(([blocks], kinds))
            self._note(move)
        return [*steps, ([sorted(self.ready)], [0] * 4)]

    def _next_lines(self) -> list[tuple[int, int]]:
        """The row and the column whose partials leave next, where any are left to leave."""
        return [
            (side, self.sent[side] + 1)
            for side in (0, 1)
            if self.costs[2 + side] and self.sent[side] < self.shape[side] - 1
        ]

    def _left_per_byte(self, line: tuple[int, int]) -> float:
        return self.blocks_left[line[0]][line[1]] / self.costs[2 + line[0]]

    def _next_move(self) -> Move | None:
        done_lines = [line for line in self._next_lines() if not self.blocks_left[line[0]][line[1]]]
        if done_lines:
            side, index = max(done_lines, key=lambda line: self.costs[2 + line[0]])
            return 2 + side, index
        missing_sides = [side for side in (1, 0) if self.held[side] < self.shape[side]]
        if not missing_sides:
            return None
        side = max(
            missing_sides, key=lambda x: self.held[1 - x] / (self.costs[x] + self.costs[2 + x])
        )
        return side, self.held[side]

    def _due(self, block: Block) -> tuple[int, Block]:
        """The partial that awaits a block, in the order in which they leave."""
        lines = [i for side, i in enumerate(block) if i and self.costs[2 + side]]
        return min(lines, default=NEVER), block

    def _take(self, blocks: list[Block]) -> list[Block]:
        self.ready.difference_update(blocks)
        for k, c in blocks:
            self.blocks_left[0][k] -= 1
            self.blocks_left[1][c] -= 1
        return blocks

    def _note(self, move: Move) -> None:
        kind, index = move
        if kind > 1:
            self.sent[kind - 2] = index
            return
        other_shards = range(self.held[1 - kind])
        self.ready.update((o, index) if kind else (index, o) for o in other_shards)
        self.held[kind] += 1

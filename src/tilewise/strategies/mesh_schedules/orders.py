"""In which order a mesh tile's shards arrive and its partials leave, with all shards held or few.

A rank that holds all its shards receives first and sends afterwards. One that may hold fewer keeps
all shards of one side and lets those of the other pass through: each leaves once its blocks are
done, before another comes. No shard of either side can be let go before all of the other have been
there, so nothing below one whole side, the rank's own two and the two that pass can be enough.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilewise.strategies.mesh_schedules.model import Line, Move, Need, Order, ShardWeights

KV_PRIORITY_FACTORS = (1.0, 0.5, 2.0, 0.25, 4.0, 0.75, 1.5, 0.125, 8.0)
"""How dear a KV shard's arrival is taken to be, beside its bytes; the likeliest first."""


def least_held(rows: int, columns: int) -> int:
    """The fewest query and KV shards, own ones and those arriving included, that a rank can hold.

    All of one side, the rank's own of the other, and two: one leaves while the next arrives.
    """
    return min(rows + min(columns, 3), columns + min(rows, 3))


def orders(
    rows: int, columns: int, costs: ShardWeights, held: int | None = None
) -> Iterator[Order]:
    """Orders to try, the likeliest first; none holds more than so many shards."""
    if held is None or held >= rows + columns:
        for receives in _receives(rows, columns, costs):
            sends = _sends((rows, columns), costs)
            yield Order(tuple((move, None) for move in receives), sends)
        return
    room = {1: held - rows - 1, 0: held - columns - 1}
    for leaning in range(len(KV_PRIORITY_FACTORS)):
        for side, slots in room.items():
            if slots >= min((rows, columns)[side] - 1, 2):
                order = _passing((rows, columns), costs, side, slots, leaning)
                if order is not None:
                    yield order


def _passing(
    shape: tuple[int, int], costs: ShardWeights, side: int, slots: int, leaning: int
) -> Order | None:
    """All of the other side stay; of this one, as many as there are slots beside the own."""
    length = shape[side]
    slots = min(slots, length - 1)
    first = (slots + 1, shape[1]) if side == 0 else (shape[0], slots + 1)
    paths = _receives(*first, costs)
    if leaning >= len(paths):
        return None
    receives: list[Need] = [(move, None) for move in paths[leaning]]
    receives += [((side, index), (side, index - slots)) for index in range(slots + 1, length)]
    gone = length - 1 - slots
    passed = [_send(side, index) for index in range(1, gone + 1) if costs[2 + side]]
    rest = [
        _send(move[0] - 2, move[1] + gone * (line is not None and line[0] == side))
        for move, line in _sends(first, costs)
    ]
    return Order(tuple(receives), (*passed, *rest))


def _send(side: int, index: int) -> Need:
    line: Line = (side, index)
    return (2 + side, index), line


def _receives(rows: int, columns: int, costs: ShardWeights) -> list[list[Move]]:
    """Different ways to receive everything, the likeliest first."""
    ways = {tuple(_grown(rows, columns, costs.q, costs.kv * x)): None for x in KV_PRIORITY_FACTORS}
    return [list(way) for way in ways]


def _grown(rows: int, columns: int, q: float, kv: float) -> Iterator[Move]:
    """Grow the rectangle of what is there by whatever unlocks most blocks per cost."""
    x = y = 1
    while x < rows or y < columns:
        if y < columns and (x == rows or x * q >= y * kv):
            yield 1, y
            y += 1
        else:
            yield 0, x
            x += 1


def _sends(shape: tuple[int, int], costs: ShardWeights) -> tuple[Need, ...]:
    """Partials by local index; of two sides, receiving them in time reversed."""
    if costs.q_partial and costs.kv_partial:
        sides = [side for side, _ in _grown(*shape, costs.q_partial, costs.kv_partial)][::-1]
    else:
        sides = [s for s in (0, 1) if costs[2 + s] for _ in range(shape[s] - 1)]
    sent = [0, 0]
    needs = []
    for side in sides:
        sent[side] += 1
        needs.append(_send(side, sent[side]))
    return tuple(needs)

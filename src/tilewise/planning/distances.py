"""Lower bounds of seconds and of bytes for a workload, whatever the plan."""

from typing import NamedTuple

from tilewise.plan.ir import Role, Side
from tilewise.plan.payload import Payload
from tilewise.planning.pass_model import PassModel
from tilewise.simulation.machine import Machine
from tilewise.workload import Workload


class RowPrice(NamedTuple):
    """Bytes that a row of one head costs a rank that does not own it, both ways together."""

    q: float
    kv: float


def least_bytes(work: Workload, world_size: int) -> int:
    """Bytes that the rank that sends most sends at least, in both passes."""
    return sum(int(_least(work, world_size, price)) for price in prices(work))


def prices(work: Workload) -> tuple[RowPrice, RowPrice]:
    """Prices of forward and of backward, where operands that may have been kept cost nothing."""
    forward = work.call_shape(1).payload(1)
    backward = forward._replace(backward=True, saved=work.save != "replay")

    def price(payload: Payload, side: Side, num_heads: int) -> float:
        """Return the bytes of one row per query head, operand and partial; all heads share a
        latent's.
        """
        fields = (*payload.fields(side, Role.OPERAND), *payload.fields(side, Role.PARTIAL))
        return payload.heads(side) * sum(field.row_bytes for field in fields) / num_heads

    heads = (Side.Q, work.num_heads), (Side.KV, work.num_kv_heads)
    forward_price, backward_price = (
        RowPrice(*(price(p, *side_and_heads) for side_and_heads in heads))
        for p in (forward, backward)
    )
    return forward_price, backward_price


def _least(work: Workload, world_size: int, price: RowPrice) -> float:
    """The fewest bytes with which a rank can compute its share of the cells."""
    cells = _cells(work) / world_size
    low, high = 0.0, 1.0
    while _most_cells(work, world_size, price, high) < cells:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        is_enough = _most_cells(work, world_size, price, middle) >= cells
        low, high = (low, middle) if is_enough else (middle, high)
    return low if low > 1 else 0.0


def _cells(work: Workload) -> float:
    tokens = (0, work.num_tokens)
    return float(work.mask.area(tokens, tokens)) * work.num_heads


def _most_cells(work: Workload, world_size: int, price: RowPrice, num_bytes: float) -> float:
    """Upper bound of the cells that a rank computes if it moves this many bytes."""
    group = work.num_heads / work.num_kv_heads
    keys = float(max(work.layout_for(world_size).owned.sizes))
    queries, foreign_keys = group * keys, work.num_tokens - keys
    at_home = work.num_kv_heads * queries * keys
    one_side = num_bytes * max(keys / price.q, queries / price.kv)
    whole_head = foreign_keys * (group * price.q + price.kv)
    both_sides = min(
        num_bytes * min(num_bytes, whole_head) / (4 * price.q * price.kv),
        num_bytes * foreign_keys / price.q,
        num_bytes * group * foreign_keys / price.kv,
    )
    return at_home + one_side + both_sides


def least_seconds(work: Workload, world_size: int, machine: Machine) -> float:
    """Both passes at the machine's highest kernel speeds, without any communication."""
    passes = [PassModel(work, machine, world_size, backward) for backward in (False, True)]
    return sum(model.flop / world_size / model.best_speed(2.0**60, 2.0**60) for model in passes)

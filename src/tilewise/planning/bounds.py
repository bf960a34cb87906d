"""Lower bounds of a pass's time, by which a search orders and leaves out candidates."""

from typing import NamedTuple

from tilewise.plan.ir import Item, Role, Side
from tilewise.plan.payload import Payload
from tilewise.planning.options import Option
from tilewise.planning.pass_model import PassModel
from tilewise.simulation.machine import Machine
from tilewise.workload import Workload


class Price(NamedTuple):
    """Bytes that a row of one head costs a rank that does not own it, both ways together."""

    q: float
    kv: float


def least_bytes(work: Workload, world_size: int) -> int:
    """Bytes that the rank that sends most sends at least, in both passes."""
    return sum(int(_least(work, world_size, price)) for price in prices(work))


def prices(work: Workload) -> tuple[Price, Price]:
    """Of forward and of backward; operands that may have been kept cost nothing in backward."""
    forward = work.call_shape(1).payload(1)
    backward = forward._replace(backward=True, saved=work.save != "replay")

    def price(payload: Payload, side: Side, num_heads: int) -> float:
        """A latent's bytes are shared by the heads that are made of it."""
        fields = (*payload.fields(side, Role.OPERAND), *payload.fields(side, Role.PARTIAL))
        return payload.heads(side) * sum(field.row_bytes for field in fields) / num_heads

    heads = (Side.Q, work.num_heads), (Side.KV, work.num_kv_heads)
    first, second = (Price(*(price(p, *of) for of in heads)) for p in (forward, backward))
    return first, second


def _least(work: Workload, world_size: int, price: Price) -> float:
    """The bytes with which a rank's share of cells can just be reached."""
    cells = _cells(work) / world_size
    low, high = 0.0, 1.0
    while _most_cells(work, world_size, price, high) < cells:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        enough = _most_cells(work, world_size, price, middle) >= cells
        low, high = (low, middle) if enough else (middle, high)
    return low if low > 1 else 0.0


def _cells(work: Workload) -> float:
    tokens = (0, work.num_tokens)
    return float(work.mask.area(tokens, tokens)) * work.num_heads


def _most_cells(work: Workload, world_size: int, price: Price, num_bytes: float) -> float:
    """No rank that moves so many bytes computes more cells."""
    group = work.num_heads / work.num_kv_heads
    keys = float(max(work.layout_for(world_size).sizes))
    queries, others = group * keys, work.num_tokens - keys
    at_home = work.num_kv_heads * queries * keys
    one_side = num_bytes * max(keys / price.q, queries / price.kv)
    whole_head = others * (group * price.q + price.kv)
    both = min(
        num_bytes * min(num_bytes, whole_head) / (4 * price.q * price.kv),
        num_bytes * others / price.q,
        num_bytes * group * others / price.kv,
    )
    return at_home + one_side + both


SAFE = 1 - 1e-9
"""Bounds are lowered by this much, so that rounding cannot lift one above a simulated time."""


def shape_bound(model: PassModel, option: Option) -> float:
    """Seconds by the shape of the ranks' tiles: kernels at their best, bytes over each link.

    Where a mask leaves ranks different work, kernels alone, which is the same for all.
    """
    if model.alike is None or not option.shape.q:
        return SAFE * _compute(model, model.work.num_tokens, model.work.num_tokens)
    payload, degree = model.payload(option.degree), option.degree
    rows = min(model.layout.sizes) * degree * model.share(option)
    each = [
        sum(payload.row_bytes(Item(side, role, 0)) for role in (Role.OPERAND, Role.PARTIAL)) * rows
        for side in Side
    ]
    if option.kind == "balanced_ring":  # of a pair either shard travels
        each = [min(each)] * 2
    tile, nodes = option.shape[:2], option.shape.nodes
    apart = (degree - 1) / degree
    sent = sum((count - 1 + apart) * size for count, size in zip(tile, each, strict=True))
    fastest = max(model.bandwidths().values())
    if model.world_size <= model.machine.node_size:
        fastest = model.machine.inside.bandwidth
    own = model.machine.node_size // degree if model.machine.node_size % degree == 0 else 1
    entering = sum(max(0, count - own) * size for count, size in zip(tile, each, strict=True))
    machine = model.machine
    entering *= min(degree, machine.node_size) / machine.node_size
    across = sum((count - 1) * size for count, size in zip(nodes, each, strict=True))
    links = max(
        sent / fastest,
        max(entering, across) * model.machine.nic_sharers / model.machine.nic_bandwidth,
    )
    return SAFE * max(_compute(model, *_longest(model, option)), links)


def _longest(model: PassModel, option: Option) -> tuple[float, float]:
    """Queries and keys per query of the largest call that a plan could make."""
    tokens = model.work.num_tokens
    if 0 in option.shape.call:
        return tokens, tokens
    rows = max(model.layout.sizes) * option.degree
    keys = option.shape.call[1] * rows
    return option.shape.call[0] * rows, (keys + 1) / 2 if model.alike else keys


def _compute(model: PassModel, queries: float, keys: float) -> float:
    speed = model.best_speed(max(queries, 1), max(keys, 1))
    launch = model.machine.launch_seconds + model.kernel.launch_seconds
    return model.flop / model.world_size / speed + launch


def least_seconds(work: Workload, world_size: int, machine: Machine) -> float:
    """Both passes at the machine's highest kernel speeds, without any communication."""
    passes = [PassModel(work, machine, world_size, backward) for backward in (False, True)]
    return sum(one.flop / world_size / one.best_speed(2.0**60, 2.0**60) for one in passes)

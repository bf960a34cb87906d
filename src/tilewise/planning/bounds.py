"""Lower bounds of a pass's time, by which a search orders and leaves out candidates."""

from collections import defaultdict
from itertools import accumulate
from typing import NamedTuple

from tilewise.plan.ir import Item, Plan, RankStep, Role, Side, Transfer
from tilewise.plan.payload import ITEM_BYTES, accumulator
from tilewise.planning.options import Option
from tilewise.planning.pass_model import PassModel
from tilewise.simulation.costs import PassCosts
from tilewise.simulation.machine import Machine
from tilewise.simulation.network import BETWEEN, INSIDE
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
    width = work.head_dim
    value, wire = width * ITEM_BYTES(work.dtype), width * ITEM_BYTES(work.wire_dtype or work.dtype)
    statistic = ITEM_BYTES(accumulator(work.dtype))
    kept = 0 if work.save == "replay" else 1
    forward = Price(value + wire + statistic, 2 * value)
    backward = Price((2 - kept) * value + 2 * statistic + wire, 2 * (1 - kept) * value + 2 * wire)
    return forward, backward


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


STEPS_KEPT = 16
"""Ranks of a plan whose steps are kept."""

SAFE = 1 - 1e-9
"""Bounds are lowered by this much, so that rounding cannot lift one above a simulated time."""


def shape_bound(model: PassModel, option: Option) -> float:
    """Seconds by the shape of the ranks' tiles: kernels at their best, bytes over each link."""
    if not option.shape.q:
        return SAFE * _compute(model, *_longest(model, option))
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


def steps_bound(model: PassModel, option: Option, plan: Plan) -> float:
    """Seconds by the steps of rank 0 and of those who share its NIC; 0 if cells are not alike.

    A rank computes in order: before step s all that its tiles up to s read must have arrived, and
    what it sends from step t on leaves after its tiles before t. So for every s < t

        seconds >= arrivals needed up to s + tiles of s .. t - 1 + departures from t on
    """
    if model.alike is None or not option.shape.q:
        return 0.0
    costs, share = model.costs(plan), model.share(option)
    steps = _steps(plan, 0)
    busy = [sum(map(costs.tile_seconds, step.tiles)) for step in steps]
    needed = _slowest(model, _needed(model, costs, steps), share)
    leaving = _slowest(model, _leaving(model, costs, steps), share)
    before = [0.0, *accumulate(busy)]
    best = lead = 0.0
    tails = [*leaving, 0.0]
    for s in range(len(steps) + 1):
        best = max(best, lead + before[s] + tails[s])
        if s < len(steps):
            lead = max(lead, needed[s] - before[s])
    if model.machine.nic_sharers > 1 and model.world_size > model.machine.node_size:
        best = max(best, share * _shared(model, plan, costs))
    return SAFE * best


def _steps(plan: Plan, rank: int) -> tuple[RankStep, ...]:
    """A rank's steps, made once for both passes."""
    return plan.memo("weighed", rank, lambda: plan.rank_steps(rank), keep=STEPS_KEPT)


def _lane(model: PassModel, hop: Transfer) -> str:
    return INSIDE if model.machine.same_node(hop.src, hop.dst) else BETWEEN


Lanes = list[dict[str, float]]


def _needed(model: PassModel, costs: PassCosts, steps: tuple[RankStep, ...]) -> Lanes:
    """Per step, bytes of operands that must have arrived when its tiles begin, by link."""
    arrived: dict[Item, tuple[str, float]] = {}
    total: dict[str, float] = defaultdict(float)
    found = []
    for step in steps:
        for tile in step.tiles:
            for side, shards in zip(Side, tile[:2], strict=True):
                for shard in shards:
                    item = Item(side, Role.OPERAND, shard, tile.heads)
                    lane, size = arrived.pop(item, (INSIDE, 0.0))
                    total[lane] += size
        found.append(dict(total))
        for hop in step.recvs:
            if hop.item.role is Role.OPERAND:
                size = costs.message_bytes(hop)
                arrived[hop.item] = _lane(model, hop), size
    return found


def _leaving(model: PassModel, costs: PassCosts, steps: tuple[RankStep, ...]) -> Lanes:
    """Per step, bytes sent from it on, by link."""
    total: dict[str, float] = defaultdict(float)
    found = []
    for step in reversed(steps):
        for hop in step.sends:
            total[_lane(model, hop)] += costs.message_bytes(hop)
        found.append(dict(total))
    return found[::-1]


def _slowest(model: PassModel, lanes: Lanes, share: float) -> list[float]:
    widths = {lane: bandwidth / share for lane, bandwidth in model.bandwidths().items()}
    return [max((size / widths[x] for x, size in at.items()), default=0.0) for at in lanes]


def _shared(model: PassModel, plan: Plan, costs: PassCosts) -> float:
    """Seconds of the NIC that rank 0 shares.

    Under a split by heads the ranks of one inner rank send equally many bytes between nodes, so
    that one of them is enough where they are of one node.
    """
    block, degree = model.machine.nic_sharers, plan.num_head_groups
    size = model.machine.node_size
    alike = degree if size % degree == 0 or degree % size == 0 else 1
    stride = min(alike, block)
    sent = 0.0
    for rank in range(0, block, stride):
        for step in _steps(plan, rank):
            for hop in step.sends:
                if _lane(model, hop) == BETWEEN:
                    sent += costs.message_bytes(hop) * stride
    return sent / model.machine.nic_bandwidth


def least_seconds(work: Workload, world_size: int, machine: Machine) -> float:
    """Both passes at the machine's highest kernel speeds, without any communication."""
    passes = [PassModel(work, machine, world_size, backward) for backward in (False, True)]
    return sum(one.flop / world_size / one.best_speed(2.0**60, 2.0**60) for one in passes)

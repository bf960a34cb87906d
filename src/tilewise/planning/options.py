"""What the planner tries: every factoring of the ranks into heads x queries x keys.

    degree of heads (ulysses) x ring | mesh | double ring | attention2d | plans of whole nodes

Plans are made when they are looked at: a search leaves most of them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from tilewise.layouts.layout import zigzag
from tilewise.masks.base import Causal, Full
from tilewise.plan.ir import Plan
from tilewise.plan.payload import head_groups
from tilewise.strategies.all_gather import all_gather
from tilewise.strategies.attention2d import attention2d
from tilewise.strategies.balanced_ring import balanced_ring
from tilewise.strategies.double_ring import double_ring
from tilewise.strategies.hierarchical import hierarchical
from tilewise.strategies.mesh import SCHEDULES, mesh
from tilewise.strategies.mesh_schedules.orders import least_held
from tilewise.strategies.needed import needed
from tilewise.strategies.ring import ring
from tilewise.strategies.tiled import tiled
from tilewise.strategies.ulysses import ulysses
from tilewise.workload import Workload

AWARE_RANKS = 64
"""Up to so many ranks mask-aware plans are built: they take seconds, and more with more ranks."""

UNLIKE_RANKS = 64
"""Up to so many ranks plans whose ranks differ are tried; with more, one takes minutes to replay.
What they do best, a mesh of schedule "gather" does with as few bytes or fewer."""

EVERY_RANK = 16
"""With more ranks, and a mask for which they are not alike, fewer schedules are tried."""

ANY_NODE_RANKS = 32
"""Up to so many ranks plans of whole nodes are tried for groups of every size, not only nodes."""


class Shape(NamedTuple):
    """What every rank computes, in shards of the plan inside a head group.

    Attributes:
        q, kv: shards that a rank's tiles read; 0: not known.
        call: query and KV shards of its largest call.
        nodes: the tile of the plan between nodes, all of whose hops cross from node to node.
        places: sizes of groups of neighbouring ranks within which ranks are alike; none: ranks
            are not alike.
    """

    q: int = 0
    kv: int = 0
    call: tuple[int, int] = (0, 0)
    nodes: tuple[int, int] = (1, 1)
    places: tuple[int, ...] = ()


class Option(NamedTuple):
    """A plan that could be made.

    Attributes:
        kind: the strategy's name.
        degree: of the split by heads.
        order: the simpler, the lower; among equally fast plans the lowest wins.
        make: makes the plan.
        shape: of the plan inside a head group.
        twin: the order of an option that is made in less time and moves the same shards.
        backward: the one pass that it is for; None: both.
        variant: one of many schedules of a tile, beside the first that is as good as any.
    """

    kind: str
    degree: int
    order: int
    make: Callable[[], Plan]
    shape: Shape
    twin: int | None = None
    backward: bool | None = None
    variant: bool = False

    @property
    def own_shards(self) -> bool:
        """Whether its shards are its own, so that both passes must run it."""
        return self.kind == "tiled"

    @property
    def family(self) -> str:
        """What the option is called in a table."""
        if self.kind == "ulysses" or self.degree == 1:
            return self.kind
        return f"ulysses({self.degree}) x {self.kind}"


class _Inner(NamedTuple):
    """A plan for the ranks of one head group."""

    kind: str
    make: Callable[[], Plan]
    shape: Shape
    schedule: str = ""
    backward: bool | None = None


def options(
    work: Workload, world_size: int, node_size: int, *, usual: bool = False, held: bool = False
) -> list[Option]:
    """Everything that these heads allow, the simplest first.

    Args:
        node_size: ranks of a node, which plans of whole nodes keep together.
        usual: no plans of whole nodes, and no more than three schedules of a mesh.
        held: also meshes that hold as few shards at once as they can.
    """
    found: list[tuple[int, _Inner]] = []
    for degree in degrees(work, world_size):
        inner = world_size // degree
        if inner == 1 and degree > 1:
            found.append(
                (degree, _Inner("ulysses", partial(ring, 1), Shape(1, 1, (1, 1), places=(1,))))
            )
            continue
        group = node_size // degree if node_size % degree == 0 else 1
        ratios = [2 * max(work.num_kv_heads, degree) / work.num_heads]
        found += [(degree, plan) for plan in _inner(inner, group, ratios, world_size)]
        if held:
            found += [(degree, plan) for plan in _held(inner, ratios[0])]
    aware = [(1, plan) for plan in _aware(work, world_size)]
    if usual or (aware and world_size > EVERY_RANK):
        found = [(degree, plan) for degree, plan in found if _plain(plan)]
    found += aware
    kinds = ["ring", "ulysses", *dict.fromkeys(plan.kind for _, plan in found)]
    found.sort(key=lambda pair: (kinds.index(pair[1].kind), pair[0]))
    twins = {
        (degree, plan.shape): order
        for order, (degree, plan) in enumerate(found)
        if plan.schedule == CHEAP
    }

    def option(order: int, degree: int, plan: _Inner) -> Option:
        twin = twins[degree, plan.shape] if plan.schedule not in ("", CHEAP) else None
        variant = plan.schedule not in ("", CHEAP, "greedy", "held")
        variant |= plan.schedule == "greedy" and plan.backward is not None
        make = _headed(degree, plan.make)
        rest = twin, plan.backward, variant
        return Option(plan.kind, degree, order, make, plan.shape, *rest)

    return [option(order, degree, plan) for order, (degree, plan) in enumerate(found)]


def degrees(work: Workload, world_size: int) -> list[int]:
    """The degrees of ulysses that the heads and the number of ranks allow."""

    def legal(degree: int) -> bool:
        try:
            head_groups(work.num_heads, work.num_kv_heads, degree)
        except ValueError:
            return False
        return True

    return [degree for degree in divisors(world_size) if legal(degree)]


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _headed(degree: int, make: Callable[[], Plan]) -> Callable[[], Plan]:
    if degree == 1:
        return make
    return lambda: ulysses(degree, inner=make())


def _inner(n: int, group: int, ratios: list[float], world_size: int) -> Iterator[_Inner]:
    yield _Inner("ring", partial(ring, n), Shape(1, n, (1, 1), places=(1,)))
    if n == 1:
        return
    yield _Inner("ring of q", partial(ring, n, moves="q"), Shape(n, 1, (1, 1), places=(1,)))
    yield _Inner("all_gather", partial(all_gather, n), Shape(1, n, (1, n), places=(1,)))
    for size in divisors(n)[1:-1]:
        shape = Shape(1, n, (1, 1), places=(size,))
        yield _Inner("double_ring", partial(double_ring, n // size, size), shape)
    yield from _meshes(n, ratios)
    if world_size <= UNLIKE_RANKS:
        for rows in divisors(n)[1:-1]:  # the outermost are all_gather, and a mesh that gathers
            shape = Shape(n // rows, rows, (n // rows, rows))
            yield _Inner("attention2d", partial(attention2d, rows, n // rows), shape)
        yield _Inner("balanced_ring", partial(balanced_ring, n), Shape(1, n, (1, 1)))
    sizes = divisors(n)[1:-1] if world_size <= ANY_NODE_RANKS else [group]
    for size in sizes:
        if n % size == 0 and 1 < size < n:
            yield from _nested(n // size, size, ratios, size == group)


def _meshes(n: int, ratios: list[float]) -> Iterator[_Inner]:
    """Tiles of every shape in every schedule; of each shape the cheapest to make first."""
    for q_tile in divisors(n)[1:]:
        tile = q_tile, n // q_tile
        shape = Shape(*tile, tile, places=(q_tile,))
        yield _Inner("mesh", partial(mesh, n, q_tile, "gather"), shape)
        if q_tile == n:
            continue
        yield _Inner("mesh", partial(mesh, n, q_tile, CHEAP), shape, CHEAP)
        for schedule in (x for x in SCHEDULES if x not in ("gather", CHEAP)):
            make = partial(mesh, n, q_tile, schedule)
            yield _Inner("mesh", make, shape, schedule)
            for ratio in ratios:
                tuned = partial(make, kv_bytes=ratio) if ratio != 2 else make
                if ratio != 2:
                    yield _Inner("mesh", tuned, shape, schedule, False)
                yield _Inner("mesh", partial(tuned, backward=True), shape, schedule, True)


def _held(n: int, ratio: float) -> Iterator[_Inner]:
    """Meshes that free shards early, for each pass."""
    for q_tile in divisors(n)[1:-1]:
        tile = q_tile, n // q_tile
        shape = Shape(*tile, tile, places=(q_tile,))
        for backward in (False, True):
            tuned = partial(mesh, n, q_tile, kv_bytes=ratio, backward=backward)
            made = partial(tuned, held=least_held(*tile))
            yield _Inner("mesh", made, shape, "held", backward)


def _nested(num_groups: int, size: int, ratios: list[float], whole_nodes: bool) -> Iterator[_Inner]:
    """Plans between groups of ranks, each with a plan inside the groups."""

    def plain(n: int) -> list[_Inner]:
        return [plan for plan in _inner(n, 1, ratios[:1], UNLIKE_RANKS + 1) if plan.kind in PLAIN]

    def worth(plan: _Inner) -> bool:
        return plan.schedule in ("", CHEAP)

    outer = plain(num_groups) + [p for p in _meshes(num_groups, ratios[:1]) if worth(p)]
    inner = plain(size) + [p for p in _meshes(size, ratios[:1]) if worth(p)]
    for between in outer:
        for inside in inner:
            (a, b), (c, d) = between.shape[:2], inside.shape[:2]
            calls = (between.shape.call[0] * c, between.shape.call[1] * d)
            nodes = (a, b) if whole_nodes else (1, 1)
            make = partial(_hierarchical, between.make, inside.make)
            outer_places = (size * place for place in between.shape.places)
            places = (*inside.shape.places, size, *outer_places)
            yield _Inner("hierarchical", make, Shape(a * c, b * d, calls, nodes, places))


def _plain(plan: _Inner) -> bool:
    """Whether it is tried where every rank has to be simulated by itself."""
    usual = plan.schedule in ("", CHEAP, "greedy") and plan.backward is None
    return usual and plan.kind not in ("hierarchical", "balanced_ring")


CHEAP = "kv_first"
"""A schedule that is made in no time, and moves the same shards as those that take some."""

PLAIN = ("ring", "ring of q", "all_gather")


def _hierarchical(between: Callable[[], Plan], inside: Callable[[], Plan]) -> Plan:
    return hierarchical(between(), inside())


def _aware(work: Workload, world_size: int) -> Iterator[_Inner]:
    """Plans made for the mask, where it leaves something out that others compute or move."""
    if world_size > AWARE_RANKS or world_size == 1 or isinstance(work.mask, Full):
        return
    layout = work.layout_for(world_size)
    if work.mask == Causal() and layout == zigzag(work.num_tokens, world_size):
        return
    ratio = 2 * work.num_kv_heads / work.num_heads
    yield _Inner("needed", lambda: needed(work.mask, layout), Shape())
    yield _Inner("tiled", lambda: tiled(work.mask, layout, kv_bytes=ratio), Shape())

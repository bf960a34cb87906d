"""Options of the planner: every factoring of the ranks into heads x queries x keys.

    degree of heads (ulysses) x ring | mesh | double ring | attention2d | plans of whole nodes
    needed, tiled: made for the mask

Plans are made when they are looked at: a search leaves most of them alone.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from typing import NamedTuple

from tilewise.layouts.layout import zigzag
from tilewise.masks.base import Causal, Full
from tilewise.plan.ir import MHA, Plan
from tilewise.simulation.simulator import MOST_APART
from tilewise.strategies.catalog import (
    MASK_AWARE,
    STRATEGIES,
    Shape,
    StrategyEntry,
    Variant,
    degrees,
    divisors,
)
from tilewise.strategies.hierarchical import hierarchical
from tilewise.strategies.needed import needed
from tilewise.strategies.ring import ring
from tilewise.strategies.tiled import tiled
from tilewise.strategies.ulysses import ulysses
from tilewise.workload import Workload

UNLIKE_RANKS = 64
"""Up to this many ranks, plans whose ranks differ by themselves are tried, and `tiled`. Where ranks
differ by the mask, plans with up to this many ranks in a head group are. One plan of more ranks
takes longer than a whole search may."""

ANY_NODE_RANKS = 32
"""Up to this many ranks, if they are alike, plans of whole nodes are tried for groups of every
size. Their number grows with the square of the divisors, and each has to be made to be bounded."""

QUICK = ("", "gather", "kv_first")
"""No schedule, and the schedules that take no time to make."""

SCHEDULES = (*QUICK, "greedy", "eager", "held")
"""Of a tile, the cheapest to make first."""


class Option(NamedTuple):
    """A plan that could be made.

    Attributes:
        kind: the strategy's name.
        degree: of the split by heads.
        order: lower for simpler plans; of equally fast plans that of the lowest order wins.
        make: makes the plan, once.
        shape: of the plan inside a head group.
        keeps: whether it is only for runs that keep what forward gathered.
        variant: True for further schedules of a tile, which are tried after its first one.
        waiting_results: of the plan as it is tried; `make` makes it without.
    """

    kind: str
    degree: int
    order: int
    make: Callable[[], Plan]
    shape: Shape
    keeps: bool = False
    variant: bool = False
    waiting_results: int | None = None

    @property
    def plan(self) -> Plan:
        """The plan as it is tried."""
        return self.make().with_waiting_results(self.waiting_results)

    def leaner(self, most: int) -> "Option | None":
        """The option with half as many waiting results; None if none of its results wait.

        Args:
            most: results that wait on the device.
        """
        waiting = most if self.waiting_results is None else self.waiting_results
        return self._replace(waiting_results=waiting // 2) if waiting else None

    @property
    def own_shards(self) -> bool:
        """True if its shards are its own, so that both passes must run it."""
        return self.kind == "tiled"

    @property
    def tile(self) -> tuple[str, int, Shape]:
        """The key that all schedules of one tile share."""
        return self.kind, self.degree, self.shape

    @property
    def family(self) -> str:
        """The option's name in a table."""
        if self.kind == "ulysses" or self.degree == 1:
            return self.kind
        return f"ulysses({self.degree}) x {self.kind}"


def options(
    work: Workload,
    world_size: int,
    node_size: int,
    *,
    usual_only: bool = False,
    hold_few: bool = False,
) -> list[Option]:
    """List all options that these heads allow, the simplest first.

    Args:
        node_size: ranks of a node, which plans of whole nodes keep together.
        usual_only: no plans of whole nodes, and no more than three schedules of a mesh.
        hold_few: also meshes that hold as few shards at once as they can.
    """
    unlike = _unlike(work, world_size)
    variants = [
        (degree, variant)
        for degree in degrees(world_size, work.num_heads, work.num_kv_heads)
        for variant in _inside(degree, work, world_size, node_size, unlike)
        if (hold_few or variant.schedule != "held") and not (usual_only and not _usual(variant))
    ]
    if world_size <= MOST_APART and unlike:
        variants += [(1, variant) for variant in _aware(work, world_size, node_size)]
    if work.strategies is not None and world_size > 1:
        variants = [(degree, x) for degree, x in variants if _serves(x, degree, work)]
    kinds = ["ring", "ulysses", *dict.fromkeys(variant.kind for _, variant in variants)]
    variants.sort(key=lambda pair: (kinds.index(pair[1].kind), pair[0]))

    def option(order: int, degree: int, variant: Variant) -> Option:
        make = cache(_headed(degree, variant.make))
        return Option(
            variant.kind, degree, order, make, variant.shape, variant.keeps, variant.further
        )

    return [option(order, *pair) for order, pair in enumerate(variants)]


def _serves(variant: Variant, degree: int, work: Workload) -> bool:
    """Return whether a plan is of a strategy that the workload allows, for its heads."""
    assert work.strategies is not None
    return variant.kind in work.strategies and work.num_kv_heads % degree == 0


def _inside(
    degree: int, work: Workload, world_size: int, node_size: int, unlike: bool
) -> Iterator[Variant]:
    """Plans for the ranks of one head group."""
    n = world_size // degree
    if n == 1 and degree > 1:
        yield Variant("ulysses", partial(ring, 1), Shape(1, 1, ((1, 1),)))
        return
    few_ranks = n <= UNLIKE_RANKS if unlike else True
    kv_bytes = work.kv_bytes(degree)
    for strategy in (entry for entry in STRATEGIES if not entry.decodes):
        affordable = world_size <= UNLIKE_RANKS if strategy.uneven else few_ranks
        if affordable or strategy.make is ring:
            yield from _variants(strategy, n, None if kv_bytes == MHA else kv_bytes)
    node = node_size // degree if node_size % degree == 0 else 1
    if few_ranks:
        yield from _of_two_levels(n, node, any_size=not unlike and world_size <= ANY_NODE_RANKS)


def _headed(degree: int, make: Callable[[], Plan]) -> Callable[[], Plan]:
    if degree == 1:
        return make
    return lambda: ulysses(degree, inner=make())


def _variants(strategy: StrategyEntry, n: int, kv_bytes: float | None) -> Iterator[Variant]:
    """A strategy's plans on n ranks, of each shape the cheapest to make first."""

    def cost(variant: Variant) -> tuple[int, bool, bool]:
        return SCHEDULES.index(variant.schedule), variant.further, variant.keeps

    for a, b in strategy.factors(n):
        variants = (variant for variant in strategy.at(a, b, kv_bytes) if not variant.degenerate)
        yield from sorted(variants, key=cost)


def _of_two_levels(n: int, node: int, any_size: bool) -> Iterator[Variant]:
    """Plans between groups of ranks, each with a plan inside the groups.

    Args:
        node: ranks of a node.
        any_size: groups of every size, not only nodes.
    """

    def nested(size: int) -> list[Variant]:
        variants = (v for entry in STRATEGIES if entry.nests for v in _variants(entry, size, None))
        return [variant for variant in variants if variant.schedule in QUICK]

    for size in divisors(n)[1:-1] if any_size else [node]:
        if n % size or not 1 < size < n:
            continue
        for between, inside in product(nested(n // size), nested(size)):
            (a, b), (c, d) = between.shape[:2], inside.shape[:2]
            calls = tuple((x * c, y * d) for x, y in between.shape.calls)
            at_once = between.shape.at_once and inside.shape.at_once
            nodes = (a, b) if size == node else (1, 1)
            make = partial(_hierarchical, between.make, inside.make)
            yield Variant("hierarchical", make, Shape(a * c, b * d, calls, nodes, at_once))


def _hierarchical(between: Callable[[], Plan], inside: Callable[[], Plan]) -> Plan:
    return hierarchical(between(), inside())


def _usual(variant: Variant) -> bool:
    """Return whether a plan belongs to the few that are tried where a choice must be quick."""
    is_quick = variant.schedule in (*QUICK, "greedy") and not variant.keeps
    return is_quick and variant.kind != "hierarchical"


def _unlike(work: Workload, world_size: int) -> bool:
    """Return whether plans made without the mask compute or move what it leaves out."""
    if world_size == 1 or isinstance(work.mask, Full):
        return False
    is_zigzag = work.layout_for(world_size) == zigzag(work.num_tokens, world_size)
    return work.mask != Causal() or not is_zigzag


def _aware(work: Workload, world_size: int, node_size: int) -> Iterator[Variant]:
    """Plans made for the mask; needed also so that rows come to each node once."""
    layout = work.layout_for(world_size)
    for strategy in MASK_AWARE:
        if strategy.make is tiled and world_size > UNLIKE_RANKS:
            continue
        make = partial(strategy.plan, work.mask, layout, work.kv_bytes())
        yield Variant(strategy.name, make, Shape())
        if strategy.make is needed and node_size < world_size:
            yield Variant(strategy.name, partial(needed, work.mask, layout, node_size), Shape())

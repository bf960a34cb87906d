"""The strategies, a line each: what planner, bench, demo, mask tables and tests go over.

    STRATEGIES      from a number of ranks alone, or from plans, as hierarchical and ulysses
    MASK_AWARE      from a mask and a layout

docs/plan.md says how to add one.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Literal, NamedTuple

from tilewise.layouts.balanced import balanced
from tilewise.layouts.layout import Layout, contiguous, striped, zigzag
from tilewise.masks.base import Mask
from tilewise.plan.ir import MHA, Plan
from tilewise.plan.payload import head_groups
from tilewise.strategies.all_gather import all_gather
from tilewise.strategies.attention2d import attention2d
from tilewise.strategies.balanced_ring import balanced_ring
from tilewise.strategies.double_ring import double_ring
from tilewise.strategies.hierarchical import hierarchical
from tilewise.strategies.mesh import SCHEDULES, divisors, mesh
from tilewise.strategies.mesh_schedules.greedy import least_held
from tilewise.strategies.needed import needed
from tilewise.strategies.ring import ring
from tilewise.strategies.tiled import tiled, tiled_layout
from tilewise.strategies.tree import tree
from tilewise.strategies.ulysses import ulysses


def near_square(number: int) -> tuple[int, int]:
    """Two factors of a number, as equal as can be, the smaller one first."""
    small = max(d for d in divisors(number) if d * d <= number)
    return small, number // small


def degrees(world_size: int, num_heads: int, num_kv_heads: int) -> list[int]:
    """The degrees of ulysses that the heads and the number of ranks allow."""

    def legal(degree: int) -> bool:
        try:
            head_groups(num_heads, num_kv_heads, degree)
        except ValueError:
            return False
        return True

    return [degree for degree in divisors(world_size) if legal(degree)]


def tile_sizes(world_size: int) -> list[int]:
    """Return the q_tile of meshes worth trying: divisors of world_size, without 1 and world_size.

    [1] if there are no others: a mesh with 1 or world_size is a ring.
    """
    return divisors(world_size)[1:-1] or [1]


class Shape(NamedTuple):
    """Sizes of a rank's tiles and calls, in shards of the plan inside a head group."""

    q: int = 0  # shards that a rank's tiles read; 0: not known
    kv: int = 0
    # query and KV shards of calls: every call lies in one of these; none: not known
    calls: tuple[tuple[int, int], ...] = ()
    # tile of the plan between nodes, whose transfers all cross nodes
    nodes: tuple[int, int] = (1, 1)
    at_once: bool = False  # whether one call reads all shards: no transfer hides behind a call


class Variant(NamedTuple):
    """A plan that could be made, for the ranks of one head group."""

    kind: str  # what the planner's tables call it
    make: Callable[[], Plan]
    shape: Shape
    schedule: str = ""  # of a mesh; "held" if it holds as few shards at once as it can
    further: bool = False  # one more order of a tile, to be tried after another
    # a further one, of backward in both passes: for runs that keep what forward gathered, where
    # else both would have forward's
    keeps: bool = False
    # exact, and not tried: another's plan, as mesh(n, q_tile=1) is ring(n), or only to compare with
    degenerate: bool = False


def _rings(n: int) -> Iterator[Variant]:
    yield Variant("ring", partial(ring, n), Shape(1, n, ((1, 1),)))
    moves_q, shape = partial(ring, n, moves="q"), Shape(n, 1, ((1, 1),))
    yield Variant("ring of q", moves_q, shape, degenerate=n == 1)


def _meshes(a: int, b: int, kv_bytes: float | None) -> Iterator[Variant]:
    """A tile in every schedule. Those that weigh bytes first weigh them as for MHA, which makes
    large calls of a tile, and then as the heads have them."""
    thin, make = 1 in (a, b), partial(mesh, a * b, a, kv_bytes=kv_bytes)
    shape = Shape(a, b, ((a, 1), (1, b)))  # a call reads what one arrival makes possible
    for schedule in SCHEDULES:
        make_ordered = partial(make, schedule=schedule)
        variant = Variant("mesh", make_ordered, shape, schedule)
        if schedule == "gather":
            gathered = Shape(a, b, ((a, b),), at_once=True)
            yield variant._replace(shape=gathered, degenerate=thin and a == 1)
            continue
        variant = variant._replace(degenerate=thin or schedule == "paper")
        if schedule not in ("greedy", "eager"):
            yield variant
            continue
        further = variant._replace(further=True)
        first = further if schedule == "eager" else variant
        if kv_bytes is not None:
            yield first._replace(make=partial(make_ordered, kv_bytes=MHA))
            first = further
        yield first
        yield further._replace(make=partial(make_ordered, backward=True), keeps=True)
    if not thin:
        make_held = partial(make, held=least_held(a, b))
        yield Variant("mesh", make_held, shape, "held")


def _grids(rows: int, columns: int) -> Iterator[Variant]:
    """Yield attention2d on a grid of ranks: all gathered first, and overlapped with compute."""
    shape, thin = Shape(columns, rows, ((columns, rows),), at_once=True), 1 in (rows, columns)
    yield Variant("attention2d", partial(attention2d, rows, columns), shape, degenerate=thin)
    make_overlapped = partial(attention2d, rows, columns, overlap=True)
    overlapped = shape._replace(at_once=False)
    yield Variant("attention2d overlap", make_overlapped, overlapped, "kv_first", degenerate=True)


class StrategyEntry(NamedTuple):
    """A strategy whose plans are for any mask and layout.

    Attributes:
        make: the public function, of a and b if the ranks are cut, else of their number.
        shape: of its one plan on a x b ranks.
        forms: (a, b, kv_bytes) -> its plans on a x b ranks, if it has several; first the one to
            take when in doubt. kv_bytes: of the heads, where they are known and not those of MHA.
            With neither shape nor forms it composes plans, and who composes them says which.
        cut: what a and b are. "nodes": num_nodes, node_size; "grid": any two factors; "tile": the
            same, and 1 is as good as others; "": only their product counts.
        layout: on which a causal mask leaves its ranks, or its calls, even.
        levels: whether it levels by itself what that layout leaves uneven.
        nests: whether the planner tries it between nodes, and inside them, under hierarchical.
        uneven: whether ranks differ under any mask, so that each has to be simulated.
        decodes: whether its queries are the same few tokens on every rank.
    """

    make: Callable[..., Plan]
    shape: Callable[[int, int], Shape] | None = None
    forms: Callable[[int, int, float | None], Iterable[Variant]] | None = None
    cut: Literal["", "nodes", "grid", "tile"] = ""
    layout: Callable[[int, int], Layout] = zigzag
    levels: bool = False
    nests: bool = False
    uneven: bool = False
    decodes: bool = False

    @property
    def name(self) -> str:
        return self.make.__name__

    def at(self, a: int, b: int, kv_bytes: float | None = None) -> Iterator[Variant]:
        """Yield the strategy's plans on a x b ranks."""
        if self.forms:
            yield from self.forms(a, b, kv_bytes)
        elif self.shape:
            numbers = (a, b) if self.cut else (a * b,)
            make = partial(self.make, *numbers)
            yield Variant(self.name, make, self.shape(a, b), degenerate=1 in numbers)

    def factors(self, world_size: int) -> list[tuple[int, int]]:
        """Return the pairs (a, b) with a * b = world_size whose plans differ, small nodes first."""
        pairs = [(d, world_size // d) for d in divisors(world_size)]
        return pairs[::-1] if self.cut == "nodes" else pairs if self.cut else pairs[:1]

    def variants(self, world_size: int, kv_bytes: float | None = None) -> Iterator[Variant]:
        """All its plans on a number of ranks."""
        for a, b in self.factors(world_size):
            yield from self.at(a, b, kv_bytes)


class MaskAwareEntry(NamedTuple):
    """A strategy whose plans are for one mask and one layout."""

    make: Callable[..., Plan]  # the public function
    plan: Callable[[Mask, Layout, float], Plan]  # the plan, weighed for these bytes (kv_bytes)
    layout: Callable[[Mask, int, int, float], Layout]  # where it is at home: (.., kv_bytes)
    levels: bool = False  # whether it levels by itself what any other layout leaves uneven

    @property
    def name(self) -> str:
        return self.make.__name__


STRATEGIES = (
    StrategyEntry(ring, forms=lambda a, b, _: _rings(a * b), nests=True),
    StrategyEntry(
        all_gather, lambda a, b: Shape(1, a * b, ((1, a * b),), at_once=True), nests=True
    ),
    StrategyEntry(double_ring, lambda a, b: Shape(1, a * b, ((1, 1),)), cut="nodes"),
    StrategyEntry(
        balanced_ring,
        lambda a, b: Shape(1, a * b, ((1, 1),)),
        layout=contiguous,
        levels=True,
        uneven=True,
    ),
    StrategyEntry(
        attention2d, forms=lambda a, b, _: _grids(a, b), cut="grid", layout=striped, uneven=True
    ),
    StrategyEntry(mesh, forms=_meshes, cut="tile", nests=True),
    StrategyEntry(hierarchical),
    StrategyEntry(ulysses),
    StrategyEntry(tree, lambda a, b: Shape(), layout=contiguous, decodes=True),
)
MASK_AWARE = (
    MaskAwareEntry(
        needed,
        lambda mask, layout, _: needed(mask, layout),
        lambda mask, num_tokens, n, _: balanced(mask, num_tokens, n),
    ),
    MaskAwareEntry(
        tiled,
        lambda mask, layout, kv_bytes: tiled(mask, layout, kv_bytes=kv_bytes),
        lambda mask, num_tokens, n, kv_bytes: tiled_layout(mask, num_tokens, n, kv_bytes=kv_bytes),
        levels=True,
    ),
)

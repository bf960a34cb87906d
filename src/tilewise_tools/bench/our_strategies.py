"""tilewise's strategies as contenders of the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

import tilewise as tw
from tilewise.compiler.checker import check
from tilewise.expressions import NO_WIRE, read_plan, read_wire
from tilewise.planning.candidate import load_plan
from tilewise.planning.search import promising
from tilewise.strategies import catalog
from tilewise.strategies.catalog import degrees, divisors, near_square, tile_sizes
from tilewise.transport.resolve import transport_for
from tilewise.wires.wire import AnyWire, latent_of
from tilewise_tools.bench.case import LAYOUTS, BenchCase
from tilewise_tools.bench.contender import Facts, Prediction, Traffic
from tilewise_tools.bench.traffic import WatchedTransport
from tilewise_tools.mask_report.figures import report
from tilewise_tools.naming import naming
from tilewise_tools.outside import check_kernel_of, is_outside, kernel_of, load, plan_of, version_of


class Planned(NamedTuple):
    """The plans that a strategy makes for a case; backward_plan None: backward runs the
    plan too.
    """

    plan: tw.Plan
    layout: tw.Layout
    backward_plan: tw.Plan | None = None


def from_file(path: str, setting: _Setting) -> Planned:
    """The plan that to_json wrote, or the candidate that tilewise plan wrote."""
    case, loaded = setting.case, load_plan(path)
    if isinstance(loaded, tw.Plan):
        if loaded.world_size != case.world_size:
            raise ValueError(f"{path} is for {loaded.world_size} ranks, not {case.world_size}")
        return Planned(loaded, setting.layout)
    for name, found_value, case_value in (
        ("ranks", loaded.world_size, case.world_size),
        ("tokens", loaded.work.num_tokens, case.num_tokens),
        ("heads", (loaded.work.num_heads, loaded.work.num_kv_heads), case.heads[:2]),
        ("mask", loaded.work.mask, setting.mask),
    ):
        if found_value != case_value:
            raise ValueError(
                f"{path} is for {name} {found_value}, not {case_value}; plan for this case"
            )
    one_plan = loaded.backward_plan == loaded.plan
    return Planned(loaded.plan, loaded.layout, None if one_plan else loaded.backward_plan)


class _Setting:
    """A case as strategies see it; the mask and its layout are made once."""

    def __init__(self, case: BenchCase, mask: tw.masks.Mask, ulysses_degree: int | None = None):
        self.case, self.mask, self.n = case, mask, case.world_size
        self.ulysses_degree = ulysses_degree
        self.kv_bytes = 2 * case.num_kv_heads / case.num_heads

    @cached_property
    def layout(self) -> tw.Layout:
        """The case's layout; "own" is the one that levels the mask's work."""
        return LAYOUTS[self.case.layout](self.mask, self.case.num_tokens, self.n)

    def two(self, name: str, *, nodes: bool = False) -> tuple[int, int]:
        """Return two factors of the number of ranks, for a strategy that needs both above 1.

        Args:
            nodes: take (hosts, ranks per host) if both are above 1.
        """
        network = self.case.network
        hosts = network.hosts, network.ranks_per_host
        factors = hosts if nodes and min(hosts) > 1 else near_square(self.n)
        if 1 in factors:
            raise ValueError(f"{name} needs a number of ranks that is a product, not {self.n}")
        return factors

    def work(self, layout: tw.Layout, wire: AnyWire | None = None) -> tw.Workload:
        sizes, dtype = (self.case.num_tokens, *self.case.heads), self.case.dtype
        return tw.Workload(*sizes, dtype=dtype, mask=self.mask, layout=layout, wire=wire)

    def inside(self, name: str, *, two_levels: bool = False, by_heads: bool = True) -> int:
        """Ranks that share what a hybrid does inside a node: split heads, or pass KV in a ring.

        The degree that was asked for; else the ranks of a node, or half of all where these are all
        or one, or the next lower number that heads and ranks allow.

        Args:
            two_levels: what is left must be a product of two, for a tile or a double ring.
            by_heads: they split heads.
        """
        n, heads, node = self.n, self.case.heads[:2], self.case.network.ranks_per_host
        legal = degrees(n, *heads) if by_heads else divisors(n)
        inner_ranks = ((d, min(near_square(n // d)) if two_levels else n // d) for d in legal)
        legal = [d for d, inner in inner_ranks if d > 1 and inner > 1]
        product_text = "a product of two, as 4 or 6," if two_levels else "two or more"
        if self.ulysses_degree is not None:
            if self.ulysses_degree in legal:
                return self.ulysses_degree
            raise ValueError(
                f"{name}: ulysses_degree ({self.ulysses_degree}) must be above 1, divide the ranks "
                f"({n}) with {product_text} left over, and the heads ({heads[0]}:{heads[1]}); "
                f"{', '.join(map(str, legal)) or 'nothing'} would do"
            )
        preferred = node if 1 < node < n else n // 2
        if lower_degrees := [d for d in legal if d <= preferred] or legal[:1]:
            return max(lower_degrees)
        heads_text = "and the heads " if by_heads else ""
        raise ValueError(
            f"{name} needs a degree above 1 that divides the ranks ({n}) with {product_text} left "
            f"over, {heads_text}({heads[0]}:{heads[1]})"
        )


def _usual(strategy: catalog.StrategyEntry, setting: _Setting) -> Planned:
    """The usual plan of a strategy for a case."""
    if strategy.decodes:
        raise ValueError(
            f"{strategy.name} is for decoding: its queries are a few tokens that every rank holds"
        )
    if strategy.cut == "tile":
        return _of_tiles(setting)
    factors = near_square(setting.n)
    if strategy.cut:
        factors = setting.two(strategy.name, nodes=strategy.cut == "nodes")
    plan = next(strategy.at(*factors)).make()
    if strategy.levels and setting.case.layout == "own":
        return Planned(plan, strategy.layout(setting.case.num_tokens, setting.n))
    return Planned(plan, setting.layout)


def _of_tiles(setting: _Setting, degree: int = 1) -> Planned:
    """Return the mesh whose busiest rank sends least in the passes that the case runs.

    All tile shapes are compared. Under a split by heads a tile of one row or column is left out,
    because it would be a ring.
    """
    layout, n = setting.layout, setting.n // degree
    work = setting.work(layout)

    def make_plan(q_tile: int) -> tw.Plan:
        inner = tw.mesh(n, q_tile)
        return tw.ulysses(degree, inner) if degree > 1 else inner

    shapes = tile_sizes(n) if degree > 1 else divisors(n)

    def sent_bytes(plan: tw.Plan) -> tuple[int, int]:
        by_rank = setting.case.timed(*tw.volume(plan, work))
        return max(by_rank), sum(by_rank)

    return Planned(min(map(make_plan, shapes), key=sent_bytes), layout)


def _mask_aware(strategy: catalog.MaskAwareEntry, setting: _Setting) -> Planned:
    """The plan of a mask-aware strategy, on its own best layout unless the case names one."""
    mask, num_tokens, kv_bytes = setting.mask, setting.case.num_tokens, setting.kv_bytes
    use_own_layout = strategy.levels and setting.case.layout == "own"
    at_home = strategy.layout(mask, num_tokens, setting.n, kv_bytes) if use_own_layout else None
    layout = at_home or setting.layout
    return Planned(strategy.plan(mask, layout, kv_bytes), layout)


def _auto(setting: _Setting) -> Planned:
    """Return the plans that ContextParallel takes for strategy "auto"."""
    work = setting.work(setting.layout)
    machine = tw.Machine.preset("h100x8" if setting.case.device == "cuda" else "cpu-gloo")
    plan, backward, _ = promising(work, machine, setting.n)
    return Planned(plan, setting.layout, None if backward is plan else backward)


def _hierarchical(setting: _Setting) -> tw.Plan:
    """Return a mesh of whole nodes, its tile as square as can be, with a ring inside each node."""
    node_size = setting.inside("hierarchical", two_levels=True, by_heads=False)
    nodes = setting.n // node_size
    return tw.hierarchical(tw.mesh(nodes, near_square(nodes)[0]), tw.ring(node_size))


def _ulysses_ring(setting: _Setting, levels: int = 1) -> tw.Plan:
    """Return Ulysses around a ring (USP), or around a double ring (LoongTrain) if levels is 2."""
    name = "ulysses_double_ring" if levels > 1 else "ulysses_ring"
    degree = setting.inside(name, two_levels=levels > 1)
    inner = setting.n // degree
    rings = tw.double_ring(*near_square(inner)) if levels > 1 else tw.ring(inner)
    return tw.ulysses(degree, rings)


def _ulysses_mesh(setting: _Setting) -> Planned:
    """Return Ulysses around a mesh."""
    return _of_tiles(setting, setting.inside("ulysses_mesh", two_levels=True))


COMPOSED: Mapping[str, Callable[[_Setting], tw.Plan | Planned]] = MappingProxyType(
    {
        "ring_moves_q": lambda s: tw.ring(s.n, moves="q"),
        "attention2d_overlap": lambda s: tw.attention2d(
            *s.two("attention2d_overlap"), overlap=True
        ),
        "hierarchical": _hierarchical,
        "ulysses": lambda s: tw.ulysses(s.n),
        "ulysses_ring": _ulysses_ring,
        "ulysses_double_ring": lambda s: _ulysses_ring(s, levels=2),
        "ulysses_mesh": _ulysses_mesh,
    }
)
"""Strategies that compose plans, and other forms of strategies of the catalog."""

HYBRIDS = ("hierarchical", "ulysses_ring", "ulysses_double_ring", "ulysses_mesh")
"""Strategies in which ulysses_degree is the number of ranks that work together inside a node."""


STRATEGIES: Mapping[str, Callable[[_Setting], tw.Plan | Planned]] = MappingProxyType(
    {
        **{s.name: partial(_usual, s) for s in catalog.STRATEGIES},
        **COMPOSED,
        **{s.name: partial(_mask_aware, s) for s in catalog.MASK_AWARE},
        "auto": _auto,
    }
)
"""Function of each name: a case's plan and layout, or a plan alone, on the case's layout."""


@dataclass(frozen=True)
class Strategy:
    """A strategy by its name in STRATEGIES, written as a call: "ulysses(2, inner=ring(2))", the
    file of a plan or a candidate: "plan.json", or a function of a file outside the package.

    Args:
        kernel: what its tiles are computed with, a name or "FILE.py:name"; None: what suits.
        wire: as read_wire reads it; None: none.
        prune: leave out what the mask makes needless.
        ulysses_degree: of HYBRIDS; None: what a node has.
    """

    text: str
    kernel: str | None = None
    wire: str | None = None
    prune: bool = True
    ulysses_degree: int | None = None
    library: str = field(default="tilewise", init=False)

    @property
    def name(self) -> str:
        degree = self.ulysses_degree and f"degree {self.ulysses_degree}"
        wire = self.wire and f"wire {self.wire}"
        return ", ".join(part for part in (self.text, degree, self.kernel, wire) if part)

    @property
    def version(self) -> str:
        return version_of(self.text, self.kernel)

    def check(self, case: BenchCase) -> None:
        """Refuse a plan or a kernel of a file outside the package that is none."""
        if is_outside(self.text):
            with naming("strategy"):
                _check_plan(self.text, self.version, case.world_size)
        if self.kernel is not None:
            with naming("kernel"):
                check_kernel_of(self.kernel, self.version, case.asked)

    def planned(self, case: BenchCase, mask: tw.masks.Mask | None = None) -> Planned:
        """Its plan and layout."""
        setting = _Setting(case, case.make_mask() if mask is None else mask, self.ulysses_degree)
        if self.text in STRATEGIES:
            plan = STRATEGIES[self.text](setting)
        elif self.text.endswith(".json"):
            plan = from_file(self.text, setting)
        else:
            read_text = plan_of if is_outside(self.text) else read_plan
            plan = read_text(self.text, case.world_size)
        planned = plan if isinstance(plan, Planned) else Planned(plan, setting.layout)
        forward, _ = setting.work(planned.layout).resolve(planned.plan)
        return planned._replace(plan=forward.plan)

    @lru_cache(maxsize=8)  # noqa: B019 - a frozen value: equal ones share what they find
    def asked(self, case: BenchCase) -> tuple[Planned, tw.Workload]:
        """The plan and workload for questions before a run. Ranks plan again for themselves."""
        mask = case.make_mask()
        planned = self.planned(case, mask)
        wire = read_wire(self.wire or NO_WIRE)
        return planned, _Setting(case, mask).work(planned.layout, wire)

    def supports(self, case: BenchCase) -> str | None:
        try:
            self.asked(case)
        except ValueError as error:
            return " ".join(str(error).split())
        reason = kernel_of(self.kernel).supports(*case.asked) if self.kernel else None
        return reason and f"kernel {self.kernel}: {reason}"

    def predict(self, case: BenchCase, machine: tw.Machine) -> Prediction:
        """Return the times that the simulator expects and the bytes of tw.volume."""
        (plan, _, backward), work = self.asked(case)
        simulation = tw.simulate(plan, work, machine, backward)
        seconds, exposed = case.timed(
            *(
                (timeline.seconds, max(use.exposed_seconds for use in timeline.ranks))
                for timeline in (simulation.forward, simulation.backward)
            )
        )
        sent_bytes = max(case.timed(*tw.volume(plan, work, backward)))
        return Prediction(simulation.peak_bytes, seconds, exposed, sent_bytes, plan.name)

    def prepare(self, case: BenchCase, rank: int, group: Any) -> _Prepared:
        mask = case.make_mask()
        planned = self.planned(case, mask)
        wire, transport = read_wire(self.wire or NO_WIRE), WatchedTransport(transport_for(group))
        arguments = {**planned._asdict(), "mask": mask, "wire": wire, "prune": self.prune}
        arguments |= {"kernel": self.kernel and kernel_of(self.kernel), "group": transport}
        return _Prepared(case.num_heads, arguments)


@dataclass(frozen=True)
class _Prepared:
    num_heads: int
    words: dict[str, Any]  # of tw.attention

    @property
    def layout(self) -> tw.Layout:
        return self.words["layout"]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tw.attention(q, k, v, **self.words)

    def facts(self) -> Facts:
        plan, rank = self.words["plan"], self.words["group"].rank
        (waste,) = report(self.words["mask"], self.layout, plan, ranks=[rank])
        heads = self.num_heads // plan.num_head_groups
        return Facts(waste.allowed * heads, waste.computed * heads, waste.num_calls)

    def traffic(self) -> Traffic:
        return self.words["group"].traffic()


@lru_cache(maxsize=64)
def _check_plan(text: str, version: str, n: int) -> None:
    try:
        check(plan_of(text, n))
    except tw.plan.PlanError as error:
        raise ValueError(f"strategy {text} for {n} ranks computes no attention: {error}") from None


def strategy(
    text: str,
    kernel: str | None = None,
    wire: str | None = None,
    ulysses_degree: int | None = None,
    *,
    prune: bool = True,
) -> Strategy:
    """A strategy by what a user writes, the kernel that it computes with, the wire, and of HYBRIDS
    the degree; other strategies have none.
    """
    with naming("strategy"):
        if is_outside(text):
            load(text)
        elif text not in STRATEGIES and not text.endswith(".json"):
            if "(" not in text:
                raise ValueError(
                    f"strategy {text!r} is not known; take one of {', '.join(STRATEGIES)}, write a "
                    "call, as in ulysses(2, inner=ring(2)), name a plan's file, plan.json, or a "
                    "function of a module, module:name or FILE.py:name"
                )
            read_plan(text)
    if kernel:
        with naming("kernel"):
            kernel_of(kernel)
    with naming("wire"):
        if wire and latent_of(read_wire(wire)):
            raise ValueError(f"{wire!r} is of latents, but the cases have k and v; take another")
    degree = (ulysses_degree or None) if text in HYBRIDS else None
    return Strategy(text, kernel or None, wire or None, prune, degree)

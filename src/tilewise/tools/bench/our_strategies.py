"""tilewise's strategies as contenders of the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

import tilewise as tw
from tilewise.arguments import require_type
from tilewise.compiler.checker import check
from tilewise.expressions import NO_WIRE, read_plan, read_wire
from tilewise.layouts.balanced import default_layout
from tilewise.planning.candidate import load_plan
from tilewise.planning.search import promising
from tilewise.strategies import catalog
from tilewise.strategies.catalog import degrees, divisors, near_square
from tilewise.tools.bench.case import BenchCase
from tilewise.tools.bench.contender import Facts, Prediction, Traffic
from tilewise.tools.bench.our_kernels import asked_of, check_outside, provided, version_of
from tilewise.tools.bench.traffic import WatchedTransport
from tilewise.tools.mask_report.figures import LAYOUTS, report
from tilewise.tools.outside import is_outside, load
from tilewise.transport.resolve import transport_for
from tilewise.wires.wire import AnyWire, latent_of


class Planned(NamedTuple):
    """What a strategy makes of a case; backward_plan None: backward runs the plan too."""

    plan: tw.Plan
    layout: tw.Layout
    backward_plan: tw.Plan | None = None


def from_file(path: str, setting: _Setting) -> Planned:
    """The plan that to_json wrote, or the candidate that tilewise plan wrote."""
    case = setting.case
    found = load_plan(path)
    if isinstance(found, tw.Plan):
        if found.world_size != case.world_size:
            raise ValueError(f"{path} is for {found.world_size} ranks, not {case.world_size}")
        return Planned(found, setting.layout())
    for what, told, wanted in (
        ("ranks", found.world_size, case.world_size),
        ("tokens", found.work.num_tokens, case.num_tokens),
        ("heads", (found.work.num_heads, found.work.num_kv_heads), case.heads[:2]),
        ("mask", found.work.mask, case.make_mask()),
    ):
        if told != wanted:
            raise ValueError(f"{path} is for {what} {told}, not {wanted}; plan for this case")
    same = found.backward_plan == found.plan
    return Planned(found.plan, found.layout, None if same else found.backward_plan)


class _Setting(NamedTuple):
    """A case as strategies see it; the mask and its layout are made once."""

    case: BenchCase
    mask: tw.Mask

    @property
    def n(self) -> int:
        return self.case.world_size

    @property
    def kv_bytes(self) -> float:
        return 2 * self.case.num_kv_heads / self.case.num_heads

    def nodes(self) -> tuple[int, int]:
        """Hosts and the ranks on each; where there is but one of either, ranks are cut in two
        factors."""
        network = self.case.network
        if min(network.hosts, network.ranks_per_host) > 1:
            return network.hosts, network.ranks_per_host
        return near_square(self.n)

    def layout(self) -> tw.Layout:
        """The case's; "own": what levels the mask's work."""
        make = default_layout if self.case.layout == "own" else LAYOUTS[self.case.layout]
        return make(self.mask, self.case.num_tokens, self.n)

    def work(self, layout: tw.Layout, wire: AnyWire | None = None) -> tw.Workload:
        sizes, dtype = (self.case.num_tokens, *self.case.heads), self.case.dtype
        return tw.Workload(*sizes, dtype=dtype, mask=self.mask, layout=layout, wire=wire)


def _usual(strategy: catalog.StrategyEntry, setting: _Setting) -> Planned:
    """The plan of a strategy that one takes when in doubt."""
    if strategy.decodes:
        raise ValueError(
            f"{strategy.name} is for decoding: its queries are a few tokens that every rank holds"
        )
    if strategy.cut == "tile":
        return _of_tiles(setting)
    factors = setting.nodes() if strategy.cut == "nodes" else near_square(setting.n)
    if strategy.cut in ("nodes", "grid"):
        _two(strategy.name, factors)
    plan = next(strategy.at(*factors, setting.kv_bytes)).make()
    if strategy.levels and setting.case.layout == "own":
        return Planned(plan, strategy.layout(setting.case.num_tokens, setting.n))
    return Planned(plan, setting.layout())


def _of_tiles(setting: _Setting, degree: int = 1) -> Planned:
    """Of the meshes of all tiles, split by heads first, the one whose busiest rank sends least in
    what the case runs."""
    layout, which = setting.layout(), setting.case.which
    work = setting.work(layout)
    kv_bytes = max(setting.kv_bytes, 2 * degree / setting.case.num_heads)

    def made(q_tile: int) -> tw.Plan:
        inner = tw.mesh(setting.n // degree, q_tile, kv_bytes=kv_bytes)
        return tw.ulysses(degree, inner) if degree > 1 else inner

    def sent(plan: tw.Plan) -> tuple[int, int]:
        passes = tw.volume(plan, work)
        by_rank = [sum(both) for both in zip(*passes, strict=True)]
        if which != "both":
            by_rank = passes.forward if which == "forward" else passes.backward
        return max(by_rank), sum(by_rank)

    return Planned(min(map(made, divisors(setting.n // degree)), key=sent), layout)


def _mask_aware(strategy: catalog.MaskAwareEntry, setting: _Setting) -> Planned:
    case, mask, kv_bytes = setting.case, setting.mask, setting.kv_bytes
    if strategy.levels and case.layout != "own":
        raise ValueError(f"{strategy.name} makes its own layout, it cannot run on {case.layout}")
    layout = (
        strategy.layout(mask, case.num_tokens, setting.n, kv_bytes)
        if strategy.levels
        else setting.layout()
    )
    return Planned(strategy.plan(mask, layout, kv_bytes), layout)


def _two(name: str, factors: tuple[int, int]) -> tuple[int, int]:
    """The factors, refused if one of them is 1."""
    if 1 in factors:
        n = factors[0] * factors[1]
        raise ValueError(f"{name} needs a number of ranks that is a product, not {n}")
    return factors


def _auto(setting: _Setting) -> Planned:
    """What ContextParallel takes for strategy "auto"."""
    work = setting.work(setting.layout())
    machine = tw.Machine.preset("h100x8" if setting.case.device == "cuda" else "cpu-gloo")
    plan, backward = promising(work, machine, setting.n)
    return Planned(plan, work.layout_for(setting.n), None if backward is plan else backward)


def _hierarchical(setting: _Setting) -> tw.Plan:
    """A tile of whole nodes, a ring inside each."""
    num_nodes, node_size = _two("hierarchical", setting.nodes())
    return tw.hierarchical(tw.mesh(num_nodes), tw.ring(node_size))


def _attention2d_overlap(setting: _Setting) -> tw.Plan:
    """ATTENTION2D's variant O."""
    return tw.attention2d(*_two("attention2d_overlap", near_square(setting.n)), overlap=True)


def _degree(setting: _Setting, name: str, two_levels: bool = False) -> int:
    """The largest Ulysses degree that the heads allow and that leaves an inner plan its ranks.

    Args:
        two_levels: the inner plan cuts its ranks in two factors.
    """
    n, heads = setting.n, (setting.case.num_heads, setting.case.num_kv_heads)
    left = ((d, min(near_square(n // d)) if two_levels else n // d) for d in degrees(n, *heads))
    degree = max((d for d, inner in left if inner > 1), default=1)
    if degree > 1:
        return degree
    what = "a product of two" if two_levels else "two"
    raise ValueError(
        f"{name} needs a degree above 1 that divides the ranks ({n}) with {what} left over, and "
        f"the heads ({heads[0]}:{heads[1]})"
    )


def _ulysses_ring(setting: _Setting, levels: int = 1) -> tw.Plan:
    """Heads first, a ring of what is left: USP's; on two levels LoongTrain's."""
    name = "ulysses_double_ring" if levels > 1 else "ulysses_ring"
    degree = _degree(setting, name, levels > 1)
    inner = setting.n // degree
    rings = tw.double_ring(*near_square(inner)) if levels > 1 else tw.ring(inner)
    return tw.ulysses(degree, rings)


COMPOSED: Mapping[str, Callable[[_Setting], tw.Plan | Planned]] = MappingProxyType(
    {
        "ring_moves_q": lambda s: tw.ring(s.n, moves="q"),
        "attention2d_overlap": _attention2d_overlap,
        "hierarchical": _hierarchical,
        "ulysses": lambda s: tw.ulysses(s.n),
        "ulysses_ring": _ulysses_ring,
        "ulysses_double_ring": lambda s: _ulysses_ring(s, levels=2),
        "ulysses_mesh": lambda s: _of_tiles(s, _degree(s, "ulysses_mesh")),
    }
)
"""Those that compose plans, and another form of one of the catalog's."""


STRATEGIES: Mapping[str, Callable[[_Setting], tw.Plan | Planned]] = MappingProxyType(
    {
        **{s.name: partial(_usual, s) for s in catalog.STRATEGIES},
        **COMPOSED,
        **{s.name: partial(_mask_aware, s) for s in catalog.MASK_AWARE},
        "auto": _auto,
    }
)
"""What each name means for a case; of a plan alone, on the case's layout."""


@dataclass(frozen=True)
class Strategy:
    """A strategy by its name in STRATEGIES, written as a call: "ulysses(2, inner=ring(2))", the
    file of a plan or a candidate: "plan.json", or a function of a file outside the package.

    Args:
        kernel: what its tiles are computed with, a name or "FILE.py:name"; None: what suits.
        wire: as read_wire reads it; None: none.
    """

    text: str
    kernel: str | None = None
    wire: str | None = None

    @property
    def name(self) -> str:
        wire = self.wire and f"wire {self.wire}"
        return ", ".join(part for part in (self.text, self.kernel, wire) if part)

    @property
    def encoding(self) -> AnyWire | None:
        return read_wire(self.wire or NO_WIRE)

    @property
    def library(self) -> str:
        return "tilewise"

    @property
    def version(self) -> str:
        return version_of(self.text, self.kernel)

    def check(self, case: BenchCase) -> None:
        """Refuse a plan or a kernel of a file outside the package that is none."""
        if is_outside(self.text):
            _check_plan(self.text, self.version, case.world_size)
        if self.kernel is not None and is_outside(self.kernel):
            check_outside(self.kernel, self.version, *asked_of(case))

    def planned(self, case: BenchCase, mask: tw.Mask | None = None) -> Planned:
        """Its plan and layout."""
        setting = _Setting(case, case.make_mask() if mask is None else mask)
        if self.text in STRATEGIES:
            made = STRATEGIES[self.text](setting)
        elif self.text.endswith(".json"):
            made = from_file(self.text, setting)
        else:
            read = _outside_plan if is_outside(self.text) else read_plan
            made = read(self.text, case.world_size)
        planned = made if isinstance(made, Planned) else Planned(made, setting.layout())
        forward, _ = setting.work(planned.layout).resolve(planned.plan)
        return planned._replace(plan=forward.plan)

    def supports(self, case: BenchCase) -> str | None:
        try:
            _asked(self, case)
        except ValueError as error:
            return " ".join(str(error).split())
        reason = provided(self.kernel).supports(*asked_of(case)) if self.kernel else None
        return reason and f"kernel {self.kernel}: {reason}"

    def predict(self, case: BenchCase, machine: tw.Machine) -> Prediction:
        """As the simulator says, and tw.volume."""
        (plan, layout, backward), mask = _asked(self, case)
        work = _Setting(case, mask).work(layout, self.encoding)
        replayed = tw.simulate(plan, work, machine, backward)
        sent = tw.volume(plan, work, backward)
        passes = {
            "forward": ((replayed.forward,), (sent.forward,)),
            "backward": ((replayed.backward,), (sent.backward,)),
            "both": ((replayed.forward, replayed.backward), tuple(sent)),
        }
        timelines, counts = passes[case.which]
        return Prediction(
            replayed.peak_bytes,
            sum(timeline.seconds for timeline in timelines),
            sum(max(use.exposed_seconds for use in timeline.ranks) for timeline in timelines),
            max(map(sum, zip(*counts, strict=True))),
            plan.name,
        )

    def prepare(self, case: BenchCase, rank: int, group: Any) -> _Prepared:
        mask = case.make_mask()
        plan, layout, backward = self.planned(case, mask)
        transport = WatchedTransport(transport_for(group))
        kernel = None if self.kernel is None else provided(self.kernel)
        planned = mask, plan, layout, backward
        return _Prepared(case, *planned, transport, kernel, self.encoding)


@lru_cache(maxsize=8)
def _asked(strategy: Strategy, case: BenchCase) -> tuple[Planned, tw.Mask]:
    """For questions before a run, which come several at a time; ranks plan for themselves."""
    mask = case.make_mask()
    return strategy.planned(case, mask), mask


@dataclass(frozen=True)
class _Prepared:
    case: BenchCase
    mask: tw.Mask
    plan: tw.Plan
    layout: tw.Layout
    backward_plan: tw.Plan | None
    transport: WatchedTransport
    kernel: tw.Kernel | None
    wire: AnyWire | None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        chosen = {"plan": self.plan, "backward_plan": self.backward_plan, "layout": self.layout}
        where = {"group": self.transport, "kernel": self.kernel, "wire": self.wire}
        return tw.attention(q, k, v, mask=self.mask, **where, **chosen)

    def facts(self) -> Facts:
        (waste,) = report(self.mask, self.layout, self.plan, ranks=[self.transport.rank])
        heads = self.case.num_heads // self.plan.num_head_groups
        return Facts(waste.allowed * heads, waste.computed * heads, waste.num_calls)

    def traffic(self) -> Traffic:
        return self.transport.traffic()


def _outside_plan(text: str, n: int) -> tw.Plan:
    """The plan of a file outside the package: a plan, or what a function of n returns."""
    found = load(text)
    plan = found if isinstance(found, tw.Plan) else found(n)
    return require_type(tw.Plan, text, plan, "tw.ring(n)")


@lru_cache(maxsize=64)
def _check_plan(text: str, version: str, n: int) -> None:
    plan = _outside_plan(text, n)
    if plan.world_size != n:
        raise ValueError(f"strategy {text} made a plan for {plan.world_size} ranks, not for {n}")
    try:
        check(plan)
    except tw.PlanError as error:
        raise ValueError(f"strategy {text} for {n} ranks computes no attention: {error}") from None


def strategy(text: str, kernel: str | None = None, wire: str | None = None) -> Strategy:
    """A strategy by what a user writes, the kernel that it computes with, and the wire."""
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
        provided(kernel)
    if wire and latent_of(read_wire(wire)):
        raise ValueError(f"wire {wire!r} is of latents, but the cases have k and v; take another")
    return Strategy(text, kernel or None, wire or None)

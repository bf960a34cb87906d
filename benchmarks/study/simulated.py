"""Studies that are simulated: scaling, tile shapes, schedules, masks, a model's step."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

import tilewise as tw
from benchmarks.mesh_optimum import least, search
from benchmarks.study.against import EXPLAINED, UNITS, control_of, every_method, gains
from benchmarks.study.parts import RowsOf, at_once
from benchmarks.study.table import Chart, Row, StudyTable
from tilewise.layouts.balanced import default_layout
from tilewise.plan.payload import ShardWeights
from tilewise.simulation import Simulation
from tilewise.simulation.machine import LARGE_TILE, Machine
from tilewise.strategies.catalog import divisors, near_square
from tilewise.strategies.mesh_schedules.greedy import greedy_tile_steps, stepwise_tile_steps
from tilewise.strategies.mesh_schedules.model import seconds_of, transfer_bytes
from tilewise.strategies.mesh_schedules.paper import paper_tile_steps
from tilewise_tools.mask_report.figures import LAYOUTS
from tilewise_tools.mask_report.named import drawn
from tilewise_tools.report.bench_charts import waiting_bars
from tilewise_tools.report.page import Figure
from tilewise_tools.report.words import count, short

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
LONGEST = MappingProxyType({"attention2d_overlap": 256})
"""Devices up to which a method is simulated: the overlapped grid takes minutes beyond."""
USUAL_DEVICES = 128  # on which a weak scaling has the tokens of the strong one
MASKED_SIZES = (2, 4, 8, 16, 32)
TILE_SHAPES = ((2, 2), (2, 4), (3, 3), (4, 4), (4, 8), (8, 8))
TRIED = 3000
"""Programs of one length that the search for an optimum tries."""


def _sent(found: Simulation) -> int:
    return found.sent_bytes


def scaling(work: tw.Workload, machine: Machine, rows_of: RowsOf = at_once) -> Iterator[StudyTable]:
    """Strong and weak scaling from 8 to 1,024 devices."""
    units = {"devices": "", "tokens": "", "strategy": "", "plan": "", "time": "s", "computing": "s",
             "waiting": "s", "waiting share": "%", **UNITS, "sent": "B", "memory": "B"}  # fmt: skip
    per_device, known = work.num_tokens // USUAL_DEVICES, dict[str, float]()
    for name, title, tokens in (
        ("strong", f"Strong scaling: {count(work.num_tokens)} tokens", lambda _: work.num_tokens),
        ("weak", f"Weak scaling: {count(per_device)} tokens a device", lambda n: n * per_device),
    ):
        parts = {
            f"{n} devices": partial(
                _scaled, replace(work, num_tokens=tokens(n)), machine, n, known, len(units)
            )
            for n in SIZES
        }
        rows = rows_of(name, parts)
        about = (
            f"{_about(work, machine)} Both passes; computing and waiting of the ranks that do so "
            f"longest, bytes of the busiest rank, memory of the pass that needs most. {EXPLAINED} "
            "Rows without figures: no plan of this method exists there, and the plan's column says "
            "why; or it is not simulated, as attention2d_overlap beyond "
            f"{LONGEST['attention2d_overlap']} devices."
        )
        charts = (Chart("devices", "time", "strategy"), Chart("devices", "over ring", "strategy"))
        yield StudyTable(name, title, about, units, rows, charts, (_waits(name, rows),))


def _scaled(
    work: tw.Workload, machine: Machine, n: int, known: dict[str, float], columns: int
) -> Iterator[Row]:
    """All methods on n devices.

    Args:
        known: bytes that a plan holds for a token, by its name; filled here.
    """
    every = every_method(n, work, machine.node_size)
    found = {
        method: tw.simulate(plan, work, machine, exact=False)
        for method, plan in every.items()
        if isinstance(plan, tw.Plan) and n <= LONGEST.get(method, n)
    }
    over = gains({method: one.seconds for method, one in found.items()})
    for method, plan in every.items():
        said = plan if isinstance(plan, str) else short(plan.name)
        head = n, work.num_tokens, method, said
        if method not in found or isinstance(plan, str):
            yield (*head, *(None,) * (columns - len(head)))
            continue
        one = found[method]
        if said not in known:  # all buffers grow with a rank's tokens
            known[said] = one.peak_bytes / work.num_tokens
        times = one.seconds, one.compute_seconds, one.exposed_seconds
        share = 100 * one.exposed_seconds / one.seconds
        held = round(known[said] * work.num_tokens)
        yield (*head, *times, share, *over[method], _sent(one), held)


def _waits(name: str, rows: list[Row]) -> Figure:
    """The bars of the largest size on which most methods are simulated."""
    sizes: dict[int, list[Row]] = {}
    for row in rows:
        if row[4] is not None:
            sizes.setdefault(int(row[0] or 0), []).append(row)
    most = max(sizes, key=lambda n: (len(sizes[n]), n))
    parts = [(str(row[2]), float(row[5] or 0), float(row[6] or 0)) for row in sizes[most]]
    caption = "Of the rank that computes, and the rank that waits, longest; both passes."
    return waiting_bars(f"{name}-waits", f"Computing and waiting on {most} devices", parts, caption)


def tiles(
    work: tw.Workload, machine: Machine, rows_of: RowsOf = at_once, *, n: int = 256
) -> Iterator[StudyTable]:
    """Every tile shape of a mesh, by the bytes it moves for a FLOP."""
    units = {"tile": "", "forward": "B", "backward": "B", "bytes a kFLOP": "", "links over kernels":
             "x", "time": "s", "waiting": "s", "memory": "B"}  # fmt: skip
    ratio = 2 * work.num_kv_heads / work.num_heads
    plans = {f"{a} x {n // a}": tw.mesh(n, a, kv_bytes=ratio) for a in divisors(n)}
    plans |= {"double ring": control_of(n, machine), "all-gather": tw.all_gather(n)}
    parts = {name: partial(_tile, work, machine, name, plan) for name, plan in plans.items()}
    rows = rows_of("tiles", parts)
    about = (
        f"{_about(work, machine)} Query x KV shards of a rank's tile on {n} devices; 1 x {n} is a "
        "ring; the last two send its bytes over other links, and at once. Links over kernels: "
        "seconds of the bytes on one NIC over seconds of kernels; above 1 communication bounds "
        "the time of a tile whatever the schedule."
    )
    chart = Chart("bytes a kFLOP", "time", "tile", points=True)
    waits = [(str(row[0]), float(row[5] or 0) - float(row[6] or 0), float(row[6] or 0))
             for row in rows]  # fmt: skip
    caption = "Waiting of the rank that waits longest, both passes; the rest is computing."
    bars = waiting_bars("tiles-waits", f"Computing and waiting on {n} devices", waits, caption)
    yield StudyTable("tiles", "Tile shapes", about, units, rows, (chart,), (bars,))


def _tile(work: tw.Workload, machine: Machine, name: str, plan: tw.Plan) -> Iterator[Row]:
    found, sent = tw.simulate(plan, work, machine, exact=False), tw.volume(plan, _whole(work))
    forward, backward = max(sent.forward), max(sent.backward)
    carried = (forward + backward) / machine.nic_bandwidth
    flop = _flop(work, work.mask) / plan.world_size
    yield (name, forward, backward, 1e3 * (forward + backward) / flop,
           carried / found.compute_seconds, found.seconds, found.exposed_seconds,
           found.peak_bytes)  # fmt: skip


def _whole(work: tw.Workload) -> tw.Workload:
    """Under the full mask: pruning a causal mask changes bytes by some per cent, and takes long."""
    return replace(work, mask=tw.Full())


ORDERS = ("greedy", "paced", "eager", "kv_first", "paper", "gather")


def schedules(
    work: tw.Workload, machine: Machine, rows_of: RowsOf = at_once, *, n: int = 64
) -> Iterator[StudyTable]:
    """Every order of a tile's work beside the best possible one, in milliseconds."""
    units = {"tokens": "", "tile": "", "pass": "", "kernels over messages": "x",
             **dict.fromkeys(ORDERS, "s"), "optimum": "s", "proven": "",
             **{f"{name} over optimum": "x" for name in ORDERS}}  # fmt: skip
    lengths = max(n, work.num_tokens // 8), work.num_tokens
    parts = {
        f"{count(tokens)} tokens, {a} x {b}, {'backward' if backward else 'forward'}": partial(
            _ordered, replace(work, num_tokens=tokens), machine, (a, b), backward, n
        )
        for tokens, (a, b), backward in product(lengths, TILE_SHAPES, (False, True))
    }
    rows = rows_of("schedules", parts)
    about = (
        f"{_about(work, machine)} One rank's tile of shards of a {n}th of the tokens, on "
        "one port with the bandwidth of a NIC; latency and launches are left out (see "
        "docs/schedules.md). paper: the rule of the Mesh-Attention paper. The optimum is the least "
        "time of any program; where it is not proven, the least that was found."
    )
    shown = [name for name in ORDERS if name != "paced"]
    over = tuple(
        Chart("kernels over messages", f"{name} over optimum", "pass, tokens", points=True)
        for name in shown
    )
    yield StudyTable("schedules", "Schedules of a mesh tile", about, units, rows, over)


def _ordered(
    work: tw.Workload, machine: Machine, shape: tuple[int, int], backward: bool, n: int
) -> Iterator[Row]:
    costs, block = _prices(work, machine, backward, n)
    blocks = shape[0] * shape[1] * block
    pace = blocks / transfer_bytes(shape, costs)
    steps = {
        "greedy": greedy_tile_steps(shape, costs),
        "paced": greedy_tile_steps(shape, costs, pace=pace),
        **{name: stepwise_tile_steps(*shape, name, costs) for name in ("eager", "kv_first")},
        "paper": paper_tile_steps(shape, costs),
    }
    times = {name: seconds_of(one, costs, block) for name, one in steps.items()}
    times["gather"] = transfer_bytes(shape, costs) + blocks
    best, proven = _optimum(shape, costs, block, min(times.values()))
    seconds = [times[name] for name in ORDERS]
    which, tile = "backward" if backward else "forward", f"{shape[0]} x {shape[1]}"
    yield (work.num_tokens, tile, which, pace, *seconds, best, "yes" if proven else "no",
           *(x / best for x in seconds))  # fmt: skip


def _prices(
    work: tw.Workload, machine: Machine, backward: bool, n: int
) -> tuple[ShardWeights, float]:
    """Seconds of each kind of message on a NIC, and of a block."""
    resolved = work.resolve(tw.mesh(n, n))[backward]
    size = work.num_tokens // n
    weights = (
        size * resolved.payload.row_bytes(tw.plan.Item(side, role, 0)) / machine.nic_bandwidth
        for role in tw.plan.Role if role is not tw.plan.Role.RESULT for side in tw.plan.Side
    )  # fmt: skip
    q, kv, q_partial, kv_partial = weights
    share = work.mask.area((0, work.num_tokens), (0, work.num_tokens)) / work.num_tokens**2
    speed = machine.kernel(work.dtype, backward, work.head_dim).speed(size, size)
    flop = resolved.payload.flop * share * size * size
    return ShardWeights(q, kv, q_partial, kv_partial if backward else 0.0), flop / speed


def _optimum(
    shape: tuple[int, int], costs: ShardWeights, block: float, known: float
) -> tuple[float, bool]:
    for width in (8, 128):
        if found := search(shape, costs, block, width, known):
            known = found.seconds
    best = least(shape, costs, block, known, TRIED)
    return (known, False) if best is None else (best, True)


def masks(
    work: tw.Workload, machine: Machine, rows_of: RowsOf = at_once, *, seed: int = 0
) -> Iterator[StudyTable]:
    """What a ring keeps of its speed under causal and document masks, by ranks."""
    units = {"mask": "", "layout": "", "strategy": "", "devices": "", "time": "s", "waiting": "s",
             "TFLOP/s a device": "", "kept of full": "%", "imbalance": "x",
             "sent": "B"}  # fmt: skip
    per_device = work.num_tokens // USUAL_DEVICES
    names = ("full", "causal", "causal_document", "full_document")
    parts = {
        f"{name}, {n} devices": partial(_masked, work, machine, name, n, per_device, seed)
        for name, n in product(names, MASKED_SIZES)
    }
    rows = rows_of("masks", parts)
    full = {row[3]: float(row[6] or 0) for row in rows if row[:3] == ("full", "zigzag", "ring")}
    rows = [(*row[:7], 100 * float(row[6] or 0) / full[row[3]], *row[7:]) for row in rows]
    about = (
        f"{_about(_whole(work), machine, mask=False)} {count(per_device)} tokens a device; "
        f"documents of prolong512k (seed {seed}). Kept of full: TFLOP/s of allowed pairs over a "
        "ring's under the full mask. Imbalance: kernels' seconds, busiest rank over the mean. "
        "needed sends each rank only what its queries see, on a layout with equal work. A double "
        "ring is a ring up to a node."
    )
    charts = tuple(
        Chart("devices", "kept of full", "layout, strategy", {"mask": name}) for name in names[1:]
    )
    yield StudyTable("masks", "A ring under masks", about, units, rows, charts)


def _masked(
    work: tw.Workload, machine: Machine, name: str, n: int, per_device: int, seed: int
) -> Iterator[Row]:
    """Rows of a mask on n devices, without what is kept of a full mask's speed."""
    num_tokens = n * per_device
    mask = drawn(name, num_tokens, seed)
    here = replace(work, num_tokens=num_tokens, mask=mask)
    layouts = {make.__name__: make(num_tokens, n) for make in (tw.contiguous, tw.zigzag)}
    if "document" in name:
        layouts["zigzag_documents"] = LAYOUTS["zigzag_documents"](mask, num_tokens, n)
    controls = {"ring": tw.ring(n), "all_gather": tw.all_gather(n)}
    if n > machine.node_size and n % machine.node_size == 0:
        controls["double_ring"] = tw.double_ring(n // machine.node_size, machine.node_size)
    last = list(layouts)[-1]
    cases = [(which, layout, "ring", controls["ring"]) for which, layout in layouts.items()]
    cases += [(last, layouts[last], x, controls[x]) for x in controls if x != "ring"]
    if name != "full":
        level = default_layout(mask, num_tokens, n)
        cases.append(("level", level, "needed", tw.needed(mask, level)))
    for which, layout, strategy, plan in cases:
        found = tw.simulate(plan, replace(here, layout=layout), machine)
        speed = _flop(here, mask) / n / found.seconds / 1e12
        uses = [found.use(rank) for rank in range(n)]
        worked = [sum(use.compute_seconds for use in both) for both in uses]
        yield (name, which, strategy, n, found.seconds, found.exposed_seconds, speed,
               max(worked) * n / sum(worked), _sent(found))  # fmt: skip


def _flop(work: tw.Workload, mask: tw.masks.Mask) -> float:
    """Of both passes, as is usual: forward 4 head_dim a pair and head, backward 2.5 times that."""
    tokens = 0, work.num_tokens
    return 3.5 * 2 * sum(work.widths) * mask.area(tokens, tokens) * work.num_heads


class GptModel(NamedTuple):
    """A GPT-3-like model."""

    name: str
    num_layers: int
    num_heads: int
    head_dim: int


MODELS = (GptModel("760M", 24, 16, 96), GptModel("2.7B", 32, 32, 80), GptModel("13B", 40, 40, 128))
VOCABULARY = 50257
MODEL_TOKENS = tuple(1 << power for power in range(13, 18))


def clusters(n: int) -> tuple[Machine, Machine]:
    """The two that ATTENTION2D was measured on with 64; a NIC for each device is assumed."""
    a100, h100 = Machine.preset("a100x8"), Machine.preset("h100x8")
    return (
        replace(a100, node_size=4, nics=4, name=f"{n // 4} x 4 A100"),
        replace(h100, node_size=1, nics=1, name=f"{n} x 1 H100"),
    )


def model(
    work: tw.Workload, machine: Machine, rows_of: RowsOf = at_once, *, n: int = 64
) -> Iterator[StudyTable]:
    """A GPT-3-like model's step: attention and linear layers."""
    units = {"machine": "", "model": "", "tokens": "", "strategy": "", "plan": "", "attention": "s",
             "linear layers": "s", "step": "s", "attention share": "%", **UNITS}  # fmt: skip
    for cluster in (every_cluster := (*clusters(n), machine)):
        if n % cluster.node_size:
            size = f"a node of {cluster.name} ({cluster.node_size})"
            raise ValueError(f"--devices ({n}) must be a multiple of the devices of {size}")
    every = product(every_cluster, MODELS, MODEL_TOKENS)
    parts = {
        f"{cluster.name}, {gpt.name}, {count(tokens)} tokens": partial(
            _step, work, cluster, gpt, tokens, n, len(units)
        )
        for cluster, gpt, tokens in every
    }
    rows = rows_of("model", parts)
    about = (
        f"{n} devices, one sequence, causal, zigzag tokens, {work.dtype}. Linear layers: 12 "
        "width^2 parameters a layer and the output layer, 6 FLOP a parameter and token, at the "
        "speed of attention on large tiles; parameters lie on every device, and the reduction of "
        "their gradients, the same for all, is left out. Gains are those of the step. "
        f"{EXPLAINED} On nodes of one device a double ring, and heads, are split over two factors."
    )
    middle = MODELS[len(MODELS) // 2].name
    charts = tuple(
        Chart("tokens", "over ring", "strategy", {"machine": cluster.name, "model": middle})
        for cluster in every_cluster
    )
    yield StudyTable("model", "A GPT-3-like model's step", about, units, rows, charts)


def _step(
    work: tw.Workload, machine: Machine, gpt: GptModel, tokens: int, n: int, columns: int
) -> Iterator[Row]:
    """All methods' steps of a model."""
    title, layers, heads, head_dim = gpt
    work = tw.Workload(tokens, heads, heads, head_dim, dtype=work.dtype, mask=tw.Causal())
    parameters = 12 * (heads * head_dim) ** 2 * layers + heads * head_dim * VOCABULARY
    speed = machine.kernel(work.dtype, False, 128).speed(LARGE_TILE, LARGE_TILE)
    linear = 6 * parameters * tokens / n / speed
    inside = machine.node_size if machine.node_size > 1 else near_square(n)[1]
    every = every_method(n, work, inside, machine.node_size)
    attention = {
        name: layers * tw.simulate(plan, work, machine, exact=False).seconds
        for name, plan in every.items()
        if isinstance(plan, tw.Plan)
    }
    over = gains({name: x + linear for name, x in attention.items()})
    for name, plan in every.items():
        head = machine.name, title, tokens, name
        if isinstance(plan, str):
            yield (*head, plan, *(None,) * (columns - len(head) - 1))
            continue
        step = attention[name] + linear
        yield (*head, short(plan.name), attention[name], linear, step,
               100 * attention[name] / step, *over[name])  # fmt: skip


def _about(work: tw.Workload, machine: Machine, mask: bool = True) -> str:
    heads = f"{work.num_heads} query and {work.num_kv_heads} KV heads of {work.shown_widths}"
    seen = f", {type(work.mask).__name__.lower()} mask" if mask else ""
    return f"{heads}, {work.dtype}{seen}, on {machine.name}."

"""The memory of all methods: by formula, by the planner, and measured on this processor."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.study.against import every_method
from benchmarks.study.parts import RowsOf, at_once
from benchmarks.study.table import Row, StudyTable, bar_chart
from tilewise.functional import attention
from tilewise.masks.base import Causal, Full
from tilewise.plan.ir import Plan
from tilewise.plan.payload import ITEM_BYTES
from tilewise.simulation.machine import Machine
from tilewise.simulation.peak_memory import PassMemory
from tilewise.transport.processes import run_ranks
from tilewise.workload import Workload
from tilewise_tools.bench.environment import peak_bytes
from tilewise_tools.report.page import Figure
from tilewise_tools.report.words import count, short

MEASURED_RANKS, MEASURED_NODE, MEASURED_TOKENS = 4, 2, 512


class Held(NamedTuple):
    """What a rank holds at once beside its own tensors, in shards: operands, and fp32 partials."""

    q: float
    kv: float
    q_partials: float
    kv_partials: float  # in backward


def held(name: str, plan: Plan) -> Held:
    """By the rank's tile, a x b shards of the plan inside a head group.

    A ring holds the KV shard at work and the one arriving; who gathers holds all; ulysses holds
    what it gathered for its heads, as much as a shard of each side, besides what is inside it.
    """
    degree, inner = plan.traits.head_split or (1, plan)
    if degree > 1:
        one = (
            Held(0, 0, 1, 1)
            if inner.world_size == 1
            else held(name.removeprefix("ulysses_"), inner)
        )
        return one._replace(q=one.q + 1, kv=one.kv + 1)
    tiles = [tile for step in inner.rank_steps(0) for tile in step.tiles]
    a = len({shard for tile in tiles for shard in tile.q})
    b = len({shard for tile in tiles for shard in tile.kv})
    match name:
        case "mesh" if min(a, b) > 1:
            return Held(a - 1, b - 1, a, b)
        case "attention2d" | "all_gather":
            return Held(a if a > 1 else 0, b, a, b)
        case "attention2d_overlap":
            return Held(2, b, 3, b)
    return Held(0, 2, 1, 2)


def formula(work: Workload, plan: Plan, name: str, backward: bool) -> float:
    """Bytes of a rank's own tensors and of what it holds beside them.

    With u, r and l of docs/volume.md, forward (2 + 2 r) u + l of its own and
    q u + kv 2 r u + q_partials (2 u + l); backward (4 + 4 r) u + 2 l and
    q (2 u + 2 l) + kv 2 r u + q_partials 2 u + kv_partials 4 r u. fp32 is 2 u in 16 bits.
    """
    size, wide = ITEM_BYTES(work.dtype), max(4, ITEM_BYTES(work.dtype))
    rows = work.num_tokens / plan.world_size * work.num_heads
    u, lse, r = rows * work.head_dim * size, rows * wide, work.num_kv_heads / work.num_heads
    acc, (q, kv, q_partials, kv_partials) = wide / size, held(name, plan)
    if backward:
        own, partials = (4 + 4 * r) * u + 2 * lse, (q_partials + 2 * r * kv_partials) * acc * u
        return own + q * (2 * u + 2 * lse) + kv * 2 * r * u + partials
    return (2 + 2 * r) * u + lse + q * u + kv * 2 * r * u + q_partials * (acc * u + lse)


def planned(work: Workload, plan: Plan) -> tuple[int, int]:
    """As tw.simulate and the planner count them: the executor's own buffers, placed."""
    passes = work.resolve(plan)
    return tuple(PassMemory(passes, backward=x).peak_bytes for x in (False, True))  # pyright: ignore


def memory(
    work: Workload, machine: Machine, rows_of: RowsOf = at_once, *, n: int = 64
) -> Iterator[StudyTable]:
    """All methods side by side."""
    columns = "forward by formula", "forward", "backward by formula", "backward"
    units = {**dict.fromkeys(("mask", "strategy", "plan"), ""), **dict.fromkeys(columns, "B"),
             "over ring": "x"}  # fmt: skip
    names = [*every_method(n, work, machine.node_size)]
    parts = {
        f"{type(mask).__name__.lower()} mask, {name}": partial(
            _counted, replace(work, mask=mask), machine, n, name
        )
        for mask, name in product((Full(), Causal()), names)
    }
    rows = rows_of("memory", parts)
    rings = {row[0]: max(row[4], row[6]) for row in rows if row[1] == "ring"}  # pyright: ignore
    rows = [
        (*row, None if row[4] is None else max(row[4], row[6]) / rings[row[0]])  # pyright: ignore
        for row in rows
    ]
    about = (
        f"{n} devices, {count(work.num_tokens)} tokens, {work.num_heads} query and "
        f"{work.num_kv_heads} KV heads of {work.shown_widths}, {work.dtype}, zigzag tokens. The "
        "formula counts a rank's own tensors and the shards that the algorithm holds at once; the "
        "planner's figure also what is packed, sent and merged under way, and rows that a causal "
        "mask makes kernels gather. Over ring: by the planner's larger pass."
    )
    figures = tuple(_bars(rows, mask) for mask in ("full", "causal"))
    yield StudyTable("memory", "Memory of all methods", about, units, rows, figures=figures)
    yield _measured(work, rows_of)


def _counted(work: Workload, machine: Machine, n: int, name: str) -> Iterator[Row]:
    """A method's bytes by formula and by the planner, of both passes."""
    plan = every_method(n, work, machine.node_size)[name]
    head = type(work.mask).__name__.lower(), name
    if isinstance(plan, str):
        yield (*head, plan, None, None, None, None)
        return
    wanted = (formula(work, plan, name, backward) for backward in (False, True))
    pairs = zip(wanted, planned(work, plan), strict=True)
    yield (*head, short(plan.name), *(x for pair in pairs for x in pair))


def _bars(rows: list[Row], mask: str) -> Figure:
    """The planner's figure of the pass that needs more."""
    mine = [row for row in rows if row[0] == mask and row[4] is not None]
    held = {str(row[1]): max(row[4], row[6]) for row in mine}  # pyright: ignore
    title = f"A rank's memory, {mask} mask"
    return bar_chart(f"memory-{mask}", title, "B", {"by the planner": held})


def _measured(work: Workload, rows_of: RowsOf) -> StudyTable:
    """Bytes of the rank that takes most, in as many processes, beside what the planner says."""
    units = {"strategy": "", "plan": "", "forward planned": "B", "forward measured": "B",
             "backward planned": "B", "backward measured": "B",
             "measured over planned": "x"}  # fmt: skip
    rows = rows_of("memory-measured", {f"{MEASURED_RANKS} processes": partial(_in_processes, work)})
    about = (
        f"{MEASURED_RANKS} processes on this machine, as nodes of {MEASURED_NODE}, "
        f"{MEASURED_TOKENS} tokens, float32, full mask. Measured is all that torch allocated at "
        "once, the caller's tensors included, and with it what kernels take inside, which the "
        "planner leaves out."
    )
    ran = [row for row in rows if row[2] is not None]
    least = {str(row[0]): max(row[2], row[4]) for row in ran}  # pyright: ignore
    more = {str(row[0]): max(row[3], row[5]) - least[str(row[0])] for row in ran}  # pyright: ignore
    parts = {"planned": least, "measured beyond it": more}
    figure = bar_chart("memory-measured-bars", "Planned and measured", "B", parts)
    return StudyTable("memory-measured", "Memory measured", about, units, rows, figures=(figure,))


def _in_processes(work: Workload) -> Iterator[Row]:
    heads = work.num_heads, work.num_kv_heads
    small = Workload(MEASURED_TOKENS, *heads, work.head_dim, dtype="float32", mask=Full())
    every = every_method(MEASURED_RANKS, small, MEASURED_NODE)
    plans = {name: plan for name, plan in every.items() if isinstance(plan, Plan)}
    by_rank = run_ranks(
        MEASURED_RANKS, _allocated, small, tuple(plans.values()), timeout_seconds=600
    )
    most = {
        name: [max(passes) for passes in zip(*of_ranks, strict=True)]
        for name, *of_ranks in zip(plans, *by_rank, strict=True)
    }
    for name, plan in every.items():
        if isinstance(plan, str):
            yield (name, plan, *(None,) * 5)
            continue
        found, took = planned(small, plan), most[name]
        yield (name, short(plan.name), found[0], took[0], found[1], took[1],
               max(took) / max(found))  # fmt: skip


def _allocated(rank: int, work: Workload, plans: tuple[Plan, ...]) -> list[list[int]]:
    """Bytes of every plan's two passes on this rank."""
    return [_passes(rank, work, plan) for plan in plans]


def _passes(rank: int, work: Workload, plan: Plan) -> list[int]:
    layout, kv_heads = work.layout_for(plan.world_size), work.num_kv_heads
    q, k, v = (
        torch.ones(layout.size(rank), heads, work.head_dim, requires_grad=True)
        for heads in (work.num_heads, kv_heads, kv_heads)
    )
    dout, outs = torch.ones_like(q), list[Tensor]()

    def forward(plan: Plan) -> None:
        outs[:] = [attention(q, k, v, plan=plan, layout=layout, mask=work.mask)]

    def backward() -> None:
        torch.autograd.grad(outs[0], (q, k, v), dout)

    forward(plan)  # what kernels make once is there from now on
    backward()
    outs.clear()
    fresh = plan.changed(name=plan.name)  # has no workspace yet
    own = q.nbytes + k.nbytes + v.nbytes
    with_workspace = peak_bytes(lambda: forward(fresh), "cpu")
    outs.clear()
    workspace = with_workspace - peak_bytes(lambda: forward(fresh), "cpu")
    first = own + with_workspace
    own += 2 * dout.nbytes + dout.nbytes // work.head_dim  # out, dout and lse
    return [first, own + workspace + peak_bytes(backward, "cpu")]

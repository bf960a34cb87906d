"""Every strategy on one real input, beside dense attention."""

from __future__ import annotations

import math
import re
import sysconfig
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import tilewise as tw
from tilewise.arguments import require_range
from tilewise.strategies.catalog import STRATEGIES, divisors, near_square
from tilewise.transport.processes import gather_yields
from tilewise.transport.protocol import Transport
from tilewise.transport.resolve import transport_for
from tilewise_tools.bench.inputs import NAMES, dense_truth

Array = np.ndarray
# Before each top-level definition: a document is one of them, or what a module says before them.
_DEFINITION = re.compile(rb"\n(?=(?:@|def |class |async def ))")


def documents() -> tuple[bytes, ...]:
    """Top-level definitions of the standard library's modules, in the modules' order.

    Their lengths differ as real documents' do: from a few bytes to over 100,000, median about 600.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    pieces = (
        piece
        for path in sorted(folder.glob("*.py"))
        for piece in _DEFINITION.split(path.read_bytes())
    )
    definitions = tuple(piece + b"\n" for piece in pieces if piece.strip())
    if not definitions:
        raise ValueError(f"no Python sources in {folder}; use a Python installed with its library")
    return definitions


def pack(texts: Iterable[bytes], num_tokens: int) -> tuple[Array, tuple[int, ...]]:
    """Documents end to end, as one sequence of bytes.

    Returns:
        tokens, uint8 [num_tokens], and cu_seqlens; the last document is cut at num_tokens.
    """
    parts, ends = [], [0]
    for text in texts:
        if ends[-1] >= num_tokens:
            break
        parts.append(text[: num_tokens - ends[-1]])
        ends.append(ends[-1] + len(parts[-1]))
    if ends[-1] < num_tokens:
        raise ValueError(f"num_tokens ({num_tokens}) must be at most {ends[-1]}, all there is")
    return np.frombuffer(b"".join(parts), np.uint8), tuple(ends)


TOLERANCE = 1e-12
MASKS = ("causal", "documents")


class Demo(NamedTuple):
    """The computation of the demo; the number of tokens need not divide by that of the ranks."""

    world_size: int = 4
    num_tokens: int = 1021
    head_dim: int = 32
    seed: int = 0

    @property
    def num_heads(self) -> int:
        return 2 * self.world_size

    @property
    def num_kv_heads(self) -> int:
        """Few, but such that each degree of ulysses in `cases` divides them or is divided."""
        return self.world_size if self.world_size % 2 else 2

    def input(self) -> tuple[Tensor, tuple[int, ...]]:
        """Tokens [num_tokens] and cu_seqlens, no document over a quarter of the sequence."""
        longest = max(self.num_tokens // 4, 64)
        some = (text for text in documents() if len(text) <= longest)
        tokens, cu_seqlens = pack(some, self.num_tokens)
        return torch.from_numpy(tokens.astype("int64")), cu_seqlens

    def checked(self) -> Demo:
        """Raise ValueError if world_size or num_tokens is out of range; else return the demo
        itself.
        """
        require_range("world_size", self.world_size, 1, 16)
        require_range("num_tokens", self.num_tokens, 1, 16384)
        return self


class DemoCase(NamedTuple):
    """One line of the demo."""

    plan: tw.Plan
    mask_name: str
    layout: tw.Layout


class DemoRow(NamedTuple):
    """Results of one case.

    Attributes:
        errors: largest error of out, dq, dk, dv against dense attention in fp64, over all ranks,
            as max |x - y| / max(1, max |y|).
        counted, formula: bytes sent by each rank in forward and backward together, as counted on
            the transport and as tw.volume says.
    """

    strategy: str
    mask: str
    layout: str
    errors: dict[str, float]
    counted: tuple[int, ...]
    formula: tuple[int, ...]
    messages: tuple[int, ...]  # sent by each rank
    seconds: float  # of forward and backward, on the slowest rank, once warm

    @property
    def fault(self) -> str | None:
        """Return what is wrong with this row, if anything is."""
        worst = max(self.errors.values())
        if not worst <= TOLERANCE:
            return f"{self.strategy}, {self.mask}: error {worst:.1e} is over {TOLERANCE:.0e}"
        if self.counted != self.formula:
            return (
                f"{self.strategy}, {self.mask}: ranks sent {self.counted} bytes, but "
                f"tw.volume says {self.formula}"
            )
        return None


ROW_TIMEOUT = 120.0  # seconds


def run_demo(demo: Demo) -> Iterator[DemoRow]:
    """Run all cases on local processes, one row after another."""
    demo, masks = demo.checked(), _masks(demo)
    heads = demo.num_heads, demo.num_kv_heads, demo.head_dim
    rows = gather_yields(demo.world_size, _on_rank, (demo,), timeout_seconds=ROW_TIMEOUT)
    for (plan, name, layout), ranks in zip(cases(demo), rows, strict=True):
        work = tw.Workload(
            demo.num_tokens, *heads, dtype="float64", mask=masks[name], layout=layout
        )
        formula = tuple(map(sum, zip(*tw.volume(plan, work), strict=True)))
        errors, counted, messages, seconds = zip(*ranks, strict=True)
        worst = {name: max(error[name] for error in errors) for name in NAMES}
        yield DemoRow(plan.name, name, layout.name, worst, counted, formula, messages, max(seconds))


def cases(demo: Demo) -> list[DemoCase]:
    """Every strategy under both masks, each on the layout that suits it."""
    n = demo.world_size
    a, b = near_square(n)
    composed = {"hierarchical": [tw.hierarchical(tw.ring(a, moves="q"), tw.ring(b))]}
    composed["ulysses"] = [tw.ulysses(n)]
    if len(divisors(n)) > 2:  # two ways to split heads a little, and the rest otherwise
        inner = n // (degree := divisors(n)[1])
        nested = tw.ring(inner), tw.mesh(inner, q_tile=inner)
        composed["ulysses"] += [tw.ulysses(degree, plan) for plan in nested]
    demo_cases: list[DemoCase] = []
    for strategy in STRATEGIES:
        layout = strategy.layout(demo.num_tokens, n)
        both = (variant for variant in strategy.at(a, b) if not variant.keeps)
        plans = composed.get(strategy.name) or [variant.make() for variant in both]
        demo_cases += [DemoCase(plan, name, layout) for plan in plans for name in MASKS]
    return demo_cases


def _masks(demo: Demo) -> dict[str, tw.masks.Mask]:
    documents = tw.Causal() & tw.Document(demo.input()[1])
    return dict(zip(MASKS, (tw.Causal(), documents), strict=True))


def _on_rank(rank: int, demo: Demo) -> Iterator[tuple[dict[str, float], int, int, float]]:
    """Run each case on one rank; yield errors, bytes and messages sent, and seconds once warm."""
    whole_tensors, masks = _embed(demo), _masks(demo)
    rows = torch.arange(demo.num_tokens)
    truth = {
        (name, decoding): _dense(whole_tensors, rows[-1:] if decoding else rows, mask)
        for name, mask in masks.items()
        for decoding in (False, True)
    }
    for case in cases(demo):
        decoding = case.plan.replicated_queries
        results, transport, _ = _attend(case, whole_tensors, masks[case.mask_name], rank)
        errors = {}
        for name, x in results.items():
            y = truth[case.mask_name, decoding][name]
            is_whole = decoding and name in ("out", "dq")
            errors[name] = _error(x, y if is_whole else case.layout.shard(y, rank))
        *_, seconds = _attend(case, whole_tensors, masks[case.mask_name], rank)
        yield errors, transport.bytes_sent, transport.messages_sent, seconds


def _embed(demo: Demo) -> list[Tensor]:
    """q, k, v, dout [tokens, heads, head_dim] in fp64.

    Each byte's seeded embedding and a sinusoid of its position, through seeded projections.
    """
    tokens, _ = demo.input()
    make = torch.Generator().manual_seed(demo.seed)
    width = 2 * demo.head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float64)

    rates = 10000.0 ** -torch.linspace(0, 1, width // 2, dtype=torch.float64)
    angles = torch.arange(demo.num_tokens)[:, None] * rates
    x = normal(256, width)[tokens] + torch.cat([angles.sin(), angles.cos()], 1)
    heads = demo.num_heads, demo.num_kv_heads, demo.num_kv_heads, demo.num_heads
    return [
        (x @ normal(width, h * demo.head_dim) / math.sqrt(width)).unflatten(1, (h, demo.head_dim))
        for h in heads
    ]


def _attend(
    case: DemoCase, whole_tensors: list[Tensor], mask: tw.masks.Mask, rank: int
) -> tuple[dict[str, Tensor], Transport, float]:
    """Run one case on this rank; decoding computes the last query alone.

    Returns:
        this rank's results by name, its transport, and the seconds.
    """
    plan, layout = case.plan, case.layout
    q, k, v, dout = (layout.shard(x, rank) for x in whole_tensors)
    if plan.replicated_queries:
        q, dout = whole_tensors[0][-1:], whole_tensors[3][-1:]
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    transport = transport_for(None)
    dist.barrier()
    start = time.perf_counter()
    out = tw.attention(*inputs, plan=plan, layout=layout, mask=mask, group=transport)
    gradients = torch.autograd.grad(out, inputs, dout)
    seconds = time.perf_counter() - start
    return dict(zip(NAMES, (out.detach(), *gradients), strict=True)), transport, seconds


def _dense(whole_tensors: list[Tensor], rows: Tensor, mask: tw.masks.Mask) -> dict[str, Tensor]:
    """out, dq, dk, dv of plain attention; each rank does some heads, then all have all."""
    heads = range(dist.get_rank(), whole_tensors[0].shape[1], dist.get_world_size())
    truth = dense_truth(whole_tensors, rows, mask, heads)
    for total in truth.values():
        dist.all_reduce(total)
    return truth


def _error(x: Tensor, y: Tensor) -> float:
    if not y.numel():
        return 0.0
    if not x.isfinite().all():
        return math.inf  # nan would pass for small in a maximum
    return float((x - y).abs().max() / y.abs().max().clamp_min(1))

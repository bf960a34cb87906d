"""Kernels as contenders of the benchmark, each on one rank: ours under the executor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.arguments import ITEM_BYTES
from tilewise.kernels.registry import PROVIDERS
from tilewise.layouts.layout import Layout, contiguous
from tilewise.simulation.machine import Machine
from tilewise.tiles.calls import Kind
from tilewise.tiles.cover import tile_calls
from tilewise.transport.resolve import LocalTransport
from tilewise_tools.bench.case import BenchCase
from tilewise_tools.bench.contender import Facts, Prediction, Running, Traffic
from tilewise_tools.bench.our_strategies import Strategy
from tilewise_tools.outside import check_kernel_of, is_outside, kernel_of, version_of

QUADRATIC = MappingProxyType({"reference": 5, "naive": 5, "sdpa": 2})
"""Tables of scores that a kernel holds at once, over all heads: [heads, queries, keys]; else 0."""


@dataclass(frozen=True)
class ProviderKernel:
    """A kernel, of this library or of a file outside it, run on a world of one rank."""

    name: str

    @property
    def library(self) -> str:
        return "outside" if is_outside(self.name) else "tilewise"

    @property
    def version(self) -> str:
        return version_of(self.name)

    def check(self, case: BenchCase) -> None:
        """Refuse a kernel of a file that is none."""
        check_kernel_of(self.name, self.version, case.asked)

    def supports(self, case: BenchCase) -> str | None:
        return kernel_of(self.name).supports(*case.asked)

    def predict(self, case: BenchCase, machine: Machine) -> Prediction:
        size, kernel = _statistic(case), kernel_of(self.name)
        cut = {"square_causal": kernel.square_causal, "whole_tile": kernel.whole_tile}
        rows = np.arange(case.num_tokens)
        calls = tile_calls(rows, rows, case.make_mask(), **cut)
        tables = max((call.num_q * call.num_k for call in calls), default=0)
        small = [] if kernel.whole_tile else [c for c in calls if c.kind is Kind.SLICES]
        dense = max((c.num_q * c.num_k for c in small), default=0)
        values = 3 * case.num_tokens * (case.num_heads + case.num_kv_heads) * case.head_dim * size
        scores = tables * QUADRATIC.get(self.name, 0) * case.num_heads * size
        held = values + scores + dense * (size + 1)
        return Prediction(peak_bytes=held)

    def prepare(self, case: BenchCase, rank: int, group: Any) -> Running:
        return Strategy("ring(1)", self.name).prepare(case, rank, LocalTransport())


@dataclass(frozen=True)
class DenseKernel:
    """Attention over the whole table with a dense mask, by torch alone: "naive" or "sdpa"."""

    name: str
    library: str = field(default="torch", init=False)
    version: str = field(default=str(torch.__version__), init=False)

    def check(self, case: BenchCase) -> None:
        return

    def supports(self, case: BenchCase) -> str | None:
        return None

    def predict(self, case: BenchCase, machine: Machine) -> Prediction:
        size, table = _statistic(case), case.num_tokens**2
        held = table * (1 + QUADRATIC[self.name] * case.num_heads * size)
        return Prediction(peak_bytes=held)

    def prepare(self, case: BenchCase, rank: int, group: Any) -> _Dense:
        positions = range(case.num_tokens)
        allowed = torch.from_numpy(case.make_mask().dense(positions, positions)).to(case.device)
        return _Dense(case.num_heads, contiguous(case.num_tokens, 1), allowed, DENSE[self.name])


@dataclass(frozen=True)
class _Dense:
    num_heads: int
    layout: Layout
    allowed: Tensor
    compute: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        return self.compute(*heads_first, self.allowed).transpose(0, 1)

    def facts(self) -> Facts:
        pairs, computed = int(self.allowed.sum()), self.allowed.numel()
        return Facts(pairs * self.num_heads, computed * self.num_heads, 1)

    def traffic(self) -> Traffic:
        return Traffic({}, 0, 0.0)


def _naive(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v of [heads, tokens, head_dim], rows without keys 0."""
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = (q @ k.transpose(1, 2) / math.sqrt(q.shape[2])).masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1).masked_fill(~allowed, 0.0) @ v


def _sdpa(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    batch = (x[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(*batch, attn_mask=allowed, enable_gqa=True)[0]


DENSE: Mapping[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = MappingProxyType(
    {"naive": _naive, "sdpa": _sdpa}
)


def kernel(name: str) -> ProviderKernel | DenseKernel:
    """A kernel by name."""
    if name in DENSE:
        return DenseKernel(name)
    if is_outside(name):
        kernel_of(name)  # refused if it is none
    if name in PROVIDERS or is_outside(name):
        return ProviderKernel(name)
    known_names = ", ".join([*PROVIDERS, *DENSE])
    raise ValueError(
        f"kernel {name!r} is not known; take one of {known_names}, or write "
        "module:name or FILE.py:name"
    )


def _statistic(case: BenchCase) -> int:
    """Bytes of a number as kernels accumulate it."""
    return max(4, ITEM_BYTES(case.dtype))

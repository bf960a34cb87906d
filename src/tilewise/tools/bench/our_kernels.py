"""tilewise's kernels as contenders of the benchmark, each alone on one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.arguments import ITEM_BYTES
from tilewise.kernels.merge import merge_into
from tilewise.kernels.protocol import Kernel, accumulator_dtype, no_keys
from tilewise.kernels.registry import PROVIDERS, given_kernel, kernel_named
from tilewise.kernels.self_check import check_kernel, place
from tilewise.layouts.layout import Layout, contiguous
from tilewise.masks.base import Mask
from tilewise.plan.row_ranges import Ranges, row_index
from tilewise.simulation.machine import Machine
from tilewise.strategies.ring import ring
from tilewise.tiles.calls import KernelCall, Kind
from tilewise.tiles.cover import tile_calls
from tilewise.tools.bench.case import BenchCase
from tilewise.tools.bench.contender import Facts, Prediction, Traffic
from tilewise.tools.bench.environment import installed
from tilewise.tools.mask_report.figures import report
from tilewise.tools.outside import is_outside, load, version

Index = slice | Tensor


class PlacedCall(NamedTuple):
    """A call and what selects its rows and keys."""

    call: KernelCall
    rows: Index
    keys: Index


def placed(calls: Iterable[KernelCall], device: str) -> tuple[PlacedCall, ...]:
    """Calls with their indices, on the device."""
    return tuple(PlacedCall(c, _index(c.q, device), _index(c.k, device)) for c in calls)


def whole_mask(
    q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, calls: tuple[PlacedCall, ...]
) -> Tensor:
    """out of [num_tokens, heads, head_dim] under the mask that the calls cover; differentiable."""
    out: Any = _WholeMask.apply(q, k, v, kernel, calls)
    return out


class _WholeMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        q, k, v, kernel, calls = given
        scale = 1 / math.sqrt(q.shape[-1])
        out, lse = no_keys(q[:, None], v, accumulator_dtype(q.dtype))
        for call, rows, keys in calls:
            found = kernel.forward(q[rows, None], k[keys, None], v[keys, None], call, scale)
            if len(calls) == 1 and len(found[0]) == len(out):
                out, lse = found
            elif isinstance(rows, slice):
                merge_into(out[rows], lse[rows], *found)
            else:
                some = out[rows], lse[rows]
                merge_into(*some, *found)
                out[rows], lse[rows] = some
        out = out[:, 0].to(q.dtype).contiguous()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel, ctx.calls, ctx.scale = kernel, calls, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dout: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        delta = (out.to(lse.dtype) * dout.to(lse.dtype)).sum(-1)[:, None]
        totals = [torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v)]
        for call, rows, keys in ctx.calls:
            operands = q[rows, None], k[keys, None], v[keys, None], dout[rows, None]
            found = ctx.kernel.backward(*operands, lse[rows], delta[rows], call, ctx.scale)
            for total, index, part in zip(totals, (rows, keys, keys), found, strict=True):
                if isinstance(index, slice):
                    total[index] += part[:, 0]
                else:
                    total.index_add_(0, index, part[:, 0].to(total.dtype))
        return *(x.to(q.dtype) for x in totals), None, None


def _index(ranges: Ranges, device: str) -> Index:
    if len(ranges) == 1:
        return slice(*ranges[0])
    return torch.from_numpy(row_index(ranges)).to(device)


QUADRATIC = MappingProxyType({"reference": 5, "naive": 5, "sdpa": 2})
"""Tables of scores that a kernel holds at once, over all heads: [heads, queries, keys]; else 0."""


def provided(name: str) -> Kernel:
    """The kernel that a registered name, "module:name" or "FILE.py:name" stands for; of a class
    of a file, an instance."""
    if not is_outside(name):
        return kernel_named(name)
    found = load(name)
    try:
        made = found() if isinstance(found, type) else found
        return given_kernel(made)
    except (TypeError, ValueError) as error:
        kind = found if isinstance(found, type) else type(found)
        raise ValueError(f"{name}{place(kind)}: {error}") from None


def asked_of(case: BenchCase) -> tuple[str, torch.dtype, int, bool]:
    """What a kernel is asked for by a case, as `Kernel.supports` takes it."""
    return case.device, getattr(torch, case.dtype), case.head_dim, case.which != "forward"


@lru_cache(maxsize=256)
def check_outside(name: str, version: str, *asked: Any) -> None:
    """Check a version of a kernel of a file outside once for what it is asked for."""
    if asked[0] == "cpu" or torch.cuda.is_available():
        check_kernel(provided(name), *asked[:3], backward=asked[3])


def version_of(*names: str | None) -> str:
    """The library's version, with those of the files outside that names are of."""
    return " ".join([installed("tilewise"), *(version(n) for n in names if n and is_outside(n))])


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
        if is_outside(self.name):
            check_outside(self.name, self.version, *asked_of(case))

    def supports(self, case: BenchCase) -> str | None:
        return absent(self.name) or provided(self.name).supports(*asked_of(case))

    def predict(self, case: BenchCase, machine: Machine) -> Prediction:
        size = _statistic(case)
        provider = provided(self.name)
        calls = _calls(provider, case)
        tables = max((call.num_q * call.num_k for call in calls), default=0)
        small = [] if provider.whole_tile else [c for c in calls if c.kind is Kind.SLICES]
        dense = max((c.num_q * c.num_k for c in small), default=0)
        values = 3 * case.num_tokens * (case.num_heads + case.num_kv_heads) * case.head_dim * size
        scores = tables * QUADRATIC.get(self.name, 0) * case.num_heads * size
        held = values + scores + dense * (size + 1)
        return Prediction(peak_bytes=held)

    def prepare(self, case: BenchCase, rank: int, group: Any) -> _OneRank:
        mask, layout = case.make_mask(), contiguous(case.num_tokens, 1)
        provider = provided(self.name)
        calls = _calls(provider, case)
        return _OneRank(case, mask, layout, provider, placed(calls, case.device))


@dataclass(frozen=True)
class _OneRank:
    case: BenchCase
    mask: Mask
    layout: Layout
    kernel: Kernel
    calls: tuple[PlacedCall, ...]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return whole_mask(q, k, v, self.kernel, self.calls)

    def facts(self) -> Facts:
        (waste,) = report(self.mask, self.layout, ring(1))
        heads = self.case.num_heads
        return Facts(waste.allowed * heads, waste.computed * heads, waste.num_calls)

    def traffic(self) -> Traffic:
        return Traffic({}, 0, 0.0)


@dataclass(frozen=True)
class DenseKernel:
    """Attention over the whole table with a dense mask, by torch alone: "naive" or "sdpa"."""

    name: str

    @property
    def library(self) -> str:
        return "torch"

    @property
    def version(self) -> str:
        return torch.__version__

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
        return _Dense(case, contiguous(case.num_tokens, 1), allowed, DENSE[self.name])


@dataclass(frozen=True)
class _Dense:
    case: BenchCase
    layout: Layout
    allowed: Tensor
    compute: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        return self.compute(*heads_first, self.allowed).transpose(0, 1)

    def facts(self) -> Facts:
        heads, pairs = self.case.num_heads, int(self.allowed.sum())
        return Facts(pairs * heads, self.allowed.numel() * heads, 1)

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


class Other(NamedTuple):
    """The module that another library's kernel is probed by, and what must be known of it."""

    module: str
    what: str


OTHERS: Mapping[str, Other] = MappingProxyType(
    {
        "flashinfer_block_sparse": Other(
            "flashinfer", "its BlockSparseAttentionWrapper runs on CUDA and has no backward"
        ),
        "mit_block_sparse": Other(
            "block_sparse_attn", "MIT's Block-Sparse-Attention runs on CUDA, built from source"
        ),
        "video_sparse": Other(
            "fastvideo_kernel", "Video Sparse Attention runs on CUDA, on blocks it chooses itself"
        ),
        "flashmask": Other("paddle", "FlashMask is of PaddlePaddle, whose tensors are not torch's"),
    }
)
"""Block-sparse kernels of others, for which no adapter could be verified: their rows say why they
have no figures. FlexAttention is among PROVIDERS."""


def absent(name: str) -> str | None:
    """Why a kernel of OTHERS cannot run; None of all others."""
    if name not in OTHERS:
        return None
    module, what = OTHERS[name]
    here = "here, but without an adapter" if find_spec(module) else "not installed"
    return f"{module} is {here}; {what}"


def kernel(name: str) -> ProviderKernel | DenseKernel:
    """A kernel by name."""
    if name in DENSE:
        return DenseKernel(name)
    if is_outside(name):
        provided(name)
    if name in PROVIDERS or name in OTHERS or is_outside(name):
        return ProviderKernel(name)
    known = ", ".join([*PROVIDERS, *DENSE, *OTHERS])
    raise ValueError(
        f"kernel {name!r} is not known; take one of {known}, or write module:name or FILE.py:name"
    )


def _calls(provider: Kernel, case: BenchCase) -> tuple[KernelCall, ...]:
    """The calls of a whole mask, cut as a kernel wants them."""
    rows = np.arange(case.num_tokens)
    cut = {"square_causal": provider.square_causal, "whole_tile": provider.whole_tile}
    return tile_calls(rows, rows, case.make_mask(), **cut)


def _statistic(case: BenchCase) -> int:
    """Bytes of a number as kernels accumulate it."""
    return max(4, ITEM_BYTES(case.dtype))

"""yunchang: Ulysses, and its unified scheme of heads among neighbours, a ring over the rest."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

import tilewise as tw
from benchmarks.peers.adapter import (
    Adapter,
    CannotRunError,
    Prepared,
    equal_shares,
    pairs_of,
    words,
)
from tilewise.layouts.layout import Layout
from tilewise_tools.bench.case import BenchCase
from tilewise_verify import flash_attn_shim


@dataclass(frozen=True)
class Yunchang(Adapter):
    """LongContextAttention, its ring zigzag where causal and basic elsewhere.

    Args:
        degree: its Ulysses degree, ranks that share heads.
    """

    degree: int = 2
    library: str = "yunchang"

    @property
    def name(self) -> str:
        return f"yunchang usp {self.degree}"

    def layout(self, case: BenchCase) -> Layout:
        said = words(case.make_mask())
        if said.cu_seqlens is not None:
            raise CannotRunError("its attention has no argument for documents")
        self._check_divides(case)
        if not said.causal:
            equal_shares(case, case.world_size)
            return tw.contiguous(case.num_tokens, case.world_size)
        equal_shares(case, 2 * case.world_size)
        # each shard of the ring is cut among the neighbours that will share its heads
        ring = tw.zigzag(case.num_tokens, case.world_size // self.degree)
        share = case.num_tokens // case.world_size
        cuts = [(i * share, (i + 1) * share) for i in range(self.degree)]
        homes = [shard for shard in range(ring.world_size) for _ in range(self.degree)]
        return ring.cut(homes, cuts * ring.world_size)

    def prepare(self, case: BenchCase, rank: int, group: Any) -> Prepared:
        said, layout = words(case.make_mask()), self.layout(case)
        flash_attn_shim.provide()
        yunchang = importlib.import_module("yunchang")
        first = rank - rank % self.degree
        yunchang.set_seq_parallel_pg(
            self.degree, case.world_size // self.degree, rank, dist.get_world_size()
        )
        module = yunchang.LongContextAttention(ring_impl_type="zigzag" if said.causal else "basic")

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return module(q[None], k[None], v[None], **said.options)[0]

        pairs = pairs_of(case, layout, range(first, first + self.degree)) // self.degree
        return Prepared(layout, attention, pairs)

    def _check_divides(self, case: BenchCase) -> None:
        for what in ("world_size", "num_heads", "num_kv_heads"):
            count = getattr(case, what)
            if count % self.degree:
                raise CannotRunError(
                    f"{what} ({count}) must be a multiple of its Ulysses degree ({self.degree})"
                )


@dataclass(frozen=True)
class YunchangUlysses(Adapter):
    """UlyssesAttention: heads among all ranks, each tensor in an all-to-all of its own."""

    name: str = "yunchang ulysses"
    library: str = "yunchang"

    def layout(self, case: BenchCase) -> Layout:
        if words(case.make_mask()).cu_seqlens is not None:
            raise CannotRunError("its attention has no argument for documents")
        return heads_split(case)

    def prepare(self, case: BenchCase, rank: int, group: Any) -> Prepared:
        said, layout = words(case.make_mask()), self.layout(case)
        flash_attn_shim.provide()
        module = importlib.import_module("yunchang").UlyssesAttention(group)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return module(q[None], k[None], v[None], **said.options)[0]

        everyone = range(case.world_size)
        return Prepared(layout, attention, pairs_of(case, layout, everyone) // case.world_size)


def heads_split(case: BenchCase) -> Layout:
    """The layout of those who split whole heads among all ranks.

    Raises:
        CannotRunError: if heads or tokens do not divide.
    """
    for what in ("num_heads", "num_kv_heads"):
        if getattr(case, what) % case.world_size:
            raise CannotRunError(
                f"{what} ({getattr(case, what)}) must be a multiple of world_size "
                f"({case.world_size})"
            )
    equal_shares(case, case.world_size)
    return tw.contiguous(case.num_tokens, case.world_size)

"""torch's own context_parallel: its dispatcher, with the operator that CUDA tensors would take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import _attention as cp
from torch.library import Library

import tilewise as tw
from benchmarks.peers import aten_shim
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

SEQUENCE = 2  # its dimension in [batch, heads, tokens, head_dim]


@dataclass(frozen=True)
class TorchContextParallel(Adapter):
    """Load-balanced (zigzag) where causal, plain shards elsewhere, as its own sharding has it.

    Args:
        rotate_method: of keys and values, "allgather" (torch's default) or "alltoall".
    """

    rotate_method: str = "allgather"
    library: str = "torch"

    @property
    def name(self) -> str:
        return f"torch context_parallel {self.rotate_method}"

    def layout(self, case: BenchCase) -> Layout:
        said = words(case.make_mask())
        if said != said._replace(left=-1, right=-1, cu_seqlens=None):
            raise CannotRunError("its scaled_dot_product_attention is full or causal only")
        equal_shares(case, 2 * case.world_size if said.causal else case.world_size)
        split = tw.zigzag if said.causal else tw.contiguous
        return split(case.num_tokens, case.world_size)

    def prepare(self, case: BenchCase, rank: int, group: Any) -> Prepared:
        layout, causal = self.layout(case), words(case.make_mask()).causal
        _operators()
        mesh = init_device_mesh("cpu", (case.world_size,))
        cp._enable_context_parallel_dispatcher()

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # options of torch, of the whole process
            cp.set_rotate_method(self.rotate_method)
            cp._cp_options.enable_load_balance = causal
            operands = (
                DTensor.from_local(
                    x.transpose(0, 1)[None], mesh, [Shard(SEQUENCE)], run_check=False
                )
                for x in (q, k, v)
            )
            out, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*operands, 0.0, causal)
            return out.to_local()[0].transpose(0, 1)

        return Prepared(layout, attention, pairs_of(case, layout, [rank]))


@cache
def _operators() -> Library:
    return aten_shim.provide()

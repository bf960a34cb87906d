"""ring-flash-attn: its rings (zigzag where causal), and its all-gather for documents.

Its `__init__` imports an adapter that needs transformers of an older major version; the modules
used here need none, so they are imported past it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from dataclasses import dataclass
from typing import Any

import torch
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
class RingFlashAttn(Adapter):
    """zigzag_ring_flash_attn_func where causal, which is all it takes; elsewhere the plain ring."""

    name: str = "ring-flash-attn ring"
    library: str = "ring-flash-attn"

    def layout(self, case: BenchCase) -> Layout:
        said = words(case.make_mask())
        if said.cu_seqlens is not None:
            raise CannotRunError("its ring has no argument for documents")
        if not said.causal:
            equal_shares(case, case.world_size)
            return tw.contiguous(case.num_tokens, case.world_size)
        equal_shares(case, 2 * case.world_size)
        return tw.zigzag(case.num_tokens, case.world_size)

    def prepare(self, case: BenchCase, rank: int, group: Any) -> Prepared:
        said, layout = words(case.make_mask()), self.layout(case)
        name = "zigzag_ring_flash_attn" if said.causal else "ring_flash_attn"
        function, options = getattr(_module(name), f"{name}_func"), said.options

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return function(q[None], k[None], v[None], group=group, **options)[0]

        return Prepared(layout, attention, pairs_of(case, layout, [rank]))


@dataclass(frozen=True)
class Llama3(Adapter):
    """llama3_flash_attn_varlen_func: keys and values gathered.

    Args:
        all_heads: at once; else one KV head after the other, as its README has it.
    """

    all_heads: bool = False
    library: str = "ring-flash-attn"

    @property
    def name(self) -> str:
        return "ring-flash-attn llama3" + " all heads" * self.all_heads

    def layout(self, case: BenchCase) -> Layout:
        words(case.make_mask())
        equal_shares(case, case.world_size)
        return tw.contiguous(case.num_tokens, case.world_size)

    def prepare(self, case: BenchCase, rank: int, group: Any) -> Prepared:
        said, layout = words(case.make_mask()), self.layout(case)
        module, options = _module("llama3_flash_attn_varlen"), said.options
        edges = torch.tensor(said.cu_seqlens or (0, case.num_tokens), dtype=torch.int32)
        *lengths, keys = module.llama3_flash_attn_prepare_cu_seqlens(
            edges, said.causal, rank, case.world_size
        )
        stride = case.num_kv_heads if self.all_heads else 1
        options |= {"heads_k_stride": stride, "local_k_slice": keys, "group": group}

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return module.llama3_flash_attn_varlen_func(q, k, v, *lengths, **options)

        return Prepared(layout, attention, pairs_of(case, layout, [rank]))


def _module(name: str) -> Any:
    flash_attn_shim.provide()
    if "ring_flash_attn" not in sys.modules:
        spec = importlib.util.find_spec("ring_flash_attn")
        assert spec is not None and spec.submodule_search_locations is not None
        package = types.ModuleType("ring_flash_attn")
        package.__path__ = list(spec.submodule_search_locations)
        package.__spec__ = spec
        sys.modules["ring_flash_attn"] = package
    return importlib.import_module(f"ring_flash_attn.{name}")

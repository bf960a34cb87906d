"""ringmaster: the functions that it registers for Hugging Face models, called as a model does.

Its all-to-all is an all-gather on gloo, of world_size times the bytes; here it takes the one
collective that it takes on NCCL. Its blocks are flash_attn's, lent by the shim; its ring takes them
for CUDA tensors only, for which the queries are held out to it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
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
from benchmarks.peers.usp import heads_split
from tilewise.layouts.layout import Layout
from tilewise_tools.bench.case import BenchCase
from tilewise_verify import flash_attn_shim

KERNEL = "tilewise_peers_flash"  # in transformers' table of attention functions
ULYSSES, ALL_GATHER, P2P = "ulysses", "ring allgather", "ring p2p"


class _SaysCuda(Tensor):
    """A CPU tensor for code that takes its flash path for CUDA tensors only."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = True


@dataclass(frozen=True)
class Ringmaster(Adapter):
    """Its attention, tokens contiguous; windows must be causal.

    Args:
        method: ULYSSES, ALL_GATHER (its ring's default) or P2P.
    """

    method: str = ULYSSES
    library: str = "axolotl-ringmaster"

    @property
    def name(self) -> str:
        return f"ringmaster {self.method}"

    def layout(self, case: BenchCase) -> Layout:
        said = words(case.make_mask())
        if said.right > 0 or (said.left >= 0 and not said.causal):
            raise CannotRunError("its windows are causal, of so many tokens to the left")
        if self.method == P2P and (said.left >= 0 or said.cu_seqlens is not None):
            raise CannotRunError("it refuses windows, and gathers where there are documents")
        if said.cu_seqlens is not None and said.left >= 0 and self.method == ULYSSES:
            raise CannotRunError("windows of documents are not passed to it here")
        if self.method == ULYSSES:
            return heads_split(case)
        equal_shares(case, case.world_size)
        return tw.contiguous(case.num_tokens, case.world_size)

    def prepare(self, case: BenchCase, rank: int, group: Any) -> Prepared:
        said, layout = words(case.make_mask()), self.layout(case)
        group = group or dist.group.WORLD
        forward, module = _attention(self.method, group), SimpleNamespace()
        runtime = importlib.import_module("ringmaster.runtime")
        options: dict[str, Any] = {"is_causal": said.causal}
        if said.left >= 0:
            options["sliding_window"] = said.left + 1
        packed = None
        if said.cu_seqlens is not None:
            edges = torch.tensor(said.cu_seqlens, dtype=torch.int32)
            packed = edges, int(edges.diff().max())

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            runtime.set_runtime(_runtime(runtime, self.method, group, packed))
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            if self.method != ULYSSES:
                q = q.as_subclass(_SaysCuda)
            out, _ = forward(module, q, k, v, None, **options)
            return out[0]

        if self.method == ULYSSES:
            ranks = range(case.world_size)
            pairs = pairs_of(case, layout, ranks) // case.world_size
        else:
            pairs = pairs_of(case, layout, [rank])
        return Prepared(layout, attention, pairs)

    def _installed(self) -> bool:
        return importlib.util.find_spec("ringmaster") is not None


def _runtime(runtime: Any, method: str, group: Any, packed: Any) -> Any:
    config = importlib.import_module("ringmaster.config").RingmasterConfig()
    own = {"ulysses_group" if method == ULYSSES else "ring_group": group}
    return runtime.CPRuntime(config, cp_group=group, varlen=packed, **own)


def _attention(method: str, group: Any) -> Any:
    """What it would register for a model, over the shim's kernel."""
    strategy = importlib.import_module("ringmaster.strategies.ulysses")
    strategy._flash_varlen_fn = lambda implementation: flash_attn_shim.flash_attn_varlen_func
    if method == ULYSSES:
        from transformers import AttentionInterface

        AttentionInterface.register(KERNEL, _flash)
        comm = importlib.import_module("ringmaster.comm")
        comm.dist = SimpleNamespace(**{**vars(dist), "get_backend": lambda group: "nccl"})
        return strategy.make_ulysses_attention(KERNEL)
    kernels = importlib.import_module("ringmaster.ring.kernels")
    kernels._flash_fn = lambda implementation: flash_attn_shim.flash_attn_func
    both = flash_attn_shim.forward, flash_attn_shim.backward
    importlib.import_module("ringmaster.ring.p2p_attn")._flash_ops = lambda *which: both
    methods = importlib.import_module("ringmaster.config").RotateMethod
    rotate = methods.ALLTOALL if method == P2P else methods.ALLGATHER
    make = importlib.import_module("ringmaster.strategies.ring").make_ring_attention
    return make("hf_kernels", "flash_attention_2", rotate)


def _flash(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, is_causal: bool, **options: Any
) -> tuple[Tensor, None]:
    rows_first, window = (x.transpose(1, 2) for x in (q, k, v)), options.get("sliding_window")
    given = {"softmax_scale": options.get("scaling"), "causal": is_causal}
    if window:
        given["window_size"] = (window - 1, 0)
    return flash_attn_shim.flash_attn_func(*rows_first, **given), None

"""ringmaster: the functions that it registers for Hugging Face models, called as a model does.

Its all-to-all is an all-gather on gloo, of world_size times the bytes; here it takes the one
collective that it takes on NCCL. Its blocks are flash_attn's, lent by the shim.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor

import tilewise as tw
from benchmarks.peers import flash_attn_shim
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
from tilewise.tools.bench.case import BenchCase

KERNEL = "tilewise_peers_flash"  # in transformers' table of attention functions
ULYSSES, ALL_GATHER = "ulysses", "ring allgather"


@dataclass(frozen=True)
class Ringmaster(Adapter):
    """Its attention for causal masks without documents.

    Args:
        method: ULYSSES, or ALL_GATHER, its ring's default.
    """

    method: str = ULYSSES
    library: str = "axolotl-ringmaster"

    @property
    def name(self) -> str:
        return f"ringmaster {self.method}"

    def layout(self, case: BenchCase) -> Layout:
        said = words(case.make_mask())
        if said != said._replace(left=-1, right=-1, cu_seqlens=None):
            raise CannotRunError("windows and documents are not passed to it here")
        if self.method == ULYSSES:
            return heads_split(case)
        equal_shares(case, case.world_size)
        return tw.contiguous(case.num_tokens, case.world_size)

    def prepare(self, case: BenchCase, rank: int, group: Any) -> Prepared:
        said, layout = words(case.make_mask()), self.layout(case)
        group = group or dist.group.WORLD
        forward, module = _attention(self.method, group), SimpleNamespace()
        runtime = importlib.import_module("ringmaster.runtime")

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            runtime.set_runtime(_runtime(runtime, self.method, group))
            heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
            out, _ = forward(module, *heads_first, None, is_causal=said.causal)
            return out[0]

        if self.method == ULYSSES:
            ranks = range(case.world_size)
            pairs = pairs_of(case, layout, ranks) // case.world_size
        else:
            pairs = pairs_of(case, layout, [rank])
        return Prepared(layout, attention, pairs)

    def _installed(self) -> bool:
        return importlib.util.find_spec("ringmaster") is not None


def _runtime(runtime: Any, method: str, group: Any) -> Any:
    config = importlib.import_module("ringmaster.config").RingmasterConfig()
    own = {"ulysses_group" if method == ULYSSES else "ring_group": group}
    return runtime.CPRuntime(config, cp_group=group, **own)


def _attention(method: str, group: Any) -> Any:
    """What it would register for a model, over the shim's kernel."""
    if method == ULYSSES:
        from transformers import AttentionInterface

        AttentionInterface.register(KERNEL, _flash)
        comm = importlib.import_module("ringmaster.comm")
        comm.dist = SimpleNamespace(**{**vars(dist), "get_backend": lambda group: "nccl"})
        return importlib.import_module("ringmaster.strategies.ulysses").make_ulysses_attention(
            KERNEL
        )
    kernels = importlib.import_module("ringmaster.ring.kernels")
    kernels._flash_fn = lambda implementation: flash_attn_shim.flash_attn_func
    rotate = importlib.import_module("ringmaster.config").RotateMethod.ALLGATHER
    make = importlib.import_module("ringmaster.strategies.ring").make_ring_attention
    return make("hf_kernels", "flash_attention_2", rotate)


def _flash(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, is_causal: bool, **options: Any
) -> tuple[Tensor, None]:
    rows_first = (x.transpose(1, 2) for x in (q, k, v))
    scale = options.get("scaling")
    return flash_attn_shim.flash_attn_func(*rows_first, 0.0, scale, is_causal), None

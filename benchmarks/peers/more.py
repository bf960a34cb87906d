"""Peers for docs/parity.md that no benchmark times: axolotl-ringmaster, ring-attention-pytorch."""

from __future__ import annotations

import importlib
import importlib.util
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


@dataclass(frozen=True)
class Ringmaster(Adapter):
    """Its ring on its own blocks in plain PyTorch, by gathering (its default) or by rotating.

    Args:
        rotate: "allgather" or "alltoall", its rotation from rank to rank.
    """

    rotate: str = "allgather"
    library: str = "axolotl-ringmaster"

    @property
    def name(self) -> str:
        return f"ringmaster ring {self.rotate}"

    def layout(self, case: BenchCase) -> Layout:
        words(case.make_mask())
        equal_shares(case, case.world_size)
        return tw.contiguous(case.num_tokens, case.world_size)

    def prepare(self, case: BenchCase, rank: int, group: Any) -> Prepared:
        said, layout = words(case.make_mask()), self.layout(case)
        ring = importlib.import_module("ringmaster.ring")
        config = importlib.import_module("ringmaster.config")
        loop = importlib.import_module("ringmaster.ring.loop")
        window = (said.left, said.right) if said.left >= 0 else None
        scaling = case.head_dim**-0.5

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            operands = [x.transpose(0, 1)[None] for x in (q, k, v)]
            shared = {"group": group, "causal": said.causal, "scaling": scaling, "dropout": 0.0}
            shared |= {"attn_implementation": "math"}
            if said.cu_seqlens is not None:
                edges = torch.tensor(said.cu_seqlens)
                out = loop.varlen_ring_attention(
                    *operands, cu_seqlens=edges, window=window, **shared
                )
            else:
                rotate = config.RotateMethod(self.rotate)
                out = ring.ring_attention(
                    *operands, provider="math", rotate_method=rotate, window=window, **shared
                )
            return out[0]

        return Prepared(layout, attention, pairs_of(case, layout, [rank]))

    def _installed(self) -> bool:
        return importlib.util.find_spec("ringmaster") is not None


@dataclass(frozen=True)
class LucidRing(Adapter):
    """ring_flash_attn of lucidrains' ring-attention-pytorch, its version in plain PyTorch."""

    library: str = "ring-attention-pytorch"

    @property
    def name(self) -> str:
        return self.library

    def layout(self, case: BenchCase) -> Layout:
        said = words(case.make_mask())
        if said.cu_seqlens is not None:
            raise CannotRunError("its ring has no argument for documents")
        if said.left >= 0:
            raise CannotRunError("it looks back over whole buckets, not over a window of tokens")
        equal_shares(case, case.world_size)
        return tw.contiguous(case.num_tokens, case.world_size)

    def prepare(self, case: BenchCase, rank: int, group: Any) -> Prepared:
        said, layout = words(case.make_mask()), self.layout(case)
        module = importlib.import_module("ring_attention_pytorch.ring_flash_attention")
        options = {"causal": said.causal, "bucket_size": 16, "ring_reduce_col": True}
        # Its query head i reads KV head i mod num_kv_heads; ours neighbouring ones the same.
        ratio = case.num_heads // case.num_kv_heads
        order = torch.arange(case.num_heads).view(-1, ratio).T.flatten()

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = module.ring_flash_attn(q[None, :, order], k[None], v[None], **options)[0]
            return out[:, order.argsort()]

        return Prepared(layout, attention, pairs_of(case, layout, [rank]))

"""Every provider, and every strategy over loopback, against dense attention in fp64: both passes.

The error, root of the mean square, may be twice that of torch's memory-efficient attention in bf16
on the same input.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise as tw
from benchmarks.gpu_parts.case import Row
from benchmarks.gpu_parts.session import Session, captured
from benchmarks.gpu_parts.sizes import CHECKED_PLANS, mask_named
from benchmarks.whole_mask import placed, whole_mask
from tilewise.kernels.protocol import Kernel
from tilewise.kernels.registry import kernel_named
from tilewise.tiles.cover import tile_calls

NAMES = ("out", "dq", "dk", "dv")
# All but cuDNN's, so that the bound does not depend on what torch prefers on a device: with a dense
# mask the memory-efficient kernel on CUDA, flash attention on the CPU, and plain torch for fp64.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Question(NamedTuple):
    """What is to be computed, and how well.

    Attributes:
        tensors: q, k, v, dout in bf16.
        exact: out, dq, dk, dv in fp64.
        allowed: error of each.
    """

    tensors: list[Tensor]
    exact: list[Tensor]
    allowed: list[float]


def run(session: Session, options: Row) -> Row:
    mask = mask_named(options["mask"], options["num_tokens"])
    shape = options["num_tokens"], options["head_dim"]
    heads = num_heads(options)
    question = _question(session, options["mask"], shape, heads)
    kernel = kernel_named(options["kernel"])
    if options["plan"] == "none":
        got = alone(kernel, mask, question.tensors)
    else:
        plan = CHECKED_PLANS[options["plan"]]()
        layout = tw.zigzag(shape[0], plan.world_size)
        shards = _sharded(layout, question.tensors)
        call = looped(plan, layout, mask, shards, kernel)
        call = captured(call, session.device) if options["graph"] else call
        call()
        ranks = call()  # buffers are bound by now
        session.settle()
        got = [layout.unshard(list(parts)) for parts in zip(*ranks, strict=True)]
    return compared(got, question)


def num_heads(options: Row) -> tuple[int, int]:
    """Query and KV heads."""
    first, _, second = options["heads"].partition(":")
    return int(first), int(second)


@lru_cache(maxsize=1)
def _question(
    session: Session, mask_name: str, shape: tuple[int, int], heads: tuple[int, int]
) -> Question:
    mask, (num_tokens, head_dim) = mask_named(mask_name, shape[0]), shape
    q, dout = session.normal(2, num_tokens, heads[0], head_dim)
    k, v = session.normal(2, num_tokens, heads[1], head_dim)
    tensors = [q, k, v, dout]
    exact = dense([x.double() for x in tensors], mask)
    plain = dense(tensors, mask)
    return Question(tensors, exact, [2 * error(x, y) for x, y in zip(plain, exact, strict=True)])


def dense(tensors: list[Tensor], mask: tw.masks.Mask) -> list[Tensor]:
    """out and gradients of torch's own attention with a dense mask."""
    positions = torch.arange(len(tensors[0]))
    allowed = torch.as_tensor(mask.dense(positions, positions))[None, None].to(tensors[0].device)
    inputs = [x.transpose(0, 1).detach().requires_grad_() for x in tensors[:3]]
    group = tensors[0].shape[1] // tensors[1].shape[1]
    wide = (x.repeat_interleave(group, 0)[None] for x in inputs[1:])
    with sdpa_kernel(BACKENDS):
        out = F.scaled_dot_product_attention(inputs[0][None], *wide, attn_mask=allowed)[0]
    grads = torch.autograd.grad(out, inputs, tensors[3].transpose(0, 1))
    return [x.transpose(0, 1) for x in (out.detach(), *grads)]


def alone(kernel: Kernel, mask: tw.masks.Mask, tensors: list[Tensor]) -> list[Tensor]:
    """One kernel over the whole mask, no plan and no executor."""
    dout, rows = tensors[3], np.arange(len(tensors[0]))
    cut = {"square_causal": kernel.square_causal, "whole_tile": kernel.whole_tile}
    calls = placed(tile_calls(rows, rows, mask, **cut), str(dout.device))
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    out = whole_mask(q, k, v, kernel, calls)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def _sharded(layout: tw.Layout, tensors: list[Tensor]) -> list[list[Tensor]]:
    return [[layout.shard(x, rank) for x in tensors] for rank in range(layout.world_size)]


def looped(
    plan: tw.Plan,
    layout: tw.Layout,
    mask: tw.masks.Mask,
    shards: list[list[Tensor]],
    kernel: Kernel | None = None,
) -> Callable[[], list[tuple[Tensor, ...]]]:
    """A run of both passes on all ranks: out, dq, dk, dv of each.

    Args:
        kernel: default the one that attention takes.
    """

    def on_rank(rank: int, group: Any) -> tuple[Tensor, ...]:
        q, k, v = (x.detach().requires_grad_() for x in shards[rank][:3])
        call = {"plan": plan, "layout": layout, "mask": mask, "group": group, "kernel": kernel}
        out = tw.attention(q, k, v, **call, validate="never")
        return out.detach(), *torch.autograd.grad(out, (q, k, v), shards[rank][3])

    return lambda: tw.loopback(plan.world_size, on_rank)


def compared(got: list[Tensor], question: Question) -> Row:
    errors = [error(x, y) for x, y in zip(got, question.exact, strict=True)]
    right = all(e <= b for e, b in zip(errors, question.allowed, strict=True))
    return {
        "right": right,
        "errors": dict(zip(NAMES, (float(f"{e:.3g}") for e in errors), strict=True)),
        "allowed": dict(zip(NAMES, (float(f"{b:.3g}") for b in question.allowed), strict=True)),
    }


def error(x: Tensor, y: Tensor) -> float:
    """Root of the mean square of x - y; inf if a number of x is not finite."""
    found = (x.double() - y.double()).square().mean().sqrt()
    return float(found.nan_to_num(nan=torch.inf))

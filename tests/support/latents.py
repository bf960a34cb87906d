"""Multi-head latent attention, dense and split: what travels is a row of latents a token."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from conformance.oracle import Inputs, dense
from torch import Tensor

import tilewise as tw

ROTARY = 2  # of a latent's numbers, those that all heads share


class Sizes(NamedTuple):
    """Of a layer: query and KV heads, widths of k, v and of a latent."""

    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 5
    v_head_dim: int = 6
    width: int = 7


USUAL = Sizes()


class Results(NamedTuple):
    """Of the whole sequence; gradients of the weights are summed over ranks."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dlatent: Tensor
    dw_k: Tensor
    dw_v: Tensor


class Layer(NamedTuple):
    """Operands of the whole sequence, weights that expand its latents, gradients of out and lse."""

    sizes: Sizes
    q: Tensor
    latent: Tensor
    w_k: Tensor
    w_v: Tensor
    dout: Tensor
    dlse: Tensor

    def expand(
        self, rows: Tensor, positions: Tensor, w_k: Tensor, w_v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """k of a part that is made for each head and one that all share, which is rotated."""
        own, shared = rows.split([rows.shape[-1] - ROTARY, ROTARY], -1)
        shared = (shared * (0.3 * positions[:, None]).cos().to(rows.dtype))[:, None]
        heads = self.sizes.num_kv_heads
        k, v = ((own @ weight).unflatten(-1, (heads, -1)) for weight in (w_k, w_v))
        return torch.cat([k, shared.expand(-1, heads, -1)], -1), v

    def wire(self, params: Any, **more: Any) -> tw.wire.Latent:
        _, heads, head_dim, v_head_dim, _ = self.sizes
        widths = {"num_kv_heads": heads, "head_dim": head_dim, "v_head_dim": v_head_dim}
        return tw.wire.Latent(self.expand, params=params, **widths, **more)

    def dense(self, mask: tw.Mask) -> Results:
        """By attention over the whole table."""
        tokens, batch = self.latent.shape[-2], self.latent.shape[:-2]
        given = [x.clone().requires_grad_() for x in (self.latent, self.w_k, self.w_v)]
        rows, positions = given[0].flatten(0, -2), torch.arange(tokens).repeat(*batch, 1).flatten()
        made = self.expand(rows, positions, *given[1:])
        k, v = (x.unflatten(0, (*batch, tokens)) for x in made)
        inputs = Inputs(self.q, k.detach(), v.detach(), self.dout, self.dlse)
        found = dense(inputs, mask)
        return Results(*found[:3], *torch.autograd.grad((k, v), given, (found.dk, found.dv)))

    def split(
        self, plan: tw.Plan, layout: tw.Layout, mask: tw.Mask, **options: Any
    ) -> tuple[Results, tw.Volume]:
        """By tw.attention on every rank of a loopback, and the bytes that each rank sent."""
        dim, own = self.q.ndim - 3, {"keep": options.pop("keep", False)}
        others = options.pop("wires", {})

        def on_rank(rank: int, group: Any) -> tuple[list[Tensor], tuple[int, int]]:
            rows = (layout.shard(x, rank, dim=dim) for x in (self.q, self.latent))
            given = [x.clone().requires_grad_() for x in (*rows, self.w_k, self.w_v)]
            call = {"plan": plan, "layout": layout, "mask": mask, "group": group, **options}
            wire = tw.wire.Wires(latent=self.wire(given[2:], **own), **others)
            out, lse = tw.attention(*given[:2], None, **call, return_lse=True, wire=wire)
            forward = group.bytes_sent
            dout, dlse = (layout.shard(x, rank, dim=dim) for x in (self.dout, self.dlse))
            reached = lse != -torch.inf
            ((out * dout).sum() + (lse[reached] * dlse[reached]).sum()).backward()
            grads = [x.grad for x in given if x.grad is not None]
            return [out.detach(), lse.detach(), *grads], (forward, group.bytes_sent - forward)

        ranks, moved = zip(*tw.loopback(plan.world_size, on_rank), strict=True)
        parts = list(zip(*ranks, strict=True))
        whole = [layout.unshard(x, dim=dim) for x in parts[:4]]
        sums = [torch.stack(x).sum(0) for x in parts[4:]]
        return Results(*whole, *sums), tw.Volume(*zip(*moved, strict=True))

    def workload(self, wires: Mapping[str, Any] = MappingProxyType({}), **more: Any) -> tw.Workload:
        num_heads, num_kv_heads, head_dim, v_head_dim, width = self.sizes
        given = {"dtype": "float64", "v_head_dim": v_head_dim, **more}
        wire = tw.wire.Wires(latent=self.wire((), width=width), **wires)
        return tw.Workload(self.q.shape[-3], num_heads, num_kv_heads, head_dim, wire=wire, **given)


def draw_layer(
    num_tokens: int, sizes: Sizes = USUAL, seed: int = 0, batch: tuple[int, ...] = ()
) -> Layer:
    make = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float64)

    rows, (heads, kv_heads, width, v_width, of_latent) = (*batch, num_tokens), sizes
    own = of_latent - ROTARY
    return Layer(
        sizes,
        normal(*rows, heads, width),
        normal(*rows, of_latent),
        normal(own, kv_heads * (width - ROTARY)),
        normal(own, kv_heads * v_width),
        normal(*rows, heads, v_width),
        normal(*rows, heads),
    )

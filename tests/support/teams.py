"""Attention on a loopback whose teams exchange one buffer each way, as gloo's all-to-all does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilewise as tw
from tilewise.transport.protocol import Handle, Message, TeamMessages


class Together:
    """A loopback group that takes exchanges of teams."""

    takes_teams = True

    def __init__(self, group: Any):
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def exchange_all(self, messages: TeamMessages) -> Handle:
        leaving, arriving, sizes, team, label, _ = messages
        out, room = (
            dict(zip(team, x.view(-1).split(of), strict=True))
            for x, of in zip((leaving, arriving), sizes, strict=True)
        )
        room.pop(self._group.rank).copy_(out.pop(self._group.rank))
        sends, recvs = ([Message(x, peer, label) for peer, x in y.items()] for y in (out, room))
        return self._group.exchange(sends, recvs)


def results(
    plan: tw.Plan,
    layout: tw.Layout,
    mask: tw.Mask,
    whole: list[torch.Tensor],
    unpack: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
    **options: Any,
) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv of the whole sequence; unpack: of what autograd has saved."""
    *operands, dout = whole

    def on_rank(rank: int, group: Any) -> tuple[torch.Tensor, ...]:
        q, k, v = (layout.shard(x, rank, -3).clone().requires_grad_() for x in operands)
        together = {"plan": plan, "layout": layout, "mask": mask, "return_lse": True}
        for x in (q, k, v):
            x.grad = None
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            out, lse = tw.attention(q, k, v, **together, group=Together(group), **options)
        grads = torch.autograd.grad(out, (q, k, v), layout.shard(dout, rank, -3))
        return out.detach(), lse.detach()[..., None], *grads

    ranks = tw.loopback(plan.world_size, on_rank)
    return [layout.unshard(list(parts), -3) for parts in zip(*ranks, strict=True)]

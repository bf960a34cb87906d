"""Calls by which codes for GPUs are judged: small ones for exactness, large ones for bytes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from conformance.oracle import Result, dense, draw, split

import tilewise as tw

LAYOUTS = tw.zigzag, tw.contiguous, tw.striped
MASKS = {
    "full": tw.Full(),
    "causal": tw.Causal(),
    "window": tw.Causal() & tw.Window(3, 0),
    "documents": tw.Document([0, 3, 3, 8, 13]) & tw.Causal() | tw.Window(1, 1),
    "by head": tw.PerHead([tw.Causal(), tw.Full(), tw.Causal() & tw.Window(3, 0), tw.Full()]),
}
LONG = 1 << 20


class LargeCall(NamedTuple):
    """A causal call in bf16, heads of 128."""

    plan: tw.Plan
    work: tw.Workload

    @classmethod
    def of(
        cls, plan: tw.Plan, num_tokens: int = LONG, heads: tuple[int, int] = (32, 32)
    ) -> LargeCall:
        return cls(plan, tw.Workload(num_tokens, *heads, 128, mask=tw.Causal()))

    def code(self, backward: bool, **options: Any) -> Any:
        """The code of a rank in a third of the world, on a GPU."""
        return self.plan.code(
            self.work, self.plan.world_size // 3, backward, device="cuda", **options
        )


LARGE = {
    "mesh": LargeCall.of(tw.mesh(256, q_tile=16)),
    "mesh of 8 KV heads": LargeCall.of(tw.mesh(256, q_tile=16), heads=(64, 8)),
    "gather": LargeCall.of(tw.mesh(256, q_tile=16, schedule="gather")),
    "ulysses": LargeCall.of(tw.ulysses(8, inner=tw.mesh(32, q_tile=4))),
    "long ring": LargeCall.of(tw.ring(256)),
    "ring": LargeCall.of(tw.ring(8), LONG // 8),
}


def plans_of_four_heads(strategy: Any) -> list[tw.Plan]:
    """A strategy's plans of four ranks, of queries that one rank holds and four KV heads serve."""
    return [x for x in strategy.plans(4) if not x.replicated_queries and x.num_head_groups <= 4]


def errors_in_bf16(plan: tw.Plan, kernel: Any = None) -> dict[str, float]:
    """The root mean square errors of each result of a causal call in bf16."""
    x = draw((96, 4, 16), (96, 2, 16), seed=1)
    x = type(x)(*(t.bfloat16().double() for t in x))._replace(dlse=torch.zeros(96, 4).double())
    options = {} if kernel is None else {"kernel": kernel}
    fresh, layout = plan.changed(), tw.zigzag(96, 4)  # what is kept of codes is the plan's
    got: Result = split(x, fresh, layout, tw.Causal(), torch.bfloat16, **options)
    pairs = zip(Result._fields, got, dense(x, tw.Causal()), strict=True)
    return {name: float((a.double() - b).square().mean().sqrt()) for name, a, b in pairs}

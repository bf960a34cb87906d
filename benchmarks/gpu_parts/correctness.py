"""Every strategy over loopback on one device, against dense attention in fp64: bf16, both passes.

The error, root of the mean square, may be twice that of torch's own attention in bf16 on the same
input.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise as tw
from benchmarks.gpu_parts.session import Row, Session, captured, normal

NAMES = ("out", "dq", "dk", "dv")


def run(session: Session) -> None:
    num_tokens, head_dim = (40, 16) if session.tiny else (1000, 128)
    masks = {
        "full": tw.Full(),
        "causal": tw.Causal(),
        "window": tw.Causal() & tw.Window(num_tokens // 7, 0),
        "documents": tw.Document([0, num_tokens // 3, num_tokens // 2, num_tokens]) & tw.Causal(),
    }
    torch.manual_seed(0)
    for name, mask in masks.items():
        for heads in ((8, 8), (8, 2)):
            q, dout = normal(session, 2, num_tokens, heads[0], head_dim)
            k, v = normal(session, 2, num_tokens, heads[1], head_dim)
            exact = dense(q.double(), k.double(), v.double(), dout.double(), mask)
            plain = dense(q, k, v, dout, mask)
            bound = [2 * error(x, y) for x, y in zip(plain, exact, strict=True)]
            for plan in plans(heads[1]):
                for graph in (False, True):
                    case = {
                        "plan": plan.name,
                        "mask": name,
                        "heads": f"{heads[0]}:{heads[1]}",
                        "graph": graph,
                    }
                    session.measure(
                        "correctness",
                        case,
                        lambda p=plan, m=mask, t=(q, k, v, dout), g=graph, e=exact, b=bound: (
                            compared(split(session, p, m, t, g), e, b)
                        ),
                    )


def plans(num_kv_heads: int) -> list[tw.Plan]:
    made = [
        tw.ring(4),
        tw.ring(4, moves="q"),
        tw.all_gather(4),
        tw.double_ring(2, 2),
        tw.balanced_ring(4),
        tw.attention2d(2, 2),
        tw.mesh(8, q_tile=4),
        tw.ulysses(2, inner=tw.mesh(4, q_tile=2)),
    ]
    return [plan for plan in made if num_kv_heads % plan.num_head_groups == 0]


def dense(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: tw.Mask) -> list[Tensor]:
    """out and gradients of torch's own attention with a dense mask."""
    positions = torch.arange(len(q))
    allowed = torch.as_tensor(mask.dense(positions, positions)).to(q.device)
    inputs = [x.transpose(0, 1).detach().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(
        *(x[None] for x in inputs), attn_mask=allowed[None, None], enable_gqa=True
    )[0]
    grads = torch.autograd.grad(out, inputs, dout.transpose(0, 1))
    return [x.transpose(0, 1) for x in (out.detach(), *grads)]


def split(
    session: Session, plan: tw.Plan, mask: tw.Mask, tensors: tuple[Tensor, ...], graph: bool
) -> list[Tensor]:
    """The same through tw.attention, split over loopback's ranks."""
    layout = tw.zigzag(len(tensors[0]), plan.world_size)
    shards = [[layout.shard(x, rank) for x in tensors] for rank in range(plan.world_size)]
    call = looped(plan, layout, mask, shards)
    call = captured(call, session.device) if graph else call
    call()
    ranks = call()  # buffers are bound by now
    session.settle()
    return [layout.unshard(list(parts)) for parts in zip(*ranks, strict=True)]


def looped(
    plan: tw.Plan, layout: tw.Layout, mask: tw.Mask, shards: list[list[Tensor]]
) -> Callable[[], list[tuple[Tensor, ...]]]:
    """A run of both passes on all ranks: out, dq, dk, dv of each."""

    def on_rank(rank: int, group: object) -> tuple[Tensor, ...]:
        q, k, v = (x.detach().requires_grad_() for x in shards[rank][:3])
        out = tw.attention(
            q, k, v, plan=plan, layout=layout, mask=mask, group=group, validate="never"
        )
        assert isinstance(out, Tensor)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), shards[rank][3])

    return lambda: tw.loopback(plan.world_size, on_rank)


def compared(got: list[Tensor], exact: list[Tensor], bound: list[float]) -> Row:
    errors = [error(x, y) for x, y in zip(got, exact, strict=True)]
    right = all(e <= b for e, b in zip(errors, bound, strict=True))
    return {
        "right": right,
        "errors": dict(zip(NAMES, (float(f"{e:.3g}") for e in errors), strict=True)),
        "allowed": dict(zip(NAMES, (float(f"{b:.3g}") for b in bound), strict=True)),
    }


def error(x: Tensor, y: Tensor) -> float:
    """Root of the mean square of x - y; inf if a number of x is not finite."""
    found = (x.double() - y.double()).square().mean().sqrt()
    return float(found.nan_to_num(nan=torch.inf))

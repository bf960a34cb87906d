"""Shards from all ranks put together on each, and means over ranks; both differentiable."""

from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.arguments import real_number, require_type, whole_number
from tilewise.layouts.layout import Layout
from tilewise.transport.agreement import agree
from tilewise.transport.protocol import Message, Transport, as_bytes


def gather_shards(x: Tensor, layout: Layout, transport: Transport, dim: int) -> Tensor:
    """The whole tensor on every rank, from each rank's rows along dim.

    Backward sums the whole tensor's gradient over ranks, then keeps this rank's rows.

    Raises:
        ValueError: the same on every rank, if one rank's rows do not fit the layout or ranks
            disagree on shape or dtype.
    """
    try:
        fields, error = _fields(x, layout, transport.rank, dim), None
    except Exception as raised:  # whatever it is, the other ranks must learn of it
        fields, error = None, str(raised)
    agree(transport, fields, error, "first")
    return _Gather.apply(x, layout, transport, dim)  # pyright: ignore[reportReturnType]


def mean_over_ranks(total: Tensor, count: Tensor | float, transport: Transport) -> Tensor:
    """The ranks' totals by the ranks' counts, the same on every rank.

    Backward divides by all counts and sums nothing: each rank's total gets its share.

    Raises:
        ValueError: the same on every rank, unless total is one number and count at least 0.
    """
    try:
        require_type(Tensor, "loss_sum", total, "F.cross_entropy(..., reduction='sum')")
        number = real_number("count", count.item() if _is_one_number(count) else count)
        if total.numel() != 1 or not total.is_floating_point() or not number >= 0:
            raise ValueError(
                f"loss_sum ({tuple(total.shape)}, {total.dtype}) and count ({number:g}) must "
                "be the sum of this rank's losses, one floating-point number, and how many they are"
            )
        fields, error = (
            {"call": "mean", "dtype": str(total.dtype), "device": total.device.type},
            None,
        )
    except Exception as raised:  # whatever it is, the other ranks must learn of it
        fields, error = None, str(raised)
    agree(transport, fields, error, "first")
    return _Mean.apply(total, count, transport)  # pyright: ignore[reportReturnType]


def _is_one_number(count: Any) -> TypeGuard[Tensor]:
    return isinstance(count, Tensor) and count.numel() == 1


def _fields(x: Tensor, layout: Layout, rank: int, dim: int) -> dict[str, str]:
    """Return the facts of a tensor, right by itself, that the ranks must have in common."""
    require_type(Tensor, "x", x, "what cp.attention returned")
    wanted, others = layout.size(rank), list(x.shape)
    if not -x.ndim <= whole_number("dim", dim, None) < x.ndim:
        raise ValueError(f"dim ({dim}) must be in {-x.ndim}..{x.ndim - 1}")
    if x.shape[dim] != wanted:
        raise ValueError(
            f"x has {x.shape[dim]} tokens along dim {dim}, but the layout gives this rank {wanted}"
        )
    others[dim] = -1
    texts = "unshard", layout.fingerprint, str(others), str(dim), str(x.dtype)
    return dict(zip(("call", "layout", "shape", "dim", "dtype"), texts, strict=True))


def on_every_rank(transport: Transport, x: Tensor) -> list[Tensor]:
    """Return the tensors that all ranks pass here, by rank; all are of one shape and dtype."""
    return _exchange(
        transport, [x.contiguous()] * transport.world_size, [len(x)] * transport.world_size
    )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, transport: Transport, dim: int) -> Tensor:
        ctx.layout, ctx.transport, ctx.dim = layout, transport, dim
        rows = x.detach().movedim(dim, 0).contiguous()
        sizes = [layout.size(rank) for rank in range(transport.world_size)]
        shards = _exchange(transport, [rows] * len(sizes), sizes)
        return layout.unshard(shards).movedim(0, dim)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, whole: Tensor
    ) -> tuple[Tensor | None, ...]:
        layout, transport = ctx.layout, ctx.transport
        shape = str(list(whole.shape))
        agree(transport, {"call": "backward of unshard", "shape": shape}, None, "first")
        rows = whole.movedim(ctx.dim, 0)
        parts = [layout.shard(rows, rank).contiguous() for rank in range(transport.world_size)]
        mine = _exchange(transport, parts, [len(parts[transport.rank])] * len(parts))
        return torch.stack(mine).sum(0).movedim(0, ctx.dim), None, None, None


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor | float, transport: Transport) -> Tensor:
        pair = torch.stack([total.detach().double().reshape(()), total.new_tensor(0.0).double()])
        pair[1] = count
        everyone = [pair] * transport.world_size
        sums = torch.stack(_exchange(transport, everyone, [2] * len(everyone))).sum(0)
        ctx.count = sums[1]
        return (sums[0] / sums[1]).to(total.dtype).reshape(total.shape)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        return (grad / ctx.count).to(grad.dtype), None, None


def _exchange(transport: Transport, outgoing: list[Tensor], sizes: list[int]) -> list[Tensor]:
    """Send outgoing[r] to rank r; return what each rank sent here, sizes[r] rows from rank r."""
    mine = outgoing[transport.rank]
    incoming = [mine.new_empty((size, *mine.shape[1:])) for size in sizes]
    incoming[transport.rank] = mine
    others = [rank for rank in range(transport.world_size) if rank != transport.rank]
    sends, recvs = (
        [Message(as_bytes(tensors[rank].reshape(-1)), rank, "gathering shards") for rank in others]
        for tensors in (outgoing, incoming)
    )
    transport.exchange(sends, recvs).wait()
    transport.finish()
    return incoming

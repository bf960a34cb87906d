"""Means over ranks, differentiable, and the tensors of all ranks on each."""

from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.arguments import real_number, require_type
from tilewise.transport.agreement import agree, settled
from tilewise.transport.protocol import Message, Transport, as_bytes


def mean_over_ranks(total: Tensor, count: Tensor | float, transport: Transport) -> Tensor:
    """The ranks' totals by the ranks' counts, the same on every rank.

    Backward divides by all counts and sums nothing: each rank's total gets its share.

    Raises:
        ValueError: the same on every rank, unless total is one number and count at least 0.
    """

    def check() -> dict[str, str]:
        require_type(Tensor, "loss_sum", total, "F.cross_entropy(..., reduction='sum')")
        number = real_number("count", count.item() if _is_one_number(count) else count)
        if total.numel() != 1 or not total.is_floating_point() or not number >= 0:
            raise ValueError(
                f"loss_sum ({tuple(total.shape)}, {total.dtype}) and count ({number:g}) must "
                "be the sum of this rank's losses, one floating-point number, and how many they are"
            )
        return {"call": "mean", "dtype": str(total.dtype), "device": total.device.type}

    agree(transport, settled(transport, check), None, "first")
    return _Mean.apply(total, count, transport)  # pyright: ignore[reportReturnType]


def _is_one_number(count: Any) -> TypeGuard[Tensor]:
    return isinstance(count, Tensor) and count.numel() == 1


def on_every_rank(transport: Transport, x: Tensor) -> list[Tensor]:
    """Return the tensors that all ranks pass here, by rank; all are of one shape and dtype."""
    return _exchange(
        transport, [x.contiguous()] * transport.world_size, [len(x)] * transport.world_size
    )


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

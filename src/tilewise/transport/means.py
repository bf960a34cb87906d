"""Means over ranks, differentiable, and the tensors of all ranks on each."""

from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.arguments import real_number, require_type, shown
from tilewise.kernels.binned import add_terms, blank_sums, merge_sums, rounded
from tilewise.plan.sums import MANY_TERMS
from tilewise.transport.agreement import agree, settled
from tilewise.transport.protocol import Message, Transport, as_bytes

MOST_LOSSES = 1 << 53
"""Whole numbers up to here are exact in fp64."""


def mean_over_ranks(
    losses: Tensor, count: Tensor | float, transport: Transport, canonical: bool = False
) -> Tensor:
    """The sum of all ranks' losses by the sum of the ranks' counts, the same on every rank.

    Backward divides by all counts and sums nothing: each rank's losses get their share.

    Args:
        losses: any number of losses of this rank, or their sum.
        canonical: they are those of each token, and are added as a binned sum.
    Raises:
        ValueError: the same on every rank, unless losses are numbers and count is at least 0.
    """

    def check() -> dict[str, str]:
        require_type(Tensor, "losses", losses, "F.cross_entropy(..., reduction='sum')")
        number = real_number("count", count.item() if _is_one_number(count) else count)
        if not losses.is_floating_point() or not 0 <= number <= MOST_LOSSES:
            raise ValueError(
                f"losses ({tuple(losses.shape)}, {losses.dtype}) and count ({shown(number)}) must "
                "be this rank's losses or their sum, floating-point numbers, and how many they are"
            )
        if (canonical or losses.numel() != 1) and losses.numel() < number:
            why = "pass the loss of each token, as of cross_entropy(..., reduction='none')"
            if canonical:
                why += "; a sum made on each rank has other bits at another split"
            raise ValueError(
                f"losses {tuple(losses.shape)} are fewer than count ({number:g}); {why}"
            )
        return {
            "call": "mean",
            "dtype": str(losses.dtype),
            "device": losses.device.type,
            "canonical": str(canonical),
        }

    agree(transport, settled(transport, check), None, "first")
    return _Mean.apply(losses, count, transport, canonical)  # pyright: ignore[reportReturnType]


def _is_one_number(count: Any) -> TypeGuard[Tensor]:
    return isinstance(count, Tensor) and count.numel() == 1


def on_every_rank(transport: Transport, x: Tensor) -> list[Tensor]:
    """Return the tensors that all ranks pass here, by rank; all are of one shape and dtype."""
    return exchange_tensors(
        transport, [x.contiguous()] * transport.world_size, [len(x)] * transport.world_size
    )


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, losses: Tensor, count: Tensor | float, transport: Transport, canonical: bool
    ) -> Tensor:
        ctx.shape, flat = losses.shape, losses.detach().double().reshape(-1)
        total = _binned_total(flat) if canonical else flat.sum().reshape(1)
        counted = torch.as_tensor(count, dtype=torch.float64, device=flat.device).reshape(1)
        own = torch.cat([total.view(torch.int64), counted.view(torch.int64)])
        first, *others = on_every_rank(transport, own)
        sums, counts = first[:-1].view(total.dtype), first[-1:].view(torch.float64)
        for other in others:
            counts = counts + other[-1:].view(torch.float64)
            if canonical:
                merge_sums(sums, other[:-1], MANY_TERMS)
            else:
                sums = sums + other[:-1].view(torch.float64)
        ctx.count = counts
        total = rounded(sums, MANY_TERMS, torch.float64) if canonical else sums
        return (total / ctx.count).to(losses.dtype).reshape(())

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        share = (grad / ctx.count).to(grad.dtype).reshape(())
        return share.expand(ctx.shape), None, None, None


def _binned_total(numbers: Tensor) -> Tensor:
    """Return the binned sum of numbers, int64 [columns]."""
    sums = blank_sums((max(1, len(numbers)),), 1, MANY_TERMS, numbers.device)
    add_terms(sums[: len(numbers)], numbers.unsqueeze(1), MANY_TERMS)
    while len(sums) > 1:
        half = (len(sums) + 1) // 2
        merge_sums(sums[: len(sums) - half], sums[half:], MANY_TERMS)
        sums = sums[:half]
    return sums[0]


def exchange_tensors(
    transport: Transport, outgoing: list[Tensor], sizes: list[int]
) -> list[Tensor]:
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

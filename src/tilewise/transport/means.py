"""Means over ranks, differentiable, and the tensors of all ranks on each."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.arguments import real_number, require_dense, require_type, shown
from tilewise.transport.agreement import agree, settled
from tilewise.transport.protocol import Message, Transport, as_bytes

MOST_LOSSES = 1 << 53
"""Whole numbers up to here are exact in fp64."""


class Sum(NamedTuple):
    """A way to add fp64 numbers of all ranks.

    Attributes:
        name: on which ranks agree; "fast" takes sums that ranks made, any other one term by term.
        of: the sum of some numbers, as a tensor of items of 8 bytes.
        merge: (sum, other): adds another sum to one in place.
        rounded: a sum as fp64 [1].
    """

    name: str
    of: Callable[[Tensor], Tensor]
    merge: Callable[[Tensor, Tensor], object]
    rounded: Callable[[Tensor], Tensor]


FAST_SUM = Sum("fast", lambda x: x.sum().reshape(1), Tensor.add_, lambda total: total)
"""The sum in the order of ranks."""


def mean_over_ranks(
    losses: Tensor, count: Tensor | float, transport: Transport, addition: Sum = FAST_SUM
) -> Tensor:
    """The sum of all ranks' losses by the sum of the ranks' counts, the same on every rank.

    Backward divides by all counts and sums nothing: each rank's losses get their share.

    Args:
        losses: any number of losses of this rank, or their sum.
        addition: the way in which they are added.
    Raises:
        ValueError: the same on every rank, unless losses are numbers and count is at least 0.
    """

    def check() -> dict[str, str]:
        require_type(Tensor, "losses", losses, "F.cross_entropy(..., reduction='sum')")
        require_dense("losses", losses)
        if isinstance(count, Tensor):
            require_dense("count", count)
        number = real_number("count", count.item() if _is_one_number(count) else count)
        if not losses.is_floating_point() or not 0 <= number <= MOST_LOSSES:
            raise ValueError(
                f"losses ({tuple(losses.shape)}, {losses.dtype}) and count ({shown(number)}) must "
                "be this rank's losses or their sum, floating-point numbers, and how many they are"
            )
        exact = addition.name != "fast"
        if (exact or losses.numel() != 1) and losses.numel() < number:
            why = "pass the loss of each token, as of cross_entropy(..., reduction='none')"
            if exact:
                why += "; a sum made on each rank has other bits at another split"
            raise ValueError(
                f"losses {tuple(losses.shape)} are fewer than count ({number:g}); {why}"
            )
        return {
            "call": "mean",
            "dtype": str(losses.dtype),
            "device": losses.device.type,
            "reduction": addition.name,
        }

    agree(transport, settled(transport, check), None, "first")
    return _Mean.apply(losses, count, transport, addition)  # pyright: ignore[reportReturnType]


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
        ctx: Any, losses: Tensor, count: Tensor | float, transport: Transport, addition: Sum
    ) -> Tensor:
        ctx.shape, flat = losses.shape, losses.detach().double().reshape(-1)
        total = addition.of(flat)
        counted = torch.as_tensor(count, dtype=torch.float64, device=flat.device).reshape(1)
        own = torch.cat([total.view(torch.int64), counted.view(torch.int64)])
        first, *others = on_every_rank(transport, own)
        sums, counts = first[:-1].view(total.dtype).clone(), first[-1:].view(torch.float64)
        for other in others:
            counts = counts + other[-1:].view(torch.float64)
            addition.merge(sums, other[:-1].view(total.dtype))
        ctx.count = counts
        return (addition.rounded(sums) / ctx.count).to(losses.dtype).reshape(())

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        share = (grad / ctx.count).to(grad.dtype).reshape(())
        return share.expand(ctx.shape), None, None, None


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

"""Sinks: a learnable logit a head that takes part in the softmax and has no value.

Attention runs without them; its lse says what they change. So no kernel and no plan knows them.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from tilewise.arguments import dtype_name, is_dense


class TensorKind(NamedTuple):
    """Facts of a sink or bias that a call's ranks must have in common, a constant to compilers."""

    shape: tuple[int, ...]
    dtype: str
    device: str

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def kind_of(x: Tensor | None) -> TensorKind | None:
    """The kind of what was passed as sink or bias, whatever it is."""
    if x is None:
        return None
    if not isinstance(x, Tensor):
        return TensorKind((), type(x).__name__, "no device")
    if not is_dense(x):
        return TensorKind((), "nested" if x.is_nested else str(x.layout), x.device.type)
    return TensorKind(tuple(x.shape), dtype_name(x.dtype), x.device.type)


def values_of(sink: Tensor | None) -> dict[str, str]:
    """Return a sink's numbers as text, for the ranks to compare.

    Empty if there are none to read: inside vmap or a compiler, and for tensors without numbers.
    """
    if sink is None or type(sink) not in (Tensor, torch.nn.Parameter):
        return {}
    if sink.device.type == "meta" or not is_dense(sink) or is_functorch_wrapped_tensor(sink):
        return {}
    return {"values of sink": str(sink.tolist())}


def check_sink(
    sink: TensorKind, num_heads: int, dtype: str, device: str, batch: int | None = None
) -> None:
    """Raise ValueError unless the sink is at least one logit for each of q's heads.

    Args:
        batch: of q; None: q has none, or each of its entries has the same sinks.
    """
    *before, heads = sink.shape or (0,)
    entries = before[:-1]  # of the batch
    fits = not entries or entries == [batch]
    if heads != num_heads or not fits or 0 in before[-1:]:
        own = "" if batch is None else f", or [{batch}, n, {num_heads}] for each batch entry"
        raise ValueError(
            f"sink is {sink.dtype} {list(sink.shape)}, but q has {num_heads} heads; pass a tensor "
            f"of one logit a head, [{num_heads}], or of n, [n, {num_heads}]{own}"
        )
    if sink.dtype not in (dtype, "float32"):
        raise ValueError(
            f"sink is {sink.dtype}, but must be float32 or q's dtype ({dtype}); convert it"
        )
    if sink.device != device:
        raise ValueError(f"sink is on {sink.device}, but q on {device}; move it there")


def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Attention whose softmax has one more term, exp(sink), in its denominator.

    out' = out sigmoid(lse - sink);  lse' = log(exp(lse) + exp(sink)). Several sinks of a head are
    one, whose exp is the sum of theirs.

    Differentiable; the gradient of sink is that of these rows alone, 0 where there are none.

    Args:
        out, lse: [..., num_heads, head_dim] and [..., num_heads], complete: of all keys. Where lse
            is -inf no key reaches a row: its out stays 0 and its lse becomes sink.
        sink: [num_heads], or [n, num_heads], or [batch, n, num_heads].
    """
    sink = one_sink(sink, lse.dtype)
    reached = lse != -torch.inf
    # nan would come of -inf - -inf, also in gradients that count for nothing
    safe = lse.masked_fill(~reached, 0.0)
    share = torch.sigmoid(safe - sink)
    total = torch.where(reached, torch.logaddexp(safe, sink), sink)
    return (out * share[..., None]).to(out.dtype), total


def one_sink(sinks: Tensor, dtype: torch.dtype) -> Tensor:
    """One sink a head, the logarithm of the sum of exp(sinks): [num_heads], or [batch, 1,
    num_heads].
    """
    sinks = sinks.to(dtype)
    if sinks.ndim == 1:
        return sinks
    hidden = sinks == -torch.inf
    empty = hidden.all(-2)
    # nan would come of -inf - -inf, also in gradients that count for nothing
    total = sinks.masked_fill(hidden & empty.unsqueeze(-2), 0.0).logsumexp(-2)
    total = total.masked_fill(empty, -torch.inf)
    return total if sinks.ndim == 2 else total.unsqueeze(-2)

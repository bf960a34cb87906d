"""A canonical call: its passes, its kernel, and its sinks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tilewise.compiler.row_moves import RowMoves
from tilewise.exact.elementary import exp_parts, log_of, power_of_two
from tilewise.exact.kernel import CpuKernel, WholeRowsKernel
from tilewise.exact.passes import exact_passes as exact_passes
from tilewise.exact.sums import add_terms, blank_sums, folded, rounded
from tilewise.execution.call import Call, ResolvedCall
from tilewise.execution.row_moves import moved
from tilewise.kernels.protocol import Kernel
from tilewise.kernels.registry import kernel_named
from tilewise.layouts.layout import Run, contiguous
from tilewise.transport.protocol import Transport

FIRST: Mapping[str, str] = MappingProxyType({"cpu": "cpu", "cuda": "triton"})
"""The kernel that is taken where none is named, by the kind of device."""


def exact_kernel(call: Call, q: Tensor, widths: tuple[int, int], needs: tuple[str, ...]) -> Kernel:
    """The kernel of whole rows of a canonical call.

    Args:
        widths: head_dim and v_head_dim.
        needs: what `Scores.needs` says of the call.
    Raises:
        ValueError: if the call names a kernel without fixed blocks, or one that cannot serve it.
    """
    device = q.device.type
    named = call.kernel if call.kernel is not None else FIRST.get(device, "triton")
    reason = "it has no fixed blocks of rows, so that its bits may depend on the split"
    if named == "cpu":
        reason = None if device == "cpu" else f"it runs on cpu, not on {device}"
    elif named == "triton":
        asked = device, q.dtype, max(widths), call.needs_grad, needs
        reason = kernel_named("triton").supports(*asked)
    if reason is not None:
        name = named if isinstance(named, str) else getattr(named, "name", type(named).__name__)
        other = FIRST.get(device)
        advice = "use reduction='fast'" if other in (None, name) else f"on {device} {other!r} can"
        raise ValueError(f"kernel {name!r} cannot serve reduction='canonical': {reason}; {advice}")
    kv_layout = call.kv_layout or call.layout
    kind: type[WholeRowsKernel] = CpuKernel
    if named == "triton":
        from tilewise.exact.trial import prove
        from tilewise.exact.triton_kernel import TritonKernel

        prove(q.device, q.dtype, widths)
        kind = TritonKernel
    made: Any = kind(call.mask, (call.layout.num_tokens, kv_layout.num_tokens))
    return made  # a backward pass of it is in two calls


def check_tensors_beside(sink: Tensor | None, bias: Tensor | None, watched: bool) -> None:
    """Refuse what a canonical call cannot do with tensors that are no operands.

    Args:
        watched: operators are followed outside of a compiler.
    """
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "reduction='canonical' gives no gradient of a dense bias: it is a sum over ranks; pass "
            "bias.detach(), or take tw.alibi, or reduction='fast'"
        )
    if sink is not None and watched:
        raise ValueError(
            "reduction='canonical' takes no sink where operators are followed (selective "
            "checkpointing, modes and classes of tensors); call attention outside of them"
        )


def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> None:
    """Add a term exp(sink) to the denominator of each row, in place.

    out' = out / (1 + exp(sink - lse));  lse' = lse + log(1 + exp(sink - lse)). Operations are
    rounded one by one, so that a row's bits do not depend on the rows beside it.

    Args:
        out, lse: [(batch,) rows, heads, width] and [(batch,) rows, heads].
        sink: [num_heads], or [batch, num_heads].
    """
    sink = (sink if sink.ndim == 1 else sink.unsqueeze(-2)).to(torch.float64).expand(lse.shape)
    own = lse.to(torch.float64)
    most = torch.maximum(own, sink)
    base = most.masked_fill(most == -torch.inf, 0.0)
    terms = [_exp(x - base) for x in (own, sink)]
    total = terms[0] + terms[1]
    share = terms[0] / total.masked_fill(total == 0, 1.0)
    out.copy_(out.to(lse.dtype) * share.to(lse.dtype).unsqueeze(-1))
    lse.copy_(log_of(total, torch.zeros_like(total, dtype=torch.int64)) + base)


def _exp(x: Tensor) -> Tensor:
    mantissas, exponents = exp_parts(x)
    return mantissas * power_of_two(exponents)


def sink_gradient(
    problem: ResolvedCall,
    transport: Transport,
    saved: Any,
    grads: tuple[Tensor | None, Tensor | None],
    sink: Tensor,
) -> Tensor:
    """Return this rank's share of the gradient of a sink: the first rank has all of it.

    dsink = -sum of exp(sink - lse) delta: the sink's own weight, whose value is 0.

    Args:
        saved: out and lse of the forward pass, which count the sink.
        grads: dout and dlse; None: zero.
        sink: [num_heads], or [batch, num_heads], each entry's own.
    """
    out, lse = saved
    dout, dlse = grads
    delta = torch.zeros_like(lse)
    if dout is not None:
        WholeRowsKernel.row_sum(out.to(lse.dtype) * dout, delta)
    if dlse is not None:
        delta -= dlse
    if out.ndim == 4:
        delta, lse = delta.transpose(0, 1), lse.transpose(0, 1)
    mantissas, exponents = exp_parts(sink - lse)
    if sink.ndim == 1 and delta.ndim == 3:
        delta, mantissas, exponents = (x.flatten(0, 1) for x in (delta, mantissas, exponents))
    sums = blank_sums((len(delta) + 1, *delta.shape[1:]), 1, delta.device)
    add_terms(sums[1:], -delta.unsqueeze(-1), mantissas, exponents)
    total = folded(sums)
    if transport.world_size == 1:
        return rounded(total, sink.dtype).squeeze(-1)
    parts = moved(total.unsqueeze(0), _to_first(transport.world_size), transport)
    if not len(parts):
        return torch.zeros_like(sink)
    return rounded(folded(parts), sink.dtype).squeeze(-1)


@lru_cache(maxsize=64)
def _to_first(world_size: int) -> RowMoves:
    """The first rank wants what every rank has, one row each."""
    wanted = [[Run(0, world_size)], *[[]] * (world_size - 1)]
    return RowMoves("sum of sink gradients", contiguous(world_size, world_size), wanted)

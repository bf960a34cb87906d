"""Attention with a list of keys for each query: in plain torch on any device, or in Triton.

    s_j = scale q . k_j for the keys j of the query's list;   p = exp(s - lse)
    out = sum p_j v_j;   ds_j = p_j (dout . v_j - delta);   dq = scale sum ds_j k_j
    dk_j += scale ds_j q;   dv_j += p_j dout          in the order of queries

In plain torch a block of queries takes its keys and values out of the tables, computes, and forgets
them: work and memory grow with the length of the lists, not with the number of keys. Backward
computes them again. `kernels/triton/lists.py` reads the tables where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.arguments import dtype_name
from tilewise.kernels.protocol import Kernel, accumulator_dtype
from tilewise.kernels.registry import kernel_named
from tilewise.kernels.self_check import TOLERANCES
from tilewise.kernels.triton.tuning import MOST_LIST_WIDTHS
from tilewise.tokens.named_rows import add_rows

MOST_NUMBERS = 1 << 24
"""Numbers of keys and values that a block of queries takes out of the tables."""


class ListKernel(NamedTuple):
    """The two passes of attention with lists.

    Attributes:
        forward: (q, k, v, places, scale) to (out, lse); see `attend_to_lists`.
        backward: (q, k, v, places, scale, out, lse, dout, dlse) to (dq, dk, dv). The rows of dk and
            dv are sums in the order of queries.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def attend_to_lists(
    q: Tensor, k: Tensor, v: Tensor, places: Tensor, scale: float, kernel: ListKernel
) -> tuple[Tensor, Tensor]:
    """out [queries, heads, v_head_dim] and lse [queries, heads]; differentiable in q, k and v.

    Args:
        q: [queries, heads, head_dim].
        k, v: tables of keys and values, [rows, kv heads, width].
        places: rows of the tables that each query attends to, [queries, k]; -1 for none. Queries
            with no key have out 0 and lse -inf.
    """
    return _ListAttention.apply(q, k, v, places, float(scale), kernel)  # pyright: ignore


def list_kernel(
    kernel: Kernel | str | None,
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    v_head_dim: int,
) -> ListKernel:
    """The kernel that is asked for by name; None: Triton on CUDA where it serves, else plain torch.

    Raises:
        ValueError: if it takes no lists, or cannot serve; naming what can.
    """
    if kernel == "reference":
        return REFERENCE
    if kernel is not None and kernel != "triton":
        name = kernel if isinstance(kernel, str) else type(kernel).__name__
        raise ValueError(
            f"kernel ({name}) takes no list of keys for each query; leave kernel out with "
            "mask=tw.Chosen(...), or name 'reference' or 'triton', which do"
        )
    reason = kernel_named("triton").supports(device_type, dtype, 1)
    most = MOST_LIST_WIDTHS.get(dtype, (0, 0))
    if reason is None and (head_dim > most[0] or v_head_dim > most[1]):
        reason = f"head_dim {head_dim} and v_head_dim {v_head_dim} are over {most[0]} and {most[1]}"
    if reason is None and (kernel == "triton" or device_type == "cuda"):
        from tilewise.kernels.triton import lists  # imports triton

        return ListKernel(lists.attend, lists.differentiate)
    if kernel == "triton":
        raise ValueError(
            f"kernel 'triton' cannot serve mask=tw.Chosen(...): {reason}; 'reference' can"
        )
    return REFERENCE


def proven(kernel: ListKernel, q: Tensor, num_kv_heads: int, v_head_dim: int) -> ListKernel:
    """A kernel that agrees with plain torch on a small problem on q's device, of q's dtype, heads
    and widths. It is tried once a process for each kind; plain torch itself is not.

    Args:
        q: [..., heads, head_dim].
    Raises:
        ValueError: naming the result that differs, and by how much.
    """
    if kernel != REFERENCE:
        _try(kernel, q.device, q.dtype, (*q.shape[-2:], num_kv_heads, v_head_dim))
    return kernel


@lru_cache(maxsize=64)
def _try(
    kernel: ListKernel, device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    heads, head_dim, kv_heads, v_head_dim = sizes
    make, num_rows, length = torch.Generator().manual_seed(0), 90, 70

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make).to(device, dtype)

    q, dout = normal(3, heads, head_dim), normal(3, heads, v_head_dim)
    k, v = normal(num_rows, kv_heads, head_dim), normal(num_rows, kv_heads, v_head_dim)
    dlse = torch.randn(3, heads, generator=make).to(device)
    places = torch.stack([torch.randperm(num_rows, generator=make)[:length] for _ in range(3)])
    places[1, ::3], places[2] = -1, -1
    places, scale = places.sort(-1).values.to(device), head_dim**-0.5

    def run(passes: ListKernel, *tensors: Tensor) -> tuple[Tensor, ...]:
        *operands, grad, grad_lse = tensors
        result = passes.forward(*operands, places, scale)
        return *result, *passes.backward(*operands, places, scale, *result, grad, grad_lse)

    with torch.no_grad():
        found = run(kernel, q, k, v, dout, dlse)
        wanted = run(REFERENCE, *(x.double() for x in (q, k, v, dout, dlse)))
    most = TOLERANCES(dtype_name(dtype))
    for name, x, want in zip(("out", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
        difference = torch.where(x == want, 0.0, (x - want).abs()).max()  # -inf is equal
        error = float(difference / want[want.isfinite()].abs().max())
        if not error <= most:
            raise ValueError(
                f"the kernel for lists of keys gives another {name} than plain torch on {device} "
                f"({dtype_name(dtype)}, {heads}:{kv_heads} heads of {head_dim} and {v_head_dim}): "
                f"they differ by {error:.1e} of the largest value, and {most:.0e} is allowed; name "
                "kernel='reference'"
            )


class _ListAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        places: Tensor,
        scale: float,
        kernel: ListKernel,
    ) -> tuple[Tensor, Tensor]:
        out, lse = kernel.forward(q, k, v, places, scale)
        ctx.save_for_backward(q, k, v, places, out, lse)
        ctx.scale, ctx.kernel = scale, kernel
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dout: Tensor, dlse: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, places, out, lse = ctx.saved_tensors
        grads = ctx.kernel.backward(q, k, v, places, ctx.scale, out, lse, dout, dlse)
        return *grads, None, None, None


class _Block(NamedTuple):
    """Queries of a block, and the keys of their lists.

    Attributes:
        rows: of the queries.
        q: [rows, kv heads, queries a kv head, head_dim], scaled.
        k, v: [rows, k, kv heads, width].
        p: weights as exp(s - lse), [rows, kv heads, queries a kv head, k].
        lse: [rows, kv heads, queries a kv head].
        places: rows of the tables, [rows, k]; -1 for none.
    """

    rows: slice
    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor
    lse: Tensor
    places: Tensor


def _blocks(q: Tensor, k: Tensor, v: Tensor, places: Tensor, scale: float) -> Iterator[_Block]:
    dtype = accumulator_dtype(q.dtype)
    if not len(k):  # a row that no list names
        k, v = (x.new_zeros((1, *x.shape[1:])) for x in (k, v))
    row_numbers = max(1, places.shape[1] * (k[0].numel() + v[0].numel()))
    size = max(1, MOST_NUMBERS // row_numbers)
    for start in range(0, len(q), size):
        rows = slice(start, start + size)
        own = places[rows]
        named = own.clamp(min=0).flatten()
        keys, values = (x.index_select(0, named).unflatten(0, own.shape).to(dtype) for x in (k, v))
        queries = q[rows].to(dtype).unflatten(1, (k.shape[1], -1)) * scale
        scores = torch.einsum("rhgd,rkhd->rhgk", queries, keys)
        scores = scores.masked_fill_((own < 0)[:, None, None], -torch.inf)
        lse = (
            scores.logsumexp(-1) if own.shape[1] else scores.new_full(scores.shape[:3], -torch.inf)
        )
        p = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp_()
        yield _Block(rows, queries, keys, values, p, lse, own)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, places: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    lse = q.new_empty(q.shape[:2], dtype=accumulator_dtype(q.dtype))
    for block in _blocks(q, k, v, places, scale):
        values = torch.einsum("rhgk,rkhd->rhgd", block.p, block.v)
        out[block.rows] = values.flatten(1, 2).to(out.dtype)
        lse[block.rows] = block.lse.flatten(1)
    return out, lse


def _backward(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    places: Tensor,
    scale: float,
    out: Tensor,
    _: Tensor,
    dout: Tensor,
    dlse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = accumulator_dtype(q.dtype)
    dq = torch.empty_like(q)
    # one more row, for the places of no key
    dk, dv = (x.new_zeros((len(x) + 1, *x.shape[1:]), dtype=dtype) for x in (k, v))
    for block in _blocks(q, k, v, places, scale):
        heads = block.p.shape[1:3]
        grad, mine = (x[block.rows].to(dtype).unflatten(1, heads) for x in (dout, out))
        delta = (grad * mine).sum(-1) - dlse[block.rows].to(dtype).unflatten(1, heads)
        ds = torch.einsum("rhgd,rkhd->rhgk", grad, block.v).sub_(delta[..., None])
        ds = torch.where(block.p == 0, 0.0, ds * block.p)
        found = torch.einsum("rhgk,rkhd->rhgd", ds, block.k).mul_(scale)
        dq[block.rows] = found.flatten(1, 2).to(q.dtype)
        for total, weights, rows in ((dk, ds, block.q), (dv, block.p, grad)):
            terms = torch.einsum("rhgk,rhgd->rkhd", weights, rows)
            add_rows(total, block.places.flatten() % len(total), terms.flatten(0, 1))
    return dq, dk[:-1].to(k.dtype), dv[:-1].to(v.dtype)


REFERENCE = ListKernel(_forward, _backward)

"""The functions of flash_attn, computed by our CPU kernel: code that calls them runs without a GPU.

Trainers and libraries call flash_attn's functions, which exist on CUDA only. These functions keep
flash_attn's meaning (layouts, bottom-right causal, windows, the buffers written to, lse +inf where
no key is seen), so that whatever a caller computes wrong is its own doing.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.kernels.protocol import accumulator_dtype
from tilewise.kernels.torch_cpu import CpuFlash
from tilewise.masks.base import Window
from tilewise.plan.row_ranges import row_index
from tilewise.tiles.calls import KernelCall
from tilewise.tiles.cover import tile_calls

VERSION = "2.8.3"  # whose calling convention is kept
KERNEL = CpuFlash()
SETTINGS = (
    "dropout_p",
    "softmax_scale",
    "causal",
    "window_size_left",
    "window_size_right",
    "softcap",
    "alibi_slopes",
)
PUBLIC = ("dropout_p", "softmax_scale", "causal", "window_size")
FORWARD = ("q", "k", "v", *SETTINGS, "return_softmax")
BACKWARD = ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", *SETTINGS)

Rows = slice | Tensor


class Piece(NamedTuple):
    """A kernel call and the rows of q and of k that it takes."""

    call: KernelCall
    q: Rows
    k: Rows


def provide() -> None:
    """Make `import flash_attn` find these functions, unless the real package is installed.

    The processes that parity starts are given them too. In a trainer's conftest.py:

        from tilewise_verify import flash_attn_shim

        flash_attn_shim.provide()
    """
    if "flash_attn" in sys.modules or importlib.util.find_spec("flash_attn") is not None:
        return
    package = types.ModuleType("flash_attn")
    interface = types.ModuleType("flash_attn.flash_attn_interface")
    vars(interface).update(
        _flash_attn_forward=forward,
        _flash_attn_backward=backward,
        _flash_attn_varlen_forward=varlen_forward,
        _flash_attn_varlen_backward=varlen_backward,
    )
    public = {
        "flash_attn_func": flash_attn_func,
        "flash_attn_varlen_func": flash_attn_varlen_func,
    }
    vars(interface).update(public)
    vars(package).update(public, __version__=VERSION, flash_attn_interface=interface)
    for module in (package, interface):
        # whoever asks whether flash_attn is there looks at its spec
        module.__spec__ = importlib.util.spec_from_loader(module.__name__, loader=None)
        sys.modules[module.__name__] = module


def is_provided() -> bool:
    """Return whether `import flash_attn` finds these functions in this process."""
    return getattr(sys.modules.get("flash_attn"), "flash_attn_func", None) is flash_attn_func


def forward(*args: Any, **named: Any) -> tuple[Tensor, Tensor, None, None]:
    """flash_attn's _flash_attn_forward: q, k, v [batch, tokens, heads, head_dim].

    Returns:
        (out as q, lse [batch, heads, tokens], None, None).
    """
    arguments = _arguments(FORWARD, args, named)
    q, k, v = (arguments[name].transpose(0, 1) for name in ("q", "k", "v"))
    out, lse = _attend(q, k, v, arguments)
    return out.transpose(0, 1).to(q.dtype), lse.permute(1, 2, 0), None, None


def backward(*args: Any, **named: Any) -> Tensor:
    """flash_attn's _flash_attn_backward, which writes to dq, dk, dv."""
    arguments = _arguments(BACKWARD, args, named)
    operands = [arguments[name].transpose(0, 1) for name in ("q", "k", "v", "dout", "out")]
    grads = _differentiate(operands, arguments["softmax_lse"].permute(2, 0, 1), arguments)
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        arguments[name].copy_(grad.transpose(0, 1))
    return arguments["softmax_lse"]


def varlen_forward(**arguments: Any) -> tuple[Tensor, Tensor, None, None]:
    """flash_attn's _flash_attn_varlen_forward: q, k, v [tokens, heads, head_dim].

    Returns:
        (out as q, lse [heads, tokens], None, None).
    """
    q, k, v = (arguments[name].unsqueeze(1) for name in ("q", "k", "v"))
    parts = [_attend(q[rows], k[keys], v[keys], arguments) for rows, keys in _documents(arguments)]
    out, lse = (torch.cat(x) for x in zip(*parts, strict=True))
    return out.squeeze(1).to(q.dtype), lse.squeeze(1).transpose(0, 1), None, None


def varlen_backward(**arguments: Any) -> None:
    """flash_attn's _flash_attn_varlen_backward, which writes to dq, dk, dv."""
    q, k, v, dout, out = (arguments[name].unsqueeze(1) for name in ("q", "k", "v", "dout", "out"))
    lse = arguments["softmax_lse"].transpose(0, 1).unsqueeze(1)
    for rows, keys in _documents(arguments):
        operands = [q[rows], k[keys], v[keys], dout[rows], out[rows]]
        dq, dk, dv = _differentiate(operands, lse[rows], arguments)
        for name, where, grad in (("dq", rows, dq), ("dk", keys, dk), ("dv", keys, dv)):
            arguments[name][where].copy_(grad.squeeze(1))


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *args: Any, **named: Any) -> Any:
    """flash_attn's function of that name, differentiable; with return_attn_probs also lse, None."""
    return _differentiable((q, k, v), _arguments(PUBLIC, args, named))


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, *args: Any, **named: Any) -> Any:
    """The same for packed sequences: q, k, v [tokens, heads, head_dim]."""
    lengths = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return _differentiable((q, k, v), _arguments((*lengths, *PUBLIC), args, named))


def _differentiable(operands: tuple[Tensor, Tensor, Tensor], arguments: dict[str, Any]) -> Any:
    left, right = arguments.pop("window_size", (-1, -1))
    arguments |= {"window_size_left": left, "window_size_right": right}
    returns_lse = arguments.pop("return_attn_probs", False)
    out, lse = _FlashAttn.apply(*operands, arguments)  # pyright: ignore[reportGeneralTypeIssues]
    return (out, lse, None) if returns_lse else out


class _FlashAttn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, settings: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        compute = varlen_forward if "cu_seqlens_q" in settings else forward
        out, lse, *_ = compute(q=q, k=k, v=v, **settings)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.settings = settings
        return out, lse

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dout: Tensor, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        differentiate = varlen_backward if "cu_seqlens_q" in ctx.settings else backward
        values = zip(BACKWARD, (dout, q, k, v, out, lse, *grads), strict=False)
        differentiate(**dict(values), **ctx.settings)
        return *grads, None


def _arguments(
    names: tuple[str, ...], args: tuple[Any, ...], named: dict[str, Any]
) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **named}


def _documents(arguments: dict[str, Any]) -> Iterator[tuple[slice, slice]]:
    edges = (pairwise(arguments[name].tolist()) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    for q_edges, k_edges in zip(*edges, strict=True):
        yield slice(*q_edges), slice(*k_edges)


def _attend(q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """out and lse of rows-first operands, in the accumulators' dtype."""
    pieces, scale = _pieces(len(q), len(k), *_window(arguments)), _scale(q, arguments)
    if len(pieces) == 1 and pieces[0].q == slice(None):
        (piece,) = pieces
        return _finite(*KERNEL.forward(q, k[piece.k], v[piece.k], piece.call, scale))
    dtype = accumulator_dtype(q.dtype)
    out, lse = torch.zeros_like(q, dtype=dtype), q.new_full(q.shape[:-1], -torch.inf, dtype=dtype)
    for call, rows, keys in pieces:
        sums = out[rows], lse[rows]
        out[rows], lse[rows] = KERNEL.forward(q[rows], k[keys], v[keys], call, scale, sums)
    return _finite(out, lse)


def _finite(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return out, lse.masked_fill(lse == -torch.inf, torch.inf)


def _differentiate(
    operands: list[Tensor], lse: Tensor, arguments: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from rows-first q, k, v, dout, out."""
    q, k, v, dout, out = operands
    dtype = accumulator_dtype(q.dtype)
    lse = lse.to(dtype).masked_fill(lse == torch.inf, -torch.inf)
    delta = (out.to(dtype) * dout.to(dtype)).sum(-1)
    pieces, scale = _pieces(len(q), len(k), *_window(arguments)), _scale(q, arguments)
    if len(pieces) == 1 and pieces[0].q == pieces[0].k == slice(None):
        return KERNEL.backward(q, k, v, dout, lse, delta, pieces[0].call, scale)
    grads = tuple(torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
    for call, rows, keys in pieces:
        parts = KERNEL.backward(
            q[rows], k[keys], v[keys], dout[rows], lse[rows], delta[rows], call, scale
        )
        for total, where, part in zip(grads, (rows, keys, keys), parts, strict=True):
            total[where] += part
    return grads[0], grads[1], grads[2]


def _window(arguments: dict[str, Any]) -> tuple[int, int]:
    """Return how far a query sees to the left and to the right; -1: without bound."""
    if (
        arguments.get("dropout_p")
        or arguments.get("softcap")
        or arguments.get("alibi_slopes") is not None
    ):
        raise NotImplementedError("the shim computes no dropout, softcap or alibi_slopes")
    right = arguments.get("window_size_right", -1)
    return arguments.get("window_size_left", -1), 0 if arguments.get("causal") else right


def _scale(q: Tensor, arguments: dict[str, Any]) -> float:
    scale = arguments.get("softmax_scale")
    return q.shape[-1] ** -0.5 if scale is None else scale


@lru_cache(maxsize=256)
def _pieces(num_q: int, num_k: int, left: int, right: int) -> tuple[Piece, ...]:
    """The kernel calls of one rectangle, whose last query stands at the last key."""
    mask = Window(None if left < 0 else left, None if right < 0 else right)
    # positions start at 0: a query before the first key sees none of them to its left
    shift = max(num_q - num_k, 0)
    q, k = np.arange(num_q) + num_k - num_q + shift, np.arange(num_k) + shift
    calls = tile_calls(q, k, mask, square_causal=KERNEL.square_causal)
    return tuple(Piece(call, _rows(call.q, num_q), _rows(call.k, num_k)) for call in calls)


def _rows(ranges: tuple[tuple[int, int], ...], count: int) -> Rows:
    if ranges == ((0, count),):
        return slice(None)
    return slice(*ranges[0]) if len(ranges) == 1 else torch.from_numpy(row_index(ranges))

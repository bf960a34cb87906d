"""Every provider on one rank: dense and masks, 8K to 128K tokens, MHA and GQA, both passes.

Providers run through the executor, as attention runs them. On dense masks the same kernel is also
called without it, and so is its library, in turns and in the layouts that it likes; on documents
and windows flex_attention is, with a mask function as its users write one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise as tw
from benchmarks.gpu_parts.case import Row
from benchmarks.gpu_parts.cases import FLEX
from benchmarks.gpu_parts.correctness import num_heads
from benchmarks.gpu_parts.session import Run, Session, Times
from benchmarks.gpu_parts.sizes import documents, mask_named, window_of
from tilewise.execution.call import Call
from tilewise.execution.forward_backward import backward_pass, forward_pass
from tilewise.execution.resolve import resolve_once
from tilewise.kernels.protocol import Kernel
from tilewise.kernels.registry import kernel_named
from tilewise.tiles.calls import KernelCall as KernelCall
from tilewise.tiles.calls import Kind
from tilewise.tiles.cover import tile_calls
from tilewise.transport.resolve import LocalTransport

BACKENDS = {"cuda": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


class Passes(NamedTuple):
    """A contender's forward and backward."""

    forward: Run
    backward: Run


class Inputs(NamedTuple):
    """q and dout [tokens, heads, head_dim], k and v of KV heads; name of the mask, and itself."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    name: str
    mask: tw.masks.Mask


def run(session: Session, options: Row) -> Row:
    """Seconds and TFLOP/s of both passes, and their peak memory, inputs included."""
    before = session.allocated()
    given = _inputs(session, options)
    passes = {"it": _contender(options["contender"], given)}
    row: Row = {}
    for what in Passes._fields:  # before others allocate
        getattr(passes["it"], what)()  # the first records buffers, and may compile
        peak = session.peak_bytes(getattr(passes["it"], what))
        row[f"{what}_peak_bytes"] = max(peak - before, 0)
    for other in options["beside"]:
        try:
            passes[other] = _beside(other, options["contender"], given)
        except RuntimeError as error:  # the provider's own figures are worth having
            row[f"{other}_missing"] = str(error).partition("\n")[0][:200]
    area = given.mask.area((0, len(given.q)), (0, len(given.q)))
    flops = 4 * area * given.q.shape[1] * given.q.shape[2]
    for what, work in (("forward", flops), ("backward", 2.5 * flops)):
        times = session.compare({name: getattr(x, what) for name, x in passes.items()})
        row |= _figures(what, work, times)
    return row


def _figures(what: str, flops: float, times: dict[str, Times]) -> Row:
    it = times["it"]
    row = it.row(what) | {f"{what}_tflops": it.tflops(flops)}
    for name in times.keys() - {"it"}:
        row |= times[name].row(f"{what}_{name}")
    direct = [times[name] for name in times if name.startswith("direct")]
    if direct:
        best = min(direct, key=lambda x: x.median)
        row |= {f"{what}_direct_tflops": best.tflops(flops)} | it.share(what, best)
        row |= times["kernel"].share(f"{what}_kernel", best) if "kernel" in times else {}
    return row


def ahead(session: Session, options: Row) -> Row:
    """Compile one variant of a provider's kernel, on few rows of the measured strides."""
    kernel, (heads, kv_heads) = kernel_named(options["kernel"]), num_heads(options)
    rows, width = 512, options["head_dim"]
    q, dout = session.normal(2, rows, 1, heads, width)
    k, v = session.normal(2, rows, 1, kv_heads, width)
    call = KernelCall(((0, rows),), ((0, rows),), Kind.CAUSAL)
    lse = torch.zeros(q.shape[:-1], device=q.device)
    if options["which"] == "forward":
        totals = torch.zeros(q.shape, device=q.device), lse
        kernel.forward(q, k, v, call, width**-0.5, totals if options["into"] else None)
    else:
        dq, dk, dv = (torch.zeros(x.shape, device=q.device) for x in (q, k, v))
        into = (dq, dk, dv) if options["into"] else None
        kernel.backward(q, k, v, dout, lse, lse * 0, call, width**-0.5, into)
    session.settle()
    return {}


def ahead_flex(session: Session, options: Row) -> Row:
    """Both passes once: compiled code is found by shapes, so these are the measured ones."""
    found = _contender(options["contender"], _inputs(session, options))
    found.forward()
    found.backward()
    session.settle()
    return {}


def _inputs(session: Session, options: Row) -> Inputs:
    num_tokens, (heads, kv_heads) = options["num_tokens"], num_heads(options)
    q, dout = session.normal(2, num_tokens, heads, options["head_dim"])
    k, v = session.normal(2, num_tokens, kv_heads, options["head_dim"])
    return Inputs(q, k, v, dout, options["mask"], mask_named(options["mask"], num_tokens))


def _contender(name: str, given: Inputs) -> Passes:
    if name in (FLEX, "flex"):
        from torch._inductor import config

        config.compile_threads = 1  # no processes of its own, which would outlive this one
    return _flex(given) if name == FLEX else _executed(kernel_named(name), given)


def _beside(what: str, name: str, given: Inputs) -> Passes:
    """A provider's kernel without the executor, or its library in one of two layouts."""
    if what == "kernel":
        return _called(kernel_named(name), given)
    return _direct(name, given, packed=what == "direct_packed")


def _executed(kernel: Kernel, given: Inputs) -> Passes:
    """A world of one rank."""
    q, k, v, dout, _, mask = given
    transport = LocalTransport()
    call = Call(plan=tw.ring(1), layout=tw.contiguous(len(q), 1), mask=mask)
    problem = resolve_once(q, k, v, call, 0, 1)._replace(kernel=kernel)
    forward = partial(forward_pass, problem, transport, q, k, v, keep=True)
    out, lse, kept = forward()
    saved = q, k, v, out, lse
    return Passes(forward, partial(backward_pass, problem, transport, saved, kept, (dout, None)))


def _called(kernel: Kernel, given: Inputs) -> Passes:
    """The kernel on its one call."""
    q, k, v, dout = (x[:, None] for x in given[:4])
    rows, scale = np.arange(len(q)), q.shape[-1] ** -0.5
    cut = {"square_causal": kernel.square_causal, "whole_tile": kernel.whole_tile}
    (call,) = tile_calls(rows, rows, given.mask, **cut)
    out, lse = kernel.forward(q, k, v, call, scale)
    delta = (out.float() * dout.float()).sum(-1)
    return Passes(
        lambda: kernel.forward(q, k, v, call, scale),
        lambda: kernel.backward(q, k, v, dout, lse, delta, call, scale),
    )


def _direct(name: str, given: Inputs, packed: bool) -> Passes:
    """torch's own attention, told which library to call; packed: heads first in memory too."""
    inputs = [x.transpose(0, 1)[None] for x in given[:4]]
    q, k, v, dout = (x.contiguous() for x in inputs) if packed else inputs
    operands = [x.detach().requires_grad_() for x in (q, k, v)]
    causal, grouped = isinstance(given.mask, tw.Causal), q.shape[1] != k.shape[1]

    def attend() -> Tensor:
        with sdpa_kernel(BACKENDS[name]):
            q, k, v = operands
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return _differentiated(attend, operands, dout)


def _flex(given: Inputs) -> Passes:
    """flex_attention, compiled, with a block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    inputs = [x.transpose(0, 1)[None] for x in given[:4]]
    operands = [x.detach().requires_grad_() for x in inputs[:3]]
    num_tokens = len(given.q)
    rule = _rule(given.name, num_tokens, given.q.device)
    # not compiled: a byte for each pair of tokens, several times over, but only for a moment
    device = str(given.q.device)
    mask = create_block_mask(rule, None, None, num_tokens, num_tokens, device=device)
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    grouped = operands[0].shape[1] != operands[1].shape[1]

    def attend() -> Tensor:
        q, k, v = operands
        out = compiled(q, k, v, block_mask=mask, enable_gqa=grouped)
        assert isinstance(out, Tensor)
        return out

    return _differentiated(attend, operands, inputs[3])


def _rule(name: str, num_tokens: int, device: torch.device) -> Callable[..., Tensor]:
    """Whether a query may see a key, as users of flex_attention write it."""
    if name == "sliding_window_causal":
        window = window_of(num_tokens)

        def near(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (q - k <= window)

        return near
    assert name == "causal_document", name
    edges = np.asarray(documents(num_tokens))
    numbers = torch.from_numpy(np.repeat(np.arange(len(edges) - 1), np.diff(edges))).to(device)

    def same(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (numbers[q] == numbers[k])

    return same


def _differentiated(attend: Callable[[], Tensor], operands: list[Tensor], dout: Tensor) -> Passes:
    out = attend()
    return Passes(attend, lambda: torch.autograd.grad(out, operands, dout, retain_graph=True))

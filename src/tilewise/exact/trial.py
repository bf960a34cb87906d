"""A trial of the Triton kernel on this machine, before a process relies on its bits.

That a row has the same bits beside any others follows from how the kernel is written, if the
compiler and the device treat all rows of a block alike. Few machines have shown that so far.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from tilewise.arguments import dtype_name
from tilewise.exact.kernel import CpuKernel, WholeRowsKernel
from tilewise.exact.triton_kernel import TritonKernel
from tilewise.kernels.protocol import Operands, Places, Scores
from tilewise.kernels.self_check import TOLERANCES
from tilewise.masks.base import Causal, Document

ROWS, SOME = 150, 70
MASK = Document([0, 50, ROWS]) & Causal()
HEADS, KV_HEADS = 4, 2
NAMES = "out", "lse", "dq", "dk", "dv"


@lru_cache(maxsize=64)
def prove(device: torch.device, dtype: torch.dtype, widths: tuple[int, int]) -> None:
    """Compute some rows by themselves and beside all others, once a process for each kind.

    Raises:
        ValueError: naming the result whose bits differ, or that is not the one of fp64.
    """
    make = torch.Generator().manual_seed(0)
    width, v_width = widths
    sizes = (HEADS, width), (KV_HEADS, width), (KV_HEADS, v_width), (HEADS, v_width)
    q, k, v, dout = (torch.randn(ROWS, 1, *x, generator=make).to(device, dtype) for x in sizes)
    delta = torch.randn(ROWS, 1, HEADS, generator=make).to(device)
    operands = Operands(q, k, v, dout, delta, delta)
    every = torch.arange(ROWS, device=device)
    some = torch.randperm(ROWS, generator=make)[:SOME].to(device)
    with torch.no_grad():
        triton = TritonKernel(MASK, (ROWS, ROWS))
        whole, part = _rows(triton, operands, every), _rows(triton, _spread(operands), some)
        oracle = CpuKernel(MASK, (ROWS, ROWS))
        wanted = _rows(oracle, Operands(*(x.double().cpu() for x in operands)), every.cpu())
    most = TOLERANCES(dtype_name(dtype))
    for name, x, few, want in zip(NAMES, whole, part, wanted, strict=True):
        error = float((x.cpu() - want).abs().max() / want.abs().max())
        wrong = "" if error <= most else f"is off by {error:.1e}, where {most:.0e} is allowed"
        if not torch.equal(x[some], few):
            wrong = "of a row has other bits beside other rows"
        if wrong:
            raise ValueError(
                f"kernel 'triton' cannot serve reduction='canonical' on this {device.type} device: "
                f"in a trial with {dtype_name(dtype)} and widths {width} and {v_width}, {name} "
                f"{wrong}; use reduction='fast', and please report it"
            )


def _spread(operands: Operands) -> Operands:
    """The same numbers with other strides."""
    return Operands(*(torch.stack([x, x], 1)[:, 0] for x in operands))


def _rows(kernel: WholeRowsKernel, operands: Operands, own: Tensor) -> list[Tensor]:
    """Results of some rows, as queries and as keys, that see all others; lse is computed here."""
    q, k, v, dout, _, delta = operands
    every = torch.arange(ROWS, device=own.device)

    def scores(queries: Tensor, keys: Tensor) -> Scores:
        return Scores(q.shape[-1] ** -0.5, places=Places(queries, keys, 0))

    lse = kernel.attend(q, k, v, scores(every, every))[1]
    mine = Operands(q[own], k, v, dout[own], lse[own], delta[own])
    theirs = Operands(q, k[own], v[own], dout, lse, delta)
    out = kernel.attend(q[own], k, v, scores(own, every))
    dq = kernel.query_gradients(mine, scores(own, every))
    return [*out, dq, *kernel.key_gradients(theirs, scores(every, own))]

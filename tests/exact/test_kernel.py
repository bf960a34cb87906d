"""A row's bits depend on the row and on what it sees: not on its place, its neighbours or heads."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.exact.kernel import CpuKernel
from tilewise.kernels.bias import Bias
from tilewise.kernels.protocol import Places, Scores
from tilewise.tiles.calls import KernelCall, Kind

SHAPES = ((300, 4, 2, 24, 16), (1100, 2, 1, 64, 64), (130, 3, 3, 5, 40))  # rows, heads, widths
BIAS = tw.alibi([0.5, 0.2, 0.1, 0.0])
SCORES = ({}, {"softcap": 2.0, "dropout_p": 0.2, "dropout_seed": 3}, {"bias": BIAS})


class Whole:
    """All rows of an attention, of which a call takes some."""

    def __init__(self, shape: tuple[int, int, int, int, int], dtype: torch.dtype, mask: tw.Mask):
        self.rows, heads, kv_heads, width, v_width = shape
        make = torch.Generator().manual_seed(1)
        sizes = (heads, width), (kv_heads, width), (kv_heads, v_width), (heads, v_width), (heads,)
        *tensors, delta = (torch.randn(self.rows, 1, *x, generator=make) for x in sizes)
        self.q, self.k, self.v, self.dout = (x.to(dtype) for x in tensors)
        self.delta = delta.to(torch.float64 if dtype == torch.float64 else torch.float32)
        self.kernel = CpuKernel(mask, (self.rows, self.rows))
        self.lse = torch.zeros(0)

    def forward(
        self, q: list[int], k: list[int], head: int | None = None, **scores: Bias | float
    ) -> tuple[Tensor, ...]:
        heads = slice(None) if head is None else slice(head, head + 1)
        given = self.q[q][:, :, heads], self.k[k][:, :, heads], self.v[k][:, :, heads]
        return self.kernel.forward(*given, *self._rest(q, k, head or 0, scores))

    def backward(
        self, q: list[int], k: list[int], of_keys: bool, **scores: Bias | float
    ) -> tuple[Tensor, ...]:
        run = self.kernel.backward_kv if of_keys else self.kernel.backward_q
        rows = self.dout[q], self.lse[q], self.delta[q]
        return run(self.q[q], self.k[k], self.v[k], *rows, *self._rest(q, k, 0, scores))

    def _rest(
        self, q: list[int], k: list[int], head: int, scores: dict[str, Bias | float]
    ) -> tuple[KernelCall, float, None, Scores]:
        call = KernelCall(((0, len(q)),), ((0, len(k)),), Kind.FULL)
        places = Places(torch.tensor(q), torch.tensor(k), head)
        return call, 0.125, None, Scores(0.125, places=places, **scores)  # type: ignore[arg-type]


@pytest.mark.parametrize("scores", SCORES, ids=lambda scores: "-".join(scores) or "plain")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_rows_bits_are_its_own(dtype: torch.dtype, scores: dict[str, Bias | float]):
    """Own rows are drawn and shuffled; so are those of the other side that they need not see."""
    draw = random.Random(0)
    for shape in SHAPES:
        mask = draw.choice(
            [tw.Causal(), tw.Causal() & tw.Window(60, 0), tw.Document([0, 70, 120, shape[0]])]
        )
        whole, every = Whole(shape, dtype, mask), [*range(shape[0])]
        out, whole.lse = whole.forward(every, every, **scores)
        dq, dk, dv = (x for y in (False, True) for x in whole.backward(every, every, y, **scores))
        for _ in range(3):
            own = draw.sample(every, draw.randrange(1, shape[0]))
            seen = mask.dense(own, every).any(0)
            keys = [j for j in every if seen[j] or draw.random() < 0.3]
            draw.shuffle(keys)
            found = whole.forward(own, keys, **scores)
            assert torch.equal(found[0], out[own]) and torch.equal(found[1], whole.lse[own])
            assert torch.equal(whole.backward(own, keys, False, **scores)[0], dq[own])
            seen = mask.dense(every, own).any(1)
            queries = [i for i in every if seen[i] or draw.random() < 0.3]
            draw.shuffle(queries)
            found = whole.backward(queries, own, True, **scores)
            assert torch.equal(found[0], dk[own]) and torch.equal(found[1], dv[own])
            if shape[1] == shape[2]:
                head = draw.randrange(shape[1])
                alone = whole.forward(own, keys, head, **scores)
                assert torch.equal(alone[0][:, :, 0], out[own][:, :, head])


PRODUCTS = """
import torch
torch.set_num_threads(1)
for dtype in (torch.float32, torch.float64):
    for rows, width, walked in ((64, 16, 64), (64, 80, 64), (128, 128, 128), (256, 64, 512)):
        a, b = torch.randn(rows, width, dtype=dtype), torch.randn(walked, width, dtype=dtype)
        p, order = torch.rand(rows, walked, dtype=dtype), torch.randperm(rows)
        sums = torch.randn(rows, width, dtype=dtype)
        assert torch.equal((a @ b.T)[order], a[order] @ b.T)
        assert torch.equal(torch.addmm(sums, p, b)[order], torch.addmm(sums[order], p[order], b))
        for f in (torch.exp, torch.tanh, lambda x: x.sum(-1), lambda x: x.amax(-1)):
            assert torch.equal(f(p)[order], f(p[order]))
        assert torch.equal(p[:, :1].log()[order], p[order][:, :1].log())
"""


@pytest.mark.parametrize(
    "setting", ["ATEN_CPU_CAPABILITY=default", "ATEN_CPU_CAPABILITY=avx2", "MKL_CBWR=COMPATIBLE"]
)
def test_a_product_of_fixed_shape_gives_a_row_the_same_bits_at_any_place(setting: str):
    """The premise of the kernel, with other instructions than the processor's best ones, too."""
    environment = {**os.environ, **dict([setting.split("=")])}
    subprocess.run([sys.executable, "-c", PRODUCTS], env=environment, check=True)


def test_gradients_and_results_are_those_of_dense_attention():
    shape = (200, 4, 2, 24, 40)
    mask = tw.PerHead([tw.Causal() & tw.Document([0, 50, 200]), tw.Full()])
    whole, every = Whole(shape, torch.float64, mask), [*range(200)]
    out, whole.lse = whole.forward(every, every)
    whole.delta = (out * whole.dout).sum(-1)
    q, k, v = (x[:, 0].clone().requires_grad_() for x in (whole.q, whole.k, whole.v))
    table = torch.einsum("mhd,nhd->hmn", q, k.repeat_interleave(2, 1)) * 0.125
    allowed = torch.stack([torch.from_numpy(x.dense(every, every)) for x in mask.heads])
    table = table.masked_fill(~allowed.repeat_interleave(2, 0), -torch.inf)
    dense = torch.einsum("hmn,nhd->mhd", table.softmax(-1), v.repeat_interleave(2, 1))
    gradients = torch.autograd.grad(dense, (q, k, v), whole.dout[:, 0])
    found = [x for y in (False, True) for x in whole.backward(every, every, y)]
    assert (out[:, 0] - dense).abs().max() < 1e-13
    assert (whole.lse[:, 0] - table.logsumexp(-1).T).abs().max() < 1e-13
    for x, y in zip(found, gradients, strict=True):
        assert (x[:, 0] - y).abs().max() < 1e-13

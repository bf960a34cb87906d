"""Triton's attention with lists against dense attention, in its interpreter; for test_triton_lists.

    TRITON_INTERPRET=1 python tests/support/triton_lists.py quick | more

A process of its own, because Triton reads TRITON_INTERPRET when its kernels are defined. Prints one
JSON line: of each case the largest error of out, lse, dq, dk and dv, apart, over the largest value.
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from support.chosen_problems import Computed, beside, compare, problem
from support.drawn_layouts import drawn, drawn_mask, normal
from torch import Tensor

import tilewise as tw
from tilewise.indexed.lists import REFERENCE, ListKernel, attend_to_lists, list_kernel
from tilewise.kernels.triton import lists

SCALE = 0.4
TRITON = ListKernel(lists.attend, lists.differentiate)
BOUND = 1e-5  # of attention as a whole, in fp32


class Shape(NamedTuple):
    """Sizes of a case, and the share of places that name no row."""

    queries: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 24
    v_head_dim: int = 40
    rows: int = 90
    length: int = 70
    share: float = 0.3


class Case(NamedTuple):
    """Operands in fp64, rounded to the dtype that is tried."""

    q: Tensor
    k: Tensor
    v: Tensor
    places: Tensor
    dout: Tensor
    dlse: Tensor


QUICK = {
    "grouped, fp32": Shape(),
    "one key and value head, blocks of heads, fp32": Shape(2, 40, 1, 80, 16),
    "a head each, fp32": Shape(3, 3, 3, 6, 3, 9, 9),
    "latents, fp16": Shape(2, 16, 1, 576, 512, 40, 35),
}
MORE = {
    "144 columns, fp32": Shape(3, 6, 2, 144, 33),
    "192 and 128 columns, fp16": Shape(2, 4, 4, 192, 128),
    "256 columns, fp32": Shape(2, 2, 1, 256, 256, 50, 40),
    "latents of many heads, fp16": Shape(1, 128, 1, 576, 512, 40, 35),
    "one column, fp32": Shape(3, 2, 1, 1, 1),
    "one place, fp32": Shape(3, 4, 2, 16, 16, 5, 1),
    "all named, fp32": Shape(3, 4, 2, 16, 16, 64, 64, 0.0),
}


def draw(shape: Shape, dtype: torch.dtype, seed: int = 0) -> Case:
    """Lists in any order, with places of no row in between; the second query has no key at all."""
    n, heads, kv_heads, head_dim, v_head_dim, rows, length, share = shape
    make = torch.Generator().manual_seed(seed)
    order = torch.rand(n, rows, generator=make).argsort(-1)[:, :length]
    places = order.masked_fill(torch.rand(order.shape, generator=make) < share, -1)
    places[1:2] = -1
    sizes = (n, heads, head_dim), (rows, kv_heads, head_dim), (rows, kv_heads, v_head_dim)
    q, k, v = (normal(*size, seed=seed + i).to(dtype).double() for i, size in enumerate(sizes))
    dout = normal(n, heads, v_head_dim, seed=seed + 3).to(dtype).double()
    dlse = normal(n, heads, seed=seed + 4).masked_fill((places < 0).all(-1, keepdim=True), 0.0)
    return Case(q, k, v, places, dout, dlse.float().double())


def dense(case: Case) -> list[Tensor]:
    """out, lse, dq, dk, dv of the whole table of scores."""
    q, k, v = (x.clone().requires_grad_() for x in case[:3])
    group, rows = q.shape[1] // k.shape[1], len(k)
    named = torch.zeros(len(q), rows + 1, dtype=torch.bool)
    named = named.scatter(1, case.places % (rows + 1), True)[:, None, :rows]
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->qhk", q, keys) * SCALE
    scores = scores.masked_fill(~named, -torch.inf)
    reached = named.any(-1)
    p = torch.where(reached[..., None], scores.masked_fill(~reached[..., None], 0).softmax(-1), 0)
    lse = scores.masked_fill(~reached[..., None], 0).logsumexp(-1)
    lse = torch.where(reached, lse, -torch.inf)
    out = torch.einsum("qhk,khd->qhd", p, values)
    grads = torch.autograd.grad((out, lse), (q, k, v), (case.dout, case.dlse))
    return [out.detach(), lse.detach(), *grads]


def attended(case: Case, dtype: torch.dtype, kernel: ListKernel = TRITON) -> list[Tensor]:
    """The same by a kernel."""
    q, k, v = (x.to(dtype).requires_grad_() for x in case[:3])
    out, lse = attend_to_lists(q, k, v, case.places, SCALE, kernel)
    given = case.dout.to(dtype), case.dlse.to(lse.dtype)
    grads = torch.autograd.grad((out, lse), (q, k, v), given)
    assert [x.dtype for x in (out, *grads)] == [dtype] * 4 and lse.dtype == torch.float32
    return [out.detach(), lse.detach(), *grads]


def errors(got: list[Tensor], wanted: list[Tensor]) -> list[float]:
    assert [x.shape for x in got] == [x.shape for x in wanted]
    assert torch.equal(got[1] == -torch.inf, wanted[1] == -torch.inf)
    pairs = [
        (x.double().nan_to_num(neginf=0), y.double().nan_to_num(neginf=0))
        for x, y in zip(got, wanted, strict=True)
    ]
    return [float((x - y).abs().max() / y.abs().max().clamp(min=1)) for x, y in pairs]


def of_shapes(shapes: dict[str, Shape]) -> dict[str, list[float]]:
    found = {}
    for number, (name, shape) in enumerate(shapes.items()):
        dtype = {"fp32": torch.float32, "fp16": torch.float16}[name.rpartition(", ")[2]]
        case = draw(shape, dtype, number)
        got = attended(case, dtype)
        found[name] = errors(got, dense(case))
        reference = attended(case, dtype, REFERENCE)
        found[f"beside plain torch: {name}"] = errors(got, reference)
    return found


def errors_of_views() -> list[float]:
    """Tables side by side in one, every other query and head, a constant dout; places in int32."""
    case = draw(Shape(4, 4, 2, 8, 24, 30, 20), torch.float32)
    case = case._replace(dout=torch.ones_like(case.dout), places=case.places.int())
    table = torch.cat([case.k.float(), case.v.float()], -1)
    wide = torch.randn(8, 8, 8)
    wide[::2, ::2] = case.q.float()
    leaves = [wide.requires_grad_(), table.requires_grad_()]
    q, k, v = leaves[0][::2, ::2], leaves[1][..., :8], leaves[1][..., 8:]
    out, lse = attend_to_lists(q, k, v, case.places, SCALE, TRITON)
    (out.sum() + (lse * case.dlse.float())[[0, 2, 3]].sum()).backward()
    dq, dkv = leaves[0].grad, leaves[1].grad
    assert dq is not None and dkv is not None
    got = [out.detach(), lse.detach(), dq[::2, ::2], dkv[..., :8], dkv[..., 8:]]
    return errors(got, dense(case._replace(places=case.places.long())))


def errors_of_low_scores() -> list[float]:
    """Scores of -100 and less, beside which the weight of a place of no row would be infinite."""
    case = draw(Shape(), torch.float32)
    case = case._replace(q=-7 * case.q.abs(), k=7 * case.k.abs())
    got = attended(case, torch.float32)
    assert got[1].max() < -100  # exp(100) is over the largest fp32
    return errors(got, dense(case))


def same_bits() -> bool:
    """Twice the same, and with shares of any number of queries at a time."""
    case, found = draw(Shape(5, 2, 1, 24, 40, 12, 9), torch.float32), []
    for most in (1 << 27, 1 << 27, 1, 2 * 9 * 64):
        lists.MOST_NUMBERS = most
        found.append(attended(case, torch.float32))
    lists.MOST_NUMBERS = 1 << 27
    first, *others = found
    return all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


def nothing() -> bool:
    """No queries, no rows, no places, no places that name a row."""
    for shape in (
        Shape(queries=0),
        Shape(rows=0, length=0),
        Shape(length=0),
        Shape(share=1.0, length=40),
    ):
        case = draw(shape, torch.float32)
        out, lse, *grads = attended(case, torch.float32)
        assert not out.any() and bool((lse == -torch.inf).all())
        assert not any(bool(x.any()) for x in grads)
    case = draw(Shape(rows=0, length=0), torch.float32)
    case = case._replace(places=torch.full((4, 3), -1), dlse=torch.zeros_like(case.dlse))
    out, lse, *_ = attended(case, torch.float32)
    return not bool(out.any()) and bool((lse == -torch.inf).all())


def refused(asked: Callable[[], object]) -> str:
    try:
        asked()
    except ValueError as error:
        return str(error)
    return ""


def refusals() -> list[str]:
    asked = (
        (torch.float64, 64, 64),
        (torch.bfloat16, 64, 64),
        (torch.float32, 320, 64),
        (torch.float16, 576, 576),
    )
    found = [refused(partial(list_kernel, "triton", "cpu", *it)) for it in asked]

    def run(rank: int, group: tw.Transport) -> None:
        cp = tw.ContextParallel(group, num_tokens=8, layout=tw.contiguous(8, 2))
        x = torch.zeros(4, 2, 4, dtype=torch.float64 if rank else torch.float32)
        cp.attention(x, x, x, mask=tw.Chosen(torch.full((4, 2), -1)), kernel="triton")

    return [*found, refused(lambda: tw.loopback(2, run))]


def of_calls(seeds: Iterable[int]) -> None:
    """Over layouts, documents, masks, batches, heads, widths, sinks, windows beside the choice."""
    computed = Computed("triton", torch.float32, BOUND)
    for seed in seeds:
        split, rng = drawn(seed), Random(seed)
        n, mask = split.layout.num_tokens, drawn_mask(rng, split.layout.num_tokens)
        mask = mask & tw.Document(split.cu_seqlens) if rng.random() < 0.6 else mask
        allowed = mask.dense(np.arange(n), np.arange(n))
        given, wanted, window = problem(rng, allowed, seed), None, None
        if seed % 2:
            window = rng.randint(1, 9)
            wanted = beside(given, allowed, window)
        compare(given, split.layout, mask, window, wanted, computed)


def main(which: str) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    quick = which == "quick"
    found: dict[str, object] = {**of_shapes(QUICK if quick else MORE)}
    if quick:
        found["views, fp32"] = errors_of_views()
        found["low scores, coarse"] = errors_of_low_scores()
        found |= {"same bits": same_bits(), "nothing": nothing(), "refusals": refusals()}
    of_calls((5, 7, 8) if quick else range(14))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])

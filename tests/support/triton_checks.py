"""The Triton kernels against dense attention, in Triton's interpreter; run by test_triton_slices.

    TRITON_INTERPRET=1 python tests/support/triton_checks.py quick | more

A process of its own, because Triton reads TRITON_INTERPRET when its kernels are defined. Prints one
JSON line: the largest error of every case. More: the masks that the quick ones leave out.
"""

import json
import math
import sys
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from support.kernel_cases import CALLS, SCALE, SCORES, call_of, dense, draw, error, placed, run
from support.kernel_cases import wanted as wanted_of

import tilewise as tw
from tilewise import masks
from tilewise.execution import forward_backward, workspace
from tilewise.kernels.call_masks import call_mask
from tilewise.kernels.triton.kernel import TritonSlices
from tilewise.kernels.triton.tuning import LaunchBlocks, Tuning
from tilewise.masks.base import Mask
from tilewise.plan.row_ranges import Ranges, row_index
from tilewise.tiles.calls import KernelCall, Kind
from tilewise.tiles.cover import tile_calls
from tilewise.tiles.lists import call_of_slices, moved_slices, pieces_of

CU_SEQLENS = [0, 3, 4, 21, 40, 45]
NUM_TOKENS = 45
MASKS: dict[str, Mask] = {
    "full": masks.full(NUM_TOKENS),
    "causal": masks.causal(NUM_TOKENS),
    "full_document": masks.full_document(CU_SEQLENS),
    "causal_document": masks.causal_document(CU_SEQLENS),
    "sliding_window": masks.sliding_window(NUM_TOKENS, 5),
    "sliding_window_causal": masks.sliding_window_causal(NUM_TOKENS, 20),
    "share_question": masks.share_question(CU_SEQLENS),
    "causal_blockwise": masks.causal_blockwise(CU_SEQLENS),
    "global_sliding_window": masks.global_sliding_window(NUM_TOKENS, 4),
    "prefix_lm_causal": masks.prefix_lm_causal(NUM_TOKENS, 18),
    "prefix_lm_document": masks.prefix_lm_document(CU_SEQLENS, [2, 1, 9, 4, 5]),
    "block_causal_document": masks.block_causal_document(CU_SEQLENS, 8),
    "block_sparse_uniform": masks.block_sparse(np.eye(3, 3, 1, dtype=bool), 15),
    "block_sparse_variable": masks.block_sparse_variable(
        np.array([[True, False], [True, True]]), [0, 20, 45], [0, 13, 45]
    ),
}


QUICK = ("global_sliding_window",)  # the executor's tiles are causal documents
AT_ONCE = ("causal_document", "global_sliding_window", "prefix_lm_document")
# dq, dk and dv in passes of their own; dk with dv; all at once with atomics
PASSES = {"three": (2, False), "two": (1, False), "one": (1, True)}


def kernel(rows: int = 32, keys: int = 16, passes: str = "two") -> TritonSlices:
    blocks, (by_keys, at_once) = LaunchBlocks(rows, keys), PASSES[passes]
    tuning = Tuning(blocks, blocks, (blocks,) * by_keys, blocks if at_once else None)
    return TritonSlices(tuning, deterministic=not at_once)


def of_mask(mask: Mask) -> KernelCall:
    (call,) = tile_calls(np.arange(NUM_TOKENS), np.arange(NUM_TOKENS), mask, whole_tile=True)
    return call


def errors_of(
    call: KernelCall, heads: tuple[int, int], dtype: torch.dtype, passes: str = "two", **shape: int
) -> float:
    """Of out, lse, dq, dk, dv, given the whole attention's lse and delta."""
    case = draw(call, heads, dtype, **shape)
    answer = dense(case, call)
    got = run(kernel(passes=passes), case, answer, call)
    wanted = (answer.out, answer.lse, *answer.grads)
    assert all(x.dtype == torch.float32 for x in got)
    assert [x.shape for x in got] == [y.shape for y in wanted]
    return max(error(x, y) for x, y in zip(got, wanted, strict=True))


def error_of_parts(passes: str) -> float:
    """A tile in two calls: merged in place, and gradients by the lse and delta of both."""
    part_kernel = kernel(passes=passes)
    whole, left, right = call_of(20, 40), call_of(20, 17), call_of(20, 23)
    case = draw(whole, (4, 2), torch.float32, batch=1)
    answer = dense(case, whole)
    out, lse = torch.zeros_like(case.q), torch.full(case.q.shape[:3], -math.inf)
    totals = tuple(map(torch.zeros_like, case[:3]))
    for part, keys in ((left, slice(0, 17)), (right, slice(17, 40))):
        k, v = case.k[keys], case.v[keys]
        assert part_kernel.forward(case.q, k, v, part, SCALE, (out, lse))[0] is out
        into = totals[0], totals[1][keys], totals[2][keys]
        given = answer.lse.float(), answer.delta.float()
        grads = part_kernel.backward(case.q, k, v, case.dout, *given, part, SCALE, into)
        assert grads is into
    wanted = (answer.out, answer.lse, *answer.grads)
    return max(error(x, y) for x, y in zip((out, lse, *totals), wanted, strict=True))


def error_of_views() -> float:
    """Operands and accumulators that are every other head of wider tensors, and scale below 0."""
    call = CALLS["holes"]
    case = draw(call, (8, 4), torch.float32, batch=1)
    thin = type(case)(*(x[:, :, ::2] for x in case))
    out, lse = torch.zeros_like(case.q)[:, :, ::2], torch.full((30, 1, 8), -math.inf)[..., ::2]
    kernel().forward(-thin.q, thin.k, thin.v, call, -SCALE, (out, lse))
    answer = dense(thin, call)
    return max(error(out, answer.out), error(lse, answer.lse))


def error_without_scale() -> float:
    """Scale 0: every allowed key has the same weight."""
    call = CALLS["holes"]
    case = draw(call, (2, 1), torch.float32, batch=1)
    out, lse = kernel().forward(*case[:3], call, 0.0)
    allowed = call_mask(call).float()
    count = allowed.sum(1)
    mean = allowed @ case.v[:, 0, 0] / count.clamp(min=1)[:, None]
    return max(error(out[:, 0, 1], mean), error(lse[:, 0, 1], count.log()))


def error_of_executor() -> float:
    """A ring of two ranks whose tiles are one call each, beside the cpu kernel."""
    mask, layout = MASKS["causal_document"], tw.zigzag(NUM_TOKENS, 2)
    given = [torch.randn(NUM_TOKENS, h, 8) for h in (2, 1, 1, 2)]

    def on_rank(rank: int, group: Any, kernel: TritonSlices | None) -> list[torch.Tensor]:
        q, k, v, dout = (layout.shard(x, rank).clone() for x in given)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        call = {"plan": tw.ring(2), "layout": layout, "mask": mask, "group": group}
        out = tw.attention(*leaves, **call, kernel=kernel)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    wanted = tw.loopback(2, partial(on_rank, kernel=None))
    got = tw.loopback(2, partial(on_rank, kernel=kernel()))
    pairs = zip(chain(*got), chain(*wanted), strict=True)
    return max(error(x, y) for x, y in pairs)


def error_of_places(passes: str, fresh: Sequence[Ranges]) -> float:
    """One call whose rows lie apart and in another order, among rows of nan that it must not use.

    Args:
        fresh: of rows and of keys, counted from the call's first range: these are nan too before.
    """
    places = (
        np.concatenate([np.arange(21, 33), np.arange(3, 13)]),
        np.concatenate([np.arange(30, 50), np.arange(4, 29)]),
    )
    positions = np.concatenate([np.arange(5, 17), np.arange(30, 40)]), np.arange(45)
    (call,) = tile_calls(*positions, MASKS["causal_document"], whole_tile=True)
    case = draw(call, (4, 2), torch.float32, batch=2, head_dim=16)
    answer = dense(case, call)
    index = [place[row_index(ranges)] for place, ranges in zip(places, call.sides, strict=True)]
    lists, firsts = call_of_slices(moved_slices(call.as_slices, *map(pieces_of, index)))
    rows = [torch.from_numpy(x - first) for x, first in zip(index, firsts, strict=True)]
    at = [
        tuple((ranges[0][0] + a, ranges[0][0] + b) for a, b in new)
        for ranges, new in zip(lists.sides, fresh, strict=True)
    ]
    lists = lists._replace(fresh=(at[0], at[1]))

    def placed(x: torch.Tensor, side: int, values: torch.Tensor | None = None) -> torch.Tensor:
        found = torch.full((lists.sides[side][-1][1], *x.shape[1:]), math.nan)
        mine = torch.from_numpy(row_index(lists.sides[side]))
        if values is None:
            here = (rows[side] >= 0) & (rows[side] < len(found))
            known = torch.full_like(found, math.nan)
            known[rows[side][here]] = x[here].float()
            found[mine] = known[mine]
        else:
            found[mine] = values
            for start, stop in lists.fresh[side]:
                found[start:stop] = math.nan
        return found

    def apart(got: torch.Tensor, want: torch.Tensor, side: int) -> float:
        mine = torch.zeros(len(got), dtype=torch.bool)
        mine[torch.from_numpy(row_index(lists.sides[side]))] = True
        assert got[~mine].isnan().all()
        return error(got[mine], placed(want, side)[mine])

    q, k, v, dout = (placed(x, side) for x, side in zip(case[:4], (0, 1, 1, 0), strict=True))
    zero, nowhere = torch.zeros(()), torch.full((), -math.inf)
    into = placed(case.q, 0, zero), placed(answer.lse, 0, nowhere)
    kernel(passes=passes).forward(q, k, v, lists, SCALE, into)
    found = [apart(into[0], answer.out, 0), apart(into[1], answer.lse, 0)]
    statistics = placed(answer.lse, 0), placed(answer.delta, 0)
    sides = 0, 1, 1
    grads = [placed(x, side, zero) for x, side in zip(answer.grads, sides, strict=True)]
    kernel(passes=passes).backward(q, k, v, dout, *statistics, lists, SCALE, tuple(grads))
    found += map(apart, grads, answer.grads, sides)
    return max(found)


MESH = tw.mesh(4, q_tile=2)
PLACES = {"added": ((), ()), "some new": (((0, 2),), ((1, 4),)), "new": (((0, 3),), ((0, 7),))}
"""Rows and keys whose results are written, from the first on of a call."""


def error_of_lists(passes: str, plan: tw.Plan = MESH, dtype: torch.dtype = torch.float32) -> float:
    """A plan whose kernel reads rows where they lie, in memory that is nan at first.

    Results wait, so that calls of lists are made as on a GPU.
    """
    mask, layout = MASKS["causal_document"], tw.zigzag(NUM_TOKENS, 4)
    given = [torch.randn(NUM_TOKENS, h, 8).to(dtype) for h in (2, 1, 1, 2)]
    kinds = set[Kind]()

    def on_rank(rank: int, group: Any, kernel: Any) -> list[torch.Tensor]:
        q, k, v, dout = (layout.shard(x, rank).clone() for x in given)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        call = {"plan": plan, "layout": layout, "mask": mask, "group": group}
        out = tw.attention(*leaves, **call, kernel=kernel)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    class Seen(TritonSlices):
        def forward(self, q: Any, k: Any, v: Any, call: KernelCall, *rest: Any) -> Any:
            kinds.add(call.kind)
            return super().forward(q, k, v, call, *rest)

    def blank(*size: Any, **options: Any) -> torch.Tensor:
        return torch.full(size, 255, **options)

    wanted = tw.loopback(4, partial(on_rank, kernel=tw.kernel("reference")))
    ours = kernel(passes=passes)
    with (
        mock.patch.object(forward_backward, "kernel_traits", lambda _, style: (style, 4)),
        mock.patch.object(workspace, "torch", SimpleNamespace(**{**vars(torch), "empty": blank})),
    ):
        found = partial(on_rank, kernel=Seen(ours.tuning, ours.deterministic))
        got = tw.loopback(4, found)
    assert kinds == {Kind.LISTS}
    pairs = zip(chain(*got), chain(*wanted), strict=True)
    return max(error(x, y) for x, y in pairs)


def same_bits() -> bool:
    """Twice the same result, and the same for a call that skips blocks without work."""
    call = CALLS["holes"]
    case = draw(call, (4, 2), torch.float16, batch=1)
    answer = dense(case, call)
    once, again = (run(kernel(16, 16), case, answer, call) for _ in range(2))
    return all(torch.equal(x, y) for x, y in zip(once, again, strict=True))


def nothing() -> bool:
    """Calls without rows, keys or slices, and rows without keys."""
    for sizes in ((0, 4), (4, 0), (0, 0)):
        call = call_of(*sizes)
        case = draw(call, (2, 1), torch.float32)
        out, lse = kernel().forward(*case[:3], call, SCALE)
        grads = kernel().backward(*case[:4], lse, torch.zeros_like(lse), call, SCALE)
        assert not out.any() and (lse == -math.inf).all() and not any(g.any() for g in grads)
    call = call_of(5, 4, Kind.SLICES)
    case = draw(call, (2, 1), torch.float32)
    out, lse = kernel().forward(*case[:3], call, SCALE)
    grads = kernel().backward(*case[:4], lse, torch.ones_like(lse), call, SCALE)
    assert not out.any() and (lse == -math.inf).all() and not any(g.any() for g in grads)
    return True


def of_masks(names: Iterable[str]) -> dict[str, float]:
    return {
        f"{name}, fp32": errors_of(
            of_mask(MASKS[name]),
            (2, 1),
            torch.float32,
            "one" if name in AT_ONCE else "two",
            batch=1,
        )
        for name in names
    }


def of_scores(names: Iterable[str]) -> dict[str, float]:
    """Softcap, dropout and the largest score, and values of another width; in all passes."""
    found, call = {}, CALLS["holes"]
    for name, passes in zip(names, chain(PASSES, PASSES), strict=False):
        scores = SCORES[name]
        case = draw(call, (4, 2), torch.float32, batch=2, head_dim=24, v_head_dim=40)
        answer = dense(case, call, scores)
        got = run(kernel(passes=passes), case, answer, call, scores)
        pairs = zip(got, wanted_of(answer, scores), strict=True)
        found[f"{name} {passes}, fp32"] = max(error(x, y) for x, y in pairs)
        into = tuple(torch.full_like(x, -math.inf) for x in (got[0], got[1], *got[5:]))
        into[0].zero_()
        kernel().forward(*case[:3], call, SCALE, into, placed(scores, call))
        merged = zip(into, (answer.out, answer.lse, answer.largest), strict=False)
        found[f"{name} merged, fp32"] = max(error(x, y) for x, y in merged)
    return found


def of_shapes() -> dict[str, float | bool]:
    """Heads, merges in place, and what has no rows."""
    found: dict[str, float | bool] = {}
    found["MQA, fp32"] = errors_of(CALLS["full"], (4, 1), torch.float32, "one", batch=2)
    found["views, fp32"], found["no scale, fp32"] = error_of_views(), error_without_scale()
    found["executor, fp32"] = error_of_executor()
    found["lists one, fp32"] = error_of_lists("one")
    found["places one, fp32"] = error_of_places("one", PLACES["some new"])
    found["same bits"], found["nothing"] = same_bits(), nothing()
    return found


def of_wide_shapes() -> dict[str, float | bool]:
    """Head dims, dtypes, and merges in place, in all passes."""
    found: dict[str, float | bool] = {}
    for passes in PASSES:
        shape = {"batch": 2, "head_dim": 64}
        largest = errors_of(CALLS["holes"], (2, 2), torch.float16, passes, **shape)
        found[f"{passes}, MHA, fp16"] = largest
    found["GQA, fp16"] = errors_of(CALLS["causal"], (4, 2), torch.float16, batch=1, head_dim=128)
    found["head_dim 256, fp32"] = errors_of(
        CALLS["bands"], (2, 1), torch.float32, "three", head_dim=256
    )
    lower = call_of(7, 40, Kind.CAUSAL)
    found["bottom right, fp32"] = errors_of(lower, (2, 2), torch.float32, batch=1)
    found |= {f"lists {x}, fp32": error_of_lists(x) for x in ("two", "three")}
    found["lists ring, fp16 results"] = error_of_lists("one", tw.ring(4), torch.float16)
    found |= {
        f"places {x} {name}, fp32": error_of_places(x, fresh)
        for x in PASSES
        for name, fresh in PLACES.items()
    }
    return found | {f"parts {x}, fp32": error_of_parts(x) for x in PASSES}


def main(which: str) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    quick = which == "quick"
    found = of_masks(name for name in MASKS if (name in QUICK) == quick)
    found |= of_scores(("all",) if quick else SCORES)
    json.dump({**found, **(of_shapes() if quick else of_wide_shapes())}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])

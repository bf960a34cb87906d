"""Attention to chosen keys on all ranks, beside dense attention with the same pairs in fp64; and
indexers that choose them, beside the whole table of scores."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from support.drawn_layouts import normal
from torch import Tensor

import tilewise as tw


class Indexer(NamedTuple):
    """Operands of the whole sequence: [(batch,) tokens, heads, width], and one key a token."""

    q: Tensor
    k: Tensor
    weights: Tensor

    def scores(self) -> Tensor:
        """[(batch,) queries, keys], written out."""
        products = torch.einsum("...qhd,...kd->...hqk", self.q, self.k).relu()
        return torch.einsum("...hqk,...qh->...qk", products, self.weights)

    def on_rank(self, cp: tw.ContextParallel) -> Indexer:
        dim = self.k.ndim - 2
        return Indexer(*(cp.shard(x, dim) for x in self))


def indexer(
    num_tokens: int, batch: int | None, heads: int, seed: int, *, ties: bool, width: int = 5
) -> Indexer:
    """Random operands; with ties small whole numbers, whose scores are exact and often equal."""
    before = () if batch is None else (batch,)
    shapes = ((num_tokens, heads, width), (num_tokens, width), (num_tokens, heads))
    found = [normal(*before, *shape, seed=seed + i) for i, shape in enumerate(shapes)]
    return Indexer(*(x.round() for x in found)) if ties else Indexer(*found)


def chosen_by(scores: Tensor, allowed: np.ndarray, k: int) -> list[list[int]]:
    """The best k visible keys of each row of [queries, keys], of equal ones the lower positions."""
    found = []
    for row, seen in zip(scores.tolist(), allowed, strict=True):
        order = sorted(np.flatnonzero(seen).tolist(), key=lambda at, row=row: (-row[at], at))
        found.append(sorted(order[:k]))
    return found


class Problem(NamedTuple):
    """Whole tensors [batch, tokens, ...], and positions [batch, tokens, k]."""

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    sink: Tensor | None
    weights: tuple[Tensor, Tensor]
    scale: float

    def rounded(self, dtype: torch.dtype) -> Problem:
        """The same, with the tensors that attention takes in a dtype."""
        q, k, v, sink = (
            x if x is None else x.to(dtype) for x in (self.q, self.k, self.v, self.sink)
        )
        return self._replace(q=q, k=k, v=v, sink=sink)


class Computed(NamedTuple):
    """The means by which ranks compute, and the error up to which they are right."""

    kernel: str | None = None
    dtype: torch.dtype = torch.float64
    bound: float = 1e-12


FP64 = Computed()


def choices(draw: Random, allowed: np.ndarray, batch: int, most: int) -> Tensor:
    """Lists of visible keys in any order, some shorter than others, filled up with -1."""
    found = []
    for _ in range(batch):
        for row in allowed:
            keys = np.flatnonzero(row).tolist()
            draw.shuffle(keys)
            mine = keys[: draw.randint(0, most)]
            mine += [-1] * (most - len(mine))
            draw.shuffle(mine)
            found.append(mine)
    return torch.tensor(found, dtype=torch.int64).reshape(batch, len(allowed), most)


def problem(draw: Random, allowed: np.ndarray, seed: int) -> Problem:
    n, batch = len(allowed), draw.choice([1, 2])
    heads, kv_heads = draw.choice([(1, 1), (4, 2), (3, 1), (2, 2)])
    width, v_width = draw.choice([(4, 4), (6, 3), (2, 5)])
    sink = draw.choice([None, (heads,), (2, heads), (batch, 1, heads)])
    return Problem(
        normal(batch, n, heads, width, seed=seed),
        normal(batch, n, kv_heads, width, seed=seed + 1),
        normal(batch, n, kv_heads, v_width, seed=seed + 2),
        choices(draw, allowed, batch, draw.randint(0, min(n, 9))),
        None if sink is None else normal(*sink, seed=seed + 3),
        (normal(batch, n, heads, v_width, seed=8), normal(batch, n, heads, seed=9)),
        draw.choice([0.5, 1.3]),
    )


def beside(given: Problem, allowed: np.ndarray, window: int) -> Problem:
    """The same with the keys of a window in each list, behind those chosen; some stand twice."""
    every = np.arange(len(allowed))
    near = torch.from_numpy(allowed & tw.Window(window - 1, 0).dense(every, every))
    keys = torch.where(near, torch.arange(len(allowed)), -1).expand(len(given.q), -1, -1)
    return given._replace(positions=torch.cat([given.positions, keys], -1))


def dense(given: Problem, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Any:
    """out and lse of the whole table of scores."""
    n, heads = q.shape[1], q.shape[2]
    allowed = torch.zeros(len(q), n, n + 1, dtype=torch.bool)
    allowed = allowed.scatter(2, given.positions % (n + 1), True)[..., :n]
    k, v = (x.repeat_interleave(heads // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * given.scale
    scores = scores.masked_fill(~allowed[:, None], -torch.inf)
    if sink is not None:
        sinks = sink if sink.ndim == 3 else sink.reshape(1, -1, heads)
        columns = sinks.transpose(1, 2)[:, :, None, :].expand(len(q), heads, n, -1)
        scores = torch.cat([scores, columns], -1)
    reached = (scores > -torch.inf).any(-1, keepdim=True)
    safe = torch.where(reached, scores, 0.0)
    p = torch.where(reached, safe.softmax(-1), 0.0)[..., :n]
    lse = torch.where(reached[..., 0], safe.logsumexp(-1), -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", p, v), lse.transpose(1, 2)


def weighted(out: Tensor, lse: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
    return (out * weights[0]).sum() + (lse.masked_fill(lse == -torch.inf, 0.0) * weights[1]).sum()


def compare(
    given: Problem,
    layout: tw.Layout,
    mask: tw.masks.Mask,
    window: int | None = None,
    wanted: Problem | None = None,
    computed: Computed = FP64,
    choosing: tuple[Indexer, int] | None = None,
) -> None:
    """out, lse and each gradient of all ranks are those of the dense formula in fp64.

    Args:
        wanted: whose positions the formula has; None: given's.
        choosing: an indexer of given's batch, and how many keys of a query cp.index chooses by it,
            in place of given's positions.
    """
    given, bound = given.rounded(computed.dtype), computed.bound
    leaves = [
        None if x is None else x.to(torch.float64, copy=True).requires_grad_()
        for x in (given.q, given.k, given.v, given.sink)
    ]
    want = dense(wanted or given, *leaves)  # pyright: ignore[reportCallIssue, reportArgumentType]
    weighted(*want, given.weights).backward()
    squeezed = given.q.shape[0] == 1 and (given.sink is None or given.sink.ndim < 3)

    def run(rank: int, group: Any) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        cp = tw.ContextParallel(group, num_tokens=layout.num_tokens, layout=layout, mask=mask)
        own = [cp.shard(x, 1) for x in (given.q, given.k, given.v, given.positions)]
        own, weights = [x[0] if squeezed else x for x in own], given.weights
        if choosing is not None:
            operands = choosing[0].on_rank(cp)
            own[3] = cp.index(*(x[0] if squeezed else x for x in operands), choosing[1])
        mine = [x.clone().requires_grad_() for x in own[:3]]
        mine += [] if given.sink is None else [given.sink.clone().requires_grad_()]
        sink = mine[3] if given.sink is not None else None
        q, k, v, *_ = mine
        out, lse = cp.attention(
            q,
            k,
            v,
            mask=tw.Chosen(own[3], window=window),
            sink=sink,
            softmax_scale=given.scale,
            return_lse=True,
            kernel=computed.kernel,
        )
        out, lse = (x[None] if squeezed else x for x in (out, lse))
        weighted(out, lse, (cp.shard(weights[0], 1), cp.shard(weights[1], 1))).backward()
        return out.detach(), lse.detach(), [x.grad for x in mine]

    outs, lses, grads = zip(*tw.loopback(layout.world_size, run), strict=True)
    assert (layout.unshard(outs, 1) - want[0]).abs().max() < bound
    found, lse = layout.unshard(lses, 1), want[1]
    assert torch.equal(found == -torch.inf, lse == -torch.inf)
    assert (found - lse).nan_to_num(0).abs().max() < bound
    for number, leaf in enumerate(x for x in leaves if x is not None):
        parts = [mine[number] for mine in grads]
        if number == 3:
            mine = sum(parts)
        else:
            mine = layout.unshard([x[None] if squeezed else x for x in parts], 1)
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        assert (mine - grad).abs().max() < bound * max(1.0, float(grad.abs().max()))

"""tree: queries that every rank holds, in one place as in the plan's file, each gradient alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tests.conformance.oracle import Inputs, dense, draw, error
from tilewise.compiler.pruning import shard_layouts
from tilewise.execution import resolve

TOKENS = 12
MASK = tw.Causal() & tw.Window(6, 0)
PLACES: dict[str, Any] = {
    "default": None,
    "one": [0],
    "any order, one twice": torch.tensor([11, 3, 3, 7]),
    "every token": range(TOKENS),
    "none": [],
}


def at(positions: Any, num_queries: int = 2) -> torch.Tensor:
    """Where queries stand, default the last tokens."""
    default = range(TOKENS - num_queries, TOKENS)
    return torch.as_tensor([*(default if positions is None else positions)], dtype=torch.int64)


def attended(
    x: Inputs, plan: tw.Plan, layout: tw.Layout, positions: Any, rank: int, group: Any
) -> Any:
    """out, lse, and the gradients of q, k and v, each asked for alone, of one rank."""
    words: Any = {} if positions is None else {"q_positions": positions}
    words |= {"plan": plan, "layout": layout, "mask": MASK, "group": group, "return_lse": True}
    out, lse, grads = x.q, x.q, []
    for alone in range(3):
        local = [x.q, layout.shard(x.k, rank), layout.shard(x.v, rank)]
        local[alone] = local[alone].clone().requires_grad_()
        out, lse = tw.attention(*local, **words)
        (out * x.dout).sum().add((lse * x.dlse).sum()).backward()
        grads.append(local[alone].grad)
    return out.detach(), lse.detach(), *grads


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("place", PLACES)
def test_each_gradient_alone_is_that_of_dense_attention(n: int, place: str):
    """Twice with other values, as built and as read: the second call is found again."""
    positions, layout = PLACES[place], tw.zigzag(TOKENS, n)
    where = at(positions)
    read = tw.from_json(tw.to_json(tw.tree(n))), tw.parse(str(tw.tree(n)))
    for seed, plan in ((0, tw.tree(n)), (1, read[0]), (2, read[0]), (3, read[1])):
        x = draw((len(where), 4, 8), (TOKENS, 2, 8), seed)
        wanted = dense(x, MASK, where)
        ranks = tw.loopback(n, partial(attended, x, plan, layout, positions))
        by_name = zip(*ranks, strict=True)
        for name, whole, found in zip(wanted._fields, wanted, by_name, strict=True):
            if name in ("dk", "dv"):
                found = [layout.unshard(found)]
            assert max(error(one, whole) for one in found) <= 1e-12, name


def test_calls_at_the_same_positions_are_resolved_once(monkeypatch: pytest.MonkeyPatch):
    resolved: list[Any] = []
    original = resolve.resolve

    def counted(*args: Any) -> Any:
        resolved.append(args[3].q_positions)
        return original(*args)

    monkeypatch.setattr(resolve, "resolve", counted)
    plan, layout = tw.tree(3), tw.contiguous(TOKENS, 3)
    x = draw((2, 4, 8), (TOKENS, 2, 8), 0)

    def on_rank(rank: int, group: Any) -> list[torch.Tensor]:
        local = [x.q, layout.shard(x.k, rank), layout.shard(x.v, rank)]
        words: Any = {"plan": plan, "layout": layout, "mask": MASK, "group": group}
        spelled = [3, 9], (3, 9), torch.tensor([3, 9]), np.array([3, 9]), iter([3, 9]), [9, 3]
        return [tw.attention(*local, **words, q_positions=places) for places in spelled]

    for outs in tw.loopback(3, on_rank):
        assert max(error(out, dense(x, MASK, at([3, 9])).out) for out in outs[:-1]) <= 1e-12
        assert error(outs[-1], dense(x, MASK, at([9, 3])).out) <= 1e-12
    assert sorted(resolved) == [(3, 9)] * 3 + [(9, 3)] * 3


@pytest.mark.parametrize("warm", [False, True])
def test_ranks_that_put_queries_elsewhere_are_told(warm: bool):
    layout = tw.contiguous(TOKENS, 2)

    def on_rank(rank: int, group: Any) -> None:
        q, k = torch.zeros(1, 4, 8), torch.zeros(TOKENS // 2, 2, 8)
        words: Any = {"plan": tw.tree(2), "layout": layout, "mask": MASK, "validate": "always"}
        if warm:
            for position in (4, 5):
                tw.attention(q, k, k, **words, group=group, q_positions=[position])
        tw.attention(q, k, k, **words, group=group, q_positions=[4 + rank])

    with pytest.raises(ValueError, match="ranks disagree on layout"):
        tw.loopback(2, on_rank)


@pytest.mark.parametrize("positions", [[0.5], "01", [[0, 1]], [True, None]])
def test_positions_that_are_no_numbers_are_refused_on_every_rank(positions: Any):
    layout, said = tw.contiguous(TOKENS, 2), [""] * 2

    def on_rank(rank: int, group: Any) -> None:
        q, k = torch.zeros(2, 4, 8), torch.zeros(TOKENS // 2, 2, 8)
        given = positions if rank else [0, 1]
        words: Any = {"plan": tw.tree(2), "layout": layout, "mask": MASK, "group": group}
        try:
            tw.attention(q, k, k, **words, q_positions=given)
        except ValueError as error:
            said[rank] = str(error)

    tw.loopback(2, on_rank)
    assert said[0] == said[1] and "q_positions (" in said[0] and "whole numbers" in said[0]


def test_plans_name_the_shards_of_a_sequence_alone_or_of_queries_and_keys():
    """Without a layout of keys, queries on every rank are the last token of the one given."""
    plan, layout = tw.tree(3), tw.contiguous(TOKENS, 3)
    (queries, keys), shared = shard_layouts(plan, layout), tw.joint(3, range(5))
    assert [*queries.rows(0)] == [TOKENS - 1] and keys is layout and queries.world_size == 1
    in_place, owned = shard_layouts(plan, shared, shared)
    assert [*in_place.rows(0)] == [*range(5)] and owned == shared.owned
    assert shard_layouts(tw.ring(3), shared) == (shared.owned,) * 2

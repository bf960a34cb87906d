"""validate="first": ranks compare a kind of call once; what that leaves is said by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance.oracle import error

import tilewise as tw
from tilewise.transport.loopback import LoopbackGroup


def attend(group: LoopbackGroup, rank: int, tokens: int = 8, **options: Any) -> torch.Tensor:
    layout = tw.contiguous(tokens, 2)
    torch.manual_seed(tokens)
    q, k, v = (
        layout.shard(x, rank).requires_grad_()
        for x in torch.randn(3, tokens, 2, 4, dtype=torch.float64)
    )
    rules = {"plan": tw.ring(2), "layout": layout, "validate": "first", **options}
    out = tw.attention(q, k, v, group=group, **{"mask": tw.Causal(), **rules})
    out.sum().backward()
    return torch.stack([out.detach(), *(x.grad for x in (q, k, v))])


def test_a_kind_of_call_is_agreed_on_once_for_each_pass():
    def on_rank(rank: int, group: LoopbackGroup) -> list[int]:
        counts = []
        for tokens in (8, 8, 6, 8, 6):
            found = attend(group, rank, tokens)
            counts.append(group._num_gathers)
            assert error(found, attend(group, rank, tokens, validate="never")) < 1e-15
            assert group._num_gathers == counts[-1]
        attend(group, rank, 6, mask=tw.Full())
        return [*counts, group._num_gathers]

    assert tw.loopback(2, on_rank) == [[2, 2, 4, 4, 4, 6]] * 2


def test_another_group_is_asked_anew():
    def on_rank(rank: int, group: LoopbackGroup) -> int:
        attend(group, rank)
        return group._num_gathers

    assert tw.loopback(2, on_rank) == tw.loopback(2, on_rank) == [2, 2]


@pytest.mark.parametrize("before", [False, True])
def test_what_is_new_on_all_ranks_is_compared_as_always(before):
    def on_rank(rank: int, group: LoopbackGroup) -> None:
        if before:
            attend(group, rank)
        with pytest.raises(ValueError, match="ranks disagree on mask: rank 0 has Window"):
            attend(group, rank, mask=tw.Window(3 + rank, 0))
        with pytest.raises(ValueError, match=r"^rank 1: softmax_scale"):
            attend(group, rank, tokens=10, softmax_scale=-1.0 if rank else None)

    tw.loopback(2, on_rank)


def test_a_rank_alone_with_a_new_call_ends_with_a_message_that_names_validate():
    def on_rank(rank: int, group: LoopbackGroup) -> None:
        attend(group, rank)
        attend(group, rank, mask=tw.Full() if rank else tw.Causal())

    named = r"no rank can go on: .*validate='first' compares once a call.*validate='always' says"
    with pytest.raises(RuntimeError, match=named):
        tw.loopback(2, on_rank)


def test_other_ways_to_validate_are_refused():
    with pytest.raises(ValueError, match=r"validate \('once'\) must be 'always', 'first' or"):
        tw.loopback(2, lambda rank, group: attend(group, rank, validate="once"))

"""validate="first": ranks compare a kind of call once; what that leaves is said by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance.oracle import error

import tilewise as tw
from tilewise.transport.agreement import COMPARED_EVERY
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


def outcomes(on_rank: Any, n: int = 2) -> list[str]:
    """What each rank raises, by rank."""

    def body(rank: int, group: LoopbackGroup) -> str:
        with pytest.raises(ValueError) as caught:
            on_rank(rank, group)
        return str(caught.value)

    return tw.loopback(n, body)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("mode", ["always", "never"])
def test_another_validate_on_one_rank_is_refused_on_all(known, mode):
    def on_rank(rank: int, group: LoopbackGroup) -> None:
        if known:
            attend(group, rank)
        attend(group, rank, validate=mode if rank == 1 else "first")
        attend(group, rank, mask=tw.Full())

    (message,) = set(outcomes(on_rank, 2))
    assert "validate" in message and "rank 1" in message
    assert mode in message or "rank 1 compares call 3" in message


def test_a_rank_alone_with_a_new_kind_and_the_others_hear_of_it():
    def on_rank(rank: int, group: LoopbackGroup) -> None:
        attend(group, rank)
        attend(group, rank, mask=tw.Full() if rank else tw.Causal())

    first, second = outcomes(on_rank)
    assert first == second
    assert first.startswith("ranks are in different calls: rank 0 is in call 3 (pass forward, ")
    assert "mask Causal()" in first and "mask Full()" in first and "rank 1 in call 3" in first


@pytest.mark.parametrize("skips", [False, True])
def test_known_kinds_in_another_order_or_left_out_are_found(skips):
    masks = tw.Causal(), tw.Window(2, 0), tw.Window(3, 0)

    def on_rank(rank: int, group: LoopbackGroup) -> None:
        for mask in masks:
            attend(group, rank, mask=mask)
        order = (2, 1, 0) if not skips else (1, 2)
        for i in order if rank else (0, 1, 2):
            attend(group, rank, mask=masks[i])

    first, second = outcomes(on_rank)
    assert first == second and first.startswith("ranks are in different calls: rank 0 is in call ")


@pytest.mark.parametrize("known", [False, True])
def test_what_one_rank_refuses_reaches_the_others_and_all_go_on(known):
    def on_rank(rank: int, group: LoopbackGroup) -> torch.Tensor:
        if known:
            attend(group, rank)
        with pytest.raises(ValueError, match=r"^rank 1: softmax_scale"):
            attend(group, rank, softmax_scale=-1.0 if rank else None)
        return attend(group, rank)

    assert all(x.isfinite().all() for x in tw.loopback(2, on_rank))


def test_ranks_compare_again_after_so_many_calls():
    def on_rank(rank: int, group: LoopbackGroup) -> list[int]:
        counts = []
        for _ in range(COMPARED_EVERY):
            attend(group, rank)
            counts.append(group._num_gathers)
        return counts

    passes = COMPARED_EVERY // 2  # of each call
    wanted = [2] * passes + [3] * passes
    assert tw.loopback(2, on_rank) == [wanted] * 2


def test_a_seed_of_dropout_is_no_kind_but_is_told_apart():
    def on_rank(rank: int, group: LoopbackGroup) -> None:
        for seed in range(3):
            attend(group, rank, dropout_p=0.5, dropout_seed=seed)
        assert group._num_gathers == 2
        attend(group, rank, dropout_p=0.5, dropout_seed=7 + rank)

    first, second = outcomes(on_rank)
    assert first == second and "dropout_seed 7" in first and "dropout_seed 8" in first


def test_a_cache_among_calls_of_attention_is_found():
    def on_rank(rank: int, group: LoopbackGroup) -> None:
        cache = tw.KVCache(8, num_kv_heads=1, head_dim=4, group=group)
        x = torch.ones(1, 1, 1, 4)
        cache.decode(x, x, x)
        attend(group, rank)
        gathers = group._num_gathers
        cache.decode(x, x, x)
        assert group._num_gathers == gathers  # lengths are no kind
        attend(group, rank) if rank else cache.decode(x, x, x)

    first, second = outcomes(on_rank)
    assert first == second and "call decode" in first and "pass forward" in first


def test_other_ways_to_validate_are_refused():
    with pytest.raises(ValueError, match=r"validate \('once'\) must be 'always', 'first' or"):
        tw.loopback(2, lambda rank, group: attend(group, rank, validate="once"))

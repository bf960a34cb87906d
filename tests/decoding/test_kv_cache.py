"""KVCache: sequences of different length, sharded; exact, level, and all ranks fail alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from processes.launcher import run_processes
from support.thinned import thinned
from torch import Tensor
from torch.nn import functional as F

import tilewise as tw
from tilewise.decoding.chunk import Chunk

HEADS, KV_HEADS, WIDTH, TOKENS = 6, 2, 4, 40
FAR = tw.Window(4, 0) | tw.Slices([((0, TOKENS), (0, 3), "full")]) & tw.Causal()
PER_HEAD = tw.PerHead([tw.Causal(), tw.Window(5, 0)])
PLANS = {
    2: (tw.ring(2), tw.ulysses(2)),
    3: (tw.ring(3, moves="q"), tw.all_gather(3)),
    4: (tw.mesh(4, q_tile=2), tw.ulysses(2, inner=tw.ring(2)), tw.ring(4)),
}


QKV = tuple[Tensor, Tensor, Tensor]


def draw(batch: int, dtype: torch.dtype = torch.float64) -> QKV:
    make = torch.Generator().manual_seed(batch)
    options = {"generator": make, "dtype": torch.float64}
    q = torch.randn(batch, TOKENS, HEADS, WIDTH, **options)
    k, v = torch.randn(2, batch, TOKENS, KV_HEADS, WIDTH, **options)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def each(x: QKV, pick: Callable[[Tensor], Tensor]) -> QKV:
    q, k, v = map(pick, x)
    return q, k, v


def new_cache(group: Any, batch: int, **options: Any) -> tw.KVCache:
    given = {"num_kv_heads": KV_HEADS, "head_dim": WIDTH, "dtype": torch.float64, **options}
    return tw.KVCache(TOKENS, batch=batch, group=group, **given)


def dense(x: QKV, b: int, rows: range, mask: tw.Mask) -> Tensor:
    """out of some rows of one sequence, which has no tokens after them."""
    q, k, v = (t[b].transpose(0, 1) for t in x)
    allowed = torch.as_tensor(mask.dense(rows, range(rows.stop)))
    if allowed.ndim == 3:
        allowed = allowed.repeat_interleave(HEADS // KV_HEADS, 0)
    keys = [t[:, : rows.stop] for t in (k, v)]
    return F.scaled_dot_product_attention(
        q[:, rows], *keys, attn_mask=allowed, enable_gqa=True
    ).transpose(0, 1)


def prefill(cache: tw.KVCache, x: QKV, counts: list[int], **how: Any) -> float:
    """The largest error of a chunk's rows on this rank."""
    chunk, rank = cache.chunk(counts), cache.shape.rank
    places = [range(a, b) for a, b in zip(chunk.starts, chunk.ends, strict=True)]
    packed = (torch.cat([t[b, rows] for b, rows in enumerate(places)]) for t in x)
    q, k, v = (chunk.layout.shard(t, rank) for t in packed)
    out = cache.prefill(q, k, v, chunk, **how)
    want = torch.cat([dense(x, b, rows, how["mask"]) for b, rows in enumerate(places) if rows])
    return error(out, chunk.layout.shard(want, rank))


def decode(cache: tw.KVCache, x: QKV, num_tokens: int, mask: tw.Mask) -> tuple[Tensor, float]:
    rows = [range(length, length + num_tokens) for length in cache.lengths]
    new = (torch.stack([t[b, r] for b, r in enumerate(rows)]) for t in x)
    out = cache.decode(*new, mask=mask)
    return out, error(out, torch.stack([dense(x, b, r, mask) for b, r in enumerate(rows)]))


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max()) if got.numel() else 0.0


@pytest.mark.parametrize(
    ("n", "mask"),
    thinned(product((1, 2, 3, 4), (tw.Causal(), tw.Window(7, 0), FAR, PER_HEAD)), 5),
    ids=str,
)
def test_chunks_and_then_tokens_are_dense_attention(n: int, mask: tw.Mask):
    """Three sequences of different length; the last has a single token until decoding."""
    x = draw(3)

    def on_rank(rank: int, group: Any) -> float:
        worst = 0.0
        for plan in PLANS.get(n, (tw.ring(1),)):
            cache = new_cache(group, 3)
            for counts in ([9, 5, 1], [9, 2, 0], [5, 0, 0]):
                worst = max(worst, prefill(cache, x, counts, plan=plan, mask=mask))
            for num_tokens in (1, 1, 1, 4, 1):
                worst = max(worst, decode(cache, x, num_tokens, mask)[1])
            assert cache.lengths == (31, 15, 9)
        return worst

    assert max(tw.loopback(n, on_rank)) < 1e-12


@pytest.mark.parametrize("num_sinks", [1, 3])
def test_sinks_softcap_and_another_width_of_values_in_every_call(num_sinks: int):
    x, sink = draw(1), torch.linspace(-1, 1, HEADS, dtype=torch.float64)
    # as many sinks a head as act like one
    parts = (sink - math.log(num_sinks)).expand(num_sinks, -1)
    given = parts if num_sinks > 1 else sink
    q, k, v = (t[:, :9] for t in x)
    v = torch.cat([v, v.flip(-1)], -1)
    keys, values = (t.repeat_interleave(HEADS // KV_HEADS, 2).transpose(1, 2) for t in (k, v))
    scores = q.transpose(1, 2) @ keys.transpose(-1, -2) * WIDTH**-0.5
    scores = 1.5 * torch.tanh(scores / 1.5)
    scores = scores.masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -torch.inf)
    whole = torch.cat([scores, sink[:, None, None].expand(1, HEADS, 9, 1)], -1)
    want = (whole.softmax(-1)[..., :9] @ values).transpose(1, 2)

    def on_rank(rank: int, group: Any) -> float:
        cache = new_cache(group, 1, softcap=1.5, v_head_dim=2 * WIDTH)
        chunk = cache.chunk([5])
        first = (chunk.layout.shard(t[0, :5], rank) for t in (q, k, v))
        out = cache.prefill(*first, chunk, plan=tw.ring(3), sink=given)
        worst = error(out, chunk.layout.shard(want[0, :5], rank))
        out = cache.decode(q[:, 5:8], k[:, 5:8], v[:, 5:8], sink=given)
        worst = max(worst, error(out, want[:, 5:8]))
        cache.append(k[:, 8:], v[:, 8:])
        return max(worst, error(cache.attention(q[:, 8:], sink=given), want[:, 8:]))

    assert max(tw.loopback(3, on_rank)) < 1e-12


def test_every_rank_gets_the_same_bits():
    x = draw(2, torch.bfloat16)

    def on_rank(rank: int, group: Any) -> list[Tensor]:
        cache = new_cache(group, 2, dtype=torch.bfloat16)
        return [decode(cache, x, 1, tw.Causal())[0] for _ in range(6)]

    first, *others = tw.loopback(4, on_rank)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    want = torch.stack([dense(draw(2), b, range(5, 6), tw.Causal()) for b in range(2)])
    assert error(first[-1].double(), want) < 0.05


def test_rows_are_level_and_their_memory_is_taken_once():
    x, counts = draw(3), [11, 2, 7]

    def on_rank(rank: int, group: Any) -> tuple[int, bool]:
        cache = new_cache(group, 3)
        where = cache._storage.k.data_ptr()
        cache.append(x[1][:, :11], x[2][:, :11], counts=counts)
        k, v = cache.stored()
        chunk = Chunk((0, 0, 0), (11, 2, 7), group.world_size)
        for got, whole in ((k, x[1]), (v, x[2])):
            packed = torch.cat([whole[b, :count] for b, count in enumerate(counts)])
            assert torch.equal(got, chunk.layout.shard(packed, rank))
        return len(k), cache._storage.k.data_ptr() == where

    rows, same = zip(*tw.loopback(4, on_rank), strict=True)
    assert all(same) and sum(rows) == 20 and max(rows) - min(rows) <= 3


def test_a_truncated_sequence_makes_room_for_another():
    x = draw(2)

    def on_rank(rank: int, group: Any) -> float:
        cache = new_cache(group, 2)
        cache.append(x[1][:, 7:21], x[2][:, 7:21])
        cache.truncate([0, 0])
        return max(decode(cache, x, 5, tw.Causal())[1], decode(cache, x, 1, tw.Causal())[1])

    assert max(tw.loopback(3, on_rank)) < 1e-12


def test_a_refused_chunk_leaves_the_cache_as_it_was():
    x = draw(1)

    def on_rank(rank: int, group: Any) -> float:
        cache = new_cache(group, 1)
        prefill(cache, x, [5], plan=tw.ring(2), mask=tw.Causal())
        for plan, says in ((tw.ring(3), "3 ranks"), (tw.tree(2), "has its queries on every rank")):
            with pytest.raises(ValueError, match=says):
                prefill(cache, x, [6], plan=plan, mask=tw.Causal())
        assert cache.lengths == (5,)
        return prefill(cache, x, [6], plan=tw.ring(2), mask=tw.Causal())

    assert max(tw.loopback(2, on_rank)) < 1e-12


def on_one_rank(bad: Callable[[tw.KVCache, QKV], object]) -> list[str]:
    """What each rank raises if rank 1 makes this call and the others decode a token."""
    x = each(draw(2), lambda t: t[:, :1])

    def on_rank(rank: int, group: Any) -> str:
        cache = new_cache(group, 2)
        cache.append(x[1].expand(-1, TOKENS - 1, -1, -1), x[2].expand(-1, TOKENS - 1, -1, -1))
        with pytest.raises(ValueError) as raised:
            bad(cache, x) if rank == 1 else cache.decode(*x)
        assert cache.lengths == (TOKENS - 1,) * 2
        return str(raised.value)

    return tw.loopback(3, on_rank)


RING = tw.ring(3)
Bad = Callable[[tw.KVCache, QKV], object]
WRONG: dict[str, tuple[Bad, str]] = {
    "overflow": (
        lambda c, x: c.decode(*each(x, lambda t: t.expand(-1, 3, -1, -1))),
        r"rank 1: sequence 0 has 39 tokens and gets 3 more, 42 in all, but the cache holds 40 of "
        r"each; make it with num_tokens=42 or more",
    ),
    "shape": (lambda c, x: c.decode(x[0], x[1][:1], x[2][:1]), r"k is \(1, 1, 2, 4\), but the"),
    "heads": (lambda c, x: c.decode(x[0][:, :, :5], *x[1:]), r"num_heads \(5\) must be a multiple"),
    "dtype": (lambda c, x: c.decode(x[0].float(), *x[1:]), "q is torch.float32, but the cache"),
    "mask": (lambda c, x: c.decode(*x, mask=tw.Document([0, 7])), "ends at 7, but there are 40"),
    "other mask": (lambda c, x: c.decode(*x, mask=tw.Window(3, 0)), "disagree on mask"),
    "counts": (lambda c, x: c.decode(*x, counts=[1]), r"counts \(1,\) must be one number"),
    "other counts": (lambda c, x: c.decode(*x, counts=[1, 0]), "disagree on counts"),
    "past the call": (lambda c, x: c.decode(*x, counts=[1, 2]), "reach past the 1 tokens"),
    "other call": (lambda c, x: c.append(*x[1:]), "disagree on call: rank 0 has decode"),
    "too few": (
        lambda c, x: c.attention(x[0].expand(-1, TOKENS, -1, -1)),
        "q has 40 tokens of sequence 0, but 39 are cached",
    ),
    "gradient": (lambda c, x: c.decode(x[0].clone().requires_grad_(), *x[1:]), "no_grad"),
    "truncate": (lambda c, x: c.truncate([50, 0]), "sequence 0 has 39 tokens, fewer than 50"),
    "chunk": (
        lambda c, x: c.prefill(*each(x, lambda t: t[0]), Chunk((0, 0), (1, 1), 3), plan=RING),
        r"the chunk begins at \(0, 0\) for 3 ranks, but the cache has \(39, 39\)",
    ),
    "chunk overflow": (
        lambda c, x: c.prefill(
            *each(x, lambda t: t[:, 0].repeat(3, 1, 1)), c.chunk([9, 9]), plan=RING
        ),
        r"rank 1: sequence 0 has 39 tokens and gets 9 more, 48 in all, but the cache holds 40",
    ),
    "rows": (  # token 39 is rank 0's
        lambda c, x: c.prefill(*each(x, lambda t: t[:, 0]), c.chunk([1, 1]), plan=RING),
        r"q is \(2, 6, 4\), but rank 1's rows of the chunk are \[0, 6, 4\]",
    ),
    "nothing": (
        lambda c, x: c.prefill(*each(x, lambda t: t[0, :0]), c.chunk([0, 0]), plan=RING),
        "the chunk has 0 tokens of 2 sequences",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_on_one_rank_is_raised_on_all(wrong: str):
    bad, says = WRONG[wrong]
    with_this = on_one_rank(bad)
    assert len(set(with_this)) == 1
    with pytest.raises(ValueError, match=says):
        raise ValueError(with_this[0])


def test_ranks_make_the_same_cache_or_none():
    def on_rank(rank: int, group: Any, **other: Any) -> str:
        with pytest.raises(ValueError) as raised:
            new_cache(group, 2, **(other if rank == 2 else {}))
        return str(raised.value)

    def with_other(**other: Any) -> set[str]:
        return set(tw.loopback(3, lambda rank, group: on_rank(rank, group, **other)))

    assert with_other(num_kv_heads=0) == {"rank 2: num_kv_heads (0) must be at least 1"}
    (sizes,) = with_other(num_kv_heads=3)
    assert "disagree on sizes: rank 0 has (40, 2, 2, 4), rank 2 has (40, 2, 3, 4)" in sizes
    (scale,) = with_other(softmax_scale=1.0)
    assert "disagree on softmax_scale" in scale


def over_processes(rank: int) -> tuple[float, str]:
    x, cache = draw(2), new_cache(None, 2)
    worst = prefill(cache, x, [7, 3], plan=tw.ring(3), mask=tw.Causal())
    for num_tokens in (1, 2, 1):
        worst = max(worst, decode(cache, x, num_tokens, tw.Window(5, 0))[1])
    with pytest.raises(ValueError) as raised:
        tokens = 1 if rank else TOKENS
        cache.append(*(t[:, :tokens] for t in x[1:]))
    return worst, str(raised.value)


def test_it_is_the_same_over_gloo():
    errors, messages = zip(*run_processes(3, over_processes), strict=True)
    assert max(errors) < 1e-12
    assert set(messages) == {messages[0]} and "rank 0: sequence 0 has 11 tokens" in messages[0]


@pytest.mark.parametrize("n", (1, 2))
def test_tokens_may_be_padded_past_the_capacity(n: int):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 5, 2, 8)

    def on_rank(rank: int, group: Any) -> tuple[Tensor, ...]:
        full, padded = (tw.KVCache(3, num_kv_heads=2, head_dim=8, group=group) for _ in range(2))
        wanted = full.decode(q[:, :3], k[:, :3], v[:, :3])
        return wanted, padded.decode(q, k, v, counts=[3]), padded.attention(q, counts=[3])

    for wanted, decoded, asked in tw.loopback(n, on_rank):
        for out in (decoded, asked):
            assert torch.equal(out[:, :3], wanted) and not out[:, 3:].any()

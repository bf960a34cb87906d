"""Scripts of appending, decoding, prefilling and truncating: always dense attention so far."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from conformance.oracle import Changes, draw
from conformance.oracle import dense as dense_results
from hypothesis import given
from hypothesis import strategies as st
from support.drawn_calls import groups_fit, plans_of
from support.drawn_masks import masks
from support.fuzzing import examples
from torch import Tensor

import tilewise as tw

MOST_TOKENS, MOST_A_CALL = 30, 9
STEPS = ("append", "decode", "attend", "prefill", "truncate")


class Step(NamedTuple):
    """One call of a script.

    Attributes:
        counts: tokens of each sequence; of truncate those that are left.
        padding: rows of each sequence that are none of its tokens.
    """

    call: str
    counts: tuple[int, ...]
    padding: int
    mask: tw.masks.Mask
    plan: tw.Plan | None


class Script(NamedTuple):
    """A cache and what is done with it."""

    world_size: int
    batch: int
    heads: tuple[int, int]
    widths: tuple[int, int]
    dtype: torch.dtype
    softcap: float | None
    has_sink: bool
    wire_dtype: str | None
    steps: list[Step]


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    world_size, batch = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    num_kv_heads = draw(st.integers(1, 3))
    heads = num_kv_heads * draw(st.integers(1, 3)), num_kv_heads
    lengths, steps = [0] * batch, []
    plans = [p for one in plans_of(world_size, False) for p in one if groups_fit(p, *heads)]
    for _ in range(draw(st.integers(1, 7))):
        call = draw(st.sampled_from(STEPS))
        mask = draw(st.just(tw.Causal()) | masks(MOST_TOKENS))
        if call in ("truncate", "attend"):
            least = 0 if call == "truncate" else 1
            most = [n if call == "truncate" else min(n, MOST_A_CALL) for n in lengths]
            counts = tuple(draw(st.integers(min(least, n), n)) for n in most)
            lengths = [*counts] if call == "truncate" else lengths
        else:
            rooms = [min(MOST_TOKENS - n, MOST_A_CALL) for n in lengths]
            counts = tuple(draw(st.integers(0, room)) for room in rooms)
            lengths = [a + b for a, b in zip(lengths, counts, strict=True)]
        if call == "prefill" and not any(counts):
            continue
        plan = draw(st.sampled_from(plans)) if call == "prefill" else None
        steps.append(Step(call, counts, draw(st.integers(0, 2)), mask, plan))
    widths = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    dtype = draw(st.sampled_from((torch.float64, torch.float64, torch.float32)))
    softcap = draw(st.none() | st.floats(0.5, 9.0))
    wire_dtype = draw(st.sampled_from((None, "float64")))
    sinks = draw(st.booleans())
    return Script(world_size, batch, heads, widths, dtype, softcap, sinks, wire_dtype, steps)


@examples(1.5)
@given(script=scripts(), seed=st.integers(0, 2**32))
def test_any_script_is_dense_attention(script: Script, seed: int):
    worst = max(tw.loopback(script.world_size, lambda _, group: run(script, seed, group)))
    assert worst < (1e-12 if script.dtype is torch.float64 else 1e-4)


def run(script: Script, seed: int, group: Any) -> float:
    """The largest error of a rank's results. What a sequence holds is drawn anew in each step."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(script.dtype)

    sink = torch.linspace(-1, 1, script.heads[0], dtype=script.dtype) if script.has_sink else None
    cache = tw.KVCache(
        MOST_TOKENS,
        num_kv_heads=script.heads[1],
        head_dim=script.widths[0],
        v_head_dim=script.widths[1],
        batch=script.batch,
        dtype=script.dtype,
        softcap=script.softcap,
        wire_dtype=script.wire_dtype,
        group=group,
    )
    held = [
        [normal(0, script.heads[1], width) for width in script.widths] for _ in range(script.batch)
    ]
    worst, rank = 0.0, group.rank
    for step in script.steps:
        mask, counts = step.mask, step.counts
        if step.call == "truncate":
            cache.truncate(counts)
            held = [[x[:n] for x in pair] for pair, n in zip(held, counts, strict=True)]
            continue
        most = max(*counts, 0, 0) + step.padding
        rows = script.batch, max(most, 1)
        q = normal(*rows, script.heads[0], script.widths[0])
        k, v = (normal(*rows, script.heads[1], width) for width in script.widths)
        if step.call != "attend":
            held = [
                [torch.cat([old, new[b, :n]]) for old, new in zip(pair, (k, v), strict=True)]
                for b, (pair, n) in enumerate(zip(held, counts, strict=True))
            ]
        if step.call == "append":
            cache.append(k, v, counts=counts)
            continue
        wants = [
            whole(q[b, :n], *held[b], mask, sink, script.softcap) for b, n in enumerate(counts)
        ]
        if step.call == "prefill":
            assert step.plan is not None
            chunk = cache.chunk(counts)
            new = (torch.cat([x[b, :n] for b, n in enumerate(counts)]) for x in (q, k, v))
            mine = (chunk.layout.shard(x, rank) for x in new)
            got = cache.prefill(*mine, chunk, plan=step.plan, mask=mask, sink=sink)
            worst = max(worst, error(got, chunk.layout.shard(torch.cat(wants), rank)))
            continue
        asked = {"mask": mask, "counts": counts, "sink": sink}
        out = (
            cache.decode(q, k, v, **asked) if step.call == "decode" else cache.attention(q, **asked)
        )
        for b, want in enumerate(wants):
            padded = torch.cat([want, want.new_zeros(len(q[b]) - len(want), *want.shape[1:])])
            worst = max(worst, error(out[b], padded))
    assert cache.lengths == tuple(len(k) for k, _ in held)
    return worst


def whole(
    q: Tensor, k: Tensor, v: Tensor, mask: tw.masks.Mask, sink: Tensor | None, softcap: Any
) -> Tensor:
    """out of a sequence's last queries, in fp64."""
    x = draw(tuple(q.shape), tuple(k.shape), 0, v.shape[-1])
    x = x._replace(q=q.double(), k=k.double(), v=v.double())
    positions = torch.arange(len(k) - len(q), len(k))
    changes = Changes(None if sink is None else sink.double(), softcap)
    return dense_results(x, mask, positions, changes=changes).out


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max()) if got.numel() else 0.0

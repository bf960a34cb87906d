"""Steps from any stream of documents: complete, level in tokens, exact, and the same again."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.documents_apart import gradients_of_documents
from support.fuzzing import examples

import tilewise as tw
from tilewise.batches.schedule import BatchStep

SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4}


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    """Lengths of documents and what they are scheduled with; some fill a step alone."""
    world_size, tokens = draw(st.integers(1, 6)), draw(st.integers(1, 16))
    whole = world_size * tokens
    short = st.integers(1, max(1, whole // 4))
    lengths = draw(st.lists(short | st.integers(1, whole), min_size=1, max_size=40))
    options = {
        "world_size": world_size,
        "tokens_per_rank": tokens,
        "lookahead": draw(st.none() | st.integers(1, 20)),
        "seed": draw(st.integers(0, 2**32 - 1)),
        **SIZES,
    }
    return lengths, options


def described(steps: Any) -> list[tuple]:
    return [(step.index, step.documents, step.cu_seqlens) for step in steps]


@examples(3)
@given(streams(), st.data())
def test_every_document_is_in_one_step_and_steps_go_on_where_they_stopped(
    stream: tuple[list[int], dict[str, Any]], data: st.DataObject
):
    lengths, options = stream
    steps = [*tw.schedule(lengths, **options)]
    assert sorted(d for step in steps for d in step.documents) == [*range(len(lengths))]
    for step in steps:
        sizes = np.diff(step.cu_seqlens).tolist()
        assert sizes[: len(step.documents)] == [lengths[d] for d in step.documents]
        assert len(sizes) - len(step.documents) == (step.padding > 0)
        assert step.num_tokens == options["world_size"] * options["tokens_per_rank"] == sum(sizes)
    first, done = tw.schedule(lengths, **options), data.draw(st.integers(0, len(steps)), "done")
    begun = described(islice(first, done))
    again = tw.schedule(iter(lengths), **options)
    again.load_state_dict(first.state_dict())
    assert begun + described(again) == described(steps)
    elsewhere = {**options, "lookahead": data.draw(st.none() | st.integers(1, 20))}
    elsewhere["world_size"] = data.draw(st.integers(options["world_size"], 8))
    again = tw.schedule(lengths, **elsewhere)
    again.load_state_dict(first.state_dict())
    given = [d for step in (*steps[:done], *again) for d in step.documents]
    assert sorted(given) == [*range(len(lengths))]


@examples(0.5)
@given(streams(), st.integers(0, 2**32), st.booleans())
def test_a_step_is_its_documents_apart(
    stream: tuple[list[int], dict[str, Any]], seed: int, prepared: bool
):
    lengths, options = stream
    step = next(iter(tw.schedule(lengths, **options)))
    assert set(step.layout.sizes) == {options["tokens_per_rank"]}
    generator = torch.Generator().manual_seed(seed)
    whole = [
        torch.randn(step.num_tokens, heads, 4, dtype=torch.float64, generator=generator)
        for heads in (4, 2, 2, 4)
    ]
    wanted = gradients_of_documents(whole, step.cu_seqlens)
    results = tw.loopback(
        options["world_size"], lambda rank, group: gradients(step, whole, rank, group, prepared)
    )
    for parts, want in zip(zip(*results, strict=True), wanted, strict=True):
        got = step.layout.unshard(parts)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def gradients(
    step: BatchStep, whole: list[torch.Tensor], rank: int, group: Any, prepared: bool
) -> list[torch.Tensor]:
    """Of a rank's rows, by the step's plan or by what it prepares for the rank."""
    q, k, v, weights = (step.layout.shard(x, rank) for x in whole)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    if prepared:
        call = {"plan": step.prepare(rank, dtype="float64")}
    else:
        call = {"plan": step.plan, "layout": step.layout, "mask": step.mask}
    (tw.attention(*inputs, **call, group=group) * weights).sum().backward()
    return [x.grad for x in inputs if x.grad is not None]

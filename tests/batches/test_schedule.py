"""Steps from a stream of documents: complete, full, level, the same again, right in gradients."""

from itertools import islice

import numpy as np
import pytest
import torch
from support.documents_apart import gradients_of_documents
from torch.utils.data import DataLoader

import tilewise as tw
from tilewise.batches.schedule import BatchStep, StepStream

HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}


def drawn_lengths(seed: int, count: int, longest: int) -> list[int]:
    """Most are short, a few as long as a step."""
    rng = np.random.default_rng(seed)
    return [int(x) for x in np.clip(np.exp(rng.normal(3, 1.5, count)), 1, longest)]


def scheduled(lengths, world_size=4, tokens_per_rank=64, **options) -> StepStream:
    return tw.schedule(
        lengths, world_size=world_size, tokens_per_rank=tokens_per_rank, **HEADS, **options
    )


def described(steps) -> list[tuple]:
    return [(step.index, step.documents, step.cu_seqlens) for step in steps]


@pytest.mark.parametrize("lookahead", [None, 1, 20])
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_every_document_is_in_one_step_with_its_length(world_size, lookahead):
    lengths = drawn_lengths(0, 150, 64 * world_size)
    steps = list(scheduled(lengths, world_size, lookahead=lookahead))
    assert sorted(d for step in steps for d in step.documents) == list(range(len(lengths)))
    for step in steps:
        sizes = np.diff(step.cu_seqlens).tolist()
        assert sizes[: len(step.documents)] == [lengths[d] for d in step.documents]
        assert len(sizes) - len(step.documents) == (step.padding > 0)
        assert step.num_tokens == 64 * world_size == sum(sizes)


def test_the_oldest_document_goes_first_and_little_is_padded():
    lengths = drawn_lengths(1, 600, 256)
    waiting, padding = set(range(len(lengths))), []
    for step in scheduled(lengths):
        assert min(waiting) in step.documents
        waiting -= set(step.documents)
        padding.append(step.padding)
    assert sum(padding[:-4]) <= 0.02 * 256 * len(padding)


def test_ranks_have_equal_tokens_and_level_work():
    lengths = drawn_lengths(2, 400, 8 * 1024)
    for step in islice(scheduled(lengths, 8, 1024), 3):
        assert set(step.layout.sizes) == {1024}
        every = (0, step.num_tokens)
        areas = [
            sum(step.mask.area(piece, every) for piece in step.layout.ranges(rank))
            for rank in range(8)
        ]
        assert max(areas) <= 1.03 * np.mean(areas)
        simulated = tw.simulate(step.plan, step.workload, tw.Machine.preset("h100x8"))
        assert step.seconds == pytest.approx(simulated.seconds)


def test_stop_and_resume_gives_the_same_steps():
    lengths = drawn_lengths(3, 200, 256)
    whole = described(scheduled(lengths, seed=5))
    first = scheduled(lengths, seed=5)
    begun = described(islice(first, 4))
    second = scheduled(lengths, seed=5)
    second.load_state_dict(first.state_dict())
    rest = described(second)
    assert begun + rest == whole
    assert second.state_dict() == {"steps": len(whole)}


def made_in_worker(step: BatchStep) -> tuple[int, str, tuple[int, ...]]:
    return step.index, step.plan.fingerprint, step.documents


def test_workers_of_a_data_loader_plan_ahead_in_order():
    lengths = drawn_lengths(4, 120, 256)
    loader = DataLoader(
        scheduled(lengths), batch_size=None, num_workers=2, collate_fn=made_in_worker
    )
    wanted = [made_in_worker(step) for step in scheduled(lengths)]
    assert list(loader) == wanted


def test_a_worker_that_fails_raises_in_the_main_process():
    loader = DataLoader(scheduled([5, 7, 0]), batch_size=None, num_workers=1, collate_fn=id)
    with pytest.raises(ValueError, match="length of document 2"):
        list(loader)


@pytest.mark.parametrize("world_size", [2, 4, 6])
def test_gradients_of_a_step_are_those_of_its_documents_apart(world_size):
    torch.manual_seed(0)
    lengths = drawn_lengths(world_size, 12, 16 * world_size)
    step = next(iter(scheduled(lengths, world_size, 16)))
    whole = [torch.randn(step.num_tokens, heads, 8, dtype=torch.float64) for heads in (4, 2, 2, 4)]
    wanted = gradients_of_documents(whole, step.cu_seqlens)

    def run(rank, group):
        q, k, v, weights = (step.layout.shard(x, rank) for x in whole)
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = tw.attention(*inputs, plan=step.plan, layout=step.layout, mask=step.mask, group=group)
        (out * weights).sum().backward()
        return [x.grad for x in inputs]

    results = tw.loopback(world_size, run)
    for parts, want in zip(zip(*results, strict=True), wanted, strict=True):
        torch.testing.assert_close(step.layout.unshard(parts), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([], {}, "0 documents"),
        ([5, 0], {}, "length of document 1"),
        ([5, 2.5], {}, "length of document 1"),
        ([5, 257], {}, "document 1 has 257 tokens, but a step holds 256"),
        ([5], {"lookahead": 0}, "lookahead"),
        ([5], {"world_size": 0}, "world_size"),
        ([5], {"tokens_per_rank": True}, "tokens_per_rank"),
        ([5], {"machine": "h100x8"}, "machine"),
    ],
)
def test_what_is_no_stream_of_documents_is_refused(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        list(scheduled(lengths, **options))

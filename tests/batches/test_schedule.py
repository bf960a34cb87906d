"""Steps from a stream of documents: complete, full, level, the same again, right in gradients."""

import json
from itertools import islice

import numpy as np
import pytest
import torch
from support.documents_apart import gradients_of_documents
from torch.utils.data import DataLoader, get_worker_info

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
    assert second.state_dict()["documents_read"] == len(lengths)


@pytest.mark.parametrize("lookahead", [None, 1, 20])
@pytest.mark.parametrize("after", [1, 4])
def test_a_schedule_goes_on_in_any_other_world(after, lookahead):
    """Every document once, whatever the ranks, tokens, lookahead and seed of the second run are."""
    lengths = drawn_lengths(5, 150, 64)
    for world_size in range(1, 9):
        first = scheduled(lengths, lookahead=lookahead)
        begun = list(islice(first, after))
        for tokens_per_rank in (64, 96):
            second = scheduled(iter(lengths), world_size, tokens_per_rank, seed=9)
            second.load_state_dict(first.state_dict())
            rest = list(second)
            found = [d for step in (*begun, *rest) for d in step.documents]
            assert sorted(found) == list(range(len(lengths)))
            assert [step.index for step in rest] == list(range(after, after + len(rest)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lengths: [lengths[0] + 1, *lengths[1:]], "lengths has other lengths"),
        (lambda lengths: lengths[1:], "lengths has other lengths"),
        (lambda lengths: lengths[:9], r"after \d+ documents were read, but lengths has 9"),
        (lambda lengths: [*lengths[:9], 2.5, *lengths[10:]], "length of document 9"),
    ],
)
def test_a_state_of_other_lengths_is_refused(change, message):
    lengths = drawn_lengths(6, 150, 64)
    first = scheduled(lengths)
    next(iter(first))
    second = scheduled(change(lengths))
    second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=message):
        next(iter(second))
    longer = scheduled([*lengths, 5, 7])  # whose first documents are the same
    longer.load_state_dict(first.state_dict())
    assert 151 in {d for step in longer for d in step.documents}


def test_a_document_that_waits_must_fit_the_steps_of_the_world_that_goes_on():
    lengths = [60, 60, 250]
    first = scheduled(lengths)
    assert next(iter(first)).documents == (0, 1)
    second = scheduled(lengths, world_size=2)
    second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="document 2 has 250 tokens, but a step holds 128"):
        next(iter(second))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": -1}, "steps"),
        ({"documents_read": 0}, "documents_read"),
        ({"waiting": [3, 2]}, "waiting"),
        ({"waiting": [10**6]}, "waiting"),
        ({"lengths": 5}, "lengths"),
        (None, "lacks documents_read, waiting, lengths"),
    ],
)
def test_what_is_no_state_is_refused(change, message):
    steps = scheduled(drawn_lengths(7, 50, 64))
    next(iter(steps))
    state = {"steps": 1} if change is None else {**steps.state_dict(), **change}
    with pytest.raises(ValueError, match=message):
        steps.load_state_dict(state)


def made_in_worker(step: BatchStep) -> tuple[int, str, tuple[int, ...], dict]:
    return step.index, step.plan.fingerprint, step.documents, step.state


def test_workers_of_a_data_loader_plan_ahead_in_order_and_go_on():
    lengths = drawn_lengths(4, 120, 256)
    wanted = [made_in_worker(step) for step in scheduled(lengths)]
    steps, done = scheduled(lengths), 0
    for _ in range(2):  # the second time after the third step
        loader = DataLoader(steps, batch_size=None, num_workers=2, collate_fn=made_in_worker)
        came = list(loader)
        assert came == wanted[done:]
        done = 3
        steps.load_state_dict(json.loads(json.dumps(came[2][-1])))


def state_in_worker(step: BatchStep) -> dict:
    worker = get_worker_info()
    assert worker is not None
    return worker.dataset.state_dict()


def test_one_of_several_workers_has_no_state():
    options = {"batch_size": None, "collate_fn": state_in_worker}
    assert next(iter(DataLoader(scheduled([5]), num_workers=1, **options)))["steps"] == 1
    with pytest.raises(ValueError, match="worker 0 of 2"):
        next(iter(DataLoader(scheduled([5]), num_workers=2, **options)))


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

"""Passes bound to buffers: same bits, no allocation once bound, no buffer in two hands at once."""

import threading
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.bound_passes import Case, Counting, on_ranks, uncounted
from support.thinned import thinned

import tilewise as tw
from tilewise.execution import allocator, partials
from tilewise.execution.memory_plan import BufferSpec, MemoryPlan, WorkspacePool, places
from tilewise.kernels.protocol import deliver

MASKS = {
    "causal": tw.Causal(),
    "documents": tw.Document([0, 3, 30, 41, 61]) & tw.Causal(),
    "by head": tw.PerHead([tw.Causal(), tw.Full()]),
}
PLANS = (
    tw.ring(4),
    tw.ring(4, moves="q"),
    tw.all_gather(4),
    tw.double_ring(2, 2),
    tw.balanced_ring(4),
    tw.attention2d(2, 2),
    tw.mesh(4, q_tile=2),
    tw.mesh(4, q_tile=4, schedule="gather"),
    tw.ulysses(2, inner=tw.ring(2)),
)


@pytest.fixture
def bound(monkeypatch):
    monkeypatch.setattr(allocator, "BOUND_DEVICES", ("cpu", "cuda"))


@pytest.mark.parametrize(
    ("plan", "mask"), thinned(product(PLANS, ("documents", "by head")), 3), ids=str
)
def test_bound_passes_give_the_same_bits(plan, mask, monkeypatch):
    def often(case: Case) -> list[tuple[torch.Tensor, ...]]:
        # The first is neither recorded nor played, the second is recorded.
        return [case.both_passes() for _ in range(4)]

    want = on_ranks(plan, tw.zigzag(61, 4), MASKS[mask], often)
    monkeypatch.setattr(allocator, "BOUND_DEVICES", ("cpu",))
    got = on_ranks(plan, tw.zigzag(61, 4), MASKS[mask], often)
    for ours, theirs in zip(got, want, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize(
    ("mask", "dtype"), [("causal", torch.bfloat16), ("by head", torch.float32)], ids=str
)
@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_a_bound_call_allocates_its_results_and_nothing_else(plan, mask, dtype, bound, monkeypatch):
    """Nor does it ask the device for anything."""
    active = threading.local()  # ranks take turns within a pass

    def merging(*tensors: torch.Tensor) -> None:
        counting = getattr(active, "counting", None)
        (uncounted(deliver, counting) if counting else deliver)(*tensors)

    def counts(case: Case) -> Counting:
        for _ in range(2):
            case.both_passes()
        active.counting = counting = Counting()
        case.counted(counting)
        return counting

    monkeypatch.setattr(partials, "deliver", merging)
    for counting in on_ranks(
        plan, tw.zigzag(61, 4), MASKS[mask], counts, dtype=dtype, save="replay"
    ):
        assert counting.allocated == {"new_empty": len(("out", "lse", "dq", "dk", "dv"))}
        assert not counting.asked


def test_counting_sees_what_it_is_to_see():
    with Counting() as counting:
        x = torch.ones(3)
        x.add_(1).view(3, 1).copy_(x[:, None])
        assert x.sum().item() == 6
    assert counting.allocated == {"ones": 1, "sum": 1}
    assert counting.asked == {"_local_scalar_dense": 1}


def test_results_are_the_callers_own(bound):
    def again(case: Case) -> bool:
        case.both_passes()
        case.both_passes()
        first = case.both_passes()
        before = [x.clone() for x in first]
        case.q.mul_(2.0)
        second = case.both_passes()
        assert all(torch.equal(x, y) for x, y in zip(first, before, strict=True))
        return any(torch.equal(x, y) for x, y in zip(first, second, strict=True))

    assert on_ranks(tw.ring(2), tw.zigzag(32, 2), tw.Causal(), again) == [False] * 2


def test_passes_bound_in_inference_mode_serve_outside_of_it(bound):
    def in_and_out(case: Case) -> bool:
        with torch.inference_mode():
            case.both_passes()
            first = case.both_passes()
        second = case.both_passes()
        return all(torch.equal(x, y) for x, y in zip(first, second, strict=True))

    assert on_ranks(tw.ring(2), tw.zigzag(32, 2), tw.Causal(), in_and_out) == [True] * 2


def test_passes_at_once_never_share_buffers(bound):
    pool, binding = WorkspacePool(), allocator.MemoryPlanCache()
    cpu = torch.device("cpu")
    assert type(binding.allocator(pool, cpu)) is allocator.FreshAllocator  # a mask seen once
    first = binding.allocator(pool, cpu)
    first.take((64,), torch.float32)
    first.end()
    one, two = binding.allocator(pool, cpu), binding.allocator(pool, cpu)
    x, y = one.take((64,), torch.float32).fill_(1.0), two.take((64,), torch.float32).fill_(2.0)
    assert (x == 1.0).all() and (y == 2.0).all()
    two.end()
    three = binding.allocator(pool, cpu)
    assert three.take((64,), torch.float32).data_ptr() == y.data_ptr()
    failed = binding.allocator(pool, cpu)
    del failed  # a pass that raised ends nothing
    one.end()
    three.end()
    assert len(pool.workspaces) == 2


def test_what_was_sent_rests_until_it_has_left():
    pool, binding = WorkspacePool(), allocator.MemoryPlanCache()
    binding.allocator(pool, torch.device("cpu"))
    recorder = binding.allocator(pool, torch.device("cpu"))

    def take() -> torch.Tensor:
        return recorder.take((256,), torch.uint8)

    def send(x: torch.Tensor, handle: int, lane: int) -> None:
        recorder.sent(x)
        recorder.launched(handle, lane)

    a = take()
    send(a, 0, lane=0)
    recorder.give(a)
    b = take()
    send(b, 1, lane=1)
    send(b, 2, lane=1)
    recorder.give(b)
    c = take()  # neither has left: a by nothing, b by its first launch alone
    recorder.left(2)
    take()
    send(c, 3, lane=0)
    take()
    recorder.end()
    assert binding.memory_plan is not None
    at = binding.memory_plan.offsets
    assert len({at[0], at[1], at[2]}) == 3 and at[3] == at[1] and at[4] == at[0]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 20),
            st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 20)), min_size=1, max_size=4),
        ),
        max_size=20,
    )
)
def test_rows_of_one_time_lie_apart(drawn):
    requests = [
        BufferSpec(
            (sum(rows for rows, _ in parts),),
            torch.uint8,
            begin,
            tuple((rows, begin + more) for rows, more in parts),
        )
        for begin, parts in drawn
    ]
    offsets, total = places(requests)
    spans = []
    for number, (request, at) in enumerate(zip(requests, offsets, strict=True)):
        assert at % 256 == 0 and at + request.num_bytes <= total
        for rows, end in request.parts:
            spans.append((number, at, at + rows, request.begin, end))
            at += rows
    for i, (number, start, stop, begin, end) in enumerate(spans):
        for other, first, last, from_, until in spans[:i]:
            together = begin < until and from_ < end and number != other
            empty = start == stop or first == last
            assert not together or stop <= first or last <= start or empty
    assert total <= sum(-(-r.num_bytes // 256) * 256 for r in requests)


def test_parts_of_a_buffer_are_given_back_each_by_itself():
    pool, binding = WorkspacePool(), allocator.MemoryPlanCache()
    binding.allocator(pool, torch.device("cpu"))
    recorder = binding.allocator(pool, torch.device("cpu"))
    arena = recorder.take_parts((12, 256), torch.uint8, (4, 0, 8))
    recorder.give(arena[:4])
    first = recorder.take((4, 256), torch.uint8)
    recorder.sent(arena[6:8])
    recorder.launched(0, 0)
    recorder.give(arena[4:])
    second = recorder.take((8, 256), torch.uint8)
    recorder.left(0)
    third = recorder.take((8, 256), torch.uint8)
    recorder.end()
    assert (
        binding.memory_plan is not None and len({x.data_ptr() for x in (first, second, third)}) == 3
    )
    whole, reused, fresh, last = binding.memory_plan.offsets
    assert reused == whole and last == whole + 4 * 256 and fresh >= whole + 12 * 256


def test_buffers_that_follow_each_other_share_their_place():
    memory_plan = MemoryPlan(
        [BufferSpec((1024,), torch.float32, i, ((1024, i + 2),)) for i in range(50)]
    )
    assert memory_plan.num_bytes == 2 * 4096
    views = memory_plan.views(torch.empty(memory_plan.num_bytes, dtype=torch.uint8))
    assert views[0].data_ptr() == views[2].data_ptr() and views[0].shape == (1024,)

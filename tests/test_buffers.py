"""Passes bound to buffers: same bits, no allocation once bound, no buffer in two hands at once."""

import threading
from collections.abc import Callable

import pytest
import torch
from bound_passes import Case, Counting, on_ranks, uncounted
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tilewise import buffers, work
from tilewise.kernels.merge import merge_into
from tilewise.simulator import simulate_pass
from tilewise.tape import Request, Tape, places
from tilewise.two_passes import forward_pass

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
    monkeypatch.setattr(buffers, "BOUND_DEVICES", ("cpu", "cuda"))


@pytest.mark.parametrize("mask", ["documents", "by head"])
@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_bound_passes_give_the_same_bits(plan, mask, monkeypatch):
    def thrice(case: Case) -> list[tuple[torch.Tensor, ...]]:
        return [case.both_passes() for _ in range(3)]

    want = on_ranks(plan, tw.zigzag(61, 4), MASKS[mask], thrice)
    monkeypatch.setattr(buffers, "BOUND_DEVICES", ("cpu",))
    got = on_ranks(plan, tw.zigzag(61, 4), MASKS[mask], thrice)
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
        (uncounted(merge_into, counting) if counting else merge_into)(*tensors)

    def counts(case: Case) -> Counting:
        case.both_passes()
        active.counting = counting = Counting()
        case.counted(counting)
        return counting

    monkeypatch.setattr(work, "merge_into", merging)
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


@pytest.mark.parametrize(
    "plan", [tw.ring(8), tw.ring(8, moves="q"), tw.double_ring(2, 4)], ids=repr
)
def test_peak_memory_is_the_planners_figure(plan, bound, monkeypatch):
    """As on a GPU, where receives are not posted ahead."""
    heads, rows = (8, 4, 64), 64
    layout = tw.contiguous(plan.world_size * rows, plan.world_size)
    work = tw.Workload(layout.num_tokens, *heads, layout=layout, save="replay")

    def recorded(run: Callable[[Case], object]) -> int:
        """The largest tape that ranks record when they run this."""
        tapes: list[Tape] = []

        def kept(requests: list[Request]) -> Tape:
            tapes.append(Tape(requests))
            return tapes[-1]

        def body(case: Case) -> None:
            monkeypatch.setattr(case.transport, "receives_ahead", 0)
            run(case)

        monkeypatch.setattr(buffers, "Tape", kept)
        on_ranks(plan, layout, tw.Full(), body, heads=heads, dtype=torch.bfloat16)
        assert len(tapes) == plan.world_size
        return max(tape.num_bytes for tape in tapes)

    forward = recorded(lambda c: forward_pass(c.problem, c.transport, c.q, c.k, c.v, keep=True))
    backward = recorded(Case.both_passes)  # forward is recorded already
    inputs = 2 * rows * (heads[0] + 2 * heads[1]) * 64
    saved = rows * heads[0] * (2 * 2 * 64 + 4)  # out, dout and lse; delta is a buffer of the pass
    for which, peak in ((False, forward + inputs), (True, backward + inputs + saved)):
        timeline, _ = simulate_pass(plan, work, tw.Machine.preset("h100x8"), which)
        assert peak == pytest.approx(max(use.peak_bytes for use in timeline.ranks), rel=0.05)


def test_results_are_the_callers_own(bound):
    def twice(case: Case) -> bool:
        first = case.both_passes()
        before = [x.clone() for x in first]
        case.q.mul_(2.0)
        second = case.both_passes()
        assert all(torch.equal(x, y) for x, y in zip(first, before, strict=True))
        return any(torch.equal(x, y) for x, y in zip(first, second, strict=True))

    assert on_ranks(tw.ring(2), tw.zigzag(32, 2), tw.Causal(), twice) == [False] * 2


def test_passes_at_once_never_share_buffers(bound):
    shelf, binding = buffers.Shelf(), buffers.Binding()
    cpu = torch.device("cpu")
    first = binding.lender(shelf, cpu)
    first.take((64,), torch.float32)
    first.end()
    one, two = binding.lender(shelf, cpu), binding.lender(shelf, cpu)
    x, y = one.take((64,), torch.float32).fill_(1.0), two.take((64,), torch.float32).fill_(2.0)
    assert (x == 1.0).all() and (y == 2.0).all()
    two.end()
    three = binding.lender(shelf, cpu)
    assert three.take((64,), torch.float32).data_ptr() == y.data_ptr()
    failed = binding.lender(shelf, cpu)
    del failed  # a pass that raised ends nothing
    one.end()
    three.end()
    assert len(shelf.slabs) == 2


def test_what_was_sent_rests_until_it_has_left():
    shelf, binding = buffers.Shelf(), buffers.Binding()
    recorder = binding.lender(shelf, torch.device("cpu"))

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
    assert binding.tape is not None
    at = binding.tape.offsets
    assert len({at[0], at[1], at[2]}) == 3 and at[3] == at[1] and at[4] == at[0]


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 20), st.integers(0, 20)), max_size=25)
)
def test_buffers_of_one_time_lie_apart(drawn):
    requests = [Request((size,), torch.uint8, begin, begin + more) for size, begin, more in drawn]
    offsets, total = places(requests)
    spans = [(r, at, at + r.num_bytes) for r, at in zip(requests, offsets, strict=True)]
    for i, (r, start, stop) in enumerate(spans):
        assert start % 256 == 0 and stop <= total
        for other, first, last in spans[:i]:
            together = r.begin < other.end and other.begin < r.end
            assert not together or stop <= first or last <= start or r.num_bytes == 0
    assert total <= sum(-(-r.num_bytes // 256) * 256 for r in requests)


def test_buffers_that_follow_each_other_share_their_place():
    tape = Tape([Request((1024,), torch.float32, i, i + 2) for i in range(50)])
    assert tape.num_bytes == 2 * 4096
    views = tape.views(torch.empty(tape.num_bytes, dtype=torch.uint8))
    assert views[0].data_ptr() == views[2].data_ptr() and views[0].shape == (1024,)

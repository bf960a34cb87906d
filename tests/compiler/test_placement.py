"""Placement: bytes that are needed at one time lie apart, all others share their place."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tilewise.compiler.code import Buffer, Home, Ref, Refs, TensorSpec
from tilewise.compiler.ops import Copy, Fill, Message, Op, Post, Wait
from tilewise.compiler.placement import Departures, Lifetime, aligned, buffer_spans, place, placed
from tilewise.plan.builder import operand
from tilewise.plan.ir import Side

BLOCK = 256


@st.composite
def drawn_spans(draw: st.DrawFn) -> list[Lifetime]:
    """Of one buffer: parts side by side, from one moment on, each to its own end."""
    begin, start, spans = draw(st.integers(0, 20)), 0, []
    for _ in range(draw(st.integers(1, 4))):
        blocks, more = draw(st.integers(1, 6)), draw(st.integers(0, 20))
        spans.append(Lifetime(start, start + blocks * BLOCK, begin, begin + more))
        start += blocks * BLOCK
    return spans


@given(st.lists(drawn_spans(), max_size=20))
def test_bytes_of_one_time_lie_apart(buffers):
    offsets, total = place(buffers)
    seen: list[tuple[int, int, Lifetime]] = []
    for number, (spans, at) in enumerate(zip(buffers, offsets, strict=True)):
        assert at % BLOCK == 0 and at + spans[-1].stop <= total
        for span in spans:
            for other, there, theirs in seen:
                together = span.begin <= theirs.end and theirs.begin <= span.end
                apart = at + span.stop <= there + theirs.start
                apart = apart or there + theirs.stop <= at + span.start
                assert apart or not together or other == number
            seen.append((number, at, span))
    assert total <= sum(spans[-1].stop for spans in buffers)


def one(name: str, rows: int, part_rows: tuple[int, ...] = ()) -> tuple[Buffer, TensorSpec]:
    """A buffer of rows of a block each, and the tensor of all of it."""
    spec = TensorSpec(name, 0, 0, (rows, 1, BLOCK), (BLOCK, BLOCK, 1), "uint8")
    return Buffer(name, rows * BLOCK, Home.WORKSPACE, part_rows), spec


def offsets_of(
    made: list[tuple[Buffer, TensorSpec]], ops: list[Op[Refs]], departs: Departures
) -> tuple[int, ...]:
    buffers = [buffer for buffer, _ in made]
    tensors = [spec._replace(buffer=number) for number, (_, spec) in enumerate(made)]
    return placed(tensors, buffers, ops, departs)[0]


def sent(handle: int, tensor: int, lane: int = 0) -> Post[Refs]:
    messages = (Message(1, handle, operand(Side.KV, 0)),)
    return Post("launch", handle, lane, ((Ref(tensor),),), (), messages, (), ())


def blank(ref: Ref) -> Fill[Refs]:
    return Fill("fill", (ref,), (0.0,))


def copy(source: Ref, target: Ref) -> Copy[Refs]:
    return Copy("copy", (source,), (target,))


def test_buffers_that_follow_each_other_share_their_place():
    made = [one(str(number), 4) for number in range(50)]
    ops: list[Op[Refs]] = [blank(Ref(0))]
    ops += [copy(Ref(number - 1), Ref(number)) for number in range(1, 50)]
    at = offsets_of(made, ops, Departures(1, True))
    assert {*at} == {0, 4 * BLOCK} and all(x != y for x, y in pairwise(at))


def test_what_was_sent_rests_until_it_has_left():
    """By a launch too many on its own lane, not by one on another; or by a receive of its own."""
    made = [one(name, 1) for name in "abcde"]
    ops: list[Op[Refs]] = [
        blank(Ref(0)),
        sent(0, 0, lane=0),
        blank(Ref(1)),
        sent(1, 1, lane=1),
        blank(Ref(2)),
        Wait("wait", 1, (), ()),
        blank(Ref(3)),
        sent(2, 3, lane=0),
        blank(Ref(4)),
    ]
    a, b, c, d, e = offsets_of(made, ops, Departures(1, True))
    assert len({a, b, c}) == 3 and d in (b, c) and e in {a, b, c}
    a, b, c, d, e = offsets_of(made, ops, Departures(1, False))
    assert len({a, b, c}) == 3 and d == c, "b rests: nobody waits for a later launch of its lane"
    assert e in (a, c) and e != b
    a, b, c, d, e = offsets_of(made, ops, Departures(None, False))
    assert len({a, b, d}) == 3 and e not in {a, b, d} and c not in {a, b}, "to the end"
    a, b, c, d, e = offsets_of(made, ops, Departures(0, False))
    assert len({a, b, c, d, e}) == 1, "each launch returns when what it sends has left"


def test_parts_of_a_buffer_are_given_back_each_by_itself():
    made = [one("parts", 12, (4, 0, 8)), one("first", 4), one("second", 8), one("third", 8)]
    ops: list[Op[Refs]] = [
        blank(Ref(0)),
        copy(Ref(0, (0, 4, 1)), Ref(0, (4, 8, 1))),
        blank(Ref(1)),
        copy(Ref(0, (4, 12, 1)), Ref(2)),
        copy(Ref(2), Ref(3)),
        blank(Ref(1)),
    ]
    whole, first, second, third = offsets_of(made, ops, Departures(1, True))
    assert first == whole and second >= whole + 12 * BLOCK and third == whole + 4 * BLOCK


def test_two_parts_share_a_block_until_both_end():
    buffer = Buffer("parts", 512, Home.WORKSPACE, (96, 160, 256))
    spec = TensorSpec("parts", 0, 0, (512, 1, 1), (1, 1, 1), "uint8")
    ops: list[Op[Refs]] = [
        blank(Ref(0)),
        blank(Ref(0, (100, 120, 1))),
        blank(Ref(0, (300, 512, 1))),
        blank(Ref(0, (0, 96, 1))),
    ]
    (spans,) = buffer_spans([spec], [buffer], ops, Departures(1, True))
    assert spans == [Lifetime(0, 256, 0, 3), Lifetime(256, 512, 0, 2)]
    assert aligned(1) == aligned(256) == 256


def test_only_the_workspace_is_placed():
    made = [one("kept", 4), one("here", 2)]
    made[0] = made[0][0]._replace(home=Home.KEPT), made[0][1]
    ops: list[Op[Refs]] = [blank(Ref(0)), copy(Ref(0, (0, 2, 1)), Ref(1))]
    buffers = [buffer for buffer, _ in made]
    tensors = [spec._replace(buffer=number) for number, (_, spec) in enumerate(made)]
    assert placed(tensors, buffers, ops, Departures(1, True)) == ((0, 0), 2 * BLOCK)

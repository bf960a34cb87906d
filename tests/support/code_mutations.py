"""The kinds of mutation of a code that the tests of check_code draw from: each changes one thing.

A mutation is a function (code, random, departs) -> another code, or None if there is no place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from random import Random

from tilewise.compiler.code import Code, Home, Ref
from tilewise.compiler.ops import (
    Attend,
    ComputeDelta,
    Copy,
    Decode,
    Encode,
    Expand,
    Fill,
    Post,
    Pull,
    SumHeads,
    Wait,
    reads,
    writes,
)
from tilewise.compiler.placement import Departures, buffer_spans


def ops_of(code: Code, *kinds: type) -> list[int]:
    return [number for number, op in enumerate(code.ops) if isinstance(op, kinds)]


def read_by(code: Code, number: int) -> Iterator[Ref]:
    """Yield every tensor that an op reads."""
    return chain.from_iterable(reads(code.ops[number]))


def written_by(code: Code, number: int) -> Iterator[Ref]:
    """Yield every tensor that an op writes."""
    return chain.from_iterable(writes(code.ops[number]))


def buffers_of(code: Code, refs: Iterable[Ref]) -> set[int]:
    return {code.tensors[ref.tensor].buffer for ref in refs}


def without(code: Code, number: int) -> Code:
    return code._replace(ops=code.ops[:number] + code.ops[number + 1 :])


def any_of(random: Random, numbers: list[int]) -> int | None:
    return random.choice(numbers) if numbers else None


def no_wait(code: Code, random: Random, departs: Departures) -> Code | None:
    number = any_of(random, ops_of(code, Wait))
    return None if number is None else without(code, number)


def two_waits(code: Code, random: Random, departs: Departures) -> Code | None:
    number = any_of(random, ops_of(code, Wait))
    if number is None:
        return None
    again = random.randint(number + 1, len(code.ops))
    return code._replace(ops=(*code.ops[:again], code.ops[number], *code.ops[again:]))


def a_late_wait(code: Code, random: Random, departs: Departures) -> Code | None:
    """After what reads what has arrived; a team's exchange is over as a whole."""
    teams = {op.handle for op in code.ops if isinstance(op, Post) and op.team}
    waits = [x for x in ops_of(code, Wait) if code.ops[x].handle not in teams]  # pyright: ignore
    number = any_of(random, waits)
    if number is None:
        return None
    wait = code.ops[number]
    assert isinstance(wait, Wait)
    touched = chain.from_iterable(wait.touched)
    buffers = buffers_of(code, (ref for ref in touched if ref.rows is None))
    for later in range(number + 1, len(code.ops)):
        if buffers & buffers_of(code, read_by(code, later)):
            ops = [*code.ops[: later + 1], wait, *code.ops[later + 1 :]]
            return without(code._replace(ops=tuple(ops)), number)
    return None


def no_post(code: Code, random: Random, departs: Departures) -> Code | None:
    receiving = [x for x in ops_of(code, Post) if any(written_by(code, x))]
    number = any_of(random, receiving)
    return None if number is None else without(code, number)


def is_used(code: Code, number: int) -> bool:
    """Return whether an operation writes rows that a later one reads, or that the caller gets."""
    made = [ref for ref in written_by(code, number) if 0 not in code.shape(ref)]
    later = (read_by(code, x) for x in range(number + 1, len(code.ops)))
    is_read = buffers_of(code, made) & buffers_of(code, chain.from_iterable(later))
    return bool(is_read) or any(code.home(ref) is Home.GIVEN for ref in made)


def no_copy(code: Code, random: Random, departs: Departures) -> Code | None:
    """Of rows that something reads: a shard may come for other heads than this rank's."""
    copies = [x for x in ops_of(code, Copy, Encode, Decode) if is_used(code, x)]
    number = any_of(random, copies)
    return None if number is None else without(code, number)


def not_computed(code: Code, random: Random, departs: Departures) -> Code | None:
    """Delta, keys and values of latents, their gradient, or a sum of heads, which others read."""
    found = [x for x in ops_of(code, ComputeDelta, Expand, Pull, SumHeads) if is_used(code, x)]
    number = any_of(random, found)
    return None if number is None else without(code, number)


def no_fill(code: Code, random: Random, departs: Departures) -> Code | None:
    """What is added to, or a result that nothing was added to, does not begin blank."""
    fills = [
        x for x in ops_of(code, Fill) if all(0 not in code.shape(r) for r in written_by(code, x))
    ]
    number = any_of(random, fills)
    return None if number is None else without(code, number)


def no_first_result(code: Code, random: Random, departs: Departures) -> Code | None:
    """A kernel call that writes is left out."""
    found = []
    for number in ops_of(code, Attend):
        op = code.ops[number]
        assert isinstance(op, Attend)
        if not all(op.adds):
            found.append(number)
    number = any_of(random, found)
    return None if number is None else without(code, number)


def a_place_taken(code: Code, random: Random, departs: Departures) -> Code | None:
    """A buffer is moved to where another lies whose contents are needed at the same time."""
    spans = buffer_spans(code.tensors, code.buffers, code.ops, departs)
    pairs = [
        (one, other)
        for one, mine in enumerate(spans)
        for other, theirs in enumerate(spans)
        if one != other
        and mine
        and theirs
        and code.buffers[one].num_bytes <= code.buffers[other].num_bytes
        and mine[0].begin <= max(x.end for x in theirs)
        and theirs[0].begin < mine[0].begin < theirs[0].end
    ]
    if not pairs:
        return None
    one, other = random.choice(pairs)
    offsets = [*code.offsets]
    offsets[one] = offsets[other]
    return code._replace(offsets=tuple(offsets))


def sent_too_early(code: Code, random: Random, departs: Departures) -> Code | None:
    """A launch before the last op that writes what it sends."""
    found = []
    for number in ops_of(code, Post):
        sent = buffers_of(code, read_by(code, number))
        for before in reversed(range(number)):
            if isinstance(code.ops[before], Post | Wait):
                break
            if sent & buffers_of(code, written_by(code, before)):
                found.append((number, before))
                break
    if not found:
        return None
    number, before = random.choice(found)
    ops = [*code.ops]
    ops.insert(before, ops.pop(number))
    return code._replace(ops=tuple(ops))


def outside(code: Code, random: Random, departs: Departures) -> Code | None:
    numbers = [i for i, x in enumerate(code.buffers) if x.home is Home.WORKSPACE and x.num_bytes]
    number = any_of(random, numbers)
    if number is None:
        return None
    offsets = [*code.offsets]
    offsets[number] = code.num_bytes
    return code._replace(offsets=tuple(offsets))


MUTATIONS: tuple[Callable[[Code, Random, Departures], Code | None], ...] = (
    no_wait,
    two_waits,
    a_late_wait,
    no_post,
    no_copy,
    not_computed,
    no_fill,
    no_first_result,
    a_place_taken,
    sent_too_early,
    outside,
)

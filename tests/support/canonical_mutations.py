"""Changes of a code that make its sums others than the canonical ones, and changes that do not.

Each is a function (code, random) -> another code, or None if there is no place for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from tilewise.compiler.code import (
    AttendLeaves,
    Code,
    ComputeDelta,
    Copy,
    Decode,
    Encode,
    Fill,
    Finish,
    Merge,
    Op,
    Post,
    Ref,
    Wait,
)
from tilewise.layouts.layout import Run
from tilewise.plan.sums import FLOAT16, FLOAT32, SumColumns
from tilewise.tiles.calls import KernelCall, Kind
from tilewise.tiles.leaf_pairs import ROW_UNIT, Leaf, LeafPair

Mutation = Callable[[Code, Random], Code | None]
Edit = Callable[[Code, Any, Random], "Op | list[Op] | None"]
CHANGES: dict[str, Mutation] = {}
HARMLESS: dict[str, Mutation] = {}


def places(code: Code, kind: type, random: Random) -> list[int]:
    """Numbers of the ops of a kind, shuffled."""
    numbers = [number for number, op in enumerate(code.ops) if isinstance(op, kind)]
    random.shuffle(numbers)
    return numbers


def with_ops(code: Code, number: int, ops: list[Op]) -> Code:
    """The code with these in place of an op; lines are not kept up."""
    return code._replace(ops=(*code.ops[:number], *ops, *code.ops[number + 1 :]))


def edits(kind: type, table: dict[str, Mutation] = CHANGES) -> Callable[[Edit], Edit]:
    """Enter a change of one op of a kind under the function's name."""

    def enter(edit: Edit) -> Edit:
        def mutation(code: Code, random: Random) -> Code | None:
            for number in places(code, kind, random):
                found = edit(code, code.ops[number], random)
                if found is not None:
                    return with_ops(code, number, found if isinstance(found, list) else [found])
            return None

        table[edit.__name__] = mutation
        return edit

    return enter


def changes(mutation: Mutation) -> Mutation:
    """Enter a change of a code."""
    CHANGES[mutation.__name__] = mutation
    return mutation


def is_sums(code: Code, ref: Ref) -> bool:
    return code.tensors[ref.tensor].dtype in ("int32", "int64") and 0 not in code.shape(ref)


def moved_rows(code: Code, ref: Ref, by: int) -> Ref | None:
    """As many rows of a tensor, a few further on."""
    start, stop, step = ref.rows or (0, code.tensors[ref.tensor].shape[0], 1)
    if stop + by > code.tensors[ref.tensor].shape[0] or start == stop:
        return None
    return ref._replace(rows=(start + by, stop + by, step))


def other_form(columns: SumColumns) -> SumColumns:
    return columns._replace(
        forms=tuple(FLOAT16 if form == FLOAT32 else FLOAT32 for form in columns.forms)
    )


def with_pairs(op: AttendLeaves, pairs: list[LeafPair], **more: Any) -> AttendLeaves:
    return op._replace(call=op.call._replace(pairs=tuple(pairs), **more))


def with_leaf(op: AttendLeaves, side: str, number: int, leaf: Leaf) -> AttendLeaves:
    leaves = [*getattr(op.call, side)]
    leaves[number] = leaf
    return op._replace(call=op.call._replace(**{side: tuple(leaves)}))


def any_leaf(op: AttendLeaves, random: Random, least: int = 2) -> tuple[str, int, Leaf] | None:
    """A leaf of some rows, as one run, that a pair has, and its place."""
    found = [
        (side, number, leaf)
        for side in ("q", "k")
        for number, leaf in enumerate(getattr(op.call, side))
        if number in {getattr(pair, side) for pair in op.call.pairs}
        and len(leaf.slots) == len(leaf.held) == len(leaf.local) == 1
        and min(leaf.slots[0].count, leaf.held[0].count) >= least
    ]
    return random.choice(found) if found else None


# Calls of pairs of leaves


@edits(AttendLeaves)
def calls_left_out(code: Code, op: AttendLeaves, random: Random) -> list[Op]:
    return []


@edits(AttendLeaves)
def calls_made_twice(code: Code, op: AttendLeaves, random: Random) -> list[Op]:
    return [op, op]


@edits(AttendLeaves)
def a_pair_left_out(code: Code, op: AttendLeaves, random: Random) -> Op | None:
    pairs = [*op.call.pairs]
    pairs.pop(random.randrange(len(pairs)))
    return with_pairs(op, pairs)


@edits(AttendLeaves)
def a_pair_computed_twice(code: Code, op: AttendLeaves, random: Random) -> Op | None:
    return with_pairs(op, [*op.call.pairs, random.choice(op.call.pairs)])


@edits(AttendLeaves)
def keys_of_another_leaf(code: Code, op: AttendLeaves, random: Random) -> Op | None:
    """Of another document, or of the same one."""
    pairs, place = [*op.call.pairs], random.randrange(len(op.call.pairs))
    others = [k for k in range(len(op.call.k)) if k != pairs[place].k]
    if not others:
        return None
    pairs[place] = pairs[place]._replace(k=random.choice(others))
    return with_pairs(op, pairs)


@edits(AttendLeaves)
def queries_of_another_leaf(code: Code, op: AttendLeaves, random: Random) -> Op | None:
    pairs, place = [*op.call.pairs], random.randrange(len(op.call.pairs))
    others = [q for q in range(len(op.call.q)) if q != pairs[place].q]
    if not others:
        return None
    pairs[place] = pairs[place]._replace(q=random.choice(others))
    return with_pairs(op, pairs)


@edits(AttendLeaves)
def a_mask_that_allows_all(code: Code, op: AttendLeaves, random: Random) -> Op | None:
    pairs = [*op.call.pairs]
    cut = [i for i, pair in enumerate(pairs) if pair.call.kind is not Kind.FULL]
    if not cut:
        return None
    place = random.choice(cut)
    call = pairs[place].call
    full = KernelCall(((0, call.num_q),), ((0, call.num_k),), Kind.FULL)
    pairs[place] = pairs[place]._replace(call=full)
    return with_pairs(op, pairs)


@edits(AttendLeaves)
def a_call_of_another_shape(code: Code, op: AttendLeaves, random: Random) -> Op | None:
    pairs, place = [*op.call.pairs], random.randrange(len(op.call.pairs))
    call = pairs[place].call
    wider = ((0, call.num_k + ROW_UNIT),)
    pairs[place] = pairs[place]._replace(call=call._replace(k=wider))
    return with_pairs(op, pairs)


@edits(AttendLeaves)
def a_leaf_of_another_size(code: Code, op: AttendLeaves, random: Random) -> Op | None:
    leaf = any_leaf(op, random, 1)
    if leaf is None:
        return None
    side, number, found = leaf
    return with_leaf(op, side, number, found._replace(num_rows=found.num_rows + ROW_UNIT))


@edits(AttendLeaves)
def a_leaf_cut_in_two(code: Code, op: AttendLeaves, random: Random) -> Op | None:
    """The halves of its rows are computed apart."""
    leaf = any_leaf(op, random)
    if leaf is None:
        return None
    side, number, found = leaf
    half = found.slots[0].count // 2

    def part(runs: tuple[Run, ...], first: bool) -> tuple[Run, ...]:
        ((start, count, step),) = runs
        return (Run(start, half, step) if first else Run(start + half * step, count - half, step),)

    halves = [
        found._replace(**{name: part(getattr(found, name), first) for name in Leaf._fields[2:]})
        for first in (True, False)
    ]
    leaves = (*getattr(op.call, side), halves[1])
    again = [
        pair._replace(**{side: len(leaves) - 1})
        for pair in op.call.pairs
        if getattr(pair, side) == number
    ]
    both = with_pairs(op, [*op.call.pairs, *again], **{side: leaves})
    return with_leaf(both, side, number, halves[0]) if again else None


@edits(AttendLeaves)
def a_leaf_that_begins_elsewhere(code: Code, op: AttendLeaves, random: Random) -> Op | None:
    leaf = any_leaf(op, random, 1)
    if leaf is None:
        return None
    side, number, found = leaf
    return with_leaf(op, side, number, found._replace(start=found.start + ROW_UNIT))


def permuted(name: str) -> None:
    def edit(code: Code, op: AttendLeaves, random: Random) -> Op | None:
        leaf = any_leaf(op, random)
        if leaf is None:
            return None
        side, number, found = leaf
        if (name, side, code.backward) == ("local", "k", False):
            return None  # keys have no sums
        ((start, count, step),) = getattr(found, name)
        turned = (Run(start + (count - 1) * step, count, -step),)
        return with_leaf(op, side, number, found._replace(**{name: turned}))

    edit.__name__ = f"rows_in_another_order_{name}"
    edits(AttendLeaves)(edit)


for _name in Leaf._fields[2:]:
    permuted(_name)


@edits(AttendLeaves)
def a_row_that_is_missing(code: Code, op: AttendLeaves, random: Random) -> Op | None:
    leaf = any_leaf(op, random)
    if leaf is None:
        return None
    side, number, found = leaf
    first = {
        name: (getattr(found, name)[0]._replace(count=found.slots[0].count - 1),)
        for name in Leaf._fields[2:]
    }
    drops_key = side == "k" and all(
        pair.call.kind is Kind.CAUSAL for pair in op.call.pairs if pair.k == number
    )
    return None if drops_key else with_leaf(op, side, number, found._replace(**first))


@edits(AttendLeaves)
def another_first_head(code: Code, op: AttendLeaves, random: Random) -> Op | None:
    return op._replace(first_head=op.first_head + random.choice((-1, 1)))


def swapped_operands(name: str, one: int, other: int) -> None:
    def edit(code: Code, op: AttendLeaves, random: Random) -> Op | None:
        if other >= len(op.operands):
            return None
        operands = [*op.operands]
        operands[one], operands[other] = operands[other], operands[one]
        return op._replace(operands=tuple(operands))

    edit.__name__ = name
    edits(AttendLeaves)(edit)


swapped_operands("keys_taken_for_values", 1, 2)
swapped_operands("delta_taken_for_lse", 4, 5)
swapped_operands("dout_taken_for_queries", 0, 3)


@edits(AttendLeaves)
def operands_of_other_heads(code: Code, op: AttendLeaves, random: Random) -> Op | None:
    """The first heads of a tensor in place of all, in the first operand of several heads."""
    for place, ref in enumerate(op.operands):
        first, last = ref.heads or (0, code.shape(ref)[2])
        whole = code.tensors[ref.tensor].shape[2]
        for start in range(whole - (last - first) + 1):
            if start != first:
                operands = [*op.operands]
                operands[place] = ref._replace(heads=(start, start + last - first))
                return op._replace(operands=tuple(operands))
    return None


@edits(AttendLeaves)
def operands_of_other_rows(code: Code, op: AttendLeaves, random: Random) -> Op | None:
    """Those of another shard."""
    place = random.randrange(len(op.operands))
    ref = op.operands[place]
    spec = code.tensors[ref.tensor]
    field = spec.name.split(".")[-1]

    def shard(name: str) -> str:
        own = f"{'q' if field not in 'kv' else 'kv'}{code.rank}"
        return name.split(".")[0].split("/")[0] if "." in name else own

    others = [
        number
        for number, other in enumerate(code.tensors)
        if (other.shape, other.dtype) == (spec.shape, spec.dtype)
        and other.name.split(".")[-1] == field
        and shard(other.name) != shard(spec.name)
    ]
    if not others or ref.rows is not None:
        return None
    operands = [*op.operands]
    operands[place] = ref._replace(tensor=random.choice(others))
    return op._replace(operands=tuple(operands))


def with_dtype(code: Code, ref: Ref, dtype: str) -> Code:
    """A tensor taken for one of another dtype with as many bytes a number."""
    tensors = [*code.tensors]
    tensors[ref.tensor] = tensors[ref.tensor]._replace(dtype=dtype)
    return code._replace(tensors=tuple(tensors))


@changes
def operands_of_another_dtype(code: Code, random: Random) -> Code | None:
    for number in places(code, AttendLeaves, random):
        op = code.ops[number]
        assert isinstance(op, AttendLeaves)
        spec = code.tensors[op.operands[-1].tensor]
        return with_dtype(code, op.operands[-1], "int32" if spec.dtype == "float32" else "int16")
    return None


@changes
def sums_of_another_dtype(code: Code, random: Random) -> Code | None:
    for number in places(code, Finish, random):
        op = code.ops[number]
        assert isinstance(op, Finish)
        return with_dtype(code, op.sums, "float64")
    return None


@changes
def a_delta_of_another_dtype(code: Code, random: Random) -> Code | None:
    for number in places(code, ComputeDelta, random):
        op = code.ops[number]
        assert isinstance(op, ComputeDelta)
        return with_dtype(code, op.product, "int32")
    return None


@edits(AttendLeaves)
def sums_of_another_format(code: Code, op: AttendLeaves, random: Random) -> Op | None:
    columns, place = [*op.columns], random.randrange(len(op.columns))
    columns[place] = other_form(columns[place])
    return op._replace(columns=tuple(columns))


@edits(AttendLeaves)
def sums_of_other_rows(code: Code, op: AttendLeaves, random: Random) -> Op | None:
    sums, place = [*op.sums], random.randrange(len(op.sums))
    others = [
        ref
        for other in code.ops
        if isinstance(other, AttendLeaves)
        for ref in other.sums
        if code.shape(ref) == code.shape(sums[place]) and ref != sums[place]
    ]
    if not others:
        return None
    sums[place] = random.choice(others)
    return op._replace(sums=tuple(sums))


@changes
def calls_of_other_pairs(code: Code, random: Random) -> Code | None:
    """Those of another op of the rank."""
    numbers = places(code, AttendLeaves, random)
    for number in numbers:
        op = code.ops[number]
        for other in numbers:
            theirs = code.ops[other]
            assert isinstance(op, AttendLeaves) and isinstance(theirs, AttendLeaves)
            if theirs.call != op.call:
                return with_ops(code, number, [op._replace(call=theirs.call)])
    return None


@changes
def calls_after_the_end(code: Code, random: Random) -> Code | None:
    for number in places(code, AttendLeaves, random):
        op = code.ops[number]
        return code._replace(ops=(*code.ops[:number], *code.ops[number + 1 :], op))
    return None


@changes
def calls_after_their_sums_have_left(code: Code, random: Random) -> Code | None:
    for number in places(code, AttendLeaves, random):
        op = code.ops[number]
        for later in range(number + 1, len(code.ops)):
            leaving = code.ops[later]
            if isinstance(leaving, Copy) and leaving.source in op.writes:
                ops = [*code.ops]
                ops.insert(later, ops.pop(number))  # after it, which has moved up
                return code._replace(ops=tuple(ops))
    return None


# Merges


@edits(Merge)
def a_merge_left_out(code: Code, op: Merge, random: Random) -> list[Op]:
    return []


@edits(Merge)
def a_merge_done_twice(code: Code, op: Merge, random: Random) -> list[Op]:
    return [op, op]


@edits(Merge)
def a_merge_that_rounds(code: Code, op: Merge, random: Random) -> Op:
    return op._replace(columns=None)


@edits(Merge)
def a_merge_by_lse(code: Code, op: Merge, random: Random) -> Op:
    return op._replace(columns=None, by_lse=True)


@edits(Merge)
def a_merge_of_another_format(code: Code, op: Merge, random: Random) -> Op | None:
    assert op.columns is not None
    return op._replace(columns=other_form(op.columns))


@edits(Merge)
def a_merge_of_other_widths(code: Code, op: Merge, random: Random) -> Op | None:
    assert op.columns is not None
    form, widths, largest = op.columns
    return op._replace(columns=SumColumns(form, (widths[0] - 1, *widths[1:], 1), largest))


@edits(Merge)
def a_merge_with_itself(code: Code, op: Merge, random: Random) -> Op:
    return op._replace(sources=op.targets)


@edits(Merge)
def a_merge_the_other_way(code: Code, op: Merge, random: Random) -> Op:
    return op._replace(sources=op.targets, targets=op.sources)


@edits(Merge)
def a_copy_in_place_of_a_merge(code: Code, op: Merge, random: Random) -> Op:
    return Copy(op.sources[0], op.targets[0])


@edits(Merge)
def a_merge_of_other_rows(code: Code, op: Merge, random: Random) -> Op | None:
    target = moved_rows(code, op.targets[0], 1)
    return None if target is None else op._replace(targets=(target,))


@edits(Merge)
def a_merge_of_other_heads(code: Code, op: Merge, random: Random) -> list[Op] | None:
    """The heads of a sum, the other way around."""
    heads = code.shape(op.targets[0])[2]
    if heads < 2:
        return None
    first = 0 if op.targets[0].heads is None else op.targets[0].heads[0]
    begin = 0 if op.sources[0].heads is None else op.sources[0].heads[0]
    return [
        op._replace(
            sources=(op.sources[0]._replace(heads=(begin + h, begin + h + 1)),),
            targets=(op.targets[0]._replace(heads=(first + g, first + g + 1)),),
        )
        for h, g in zip(range(heads), reversed(range(heads)), strict=True)
    ]


# The end of a sum


@edits(Finish)
def a_sum_that_is_not_finished(code: Code, op: Finish, random: Random) -> list[Op]:
    return []


@edits(Finish)
def a_sum_finished_twice(code: Code, op: Finish, random: Random) -> list[Op]:
    return [op, op]


@edits(Finish)
def finished_as_another_format(code: Code, op: Finish, random: Random) -> Op:
    return op._replace(columns=other_form(op.columns))


@edits(Finish)
def finished_for_other_rows(code: Code, op: Finish, random: Random) -> Op | None:
    if code.shape(op.targets[0])[0] < 2:
        return None
    start, stop, step = op.targets[0].rows or (0, code.shape(op.targets[0])[0], 1)
    turned = start + 1, stop, step
    targets = tuple(ref._replace(rows=turned) for ref in op.targets)
    rows = op.sums.rows or (0, code.shape(op.sums)[0], 1)
    return op._replace(targets=targets, sums=op.sums._replace(rows=(rows[0], rows[1] - 1, rows[2])))


@edits(Finish)
def finished_without_its_statistics(code: Code, op: Finish, random: Random) -> Op | None:
    return op._replace(targets=op.targets[:-1]) if len(op.targets) > 1 else None


@edits(Finish)
def results_exchanged(code: Code, op: Finish, random: Random) -> Op | None:
    if len(op.targets) < 2 or code.shape(op.targets[0]) != code.shape(op.targets[1]):
        return None
    return op._replace(targets=(op.targets[1], op.targets[0], *op.targets[2:]))


@edits(Finish)
def finished_with_sinks_of_other_heads(code: Code, op: Finish, random: Random) -> Op | None:
    return None if code.backward else op._replace(first_head=op.first_head + 1)


@edits(Finish)
def finished_as_rows_of_another_rank(code: Code, op: Finish, random: Random) -> Op:
    return op._replace(home=(op.home + 1) % code.world_size)


@edits(Finish)
def erased_before_it_is_finished(code: Code, op: Finish, random: Random) -> list[Op] | None:
    return [Fill(op.sums, 0.0), op] if is_sums(code, op.sums) else None


@changes
def finished_too_early(code: Code, random: Random) -> Code | None:
    """Before the last op that adds to the sum; what is added then is lost."""
    for number in places(code, Finish, random):
        finish = code.ops[number]
        assert isinstance(finish, Finish)
        for before in reversed(range(number)):
            op = code.ops[before]
            adds = isinstance(op, AttendLeaves | Merge)
            if adds and finish.sums in op.writes:
                ops = [*code.ops]
                ops.insert(before, ops.pop(number))
                return code._replace(ops=tuple(ops))
    return None


# Copies and messages


def copies_of_sums(code: Code, random: Random) -> Iterator[int]:
    for number in places(code, Copy, random):
        op = code.ops[number]
        assert isinstance(op, Copy)
        if is_sums(code, op.source) and is_sums(code, op.target):
            yield number


@changes
def a_copy_of_sums_left_out(code: Code, random: Random) -> Code | None:
    for number in copies_of_sums(code, random):
        return with_ops(code, number, [])
    return None


@changes
def sums_rounded_on_a_wire(code: Code, random: Random) -> Code | None:
    for number in copies_of_sums(code, random):
        op = code.ops[number]
        assert isinstance(op, Copy)
        spec = code.tensors[op.target.tensor]._replace(dtype="float64")
        target = op.target._replace(tensor=len(code.tensors))
        found = with_ops(code, number, [op._replace(target=target)])
        return found._replace(tensors=(*code.tensors, spec))
    return None


@changes
def other_rows_in_a_message(code: Code, random: Random) -> Code | None:
    for number in copies_of_sums(code, random):
        op = code.ops[number]
        assert isinstance(op, Copy)
        rows = code.shape(op.source)[0]
        if rows < 2:
            continue
        start, stop, step = op.source.rows or (0, rows, 1)
        there, end, by = op.target.rows or (0, rows, 1)
        moved = op._replace(
            source=op.source._replace(rows=(start + step, stop, step)),
            target=op.target._replace(rows=(there, end - by, by)),
        )
        return with_ops(code, number, [op, moved])
    return None


def in_another_format(op: Encode | Decode) -> Op | None:
    """The encoding or decoding of sums, in another format than theirs."""
    wire = op.field.wire
    if not isinstance(wire, SumColumns):
        return None
    return op._replace(field=op.field._replace(wire=other_form(wire)))


@edits(Encode)
def sums_that_travel_in_another_format(code: Code, op: Encode, random: Random) -> Op | None:
    return in_another_format(op)


@edits(Decode)
def sums_that_arrive_in_another_format(code: Code, op: Decode, random: Random) -> Op | None:
    return in_another_format(op)


@edits(Encode)
def sums_that_are_not_encoded(code: Code, op: Encode, random: Random) -> list[Op] | None:
    return [] if is_sums(code, op.source) else None


@edits(Decode)
def sums_that_are_not_decoded(code: Code, op: Decode, random: Random) -> list[Op] | None:
    return [] if is_sums(code, op.target) else None


@edits(Encode)
def encoded_sums_of_other_rows(code: Code, op: Encode, random: Random) -> list[Op] | None:
    rows = code.shape(op.source)[0]
    if rows < 2 or not is_sums(code, op.source):
        return None
    start, stop, step = op.source.rows or (0, rows, 1)
    there, end, by = op.target.rows or (0, rows, 1)
    moved = op._replace(
        source=op.source._replace(rows=(start + step, stop, step)),
        target=op.target._replace(rows=(there, end - by, by)),
    )
    return [op, moved]


@edits(Merge)
def a_merge_of_sums_that_are_read_otherwise(code: Code, op: Merge, random: Random) -> Op:
    return op._replace(short=not op.short)


@edits(Copy)
def a_copy_of_another_operand(code: Code, op: Copy, random: Random) -> Op | None:
    """v in place of k, q in place of dout."""
    spec = code.tensors[op.source.tensor]
    for number, other in enumerate(code.tensors):
        alike = (other.shape, other.strides, other.dtype) == (spec.shape, spec.strides, spec.dtype)
        if alike and number != op.source.tensor and other.name in ("q", "k", "v", "dout"):
            return op._replace(source=op.source._replace(tensor=number))
    return None


@edits(Post)
def messages_to_each_others_receivers(code: Code, op: Post, random: Random) -> Op | None:
    sends = [*op.sends]
    for i, one in enumerate(sends):
        for j, other in enumerate(sends[:i]):
            alike = code.num_bytes_of(one.ref) == code.num_bytes_of(other.ref)
            if alike and one.ref != other.ref and one.peer != other.peer:
                sends[i], sends[j] = one._replace(ref=other.ref), other._replace(ref=one.ref)
                return op._replace(sends=tuple(sends))
    return None


@edits(Post)
def messages_into_each_others_rooms(code: Code, op: Post, random: Random) -> Op | None:
    recvs = [*op.recvs]
    for i, one in enumerate(recvs):
        for j, other in enumerate(recvs[:i]):
            alike = code.num_bytes_of(one.ref) == code.num_bytes_of(other.ref) > 0
            if alike and one.item != other.item:
                recvs[i], recvs[j] = one._replace(ref=other.ref), other._replace(ref=one.ref)
                return op._replace(recvs=tuple(recvs))
    return None


@edits(Post)
def a_message_that_is_not_sent(code: Code, op: Post, random: Random) -> Op | None:
    full = [i for i, sent in enumerate(op.sends) if code.num_bytes_of(sent.ref)]
    if not full:
        return None
    place = random.choice(full)
    return op._replace(sends=op.sends[:place] + op.sends[place + 1 :])


@edits(Post)
def a_message_that_is_sent_twice(code: Code, op: Post, random: Random) -> Op | None:
    full = [sent for sent in op.sends if code.num_bytes_of(sent.ref)]
    return op._replace(sends=(*op.sends, random.choice(full))) if full else None


@edits(Wait)
def a_wait_left_out(code: Code, op: Wait, random: Random) -> list[Op]:
    return []


@edits(ComputeDelta)
def delta_of_other_numbers(code: Code, op: ComputeDelta, random: Random) -> Op:
    return op._replace(out=op.dout)


@edits(ComputeDelta)
def delta_left_out(code: Code, op: ComputeDelta, random: Random) -> list[Op]:
    return []


@edits(Fill)
def sums_that_do_not_begin_blank(code: Code, op: Fill, random: Random) -> Op | None:
    return op._replace(value=1.0) if is_sums(code, op.target) else None


# What leaves the sums as they are


@edits(AttendLeaves, HARMLESS)
def pairs_in_another_order(code: Code, op: AttendLeaves, random: Random) -> Op | None:
    return with_pairs(op, [*reversed(op.call.pairs)]) if len(op.call.pairs) > 1 else None


@edits(AttendLeaves, HARMLESS)
def pairs_by_two_ops(code: Code, op: AttendLeaves, random: Random) -> list[Op] | None:
    pairs = [*op.call.pairs]
    half = len(pairs) // 2
    return [with_pairs(op, pairs[half:]), with_pairs(op, pairs[:half])] if half else None


@edits(AttendLeaves, HARMLESS)
def rows_of_a_leaf_in_another_order(code: Code, op: AttendLeaves, random: Random) -> Op | None:
    leaf = any_leaf(op, random)
    if leaf is None:
        return None
    side, number, found = leaf
    turned = {
        name: (Run(start + (count - 1) * step, count, -step),)
        for name in Leaf._fields[2:]
        for start, count, step in getattr(found, name)
    }
    return with_leaf(op, side, number, found._replace(**turned))


@edits(Merge, HARMLESS)
def a_merge_of_blank_sums(code: Code, op: Merge, random: Random) -> list[Op] | None:
    """What has been merged is erased, and merged again."""
    erase = Fill(op.sources[0], 0.0)
    return [op, erase, op] if is_sums(code, op.sources[0]) else None


@edits(Merge, HARMLESS)
def a_merge_by_two_halves(code: Code, op: Merge, random: Random) -> list[Op] | None:
    rows = code.shape(op.targets[0])[0]
    if rows < 2:
        return None

    def half(ref: Ref, first: bool) -> Ref:
        start, stop, step = ref.rows or (0, rows, 1)
        middle = start + rows // 2 * step
        return ref._replace(rows=(start, middle, step) if first else (middle, stop, step))

    return [
        op._replace(sources=(half(op.sources[0], first),), targets=(half(op.targets[0], first),))
        for first in (False, True)
    ]


def _neighbours_exchanged(code: Code, random: Random, kind: type) -> Code | None:
    for number in places(code, kind, random):
        if number + 1 < len(code.ops) and isinstance(code.ops[number + 1], kind):
            one, other = code.ops[number : number + 2]
            return code._replace(ops=(*code.ops[:number], other, one, *code.ops[number + 2 :]))
    return None


def merges_in_another_order(code: Code, random: Random) -> Code | None:
    return _neighbours_exchanged(code, random, Merge)


def calls_in_another_order(code: Code, random: Random) -> Code | None:
    return _neighbours_exchanged(code, random, AttendLeaves)


def results_in_another_order(code: Code, random: Random) -> Code | None:
    return _neighbours_exchanged(code, random, Finish)


HARMLESS |= {
    mutation.__name__: mutation
    for mutation in (merges_in_another_order, calls_in_another_order, results_in_another_order)
}

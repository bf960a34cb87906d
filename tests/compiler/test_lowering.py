"""Programs: waits at first use, receives that meet their sends."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import chain, product

import pytest
import torch
from conformance.table import plans
from support.programs import most_held, operand_spans

import tilewise as tw
from tilewise.compiler.lowering import lower, tile_operands
from tilewise.compiler.program import Await, Compute, Instruction, Launch, Program
from tilewise.plan.builder import operand
from tilewise.plan.ir import Item, Plan, Role, Side

SIZES = (2, 3, 4, 6)


@cache
def some_plans(n: int) -> tuple[Plan, ...]:
    """Every strategy, as it is and pruned in two ways."""
    causal = tw.Causal(), tw.zigzag(4 * n, n)
    documents = tw.Document([0, n + 1, 4 * n]), tw.contiguous(4 * n, n)
    pruned = ((plan, *(tw.prune(plan, *by) for by in (causal, documents))) for plan in plans(n))
    return tuple(chain.from_iterable(pruned))


def used(instruction: Instruction) -> set[Item]:
    """The items whose values an instruction needs."""
    match instruction:
        case Compute(tile):
            return set(tile_operands(tile))
        case Launch(sends=sends):
            items = {transfer.item for transfer in sends}
            results = {item for item in items if item.role is Role.RESULT}
            return items | {item._replace(role=Role.PARTIAL) for item in results}
    return set()


def launches(program: Program) -> list[Launch]:
    return [i for i in program.instructions if isinstance(i, Launch)]


def arrived(program: Program, wait: Await) -> list[Item]:
    (launch,) = [one for one in launches(program) if one.handle == wait.handle]
    return [launch.recvs[index].item for index in wait.arrivals]


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("n", SIZES[:-1])
def test_every_receive_is_waited_for_once_and_before_its_use(n: int, ahead: int):
    for plan in some_plans(n):
        for rank in range(n):
            program = tw.lower(plan, rank, ahead=ahead)
            under_way: dict[Item, int] = Counter()
            for instruction in program.instructions:
                if isinstance(instruction, Await):
                    for item in arrived(program, instruction):
                        under_way[item] -= 1
                assert not any(under_way[item] for item in used(instruction)), (plan, rank)
                if isinstance(instruction, Launch):
                    under_way.update(transfer.item for transfer in instruction.recvs)
            assert not any(under_way.values())


@pytest.mark.parametrize("n", SIZES)
def test_waits_stand_at_the_first_use(n: int):
    """Between a wait and the instruction that uses its arrival stand only other waits."""
    for plan in some_plans(n):
        for rank in range(n):
            program = tw.lower(plan, rank)
            instructions = program.instructions
            for place, wait in enumerate(instructions):
                if not isinstance(wait, Await):
                    continue
                rest = instructions[place + 1 :]
                nearest = next((i for i in rest if not isinstance(i, Await)), None)
                if nearest is None:
                    continue
                # Several launches may begin one step: all that its sends need comes before.
                step = [i for i in rest if isinstance(i, Launch)]
                same = [i for i in step if step[0].step == i.step] if nearest in step else []
                needed = set().union(*map(used, [nearest, *same]))
                assert needed.intersection(arrived(program, wait)), (plan, rank, wait, nearest)


def test_a_ring_holds_two_received_shards_at_most():
    assert most_held(tw.lower(tw.ring(8), 3)) == 2


OFTEN = {4: ((0, None), (1, 2), (2, 3)), 6: ((2, 3),)}


def lane_cases() -> Iterator:
    """Ranks, steps ahead and ranks of a node; many ranks meet all of the latter in slow tests."""
    for n, ahead, node_size in product(SIZES, (0, 1, 2), (None, 1, 2, 3)):
        slow = n in OFTEN and (ahead, node_size) not in OFTEN[n]
        yield pytest.param(n, ahead, node_size, marks=[pytest.mark.slow] * slow)


@pytest.mark.parametrize(("n", "ahead", "node_size"), list(lane_cases()))
def test_receives_meet_their_sends_in_launch_order(n: int, ahead: int, node_size: int | None):
    for plan in some_plans(n):
        sent: dict[tuple, list] = defaultdict(list)
        received: dict[tuple, list] = defaultdict(list)
        for rank in range(n):
            for launch in launches(tw.lower(plan, rank, ahead=ahead, node_size=node_size)):
                for transfer in launch.sends:
                    sent[transfer.src, transfer.dst, launch.lane].append(
                        (transfer.item, transfer.rows)
                    )
                for transfer in launch.recvs:
                    received[transfer.src, transfer.dst, launch.lane].append(
                        (transfer.item, transfer.rows)
                    )
        assert sent == received, plan


def test_transfers_inside_a_node_and_between_nodes_take_lanes_of_their_own():
    plan = tw.double_ring(3, 4)
    lanes = {
        (launch.lane, transfer.src // 4 != transfer.dst // 4)
        for rank in range(12)
        for launch in launches(tw.lower(plan, rank, node_size=4))
        for transfer in (*launch.sends, *launch.recvs)
    }
    assert lanes == {(0, False), (1, True)}
    assert {one.lane for one in launches(tw.lower(plan, 0))} == {0}


def test_receives_ahead_are_posted_before_the_launch_of_their_step():
    plan, posted = tw.ring(5), {}
    for ahead in (0, 1, 2):
        program = tw.lower(plan, 2, ahead=ahead)
        seen = 0
        for instruction in program.instructions:
            seen += isinstance(instruction, Compute)
            if isinstance(instruction, Launch):
                for transfer in instruction.recvs:
                    posted[ahead, transfer.item, transfer.src] = seen
    late = [posted[0, item, src] - posted[1, item, src] for a, item, src in posted if a == 0]
    later = [posted[0, item, src] - posted[2, item, src] for a, item, src in posted if a == 0]
    assert max(late) == 1 and max(later) == 2 and min(late) == 0


def test_handles_are_distinct():
    for plan in some_plans(4):
        for ahead in (0, 1, 2):
            handles = [one.handle for one in launches(tw.lower(plan, 1, ahead=ahead))]
            assert len(set(handles)) == len(handles)


def test_operands_of_one_call_lie_side_by_side_in_its_order():
    for rank in range(4):
        (tile,) = [
            i.tile for i in tw.lower(tw.all_gather(4), rank).instructions if isinstance(i, Compute)
        ]
        arenas = tw.lower(tw.all_gather(4), rank).arenas
        assert arenas == (tuple(operand(Side.KV, shard) for shard in tile.kv),)
    q, kv = tw.lower(tw.attention2d(2, 3), 1).arenas
    assert {item.side for item in q} == {Side.Q} and {item.side for item in kv} == {Side.KV}
    assert (len(q), len(kv)) == (3, 2)


@pytest.mark.parametrize("n", SIZES)
def test_arenas_hold_an_item_once_and_nothing_in_them_goes_before_all_has_come(n: int):
    for plan in some_plans(n):
        for rank in range(n):
            program = tw.lower(plan, rank)
            items = [item for arena in program.arenas for item in arena]
            assert len(set(items)) == len(items)
            spans = operand_spans(program)
            for arena in program.arenas:
                received = [spans[item] for item in arena if item in spans]
                last_arrival = max(span.start for span in received)
                assert last_arrival < min(span.stop for span in received)


@pytest.mark.parametrize(
    "plan",
    [
        tw.ring(4096),
        tw.double_ring(512, 8),
        tw.hierarchical(tw.mesh(512, q_tile=16), tw.ring(8)),
        tw.balanced_ring(4096),
        tw.attention2d(64, 64),
        tw.mesh(4096, q_tile=64),
        tw.mesh(4096, q_tile=64, schedule="gather"),
        tw.ulysses(8, inner=tw.mesh(512, q_tile=16)),
        tw.tree(4096),
    ],
    ids=repr,
)
def test_a_rank_of_4096_builds_its_own_program_alone(plan: Plan, monkeypatch: pytest.MonkeyPatch):
    asked = []
    build = Plan.rank_steps

    def watched(self: Plan, rank: int):
        asked.append((self.world_size, rank))
        return build(self, rank)

    monkeypatch.setattr(Plan, "rank_steps", watched)
    monkeypatch.setattr(Plan, "steps", property(lambda self: pytest.fail("all ranks are built")))
    program = tw.lower(plan, 1234)
    assert asked[0] == (4096, 1234) and {*asked[1:]} <= {(512, 1234 // 8), (8, 1234 % 8)}
    assert any(isinstance(instruction, Compute) for instruction in program.instructions)


def test_there_is_no_such_rank():
    with pytest.raises(ValueError, match=r"rank \(4\) must be from 0 to 3"):
        tw.lower(tw.ring(4), 4)


LABELS = """\
launch kv0>2 kv1<1
compute q0 x kv0
wait kv1<1
launch kv1>2 kv2<1
compute q0 x kv1
launch kv1*>2 kv2*<1
wait kv2<1
compute q0 x kv2
wait kv2*<1
launch kv2*>2 kv0*<1
wait kv0*<1"""


def test_a_program_prints_an_instruction_a_line():
    assert str(tw.lower(tw.ring(3), 0)) == LABELS
    pruned = tw.prune(tw.ring(4), tw.Causal(), tw.zigzag(16, 4))
    assert "launch kv0[0:2]>3 kv1<1" in str(tw.lower(pruned, 0)).splitlines()
    assert "compute q0 x kv0..5 (6)" in str(tw.lower(tw.all_gather(6), 0))
    assert "compute q0 q1 x kv0 kv1, head group 1" in str(tw.lower(tw.ulysses(2), 1)).splitlines()


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.11
def test_a_profiler_sees_each_operation_by_its_pass_and_label():
    q = torch.randn(4, 2, 8)
    call = {"plan": tw.ring(1), "layout": tw.contiguous(4, 1), "mask": tw.Full()}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        tw.attention(q, q, q, **call)
        tw.attention(q, q, q, **call)
    sums = {event.key: event.count for event in profiled.key_averages()}
    assert {key: n for key, n in sums.items() if key.startswith("tilewise::")} == {
        "tilewise::fwd compute q0 x kv0": 2,
        "tilewise::fwd collect out lse": 2,
    }


def test_without_a_profiler_no_label_is_written(monkeypatch):
    monkeypatch.setattr(Compute, "__str__", lambda self: 1 // 0)
    q = torch.randn(4, 2, 8)
    tw.attention(q, q, q, plan=tw.ring(1), layout=tw.contiguous(4, 1), mask=tw.Full())


def test_declared_exchanges_are_one_launch_of_a_team_and_stay_in_place():
    plan = tw.ulysses(2, inner=tw.ring(2))
    program = lower(plan, 3, ahead=8, exchanges=plan.traits.exchanges)
    launches = [x for x in program.instructions if isinstance(x, Launch)]
    first, *inner, last = [launch for launch in launches if launch.sends]
    assert first.team.ranks == last.team.ranks == range(2, 4)
    assert len(first.sends) == len(first.recvs) == 2
    assert all(launch.team is None for launch in inner)


def test_receives_of_many_launches_ahead_come_before_the_first_send():
    program = lower(tw.ring(4), 0, ahead=8)
    launches = [x for x in program.instructions if isinstance(x, Launch)]
    count = next(i for i, launch in enumerate(launches) if launch.sends)
    assert sum(len(launch.recvs) for launch in launches[:count]) == 6
    assert not any(launch.recvs for launch in launches[count:])

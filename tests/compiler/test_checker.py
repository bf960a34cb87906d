"""check accepts what is right, and rejects every mutation of a plan that does harm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import NamedTuple

import pytest
from conformance.table import plans
from support.mutations import MUTATIONS
from support.plan_oracle import Table, right

import tilewise as tw
from tilewise.plan.builder import RankBuilder, operand, partial
from tilewise.plan.ir import Item, Plan, PlanError, RankStep, Role, Side, Step, Tile, Transfer

NUM_TOKENS = 11
NUM_MUTANTS = 30  # of each kind


class Case(NamedTuple):
    """A right plan, and what its mutants are held against."""

    plan: Plan
    mask: tw.Mask
    layout: tw.Layout
    table: Table


def _settings(n: int) -> Sequence[tuple[tw.Mask, tw.Layout]]:
    documents = tw.Document([0, 4, 5, NUM_TOKENS]) & tw.Causal()
    return (
        (tw.Full(), tw.contiguous(NUM_TOKENS, n)),
        (tw.Causal(), tw.zigzag(NUM_TOKENS, n)),
        (tw.Causal(), tw.contiguous(NUM_TOKENS, n)),
        (documents, tw.striped(NUM_TOKENS, n)),
        (tw.Window(2, 1), tw.contiguous(3, n)),
    )


@cache
def _plans(n: int) -> tuple[Plan, ...]:
    return tuple(plans(n))


@cache
def _case(n: int, number: int, setting: int) -> Case:
    mask, layout = _settings(n)[setting]
    plan = tw.prune(_plans(n)[number], mask, layout)
    return Case(plan, mask, layout, Table.of(plan, mask, layout))


def _any_case(random: Random) -> Case:
    n = random.randint(2, 6)
    case = _case(n, random.randrange(len(_plans(n))), random.randrange(5))
    return case if any(step.transfers for step in case.plan.steps) else _any_case(random)


@pytest.mark.parametrize("kind", MUTATIONS)
def test_every_harmful_mutation_is_rejected_with_step_rank_and_item(kind: str):
    seen: Counter[str] = Counter()
    for seed in range(NUM_MUTANTS):
        random = Random(f"{kind} {seed}")
        case = _any_case(random)
        mutant = MUTATIONS[kind](case.plan, random)
        if mutant is None or right(mutant, case.table):
            seen["harmless"] += 1
            continue
        seen["harmful"] += 1
        with pytest.raises(PlanError) as error:
            tw.check(mutant, case.mask, case.layout)
        found = error.value
        assert None not in (found.step, found.rank, found.item), (seed, str(found))
    assert seen["harmful"] >= NUM_MUTANTS // 5, seen


@pytest.mark.parametrize("kind", MUTATIONS)
def test_harmful_mutations_of_whole_plans_are_rejected_without_mask_and_layout(kind: str):
    for seed in range(25):
        random = Random(f"whole {kind} {seed}")
        n = random.randint(2, 6)
        case = _case(n, random.randrange(len(_plans(n))), 0)
        mutant = MUTATIONS[kind](case.plan, random)
        if mutant is not None and not right(mutant, case.table):
            with pytest.raises(ValueError):
                tw.check(mutant)
                tw.check(mutant, case.mask, case.layout)


@pytest.mark.parametrize("n", [2, 3, 4, *(pytest.param(x, marks=pytest.mark.slow) for x in (5, 6))])
def test_the_oracle_and_check_agree_on_every_plan_pruned_or_not(n: int):
    for number, plan in enumerate(_plans(n)):
        for setting in range(5):
            case = _case(n, number, setting)
            assert right(case.plan, case.table), case[:3]
            assert right(plan, case.table), (plan, *case[1:3])
            tw.check(case.plan, case.mask, case.layout)
            tw.check(plan, case.mask, case.layout)


def test_the_error_shows_the_grid_with_the_cell_marked():
    plan = tw.ring(3)
    steps = [step._replace(transfers=step.transfers[1:]) for step in plan.steps]
    with pytest.raises(PlanError) as error:
        tw.check(plan.replaced("broken", steps))
    assert (error.value.step, error.value.rank) == (1, 2)
    assert error.value.item == Item(Side.KV, Role.OPERAND, 0)
    lines = str(error.value).splitlines()
    assert lines[0].startswith("broken: step 1") and "kv0" in lines[0]
    (marked,) = [line for line in lines if "-->" in line]
    assert marked.split("|")[0].strip() == "1" and "-->q2xkv0" in marked and "<--" in marked


def test_a_partial_leaves_a_rank_once_a_step():
    plan = tw.all_gather(2)
    *before, last = plan.steps
    twice = last._replace(transfers=(*last.transfers, last.transfers[0]))
    with pytest.raises(PlanError, match="leaves rank 1 twice"):
        tw.check(plan.replaced("broken", [*before, twice]))


@pytest.mark.parametrize("rows", [((0, 3), (0, 3)), ((2, 3), (0, 2)), ((0, 4),), ((0, 0),), ()])
def test_rows_are_ascending_ranges_of_the_shard(rows):
    plan, mask, layout = tw.ring(2), tw.Causal(), tw.contiguous(6, 2)
    steps = list(tw.prune(plan, mask, layout).steps)
    transfers = [transfer._replace(rows=rows) for transfer in steps[0].transfers]
    assert transfers
    steps[0] = steps[0]._replace(transfers=tuple(transfers))
    with pytest.raises(PlanError, match="ascending ranges"):
        tw.check(plan.replaced("broken", steps), mask, layout)


def test_a_pruned_plan_does_not_cover_all_pairs():
    mask, layout = tw.Causal(), tw.contiguous(8, 4)
    pruned = tw.prune(tw.ring(4), mask, layout)
    with pytest.raises(PlanError, match="never computed"):
        tw.check(pruned)
    with pytest.raises(PlanError):
        tw.check(pruned, tw.Full(), layout)


def test_mask_and_layout_go_together():
    with pytest.raises(ValueError, match="together"):
        tw.check(tw.ring(2), tw.Causal())
    with pytest.raises(ValueError, match=r"layout is for 3 ranks, but ring.* for 2"):
        tw.check(tw.ring(2), tw.Causal(), tw.contiguous(6, 3))


def test_ends_of_a_transfer_that_disagree_are_found_when_the_steps_are_joined():
    transfer = Transfer(Item(Side.KV, Role.OPERAND, 0), 0, 1)
    parts = (RankStep(sends=(transfer,)),), (RankStep(),)
    owners = tw.ring(2).owners
    with pytest.raises(PlanError, match="known to one end only") as error:
        tw.check(Plan("one-sided", 2, 1, owners, script=parts.__getitem__))
    assert (error.value.step, error.value.rank, error.value.item) == (0, 1, transfer.item)


N = 3
KV = Side.KV


def gather(mistake: Callable[[RankBuilder, int], None], step: int, rank: int) -> Plan:
    """Ring by hand, with a mistake of one rank written at a step besides."""

    def script(mine: int) -> tuple[RankStep, ...]:
        s, left, right = RankBuilder(mine), (mine - 1) % N, (mine + 1) % N
        for i in range(N):
            shard, after = (mine + i) % N, (mine + i + 1) % N
            s.at(i).tile([mine], [shard])
            if i < N - 1:
                s.send(operand(KV, shard), left)
                s.recv(operand(KV, after), right)
        for i in range(1, N):
            s.at(N + i - 1).send(partial(KV, (mine + i) % N), (mine + i) % N)
            s.recv(partial(KV, mine), (mine - i) % N)
        if mine == rank:
            mistake(s.at(step), mine)
        return s.done()

    return Plan("by hand", N, script=script)


def forget(s: RankBuilder, what: int) -> None:
    """Leave out the last that was written of tiles (0), sends (1) or receives (2)."""
    s._steps[s._now][what].pop()


class Mistake(NamedTuple):
    """What one rank does wrong, at which step and rank; what the error says; what it marks."""

    write: Callable[[RankBuilder, int], None]
    where: tuple[int, int]
    says: str
    marked: tuple[int, int]
    item: str


MISTAKES = {
    "a receive is forgotten": Mistake(
        lambda s, rank: forget(s, 2),
        (1, 1),
        "step 1: kv0 from rank 2 to rank 1 is known to one end only: rank 2 sends it, rank 1 does "
        "not receive it",
        (1, 1),
        "kv0",
    ),
    "a send is forgotten": Mistake(
        lambda s, rank: forget(s, 1),
        (1, 2),
        "step 1: kv0 from rank 2 to rank 1 is known to one end only: rank 1 receives it, rank 2 "
        "does not send it",
        (1, 2),
        "kv0",
    ),
    "a tile is forgotten": Mistake(
        lambda s, rank: forget(s, 0),
        (0, 0),
        "q0 x kv0, head group 0, is never computed",
        (4, 0),
        "q0",
    ),
    "a tile is computed twice": Mistake(
        lambda s, rank: s.tile([rank], [rank]),
        (2, 1),
        "step 2, rank 1: q1 x kv1 was computed already, at step 0 on rank 1",
        (2, 1),
        "q1",
    ),
    "a rank that is not there": Mistake(
        lambda s, rank: s.send(operand(KV, rank), N),
        (0, 2),
        "step 0: kv2 from rank 2 to rank 3 is known to one end only: rank 2 sends it, and there "
        "are 3 ranks",
        (0, 2),
        "kv2",
    ),
    "another rank's transfer": Mistake(
        lambda s, rank: s._steps[0][1].append(Transfer(operand(KV, 0), 0, rank)),
        (0, 1),
        "step 0: rank 1 writes kv0 from rank 0 to rank 1; each rank writes what it sends and "
        "receives, as RankBuilder(1) does",
        (0, 1),
        "kv0",
    ),
    "a shard that is not there": Mistake(
        lambda s, rank: s.tile([rank], [7]),
        (1, 0),
        "step 1, rank 0: tile q0 x kv7 reads kv7: there is no such shard; kv shards are 0..2",
        (1, 0),
        "kv7",
    ),
    "a head group that is not there": Mistake(
        lambda s, rank: s.tile([rank], [rank], heads=1),
        (1, 0),
        "step 1, rank 0: tile q0 x kv0 reads q0/1: there is no such head group; they are 0..0",
        (1, 0),
        "q0/1",
    ),
    "an operand is read before it is there": Mistake(
        lambda s, rank: s.tile([rank], [(rank + 2) % N]),
        (1, 1),
        "step 1, rank 1: tile q1 x kv0 reads kv0: it arrives in step 1, and can be read from step "
        "2 on",
        (1, 1),
        "kv0",
    ),
    "an operand that nobody sends": Mistake(
        lambda s, rank: s.tile([(rank + 1) % N], [rank]),
        (1, 1),
        "step 1, rank 1: tile q2 x kv1 reads q2: it is not there, and nobody sends it to rank 1",
        (1, 1),
        "q2",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_typical_mistake_is_named_in_words_and_marked_in_the_grid(mistake: Mistake):
    tw.check(gather(lambda *_: None, 0, 0))
    with pytest.raises(PlanError) as error:
        tw.check(gather(mistake.write, *mistake.where))
    found, (said, header, *rows) = error.value, str(error.value).splitlines()
    assert said == f"by hand: {mistake.says}"
    assert (found.step, found.rank, str(found.item)) == (*mistake.marked, mistake.item)
    assert header.split() == ["step", "|", "rank", "0", "|", "rank", "1", "|", "rank", "2"]
    cells = {
        (int(row.split("|")[0]), rank): cell
        for row in rows
        for rank, cell in enumerate(row.split("|")[1:])
    }
    assert [place for place, cell in cells.items() if "-->" in cell] == [mistake.marked]


def test_partials_that_nobody_brings_home_are_named_with_their_home():
    def script(rank: int) -> tuple[RankStep, ...]:
        return tw.ring(2).rank_steps(rank)[:2]

    with pytest.raises(PlanError, match=r"kv1\* is left on rank 0, away from its home, rank 1"):
        tw.check(Plan("halfway", 2, script=script))


def test_a_script_returns_its_steps():
    with pytest.raises(ValueError, match=r"script of rank 0 returned NoneType.*RankBuilder.done"):
        tw.check(Plan("nothing", 2, script=lambda rank: None))


def test_shards_may_be_at_home_on_any_rank():
    """Relabelled shards are as right as the plan that they come from, whatever the mask."""
    plan, mask = tw.ring(3), tw.Causal()

    def moved(step: Step) -> Step:
        tiles = tuple(
            tuple(Tile(*([(s + 1) % 3 for s in side] for side in tile[:2])) for tile in tiles)
            for tiles in step.tiles
        )
        transfers = (
            transfer._replace(item=transfer.item._replace(shard=(transfer.item.shard + 1) % 3))
            for transfer in step.transfers
        )
        return Step(tiles, tuple(transfers))

    side = ((2,), (0,), (1,))
    relabelled = Plan("relabelled", 3, 1, (side, side), map(moved, plan.steps))
    tw.check(relabelled)
    pruned = tw.prune(relabelled, mask, tw.contiguous(9, 3))
    tw.check(pruned, mask, tw.contiguous(9, 3))
    before = tw.prune(plan, mask, tw.contiguous(9, 3))
    assert [len(s.transfers) for s in pruned.steps] == [len(s.transfers) for s in before.steps]
    crowded = Plan("crowded", 3, 1, (side, ((0,), (0,), (1,))), relabelled.steps)
    with pytest.raises(PlanError, match="rank 0 of 3 is home to 2 kv shards"):
        tw.check(crowded, mask, tw.contiguous(9, 3))

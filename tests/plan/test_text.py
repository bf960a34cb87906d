"""A plan as text and as JSON: both read back as the same plan."""

from __future__ import annotations

import json

import pytest
from conformance.table import plans

import tilewise as tw
from tilewise.plan.grid import marked_grid
from tilewise.plan.ir import Plan

EVERY = [plan for n in (1, 2, 3, 4, 6) for plan in plans(n)]
PRUNED = [
    tw.prune(plan, mask, layout)
    for plan in plans(4)
    for mask, layout in (
        (tw.Causal(), tw.zigzag(21, 4)),
        (tw.Document([0, 9, 21]), tw.striped(21, 4)),
        (tw.Window(0, 0), tw.contiguous(3, 4)),
    )
]


@pytest.mark.parametrize("plan", [*EVERY, *PRUNED], ids=repr)
def test_what_is_shown_is_parsed_back(plan: Plan):
    again = tw.parse(tw.show(plan))
    assert again == plan and again.name == plan.name


@pytest.mark.parametrize("plan", [*EVERY, *PRUNED], ids=repr)
def test_json_is_read_back(plan: Plan):
    again = tw.from_json(tw.to_json(plan))
    assert again == plan and again.name == plan.name


def test_cuts_and_save_are_written():
    plan = tw.ring(2)
    cut = Plan("cut", 2, 1, plan.owners, plan.steps, cuts=((0, 3), (3, 7)), default_save="gathered")
    for again in (tw.parse(tw.show(cut)), tw.from_json(tw.to_json(cut))):
        assert again == cut and again.cuts == ((0, 3), (3, 7)) and again.default_save == "gathered"


def test_the_grid_is_as_documented():
    assert tw.show(tw.ring(2)).splitlines() == [
        "plan: ring(2, moves='kv')",
        "ranks: 2, head groups: 1",
        "q held by: 0 1",
        "kv held by: 0 1",
        "save: replay",
        "step | rank 0       | rank 1",
        "   0 | q0xkv0 kv0>1 | q1xkv1 kv1>0",
        "   1 | q0xkv1       | q1xkv0",
        "   2 | kv1*>1       | kv0*>0",
    ]


def test_trimmed_rows_results_and_head_groups_are_shown():
    assert "q0!>1" in tw.show(tw.tree(2))
    assert "kv0/1>1" in tw.show(tw.ulysses(2))
    pruned = tw.prune(tw.ring(2), tw.Causal(), tw.zigzag(8, 2))
    assert "kv0[0:2]>1" in tw.show(pruned)


def test_an_empty_plan_is_read_back():
    plan = Plan("nothing", 2, 1, tw.ring(2).owners, ())
    assert tw.parse(tw.show(plan)) == plan


def test_the_part_around_a_cell_is_a_window_of_the_grid():
    text = marked_grid(tw.ring(16).steps, 16, 8, 8)
    lines = text.splitlines()
    assert len(lines) < 12 and "-->q8xkv0" in text
    assert "rank 8" in lines[0] and "rank 15" not in lines[0]


GRID = tw.show(tw.ring(2))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ranks: 2", "ranks: two", "a plan begins with the lines"),
        ("q held by: 0 1\n", "", "a plan begins with the lines"),
        ("   1 |", "   7 |", "must be step 1 with 2 cells"),
        ("q0xkv1       | q1xkv0", "q0xkv1", "must be step 1 with 2 cells"),
        ("kv1*>1", "kv1*>>1", "step 2, rank 0: 'kv1.*>>1' is neither a tile"),
        ("q0xkv1", "q0kv1", "step 1, rank 0: 'q0kv1' is neither a tile"),
    ],
)
def test_text_that_cannot_be_read_names_its_line(old: str, new: str, message: str):
    assert old in GRID
    with pytest.raises(ValueError, match=message):
        tw.parse(GRID.replace(old, new, 1))


def _changed(**fields: object) -> str:
    return json.dumps(json.loads(tw.to_json(tw.ring(2))) | fields)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "[]",
        "{}",
        _changed(format="another"),
        _changed(owners={}),
        _changed(world_size=None),
        _changed(steps=[{"tiles": []}]),
        _changed(steps=[{"tiles": [[], []], "transfers": [{"side": "K"}]}]),
    ],
)
def test_json_of_something_else_is_a_value_error(text: str):
    with pytest.raises(ValueError, match=r"not a plan in JSON|format is"):
        tw.from_json(text)


def test_what_is_read_is_not_yet_right():
    """Reading does not check; check does, and attention does before it sends anything."""
    plan = tw.parse(GRID.replace("kv1*>1", "."))
    with pytest.raises(tw.PlanError, match="left on"):
        tw.check(plan)

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


@pytest.mark.parametrize("most", (0, 1, 3))
def test_the_number_of_results_that_wait_is_written(most: int):
    plan = tw.ring(2)
    lean = plan.changed(waiting_results=most)
    assert lean != plan and lean.fingerprint != plan.fingerprint
    for again in (tw.parse(tw.show(lean)), tw.from_json(tw.to_json(lean))):
        assert again == lean and again.waiting_results == most
    assert "waiting" not in tw.show(plan) + tw.to_json(plan)  # versions of before read these


def test_a_plan_of_plans_lets_as_few_results_wait_as_they_do():
    lean = tw.mesh(4).changed(waiting_results=1)
    leaner = tw.ring(2).changed(waiting_results=0)
    assert tw.ulysses(2, lean).waiting_results == 1
    assert tw.ulysses(2, tw.ulysses(2, lean)).waiting_results == 1
    assert tw.ulysses(2, tw.ulysses(2, tw.mesh(4)).changed(waiting_results=0)).waiting_results == 0
    assert tw.hierarchical(leaner, lean).waiting_results == 0
    assert tw.hierarchical(tw.ring(2), lean).waiting_results == 1
    assert tw.hierarchical(tw.ring(2), tw.mesh(4)).waiting_results is None
    tuned = tw.ulysses(2, lean).tuned(8, 2)
    assert tuned.waiting_results == 1 and tuned.in_backward().waiting_results == 1


def test_a_wrong_number_of_waiting_results_is_named():
    with pytest.raises(ValueError, match=r"waiting_results \(-1\) must be at least 0"):
        tw.ring(2).changed(waiting_results=-1)
    with pytest.raises(
        ValueError, match=r"waiting_results \(1.5\) must be a whole number, at least 0"
    ):
        tw.ring(2).changed(waiting_results=1.5)  # pyright: ignore[reportArgumentType]
    text = tw.show(tw.ring(2).changed(waiting_results=1))
    with pytest.raises(ValueError, match=r"waiting results \('few'\) must be a whole number"):
        tw.parse(text.replace("waiting results: 1", "waiting results: few"))
    data = json.loads(tw.to_json(tw.ring(2))) | {"waiting_results": "few"}
    with pytest.raises(ValueError, match=r"plan.waiting_results \('few'\) must be a whole number"):
        tw.from_json(json.dumps(data))


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
        (
            "ranks: 2",
            "ranks: two",
            r"a plan begins .*: ranks \('two, head groups: 1'\) must be as in",
        ),
        ("q held by: 0 1\n", "", "a plan begins with the lines .*: there is no line 'q held by'"),
        ("   1 |", "   7 |", "must be step 1 with 2 cells"),
        ("q0xkv1       | q1xkv0", "q0xkv1", "must be step 1 with 2 cells"),
        ("q0xkv1 ", "q0xkv1, ", "step 1, rank 0: 'q0xkv1,' is neither a tile"),
        ("kv0>1", "kv0[1:]>1", r"step 0, rank 0: 'kv0\[1:\]>1' is neither a tile"),
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


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("kv0>1", "kv0>2", "step 0: kv0 from rank 0 to rank 2: there are 2 ranks"),
        ("q1xkv1", "q1xkv9", "step 0, rank 1: tile q1 x kv9 reads kv9: there is no such shard"),
        ("q1xkv1", "q1xkv1/3", "reads q1/3: there is no such head group; they are 0..0"),
        ("kv1*>1", "kv1*[5:2]>1", "are not ascending ranges"),
        ("kv held by: 0 1", "kv held by: 0 5", "kv1 is owned by rank 5 of 2"),
        ("head groups: 1", "head groups: 0", "num_head_groups (0) must be at least 1"),
    ],
)
def test_text_that_names_what_there_is_not_says_where(old: str, new: str, message: str):
    text = tw.show(tw.ring(2))
    assert old in text
    with pytest.raises(ValueError) as error:
        tw.parse(text.replace(old, new))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"owners": {"Q": [[0, 1], [1, 0]], "KV": [[0], [1]]}}, "not 2 with no cuts"),
        ({"owners": {"Q": [[0, 1]], "KV": [[0]]}, "cuts": [[0, 1]]}, "not 1 with 1 cuts"),
    ],
)
def test_queries_that_all_ranks_have_are_one_shard(change: dict, message: str):
    data = json.loads(tw.to_json(tw.tree(2))) | change | {"steps": []}
    with pytest.raises(tw.PlanError, match=f"one shard without cuts, {message}"):
        tw.from_json(json.dumps(data))


def test_an_entry_of_a_wrong_type_is_named_with_its_value():
    data = json.loads(tw.to_json(tw.ring(2)))
    data["steps"][0]["transfers"][1]["src"] = "x"
    with pytest.raises(
        ValueError, match=r"steps\[0\]\.transfers\[1\]\.src \('x'\) must be a whole"
    ):
        tw.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, r"the plan's name \(''\) must be a line of text"),
        ({"name": "two\nlines"}, "must be a line of text"),
        ({"owners": {"Q": [], "KV": [[0], [1]]}}, "there are no q shards"),
        ({"owners": {"Q": [[0], [-9]], "KV": [[0], [1]]}}, "q1 is owned by rank -9 of 2"),
        ({"steps": [{"tiles": [[[[0], [], 0]], []], "transfers": []}]}, "a tile has no kv shards"),
    ],
)
def test_a_plan_that_text_cannot_say_is_refused(change: dict, message: str):
    data = json.loads(tw.to_json(tw.ring(2))) | change
    with pytest.raises(ValueError, match=message):
        tw.from_json(json.dumps(data))

"""A canonical reduction: one result, to the bit, for any ranks, plan, layout and packing."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from conformance.bits import HEADS, TOKENS, Case, alone, assert_same, made, results

PLANS = (
    tw.all_gather(3),
    tw.all_gather(8),
    tw.ulysses(2),
    tw.ulysses(2, inner=tw.all_gather(3)),
    tw.ulysses(1, inner=tw.all_gather(5)),
    tw.needed(tw.Causal(), tw.zigzag(TOKENS, 5)),
    tw.needed(tw.Causal(), tw.zigzag(TOKENS, 6), node_size=2),
)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_every_strategy_gives_the_bits_of_one_rank(plan: tw.Plan):
    case = made()
    assert_same(results(case, plan, tw.zigzag(TOKENS, plan.world_size)), alone(case))


def uneven(n: int) -> tw.Layout:
    """Rows in no order, one rank without any."""
    rows, chosen = [[] for _ in range(n)], random.Random(3)
    for token in range(TOKENS):
        rows[chosen.randrange(n - 1)].append(token)
    for of_rank in rows:
        chosen.shuffle(of_rank)
    return tw.Layout.from_positions(rows, TOKENS)


LAYOUTS = (tw.contiguous(TOKENS, 3), tw.zigzag(TOKENS, 5), tw.striped(TOKENS, 3), uneven(4))
MASKS = (
    tw.Full(),
    tw.Causal() & tw.Window(70, 0),
    tw.Causal() & tw.Document([0, 3, 3, 90, TOKENS]),
    tw.Document([0, 100, TOKENS]) | tw.Window(1, 1),
    tw.PerHead([tw.Causal(), tw.Full()]),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_every_layout_and_mask_gives_the_bits_of_one_rank(layout: tw.Layout, mask: Any):
    case = made(torch.bfloat16, mask=mask)
    expected = alone(case)
    n = layout.world_size
    plans = [tw.all_gather(n), tw.needed(mask, layout)]
    plans += [tw.ulysses(2, inner=tw.all_gather(n // 2))] if n % 2 == 0 else []
    for plan in plans:
        assert_same(results(case, plan, layout), expected)


SINKS = torch.linspace(-1, 2, HEADS), torch.linspace(-1, 2, 2 * HEADS).view(2, HEADS)
CASES = {
    "fp64": made(torch.float64),
    "fp16 batch": made(torch.float16, (2,)),
    "widths": made(v_width=5),
    "fp16 widths": made(torch.float16, v_width=5),
    "MQA": made(heads=(4, 1)),
    "softcap": made(softcap=2.0),
    "dropout": made(dropout_p=0.2, dropout_seed=5),
    "dense bias": made(bias=torch.linspace(-2, 2, HEADS * TOKENS**2).view(HEADS, TOKENS, TOKENS)),
    "alibi": made(bias=tw.alibi([0.5, 0.25, 0.1, 0.0])),
    "max logit": made(return_max_logit=True),
    "sink": made(sink=SINKS[0]),
    "two sinks a head": made(torch.float64, sink=SINKS[1].double()),
    "sinks of a batch": made(batch=(2,), sink=torch.stack([SINKS[1], SINKS[1] + 1])),
}


@pytest.mark.parametrize("name", CASES)
def test_every_option_gives_the_bits_of_one_rank(name: str):
    case = CASES[name]
    expected = alone(case)
    plans = [tw.all_gather(3)]
    if case.k.shape[-2] % 2 == 0:
        plans += [tw.ulysses(2), tw.ulysses(2, inner=tw.all_gather(2))]
    for plan in plans:
        found = results(case, plan, tw.zigzag(TOKENS, plan.world_size))
        assert_same(found, expected)


def test_a_plan_made_for_another_layout_is_refused_as_ever():
    case, plan = made(), tw.needed(tw.Causal(), tw.striped(TOKENS, 3))
    with pytest.raises(ValueError, match=r"needed is a plan for .* on striped"):
        results(case, plan, tw.zigzag(TOKENS, 3))


def test_save_pruning_exact_wires_and_a_backward_plan_change_no_bit():
    case, layout = made(), tw.striped(TOKENS, 4)
    expected = alone(case)
    for more in (
        {"save": "gathered"},
        {"save": "replay", "prune": False},
        {"save": "gathered", "prune": False},
        {"wire_dtype": "float64"},
        {"backward_plan": tw.ulysses(2, inner=tw.all_gather(2))},
        {"backward_plan": tw.needed(tw.Causal(), layout)},
    ):
        assert_same(results(case, tw.all_gather(4), layout, **more), expected)


def test_threads_change_no_bit():
    case, threads = made(softcap=3.0), torch.get_num_threads()
    expected, other = alone(case), alone(made())
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            assert_same(alone(case), expected)
            assert_same(alone(made()), other)
    finally:
        torch.set_num_threads(threads)


def test_a_document_has_the_same_bits_whatever_is_packed_around_it():
    """Its tokens are at other positions, and its neighbours are of other lengths."""
    case, chosen = made(), random.Random(0)
    first, stop = 60, 210
    own = Case(*(x[first:stop] for x in case[:5]))
    expected = alone(own)
    for _ in range(6):
        before, after = chosen.randrange(200), chosen.randrange(200)
        around = made(tokens=before + after)
        parts = zip(around[:5], own[:5], strict=True)
        packed = Case(*(torch.cat((x[:before], y, x[before:])) for x, y in parts))
        total = before + after + stop - first
        mask = tw.Causal() & tw.Document([0, before, before + stop - first, total])
        n = chosen.randrange(1, 5)
        found = results(packed, tw.all_gather(n), tw.zigzag(total, n), mask=mask)
        mine = {name: x[before : before + stop - first] for name, x in found.items()}
        assert_same(mine, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_error_is_at_most_twice_that_of_fast(dtype: torch.dtype):
    case, layout = made(dtype), tw.zigzag(TOKENS, 3)
    exact = Case(*(x.double() for x in case[:5]), options={"kernel": "reference"})
    expected = alone(exact, reduction="fast")
    found = results(case, tw.all_gather(3), layout)
    fast = results(case, tw.ring(3), layout, reduction="fast")
    for name, x in expected.items():
        most = (fast[name] - x).abs().max() + 8 * torch.finfo(torch.float64).eps
        assert (found[name] - x).abs().max() <= 2 * most, name


def test_cross_attention_and_joint_layouts_have_the_bits_of_one_rank():
    case = made(mask=tw.Full())
    keys = Case(*(x[:200] for x in case[:5]))

    def cross(n: int) -> Tensor:
        layout, kv_layout = tw.zigzag(TOKENS, n), tw.striped(200, n)

        def main(rank: int, group: Any) -> Tensor:
            x = layout.shard(case.q, rank), *(kv_layout.shard(t, rank) for t in keys[1:3])
            given = {
                "plan": tw.all_gather(n),
                "layout": layout,
                "kv_layout": kv_layout,
                "group": group,
            }
            return tw.attention(*x, mask=tw.Full(), reduction="canonical", **given)

        return layout.unshard(tw.loopback(n, main))

    assert torch.equal(cross(3), cross(1))
    joint = tw.joint(tw.contiguous(TOKENS - 20, 3), replicated=range(20))

    def main(rank: int, group: Any) -> Tensor:
        x = (joint.shard(t, rank) for t in case[:3])
        given = {"plan": tw.all_gather(3), "layout": joint, "mask": tw.Full(), "group": group}
        return tw.attention(*x, reduction="canonical", **given)

    assert torch.equal(joint.unshard(tw.loopback(3, main)), alone(case)["out"])


def test_rows_that_meet_nothing_have_the_bits_of_one_rank():
    """Their results are blank, or what the sink makes of them, wherever they are."""
    mask = tw.Slices([((100, 200), (20, 60), "full"), ((250, 260), (240, 260), "causal")])
    case = made(mask=mask, sink=SINKS[0])
    expected = alone(case)
    assert torch.equal(expected["lse"][0], SINKS[0]) and not expected["out"][0].any()
    layout = tw.striped(TOKENS, 4)
    for plan in (tw.all_gather(4), tw.ulysses(2, inner=tw.all_gather(2)), tw.needed(mask, layout)):
        assert_same(results(case, plan, layout), expected)

"""What a call made is gone with its last user, without the help of the garbage collector."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest
import torch
from support.thinned import thinned

import tilewise as tw

NUM_TOKENS, RANKS = 24, 4
LAYOUT = tw.zigzag(NUM_TOKENS, RANKS)
PLANS: dict[str, Callable[[tw.Mask], tw.Plan]] = {
    "ring": lambda mask: tw.ring(RANKS),
    "mesh": lambda mask: tw.mesh(RANKS, q_tile=2),
    "ulysses": lambda mask: tw.ulysses(2, inner=tw.ring(2)),
    "needed": lambda mask: tw.needed(mask, LAYOUT),
    "tiled": lambda mask: tw.tiled(mask, LAYOUT),
    "read": lambda mask: tw.parse(tw.show(tw.all_gather(RANKS))),
}


@pytest.mark.parametrize(("save", "kind"), thinned(product(("replay", "gathered"), PLANS), 5))
def test_steps_with_masks_and_plans_of_their_own_leave_nothing(kind: str, save):
    def step(number: int) -> None:
        mask = tw.Document([0, number, 20, NUM_TOKENS]) & tw.Causal()
        plan = PLANS[kind](mask)

        def rank_step(rank: int, group) -> None:
            q, k, v = (torch.randn(6, 2, 4, requires_grad=True) for _ in range(3))
            together = {"plan": plan, "layout": LAYOUT, "mask": mask, "group": group}
            out, lse = tw.attention(q, k, v, **together, save=save, return_lse=True)
            (out.sum() + lse.sum()).backward()

        tw.loopback(RANKS, rank_step)

    gc.freeze()  # what other tests left is neither collected nor counted
    try:
        step(1)
        gc.collect()
        before = _live()
        gc.disable()
        for number in range(2, 12):
            step(number)
        assert _live() - before == Counter()
    finally:
        gc.enable()


def test_plans_that_run_backward_for_each_other_go_with_their_last_user():
    def run(plan: tw.Plan, backward_plan: tw.Plan) -> None:
        def rank_step(rank: int, group) -> None:
            q, k, v = (torch.randn(6, 2, 4, requires_grad=True) for _ in range(3))
            plans = {"plan": plan, "backward_plan": backward_plan}
            tw.attention(q, k, v, **plans, layout=LAYOUT, mask=tw.Causal(), group=group).sum()

        tw.loopback(RANKS, rank_step)

    plans = [tw.ring(RANKS), tw.all_gather(RANKS)]
    for plan, backward_plan in product(plans, plans):
        run(plan, backward_plan)
    released = [weakref.ref(plan) for plan in plans]
    gc.disable()
    try:
        del plans, plan, backward_plan
        assert [plan() for plan in released] == [None, None]
    finally:
        gc.enable()


def _live() -> Counter[str]:
    """Tensors and objects of the package's own types, but for what a search for a plan leaves."""
    return Counter(
        {
            kind.__name__: count
            for kind, count in Counter(map(type, gc.get_objects())).items()
            if issubclass(kind, torch.Tensor) or _is_ours(str(kind.__module__))
        }
    )


def _is_ours(module: str) -> bool:
    root, _, rest = module.partition(".")
    return root == "tilewise" and not rest.startswith("strategies")

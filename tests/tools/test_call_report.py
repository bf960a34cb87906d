"""Kernel calls of whole plans: they compute what the mask allows, and little beside it."""

import numpy as np
import pytest

import tilewise as tw
from tilewise.layouts.balanced import balanced
from tilewise.layouts.layout import Layout
from tilewise.plan.ir import Plan
from tilewise_tools.mask_report.figures import Waste, report, total

CORPORA = (("prolong512k", 4, 0.0), ("pile", 4, 0.0), ("prolong512k", 1, 0.6))


def documents(corpus: tuple[str, int, float], num_tokens: int, seed: int) -> tw.Mask:
    name, share, mix = corpus
    cu = tw.lengths.sample(name, num_tokens, seed=seed, cap=num_tokens // share, mix=mix)
    return tw.masks.causal_document(cu)


def small(num_tokens: int, longest: int, seed: int) -> tw.Mask:
    rng = np.random.default_rng(seed)
    edges = np.cumsum(rng.integers(1, longest + 1, 2 * num_tokens))
    return tw.masks.causal_document([0, *edges[edges < num_tokens].tolist(), num_tokens])


def whole(plan: Plan, mask: tw.Mask, layout: Layout) -> Waste:
    """All ranks' figures; the calls' cells are those that the mask allows."""
    found = total(report(mask, layout, plan))
    everything = (0, layout.num_tokens)
    assert found.allowed == mask.area(everything, everything)
    return found


@pytest.mark.parametrize("n", [4, 16])
@pytest.mark.parametrize("size", [1024, 1000])
def test_causal_zigzag_wastes_less_than_five_percent(n: int, size: int):
    layout = tw.zigzag(n * size + 3, n)
    tile = next(a for a in range(2, n) if n % a == 0)
    for plan in (tw.ring(n), tw.mesh(n, q_tile=tile), tw.needed(tw.Causal(), layout)):
        found = whole(plan, tw.Causal(), layout)
        assert found.ratio < 1.05
        assert found.num_calls <= 2 * n * n


@pytest.mark.parametrize("seed", [0, *(pytest.param(x, marks=pytest.mark.slow) for x in (1, 2, 3))])
@pytest.mark.parametrize("corpus", CORPORA, ids=str)
def test_documents_waste_at_most_thirty_percent(corpus: tuple[str, int, float], seed: int):
    n, num_tokens = 8, 8 * 4096
    mask = documents(corpus, num_tokens, seed)
    for layout in (tw.zigzag(num_tokens, n), balanced(mask, num_tokens, n)):
        for plan in (tw.ring(n), tw.mesh(n, q_tile=2), tw.needed(mask, layout)):
            assert whole(plan, mask, layout).ratio <= 1.3
    layout = tw.tiled_layout(mask, num_tokens, n)
    assert whole(tw.tiled(mask, layout), mask, layout).ratio <= 1.3


@pytest.mark.parametrize("longest", [1, 10, 100, 600])
def test_small_documents_waste_no_more_than_calls_of_128_tokens(longest: int):
    """Very short documents share calls of 128 tokens: beyond thirty percent, a call costs more."""
    n, num_tokens = 4, 4 * 2048
    mask = small(num_tokens, longest, seed=longest)
    layout = balanced(mask, num_tokens, n)
    found = whole(tw.needed(mask, layout), mask, layout)
    assert found.computed <= max(1.3 * found.allowed, 256 * num_tokens)
    assert found.num_calls <= n * (2 * num_tokens / n / min(128, 4 * longest) + 8)


def test_ranks_can_be_chosen():
    mask, layout, plan = tw.Causal(), tw.zigzag(400, 4), tw.ring(4)
    every = report(mask, layout, plan)
    assert report(mask, layout, plan, ranks=(3, 1)) == (every[3], every[1])
    assert report(mask, layout, plan, ranks=()) == () and total(()) == Waste(0, 0, 0, 0)


def test_a_mask_by_head_counts_every_head():
    mask = tw.PerHead([tw.Causal(), tw.Full(), tw.Window(3, 0), tw.Causal()])
    layout, areas = tw.contiguous(60, 2), [60 * 61 // 2, 60 * 60, 60 * 4 - 6, 60 * 61 // 2]
    assert total(report(mask, layout, tw.ring(2))).allowed == sum(areas)
    by_heads = report(mask, layout, tw.ulysses(2))
    assert [row.allowed for row in by_heads] == [sum(areas[:2]), sum(areas[2:])]


def test_a_plan_made_for_another_mask_is_refused():
    layout = tw.zigzag(64, 4)
    with pytest.raises(ValueError, match="make it for these"):
        report(tw.Full(), layout, tw.needed(tw.Causal(), layout))

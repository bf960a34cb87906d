"""The planner: never beaten by hand, bounds below times, candidates that run, files checked."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from support.described import machine, workload

import tilewise as tw
from tilewise.expressions import read_plan
from tilewise.layouts.balanced import default_layout
from tilewise.planning.advisor import nearest_settings
from tilewise.planning.bounds import shape_bound, steps_bound
from tilewise.planning.candidate import PlanRow
from tilewise.planning.distances import least_bytes
from tilewise.planning.options import Option, options
from tilewise.planning.pairs import MAX_MESSAGES, PairSearch
from tilewise.planning.pass_model import PassModel
from tilewise.planning.reasons import TIE, reason
from tilewise.planning.trials import Trials, explore
from tilewise.simulation.machine import Link
from tilewise.simulation.simulator import simulate_pass
from tilewise.strategies.mesh import SCHEDULES

CLUSTERS = {
    "nodes": machine(1e9, 1e12, node_size=2, nics=2, inside=Link(8e9, 1e-7), launch_seconds=1e-6),
    "one NIC": machine(1e9, 1e13, node_size=2, nics=1, inside=Link(8e9)),
    "slow": machine(1e6, node_size=2, nics=2, inside=Link(4e6, 1e-6)),
}


def by_hand(n: int, work: tw.Workload) -> list[tw.Plan]:
    """What somebody would try: all strategies, tiles and schedules under every split by heads."""
    found = [tw.balanced_ring(n)]
    for degree in (d for d in range(1, n + 1) if n % d == 0 and work.num_kv_heads % d == 0):
        m = n // degree
        sizes = [d for d in range(1, m + 1) if m % d == 0]
        inner = [tw.ring(m), tw.ring(m, moves="q"), tw.all_gather(m)]
        inner += [tw.double_ring(m // d, d) for d in sizes]
        inner += [tw.attention2d(d, m // d) for d in sizes]
        for schedule in SCHEDULES:
            inner += [tw.mesh(m, q_tile=d, schedule=schedule) for d in sizes]
        found += inner if degree == 1 else [tw.ulysses(degree, inner=plan) for plan in inner]
    return found


def test_what_is_found_for_a_canonical_workload_is_proven():
    mask = tw.Causal() & tw.Document([0, 200, 500])
    work = tw.Workload(500, 4, 2, 8, "float32", mask=mask, reduction="canonical")
    found = tw.search(work, CLUSTERS["nodes"], world_size=4)
    assert {"all_gather", "needed"} < {candidate.strategy for candidate in found}
    for candidate in found:
        assert candidate.work.reduction == "canonical"
        candidate.plan.check_canonical(candidate.work, candidate.backward_plan)
        assert nearest_settings(candidate) == ()  # other libraries have none


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("one NIC", tw.Full()),
        ("slow", tw.Causal()),
        pytest.param("nodes", tw.Causal(), marks=pytest.mark.slow),
        pytest.param("one NIC", tw.Causal(), marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_nothing_tried_by_hand_is_faster(name: str, mask: tw.Mask):
    n = 6
    work, cluster = workload(n, num_kv_heads=2, mask=mask, save=None), CLUSTERS[name]
    best = tw.search(work, cluster, world_size=n)[0]
    again = tw.simulate(best.plan, work, cluster, backward_plan=best.backward_plan)
    assert again.seconds == pytest.approx(best.seconds)
    assert again.peak_bytes == best.peak_bytes
    passes = []
    for plan in by_hand(n, work):
        found = tw.simulate(plan, work, cluster)
        assert best.seconds <= found.seconds * TIE, plan
        replayed = tw.simulate(plan, replace(work, save="replay"), cluster)
        passes.append((replayed.forward_seconds, replayed.backward_seconds))
    apart = sum(min(times) for times in zip(*passes, strict=True))
    assert best.seconds <= apart * TIE


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize(
    ("n", "mask"),
    (
        (8, tw.Causal()),
        pytest.param(24, tw.Causal(), marks=pytest.mark.slow),
        pytest.param(12, tw.Full(), marks=pytest.mark.slow),
        (6, tw.Causal() & tw.Document([0, 5, 9, 40, 96])),
        pytest.param(8, tw.Causal() & tw.Window(20, 0), marks=pytest.mark.slow),
    ),
)
def test_no_bound_is_above_a_simulated_time(name: str, n: int, mask: tw.Mask):
    work = workload(n, num_kv_heads=4, mask=mask)
    layout = default_layout(mask, work.num_tokens, n)
    work = replace(work, layout=layout)
    tried = options(work, n, CLUSTERS[name].node_size)
    for backward in (False, True):
        model = PassModel(work, CLUSTERS[name], n, backward)
        for option in tried[:: max(1, len(tried) // 12)]:
            _check_bounds(model, option)


def _check_bounds(model: PassModel, option: Option) -> None:
    plan = option.make()
    timeline, _ = simulate_pass(plan, model.work, model.machine, model.backward)
    bounds = shape_bound(model, option), steps_bound(model, option).seconds
    assert max(bounds) <= timeline.seconds, (plan, bounds, timeline.seconds)


@pytest.mark.parametrize("name", CLUSTERS)
def test_more_bandwidth_is_never_slower_and_no_time_below_its_bounds(name: str):
    work, cluster = workload(4, num_kv_heads=4, mask=tw.Causal(), save=None), CLUSTERS[name]
    slow = tw.search(work, cluster, world_size=4)
    assert tw.search(work, cluster.scaled(3), world_size=4)[0].seconds <= slow[0].seconds * 1.01
    seconds = [one.seconds for one in slow]
    assert seconds[0] <= TIE * min(seconds)
    assert seconds[1:] == pytest.approx(sorted(seconds[1:]), rel=1e-11)
    for one in slow:
        assert one.seconds >= one.distances.compute_seconds
        assert one.sent_bytes >= one.distances.least_bytes


@pytest.mark.parametrize("num_kv_heads", (1, 2, 8))
@pytest.mark.parametrize("n", (2, 6, pytest.param(16, marks=pytest.mark.slow)))
def test_no_plan_moves_less_than_the_least(n: int, num_kv_heads: int):
    for mask in (tw.Full(), tw.Causal()):
        work = workload(n, num_kv_heads=num_kv_heads, mask=mask, save=None)
        least = least_bytes(work, n)
        for option in options(work, n, 1)[::3]:
            plan = option.make()
            for save in ("replay", "gathered"):
                sent = tw.volume(plan, replace(work, save=save))
                busiest = max(map(sum, zip(*sent, strict=True)))
                assert busiest >= least, (plan, save)


def two_sided(plan: tw.Plan) -> bool:
    """Whether a plan moves both queries and keys beside the exchange of a split by heads."""
    inner = plan.traits.head_split[1] if plan.traits.head_split else plan
    sides = {transfer.item.side for step in inner.rank_steps(0) for transfer in step.sends}
    return len(sides) == 2


@pytest.mark.parametrize(
    ("group", "n"),
    ((2, 3), (2, 4), (4, 6), (4, 8), (8, 8), (8, 12), (8, 16)),
)
def test_few_kv_heads_and_few_ranks_need_no_second_dimension(group: int, n: int):
    """Bound by one link's bandwidth: n <= 2 Hq / Hkv forward, n <= 1.5 Hq / Hkv backward."""
    work = workload(n, num_heads=8, num_kv_heads=8 // group, save="replay", layout="contiguous")
    best = tw.search(work, machine(1e6), world_size=n)[0]
    assert not two_sided(best.plan)
    assert n > 1.5 * group or not two_sided(best.backward_plan)


@pytest.mark.parametrize("times", (1.25, pytest.param(7, marks=pytest.mark.slow)))
@pytest.mark.parametrize("mask", (tw.Full(), tw.Causal()), ids=repr)
def test_more_bandwidth_everywhere_never_slows_the_choice(mask: tw.Mask, times: float):
    n = 4
    work = workload(n, num_heads=6, num_kv_heads=2, mask=mask, save=None)
    for cluster in CLUSTERS.values():
        slow, fast = (
            tw.search(work, one, world_size=n)[0].seconds
            for one in (cluster, cluster.scaled(times))
        )
        assert fast <= 1.01 * slow, cluster


@pytest.mark.slow
def test_a_token_more_on_some_ranks_is_planned_for_as_if_all_had_it():
    n, preset = 72, tw.Machine.preset("h100x8")
    uneven = tw.Workload(n * 128 - 5, 8, 8, 64, mask=tw.Causal(), save="replay")
    best = tw.search(uneven, preset, world_size=n)[0]
    assert f"those of {n * 128} tokens" in best.reason
    assert best.layout == tw.zigzag(n * 128 - 5, n) and best.work.num_tokens == n * 128 - 5
    even = tw.search(replace(uneven, num_tokens=n * 128), preset, world_size=n)[0]
    assert (even.plan.name, even.seconds) == (best.plan.name, best.seconds)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("nodes", "one NIC"))
def test_the_first_of_many_causal_ranks_has_its_exact_time(name: str):
    n = 96
    work = workload(n, num_kv_heads=2, mask=tw.Causal(), save=None)
    found = tw.search(work, CLUSTERS[name], world_size=n)
    best = found[0]
    every = tw.simulate(
        best.plan, work, CLUSTERS[name], backward_plan=best.backward_plan, exact=True
    )
    assert best.seconds == pytest.approx(every.seconds, rel=1e-9)
    assert best.bytes_by_link == every.bytes_by_link
    assert best.seconds <= TIE * min(one.seconds for one in found)


def test_a_spent_budget_does_not_end_the_search_before_an_option_fits():
    work, cluster = workload(8, num_kv_heads=4, mask=tw.Causal()), CLUSTERS["slow"]
    work = replace(work, layout=work.layout_for(8))
    tried = options(work, 8, cluster.node_size)
    trials = Trials(PassModel(work, cluster, 8, False), tried)
    forward = [option for option in tried if not option.keeps]
    slowest = max((option for option in forward if not option.variant), key=trials.bound)
    found = explore(forward, [trials], lambda trial: trial.option == slowest, 1)
    assert slowest in [trial.option for (trial,) in found]


def _windowed() -> PassModel:
    mask, cluster = tw.Causal() & tw.Window(5, 0), CLUSTERS["nodes"]
    work = workload(8, num_kv_heads=2, mask=mask)
    return PassModel(replace(work, layout=work.layout_for(8)), cluster, 8, False)


def test_a_trial_of_unlike_ranks_counts_as_its_operations():
    model = _windowed()
    tried = options(model.work, 8, model.machine.node_size)
    trials = Trials(model, tried)
    found = trials.trial(tried[0])
    timeline, _ = simulate_pass(found.plan, model.work, model.machine, False)
    assert timeline.recording
    assert trials.num_messages == sum(map(len, timeline.recording.operations))


def test_the_fastest_plan_of_forward_is_the_first_in_backward():
    model, fastest = _windowed(), list[int]()

    def note(next_part: str) -> None:
        if "backward" in next_part:
            trials = found.forward.tried.values()
            fastest.append(min(trials, key=lambda trial: trial.rank).option.order)

    tried = options(model.work, 8, model.machine.node_size)
    found = PairSearch(model, tried, math.inf, 1, progress=note)
    found.fastest()
    assert next(iter(found.backward["replay"].tried)).order == fastest[0]


def test_a_node_partly_full_does_not_end_the_search_early():
    n, preset = 80, tw.Machine.preset("nvl72")
    work = tw.Workload(n << 10, 32, 8, 128, mask=tw.Causal(), dtype="bfloat16", save="replay")
    work = replace(work, layout=work.layout_for(n))
    tried = options(work, n, preset.node_size)
    trials = Trials(PassModel(work, preset, n, False), tried)
    forward = [option for option in tried if not option.keeps]
    found = explore(forward, [trials], lambda trial: True, MAX_MESSAGES)
    (best,) = min(found, key=lambda each: each[0].seconds)
    hand = simulate_pass(tw.ulysses(8, inner=tw.ring(10)), work, preset, False)[0]
    assert best.seconds <= hand.seconds * TIE


@pytest.mark.parametrize(
    ("times", "said"),
    (
        (1.0, "Just as long as ring: it "),
        (1.00329, "0.329 % longer than ring: it "),
        (1.9999, "100 % longer than ring: it "),
        (2.5, "2.5 times as long as ring: it "),
        (1234.5, "1,234 times as long as ring: it "),
    ),
)
def test_a_reason_says_how_much_longer(times: float, said: str):
    best = PlanRow("ring", "", "", "replay", 1.0, 0.5, 0.5, 0.25, {"inside": 8}, 8, 1)
    row = best._replace(strategy="mesh", seconds=times)
    assert reason(row, (best, row), 1.0).startswith(said)


@pytest.mark.slow
def test_the_best_hybrid_of_256_ranks_sends_a_twentieth_of_the_ring():
    work = workload(256, num_heads=32, num_kv_heads=32, head_dim=128, dtype="bfloat16")
    best = tw.search(work, machine(1e6, node_size=1), world_size=256)[0]
    ring = max(tw.volume(tw.ring(256), work).forward)
    assert max(tw.volume(best.plan, work).forward) <= 0.05 * ring


def test_memory_that_nothing_fits_names_what_needs_least():
    work = workload(8, save=None)
    with pytest.raises(
        ValueError, match=r"memory_bytes \(1000\) is too little for .* needs least, "
    ):
        tw.search(work, machine(), world_size=8, memory_bytes=1000)
    found = tw.search(work, machine(), world_size=8)
    least = min(one.peak_bytes for one in found)
    assert tw.search(work, machine(), world_size=8, memory_bytes=least)[0].peak_bytes <= least


@pytest.mark.parametrize("n", (1, 7, 100))
def test_any_number_of_ranks(n: int):
    work = workload(n, num_heads=6, num_kv_heads=3)
    assert tw.search(work, machine(node_size=4, nics=4), world_size=n)[0].world_size == n


def test_meshes_that_free_shards_early_are_tried_where_others_do_not_fit():
    n = 12
    work, cluster = workload(n, num_kv_heads=8, save="replay"), machine(1e8, 1e12)
    least = tw.mesh(n, 3, held=6)
    memory = tw.simulate(least, work, cluster).peak_bytes
    best = tw.search(work, cluster, world_size=n, memory_bytes=memory)[0]
    assert best.peak_bytes <= memory
    assert best.seconds <= tw.simulate(least, work, cluster).seconds * TIE


def test_fewer_results_wait_where_more_do_not_fit():
    sizes = {"num_heads": 3, "num_kv_heads": 3, "head_dim": 128, "dtype": "bfloat16"}
    work = workload(5, 1 << 16, save=None, mask=tw.Causal(), **sizes)
    moving = {"merge_bandwidth": 2e12, "pack_bandwidth": 2e12}
    cluster = machine(1e11, 5e14, device="cuda", **moving)
    best = tw.search(work, cluster, world_size=5)[0]
    same = tw.search(work, cluster, world_size=5, memory_bytes=best.peak_bytes)[0]
    assert (same.plan, same.backward_plan) == (best.plan, best.backward_plan)
    assert "To fit" not in best.reason + same.reason
    assert best.plan.waiting_results is best.backward_plan.waiting_results is None
    lean = tw.search(work, cluster, world_size=5, memory_bytes=best.peak_bytes - 1)[0]
    assert (lean.plan, lean.backward_plan.name) == (best.plan, best.backward_plan.name)
    assert lean.backward_plan.waiting_results == 2 and lean.peak_bytes < best.peak_bytes
    assert lean.reason.endswith(
        " To fit 1.28 GB, of the results of kernel calls for one row at most 2 wait in backward; "
        "they are read and written more often for that."
    )
    again = tw.simulate(lean.plan, work, cluster, backward_plan=lean.backward_plan)
    assert again.seconds == lean.seconds > best.seconds and again.peak_bytes == lean.peak_bytes
    with pytest.raises(ValueError, match="needs least, ") as raised:
        tw.search(work, cluster, world_size=5, memory_bytes=1)
    told = int(str(raised.value).split("needs least, ")[1].split()[0])
    leanest = tw.search(work, cluster, world_size=5, memory_bytes=told)[0]
    assert leanest.peak_bytes == told < min(one.peak_bytes for one in (best, lean))
    assert "none waits in backward (each is added at once)" in leanest.reason
    rings = tw.ring(5), tw.ring(5, moves="q")
    assert told < min(tw.simulate(x, work, cluster).peak_bytes for x in rings)


def test_the_smallest_that_fits_is_named():
    n = 4
    work, cluster = workload(n, num_kv_heads=2, save=None), CLUSTERS["nodes"]
    with pytest.raises(ValueError, match="needs least, ") as raised:
        tw.search(work, cluster, world_size=n, memory_bytes=1)
    told = int(str(raised.value).split("needs least, ")[1].split()[0])
    some = list(by_hand(n, work))[::9]
    peaks = [tw.simulate(plan, work, cluster).peak_bytes for plan in some]
    assert told <= min(peaks)
    assert tw.search(work, cluster, world_size=n, memory_bytes=told)[0].peak_bytes == told


def test_ties_are_called_ties_and_the_simplest_comes_first():
    work, cluster = workload(8, num_kv_heads=8, save=None), machine(1e12, 1e9)
    found = tw.search(work, cluster, world_size=8)
    assert found[1].seconds <= TIE * found[0].seconds
    assert "A tie, within 0.3 %" in found[0].reason and found[1].strategy in found[0].reason


def test_a_reason_names_slower_kernels_where_waiting_is_not_what_costs():
    best = PlanRow("mesh", "", "", "replay", 1.0, 0.5, 0.5, 1e-3, {"inside": 8}, 8, 1)
    row = best._replace(strategy="ring", seconds=1.475, exposed_seconds=4e-4)
    said = reason(row, (best, row), 1.475)
    assert said == (
        "47.5 % longer than mesh: it computes 1.47 s against 999 ms in smaller and slower kernel "
        "calls, and waits 400 µs against 1 ms."
    )
    copies = row._replace(overhead_seconds=0.45)
    assert reason(copies, (best, copies), 1.475) == (
        "47.5 % longer than mesh: it copies and merges for 450 ms against 0 µs, and waits 400 µs "
        "against 1 ms."
    )
    nearly = row._replace(seconds=2000.0, exposed_seconds=0.99996e-3)  # neither 2e+03 nor 1e+03
    assert reason(nearly, (best, nearly), 1.475).endswith(
        "it computes 2000 s against 999 ms in smaller and slower kernel calls, and waits 1 ms "
        "against 1 ms."
    )
    first = reason(copies, [copies], None)
    assert first.endswith("for messages, and copies and merges for 450 ms (30.5 %).")


@pytest.mark.parametrize("mask", (tw.Full(), tw.Causal()), ids=repr)
def test_settings_of_other_libraries_are_priced_as_our_plans(mask: tw.Mask):
    work, cluster = workload(8, num_heads=4, num_kv_heads=4, mask=mask), CLUSTERS["slow"]
    best = tw.search(work, cluster, world_size=8)[0]
    megatron, titan = nearest_settings(best)
    assert megatron.library.startswith("Megatron") and titan.library.startswith("torchtitan")
    assert megatron.options.startswith("--context-parallel-size 8 --cp-comm-type ")
    for setting in (megatron, titan):
        plan = read_plan(setting.plan, 8)
        padded = replace(work, num_tokens=setting.split.num_tokens)  # as that library asks for
        whole = tw.simulate(plan, padded, cluster, prune=False)
        assert setting.seconds == pytest.approx(whole.seconds)
        # Whole shards may take less than halves do, where ranks that send halves share a link.
        assert best.seconds <= TIE * tw.simulate(plan, work, cluster).seconds
    assert megatron.seconds <= tw.simulate(tw.ring(8), work, cluster).seconds


def test_no_setting_of_another_library_is_named_for_a_mask_that_none_was_compared_on():
    work = workload(4, mask=tw.Causal() & tw.Window(5, 0))
    assert nearest_settings(tw.search(work, CLUSTERS["slow"], world_size=4)[0]) == ()


def test_bytes_over_a_link_are_those_of_the_rank_that_sends_most_there():
    """The rank that sends most stays inside its node; another sends what crosses nodes."""
    cluster = machine(1e6, node_size=2, nics=1, inside=Link(8e9))
    mask = tw.Document([0, 20, 31, 33, 48, 64])
    work = workload(4, mask=mask, layout="contiguous", save="replay")
    found = tw.simulate(tw.needed(mask, work.layout_for(4)), work, cluster)
    uses = [found.use(rank) for rank in range(4)]
    sent = [
        {x: sum(use.bytes_by_link.get(x, 0) for use in both) for x in ("inside", "between")}
        for both in uses
    ]
    busiest = max(sent, key=lambda links: sum(links.values()))
    assert busiest["between"] == 0 < found.bytes_by_link["between"]
    assert found.bytes_by_link == {x: max(links[x] for links in sent) for x in sent[0]}
    assert found.sent_bytes == sum(busiest.values())
    for candidate in tw.search(replace(work, save=None), cluster, world_size=4):
        assert candidate.bytes_by_link["between"] > 0


@pytest.mark.parametrize("n", (4, 20))
def test_no_plan_is_listed_twice_and_the_ring_has_a_time(n: int):
    mask = tw.Causal() & tw.Document([0, n + 1, 3 * n, 8 * n])
    work = tw.Workload(8 * n, 4, 4, 16, mask=mask, layout=default_layout(mask, 8 * n, n))
    cluster = CLUSTERS["nodes"]
    found = tw.search(work, cluster, world_size=n)
    plans = [(one.plan.name, one.backward_plan.name, one.save) for one in found]
    assert len(plans) == len({*plans})
    assert "at least" not in found[0].reason
    (ring,) = (one for one in found if one.strategy == "ring")
    again = tw.simulate(ring.plan, ring.own_work, cluster)
    assert ring.seconds == pytest.approx(again.seconds)


def test_rows_come_to_a_far_node_once():
    cluster = machine(1e6, node_size=2, nics=1, inside=Link(8e9))
    mask = tw.Causal() & tw.Document([0, 12, 50, 64])
    work = workload(4, mask=mask, layout=tw.balanced(mask, 64, 4, chunk=1))
    found = tw.search(work, cluster, world_size=4)
    by_node = next(one for one in found if "node_size=2" in one.plan.name)
    direct = tw.simulate(tw.needed(mask, work.layout_for(4)), work, cluster)
    assert by_node.seconds < direct.seconds
    assert by_node.bytes_by_link["between"] < direct.bytes_by_link["between"]

"""Steps of hybrid models are priced as the verbs move rows, and the cheapest layout is chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import tilewise as tw
from tilewise.planning import HybridWork, IndexedLayer, StateLayer, search_hybrid
from tilewise.planning.hybrid import promising_hybrid
from tilewise.planning.indexed_layers import indexed_cost
from tilewise.simulation.machine import KernelSpeed, Link
from tilewise.simulation.row_moves import simulate_moves
from tilewise.tokens.moves import gather_moves, halo_moves, relayout_moves, scan_moves

BANDWIDTH, LATENCY, FLOPS = 1e6, 0.5, 1e9
MACHINE = tw.Machine(
    "plain",
    8,
    Link(BANDWIDTH, LATENCY),
    Link(BANDWIDTH, LATENCY),
    tuple(KernelSpeed("float32", x, (1.0,), (1.0,), ((FLOPS,),)) for x in (False, True)),
)
STATE = StateLayer(2, 4, 8, "matrix", conv_channels=6, conv_width=3)


def work(num_tokens: int = 64, layers: tuple[int, int] = (1, 3), heads: int = 4) -> HybridWork:
    attention = tw.Workload(num_tokens, heads, 2, 8, "float32", mask=tw.Causal())
    return HybridWork(attention, layers[0], (STATE,) * layers[1])


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_rounds_of_a_scan_take_a_message_each_whatever_the_length(n, backward):
    seconds = set()
    for num_tokens in (8 * n, 800 * n):
        rounds = scan_moves(tw.contiguous(num_tokens, n), (0, num_tokens))
        timeline = simulate_moves(rounds, STATE.scan_bytes, MACHINE, backward=backward)
        seconds.add(timeline.seconds)
        sent = [
            sum(x)
            for x in zip(*(m.volume(STATE.scan_bytes)[backward] for m in rounds), strict=True)
        ]
        assert [sum(use.bytes_by_link.values()) for use in timeline.ranks] == sent
    assert len(rounds) == 1 + (n - 2).bit_length()
    each = LATENCY + STATE.scan_bytes / BANDWIDTH
    # The first ranks wait for nobody and are ahead, so that rounds overlap.
    least = each * (1 if n == 2 else (n - 1).bit_length())
    assert len(seconds) == 1 and least <= seconds.pop() * (1 + 1e-9) <= len(rounds) * each * 1.001


def test_a_relayout_of_two_ranks_swaps_halves():
    moves = relayout_moves(tw.contiguous(8, 2), tw.zigzag(8, 2))
    taken = simulate_moves([moves], 100, MACHINE).seconds  # rank 0 has [0:4], wants [0:2], [6:8]
    assert taken == pytest.approx(LATENCY + 2 * 100 / BANDWIDTH)


def test_parts_are_those_of_the_verbs():
    found = {one.name: one for one in search_hybrid(work(), MACHINE, world_size=4)}
    assert set(found) == {"contiguous", "zigzag", "relayout"}
    for name, tokens in (("contiguous", tw.contiguous), ("zigzag", tw.zigzag)):
        layout, whole = tokens(64, 4), (0, 64)
        rounds, halo = scan_moves(layout, whole), halo_moves(layout, 2, 0, whole)
        scan = [
            simulate_moves(rounds, STATE.scan_bytes, MACHINE, backward=x) for x in (False, True)
        ]
        sides = [simulate_moves([halo], 6 * 4, MACHINE, backward=x) for x in (False, True)]
        assert found[name].parts.scan == pytest.approx(3 * sum(x.seconds for x in scan))
        assert found[name].parts.halo == pytest.approx(3 * sum(x.seconds for x in sides))
        assert found[name].parts.relayout == found[name].sent_bytes[3] == 0
        plan = found[name].attention
        again = tw.simulate(
            plan.plan, plan.own_work, MACHINE, backward_plan=plan.backward_plan
        ).seconds
        assert found[name].parts.attention == pytest.approx(again)
    there, back = (tw.contiguous(64, 4), tw.zigzag(64, 4)), (tw.zigzag(64, 4), tw.contiguous(64, 4))
    there_bytes, back_bytes = 4 * (4 + 2 + 2) * 8, 4 * 4 * 8  # q, k and v; out
    assert work().relayout_bytes == (there_bytes, back_bytes)
    taken = sum(
        simulate_moves([relayout_moves(*pair)], size, MACHINE, backward=x).seconds
        for pair, size in ((there, there_bytes), (back, back_bytes))
        for x in (False, True)
    )
    moved = found["relayout"]
    assert moved.parts.relayout == pytest.approx(taken)
    assert moved.parts.scan == found["contiguous"].parts.scan
    assert moved.parts.attention == found["zigzag"].parts.attention
    assert moved.attention.layout == moved.attention_layout == tw.zigzag(64, 4)
    assert moved.layout == tw.contiguous(64, 4)


FAST = tw.Machine("fast", 8, Link(1e8, 1e-6), Link(1e8, 1e-6), MACHINE.kernels)


@pytest.mark.parametrize(
    ("of", "machine", "n", "name"),
    [
        (work(64, (1, 40)), MACHINE, 4, "contiguous"),
        (work(512, (4, 100), heads=2), FAST, 8, "relayout"),
        (work(256, (8, 0)), MACHINE, 4, "zigzag"),
    ],
)
def test_the_cheapest_is_chosen_and_named(of, machine, n, name):
    best, *others = search_hybrid(of, machine, world_size=n)
    assert best.name == name, best.reason
    assert all(best.seconds <= one.seconds for one in others)
    assert f"{best.seconds * 1e3:.4g} ms" in best.reason and "relayout" in best.reason


def test_the_quick_choice_is_that_of_the_search():
    for of, machine in ((work(64, (1, 40)), MACHINE), (work(256, (4, 400)), FAST)):
        best = search_hybrid(of, machine, world_size=4)[0]
        assert promising_hybrid(of, machine, 4).name == best.name


def test_layers_of_several_kinds_are_added_up():
    """Two kinds of states and a convolution alone."""
    other, conv = StateLayer(3, 2, 2, "number"), StateLayer(0, 1, 1, "number", 6, 3)
    assert conv.scan_bytes == conv.flop == 0

    def parts(*states: StateLayer) -> dict[str, Any]:
        of = replace(work(), states=states)
        return {one.name: one.parts for one in search_hybrid(of, MACHINE, world_size=4)}

    alone = [parts(state) for state in (STATE, other, conv)]
    for name, found in parts(STATE, other, conv, STATE).items():
        for number, part in enumerate(found._fields[1:], 1):
            first, second, third = (one[name][number] for one in alone)
            if part != "relayout":
                assert found[number] == pytest.approx(2 * first + second + third), (name, part)
        assert alone[2][name].scan == 0 < alone[2][name].halo == alone[0][name].halo


def test_what_is_no_layer_is_refused():
    with pytest.raises(ValueError, match=r"decay \('none'\) must be"):
        StateLayer(2, 4, 8, "none")  # pyright: ignore
    with pytest.raises(ValueError, match="key_dim"):
        StateLayer(2, 0, 8)
    with pytest.raises(ValueError, match="give some, all for the same number"):
        simulate_moves([], 8, MACHINE)


INDEXED = IndexedLayer(
    num_heads=4, head_dim=8, v_head_dim=8, row_width=12, index_heads=2, index_dim=4, top_k=8
)


@pytest.mark.parametrize("name", ["contiguous", "zigzag"])
def test_an_indexed_layer_is_priced_as_its_rows_move(name: str):
    """Index keys, places, rows and gradients: of causal rows, which all travel where each query
    chooses as many keys as there are ranks.
    """
    n, num_tokens = 4, 64
    model = HybridWork(work(num_tokens).attention, 0, (), (INDEXED, INDEXED))
    found = {one.name: one for one in search_hybrid(model, MACHINE, world_size=n)}
    layout = getattr(tw, name)(num_tokens, n)
    seen = gather_moves(layout, tw.Causal())
    rows = [seen.rows_sent(rank, backward=False) for rank in range(n)]
    asked = [seen.rows_sent(rank, backward=True) for rank in range(n)]
    sent = [(4 * 4 + 4 * 12) * x + (4 + 4 * 12) * y for x, y in zip(rows, asked, strict=True)]
    parts = found[name].parts
    # one row stands for a share, of which a rank sees all or nothing
    assert found[name].sent_bytes[4] == pytest.approx(2 * max(sent), rel=0.2)
    assert parts.indexed > 0 and parts.attention == parts.scan == 0
    assert "indexed" in found[name].reason


def test_few_chosen_keys_send_fewer_rows():
    def sent(top_k: int) -> int:
        layer = replace(INDEXED, top_k=top_k)
        return indexed_cost(layer, tw.contiguous, 64, 8, "float32", MACHINE)[1]

    assert sent(1) < sent(4) < sent(8) == sent(64)


def test_scores_of_an_indexer_are_level_on_zigzag_tokens():
    """Where nothing but scores takes long; chosen keys are level on any."""
    heavy = replace(INDEXED, index_heads=1 << 12, top_k=1)
    contiguous, zigzag = (
        indexed_cost(heavy, make, 64, 4, "float32", MACHINE)[0]
        for make in (tw.contiguous, tw.zigzag)
    )
    assert zigzag < contiguous

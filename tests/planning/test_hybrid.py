"""Steps of hybrid models are priced as the verbs move rows, and the cheapest layout is chosen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import tilewise as tw
from tilewise.planning import HybridWork, StateLayer, search_hybrid
from tilewise.simulation.machine import KernelSpeed, Link
from tilewise.simulation.row_moves import simulate_moves
from tilewise.tokens.moves import halo_moves, relayout_moves, scan_moves

BANDWIDTH, LATENCY, FLOPS = 1e6, 0.5, 1e9
MACHINE = tw.Machine(
    "plain",
    8,
    Link(BANDWIDTH, LATENCY),
    Link(BANDWIDTH, LATENCY),
    tuple(KernelSpeed("float32", x, (1.0,), (1.0,), ((FLOPS,),)) for x in (False, True)),
)
STATE = StateLayer(2, 4, 8, "matrix", conv_channels=6, conv_width=3)


def work(num_tokens: int = 64, layers: tuple[int, int] = (1, 3), hidden: int = 16) -> HybridWork:
    attention = tw.Workload(num_tokens, 4, 2, 8, "float32", mask=tw.Causal())
    return HybridWork(attention, layers[0], STATE, layers[1], hidden)


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
        scan = [simulate_moves(rounds, STATE.scan_bytes, MACHINE, backward=x) for x in (0, 1)]
        sides = [simulate_moves([halo], 6 * 4, MACHINE, backward=x) for x in (0, 1)]
        assert found[name].parts.scan == pytest.approx(3 * sum(x.seconds for x in scan))
        assert found[name].parts.halo == pytest.approx(3 * sum(x.seconds for x in sides))
        assert found[name].parts.relayout == found[name].sent_bytes[3] == 0
        plan = found[name].attention
        again = tw.simulate(
            plan.plan, plan.own_work, MACHINE, backward_plan=plan.backward_plan
        ).seconds
        assert found[name].parts.attention == pytest.approx(again)
    there, back = (tw.contiguous(64, 4), tw.zigzag(64, 4)), (tw.zigzag(64, 4), tw.contiguous(64, 4))
    moves = [relayout_moves(*there), relayout_moves(*back)]
    taken = sum(simulate_moves(moves, 16 * 4, MACHINE, backward=x).seconds for x in (0, 1))
    moved = found["relayout"]
    assert moved.parts.relayout == pytest.approx(taken)
    assert moved.parts.scan == found["contiguous"].parts.scan
    assert moved.parts.attention == found["zigzag"].parts.attention
    assert moved.attention.layout == tw.zigzag(64, 4) and moved.layout == tw.contiguous(64, 4)


FAST = tw.Machine("fast", 8, Link(1e12), Link(1e12), MACHINE.kernels)
"""Kernels are slow beside its links."""


@pytest.mark.parametrize(
    ("of", "machine", "name"),
    [
        (work(64, (1, 40)), MACHINE, "contiguous"),
        (work(256, (4, 400)), FAST, "relayout"),
        (work(256, (8, 0), hidden=1 << 20), FAST, "zigzag"),
    ],
)
def test_the_cheapest_is_chosen_and_named(of, machine, name):
    best, *others = search_hybrid(of, machine, world_size=4)
    assert best.name == name, best.reason
    assert all(best.seconds <= one.seconds for one in others)
    assert f"{best.seconds * 1e3:.4g} ms" in best.reason and "relayout" in best.reason


def test_configurations_are_read():
    linear = SimpleNamespace(
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_value_heads=8,
        linear_num_key_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        hidden_size=128,
    )
    read = HybridWork.of_config(linear, 512)
    assert read.state == StateLayer(8, 16, 32, "matrix", 2 * 4 * 16 + 8 * 32, 4)
    assert (read.num_state_layers, read.num_attention_layers, read.hidden_size) == (3, 1, 128)
    with pytest.raises(ValueError, match="neither layer_types nor layers_block_type"):
        HybridWork.of_config(SimpleNamespace(), 512)
    with pytest.raises(ValueError, match=r"neither linear_num_value_heads .* nor mamba_n_heads"):
        HybridWork.of_config(SimpleNamespace(layer_types=["conv"]), 512)
    with pytest.raises(ValueError, match=r"decay \('none'\) must be"):
        StateLayer(2, 4, 8, "none")  # pyright: ignore
    with pytest.raises(ValueError, match="give some, all for the same number"):
        simulate_moves([], 8, MACHINE)


def test_configurations_of_transformers_are_read():
    pytest.importorskip("transformers", reason="needs transformers, of the extra hf")
    from transformers import BambaConfig, Qwen3NextConfig

    delta = HybridWork.of_config(Qwen3NextConfig(), 1 << 18)
    assert (delta.num_state_layers, delta.num_attention_layers) == (36, 12)
    assert delta.state.scan_bytes == 32 * (128 * 128 + 128 * 128) * 4
    mamba = HybridWork.of_config(BambaConfig(attn_layer_indices=[9, 18, 27]), 1 << 18)
    assert (mamba.num_state_layers, mamba.num_attention_layers) == (29, 3)
    assert mamba.state.scan_bytes == 128 * (256 * 64 + 1) * 4

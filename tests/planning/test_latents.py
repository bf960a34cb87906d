"""The planner, the files of its candidates and the memory of passes know latents."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.latents import draw_layer

import tilewise as tw
from tilewise.wires.wire import Wires

WIRE = tw.wire.Latent(num_kv_heads=16, head_dim=96, v_head_dim=64, width=144)


def work(**more: Any) -> tw.Workload:
    return tw.Workload(1 << 15, 16, 16, 96, v_head_dim=64, mask=tw.Causal(), **more)


@pytest.mark.slow
def test_latents_cross_nodes_where_heads_would_be_split():
    """DeepSeek-V3's shape on two nodes."""
    machine, wire = tw.Machine.preset("h100x8"), deepseek()
    plain, latent = (
        tw.search(
            tw.Workload(1 << 15, 128, 128, 192, v_head_dim=128, mask=tw.Causal(), wire=of),
            machine,
            world_size=16,
        )[0]
        for of in (None, wire)
    )
    assert "ulysses(8)" in plain.strategy and "ulysses" not in latent.strategy
    assert plain.bytes_by_link["between"] > 40 * latent.bytes_by_link["between"]
    for one in (plain, latent):
        found = tw.volume(one.plan, one.own_work, one.backward_plan)
        sent = max(map(sum, zip(*found, strict=True)))
        assert one.distances.least_bytes <= sent


def deepseek() -> tw.wire.Latent:
    return tw.wire.Latent(num_kv_heads=128, head_dim=192, v_head_dim=128, width=576)


def test_a_candidate_remembers_its_latent(tmp_path: Path):
    best = tw.search(work(wire=WIRE), tw.Machine.preset("h100x8"), world_size=2)[0]
    path = tmp_path / "plan.json"
    path.write_text(best.to_json())
    read = tw.load_candidate(path)
    assert read.wire == best.wire == Wires(latent=WIRE)
    assert tw.volume(read.plan, read.own_work) == tw.volume(best.plan, best.work)


def test_expanding_takes_time():
    machine, plan = tw.Machine.preset("h100x8"), tw.ring(1)
    machine = replace(machine, pack_bandwidth=None, merge_bandwidth=None)  # latents copy less
    plain, latent = (tw.simulate(plan, work(wire=wire), machine) for wire in (None, WIRE))
    assert latent.forward_seconds > plain.forward_seconds
    assert latent.backward_seconds > plain.backward_seconds


def test_gathered_latents_take_less_memory():
    machine, plan = tw.Machine.preset("h100x8"), tw.all_gather(4)
    plain, latent = (
        tw.simulate(plan, work(wire=wire, save="gathered"), machine).peak_bytes
        for wire in (None, WIRE)
    )
    assert latent < plain


def test_auto_is_decided_for_latents():
    layer = draw_layer(24)

    def on_rank(rank: int, group: Any) -> tuple[torch.Tensor, int]:
        cp = tw.ContextParallel(group, num_tokens=24, mask=tw.Causal())
        q, latent = (cp.shard(x, dim=0) for x in (layer.q, layer.latent))
        out = cp.attention(q, latent, None, wire=layer.wire((layer.w_k, layer.w_v)))
        assert isinstance(out, torch.Tensor)
        return cp.unshard(out, dim=0), cp.plan(q, latent).world_size

    for out, world_size in tw.loopback(3, on_rank):
        assert (out - layer.dense(tw.Causal()).out).abs().max() < 1e-12 and world_size == 3

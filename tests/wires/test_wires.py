"""Wires: what a call's arguments mean, what travels, and that it is what is counted."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.planning import candidate_format
from tilewise.serializer import read, write
from tilewise.wires.wire import WIRE_KINDS, Wires

N, TOKENS, HEADS, KV_HEADS, WIDTH = 3, 26, 4, 2, 8
NARROW = tw.wire.Plain("float32")


def work(**more: Any) -> tw.Workload:
    given = {"dtype": "float64", "mask": tw.Causal(), **more}
    return tw.Workload(TOKENS, HEADS, KV_HEADS, WIDTH, **given)


def sent(plan: tw.Plan, wholes: list[Tensor], asked: tw.Workload) -> tuple[list[Tensor], Any]:
    """out, dq, dk, dv of the whole sequence, and the bytes that each rank sent in each pass."""
    layout = asked.layout_for(N)

    def on_rank(rank: int, group: Any) -> tuple[list[Tensor], tuple[int, int]]:
        mine = [layout.shard(x, rank, dim=0).clone().requires_grad_() for x in wholes]
        call = {"plan": plan, "layout": layout, "mask": asked.mask, "group": group}
        out = tw.attention(*mine, **call, save=asked.save, wire=asked.wires)
        forward = group.bytes_sent
        out.square().sum().backward()
        grads = [x.grad for x in mine if x.grad is not None]
        return [out.detach(), *grads], (forward, group.bytes_sent - forward)

    results = tw.loopback(N, on_rank)
    wholes = [layout.unshard(xs, dim=0) for xs in zip(*(x for x, _ in results), strict=True)]
    return wholes, tw.Volume(*zip(*(moved for _, moved in results), strict=True))


@pytest.mark.parametrize("plan", [tw.ring(N), tw.ring(N, moves="q"), tw.all_gather(N)], ids=repr)
@pytest.mark.parametrize("save", ["replay", "gathered"])
def test_every_kind_of_tensor_has_its_own_wire(plan: tw.Plan, save: Any):
    torch.manual_seed(0)
    wholes = [
        torch.randn(TOKENS, h, WIDTH, dtype=torch.float64) for h in (HEADS, KV_HEADS, KV_HEADS)
    ]
    exact, _ = sent(plan, wholes, work(save=save))
    kinds = {"forward", "backward", "partials"}
    for changed in ({"forward"}, {"backward"}, {"partials"}, kinds):
        wire = tw.wire.Wires(**dict.fromkeys(changed, NARROW))
        found, moved = sent(plan, wholes, work(save=save, wire=wire))
        errors = [float((a - b).abs().max()) for a, b in zip(found, exact, strict=True)]
        assert max(errors) < 1e-5 and (max(errors) > 0 or changed == {"backward"})
        assert moved == tw.volume(plan, work(save=save, wire=wire))
        assert sum(map(sum, moved)) <= sum(map(sum, tw.volume(plan, work(save=save))))
    assert all(x.dtype == torch.float64 for x in found)


def test_what_is_kept_of_encoded_operands_serves_tiles_of_several_shards():
    torch.manual_seed(0)
    wholes = [torch.randn(TOKENS, 2, WIDTH, dtype=torch.float64) for _ in range(3)]
    plan, asked = tw.tiled(tw.Causal(), tw.zigzag(TOKENS, N)), work(save="gathered")
    exact, _ = sent(plan, wholes, asked)
    found, _ = sent(plan, wholes, work(save="gathered", wire=tw.wire.Wires(forward=NARROW)))
    assert all(0 < float((a - b).abs().max()) < 1e-5 for a, b in zip(found, exact, strict=True))


def test_wire_dtype_is_short_for_a_plain_wire():
    assert work(wire=NARROW) == work(wire_dtype="float32") == work(wire_dtype=torch.float32)
    assert work(wire=tw.wire.Wires(partials=NARROW)) == work(wire_dtype="float32")
    assert work(wire=tw.wire.Wires(forward=NARROW)) != work(wire_dtype="float32")
    assert tw.wire.Plain(torch.float32) == NARROW != tw.wire.Plain()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"wire": NARROW, "wire_dtype": "float32"}, r"wire_dtype \('float32'\) is short for wire="),
        ({"wire": "float32"}, r"wire \('float32'\) must be a wire, such as tw.wire.Plain"),
        ({"wire": tw.wire.Plain}, r"must be a wire, such as"),
    ],
)
def test_what_is_no_wire_is_refused(given: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        work(**given)
    layout, q = tw.zigzag(TOKENS, 1), torch.zeros(TOKENS, HEADS, WIDTH)
    with pytest.raises(ValueError, match=message):
        tw.attention(q, q, q, plan=tw.ring(1), layout=layout, mask=tw.Full(), **given)


def test_parts_of_a_set_are_wires():
    with pytest.raises(ValueError, match=r"partials \('float32'\) must be a Wire"):
        tw.wire.Wires(partials="float32")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"wire_dtype \('int8'\) must be 'float64'"):
        tw.wire.Plain(torch.int8)  # pyright: ignore[reportArgumentType]


def test_ranks_that_disagree_on_wires_hear_both():
    layout, q = tw.zigzag(TOKENS, 2), torch.zeros(TOKENS, HEADS, WIDTH)

    def on_rank(rank: int, group: Any) -> str:
        wire = tw.wire.Wires(forward=NARROW) if rank else tw.wire.Wires()
        mine = [layout.shard(q.double(), rank, dim=0)] * 3
        with pytest.raises(ValueError) as error:
            tw.attention(
                *mine, plan=tw.ring(2), layout=layout, mask=tw.Full(), group=group, wire=wire
            )
        return str(error.value)

    first, second = tw.loopback(2, on_rank)
    assert first == second and "ranks disagree on wire: rank 0 has float64 forward" in first


def test_a_set_survives_json():
    latent = tw.wire.Latent(num_kv_heads=KV_HEADS, head_dim=WIDTH, v_head_dim=WIDTH, width=12)
    for wire in (
        tw.wire.Wires(),
        tw.wire.Wires(forward=NARROW, latent=latent),
        tw.wire.Wires(backward=tw.wire.Float8(64, stochastic=True, seed=5)),
    ):
        written = json.loads(json.dumps(write(wire, WIRE_KINDS)))
        assert read(Wires, written, "wire", WIRE_KINDS) == wire
        given = work(wire=wire, layout=tw.zigzag(TOKENS, N))
        text = json.dumps(candidate_format.write_workload(given))
        assert candidate_format.read_workload(json.loads(text), tw.zigzag(TOKENS, N)) == given
    with pytest.raises(
        ValueError, match=r"wire.forward.kind \('morse'\) must be one of Plain, Float8"
    ):
        read(Wires, {"forward": {"kind": "morse"}}, "wire", WIRE_KINDS)

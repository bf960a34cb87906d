"""Eight-bit wires: what arrives, what is counted, and what is refused."""

from itertools import product
from typing import Any

import pytest
import torch
from support.thinned import thinned
from torch import Tensor

import tilewise as tw
from tilewise.kernels.float8 import decode, encode

Float8 = tw.wire.Float8
DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16


def arrived(wire: tw.wire.Float8, x: Tensor, stream: tuple[int, int] = (0, 0)) -> Tensor:
    return decode(encode(wire, x, stream), torch.empty_like(x))


def block_largest(block: int, x: Tensor) -> Tensor:
    """The largest number of each number's block and head, float64 [rows, batch, heads, 1]."""
    largest = x.double().abs().amax(-1, keepdim=True)
    return torch.cat([part.amax(0, keepdim=True).expand_as(part) for part in largest.split(block)])


def spacing(block: int, x: Tensor) -> Tensor:
    """The distance of the two e4m3 numbers around each number, in x's units; at least that."""
    subnormal = torch.frexp(block_largest(block, x)).exponent.sub(17).clamp_min(-126)
    exponents = torch.maximum(torch.frexp(x.float()).exponent.clamp_min(-126) - 4, subnormal)
    return torch.exp2(exponents.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stochastic", [False, True])
def test_rounding_stays_within_its_bound(dtype: torch.dtype, stochastic: bool):
    torch.manual_seed(0)
    for size in (1.0, 1e-3, 1e4, 1e-38):
        x = (torch.randn(50, 2, 3, 32, dtype=torch.float64) * size).to(dtype)
        wire = Float8(block=16, stochastic=stochastic)
        error = (x - arrived(wire, x)).double().abs()
        blocks = block_largest(16, x)
        bound = torch.maximum(x.double().abs() / 16, (blocks / 2**17).clamp_min(2.0**-136))
        assert (error <= (1 + stochastic) * bound).all()
        assert (error <= (1 + stochastic) * spacing(16, x) / 2).all()


def test_stochastic_rounding_has_the_right_mean_and_repeats():
    wire, x = (
        Float8(16, stochastic=True, seed=3),
        torch.rand(1, 1, 1, 64) * torch.logspace(-5, 0, 64),
    )
    mean = torch.stack([arrived(wire, x, (n, 0)).double() for n in range(2000)]).mean(0)
    assert ((mean - x).abs() < 5 * spacing(16, x) / 2000**0.5).all()
    assert torch.equal(encode(wire, x), encode(Float8(16, True, 3), x))
    many = torch.rand(64, 1, 2, 16)
    assert not torch.equal(encode(wire, many), encode(Float8(16, True, 4), many))
    assert not torch.equal(encode(wire, many), encode(wire, many, (1, 0)))


def test_rows_of_a_block_can_be_cut_out():
    x = torch.randn(40, 2, 3, 8)
    packed = encode(Float8(16), x)
    assert packed.shape == (40, 2, 3 * Float8(16).row_bytes(8, "float32"))
    assert torch.equal(
        decode(packed[7:21], torch.empty_like(x[7:21])), arrived(Float8(16), x)[7:21]
    )


def test_what_is_not_finite_arrives_as_nan_with_its_block_and_head():
    x = torch.randn(64, 1, 4, 8)
    x[3, 0, 1, 0], x[40, 0, 2, 5] = torch.inf, torch.nan
    found = arrived(Float8(16), x).isnan()
    expected = torch.zeros_like(found)
    expected[:16, :, 1], expected[32:48, :, 2] = True, True
    assert torch.equal(found, expected)


N, TOKENS, HEADS, KV_HEADS, WIDTH = 4, 50, 4, 2, 16


def call(
    wire: Any, plan: tw.Plan, mask: tw.Mask, layout: tw.Layout, wholes: Any, **more: Any
) -> Any:
    """out, dq, dk, dv of the whole sequence, and the bytes that each rank sent in each pass."""

    def on_rank(rank: int, group: Any) -> tuple[list[Tensor], tuple[int, int]]:
        mine = [layout.shard(x, rank, dim=0).clone().requires_grad_() for x in wholes]
        given = {"plan": plan, "layout": layout, "mask": mask, "group": group, **more}
        out = tw.attention(*mine, wire=wire, **given)
        forward = group.bytes_sent
        (out * torch.linspace(-1, 1, out.shape[-1]).to(out)).sum().backward()
        grads = [x.grad for x in mine if x.grad is not None]
        return [out.detach(), *grads], (forward, group.bytes_sent - forward)

    results = tw.loopback(plan.world_size, on_rank)
    found = [layout.unshard(xs, dim=0) for xs in zip(*(x for x, _ in results), strict=True)]
    return found, tw.Volume(*zip(*(moved for _, moved in results), strict=True))


def drawn(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(TOKENS, h, WIDTH, dtype=dtype) for h in (HEADS, KV_HEADS, KV_HEADS)]


PLANS = (
    tw.ring(N),
    tw.ring(N, moves="q"),
    tw.all_gather(N),
    tw.double_ring(2, 2),
    tw.balanced_ring(N),
    tw.mesh(N, q_tile=2),
    tw.attention2d(2, 2),
    tw.ulysses(N),
    tw.ulysses(2, inner=tw.ring(2)),
)


def _name(of: str | tw.Plan) -> str:
    return of if isinstance(of, str) else of.name


WIRES = {
    "nearest": Float8(8),
    "stochastic": Float8(8, stochastic=True, seed=7),
    "partials": tw.wire.Wires(partials=Float8()),
}


@pytest.mark.parametrize(("wire", "plan"), thinned(product(WIRES, PLANS)), ids=_name)
def test_every_plan_has_the_wire_and_its_bytes_are_counted(plan: tw.Plan, wire: str):
    cases = (
        (tw.Causal(), tw.zigzag(TOKENS, N), "replay"),
        (tw.Document([0, 11, 30, TOKENS]), tw.contiguous(TOKENS, N), "gathered"),
        (tw.Window(9, 0), tw.striped(TOKENS, N), None),
    )
    for mask, layout, save in cases:
        exact, _ = call(None, plan, mask, layout, drawn(), save=save)
        found, moved = call(WIRES[wire], plan, mask, layout, drawn(), save=save)
        for x, y in zip(found, exact, strict=True):
            assert (x - y).abs().max() < 0.25 * max(1, y.abs().max()), (mask, save)
        work = tw.Workload(
            *(TOKENS, HEADS, KV_HEADS, WIDTH, "float64"),
            **{"mask": mask, "layout": layout, "save": save, "wire": WIRES[wire]},
        )
        assert moved == tw.volume(plan, work)


def test_rows_that_are_passed_on_are_not_encoded_again():
    mask, layout = tw.Full(), tw.contiguous(TOKENS, N)
    wire = Float8(8, stochastic=True)
    direct, _ = call(wire, tw.all_gather(N), mask, layout, drawn())
    passed, _ = call(wire, tw.ring(N), mask, layout, drawn())
    for x, y in zip(direct, passed, strict=True):
        assert (x - y).abs().max() < 1e-12


def test_a_row_costs_a_byte_a_number_and_one_a_head():
    plan = tw.ring(4)
    eight = tw.Workload(4096, 8, 2, 128, wire=Float8())
    rows, heads = 3 * 1024, 2
    assert tw.volume(plan, eight).forward == (rows * heads * 2 * (128 + 1),) * 4
    plain = tw.volume(plan, tw.Workload(4096, 8, 2, 128)).forward[0]
    assert tw.volume(plan, eight).forward[0] / plain == 129 / 256


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_runs(dtype: torch.dtype):
    mask, layout, plan = tw.Causal(), tw.zigzag(TOKENS, N), tw.mesh(N, q_tile=2)
    wholes = drawn(torch.float32)
    exact, _ = call(None, plan, mask, layout, wholes)
    found, _ = call(Float8(), plan, mask, layout, [x.to(dtype) for x in wholes])
    for x, y in zip(found, exact, strict=True):
        assert x.dtype == dtype and (x - y).abs().max() < 0.25 * max(1, y.abs().max())


def errors(wires: Any, change: Any = None, **more: Any) -> list[str]:
    """What each rank raises."""
    layout, plan = tw.contiguous(TOKENS, 2), tw.ring(2)

    def on_rank(rank: int, group: Any) -> str:
        q, k, v = (layout.shard(x, rank, dim=0).clone() for x in drawn())
        if change:
            change(rank, q, k, v)
        given = {"plan": plan, "layout": layout, "mask": tw.Full(), "group": group, **more}
        q.requires_grad_()
        with pytest.raises((ValueError, RuntimeError)) as error:
            out = tw.attention(q, k, v, wire=wires[rank], **given)
            out.backward(torch.full_like(out, torch.nan if rank else 1.0))
        return str(error.value)

    return tw.loopback(2, on_rank)


@pytest.mark.parametrize("validate", ["always", "never"])
def test_ranks_that_disagree_on_the_wire_hear_both(validate: str):
    first, second = errors((Float8(64), Float8(128)), validate=validate)
    assert first == second and "ranks disagree on wire: rank 0 has Float8(block=64" in first


def test_a_rank_that_compares_nothing_hears_of_the_others_wire():
    layout = tw.contiguous(TOKENS, 2)

    def on_rank(rank: int, group: Any) -> str:
        q, k, v = (layout.shard(x, rank, dim=0) for x in drawn())
        given = {"plan": tw.ring(2), "layout": layout, "mask": tw.Full(), "group": group}
        with pytest.raises(ValueError) as error:
            tw.attention(q, k, v, wire=Float8(64) if rank else None, validate="never", **given)
        return str(error.value)

    first, second = tw.loopback(2, on_rank)
    assert first == second and first.startswith("ranks are in different calls: ")
    assert "validate='never', no wire that rounds" in first


def test_a_number_that_is_not_finite_is_named_with_its_rank_and_row():
    def change(rank: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        if rank:
            v[5, 1, 3] = torch.inf

    first, second = errors((Float8(), Float8()), change)
    assert first == second and "rank 1: v has inf at row 5, head 1, number 3: Float8(" in first
    first, second = errors((Float8(), Float8()))
    assert first == second and "rank 1: dout has nan at row 0, head 0" in first


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"block": 0}, r"block \(0\) must be at least 1"),
        ({"block": 1.5}, r"block \(1.5\) must be a whole number"),
        ({"seed": -1}, r"seed \(-1\) must be at least 0"),
        ({"stochastic": 1}, r"stochastic \(1\) must be True or False"),
    ],
)
def test_wrong_arguments_are_named(given: Any, message: str):
    with pytest.raises(ValueError, match=message):
        Float8(**given)


def test_integers_are_refused():
    q, layout = torch.ones(8, 2, 4, dtype=torch.int8), tw.contiguous(8, 1)
    with pytest.raises(ValueError, match=r"dtype \('int8'\) must be 'float64', 'float32'"):
        tw.attention(q, q, q, plan=tw.ring(1), layout=layout, mask=tw.Full(), wire=Float8())


def test_a_search_tries_no_wire_that_rounds_unasked():
    machine = tw.Machine.preset("h100x8")
    work = tw.Workload(65536, 8, 2, 128)
    plain = tw.search(work, machine, world_size=8)
    assert {one.wire for one in plain} == {tw.wire.Wires()}
    asked = tw.search(work, machine, world_size=8, wires=[Float8()])
    eight = [one for one in asked if one.wire == tw.wire.Wires(Float8(), Float8())]
    assert len(eight) + len(plain) == len(asked) and "Float8" in eight[0].strategy
    assert asked[0].seconds == min(one.seconds for one in asked) <= plain[0].seconds
    best = eight[0]
    sent = tw.volume(best.plan, best.own_work, best.backward_plan)
    again = tw.simulate(best.plan, best.own_work, machine, best.backward_plan)
    assert again.sent_bytes == max(map(sum, zip(*sent, strict=True)))
    assert again.forward_seconds == pytest.approx(best.forward_seconds)


def test_encoding_and_decoding_take_time_in_the_simulator():
    slow = tw.Machine.preset("h100x8")
    kernel = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 128, "dtype": "float32"}
    plain = tw.Workload(8192, **kernel, wire=tw.wire.Wires(forward=tw.wire.Plain("float16")))
    times = tw.simulate(tw.ring(4), plain, slow)
    free = tw.simulate(tw.ring(4), tw.Workload(8192, **{**kernel, "dtype": "float16"}), slow)
    assert times.forward_seconds > free.forward_seconds


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_every_code_and_power_is_decoded_as_torch_does(dtype: torch.dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(128, 2)[:127].flatten()  # the last are NaN
    codes = codes[codes != 127]
    numbers = codes.view(torch.float8_e4m3fn).double()
    powers = torch.arange(-126, 121)
    packed = torch.cat(
        [codes.expand(len(powers), 1, -1), (powers + 127).to(torch.uint8)[:, None, None]], -1
    )
    found = decode(packed, torch.empty(len(powers), 1, 1, len(codes), dtype=dtype))
    exact = torch.ldexp(numbers, powers[:, None].double()).to(dtype)
    assert torch.equal(found[:, 0, 0], exact)

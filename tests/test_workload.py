"""tw.volume: the closed forms for a full mask, and the bytes counted on the transport."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import product
from random import Random
from typing import NamedTuple

import pytest
import torch
from conformance.oracle import draw
from conformance.table import divisors, plans
from support.thinned import thinned

import tilewise as tw
from tilewise.layouts.layout import Layout
from tilewise.plan.ir import Plan

HEAD_DIM, ROWS = 16, 4
WORLDS = (1, 2, 3, 4, 6, 8, 16, 64)
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class Transfers(NamedTuple):
    """Shards of each side that a rank sends, as operands and as partials alike."""

    x: Fraction
    y: Fraction


class Heads(NamedTuple):
    num_heads: int
    num_kv_heads: int


WIRES = (("bfloat16", None), ("bfloat16", "float32"), ("float64", "float32"))
MHA, GQA, MQA = Heads(64, 64), Heads(64, 8), Heads(64, 1)


def closed_form(
    n: int,
    transfers: Transfers,
    heads: Heads,
    dtype: str,
    wire: str,
    degree: int = 1,
    gathered: bool = False,
) -> tuple[Fraction, Fraction]:
    """forward = x (u + w u + l) + y 2 rho u; backward = x (2u + 2l + w u) + y 2 rho u (1 + w).

    What is gathered in forward (q, k, v) falls away in backward: x (u + 2l + w u) + y 2 rho u w.
    Rows of an odd number of heads have 8 bytes more, those of float64 none.
    """
    u = Fraction(ROWS * heads.num_heads * HEAD_DIM * BYTES[dtype])
    l = ROWS * heads.num_heads * (8 if dtype == "float64" else 4)  # noqa: E741
    w = Fraction(BYTES[wire], BYTES[dtype])
    rho = Fraction(max(heads.num_kv_heads, degree), heads.num_heads)
    kept = 1 if gathered else 0
    odd = heads.num_heads // degree % 2 and dtype != "float64"
    padding = ROWS * degree * 8 if odd else 0
    forward = transfers.x * (u + w * u + l) + transfers.y * 2 * rho * u
    sent = (2 - kept) * u + 2 * l + padding + w * u
    backward = transfers.x * sent + transfers.y * 2 * rho * u * (1 - kept + w)
    return forward, backward


def assert_sent(plan: Plan, transfers: Transfers | list[Transfers], degree: int = 1) -> None:
    """Every rank sends what the formula says, for all kinds of heads, dtypes and savings."""
    n = plan.world_size
    per_rank = transfers if isinstance(transfers, list) else [transfers] * n
    kinds = list(product((MHA, GQA, MQA), WIRES, ("replay", "gathered")))
    for heads, (dtype, wire), save in kinds if n < 32 else kinds[:: len(kinds) // 3]:
        work = tw.Workload(ROWS * n, *heads, HEAD_DIM, dtype, wire, tw.Full(), "contiguous", save)
        kept = save == "gathered"
        expected = [closed_form(n, h, heads, dtype, wire or dtype, degree, kept) for h in per_rank]
        got = tw.volume(plan, work)
        assert list(zip(*got, strict=True)) == expected, (plan, heads, dtype, wire, save)


@pytest.mark.parametrize("n", WORLDS)
def test_rings_and_all_gather_send_n_minus_1_shards(n: int):
    everything = Fraction(n - 1)
    assert_sent(tw.ring(n), Transfers(Fraction(0), everything))
    assert_sent(tw.ring(n, moves="q"), Transfers(everything, Fraction(0)))
    assert_sent(tw.all_gather(n), Transfers(Fraction(0), everything))
    for nodes in {divisors(n)[len(divisors(n)) // 2], n}:
        assert_sent(tw.double_ring(nodes, n // nodes), Transfers(Fraction(0), everything))


@pytest.mark.parametrize("n", WORLDS)
def test_meshes_send_a_minus_1_and_b_minus_1_shards(n: int):
    for a in divisors(n) if n < 32 else (4, 8):
        for schedule in (
            ("greedy", "gather") if n > 12 else ("greedy", "eager", "kv_first", "gather", "paper")
        ):
            plan = tw.mesh(n, q_tile=a, schedule=schedule)
            assert_sent(plan, Transfers(Fraction(a - 1), Fraction(n // a - 1)))


@pytest.mark.parametrize("n", WORLDS)
def test_attention2d_sends_one_more_where_a_column_lacks_the_ranks_own_keys(n: int):
    for rows in divisors(n) if n < 32 else (4, 8):
        columns = n // rows
        transfers = [
            Transfers(Fraction(columns - 1), Fraction(rows - 1 + (rank // rows != rank % columns)))
            for rank in range(n)
        ]
        assert_sent(tw.attention2d(rows, columns), transfers)


@pytest.mark.parametrize("n", WORLDS)
def test_ulysses_adds_its_all_to_all_to_an_inner_plan(n: int):
    for degree in [d for d in divisors(n) if MHA.num_heads % d == 0 and (n < 32 or d in (8, n))]:
        inner, share = n // degree, Fraction(degree - 1, degree)
        assert_sent(
            tw.ulysses(degree, inner=tw.ring(inner)), Transfers(share, share + inner - 1), degree
        )
        a = divisors(inner)[-2:][0]
        plan = tw.ulysses(degree, inner=tw.mesh(inner, q_tile=a))
        assert_sent(plan, Transfers(share + a - 1, share + inner // a - 1), degree)


def test_at_256_ranks_the_table_of_the_design_holds():
    """Forward at MHA without l, in u: mesh 16x16 60, 8x32 76, attention2d 62, ..."""
    work = tw.Workload(256 * 2, 64, 64, 2048, "bfloat16", None, tw.Full(), "contiguous", "replay")
    u = 2 * 64 * 2048 * 2
    wanted = {
        tw.mesh(256, q_tile=16): 60,
        tw.mesh(256, q_tile=8): 76,
        tw.ulysses(8, inner=tw.mesh(32, q_tile=4)): 23.5,
    }
    for plan, units in wanted.items():
        sent = tw.volume(plan, work).forward
        assert len(set(sent)) == 1 and sent[0] / u == pytest.approx(units, rel=2e-3), plan
    assert max(tw.volume(tw.attention2d(16, 16), work).forward) / u == pytest.approx(62, rel=2e-3)


def test_no_more_than_transformer_engines_ring():
    """9 units of one rank's k and v for forward and backward: 4 ranks, MHA, bf16 wire."""
    work = tw.Workload(4096, 8, 8, 64, "bfloat16", None, tw.Full(), "zigzag")
    unit = 2 * 1024 * 8 * 64 * 2
    for mask in (tw.Full(), tw.Causal()):
        forward, backward = tw.volume(tw.ring(4), work.__class__(**{**vars(work), "mask": mask}))
        assert max(f + b for f, b in zip(forward, backward, strict=True)) <= 9 * unit
    assert tw.volume(tw.ring(4), work) == ((3 * unit,) * 4, (6 * unit,) * 4)


def test_own_share_never_travels():
    work = tw.Workload(64, 2, 2, 8, "float32")
    assert tw.volume(tw.ring(1), work) == tw.volume(tw.mesh(1, q_tile=1), work) == ((0,), (0,))


def test_masks_reduce_what_travels():
    def total(mask: tw.Mask, layout: str) -> int:
        work = tw.Workload(64, 2, 2, 8, "float32", None, mask, layout)
        return sum(sum(one) for one in tw.volume(tw.ring(4), work))

    assert total(tw.Document([0, 16, 32, 48, 64]), "contiguous") == 0
    assert total(tw.Causal(), "contiguous") < total(tw.Full(), "contiguous")
    assert total(tw.Causal(), "zigzag") < total(tw.Full(), "zigzag")
    assert total(tw.Causal() & tw.Window(4, 0), "contiguous") < total(tw.Causal(), "contiguous")


def counted(plan: Plan, work: tw.Workload, backward_plan: Plan | None) -> tw.Volume:
    """Bytes that each rank's transport sends in forward and in backward."""

    layout = work.layout_for(plan.world_size)
    num_queries = 1 if plan.replicated_queries else work.num_tokens
    shapes = [
        (rows, heads, work.head_dim)
        for rows, heads in (
            (num_queries, work.num_heads),
            (work.num_tokens, work.num_kv_heads),
        )
    ]
    x, dtype = draw(*shapes, seed=1), getattr(torch, work.dtype)

    def on_rank(rank: int, group) -> tuple[int, int]:
        q = x.q if plan.replicated_queries else layout.shard(x.q, rank)
        q, k, v = (
            t.to(dtype).clone().requires_grad_()
            for t in (q, layout.shard(x.k, rank), layout.shard(x.v, rank))
        )
        out = tw.attention(
            *(q, k, v),
            plan=plan,
            layout=layout,
            mask=work.mask,
            group=group,
            backward_plan=backward_plan,
            wire_dtype=work.wire_dtype,
            save=work.save,
        )
        forward = group.bytes_sent
        out.sum().backward()
        return forward, group.bytes_sent - forward

    return tw.Volume(*zip(*tw.loopback(plan.world_size, on_rank), strict=True))


def _mask(random: Random, num_tokens: int) -> tw.Mask:
    cuts = sorted(random.randint(0, num_tokens) for _ in range(3))
    plain = (tw.Full(), tw.Causal(), tw.Window(5, 2), tw.Document([0, *cuts, num_tokens]))
    left, right = random.choice(plain), random.choice(plain)
    return random.choice((left, left & right, left | right))


@pytest.mark.parametrize("seed", thinned(range(40)))
def test_bytes_counted_are_the_volume(seed: int):
    random = Random(seed)
    n = random.randint(2, 8)
    plan = random.choice(list(plans(n)))
    num_tokens = random.choice([3, n + 1, 29, 64, 101])
    make = random.choice((tw.contiguous, tw.zigzag, tw.striped))
    layout: Layout = make(num_tokens, n)
    groups = plan.num_head_groups
    num_kv_heads = groups * random.choice([1, 2]) if random.random() < 0.7 else 1
    num_heads = max(groups, num_kv_heads) * random.choice([1, 2])
    backward_plan = random.choice([None, *plans(n, "tree", "ulysses")])
    save = random.choice([None, "replay", "gathered"])
    if "gathered" in (save, plan.default_save) or plan.replicated_queries:
        backward_plan = None
    work = tw.Workload(
        num_tokens,
        num_heads,
        num_kv_heads,
        random.choice([3, 8]),
        random.choice(["float64", "float32", "bfloat16"]),
        random.choice([None, "float32", "bfloat16"]),
        _mask(random, num_tokens),
        layout,
        save,
    )
    assert counted(plan, work, backward_plan) == tw.volume(plan, work, backward_plan)


def test_the_forward_plan_alone_says_what_backward_does_about_operands():
    """A backward plan that by itself keeps what forward gathered finds nothing kept by a ring."""
    plan, other = tw.ring(4), tw.ulysses(4)
    work = tw.Workload(64, 4, 4, 8, "float32", mask=tw.Causal())
    sent = tw.volume(plan, work, other)
    assert sent == counted(plan, work, other)
    assert sent.backward == tw.volume(other, replace(work, save="replay")).backward
    machine = tw.Machine.preset("h100x8")
    found, told = (
        tw.simulate(plan, replace(work, save=save), machine, other) for save in (None, "replay")
    )
    assert sum(found.total_bytes_by_link.values()) == sum(map(sum, sent))
    assert found.backward_seconds == told.backward_seconds
    assert found.pass_peak_bytes == told.pass_peak_bytes


def test_plans_of_one_call_fit_each_other():
    work = tw.Workload(64, 4, 4, 8)
    for question in (tw.volume, partial(tw.simulate, machine=tw.Machine.preset("h100x8"))):
        with pytest.raises(ValueError, match="make both for the same number"):
            question(tw.ring(4), work, backward_plan=tw.ring(8))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "int8"}, r"dtype \('int8'\) must be 'float64'"),
        ({"wire_dtype": "fp8"}, r"wire_dtype \('fp8'\) must be"),
        ({"layout": "spiral"}, r"layout \('spiral'\) must be 'contiguous', 'zigzag'"),
        ({"layout": tw.zigzag(63, 4)}, "layout has 63 tokens, the workload 64"),
        ({"num_kv_heads": 3}, r"num_heads \(8\) must be a multiple of num_kv_heads \(3\)"),
        ({"mask": tw.Document([0, 63])}, "63"),
        ({"num_heads": 10**18}, r"num_heads \(10+\) x head_dim \(4\) is more than any memory"),
        ({"v_head_dim": 1.5}, r"v_head_dim \(1.5\) must be a whole number"),
    ],
)
def test_a_workload_names_what_does_not_fit(fields: dict, message: str):
    good = {"num_tokens": 64, "num_heads": 8, "num_kv_heads": 2, "head_dim": 4}
    with pytest.raises(ValueError, match=message):
        tw.Workload(**{**good, **fields})


def test_volume_names_the_degrees_that_work():
    work = tw.Workload(64, 8, 2, 4)
    with pytest.raises(ValueError, match="degrees that work: 1, 2, 4, 8"):
        tw.volume(tw.ulysses(3), work)
    with pytest.raises(ValueError, match="save='gathered' needs the same plan in backward"):
        tw.volume(tw.ulysses(2), work, backward_plan=tw.ring(2))
    with pytest.raises(ValueError, match=r"save \('all'\)"):
        tw.volume(tw.ring(2), tw.Workload(64, 8, 2, 4, save="all"))


def test_presets_are_the_layers_of_published_models():
    flux, wan = (tw.Workload.preset(name, 8) for name in ("flux", "wan"))
    assert (flux.num_tokens, flux.num_heads, flux.head_dim) == (4608, 24, 128)
    assert flux.layout_for(8).replicated.tolist() == [*range(512)]
    assert flux.layout_for(8).sizes == (512 + 512,) * 8
    assert (wan.num_tokens, wan.num_heads, wan.head_dim) == (21 * 45 * 80, 40, 128)
    assert wan.layout_for(8) == tw.contiguous(75_600, 8)
    with pytest.raises(ValueError, match="preset 'sora' is not known; take one of flux, wan"):
        tw.Workload.preset("sora", 8)

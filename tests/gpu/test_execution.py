"""On a GPU: loopback's ranks on streams of their own, bound buffers, captured graphs.

From small to large: what an early test shows to be wrong explains the later ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise as tw
from tilewise.kernels.merge import merge_into
from tilewise.kernels.triton.merge import merge_rows
from tilewise.transport.loopback import LoopbackGroup
from tilewise.transport.protocol import Message

pytestmark = pytest.mark.gpu

TOKENS, HEADS, WIDTH = 777, (8, 4), 64
NAMES = ("out", "dq", "dk", "dv")
BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # whatever torch prefers
MASKS = {
    "full": tw.Full(),
    "causal": tw.Causal(),
    "window": tw.Causal() & tw.Window(99, 0),
    "documents": tw.Document([0, 100, 500, TOKENS]) & tw.Causal(),
}
PLANS = {
    "ring": tw.ring(4),
    "ring-q": tw.ring(4, moves="q"),
    "all-gather": tw.all_gather(4),
    "double-ring": tw.double_ring(2, 2),
    "balanced-ring": tw.balanced_ring(4),
    "attention2d": tw.attention2d(2, 2),
    "mesh": tw.mesh(8, q_tile=4),
    "ulysses": tw.ulysses(2, inner=tw.mesh(4, q_tile=2)),
}
Ranks = list[tuple[Tensor, ...]]


@cache
def tensors() -> tuple[Tensor, ...]:
    """q, k, v, dout; nobody changes them."""
    heads = HEADS[0], HEADS[1], HEADS[1], HEADS[0]
    return tuple(torch.randn(TOKENS, n, WIDTH, device="cuda").bfloat16() for n in heads)


@cache
def wanted(mask: str) -> tuple[list[Tensor], list[float]]:
    """out and gradients in fp64, and how far bf16 may be from them: twice as far as torch's own."""
    exact, plain = (dense(MASKS[mask], dtype) for dtype in (torch.float64, torch.bfloat16))
    return exact, [2 * rms(x, y) for x, y in zip(plain, exact, strict=True)]


def dense(mask: tw.Mask, dtype: torch.dtype) -> list[Tensor]:
    positions = torch.arange(TOKENS)
    allowed = torch.as_tensor(mask.dense(positions, positions)).cuda()
    q, k, v = (x.to(dtype).transpose(0, 1).requires_grad_() for x in tensors()[:3])
    wide = (x.repeat_interleave(HEADS[0] // HEADS[1], 0)[None] for x in (k, v))
    with sdpa_kernel(BACKENDS):
        out = F.scaled_dot_product_attention(q[None], *wide, attn_mask=allowed[None, None])[0]
    grads = torch.autograd.grad(out, (q, k, v), tensors()[3].to(dtype).transpose(0, 1))
    return [x.transpose(0, 1) for x in (out.detach(), *grads)]


def rms(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).square().mean().sqrt())


def looped(
    plan: tw.Plan, mask: str, backward: bool = True, kernel: str | None = None
) -> Callable[[], Ranks]:
    """Both passes of every rank, on shards that stay where they are."""
    layout = tw.zigzag(TOKENS, plan.world_size)
    shards = [
        [layout.shard(x, rank).clone() for x in tensors()] for rank in range(layout.world_size)
    ]

    def on_rank(rank: int, group: Any) -> tuple[Tensor, ...]:
        q, k, v = (x.detach().requires_grad_(backward) for x in shards[rank][:3])
        call = {"plan": plan, "layout": layout, "mask": MASKS[mask], "group": group}
        out = tw.attention(q, k, v, **call, validate="never", kernel=kernel)
        grads = torch.autograd.grad(out, (q, k, v), shards[rank][3]) if backward else ()
        return out.detach(), *grads

    return lambda: tw.loopback(plan.world_size, on_rank)


def check(plan: tw.Plan, mask: str, ranks: Ranks) -> None:
    """Name the first result that is not right, and the rank that is farthest from it."""
    layout = tw.zigzag(TOKENS, plan.world_size)
    exact, allowed = wanted(mask)
    for i, name in enumerate(NAMES[: len(ranks[0])]):
        parts = [results[i] for results in ranks]
        errors = [rms(x, layout.shard(exact[i], rank)) for rank, x in enumerate(parts)]
        finite = [bool(x.isfinite().all()) for x in parts]
        error = rms(layout.unshard(parts), exact[i])
        assert error <= allowed[i], (
            f"{name} is off by {error:.3g}, allowed {allowed[i]:.3g}; by rank "
            f"{[f'{x:.3g}' for x in errors]}, finite {finite}"
        )


def captured(run: Callable[[], Ranks]) -> tuple[torch.cuda.CUDAGraph, Ranks]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = run()
    return graph, result


def test_merging_in_one_kernel_is_merging():
    out, other = torch.randn(2, 333, 2, 8, 72, device="cuda")
    lse, late = torch.randn(2, 333, 2, 8, device="cuda") * 3
    for x, y in ((out, lse), (other, late)):
        x[5:9] = 0.0
        y[5:9] = -torch.inf
    late[20:30] = -torch.inf
    other[20:30] = 0.0
    merged, total = out.cpu(), lse.cpu()
    merge_into(merged, total, other.cpu().bfloat16(), late.cpu())
    merge_rows(out, lse, other.bfloat16(), late)
    assert torch.allclose(out.cpu(), merged, atol=2e-5)
    assert torch.equal(lse.cpu() == -torch.inf, total == -torch.inf)
    reached = total > -torch.inf
    assert torch.allclose(lse.cpu()[reached], total[reached], atol=2e-5)


def test_messages_between_streams_arrive_whole_and_in_order():
    """Each rank passes on what it has received, at once changed: a race would mix rounds."""
    rounds, n = 50, 4

    def on_rank(rank: int, group: LoopbackGroup) -> Tensor:
        here = torch.full((1 << 20,), rank, dtype=torch.uint8, device="cuda")
        for step in range(rounds):
            there = torch.empty_like(here)
            group.exchange(
                [Message(here, (rank + 1) % n, f"round {step}")],
                [Message(there, (rank - 1) % n, f"round {step}")],
            ).wait()
            here.zero_()
            here = there.add_(1)
        group.finish()
        return here

    for rank, x in enumerate(tw.loopback(n, on_rank)):
        assert int(x.min()) == int(x.max()) == (rank - rounds) % n + rounds


def test_one_rank_is_dense_attention():
    check(tw.ring(1), "causal", looped(tw.ring(1), "causal")())


def test_forward_alone():
    check(PLANS["ring"], "causal", looped(PLANS["ring"], "causal", backward=False)())


@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_kernels_in_a_ring(name):
    reason = tw.kernel(name).supports("cuda", torch.bfloat16, WIDTH)
    if reason is not None:
        pytest.skip(reason)
    for mask in MASKS:
        check(PLANS["ring"], mask, looped(PLANS["ring"], mask, kernel=name)())


@pytest.mark.parametrize("heads", [1, 3, 5, 6])
@pytest.mark.parametrize("name", ["cuda", "cudnn", "triton"])
def test_rows_of_any_number_of_heads_can_be_loaded(name, heads, device="cuda"):
    """Packed rows of q, dout, lse and delta: kernels load 16 bytes at once."""
    reason = tw.kernel(name).supports(device, torch.bfloat16, 128)
    if reason is not None:
        pytest.skip(reason)
    layout, plan = tw.zigzag(256, 2), tw.ring(2, moves="q")
    whole = [torch.randn(256, heads, 128, device=device).bfloat16() for _ in range(4)]

    def on_rank(rank: int, group: Any) -> tuple[Tensor, ...]:
        q, k, v = (layout.shard(x, rank).requires_grad_() for x in whole[:3])
        call = {"plan": plan, "layout": layout, "mask": tw.Causal(), "group": group}
        out = tw.attention(q, k, v, **call, kernel=name)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), layout.shard(whole[3], rank))

    got = [layout.unshard(parts) for parts in zip(*tw.loopback(2, on_rank), strict=True)]
    q, k, v, dout = (x.double().transpose(0, 1) for x in whole)
    operands = [x.requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*operands, is_causal=True)
    wanted = out.detach(), *torch.autograd.grad(out, operands, dout)
    for x, y in zip(got, wanted, strict=True):
        assert rms(x, y.transpose(0, 1)) < 2e-2 * float(y.square().mean().sqrt())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("plan", PLANS)
def test_every_strategy(plan, mask):
    """The first run records its buffers, the second has them."""
    run = looped(PLANS[plan], mask)
    check(PLANS[plan], mask, run())
    check(PLANS[plan], mask, run())


def test_bound_passes_are_the_same_every_time():
    """Where kernels are: by default flash attention adds up dq in any order."""
    run = looped(PLANS["mesh"], "causal")
    torch.use_deterministic_algorithms(True)
    try:
        first = run()
        for _ in range(10):
            assert all(torch.equal(x, y) for x, y in zip(run()[3], first[3], strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_passes_ask_the_device_for_nothing():
    run = looped(PLANS["ring"], "causal")
    run()
    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_host_runs_ahead_of_the_device():
    """All of both passes is launched while the device is still busy with something before it."""
    run = looped(tw.ring(2), "causal")  # few launches: a full queue would stop the host
    for _ in range(16):  # so that every stream of torch's pool has memory: cudaMalloc may wait
        run()
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # clock cycles: two seconds
    asleep = torch.cuda.Event()
    asleep.record()
    run()
    assert not asleep.query()


def test_streams_in_turn_share_slabs():
    """One after another, on streams that do not wait for each other."""
    run = looped(PLANS["ring"], "documents")
    run()
    results = []
    for stream in [torch.cuda.Stream(), torch.cuda.Stream()] * 3:
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            results.append(run())
    torch.cuda.synchronize()
    for ranks in results:
        check(PLANS["ring"], "documents", ranks)


@pytest.mark.parametrize("plan", PLANS)
def test_a_graph_gives_the_same(plan):
    run = looped(PLANS[plan], "causal")  # whose shards a replay reads
    graph, ranks = captured(run)
    for _ in range(2):
        for parts in ranks:
            for x in parts:
                x.zero_()
        graph.replay()
        check(PLANS[plan], "causal", ranks)


def test_a_graph_follows_its_inputs():
    plan, layout = tw.ring(4), tw.zigzag(TOKENS, 4)
    shards = [[layout.shard(x, rank).clone() for x in tensors()[:3]] for rank in range(4)]

    def run() -> list[Tensor]:
        def on_rank(rank: int, group: Any) -> Any:
            options = {"plan": plan, "layout": layout, "mask": tw.Causal(), "group": group}
            return tw.attention(*shards[rank], validate="never", **options)

        return tw.loopback(4, on_rank)

    graph, results = captured(run)  # pyright: ignore[reportArgumentType]
    for x in (y for shard in shards for y in shard):
        x.normal_()
    graph.replay()
    for got, want in zip(results, run(), strict=True):
        assert torch.equal(got, want)  # pyright: ignore[reportArgumentType]


def test_decoding_equals_dense_attention():
    lengths, steps = (100, 33), 3
    q, k, v = (torch.randn(2, 128, n, WIDTH, device="cuda").bfloat16() for n in (8, 4, 4))

    def on_rank(rank: int, group: Any) -> list[Tensor]:
        options = {"dtype": torch.bfloat16, "device": "cuda", "group": group}
        cache = tw.KVCache(128, num_kv_heads=4, head_dim=WIDTH, batch=2, **options)
        cache.append(k[:, : max(lengths)], v[:, : max(lengths)], counts=lengths)
        outs = []
        for _ in range(steps):
            now = [
                torch.stack([x[b, n : n + 1] for b, n in enumerate(cache.lengths)])
                for x in (q, k, v)
            ]
            outs.append(cache.decode(*now))
            group.gather_records(torch.zeros(1))  # till all ranks are here
            torch.cuda.set_sync_debug_mode("error")  # from the second step on
        return outs

    try:
        results = tw.loopback(3, on_rank)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for step, out in enumerate(results[0]):
        for b, length in enumerate(lengths):
            stop = length + step + 1
            heads = [x[b, :stop].double().transpose(0, 1) for x in (q, k, v)]
            want = F.scaled_dot_product_attention(
                heads[0][:, -1:], heads[1], heads[2], enable_gqa=True
            )
            assert rms(out[b], want.transpose(0, 1)) < 4e-3

"""On a GPU: loopback's ranks on streams of their own, bound buffers, captured graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from benchmarks.gpu_parts.correctness import plans
from tilewise.kernels.merge import merge_into
from tilewise.kernels.triton_merge import merge_rows

TOKENS, HEADS, WIDTH = 777, (8, 4), 64
MASKS = {
    "full": tw.Full(),
    "causal": tw.Causal(),
    "window": tw.Causal() & tw.Window(99, 0),
    "documents": tw.Document([0, 100, 500, TOKENS]) & tw.Causal(),
}
PLANS = plans(HEADS[1])


@pytest.fixture(autouse=True)
def device():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    torch.empty(0, device="cuda")
    torch.manual_seed(0)


def draw() -> list[Tensor]:
    """q, k, v, dout."""
    heads = HEADS[0], HEADS[1], HEADS[1], HEADS[0]
    return [torch.randn(TOKENS, n, WIDTH, device="cuda").bfloat16() for n in heads]


def loop(plan: tw.Plan, mask: tw.Mask, shards: list[list[Tensor]]) -> list[tuple[Tensor, ...]]:
    layout = tw.zigzag(TOKENS, plan.world_size)

    def on_rank(rank: int, group: Any) -> tuple[Tensor, ...]:
        q, k, v = (x.detach().requires_grad_() for x in shards[rank][:3])
        out = tw.attention(
            q, k, v, plan=plan, layout=layout, mask=mask, group=group, validate="never"
        )
        assert isinstance(out, Tensor)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), shards[rank][3])

    return tw.loopback(plan.world_size, on_rank)


def shards_of(plan: tw.Plan, tensors: list[Tensor]) -> list[list[Tensor]]:
    layout = tw.zigzag(TOKENS, plan.world_size)
    return [[layout.shard(x, rank).clone() for x in tensors] for rank in range(plan.world_size)]


def whole(plan: tw.Plan, ranks: list[tuple[Tensor, ...]]) -> list[Tensor]:
    layout = tw.zigzag(TOKENS, plan.world_size)
    return [layout.unshard(list(parts)) for parts in zip(*ranks, strict=True)]


def dense(tensors: list[Tensor], mask: tw.Mask, dtype: torch.dtype) -> list[Tensor]:
    positions = torch.arange(TOKENS)
    allowed = torch.as_tensor(mask.dense(positions, positions)).cuda()
    q, k, v = (x.to(dtype).transpose(0, 1).requires_grad_() for x in tensors[:3])
    out = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=allowed[None, None], enable_gqa=True
    )[0]
    grads = torch.autograd.grad(out, (q, k, v), tensors[3].to(dtype).transpose(0, 1))
    return [x.transpose(0, 1) for x in (out.detach(), *grads)]


def rms(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).square().mean().sqrt())


def graphed(run: Callable[[], list[tuple[Tensor, ...]]]) -> list[tuple[Tensor, ...]]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = run()
    graph.replay()
    graph.replay()
    return result


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_every_strategy_over_loopback(plan, mask, graph):
    tensors = draw()
    shards = shards_of(plan, tensors)
    exact, plain = (dense(tensors, MASKS[mask], d) for d in (torch.float64, torch.bfloat16))

    def run() -> list[tuple[Tensor, ...]]:
        return loop(plan, MASKS[mask], shards)

    run()
    ranks = graphed(run) if graph else run()
    for got, want, theirs in zip(whole(plan, ranks), exact, plain, strict=True):
        assert rms(got, want) <= 2 * rms(theirs, want)


def test_a_graph_follows_its_inputs():
    plan, tensors = tw.ring(4), draw()
    shards = shards_of(plan, tensors)

    def run() -> list[tuple[Tensor, ...]]:
        return loop(plan, tw.Causal(), shards)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = run()
    for _ in range(2):
        others = shards_of(plan, draw())
        for shard, other in zip(shards, others, strict=True):
            for x, y in zip(shard, other, strict=True):
                x.copy_(y)
        graph.replay()
        for got, want in zip(whole(plan, result), whole(plan, run()), strict=True):
            assert rms(got, want) <= 1e-2


def test_bound_passes_are_the_same_every_time():
    plan = tw.mesh(8, q_tile=4)
    shards = shards_of(plan, draw())
    first = whole(plan, loop(plan, tw.Causal(), shards))[0]
    for _ in range(10):
        assert torch.equal(whole(plan, loop(plan, tw.Causal(), shards))[0], first)


def test_bound_passes_do_not_synchronise():
    plan = tw.ring(4)
    shards = shards_of(plan, draw())
    for _ in range(2):
        loop(plan, tw.Causal(), shards)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loop(plan, tw.Causal(), shards)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_merging_in_one_kernel_is_merging():
    out, other = torch.randn(2, 333, 2, 8, 72, device="cuda")
    lse, late = torch.randn(2, 333, 2, 8, device="cuda") * 3
    for x, y in ((out, lse), (other, late)):
        x[5:9], y[5:9] = 0.0, -torch.inf
    late[20:30], other[20:30] = -torch.inf, 0.0
    want = [x.cpu() for x in (out, lse)]
    merge_into(*want, other.cpu().bfloat16(), late.cpu())
    merge_rows(out, lse, other.bfloat16(), late)
    assert torch.allclose(out.cpu(), want[0], atol=2e-5)
    assert torch.equal(lse.cpu() == -torch.inf, want[1] == -torch.inf)
    reached = want[1] > -torch.inf
    assert torch.allclose(lse.cpu()[reached], want[1][reached], atol=2e-5)

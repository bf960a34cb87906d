"""On a GPU: what DistTransport asks of NCCL. With one GPU a rank sends to itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from processes.launcher import run_processes

import tilewise as tw
from tilewise.transport.nccl_batches import post_batch
from tilewise.transport.nccl_groups import lane_group, warm_up
from tilewise.transport.process_group import DistTransport
from tilewise.transport.protocol import Message

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[False, True], ids=["lazy", "eager"])
def group(request: pytest.FixtureRequest) -> Iterator[dist.ProcessGroup]:
    """Of NCCL alone; eager: with a device_id, whose communicators new_group would split."""
    device = torch.device("cuda", torch.cuda.current_device()) if request.param else None
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    assert isinstance(dist.group.WORLD, dist.ProcessGroup)
    yield dist.group.WORLD
    dist.destroy_process_group()


def exchanged(group: dist.ProcessGroup, x: torch.Tensor, y: torch.Tensor) -> None:
    sent, received = (Message(t.view(torch.uint8), 0, "to itself") for t in (x, y))
    post_batch(group, [(True, sent), (False, received)]).wait()


def test_groups_beside_a_group_of_nccl_are_made_once(group):
    lane = lane_group(group, 1)
    assert lane is lane_group(group, 1)
    for one in (group, lane):
        warm_up(one)
        x, y = torch.randn(1000, device="cuda"), torch.zeros(1000, device="cuda")
        exchanged(one, x, y)
        assert torch.equal(x, y)


def test_batches_on_two_lanes_can_be_captured(group):
    lanes = group, lane_group(group, 1)
    x, there, back = (torch.zeros(1 << 20, device="cuda") for _ in range(3))
    for one in lanes:
        warm_up(one)
        exchanged(one, x, there)  # connects
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        exchanged(lanes[0], x, there)
        there.add_(1.0)
        exchanged(lanes[1], there, back)
    for value in (3.0, 7.0):
        x.fill_(value)
        graph.replay()
        assert float(back.min()) == float(back.max()) == value + 1.0


def test_a_world_of_one_over_nccl(group):
    q, k, v = torch.randn(3, 64, 4, 64, device="cuda").bfloat16()
    options = {"plan": tw.ring(1), "layout": tw.contiguous(64, 1), "mask": tw.Causal()}
    got = tw.attention(q, k, v, group=group, **options)
    assert torch.equal(got, tw.attention(q, k, v, group=DistTransport(group), **options))  # pyright: ignore[reportArgumentType]


def between_gpus(rank: int, backend: str, node_size: int | None) -> float:
    """The largest error of out and gradients on this rank, against dense attention in fp32."""
    torch.cuda.set_device(rank)
    group = dist.new_group(backend=backend)
    assert isinstance(group, dist.ProcessGroup)
    n, tokens = group.size(), 64 * group.size()
    torch.manual_seed(0)
    whole = [torch.randn(tokens, 2, 64, device="cuda").bfloat16() for _ in range(4)]
    layout, transport = tw.zigzag(tokens, n), DistTransport(group, node_size=node_size)
    q, k, v = (layout.shard(x, rank).requires_grad_() for x in whole[:3])
    plan = tw.mesh(n, q_tile=1 if n < 4 else 2)
    options = {"plan": plan, "layout": layout, "mask": tw.Causal(), "group": transport}

    def both_passes() -> list[torch.Tensor]:
        out = tw.attention(q, k, v, **options)
        assert isinstance(out, torch.Tensor)
        grads = torch.autograd.grad(out, (q, k, v), layout.shard(whole[3], rank))
        return [out.detach(), *grads]

    both_passes()  # records its buffers
    got = both_passes()
    heads = [x.float().transpose(0, 1).requires_grad_() for x in whole[:3]]
    dense = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)  # pyright: ignore[reportArgumentType]
    wanted = [dense, *torch.autograd.grad(dense, heads, whole[3].float().transpose(0, 1))]
    errors = [
        float((x.float() - layout.shard(y.detach().transpose(0, 1), rank)).abs().max())
        for x, y in zip(got, wanted, strict=True)
    ]
    return max(errors)


@pytest.mark.parametrize("node_size", [None, 1], ids=["one lane", "two lanes"])
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_ranks_on_gpus_of_their_own(backend, node_size):
    count = min(4, torch.cuda.device_count())
    if count < 2:
        pytest.skip("needs two GPUs")
    assert max(run_processes(count, between_gpus, backend, node_size)) < 0.1

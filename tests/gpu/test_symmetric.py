"""On a GPU: pushes between processes, several of which may share one device, as NCCL's may not."""

from __future__ import annotations

import os

import pytest
import torch
from multiprocess.launcher import run_processes

import tilewise as tw
from tilewise.expressions import read_plan
from tilewise.transport.protocol import Message
from tilewise.transport.symmetric import SymmetricTransport
from tilewise.transport.symmetric_memory import lacking

pytestmark = pytest.mark.gpu
HEAP_BYTES = 1 << 26


def transport(rank: int) -> SymmetricTransport:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(rank % torch.cuda.device_count())
    found = tw.transport_for(None, "symmetric", heap_bytes=HEAP_BYTES)
    assert isinstance(found, SymmetricTransport)
    return found


def exchange(rank: int) -> list[int]:
    """What arrives in memory of either kind, of launches that follow one another at once."""
    end, peer = transport(rank), 1 - rank
    own = end.workspace(1 << 20)
    assert own is not None
    got = []
    for number in range(20):
        room = own if number % 2 else torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
        sent = torch.full_like(room, 10 * rank + number)
        launched = end.exchange([Message(sent, peer, "sent")], [Message(room, peer, "got")])
        del sent
        launched.wait()
        got.append(room.min() * (room.min() == room.max()))
    end.finish()
    return torch.stack(got).tolist()


def attend(rank: int, text: str) -> float:
    """The largest error of out and gradients in several passes, against dense attention."""
    end, plan = transport(rank), read_plan(text)
    n, tokens = end.world_size, 128 * end.world_size
    torch.manual_seed(0)
    whole = [torch.randn(tokens, 2, 64, device="cuda").bfloat16() for _ in range(4)]
    layout, worst = tw.zigzag(tokens, n), 0.0
    q, k, v = (layout.shard(x, rank).requires_grad_() for x in whole[:3])
    heads = [x.float().transpose(0, 1).requires_grad_() for x in whole[:3]]
    dense = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)  # pyright: ignore[reportArgumentType]
    wanted = [dense, *torch.autograd.grad(dense, heads, whole[3].float().transpose(0, 1))]
    for _ in range(4):
        out = tw.attention(q, k, v, plan=plan, layout=layout, mask=tw.Causal(), group=end)
        assert isinstance(out, torch.Tensor)
        got = [out.detach(), *torch.autograd.grad(out, (q, k, v), layout.shard(whole[3], rank))]
        for x, y in zip(got, wanted, strict=True):
            want = layout.shard(y.detach().transpose(0, 1), rank)
            worst = max(worst, float((x.float() - want).abs().max()))
    return worst


@pytest.fixture(autouse=True)
def _able() -> None:
    reason = lacking()
    if reason:
        pytest.skip(reason)


def test_messages_arrive_in_workspaces_and_elsewhere():
    got = run_processes(2, exchange)
    assert got == [[10 * (1 - rank) + number for number in range(20)] for rank in range(2)]


@pytest.mark.parametrize("plan", ["ring(2)", "mesh(4, q_tile=2)", "ulysses(2)"])
def test_attention_over_processes_of_one_gpu(plan):
    n = 4 if "4" in plan else 2
    assert max(run_processes(n, attend, plan)) < 0.1

"""kernel=: the kernel that is asked for serves every call of both passes, or an error says why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conformance.oracle import assert_close, dense, draw, split
from torch import Tensor

import tilewise as tw

TOKENS, N = 21, 3
LAYOUT, MASK = tw.zigzag(TOKENS, N), tw.Causal() & tw.Document([0, 4, TOKENS])


class Counted:
    """A kernel around another one."""

    square_causal = False
    whole_tile = True

    def __init__(self, name: str, differentiable: bool = True):
        self.name, self.differentiable = f"counted {name}", differentiable
        self.kernel, self.calls = tw.kernel(name), {"forward": 0, "backward": 0}

    def supports(
        self, device_type: str, dtype: torch.dtype, head_dim: int, backward: bool = True
    ) -> str | None:
        if backward and not self.differentiable:
            return "it has no backward"
        return self.kernel.supports(device_type, dtype, head_dim, backward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls["forward"] += 1
        return self.kernel.forward(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls["backward"] += 1
        return self.kernel.backward(*args, **kwargs)


def inputs(requires_grad: bool = False) -> list[Tensor]:
    return [torch.randn(TOKENS, 2, 8).requires_grad_(requires_grad) for _ in range(3)]


def attend(rank: int, group: Any, kernel: Any, requires_grad: bool = False) -> Tensor:
    q, k, v = (LAYOUT.shard(x, rank, 0) for x in inputs(requires_grad))
    return tw.attention(
        q, k, v, plan=tw.ring(N), layout=LAYOUT, mask=MASK, group=group, kernel=kernel
    )


@pytest.mark.parametrize(
    "kernel", ["reference", "cpu", tw.kernel("reference")], ids=["reference", "cpu", "an object"]
)
@pytest.mark.parametrize("plan", [tw.ring(N), tw.mesh(N, q_tile=3), tw.ulysses(N)], ids=repr)
def test_a_kernel_by_name_or_as_an_object_computes_attention(plan: tw.Plan, kernel: Any):
    x = draw((TOKENS, 6, 8), (TOKENS, 3, 8), seed=0)
    assert_close(split(x, plan, LAYOUT, MASK, kernel=kernel), dense(x, MASK))


def test_an_object_with_the_protocol_computes_every_tile_of_both_passes():
    x, kernel = draw((TOKENS, 2, 8), (TOKENS, 2, 8), seed=1), Counted("reference")
    assert_close(split(x, tw.ring(N), LAYOUT, tw.Full(), kernel=kernel), dense(x, tw.Full()))
    assert kernel.calls == {"forward": N * N, "backward": N * N}


def test_kernels_of_one_name_that_want_tiles_cut_otherwise_keep_apart():
    """What a plan keeps for one of them is not lent to the other."""
    x, plan = draw((TOKENS, 2, 8), (TOKENS, 2, 8), seed=2), tw.ring(N)
    whole = Counted("reference")
    whole.name = "reference"
    for kernel in ("reference", whole, "reference", "cpu"):
        assert_close(split(x, plan, LAYOUT, MASK, kernel=kernel), dense(x, MASK))


def test_each_rank_may_have_its_own():
    x, kernels = draw((TOKENS, 2, 8), (TOKENS, 2, 8), seed=3), ("cpu", "reference", None)

    def on_rank(rank: int, group: Any) -> Tensor:
        q, k, v = (LAYOUT.shard(t, rank, 0) for t in x[:3])
        call = {"plan": tw.ring(N), "layout": LAYOUT, "mask": MASK, "group": group}
        return tw.attention(q, k, v, **call, kernel=kernels[rank])

    out = LAYOUT.unshard(tw.loopback(N, on_rank), dim=0)
    torch.testing.assert_close(out, dense(x, MASK).out, rtol=0, atol=1e-12)


REFUSED = {
    "an unknown name": ("fast", "kernel 'fast' is not known; take one of cpu, cuda, "),
    "another device": (
        "cuda",
        r"kernel 'cuda' cannot serve this: it runs on cuda, not on cpu; these can: cpu, reference$",
    ),
    "an object without the protocol": (
        SimpleNamespace(name="mine", supports=None, forward=None),
        r"kernel \(SimpleNamespace\) lacks square_causal, whole_tile, backward; ",
    ),
    "a class": (Counted, r"kernel \(Counted\) is a class; pass an instance of it"),
}


@pytest.mark.parametrize(("kernel", "message"), REFUSED.values(), ids=REFUSED)
def test_one_that_cannot_serve_is_an_error_on_every_rank_before_anything_is_sent(kernel, message):
    def on_rank(rank: int, group: Any) -> int:
        with pytest.raises(ValueError, match=f"rank 1: {message}"):
            attend(rank, group, kernel if rank == 1 else None)
        return group.bytes_sent

    assert tw.loopback(N, on_rank) == [0] * N
    options = {"num_kv_heads": 2, "head_dim": 8, "kernel": kernel}
    with pytest.raises(ValueError, match=message):
        tw.KVCache(4, **options)


def test_a_backward_pass_is_asked_for_only_where_one_may_follow():
    kernel = Counted("cpu", differentiable=False)
    with pytest.raises(ValueError, match="'counted cpu' cannot serve this: it has no backward"):
        tw.loopback(N, lambda rank, group: attend(rank, group, kernel, requires_grad=True))
    tw.loopback(N, lambda rank, group: attend(rank, group, kernel))
    assert kernel.calls["forward"] > 0


def test_context_parallel_passes_its_kernel_on_unless_a_call_names_another():
    mine, other = Counted("reference"), Counted("reference")

    def on_rank(rank: int, group: Any) -> None:
        cp = tw.ContextParallel(group, num_tokens=TOKENS, strategy=tw.ring(N), kernel=mine)
        x = [cp.shard(t, dim=0) for t in inputs()]
        cp.attention(*x)
        cp.attention(*x, kernel=other)

    tw.loopback(N, on_rank)
    assert mine.calls == other.calls == {"forward": N * N, "backward": 0}
    with pytest.raises(ValueError, match="kernel 'fast' is not known"):
        tw.ContextParallel(num_tokens=TOKENS, kernel="fast")


def test_a_cache_prefills_and_decodes_with_its_kernel():
    kernel = Counted("cpu", differentiable=False)
    cache = tw.KVCache(8, num_kv_heads=2, head_dim=4, kernel=kernel)
    chunk = cache.chunk([5])
    cache.prefill(*torch.randn(3, 5, 2, 4), chunk, plan=tw.ring(1))
    prefilled = kernel.calls["forward"]
    cache.decode(*torch.randn(3, 1, 1, 2, 4))
    assert kernel.calls["forward"] > prefilled > 0


def test_compiled_code_takes_names_and_refuses_objects():
    call = {"plan": tw.ring(1), "layout": tw.contiguous(TOKENS, 1), "mask": tw.Causal()}
    x = inputs()
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def named(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tw.attention(q, k, v, **call, kernel="reference")

    kernel = Counted("reference")

    @torch.compile(fullgraph=True, backend="eager")
    def given(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tw.attention(q, k, v, **call, kernel=kernel)

    assert torch.equal(named(*x), tw.attention(*x, **call, kernel="reference"))
    with pytest.raises(Exception, match=r"kernel \(Counted\) must be a name in compiled code"):
        given(*x)

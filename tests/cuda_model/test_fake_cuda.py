"""What CUDA would be given, on fake tensors: every kernel's operators, every strategy's passes."""

from itertools import product

import pytest
import torch
from cuda_model.fake_cuda import FakeCuda
from support.kernel_cases import CALLS, HEADS, SCALE, call_of
from support.thinned import thinned

import tilewise as tw
from tilewise.execution.agree import agreed_call
from tilewise.execution.call import Call
from tilewise.execution.forward_backward import backward_pass, forward_pass
from tilewise.kernels import flex, torch_sdpa
from tilewise.kernels.call_cache import CallCache
from tilewise.kernels.protocol import Kernel
from tilewise.kernels.registry import kernel_named
from tilewise.kernels.triton import kernel as triton_kernel
from tilewise.tiles.calls import KernelCall, Kind
from tilewise.transport.loopback import LoopbackGroup

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
PLANS = {
    "ring": lambda: tw.ring(4),
    "ring of queries": lambda: tw.ring(4, moves="q"),
    "all_gather": lambda: tw.all_gather(4),
    "double_ring": lambda: tw.double_ring(2, 2),
    "balanced_ring": lambda: tw.balanced_ring(4),
    "attention2d": lambda: tw.attention2d(2, 2),
    "mesh": lambda: tw.mesh(4, q_tile=2),
    "gathering mesh": lambda: tw.mesh(4, q_tile=4, schedule="gather"),
    "ulysses": lambda: tw.ulysses(2, inner=tw.ring(2)),
}
NAMES = ("cuda", "triton", "cudnn", "efficient", "reference")
ALL_CALLS = {
    **CALLS,
    "corner": call_of(3, 50, Kind.CAUSAL),
    "one key": call_of(5, 1),
    "no rows": call_of(0, 7),
    "no keys": call_of(7, 0),
}


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    for module in (torch_sdpa, flex, triton_kernel):
        monkeypatch.setattr(module, "CALL_CACHE", CallCache())  # no fake tensors of other tests
    return FakeCuda(monkeypatch)


def operands(cuda: FakeCuda, call: KernelCall, heads, dtype, head_dim: int, transposed: bool):
    """q, k, v, dout, lse, delta; transposed: as a user's [batch, tokens, ...] lies in memory."""
    shapes = [(call.num_q, heads[0]), (call.num_k, heads[1]), (call.num_k, heads[1])]

    def draw(rows, *rest, dtype=dtype):
        if transposed:
            return cuda.empty(2, rows, *rest, dtype=dtype).transpose(0, 1)
        return cuda.empty(rows, 2, *rest, dtype=dtype)

    q, k, v = (draw(rows, h, head_dim) for rows, h in shapes)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    lse, delta = (draw(call.num_q, heads[0], dtype=wide) for _ in range(2))
    return q, k, v, draw(call.num_q, heads[0], head_dim), lse, delta


def check(kernel, call: KernelCall, given, dtype: torch.dtype) -> None:
    q, k, v, dout, lse, delta = given
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def agrees(x, like, dtypes):
        assert x.shape == like.shape and x.device == q.device and x.dtype in dtypes

    out, own_lse = kernel.forward(q, k, v, call, SCALE)
    agrees(out, q, (dtype, wide))
    agrees(own_lse, lse, (wide,))
    into = torch.empty_like(q, dtype=wide), torch.empty_like(lse)
    assert kernel.forward(q, k, v, call, SCALE, into) is into
    grads = kernel.backward(q, k, v, dout, lse, delta, call, SCALE)
    for x, like in zip(grads, (q, k, v), strict=True):
        agrees(x, like, (dtype, wide))
    totals = tuple(torch.empty_like(x, dtype=wide) for x in (q, k, v))
    assert kernel.backward(q, k, v, dout, lse, delta, call, SCALE, totals) is totals


# dtype, head_dim, heads, and whether rows lie batch first
MIXED = (
    (torch.bfloat16, 80, "GQA", True),
    (torch.float32, 64, "MHA", False),
    (torch.float16, 256, "MQA", False),
)
ALL = tuple(product(DTYPES, (64, 80, 128, 256), ("GQA",), (False, True)))


def check_all(name: str, call: KernelCall, cases, cuda: FakeCuda) -> int:
    kernel, checked = kernel_named(name), 0
    if kernel.square_causal and call.kind is Kind.CAUSAL and call.num_q != call.num_k:
        return 1
    with cuda():
        for dtype, head_dim, heads, transposed in cases:
            if kernel.supports("cuda", dtype, head_dim) is None:
                given = operands(cuda, call, HEADS[heads], dtype, head_dim, transposed)
                check(kernel, call, given, dtype)
                checked += 1
    return checked


@pytest.mark.parametrize(("name", "call"), thinned(product(NAMES, ALL_CALLS)))
def test_kernels_operators_accept_what_they_are_given(name, call, cuda):
    assert check_all(name, ALL_CALLS[call], MIXED, cuda)


@pytest.mark.slow
@pytest.mark.parametrize("call", ALL_CALLS.values(), ids=ALL_CALLS)
@pytest.mark.parametrize("name", NAMES)
def test_kernels_operators_accept_all_that_they_say_they_do(name, call, cuda):
    assert check_all(name, call, ALL, cuda)


def test_a_mask_left_on_the_cpu_would_be_found(cuda, monkeypatch):
    monkeypatch.setattr(torch_sdpa, "_mask", lambda *_: (torch.zeros(1, 1, 16, 24), None))
    with pytest.raises(RuntimeError, match="device"):
        check_all("efficient", CALLS["bands"], [(torch.float32, 64, "MHA", False)], cuda)


def passes(cuda: FakeCuda, plan: tw.Plan, kernel: Kernel, dtype: torch.dtype) -> None:
    layout = tw.zigzag(29, plan.world_size)
    mask = tw.Document([0, 3, 20, 29]) & tw.Causal()

    def on_rank(rank: int, group: LoopbackGroup) -> None:
        with cuda(), torch.no_grad():
            rows = layout.size(rank)
            q, k, v, dout = (cuda.empty(2, rows, h, 64, dtype=dtype) for h in (4, 2, 2, 4))
            options = {"group": group, "needs_grad": True, "validate": "never", "kernel": kernel}
            call = Call(plan=plan, layout=layout, mask=mask, **options)
            problem, transport = agreed_call(q, k, v, call)
            out, lse, kept = forward_pass(problem, transport, q, k, v, keep=True)
            grads = backward_pass(problem, transport, (q, k, v, out, lse), kept, (dout, None))
            transport.finish()
            for x, like in zip((out, *grads), (q, q, k, v), strict=True):
                assert (x.shape, x.dtype, x.device) == (like.shape, dtype, like.device)
            assert lse.shape == q.shape[:-1] and lse.dtype == torch.float32

    tw.loopback(plan.world_size, on_rank)


@pytest.mark.parametrize("name", ["ring of queries", "attention2d"])
def test_a_pass_keeps_to_its_device(name, cuda):
    passes(cuda, PLANS[name](), kernel_named("cuda"), torch.bfloat16)
    assert "_merge" in cuda.launches


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("cuda", torch.float16), ("cudnn", torch.bfloat16), ("efficient", torch.float32)],
)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_passes_of_every_strategy_keep_to_their_device(plan, name, dtype, cuda):
    passes(cuda, plan(), kernel_named(name), dtype)
    assert "_put" in cuda.launches

"""What reaches a kernel can be loaded 16 bytes at a time, whatever the heads, strategy and pass."""

from __future__ import annotations

import pytest
import torch
from conformance.oracle import assert_close, dense, draw
from conformance.table import MASK_AWARE, plans
from torch import Tensor

import tilewise as tw
from tilewise import Plan, Role, Side
from tilewise.kernels.protocol import Accumulators, Gradients, no_gradients, no_keys
from tilewise.kernels.reference import Reference
from tilewise.kernels.triton.views import in_steps, view_of
from tilewise.plan.payload import Payload

N, NUM_TOKENS, HEAD_DIM = 4, 23, 8
MASK, LAYOUT = tw.Causal(), tw.zigzag(NUM_TOKENS, N)


class Recorder(Reference):
    """Computes nothing; keeps what it was given that is not aligned."""

    def __init__(self) -> None:
        self.calls, self.misaligned, self.steps = [0, 0], [], set()

    def supports(self, *asked: object, **needs: object) -> str | None:
        return None

    def forward(self, q, k, v, call, scale, into=None, scores=None) -> Accumulators:
        self._record(0, q=q, k=k, v=v)
        return into or no_keys(q, v)

    def backward(self, q, k, v, dout, lse, delta, call, scale, into=None, scores=None) -> Gradients:
        self._record(1, q=q, k=k, v=v, dout=dout)
        return into or no_gradients(q, k, v)

    def _record(self, backward: int, **tensors: Tensor) -> None:
        self.calls[backward] += 1
        self.steps.add(in_steps([view_of(x) for x in tensors.values()])[1])
        for name, x in tensors.items():
            places = [x.data_ptr(), *(stride * x.itemsize for stride in x.stride()[:-1])]
            if x.stride(-1) != 1 or any(at % 16 for at in places):
                self.misaligned.append((name, backward, x.shape, x.stride(), x.data_ptr() % 16))


def recorded(plan: Plan, layout: tw.Layout, heads: int, save: str, given=lambda x: x) -> Recorder:
    kernel = Recorder()
    num_heads, num_kv_heads = (h * plan.num_head_groups for h in (heads, max(1, heads // 2)))
    num_kv_heads = num_kv_heads if heads % 2 == 0 else num_heads

    def on_rank(rank: int, group) -> None:
        rows = layout.size(rank)
        q, k, v = (
            given(torch.ones(2, rows, h, HEAD_DIM, dtype=torch.bfloat16)).requires_grad_()
            for h in (num_heads, num_kv_heads, num_kv_heads)
        )
        rules = {"plan": plan, "layout": layout, "mask": MASK, "save": save, "group": group}
        out = tw.attention(q, k, v, kernel=kernel, **rules)
        torch.autograd.grad(out, (q, k, v), given(torch.ones_like(out)))

    tw.loopback(plan.world_size, on_rank)
    assert all(kernel.calls)
    return kernel


@pytest.mark.parametrize("save", ["replay", "gathered"])
@pytest.mark.parametrize(
    "heads", [3, *(pytest.param(h, marks=pytest.mark.slow) for h in (1, 2, *range(4, 9)))]
)
def test_every_strategy_hands_aligned_rows_to_kernels(heads: int, save: str):
    made = list(plans(N, "tree"))
    made += [make(MASK, LAYOUT) for _, make in MASK_AWARE]
    for plan in made[::3] if heads == 3 else made:
        found = recorded(plan, LAYOUT, heads, save)
        assert not found.misaligned and found.steps == {8}, plan.name


def off_by_one(x: Tensor) -> Tensor:
    """The same numbers one number behind a multiple of 16 bytes."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def wide_rows(x: Tensor) -> Tensor:
    """Rows of a tensor whose own rows are no multiple of 16 bytes."""
    return torch.cat([x.flatten(2), x.new_zeros(*x.shape[:2], 3)], -1)[..., :-3].unflatten(
        2, x.shape[2:]
    )


@pytest.mark.parametrize("given", [off_by_one, wide_rows])
def test_a_misaligned_tensor_of_the_caller_is_copied(given):
    for plan in (tw.ring(2), tw.ulysses(2)):
        layout = tw.zigzag(NUM_TOKENS, 2)
        assert not recorded(plan, layout, 3, "replay", given).misaligned


@pytest.mark.parametrize("heads", [1, 3])
def test_padded_rows_give_the_same_gradients(heads: int):
    x = draw((NUM_TOKENS, heads, 4), (NUM_TOKENS, heads, 4), seed=heads)
    x = type(x)(*(t.float() for t in x))
    want = dense(type(x)(*(t.double() for t in x)), MASK)
    for plan, save in ((tw.ring(N, moves="q"), "replay"), (tw.mesh(N, q_tile=2), "gathered")):

        def on_rank(rank: int, group, plan=plan, save=save) -> tuple[Tensor, ...]:
            q, k, v, dout, dlse = (LAYOUT.shard(t, rank) for t in (*x[:4], x.dlse))
            operands = [t.requires_grad_() for t in (q, k, v)]
            rules = {"plan": plan, "layout": LAYOUT, "mask": MASK, "save": save, "group": group}
            out, lse = tw.attention(*operands, return_lse=True, **rules)
            grads = torch.autograd.grad([out, lse], operands, [dout, dlse])
            return out.detach().double(), lse.detach().double(), *(g.double() for g in grads)

        ranks = zip(*tw.loopback(N, on_rank), strict=True)
        found = type(want)(*(LAYOUT.unshard(tensors) for tensors in ranks))
        assert_close(found, want, 2e-6)


@pytest.mark.parametrize(
    ("heads", "dtype", "widths", "num_bytes"),
    [
        (1, "bfloat16", (128, 128), 512 + 16),
        (2, "bfloat16", (128, 128), 2 * 520),
        (5, "bfloat16", (192, 128), 5 * (640 + 8) + 8),
        (3, "float32", (4, 4), 3 * 40 + 8),
        (3, "float64", (2, 2), 3 * 48),
        (3, "bfloat16", (5, 5), 3 * 28),
    ],
)
def test_padding_of_a_row_is_counted(heads, dtype, widths, num_bytes):
    payload = Payload(True, heads, heads, *widths, dtype, tw.wire.Wires().resolved(dtype))
    row = payload.row_format(Side.Q, Role.OPERAND)
    assert row.num_bytes == num_bytes == payload.row_bytes(tw.operand(Side.Q, 0))
    work = tw.Workload(
        num_tokens=8, num_heads=heads, num_kv_heads=heads, head_dim=widths[0],
        v_head_dim=widths[1], dtype=dtype,
    )  # fmt: skip
    dq = heads * widths[0] * {"bfloat16": 2, "float32": 4, "float64": 8}[dtype]
    assert tw.volume(tw.ring(2, moves="q"), work).backward[0] == 4 * (num_bytes + dq)


def test_values_of_an_odd_width_leave_keys_aligned():
    row = Payload(False, 3, 3, 8, 5, "bfloat16", tw.wire.Wires()).row_format(Side.KV, Role.OPERAND)
    assert row.starts == (0, 48) and row.num_bytes == 80

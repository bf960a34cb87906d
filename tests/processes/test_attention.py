"""tw.attention between real gloo processes: exact, and never a hang when one rank is wrong."""

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conformance.oracle import Result, dense, draw, error

import tilewise as tw
from processes.launcher import TIMEOUT_SECONDS, run_processes
from tilewise.expressions import read_mask, read_plan
from tilewise.transport import process_group
from tilewise.transport.resolve import transport_for

LAYOUTS = {"contiguous": tw.contiguous, "zigzag": tw.zigzag, "striped": tw.striped}
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def run_attention(rank: int, strategy: str, layout_name: str, mask_text: str, num_tokens: int):
    """Errors of this rank's out, lse, dq, dk, dv, and the bytes that it sent."""
    plan, mask = read_plan(strategy), read_mask(mask_text)
    layout = LAYOUTS[layout_name](num_tokens, plan.world_size)
    num_queries = 2 if plan.replicated_queries else num_tokens
    shapes = (num_queries, HEADS, HEAD_DIM), (num_tokens, KV_HEADS, HEAD_DIM)
    x = draw(*shapes, seed=0)
    positions = torch.arange(num_tokens - num_queries, num_tokens)
    want = dense(x, mask, positions)
    group = transport_for(None)

    def own(tensor: torch.Tensor) -> torch.Tensor:
        whole = plan.replicated_queries and len(tensor) == num_queries
        return tensor if whole else layout.shard(tensor, rank)

    q, k, v = (own(t).clone().requires_grad_() for t in x[:3])
    out, lse = tw.attention(
        q, k, v, plan=plan, layout=layout, mask=mask, group=group, return_lse=True
    )
    reached = lse != -torch.inf
    ((out * own(x.dout)).sum() + (lse * own(x.dlse))[reached].sum()).backward()
    got = Result(out.detach(), lse.detach(), q.grad, k.grad, v.grad)
    errors = [error(a, own(b)) for a, b in zip(got[:5], want[:5], strict=True)]
    return max(errors), group.bytes_sent


@pytest.mark.parametrize(
    "strategy, layout, mask, num_tokens",
    [
        ("ring(3)", "zigzag", "causal", 37),
        ("ring(2, moves='q')", "striped", "causal & document([0, 3, 3, 20, 29])", 29),
        ("mesh(4, q_tile=2)", "zigzag", "causal & document([0, 1, 18, 41])", 41),
        ("mesh(4, q_tile=2, schedule='gather')", "contiguous", "window(5, 2)", 26),
        ("balanced_ring(3)", "contiguous", "causal", 31),
        ("ulysses(4)", "zigzag", "causal", 23),
        ("ulysses(2, inner=ring(2))", "contiguous", "full", 19),
        ("attention2d(2, 2)", "striped", "causal", 33),
        ("all_gather(4)", "zigzag", "full", 3),
        ("tree(3)", "contiguous", "causal", 20),
    ],
)
def test_every_way_is_exact_between_processes(
    strategy: str, layout: str, mask: str, num_tokens: int
):
    plan = read_plan(strategy)
    ranks = run_processes(plan.world_size, run_attention, strategy, layout, mask, num_tokens)
    assert max(worst for worst, _ in ranks) <= 1e-12
    if not plan.replicated_queries:
        assert [sent for _, sent in ranks] == formula(plan, layout, mask, num_tokens)


def formula(plan: tw.Plan, layout: str, mask: str, num_tokens: int) -> list[int]:
    """Bytes that each rank sends in both passes, as `volume` has them."""
    work = tw.Workload(
        num_tokens, HEADS, KV_HEADS, HEAD_DIM, "float64", mask=read_mask(mask), layout=layout
    )
    return [sum(passes) for passes in zip(*tw.volume(plan, work), strict=True)]


def run_pairwise(rank: int, *args: Any) -> tuple[float, int]:
    limits = {"MARKED_BYTES": 0, "MARKED_BYTES_ON_A_HOST": 0}
    with mock.patch.multiple(process_group, **limits):
        return run_attention(rank, *args)


@pytest.mark.parametrize(
    "strategy, layout, mask, num_tokens",
    [
        ("ulysses(4)", "zigzag", "causal", 23),
        ("ulysses(4)", "contiguous", "full", 3),
        ("ulysses(2, inner=ring(2))", "striped", "causal", 19),
        ("all_gather(4)", "zigzag", "causal & document([0, 1, 18, 41])", 41),
    ],
)
def test_pairwise_exchanges_are_exact(strategy: str, layout: str, mask: str, num_tokens: int):
    plan = read_plan(strategy)
    ranks = run_processes(plan.world_size, run_pairwise, strategy, layout, mask, num_tokens)
    assert max(worst for worst, _ in ranks) <= 1e-12
    assert [sent for _, sent in ranks] == formula(plan, layout, mask, num_tokens)


def call_wrongly(rank: int, what: str, wrong_rank: int) -> tuple[str, float, int]:
    """The error of a call that only one rank makes wrongly, the seconds it took, bytes sent."""
    n, num_tokens = dist.get_world_size(), 12
    is_wrong = rank == wrong_rank
    layout = tw.contiguous(num_tokens, n)
    size = layout.size(rank) + (is_wrong and what == "rows")
    dtype = torch.float32 if is_wrong and what == "dtype" else torch.float64
    q, k = (torch.zeros(size, heads, HEAD_DIM, dtype=dtype) for heads in (HEADS, KV_HEADS))
    plan = tw.all_gather(n) if is_wrong and what == "plan" else tw.ring(n)
    mask = tw.Document([0, 5 + (is_wrong and what == "mask"), num_tokens])
    group = transport_for(None)
    start = time.perf_counter()
    with pytest.raises(ValueError) as caught:
        tw.attention(q, k, k, plan=plan, layout=layout, mask=mask, group=group)
    seconds = time.perf_counter() - start
    # The group still serves: nothing was left behind.
    good = torch.zeros(layout.size(rank), HEADS, HEAD_DIM)
    tw.attention(good, good, good, plan=tw.ring(n), layout=layout, mask=tw.Causal())
    return str(caught.value), seconds, group.bytes_sent


@pytest.mark.parametrize(
    "what, parts",
    [
        ("rows", ["rank 2: q has 5 tokens on rank 2", "gives it 4 of 12"]),
        ("dtype", ["disagree on dtype: rank 0 has float64, rank 2 has float32"]),
        ("plan", ["disagree on plan", "rank 0", "rank 2"]),
        ("mask", ["disagree on mask", "(0, 5, 12)", "(0, 6, 12)"]),
    ],
)
def test_one_wrong_rank_is_the_same_error_on_all_at_once(what: str, parts: list[str]):
    outcomes: list[tuple[str, float, Any]] = run_processes(3, call_wrongly, what, 2)
    messages = [message for message, _, _ in outcomes]
    assert len(set(messages)) == 1
    assert all(part in messages[0] for part in parts), messages[0]
    assert max(seconds for _, seconds, _ in outcomes) < TIMEOUT_SECONDS / 4  # nobody waited for it
    assert [sent for _, _, sent in outcomes] == [0, 0, 0]


def count_messages(rank: int, strategy: str) -> list[int]:
    plan, group = read_plan(strategy), transport_for(None)
    layout = tw.contiguous(64, plan.world_size)
    q, k, v = torch.randn(3, layout.size(rank), HEADS, HEAD_DIM).requires_grad_()
    out = tw.attention(q, k, v, plan=plan, layout=layout, mask=tw.Full(), group=group)
    sent = [group.messages_sent]
    out.sum().backward()
    return [*sent, group.messages_sent]


@pytest.mark.parametrize(
    "strategy, forward, both",
    [
        # two exchanges a pass, one message to each of the others
        ("ulysses(4)", 6, 12),
        # one exchange in forward; in backward keys again, then their gradients
        ("all_gather(4)", 3, 9),
        # both shards that go round in one message: forward 1 transfer, backward 2 and the partials
        ("ulysses(2, inner=ring(2))", 3, 7),
    ],
)
def test_all_that_goes_to_a_rank_at_once_is_one_message(strategy: str, forward: int, both: int):
    assert run_processes(4, count_messages, strategy) == [[forward, both]] * 4

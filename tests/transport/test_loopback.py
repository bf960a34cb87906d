"""loopback: ranks as threads of one process that run one at a time."""

import contextvars

import pytest
import torch

from tilewise.transport.loopback import LoopbackGroup, loopback
from tilewise.transport.protocol import Message
from tilewise.transport.resolve import transport_for


def filled(num_bytes: int, value: int) -> torch.Tensor:
    return torch.full((num_bytes,), value, dtype=torch.uint8)


def swap(group: LoopbackGroup, tensor: torch.Tensor, label: str) -> torch.Tensor:
    """Send to the next rank, return what the one before sends."""
    n = group.world_size
    got = torch.empty_like(tensor)
    group.exchange(
        [Message(tensor, (group.rank + 1) % n, label)],
        [Message(got, (group.rank - 1) % n, label)],
    ).wait()
    return got


def test_a_ring_of_many_ranks_delivers_and_counts():
    def body(rank: int, group: LoopbackGroup) -> tuple[int, int, int]:
        here = filled(3, rank)
        for step in range(5):
            here = swap(group, here, f"step {step}")
        group.finish()
        return int(here[0]), group.bytes_sent, group.messages_sent

    assert loopback(64, body) == [((rank - 5) % 64, 15, 5) for rank in range(64)]


def test_one_rank_needs_no_peers():
    assert loopback(1, lambda rank, group: (rank, group.rank, group.world_size)) == [(0, 0, 1)]


def test_no_ranks_is_an_error():
    with pytest.raises(ValueError, match=r"n \(0\) must be at least 1"):
        loopback(0, lambda rank, group: None)


def test_messages_match_in_launch_order_whatever_the_order_of_waits():
    def body(rank: int, group: LoopbackGroup) -> list[int]:
        arriving = [filled(2, 0) for _ in range(5)]
        handles = [
            group.exchange(
                [Message(filled(2, 10 * rank + step), 1 - rank, f"step {step}")],
                [Message(arriving[step], 1 - rank, f"step {step}")],
            )
            for step in range(5)
        ]
        for handle in reversed(handles):
            handle.wait()
            handle.wait()
        return [int(tensor[0]) for tensor in arriving]

    assert loopback(2, body) == [list(range(10, 15)), list(range(5))]


def test_receives_may_be_posted_ahead_and_sends_go_unwaited():
    def body(rank: int, group: LoopbackGroup) -> int:
        got = filled(4, 0)
        ahead = group.exchange([], [Message(got, 1 - rank, "step 1")])
        group.exchange([Message(filled(4, 7 + rank), 1 - rank, "step 1")], [])
        ahead.wait()
        group.finish()
        return int(got[0])

    assert loopback(2, body) == [8, 7]


def test_finish_waits_until_the_peer_has_taken_the_bytes():
    def body(rank: int, group: LoopbackGroup) -> int:
        tensor = filled(4, 5)
        if rank == 0:
            group.exchange([Message(tensor, 1, "step 0")], [])
            group.finish()
            tensor.fill_(0)
            return 0
        group.exchange([], [Message(tensor.zero_(), 0, "step 0")]).wait()
        return int(tensor[0])

    assert loopback(2, body) == [0, 5]


def test_lanes_match_apart():
    def body(rank: int, group: LoopbackGroup) -> int:
        slow, fast = filled(1, 0), filled(1, 0)
        if rank == 0:
            group.exchange([Message(filled(1, 1), 1, "slow")], [], lane=0)
            group.exchange([Message(filled(1, 2), 1, "fast")], [], lane=1)
        else:
            group.exchange([], [Message(fast, 0, "fast")], lane=1).wait()
            group.exchange([], [Message(slow, 0, "slow")], lane=0).wait()
        return int(10 * slow[0] + fast[0])

    assert loopback(2, body) == [0, 12]


def test_uneven_all_to_all_skips_empty_messages():
    def body(rank: int, group: LoopbackGroup) -> tuple[int, int]:
        others = [peer for peer in range(5) if peer != rank]
        sends = [Message(filled(rank * peer, rank), peer, "step 0") for peer in others]
        recvs = [Message(filled(rank * peer, 99), peer, "step 0") for peer in others]
        group.exchange(sends, recvs).wait()
        assert all((message.tensor == message.peer).all() for message in recvs)
        return group.bytes_sent, group.messages_sent

    assert loopback(5, body) == [
        (sum(rank * peer for peer in range(5) if peer != rank), 3 if rank else 0)
        for rank in range(5)
    ]


def test_shapes_may_differ_if_bytes_agree():
    def body(rank: int, group: LoopbackGroup) -> list[int]:
        got = torch.empty(6, dtype=torch.uint8)
        sent = torch.arange(6, dtype=torch.uint8).view(2, 3)
        group.exchange([Message(sent, 1 - rank, "s")], [Message(got, 1 - rank, "s")]).wait()
        return got.tolist()

    assert loopback(2, body) == [list(range(6))] * 2


def test_sizes_that_differ_are_an_error_with_both_sizes():
    def body(rank: int, group: LoopbackGroup) -> None:
        group.exchange(
            [Message(filled(100 + rank, 0), 1 - rank, "step 2, kv1")],
            [Message(filled(100 + rank, 0), 1 - rank, "step 2, kv1")],
        ).wait()

    expected = r"rank 0 sends 100 bytes \(step 2, kv1\), but rank 1 expects 101 \(step 2, kv1\)"
    with pytest.raises(RuntimeError, match=expected):
        loopback(2, body)


@pytest.mark.parametrize(
    ("peer", "tensor", "text"),
    [
        (0, filled(1, 0), r"peer \(0\) must be another rank of the group \(this is rank 0 of 2\)"),
        (2, filled(1, 0), r"peer \(2\) must be another rank"),
        (1, torch.zeros(3), "contiguous uint8, not torch.float32"),
        (1, filled(8, 0)[::2], r"with strides \(2,\)"),
    ],
)
def test_wrong_messages_are_refused(peer: int, tensor: torch.Tensor, text: str):
    def body(rank: int, group: LoopbackGroup) -> None:
        if rank == 0:
            group.exchange([Message(tensor, peer, "step 0, kv0")], [])

    with pytest.raises(ValueError, match=text):
        loopback(2, body)


@pytest.mark.parametrize("enabled", [True, False])
def test_grad_mode_is_the_callers(enabled: bool):
    with torch.set_grad_enabled(enabled):
        assert loopback(3, lambda rank, group: torch.is_grad_enabled()) == [enabled] * 3


def test_context_variables_are_the_callers():
    variable = contextvars.ContextVar("variable", default=0)
    token = variable.set(4)
    assert loopback(2, lambda rank, group: variable.get()) == [4, 4]
    variable.reset(token)


class Shift(torch.autograd.Function):
    """Send to the next rank; the gradient goes back to the one before."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: LoopbackGroup) -> torch.Tensor:
        ctx.group = group
        return swap(group, x.detach().clone().view(torch.uint8), "forward").view(x.dtype)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[override]
        group, n = ctx.group, ctx.group.world_size
        got = torch.empty_like(grad)
        group.exchange(
            [Message(grad.contiguous().view(torch.uint8), (group.rank - 1) % n, "backward")],
            [Message(got.view(torch.uint8), (group.rank + 1) % n, "backward")],
        ).wait()
        return got, None


def test_backward_passes_exchange_messages():
    def body(rank: int, group: LoopbackGroup) -> tuple[float, float]:
        x = torch.full((3,), float(rank), requires_grad=True)
        y = Shift.apply(x, group)
        (y.sum() * (rank + 1)).backward()
        return float(y[0].detach()), float(x.grad[0])

    n = 6
    assert loopback(n, body) == [((r - 1) % n, (r + 1) % n + 1) for r in range(n)]


def test_an_error_within_a_backward_pass_releases_the_others():
    def body(rank: int, group: LoopbackGroup) -> None:
        x = torch.ones(3, requires_grad=True)
        y = Shift.apply(x, group)
        if rank == 2:
            raise ArithmeticError("no backward here")
        y.sum().backward()

    with pytest.raises(ArithmeticError, match="no backward here"):
        loopback(4, body)


def test_a_rank_may_run_a_loopback_of_its_own():
    def inner(rank: int, group: LoopbackGroup) -> int:
        return int(swap(group, filled(1, rank), "inner")[0])

    def outer(rank: int, group: LoopbackGroup) -> list[int]:
        swap(group, filled(1, rank), "outer")
        return loopback(2, inner)

    assert loopback(2, outer) == [[1, 0], [1, 0]]


def test_the_group_is_its_own_transport():
    assert loopback(2, lambda rank, group: transport_for(group) is group) == [True, True]


def test_a_group_of_another_rank_is_refused():
    groups: dict[str, LoopbackGroup] = {}

    def use_the_first(rank: int, group: LoopbackGroup) -> None:
        groups.setdefault("of all", group).gather_records(torch.zeros(1, dtype=torch.uint8))

    with pytest.raises(RuntimeError, match="the group of rank 0 is used outside of its rank"):
        loopback(3, use_the_first)

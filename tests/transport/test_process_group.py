"""Choosing a transport, the world of one, and NCCL's batches."""

from itertools import product

import pytest
import torch
from cuda_model.played_cuda import play
from cuda_model.played_nccl import PlayedGroup
from cuda_model.race_cases import over_nccl
from hypothesis import given
from hypothesis import strategies as st

from tilewise.transport import nccl_batches as batching
from tilewise.transport.loopback import LoopbackGroup, loopback
from tilewise.transport.nccl_batches import nccl_batches
from tilewise.transport.protocol import Message, Transport
from tilewise.transport.resolve import LocalTransport, transport_for


def test_without_a_world_the_default_group_is_one_rank():
    transport = transport_for(None)
    assert isinstance(transport, LocalTransport)
    assert isinstance(transport, Transport)
    assert (transport.rank, transport.world_size) == (0, 1)
    transport.exchange([], []).wait()
    transport.finish()
    record = torch.ones(3, dtype=torch.uint8)
    assert [one.tolist() for one in transport.gather_records(record)] == [[1, 1, 1]]


def test_a_world_of_one_has_no_peers():
    with pytest.raises(ValueError, match=r"peer \(0\) must be another rank of the group"):
        LocalTransport().exchange([Message(torch.ones(1, dtype=torch.uint8), 0, "step 0")], [])


def test_something_that_is_no_group_is_refused():
    with pytest.raises(ValueError, match=r"group \(int\) must be None, a ProcessGroup"):
        transport_for(3)


@given(n=st.integers(2, 200), data=st.data())
def test_both_ends_put_a_message_into_the_same_batch(n: int, data: st.DataObject):
    pairs = data.draw(
        st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=300)
    )
    message = torch.ones(1, dtype=torch.uint8)
    sends: dict[int, list[Message]] = {rank: [] for rank in range(n)}
    recvs: dict[int, list[Message]] = {rank: [] for rank in range(n)}
    for i, (src, dst) in enumerate(pairs):
        if src != dst:
            sends[src].append(Message(message, dst, str(i)))
            recvs[dst].append(Message(message, src, str(i)))
    batches = {rank: nccl_batches(sends[rank], recvs[rank], rank, n) for rank in range(n)}
    assert all(len(batch) <= 256 for rank in range(n) for batch in batches[rank])
    assert finishes(batches)


def finishes(batches: dict[int, list[list[tuple[bool, Message]]]]) -> bool:
    """Run every rank's batches in order: one ends when the other end of each message has begun."""
    position = dict.fromkeys(batches, 0)
    while True:
        begun = {
            (is_send, message.label)
            for rank, queue in batches.items()
            for batch in queue[: position[rank] + 1]
            for is_send, message in batch
        }
        moved = False
        for rank, queue in batches.items():
            if position[rank] < len(queue) and all(
                (not is_send, message.label) in begun for is_send, message in queue[position[rank]]
            ):
                position[rank] += 1
                moved = True
        if not moved:
            return all(position[rank] == len(queue) for rank, queue in batches.items())


def test_a_full_exchange_of_many_ranks_splits_into_batches_that_nccl_takes():
    n = 300
    message = torch.ones(1, dtype=torch.uint8)
    peers = [Message(message, peer, "step 0") for peer, _ in product(range(1, n), range(2))]
    batches = nccl_batches(peers, peers, 0, n)
    assert sum(map(len, batches)) == 4 * (n - 1)
    assert all(len(batch) <= 256 for batch in batches)


def test_batches_arrive_in_order_over_a_played_nccl(monkeypatch):
    """Two messages a pair, more than a batch holds."""
    device = play(monkeypatch)
    monkeypatch.setattr(batching, "_NCCL_PAIRS", 3)
    transport = over_nccl(monkeypatch, device, None, blocking=False)

    def on_rank(rank: int, group: LoopbackGroup) -> list[int]:
        end = transport(rank, group)
        others = [peer for peer in range(5) if peer != rank] * 2
        sent = [torch.tensor([10 * rank + i], dtype=torch.uint8) for i in range(8)]
        sends = [Message(x, peer, "step 0") for x, peer in zip(sent, others, strict=True)]
        recvs = [Message(torch.zeros_like(sent[0]), peer, "step 0") for peer in others]
        end.exchange(sends, recvs).wait()
        end.finish()
        return [int(message.tensor) for message in recvs]

    ranks = range(5)
    place = {src: [dst for dst in ranks if dst != src] for src in ranks}
    assert loopback(5, on_rank) == [
        [10 * src + place[src].index(dst) + 4 * i for i in range(2) for src in ranks if src != dst]
        for dst in ranks
    ]


def test_a_backend_that_cannot_start_a_batch_is_refused(monkeypatch):
    device = play(monkeypatch)
    transport = over_nccl(monkeypatch, device, None, blocking=False)
    monkeypatch.setattr(PlayedGroup, "supports_coalescing", False)

    def on_rank(rank: int, group: LoopbackGroup) -> None:
        message = Message(torch.ones(1, dtype=torch.uint8), 1 - rank, "step 0")
        transport(rank, group).exchange([message], [])

    with pytest.raises(ValueError, match="leave out TORCH_DISTRIBUTED_DEBUG=DETAIL"):
        loopback(2, on_rank)

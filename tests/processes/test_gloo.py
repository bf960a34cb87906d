"""DistTransport between real gloo processes."""

import json
import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from processes.launcher import TIMEOUT_SECONDS, run_processes
from tilewise.transport.agreement import agree
from tilewise.transport.process_group import DistTransport
from tilewise.transport.protocol import Handle, Message, TeamMessages
from tilewise.transport.resolve import transport_for


def filled(num_bytes: int, value: int) -> torch.Tensor:
    return torch.full((num_bytes,), value, dtype=torch.uint8)


def send_round_a_ring(rank: int, num_steps: int, num_bytes: int) -> dict[str, int]:
    transport = transport_for(None)
    n = transport.world_size
    here = filled(num_bytes, rank)
    for step in range(num_steps):
        arriving = torch.empty_like(here)
        label = f"step {step}, kv"
        transport.exchange(
            [Message(here, (rank + 1) % n, label)], [Message(arriving, (rank - 1) % n, label)]
        ).wait()
        here = arriving
    transport.finish()
    assert (here == (rank - num_steps) % n).all()
    return {"bytes": transport.bytes_sent, "messages": transport.messages_sent}


def test_ring_delivers_and_counts_what_it_sends():
    counts = run_processes(3, send_round_a_ring, 7, 100_000)
    assert counts == [{"bytes": 700_000, "messages": 7}] * 3


def wait_in_reverse(rank: int) -> list[int]:
    transport = transport_for(None)
    peer = 1 - rank
    arriving = [filled(50_000, 0) for _ in range(6)]
    # The first receives are posted a launch ahead of their sends.
    handles = [transport.exchange([], [Message(arriving[0], peer, "step 0, kv0")])]
    for step in range(6):
        recvs = [Message(arriving[step + 1], peer, f"step {step + 1}")] if step < 5 else []
        sends = [Message(filled(50_000, 10 * rank + step), peer, f"step {step}")]
        handles.append(transport.exchange(sends, recvs))
    for handle in reversed(handles):
        handle.wait()
        handle.wait()
    transport.finish()
    transport.finish()
    return [int(tensor[-1]) for tensor in arriving]


def test_messages_match_in_launch_order_whatever_the_order_of_waits():
    assert run_processes(2, wait_in_reverse) == [list(range(10, 16)), list(range(6))]


def exchange_unevenly(rank: int) -> int:
    transport = transport_for(None)
    n = transport.world_size
    others = [peer for peer in range(n) if peer != rank]
    # From 0 to 2 bytes x 1000, empty ones among them.
    sends = [Message(filled(1000 * (rank * peer % 3), rank), peer, "step 0") for peer in others]
    recvs = [Message(filled(1000 * (rank * peer % 3), 99), peer, "step 0") for peer in others]
    transport.exchange(sends, recvs).wait()
    transport.finish()
    assert all((message.tensor == message.peer).all() for message in recvs)
    return transport.bytes_sent


def test_uneven_all_to_all_skips_empty_messages():
    assert run_processes(3, exchange_unevenly) == [0, 2000, 2000]


def exchange_within_a_team(rank: int, most_bytes: int) -> list[int]:
    """Two exchanges under way, waited for in another order on odd ranks, a message in between."""
    transport, started, arrived = transport_for(None), [], []
    n = transport.world_size
    for turn in range(2):
        sizes = [[30_000 * abs(src - 2 * dst + turn) for dst in range(n)] for src in range(n)]
        coming = [row[rank] for row in sizes]
        leaving = torch.cat([filled(size, 10 * rank + dst) for dst, size in enumerate(sizes[rank])])
        arriving = torch.empty(sum(coming), dtype=torch.uint8)
        both = tuple(sizes[rank]), tuple(coming)
        label = f"exchange {turn}"
        messages = TeamMessages(leaving, arriving, both, range(n), label, most_bytes)
        handle = transport.exchange_all(messages)
        expected = torch.cat([filled(size, 10 * src + rank) for src, size in enumerate(coming)])
        started.append((handle, arriving, expected))
        here = torch.empty(40_000, dtype=torch.uint8)
        transport.exchange(
            [Message(filled(40_000, rank), (rank + 1) % n, label)],
            [Message(here, (rank - 1) % n, label)],
        ).wait()
        assert (here == (rank - 1) % n).all()
    for handle, arriving, expected in started[:: -1 if rank % 2 else 1]:
        handle.wait()
        handle.wait()
        arrived.append(torch.equal(arriving, expected))
    transport.finish()
    assert arrived == [True, True]
    return [transport.bytes_sent, transport.messages_sent]


def test_exchanges_of_a_team_arrive_whole_as_a_collective_or_in_rounds():
    """Also as a collective of more bytes, for which the ranks ask whether they share a host."""
    few, on_a_host, many = (
        run_processes(4, exchange_within_a_team, most) for most in (1, 2**18, 2**20)
    )
    assert few == on_a_host == many


def exchange_with_ranks_that_do_not_wait(rank: int) -> bool:
    transport = transport_for(None)
    n = transport.world_size
    sizes = [[400_000 if dst < src else 200_000 for dst in range(n)] for src in range(n)]
    coming = tuple(row[rank] for row in sizes)
    leaving = torch.cat([filled(size, 10 * rank + dst) for dst, size in enumerate(sizes[rank])])
    arriving = torch.empty(sum(coming), dtype=torch.uint8)
    both = tuple(sizes[rank]), coming
    messages = TeamMessages(leaving, arriving, both, range(n), "all", 400_000)
    handle = transport.exchange_all(messages)
    for waits_first in (True, False):
        if waits_first == (rank == 0):
            handle.wait()
        dist.barrier()
    transport.finish()
    expected = torch.cat([filled(size, 10 * src + rank) for src, size in enumerate(coming)])
    return torch.equal(arriving, expected)


def test_an_uneven_exchange_of_a_team_is_sent_at_once():
    assert run_processes(4, exchange_with_ranks_that_do_not_wait) == [True] * 4


def overtake_on_another_lane(rank: int) -> int:
    transport = transport_for(None)
    slow, fast = filled(8, 0), filled(8, 0)
    if rank == 0:
        transport.exchange([Message(filled(8, 1), 1, "slow")], [], lane=0)
        transport.exchange([Message(filled(8, 2), 1, "fast")], [], lane=1)
    else:
        transport.exchange([], [Message(fast, 0, "fast")], lane=1).wait()
        transport.exchange([], [Message(slow, 0, "slow")], lane=0).wait()
    transport.finish()
    return int(10 * slow[0] + fast[0])


def test_lanes_match_apart():
    assert run_processes(2, overtake_on_another_lane) == [0, 12]


def talk_in_a_subgroup(rank: int) -> str | None:
    group = dist.new_group([2, 0])
    if rank == 1:
        with pytest.raises(ValueError, match="must be None, a ProcessGroup that this process"):
            transport_for(group)
        return None
    transport = transport_for(group)
    assert isinstance(group, dist.ProcessGroup) and isinstance(transport, DistTransport)
    got = filled(1, 0)
    peer = 1 - transport.rank
    transport.exchange(
        [Message(filled(1, rank), peer, "step 0")], [Message(got, peer, "step 0")]
    ).wait()
    transport.finish()
    records = transport.gather_records(filled(4, rank))
    assert [int(x[0]) for x in transport.gather_records(filled(4, rank + 3))] == [3, 5]
    return f"{int(got[0])} {[int(record[0]) for record in records]}"


def test_peers_are_ranks_of_the_group_not_of_the_world():
    # torch sorts a group's ranks: group rank 1 is global rank 2.
    assert run_processes(3, talk_in_a_subgroup) == ["2 [0, 2]", None, "0 [0, 2]"]


def disagree(rank: int) -> tuple[str, float, int]:
    transport = transport_for(None)
    agree(transport, {"plan": "ring(3)", "num_tokens": "100"})
    start = time.perf_counter()
    with pytest.raises(ValueError) as caught:
        agree(transport, {"plan": "ring(3)", "num_tokens": "200" if rank == 2 else "100"})
    return str(caught.value), time.perf_counter() - start, transport.bytes_sent


def test_disagreement_is_the_same_error_on_every_rank():
    outcomes = run_processes(3, disagree)
    expected = (
        "ranks disagree on num_tokens: rank 0 has 100, rank 2 has 200; "
        "pass the same value on every rank"
    )
    assert [text for text, _, _ in outcomes] == [expected] * 3
    assert max(seconds for _, seconds, _ in outcomes) < TIMEOUT_SECONDS / 4
    assert [num_bytes for _, _, num_bytes in outcomes] == [0] * 3


ODD_ONES = (None, 0, 3, 4)


def tell_records(rank: int) -> list[list[int]]:
    """The last byte of every rank's record, where none differs and where one does."""
    transport, told = transport_for(None), []
    for odd_one in ODD_ONES:
        records = transport.gather_records(filled(2048, 7 + (rank == odd_one)))
        again = transport.gather_records(filled(2048, rank))
        assert [int(record[0]) for record in again] == list(range(transport.world_size))
        assert all(record.unique().numel() == 1 for record in records)
        told.append([int(record[-1]) for record in records])
    return told


def test_every_rank_gets_all_records_whoever_differs():
    expected = [[7 + (rank == odd_one) for rank in range(5)] for odd_one in ODD_ONES]
    assert run_processes(5, tell_records) == [expected] * 5


def fail_alone(rank: int) -> str:
    with pytest.raises(ValueError) as caught:
        if rank == 1:
            agree(transport_for(None), None, "q has 7 tokens, layout gives this rank 8")
        else:
            agree(transport_for(None), {"num_tokens": "16"})
    return str(caught.value)


def test_a_rank_that_fails_alone_stops_all():
    expected = "rank 1: q has 7 tokens, layout gives this rank 8"
    assert run_processes(2, fail_alone) == [expected] * 2


def pass_wrong_messages(rank: int) -> int:
    transport = transport_for(None)
    peer = 1 - rank
    with pytest.raises(ValueError, match=r"peer \(\d\) must be another rank"):
        transport.exchange([Message(filled(1, 0), rank, "step 0, kv0")], [])
    with pytest.raises(ValueError, match=r"contiguous uint8, not torch\.float32"):
        transport.exchange([Message(torch.zeros(2), peer, "step 0, kv0")], [])
    with pytest.raises(ValueError, match="no backend for meta tensors"):
        elsewhere = torch.zeros(2, dtype=torch.uint8, device="meta")
        transport.exchange([Message(elsewhere, peer, "step 0, kv0")], [])
    transport.finish()
    return transport.messages_sent


def test_wrong_messages_are_refused_before_anything_is_posted():
    assert run_processes(2, pass_wrong_messages) == [0, 0]


def lose_a_peer(rank: int, file: str) -> None:
    if rank == 1:
        raise KeyError("this rank ends")
    transport, told = transport_for(None), []
    for step in (3, 4):  # the second one is refused when it is posted, and the first may be
        with pytest.raises(RuntimeError) as caught:
            transport.exchange([], [Message(filled(8, 0), 1, f"step {step}, kv2")]).wait()
        told.append(str(caught.value))
    Path(file).write_text(json.dumps(told))


def test_a_lost_peer_names_the_message(tmp_path: Path):
    file = tmp_path / "rank 0"
    with pytest.raises(AssertionError, match="this rank ends"):
        run_processes(2, lose_a_peer, str(file))
    first, second = json.loads(file.read_text())
    assert first.startswith("step 3, kv2: receiving from rank 1 failed: ")
    assert second.startswith("step 4, kv2: receiving from rank 1 failed: ")


def follow_a_random_schedule(rank: int, seed: int) -> int:
    """Exchange as drawn; wait for arrivals a few steps late; return how many bytes came."""
    draw = random.Random(seed)
    transport = transport_for(None)
    n = transport.world_size
    pairs = [(src, dst) for src in range(n) for dst in range(n) if src != dst]
    late: list[tuple[int, Handle, list[Message]]] = []
    num_received = 0
    for step in range(60):
        for lane in range(2):
            chosen = [(pair, draw.randrange(40_000)) for pair in pairs if draw.random() < 0.4]
            sends = [Message(filled(size, src), dst, f"{step}") for (src, dst), size in chosen]
            recvs = [Message(filled(size, 99), src, f"{step}") for (src, dst), size in chosen]
            ours = [i for i, ((src, _), _) in enumerate(chosen) if src == rank]
            theirs = [i for i, ((_, dst), _) in enumerate(chosen) if dst == rank]
            due = step + draw.randrange(4)
            arriving = [recvs[i] for i in theirs]
            handle = transport.exchange([sends[i] for i in ours], arriving, lane)
            late.append((due, handle, arriving))
        for _, handle, arriving in [one for one in late if one[0] == step]:
            handle.wait()
            assert all((message.tensor == message.peer).all() for message in arriving)
            num_received += sum(message.tensor.numel() for message in arriving)
    transport.finish()
    return num_received


def test_random_schedules_over_two_lanes_arrive_whole():
    assert all(run_processes(3, follow_a_random_schedule, 1))


def outlive_a_rank(rank: int, folder: str) -> None:
    transport = transport_for(None)
    record = torch.zeros(8, dtype=torch.uint8)
    transport.gather_records(record)
    if rank == 2:
        raise KeyError("this rank ends")
    with pytest.raises(RuntimeError) as caught:
        transport.gather_records(record)
    (Path(folder) / str(rank)).write_text(str(caught.value))


def test_every_rank_learns_which_one_is_lost(tmp_path: Path):
    with pytest.raises(AssertionError, match="this rank ends"):
        run_processes(4, outlive_a_rank, str(tmp_path))
    for rank in (0, 1, 3):
        assert "rank 2 failed" in (tmp_path / str(rank)).read_text()

"""Lanes between nodes: who shares a node with whom, and programs that use it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.bound_passes import Case, on_ranks
from torch.distributed import HashStore

import tilewise as tw
from tilewise.compiler.ops import Post
from tilewise.execution.forward_backward import bound_code
from tilewise.transport import nccl_groups
from tilewise.transport.nccl_groups import lane_group
from tilewise.transport.nodes import local_world_size, node_size_of


@pytest.mark.parametrize(
    ("ranks", "local", "size"),
    [
        (range(16), 8, 8),
        (range(16), None, None),
        (range(8), 8, None),  # one node
        (range(8, 24), 8, 8),
        (range(0, 64, 8), 8, None),  # every rank on a node of its own
        (range(0, 32, 2), 8, 4),
        (range(4, 20), 8, None),  # 4, 8 and 4
        ([0, 1, 8, 9, 2, 3], 8, None),  # a node's ranks apart
        ([], 8, None),
    ],
)
def test_node_size_of_a_group(ranks, local, size):
    assert node_size_of(list(ranks), local) == size


@pytest.mark.parametrize(("text", "size"), [("8", 8), ("", None), ("0", None), ("many", None)])
def test_the_launcher_says_how_many_share_a_node(text, size, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    assert local_world_size() == size
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert local_world_size() is None


def test_messages_between_nodes_have_their_own_lane():
    plan, layout = tw.mesh(8, q_tile=4), tw.zigzag(64, 8)

    def body(case: Case) -> tuple[list[int], tuple[torch.Tensor, ...]]:
        plain = case.both_passes()
        case.transport.node_size = 4  # pyright: ignore[reportAttributeAccessIssue]
        rank = case.transport.rank
        code = bound_code(case.problem, case.transport, case.q[:, None], backward=True).code
        posts = [op for op in code.ops if isinstance(op, Post)]
        for post in posts:
            for message in (*post.sends, *post.recvs):
                assert post.lane == (rank // 4 != message.peer // 4)
        lanes = {post.lane for post in posts}
        got = case.both_passes()
        assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(got, plain, strict=True))
        return sorted(lanes), got

    assert {tuple(lanes) for lanes, _ in on_ranks(plan, layout, tw.Causal(), body)} == {(0, 1)}


def test_every_lane_is_a_communicator_of_our_own_at_high_priority_with_few_blocks(monkeypatch):
    made: list[Any] = []

    class Options(SimpleNamespace):
        def __init__(self, is_high_priority_stream: bool) -> None:
            super().__init__(is_high_priority_stream=is_high_priority_stream)
            self.config = SimpleNamespace(max_ctas=32)

    class Nccl(SimpleNamespace):
        def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
            super().__init__(store=store, rank=rank, size=size, options=options)

    Nccl.Options = Options  # pyright: ignore[reportAttributeAccessIssue]
    group: Any = SimpleNamespace(
        rank=lambda: 1,
        size=lambda: 4,
        group_name="mine",
        get_group_store=lambda: HashStore(),
        _get_backend=lambda _: SimpleNamespace(options=SimpleNamespace(_timeout=77)),
    )
    monkeypatch.setattr(nccl_groups.dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(nccl_groups.dist, "get_process_group_ranks", lambda _: [4, 5, 6, 7])
    monkeypatch.setattr(nccl_groups, "_companion", lambda *args: made.append(args) or args)
    monkeypatch.setattr(nccl_groups, "warm_up", lambda lane: made.append("warm"))
    lanes = [lane_group(group, lane) for lane in (0, 1)]
    assert made[1::2] == ["warm", "warm"]
    for number, (of, name, _, _, nccl) in enumerate(lanes):
        assert of is group and name == f"lane{number}" and (nccl.rank, nccl.size) == (1, 4)
        options = nccl.options
        assert options.is_high_priority_stream and 1 <= options.config.max_ctas <= 16
        assert options._timeout == 77 and options.global_ranks_in_group == [4, 5, 6, 7]
        assert options.group_name == f"tilewise/lane{number}/mine"

"""Lanes between nodes: who shares a node with whom, and programs that use it."""

import pytest
import torch
from support.bound_passes import Case, on_ranks

import tilewise as tw
from tilewise.compiler.program import Launch
from tilewise.execution.pass_run import PassRun
from tilewise.transport.process_group import local_world_size, node_size_of


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
        run = PassRun(
            case.problem, case.transport, backward=True, batch=1, device=torch.device("cpu")
        )
        for step in run.program.instructions:
            if isinstance(step, Launch):
                for hop in (*step.sends, *step.recvs):
                    assert step.lane == (hop.src // 4 != hop.dst // 4)
        lanes = {step.lane for step in run.program.instructions if isinstance(step, Launch)}
        got = case.both_passes()
        assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(got, plain, strict=True))
        return sorted(lanes), got

    assert {tuple(lanes) for lanes, _ in on_ranks(plan, layout, tw.Causal(), body)} == {(0, 1)}

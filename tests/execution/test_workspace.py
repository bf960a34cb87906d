"""Codes run in their workspace: same bits, no other memory, no workspace in two hands at once."""

from __future__ import annotations

import threading
from itertools import product
from typing import Any

import pytest
import torch
from support.bound_passes import Case, Counting, on_ranks, uncounted
from support.latents import draw_layer
from support.thinned import thinned

import tilewise as tw
from tilewise.compiler.codegen import pass_code
from tilewise.compiler.facts import CallTraits
from tilewise.execution import run
from tilewise.execution.forward_backward import bound_code, code_traits
from tilewise.execution.workspace import Workspace, WorkspacePool
from tilewise.kernels.protocol import deliver

MASKS = {
    "causal": tw.Causal(),
    "documents": tw.Document([0, 3, 30, 41, 61]) & tw.Causal(),
    "by head": tw.PerHead([tw.Causal(), tw.Full()]),
}
PLANS = (
    tw.ring(4),
    tw.ring(4, moves="q"),
    tw.all_gather(4),
    tw.double_ring(2, 2),
    tw.balanced_ring(4),
    tw.attention2d(2, 2),
    tw.mesh(4, q_tile=2),
    tw.mesh(4, q_tile=4, schedule="gather"),
    tw.ulysses(2, inner=tw.ring(2)),
)
CPU = torch.device("cpu")


@pytest.fixture
def writing(monkeypatch):
    """What kernels return is written into the workspace, as on a GPU."""
    monkeypatch.setattr(run, "ADOPTING_DEVICES", ())


@pytest.mark.parametrize(
    ("plan", "mask"), thinned(product(PLANS, ("documents", "by head")), 3), ids=repr
)
def test_adopted_and_written_results_have_the_same_bits(plan, mask, monkeypatch):
    def often(case: Case) -> list[tuple[torch.Tensor, ...]]:
        return [case.both_passes() for _ in range(3)]

    want = on_ranks(plan, tw.zigzag(61, 4), MASKS[mask], often)
    monkeypatch.setattr(run, "ADOPTING_DEVICES", ())
    got = on_ranks(plan, tw.zigzag(61, 4), MASKS[mask], often)
    for ours, theirs in zip(got, want, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize(
    ("mask", "dtype"), [("causal", torch.bfloat16), ("by head", torch.float32)], ids=str
)
@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_a_warm_call_allocates_its_results_and_nothing_else(
    plan, mask, dtype, writing, monkeypatch
):
    """Nor does it ask the device for anything."""
    active = threading.local()  # ranks take turns within a pass

    def merging(*tensors: Any) -> None:
        counting = getattr(active, "counting", None)
        (uncounted(deliver, counting) if counting else deliver)(*tensors)

    def counts(case: Case) -> Counting:
        counting = Counting()
        case = case.exempt(counting)
        for _ in range(2):
            case.both_passes()
        active.counting = counting
        with counting:
            case.both_passes()
        return counting

    monkeypatch.setattr(run, "deliver", merging)
    for counting in on_ranks(
        plan, tw.zigzag(61, 4), MASKS[mask], counts, dtype=dtype, save="replay"
    ):
        assert counting.allocated == {"new_empty": len(("out", "lse", "dq", "dk", "dv"))}
        assert not counting.asked


def test_counting_sees_what_it_is_to_see():
    with Counting() as counting:
        x = torch.ones(3)
        x.add_(1).view(3, 1).copy_(x[:, None])
        assert x.sum().item() == 6
    assert counting.allocated == {"ones": 1, "sum": 1}
    assert counting.asked == {"_local_scalar_dense": 1}


def test_results_are_the_callers_own():
    def again(case: Case) -> bool:
        case.both_passes()
        first = case.both_passes()
        before = [x.clone() for x in first]
        case.q.mul_(2.0)
        second = case.both_passes()
        assert all(torch.equal(x, y) for x, y in zip(first, before, strict=True))
        return any(torch.equal(x, y) for x, y in zip(first, second, strict=True))

    assert on_ranks(tw.ring(2), tw.zigzag(32, 2), tw.Causal(), again) == [False] * 2


def test_a_workspace_of_inference_mode_serves_outside_of_it():
    def in_and_out(case: Case) -> bool:
        with torch.inference_mode():
            first = case.both_passes()
        second = case.both_passes()
        return all(torch.equal(x, y) for x, y in zip(first, second, strict=True))

    assert on_ranks(tw.ring(2), tw.zigzag(32, 2), tw.Causal(), in_and_out) == [True] * 2


class Bound:
    """What tensors are bound for, in place of a code."""


def entered(workspace: Workspace, of: Bound, num_bytes: int = 64) -> torch.Tensor:
    return workspace.enter(of, num_bytes, CPU, lambda memory: [memory[:num_bytes]])[0]


def test_passes_at_once_never_share_a_workspace():
    pool, code = WorkspacePool(), Bound()
    one, two = pool.take(), pool.take()
    x, y = entered(one, code).fill_(1), entered(two, code).fill_(2)
    assert (x == 1).all() and (y == 2).all()
    pool.give_back(two)
    three = pool.take()
    assert entered(three, code).data_ptr() == y.data_ptr()
    pool.take()  # a pass that raises gives nothing back
    pool.give_back(one)
    pool.give_back(three)
    assert len(pool.workspaces) == 2


def test_a_workspace_binds_a_code_once_and_anew_when_it_grows():
    workspace, small, large = Workspace(), Bound(), Bound()
    x = entered(workspace, small)
    assert entered(workspace, small) is x
    y = entered(workspace, large, 4096)
    assert entered(workspace, large, 4096) is y
    again = entered(workspace, small)
    assert again is not x and again.data_ptr() == y.data_ptr()


class Taken:
    """The bytes that each thread's passes have asked their workspaces for."""

    def __init__(self, monkeypatch: Any):
        self.by_thread: dict[int, list[int]] = {}
        enter = Workspace.enter

        def counted(workspace: Workspace, code: Any, num_bytes: int, *rest: Any) -> Any:
            self.by_thread.setdefault(threading.get_ident(), []).append(num_bytes)
            bound = enter(workspace, code, num_bytes, *rest)
            buffer = workspace._buffer
            assert buffer is not None and buffer.numel() >= num_bytes
            return bound

        monkeypatch.setattr(Workspace, "enter", counted)

    @property
    def own(self) -> list[int]:
        return self.by_thread.pop(threading.get_ident(), [])


FLOAT8 = tw.wire.Wires(tw.wire.Float8(8), tw.wire.Plain("float32"), partials=tw.wire.Float8(8))
SETTINGS: tuple[dict[str, Any], ...] = (
    {"mask": "causal", "dtype": torch.float64},
    {"mask": "documents", "dtype": torch.bfloat16, "heads": (4, 4, 8)},
    {"mask": "by head", "dtype": torch.bfloat16, "save": "gathered"},
    {"mask": "causal", "dtype": torch.bfloat16, "wire": FLOAT8, "save": "gathered"},
)


@pytest.mark.parametrize(("plan", "number"), thinned(product(PLANS, range(4)), 5), ids=repr)
def test_passes_take_the_bytes_that_their_workload_says(plan, number, monkeypatch):
    options = {"heads": (4, 2, 8), **SETTINGS[number]}
    mask, heads, dtype = MASKS[options.pop("mask")], options.pop("heads"), options.pop("dtype")
    layout, taken = tw.zigzag(61, 4), Taken(monkeypatch)
    work = tw.Workload(61, *heads, dtype=dtype, mask=mask, layout=layout, **options)
    passes = work.resolve(plan)

    def told(case: Case) -> tuple[list[int], list[int]]:
        _ = taken.own
        case.both_passes()
        codes = []
        for backward in (False, True):
            call = CallTraits(keep=passes[1].payload.saved and not backward)
            traits = code_traits(case.problem, case.transport, CPU)
            rank = case.transport.rank
            codes.append(pass_code(passes, rank, backward=backward, call=call, traits=traits))
        mine = [
            bound_code(
                case.problem,
                case.transport,
                case.q[:, None],
                backward=backward,
                keep=case.problem.gathered and not backward,
            ).code
            for backward in (False, True)
        ]
        assert mine == codes
        return taken.own, [code.num_bytes for code in codes]

    for asked, said in on_ranks(plan, layout, mask, told, heads=heads, dtype=dtype, **options):
        assert asked == said


def test_passes_of_latents_take_the_bytes_that_their_workload_says(monkeypatch):
    layer, plan, taken = draw_layer(24), tw.ring(4), Taken(monkeypatch)
    layout = tw.zigzag(24, 4)
    layer.split(plan, layout, tw.Causal())
    passes = layer.workload(mask=tw.Causal(), layout=layout).resolve(plan)
    said = [
        pass_code(passes, rank, backward=backward).num_bytes
        for rank, backward in product(range(4), (False, True))
    ]
    assert sorted(n for asked in taken.by_thread.values() for n in asked) == sorted(said)


@pytest.mark.parametrize("plan", [tw.ring(2), tw.all_gather(2)], ids=repr)
def test_a_profile_shows_the_operations_in_order(plan, monkeypatch):
    seen: dict[int, list[tuple[str, str]]] = {}

    class Range:
        def __init__(self, name: str, label: str):
            seen.setdefault(threading.get_ident(), []).append((name, label))

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    def ranges(case: Case) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        case.both_passes()
        return seen.get(threading.get_ident(), []), [
            (f"tilewise::{direction} {op.label.replace('[0:4]', '')}", op.label)
            for direction in ("fwd", "bwd")
            for op in bound_code(
                case.problem, case.transport, case.q[:, None], backward=direction == "bwd"
            ).code.ops
        ]

    monkeypatch.setattr(run.profiler, "_is_profiler_enabled", True)
    monkeypatch.setattr(run.profiler, "record_function", Range)
    for shown, labels in on_ranks(plan, tw.zigzag(16, 2), tw.Causal(), ranges):
        assert shown == labels
        assert ("tilewise::bwd delta", "delta") in labels
        assert not any("[" in name for name, _ in shown)
        assert any("[0:4]" in label for _, label in shown)

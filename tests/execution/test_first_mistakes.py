"""What a newcomer gets wrong first ends in an error that names the mistake and what to write."""

from __future__ import annotations

import inspect
from itertools import product

import numpy as np
import pytest
import torch
from processes.launcher import run_processes

import tilewise as tw
from tilewise.arguments import OTHER_NAMES

N, NUM_TOKENS = 2, 16
LAYOUT = tw.zigzag(NUM_TOKENS, N)


def _refusals(call) -> set[str]:
    """The errors of all ranks of a loopback."""

    def on_rank(rank, group):
        with pytest.raises(ValueError) as raised:
            call(rank, group)
        return str(raised.value)

    return set(tw.loopback(N, on_rank))


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_options_of_other_libraries_name_ours(name: str):
    q = torch.zeros(NUM_TOKENS, 1, 4)
    cp = tw.ContextParallel(num_tokens=NUM_TOKENS)
    for call in (tw.attention, cp.attention):
        with pytest.raises(TypeError, match=f"has no option '{name}'; what it is called"):
            call(q, q, q, **{name: True})
    ours = OTHER_NAMES[name].split("=")[0]
    assert ours.startswith("no option: ") or ours in inspect.signature(tw.attention).parameters


def test_unknown_options_stay_type_errors():
    with pytest.raises(TypeError, match="flavour"):
        tw.attention(*[torch.zeros(4, 1, 4)] * 3, plan=tw.ring(1), flavour="mint")


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize(
    ("plan", "wrong"),
    [
        *product((tw.ring(N), tw.ulysses(N), tw.mesh(N, q_tile=2)), ("q", "k")),
        (tw.tree(N), "k"),  # any number of replicated queries is right
    ],
)
def test_heads_before_tokens(batch: tuple[int, ...], plan, wrong: str):
    """Heads of another number than a rank's rows, in one operand or in all."""

    def call(rank, group):
        rows = LAYOUT.size(rank)
        q, k = (torch.zeros(*batch, heads, rows, 8) for heads in (4, 2))
        q = q if wrong == "q" else q.transpose(-3, -2)
        tw.attention(q, k, k, plan=plan, layout=LAYOUT, mask=tw.Full(), group=group)

    at = len(batch)
    (error,) = _refusals(call)
    assert "if heads come before tokens here" in error
    assert f"pass {wrong}.transpose({at}, {at + 1})" in error


def test_numpy_arrays():
    def call(rank, group):
        x = np.zeros((8, 2, 4), np.float32)
        cp = tw.ContextParallel(group, num_tokens=NUM_TOKENS)
        cp.attention(x, x, x)

    assert _refusals(call) == {"rank 0: q (ndarray) must be a Tensor, such as torch.from_numpy(q)"}


@pytest.mark.parametrize("other", [tw.Window(3, 0), tw.Full(), 1])
def test_masks_are_not_added(other):
    with pytest.raises(TypeError, match=r"write a & b .* or a \| b"):
        tw.Causal() + other
    with pytest.raises(TypeError, match="write a & b"):
        other + tw.Causal()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_whose_values_differ_between_ranks(backward: bool, dtype: torch.dtype):
    def call(rank, group):
        q = torch.zeros(NUM_TOKENS // N, 2, 4, dtype=dtype, requires_grad=backward)
        sink = torch.tensor([0.5, 2.0 * rank], dtype=dtype)
        options = {"plan": tw.ring(N), "layout": LAYOUT, "mask": tw.Causal(), "group": group}
        tw.attention(q, q, q, sink=sink, **options)

    assert _refusals(call) == {
        "ranks disagree on values of sink: rank 0 has [0.5, 0.0], rank 1 has [0.5, 2.0]; pass the "
        "same value on every rank"
    }


def test_sinks_of_a_cache_whose_values_differ_between_ranks():
    def call(rank, group):
        cache = tw.KVCache(NUM_TOKENS, num_kv_heads=1, head_dim=4, group=group)
        x = torch.zeros(1, 2, 1, 4)
        cache.decode(x, x, x, sink=torch.tensor([float(rank)]))

    (error,) = _refusals(call)
    assert "ranks disagree on values of sink: rank 0 has [0.0], rank 1 has [1.0]" in error


def test_equal_sinks_may_change_from_call_to_call():
    def on_rank(rank, group):
        q = torch.zeros(NUM_TOKENS // N, 2, 4)
        options = {"plan": tw.ring(N), "layout": LAYOUT, "mask": tw.Causal(), "group": group}
        for step in range(70):  # more calls than ranks make without comparing
            tw.attention(q, q, q, sink=torch.tensor([0.5, float(step)]), **options)

    tw.loopback(N, on_rank)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tw.ContextParallel(num_tokens=8),
        lambda: tw.KVCache(8, num_kv_heads=1, head_dim=4),
        lambda: tw.attention(
            *[torch.zeros(8, 1, 4)] * 3,
            plan=tw.ring(1),
            layout=tw.contiguous(8, 1),
            mask=tw.Full(),
        ),
    ],
)
def test_a_process_of_several_without_a_process_group(make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"WORLD_SIZE is 4: .*init_process_group"):
        make()
    monkeypatch.setenv("WORLD_SIZE", "1")
    make()


def _with_a_group(rank: int) -> int:
    return tw.ContextParallel(num_tokens=8).world_size


def test_processes_with_a_process_group(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_processes(2, _with_a_group) == [2, 2]

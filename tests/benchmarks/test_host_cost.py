"""The benchmark of launching a pass; a launch that is known is the one that Triton would make."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from benchmarks import host_cost
from benchmarks.host_cost import CALL, NoDriver, measured, played_cuda
from tilewise.kernels.delta import out_for_delta
from tilewise.kernels.protocol import Scores
from tilewise.kernels.registry import kernel_named
from tilewise.tiles.calls import KernelCall, Kind

pytest.importorskip("triton")


@pytest.mark.parametrize("name", ["stub", "cudnn", "cuda"])
def test_every_kind_of_operation_has_a_row_of_both_passes(name):
    with played_cuda(), torch.no_grad():
        rows = list(measured(name, tw.mesh(4, q_tile=2), 2))
    assert {row.direction for row in rows} == {"forward", "backward"}
    found = {row.kind for row in rows}
    assert {CALL, "copy", "post", "wait", "pass", "control: copy_", "control: merge"} <= found
    assert all(low <= middle <= high for row in rows for low, middle, high in [row.quartiles])
    work = tw.Workload(num_tokens=64, num_heads=2, num_kv_heads=2, head_dim=128, mask=tw.Causal())
    for row in rows:
        if row.kind == CALL:
            code = tw.mesh(4, q_tile=2).code(work, 1, row.direction == "backward", device="cuda")
            assert row.count == code.num_calls


class Launched:
    """What a driver is asked to launch: a kernel's name, the grid, and the arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.launches: list[Any] = []
        monkeypatch.setattr(NoDriver, "launcher_cls", staticmethod(self._launcher))

    def _launcher(self, source: Any, metadata: Any) -> Any:
        def launch(*given: Any) -> None:
            grid, packed, arguments = given[:3], given[5], given[9:]
            self.launches.append((source.fn.fn.__name__, grid, packed, flat(arguments)))

        return launch


def flat(x: Any) -> Any:
    """Arguments with tensors as their strides and the places of those that are not made anew."""
    if isinstance(x, Tensor):
        return x.dtype, tuple(x.shape), x.stride()
    return (type(x), *map(flat, x)) if isinstance(x, tuple) else (type(x), x)


def operands(heads: int = 2, rows: int = 24) -> list[Tensor]:
    q, k, v, dout = torch.zeros(4, rows, 1, heads, 64, dtype=torch.bfloat16)
    lse, delta = torch.zeros(2, rows, 1, heads)
    return [q, k, v, dout, lse, delta]


SCORES = {
    "plain": Scores(0.125),
    "capped": Scores(0.125, softcap=5.0),
    "whole scale": Scores(1),
    "largest": Scores(0.125, max_logit=True),
}


@pytest.mark.parametrize("name", SCORES)
def test_a_known_launch_is_the_one_that_triton_makes(name, monkeypatch):
    """Twice as it is, then of other strides and sizes, then as it was."""
    launched, scores = Launched(monkeypatch), SCORES[name]
    kernel = kernel_named("triton")
    with played_cuda():
        found: list[list[Any]] = []
        kinds = [(2, 24), (2, 24), (3, 40), (2, 24)]
        calls = {rows: KernelCall(((0, rows),), ((0, rows),), Kind.CAUSAL) for _, rows in kinds}
        for heads, rows in kinds:
            q, k, v, dout, lse, delta = operands(heads, rows)
            out, *_ = kernel.forward(q, k, v, calls[rows], scores.scale, None, scores)
            into = out, lse, *([lse.clone()] if scores.max_logit else [])
            kernel.forward(q, k, v, calls[rows], scores.scale, into, scores)
            if not scores.max_logit:
                kernel.backward(*operands(heads, rows), calls[rows], scores.scale, None, scores)
            out_for_delta(dout, delta)
            host_cost.merge.merge_into(out, lse, q, lse.clone())
            host_cost.run.combine([(out, lse), (q, lse.clone())], (out, lse))
            host_cost.run.add_up([out, q, q], q)
            found.append(launched.launches.copy())
            launched.launches.clear()
    assert found[0] == found[1] == found[3] != found[2]
    assert len(found[0]) == (6 if scores.max_logit else 8)


def test_what_lies_elsewhere_is_another_kind(monkeypatch):
    """A tensor that is not aligned to 16 bytes is compiled for, though all else is the same."""
    launched = Launched(monkeypatch)
    memory = torch.zeros(24 * 2 * 64 + 1, dtype=torch.bfloat16)
    aligned, off = (memory[i:][: 24 * 128].view(24, 1, 2, 64) for i in (0, 1))
    out, lse, other = torch.zeros(24, 1, 2, 64), *torch.zeros(2, 24, 1, 2)
    with played_cuda():
        for x in (aligned, off, aligned, off):
            host_cost.merge.merge_into(out, lse, x, other)
        from tilewise.kernels.triton import launch

        assert len(launch.KNOWN._entries) == 2
    assert len(launched.launches) == 4
    assert not launch.KNOWN._entries  # forgotten: they were compiled for no driver

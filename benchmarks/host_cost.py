"""What the host takes to launch a pass: microseconds for each kernel call and each other operation.

    python -m benchmarks.host_cost [--kernel NAME ...] [--plan NAME] [--rounds 20] [--json]

One rank's code for CUDA runs on small tensors of the CPU. Kernels are ours up to the library: what
they call of torch returns empty tensors, and Triton launches, after all that it does itself, for a
driver that does nothing. The kernel "stub" returns at once: its calls are the executor's share.
Messages arrive at once, and posting them is the executor's share too. Operators of torch do their
work on few numbers; on CUDA each would launch a kernel, which takes a few microseconds more.

Rows are kinds of operations: how many a pass has, and the median and quartiles over all of a kind.
"pass" has milliseconds of a whole pass. Controls stand at each kernel's end, measured between its
rounds: one copy_ of torch by itself, and one merge as Triton launches it by itself.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import tilewise as tw
from benchmarks.overhead import Instant
from tilewise.compiler import ops
from tilewise.execution import run
from tilewise.execution.run import BoundCode, Pass
from tilewise.execution.workspace import WorkspacePool
from tilewise.kernels import delta, merge, protocol, torch_flash, torch_sdpa
from tilewise.kernels.protocol import Kernel, Scores
from tilewise.kernels.registry import kernel_named
from tilewise.tiles.calls import KernelCall
from tilewise_tools.naming import Parser, run_script, whole_number

ROWS, HEADS, WIDTH = 16, 2, 128  # of a shard; a real one takes as long to launch
PLANS: Mapping[str, Callable[[], tw.Plan]] = MappingProxyType(
    {
        "mesh(256, 16)": lambda: tw.mesh(256, q_tile=16),
        "ulysses(8, mesh(32, 4))": lambda: tw.ulysses(8, inner=tw.mesh(32, q_tile=4)),
        "ring(8)": lambda: tw.ring(8),
    }
)
CALL = "kernel call"
CLOCK = time.perf_counter


class Stub:
    """A kernel that returns at once: what it is given to add to, or tensors that it has."""

    name, square_causal, whole_tile = "stub", True, False

    def __init__(self) -> None:
        self._results: dict[tuple[int, ...], tuple[Tensor, ...]] = {}

    def supports(self, *_: Any, **__: Any) -> None:
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, scale: float, into: Any = None
    ) -> Any:
        return into or self._made(q, lambda: (torch.zeros_like(q), q[..., 0].float()))

    def backward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        into = rest[5] if len(rest) > 5 else None
        return into or self._made(q, lambda: tuple(map(torch.zeros_like, (q, k, v))))

    def _made(self, q: Tensor, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        key = tuple(q.shape)
        if key not in self._results:
            self._results[key] = make()
        return self._results[key]


KERNELS: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {"stub": Stub}
    | {name: lambda name=name: kernel_named(name) for name in ("cudnn", "cuda", "triton")}
)


class NoDriver:
    """A driver of Triton's for a Hopper GPU that launches nothing."""

    launcher_cls = staticmethod(lambda source, metadata: lambda *_: None)
    utils = SimpleNamespace(
        load_binary=lambda *_: (1, 1, 0, 0, 1024),
        unload_module=lambda module: None,
        get_device_properties=lambda device: {"max_shared_mem": 232448},
    )

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def played_cuda() -> Iterator[None]:
    """Kernels and merges take the way that they take on CUDA, up to the driver."""
    from triton.runtime import driver

    from tilewise.kernels.triton.delta import put_out_for_delta
    from tilewise.kernels.triton.merge import combine_rows, merge_rows

    def put(dout: Tensor, delta_: Tensor, changed: Tensor, out: Tensor, columns: int) -> None:
        put_out_for_delta(dout, delta_, changed, out, columns, delta.LEAST_DIVISORS[dout.dtype])

    def combine(partials: Sequence[Sequence[Tensor]], into: Sequence[Tensor]) -> None:
        combine_rows([x[0] for x in partials], into[0], [x[1] for x in partials], into[1])

    replaced = [
        (run, "combine", combine),
        (run, "add_up", combine_rows),
        *((module, "merge_into", merge_rows) for module in (merge, protocol, torch_flash)),
        (delta, "_put_out_for_delta", put),
        (torch_sdpa, "_cudnn", _sdpa_forward),
        (torch_sdpa, "_cudnn_backward", _sdpa_backward),
        (torch_flash, "_forward", _flash_forward),
        (torch_flash, "_backward", _flash_backward),
        (run, "ADOPTING_DEVICES", ()),
        (driver, "_active", NoDriver()),
    ]
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.callback(_forget_launches)
        _forget_launches()
        yield


def _forget_launches() -> None:
    """Compiled kernels keep the driver that they were first launched for."""
    from tilewise.kernels.triton import delta, kernel, launch, merge

    launch.KNOWN._entries.clear()
    launch.KNOWN._newest = None
    for compiled in (merge._merge, merge._combine, delta._put, *kernel._kernels()):
        compiled.device_caches.clear()


def _sdpa_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty((*q.shape[:-1], 1), dtype=torch.float32)


def _sdpa_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    batch, rows, heads, _ = q.shape
    return torch.empty_like(q), q.new_empty((batch, heads, rows), dtype=torch.float32)


_flash_backward = _sdpa_backward


class Row(NamedTuple):
    """Microseconds of a kind of operation; of a pass milliseconds.

    Attributes:
        count: of the kind in a pass.
    """

    kernel: str
    direction: str
    kind: str
    count: int
    quartiles: tuple[float, float, float]


def measured(kernel: str, plan: tw.Plan, rounds: int) -> Iterator[Row]:
    """Both passes' rows of one kernel."""
    for backward in (False, True):
        yield from _of_pass(kernel, plan, rounds, backward)


def _of_pass(kernel: str, plan: tw.Plan, rounds: int, backward: bool) -> Iterator[Row]:
    world, made = plan.world_size, KERNELS[kernel]()
    heads = HEADS * plan.num_head_groups
    work = tw.Workload(
        num_tokens=world * ROWS,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=WIDTH,
        mask=tw.Causal(),
    )
    style = None if kernel == "stub" else kernel
    code = plan.code(work, world // 3, backward, device="cuda", kernel=style)
    transport = Instant()
    transport.rank, transport.world_size = world // 3, world
    given = _given(heads, backward)
    whole, timed = (_bound(code, made) for _ in range(2))
    times: dict[str, list[float]] = {}
    control = _Controls()
    kinds = [_kind(op) for op, step in zip(code.ops, timed._steps, strict=True) if step]
    steps = [step for step in timed._steps if step]
    timed._busy_steps = [
        _timed(step, times.setdefault(kind, [])) for kind, step in zip(kinds, steps, strict=True)
    ]
    totals, scores = [], Scores(WIDTH**-0.5)
    for turn in range(-2, rounds):
        start = CLOCK()
        whole.run(given, Pass(transport, scores))
        total = CLOCK() - start
        timed.run(given, Pass(transport, scores))
        if turn < 0:  # those before warm up
            for found in times.values():
                found.clear()
        else:
            totals.append(1e3 * total)
        control(times)
    direction = "backward" if backward else "forward"
    for kind in sorted(times):
        yield Row(kernel, direction, kind, kinds.count(kind), _quartiles(times[kind]))
    yield Row(kernel, direction, "pass", 1, _quartiles(totals))


class _Controls:
    """What torch and Triton take by themselves for a copy and a merge."""

    def __init__(self) -> None:
        from tilewise.kernels.triton.merge import _merge, _merging

        x, y = torch.zeros(2, ROWS, 1, HEADS, WIDTH)
        tensors = x, x[..., 0].contiguous(), y, y[..., 0].contiguous()
        it = _merging(tensors, _merge)
        options = {**it.constants, "enable_fp_fusion": True}
        self._works: dict[str, Callable[..., object]] = {
            "control: copy_": lambda *_: x.copy_(y),
            "control: merge": lambda *_: _merge[it.grid](*tensors, *it.numbers, **options),
        }

    def __call__(self, times: dict[str, list[float]]) -> None:
        """Add microseconds of ten times each."""
        for name, work in self._works.items():
            timed = _timed(work, times.setdefault(name, []))
            for _ in range(10):
                timed({}, None)


def _bound(code: Any, kernel: Kernel) -> BoundCode:
    device = torch.device("cpu")
    return BoundCode(code, device, kernel, Scores(WIDTH**-0.5), WorkspacePool())


def _given(heads: int, backward: bool) -> dict[str, Tensor]:
    """The call's tensors."""
    names = ("q", "k", "v", "out", *(("dout", "dq", "dk", "dv") if backward else ()))
    found = {name: torch.zeros(ROWS, 1, heads, WIDTH, dtype=torch.bfloat16) for name in names}
    return {**found, "lse": torch.zeros(ROWS, 1, heads)}


def _kind(op: ops.Op[Any]) -> str:
    return CALL if isinstance(op, ops.Attend) else type(op).__name__.lower()


def _timed(step: Callable[..., object], found: list[float]) -> Callable[..., None]:
    def timed(t: Any, work: Any) -> None:
        start = CLOCK()
        step(t, work)
        found.append(1e6 * (CLOCK() - start))

    return timed


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return round(low, 2), round(middle, 2), round(high, 2)


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kernel", choices=KERNELS, action="append", help="default: all")
    parser.add_argument("--plan", choices=PLANS, default="mesh(256, 16)")
    parser.add_argument("--rounds", type=whole_number, default=20)
    parser.add_argument("--json", action="store_true", help="one line per row")
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error(f"--rounds ({given.rounds}) must be at least 2, for quartiles")
    torch.set_num_threads(1)
    plan = PLANS[given.plan]()
    with played_cuda(), torch.no_grad():
        for kernel in given.kernel or KERNELS:
            for row in measured(kernel, plan, given.rounds):
                if given.json:
                    print(json.dumps({"plan": given.plan, **row._asdict()}), flush=True)
                else:
                    low, middle, high = row.quartiles
                    print(
                        f"{row.kernel:7} {row.direction:8} {row.kind:15} {row.count or '':4} "
                        f"{middle:8.2f}   {low:.2f} to {high:.2f}"
                    )


if __name__ == "__main__":
    run_script(main)

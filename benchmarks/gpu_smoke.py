"""The first three minutes on a GPU: what is right, how fast kernels are, whether messages overlap.

    python benchmarks/gpu_smoke.py [--part overlap ...]
    python benchmarks/gpu_smoke.py --cpu        # the same code, tiny, on the CPU

Every part has a process of its own with a time limit, and one for each kernel: a crash, which takes
the device's context with it, stops nothing else. It prints a line for each finding. The exit code
is 1 if a part failed or a kernel is wrong. Figures of --cpu say nothing.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import nccl

from tilewise.kernels.protocol import Kernel
from tilewise.kernels.reference import Reference
from tilewise.kernels.registry import kernel_named
from tilewise.tiles.calls import KernelCall, Kind, Slice
from tilewise_tools.naming import Parser, run_script

KERNELS = ("cuda", "cudnn", "triton", "flash_attn_4")
CPU_KERNELS = ("cpu", "reference")
WRONG = 2e-2  # RMS of the difference over RMS of what is right


def call_of(m: int, n: int, kind: Kind = Kind.FULL, *slices: Slice) -> KernelCall:
    return KernelCall(((0, m),), ((0, n),), kind, slices)


CALLS = {
    "full": call_of(128, 192),
    "causal": call_of(200, 200, Kind.CAUSAL),
    "corner": call_of(200, 300, Kind.CAUSAL),
    "one row": call_of(1, 300),
    "window": call_of(200, 256, Kind.SLICES, Slice(0, 200, 0, 1, 57, 1)),
    "left-open window": call_of(200, 256, Kind.SLICES, Slice(0, 200, 0, 0, 57, 1)),
    "rows that see nothing": call_of(96, 128, Kind.SLICES, Slice(32, 64, 0, 0, 128, 0)),
}


class Bench:
    """A device, and sizes for it; of the kernels only one, if it is named."""

    def __init__(self, cpu: bool, kernel: str | None = None):
        self.names = (kernel,) if kernel else CPU_KERNELS if cpu else KERNELS
        self.cpu, self.device = cpu, torch.device("cpu" if cpu else "cuda")
        self.dtype = torch.float32 if cpu else torch.bfloat16
        self.tokens, self.heads, self.head_dim = (64, 2, 16) if cpu else (16384, 16, 128)
        self.rounds = 1 if cpu else 10
        torch.manual_seed(0)

    def kernels(self) -> Iterator[tuple[str, Kernel]]:
        for name in self.names:
            kernel = kernel_named(name)
            reason = kernel.supports(self.device.type, self.dtype, self.head_dim)
            if reason is None:
                yield name, kernel
            else:
                print(f"  {name}: left out, {reason}")

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def operands(self, call: KernelCall, heads: int, kv_heads: int) -> list[Tensor]:
        """q, k, v, dout, and lse and delta of the call alone."""
        q, dout = (self.normal(call.num_q, 1, heads, self.head_dim) for _ in range(2))
        k, v = (self.normal(call.num_k, 1, kv_heads, self.head_dim) for _ in range(2))
        out, lse = Reference().forward(*(x.float() for x in (q, k, v)), call, self.scale)
        return [q, k, v, dout, lse, (out * dout.float()).sum(-1)]

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def settle(self) -> None:
        if not self.cpu:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object]) -> float:
        """Of one of several in a row, after two that do not count."""
        work(), work(), self.settle()
        begin = time.perf_counter()
        for _ in range(self.rounds):
            work()
        self.settle()
        return (time.perf_counter() - begin) / self.rounds


def environment(bench: Bench) -> None:
    print(f"  torch {torch.__version__}, CUDA {torch.version.cuda}, triton {_version('triton')}")
    if not bench.cpu:
        it = torch.cuda.get_device_properties(0)
        print(f"  {it.name}, {it.major}.{it.minor}, {it.multi_processor_count} multiprocessors")
        print(f"  cuDNN {torch.backends.cudnn.version()}, NCCL {nccl.version()}")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def ceilings(bench: Bench) -> None:
    n = 64 if bench.cpu else 8192
    a, b = bench.normal(2, n, n)
    print(f"  matmul of {n}: {2 * n**3 / bench.seconds(lambda: a @ b) / 1e12:.2f} TFLOP/s")
    x = torch.empty(1 << (16 if bench.cpu else 30), dtype=torch.uint8, device=bench.device)
    y = torch.empty_like(x)
    print(f"  copy: {2 * x.nbytes / bench.seconds(lambda: y.copy_(x)) / 1e12:.3f} TB/s")


def right(bench: Bench) -> None:
    wrong = []
    for name, kernel in bench.kernels():
        for what, call in CALLS.items():
            if kernel.square_causal and call.kind is Kind.CAUSAL and call.num_q != call.num_k:
                continue
            try:
                error = _error(bench, kernel, call)
            except Exception as raised:
                print(f"  {name}, {what}: {raised}")
                error = float("inf")
            if not error <= WRONG:
                wrong.append(f"{name}, {what}: {error:.1e}")
        print(f"  {name}: {'wrong' if any(w.startswith(f'{name},') for w in wrong) else 'right'}")
    if wrong:
        raise AssertionError("; ".join(wrong))


def _error(bench: Bench, kernel: Kernel, call: KernelCall) -> float:
    """The largest RMS error of out, lse and gradients, beside and added to what is there."""
    given = bench.operands(call, 4, 2)
    q, k, v, lse = *given[:3], given[4]
    wide = [x.float() for x in given]
    truth = Reference()
    out, _ = truth.forward(*wide[:3], call, bench.scale)
    wanted = [out, lse, *truth.backward(*wide, call, bench.scale)]
    found = [*kernel.forward(q, k, v, call, bench.scale)]
    found += kernel.backward(*given, call, bench.scale)
    into = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    added = tuple(torch.ones_like(x, dtype=torch.float32) for x in (q, k, v))
    found += kernel.forward(q, k, v, call, bench.scale, into)
    found += (x - 1 for x in kernel.backward(*given, call, bench.scale, added))
    return max(_rms(x, y) for x, y in zip(found, wanted * 2, strict=True))


def _rms(x: Tensor, y: Tensor) -> float:
    if not torch.equal(x == -torch.inf, y == -torch.inf):
        return float("inf")
    x, y = (t.float().masked_fill(y == -torch.inf, 0.0) for t in (x, y))
    return float((x - y).norm() / y.norm().clamp_min(1e-20))


def speed(bench: Bench) -> None:
    n = bench.tokens
    for name, kernel in bench.kernels():
        for what, call in (("causal", call_of(n, n, Kind.CAUSAL)), ("full", call_of(n, n))):
            print(f"  {name}, {what}, TFLOP/s: {', '.join(_rates(bench, kernel, call))}")


def _rates(bench: Bench, kernel: Kernel, call: KernelCall) -> Iterator[str]:
    shape = call.num_q, 1, bench.heads, bench.head_dim
    q, k, v, dout = (bench.normal(*shape) for _ in range(4))
    out, lse = kernel.forward(q, k, v, call, bench.scale)
    delta = (out.float() * dout.float()).sum(-1)
    into = torch.zeros_like(q, dtype=torch.float32), lse.clone()
    flops = 4 * call.area * bench.heads * bench.head_dim / 1e12
    works: dict[str, tuple[float, Callable[[], object]]] = {
        "forward": (1.0, lambda: kernel.forward(q, k, v, call, bench.scale)),
        "into": (1.0, lambda: kernel.forward(q, k, v, call, bench.scale, into)),
        "backward": (2.5, lambda: kernel.backward(q, k, v, dout, lse, delta, call, bench.scale)),
    }
    for which, (part, work) in works.items():
        yield f"{which} {part * flops / bench.seconds(work):.3g}"


def cudnn_build(bench: Bench) -> None:
    kernel = kernel_named("cpu" if bench.cpu else "cudnn")
    q = bench.normal(bench.tokens, 1, bench.heads, bench.head_dim)

    def call(rows: int, what: str) -> None:
        bench.settle()
        begin = time.perf_counter()
        kernel.forward(q[:rows], q, q, call_of(rows, len(q)), bench.scale)
        bench.settle()
        print(f"  {what}: {1e3 * (time.perf_counter() - begin):.2f} ms")

    n = len(q)
    for rows, what in ((n, "first call"), (n, "again"), (n // 2, "another shape"), (n, "again")):
        call(rows, what)
    thread = threading.Thread(target=call, args=(n, "in a new thread"))
    thread.start(), thread.join()


def odd_heads(bench: Bench) -> None:
    """Rows of five heads as they travel, padded to 16 bytes, beside rows without padding."""
    n, heads = bench.tokens // 2, 5
    width, call = heads * bench.head_dim, call_of(n, n)
    q, k = (bench.normal(n, 1, heads, bench.head_dim) for _ in range(2))
    padded = bench.normal(n, width + 16 // bench.dtype.itemsize)[:, :width].view(q.shape).copy_(q)
    for name, kernel in bench.kernels():
        works = [partial(kernel.forward, x, k, k, call, bench.scale) for x in (q, padded)]
        dense, stepped = map(bench.seconds, works)
        error = _rms(works[1]()[0], works[0]()[0])
        print(f"  {name}: padded rows take {stepped / dense:.2f} times as long, {error:.0e} apart")
        assert error <= WRONG


Post = Callable[[], Callable[[], object]]
"""Starts a send; what it returns waits for it."""


def senders(device: torch.device, num_bytes: int) -> dict[str, Post]:
    """Ways to send bytes to itself: on the user's group, on our own lane; on the CPU a copy."""
    from tilewise.transport.nccl_batches import post_batch
    from tilewise.transport.nccl_groups import lane_group, warm_up
    from tilewise.transport.protocol import Message

    x = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    if device.type != "cuda":
        return {"copy": lambda: y.copy_(x).sum}
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    world: Any = dist.group.WORLD
    groups = {"user's group": world, "own lane": lane_group(world, 0)}

    def sender(group: Any) -> Post:
        warm_up(group)
        ends = [(True, Message(x, 0, "to itself")), (False, Message(y, 0, "to itself"))]
        return lambda: post_batch(group, ends).wait

    return {way: sender(group) for way, group in groups.items()}


class Hidden(NamedTuple):
    """Seconds of a work alone and of a send alone, and the share of the shorter that is hidden."""

    alone: float
    sent: float
    share: float


def hidden(
    seconds: Callable[[Callable[[], object]], float], work: Callable[[], object], post: Post
) -> Hidden:
    """Time a work and a send, each alone and the two together.

    Args:
        seconds: of a function.
    """

    def both() -> None:
        wait = post()
        work()
        wait()

    alone, sent, together = map(seconds, (work, lambda: post()(), both))
    share = min(1.0, max(0.0, (alone + sent - together) / min(alone, sent)))
    return Hidden(alone, sent, share)


def overlap(bench: Bench) -> None:
    """The share of a send to itself that two attention calls beside it hide."""
    ways = senders(bench.device, 1 << (12 if bench.cpu else 29))
    n = bench.tokens
    q, k, v = (bench.normal(n, 1, bench.heads, bench.head_dim) for _ in range(3))
    for name, kernel in bench.kernels():

        def attend(kernel: Kernel = kernel) -> None:
            for _ in range(2):
                kernel.forward(q, k, v, call_of(n, n), bench.scale)

        for way, post in ways.items():
            found = hidden(bench.seconds, attend, post)
            times = f"{1e3 * found.sent:.2f} ms beside {1e3 * found.alone:.2f} ms"
            print(f"  {name}, {way}: {times}, {100 * found.share:.0f} % hidden")


class Part(NamedTuple):
    """What is done, in a process that is given up after so many seconds.

    Attributes:
        kernels: those that get a process each.
    """

    run: Callable[[Bench], None]
    seconds: float
    kernels: tuple[str, ...] = ()


PARTS = {
    "environment": Part(environment, 60),
    "ceilings": Part(ceilings, 30),
    "right": Part(right, 90, (*KERNELS, "efficient")),
    "speed": Part(speed, 40, KERNELS),
    "cudnn build": Part(cudnn_build, 40),
    "odd heads": Part(odd_heads, 30, KERNELS),
    "overlap": Part(overlap, 40, KERNELS),
}
CONTEXT = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")


def _run(name: str, kernel: str | None, cpu: bool) -> None:
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    PARTS[name].run(Bench(cpu, kernel))


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    given = parser.parse_args(arguments)
    if not given.cpu and not torch.cuda.is_available():
        parser.error("no CUDA device here; --cpu tries the code")
    CONTEXT.set_forkserver_preload(["torch", "benchmarks.gpu_smoke"])  # imported once
    failed = []
    for name in given.part or PARTS:
        part = PARTS[name]
        kernels = CPU_KERNELS if given.cpu and part.kernels else part.kernels or (None,)
        begin = time.monotonic()
        errors = [_error_of(name, kernel, given.cpu) for kernel in kernels]
        wrong = [error for error in errors if error]
        ended = f"FAILED, {', '.join(wrong)}" if wrong else "ok"
        failed += wrong
        print(f"{name}: {ended}, {time.monotonic() - begin:.1f} s", flush=True)
    return 1 if failed else 0


def _error_of(name: str, kernel: str | None, cpu: bool) -> str:
    process = CONTEXT.Process(target=_run, args=(name, kernel, cpu))
    process.start()
    process.join(PARTS[name].seconds)
    code = process.exitcode
    process.kill()
    process.join()
    what = f"not done in {PARTS[name].seconds} s" if code is None else f"exit code {code}"
    return f"{kernel}: {what}" if kernel and code != 0 else what * (code != 0)


if __name__ == "__main__":
    from benchmarks.gpu_smoke import main as imported  # so that processes find the functions

    run_script(imported)

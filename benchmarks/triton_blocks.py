"""Other blocks for our Triton kernels, timed on a GPU beside those of kernels/triton/tuning.py.

    python -m benchmarks.triton_blocks [--head-dim 128] [--tokens 16384] [--mask causal] [--json]
    TRITON_INTERPRET=1 python -m benchmarks.triton_blocks --dry-run     # tiny, on the CPU

Each row changes one entry of the tuning. Forward and both ways of backward; fastest first. Blocks
that do not fit the GPU have a row that says so.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from tilewise.kernels.triton.kernel import TritonSlices
from tilewise.kernels.triton.tuning import LaunchBlocks, Tuning, tuning_for
from tilewise.tiles.calls import KernelCall, Kind
from tilewise_tools.naming import Parser, run_script, whole_number

KINDS = {"full": Kind.FULL, "causal": Kind.CAUSAL}
# By head_dim: of blocks of rows (forward and dq), and of blocks of keys.
BY_ROWS = {
    64: ((128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 4, 128), (128, 64, 4, 3), (64, 64, 4, 3)),
    128: ((128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 3)),
    256: ((128, 64, 8, 2), (128, 32, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2), (64, 32, 4, 3)),
}
BY_KEYS = {
    64: ((64, 128, 8, 2), (64, 128, 8, 4), (64, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 2)),
    128: ((64, 128, 8, 2), (32, 128, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3)),
    256: (),
}


class Shape(NamedTuple):
    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mask: str


def candidates(tuning: Tuning, head_dim: int) -> Iterator[tuple[str, str, Tuning]]:
    """Name of an entry, its blocks, and the tuning with them; what stands there comes first."""
    for name, others in (
        *((name, BY_ROWS[head_dim]) for name in ("forward", "dq")),
        *((name, BY_KEYS[head_dim]) for name in ("keys", "at_once")),
    ):
        standing = getattr(tuning, name)
        if standing is None or (name == "keys" and len(standing) > 1):
            continue
        standing = standing[0] if name == "keys" else standing
        for blocks in dict.fromkeys([standing, *(LaunchBlocks(*x) for x in others)]):
            entry = (blocks,) if name == "keys" else blocks
            yield name, " ".join(str(x) for x in blocks if x), tuning._replace(**{name: entry})


def timed(shape: Shape, device: torch.device) -> Iterator[dict[str, Any]]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    n, head_dim = shape.num_tokens, shape.head_dim
    call = KernelCall(((0, n),), ((0, n),), KINDS[shape.mask])
    heads = shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads
    q, k, v, dout = (torch.randn(n, 1, h, head_dim, device=device, dtype=dtype) for h in heads)
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
    out, lse = TritonSlices().forward(q, k, v, call, head_dim**-0.5)
    delta = (out * dout).sum(-1)
    for name, blocks, tuning in candidates(tuning_for(head_dim, dtype, major), head_dim):
        kernel = TritonSlices(tuning, deterministic=name != "at_once")
        row = {**shape._asdict(), "entry": name, "blocks": blocks}
        if name == "forward":
            run, products = (lambda x=kernel: x.forward(q, k, v, call, head_dim**-0.5)), 2
        else:
            given = (q, k, v, dout, lse, delta, call, head_dim**-0.5)
            run, products = (lambda x=kernel, given=given: x.backward(*given)), 5
        try:
            ms = milliseconds(run, device)
        except Exception as error:  # one that does not fit or compile must not end the others
            yield {**row, "error": f"{type(error).__name__}: {error}"[:120]}
            continue
        flops = 2 * products * call.area * shape.num_heads * head_dim
        yield {**row, "ms": ms, "tflops": flops / ms / 1e9}


def milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        from triton.testing import do_bench

        return float(do_bench(run, warmup=50, rep=200, return_mode="median"))  # pyright: ignore[reportArgumentType]
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def main() -> int:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--head-dim", type=int, choices=BY_ROWS, action="append")
    parser.add_argument("--tokens", type=whole_number, default=16384)
    parser.add_argument("--mask", choices=KINDS, default="causal")
    parser.add_argument("--json", action="store_true", help="one line per row, as they come")
    parser.add_argument("--dry-run", action="store_true", help="tiny, in the interpreter")
    given = parser.parse_args()
    if not given.dry_run and not torch.cuda.is_available():
        print("no CUDA device here: try the code with --dry-run", file=sys.stderr)
        return 2
    device = torch.device("cpu" if given.dry_run else "cuda:0")
    rows: list[dict[str, Any]] = []
    for head_dim in given.head_dim or BY_ROWS:
        shape = Shape(given.tokens, 16, 16, head_dim, given.mask)
        if given.dry_run:
            shape = shape._replace(num_tokens=24, num_heads=2, num_kv_heads=1)
        for row in timed(shape, device):
            rows.append(row)
            if given.json:
                print(json.dumps(row), flush=True)
    if not given.json:
        rows.sort(key=lambda row: (row["head_dim"], row["entry"], row.get("ms", float("inf"))))
        for row in rows:
            figures = row.get("error") or f"{row['ms']:8.3f} ms {row['tflops']:6.0f} TFLOP/s"
            print(f"{row['head_dim']:4} {row['entry']:8} {row['blocks']:16} {figures}")
    return 0


if __name__ == "__main__":
    run_script(main, num_tokens="--tokens")

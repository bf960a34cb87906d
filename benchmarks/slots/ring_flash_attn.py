"""ring-flash-attn's own test files, unchanged, with `ring_flash_attn` meaning our functions.

    git clone https://github.com/zhuzilin/ring-flash-attention
    python -m benchmarks.slots.ring_flash_attn ring-flash-attention
    python -m benchmarks.slots.ring_flash_attn ring-flash-attention --processes 4 --dtype float32

The files print differences from flash_attn on one device, and assert nothing: here each printed
difference is compared with a bound. `test_triton_kernels.py` tests kernels of the library's own,
on a GPU, and is left out.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.slots import stand_ins
from tilewise.compat import ring_flash_attn
from tilewise_tools.naming import Parser, run_script, whole_number

LEFT_OUT = ("test_triton_kernels.py",)
BOUNDS = {"bfloat16": 0.035, "float32": 2e-5}
"""Largest difference: of bf16 a unit in the last place of numbers from 4 to 8, the largest here; of
fp32 forty, since sums are taken in another order."""
LINE = re.compile(r"\[(\d+)\] max ([^,]+), mean")


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("clone", type=Path)
    parser.add_argument("--processes", type=whole_number, default=8)
    parser.add_argument("--dtype", choices=tuple(BOUNDS), default="bfloat16")
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.file:
        _run(options.file, options.dtype)
        return
    files = sorted(x for x in (options.clone / "test").glob("test_*.py") if x.name not in LEFT_OUT)
    if not files:
        sys.exit(f"{options.clone} has no test/test_*.py; pass a clone of ring-flash-attention")
    wrong = 0
    for file in files:
        count = options.processes if "init_process_group" in file.read_text() else 1
        texts, ended = _launched(file, options.clone, count, options.dtype)
        found = dict(_differences(texts)) if ended and count > 1 else {}
        beyond = {name: x for name, x in found.items() if not x <= BOUNDS[options.dtype]}
        ended = ended and (count == 1 or bool(found))
        wrong += not ended or bool(beyond)
        largest = f"{max(found.values()):.3g}" if found else "none printed"
        print(
            f"{file.name}: {count} processes, {len(found)} differences, largest {largest}",
            f"WRONG: {beyond or texts[0][-2000:]}" if beyond or not ended else "",
        )
    sys.exit(1 if wrong else 0)


def _launched(file: Path, clone: Path, count: int, dtype: str) -> tuple[list[str], bool]:
    """What each process of a file prints, and whether all ended well."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    command = [sys.executable, "-m", "benchmarks.slots.ring_flash_attn", str(clone)]
    command += ["--file", str(file), "--dtype", dtype]
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    texts = [process.communicate()[0] for process in processes]
    return texts, not any(process.returncode for process in processes)


def _differences(texts: list[str]) -> Iterator[tuple[str, float]]:
    """The largest entry of each difference that the ranks print: rank 0 prints the names."""
    names = [x[:-1] for x in texts[0].splitlines() if x.endswith(":") and not x.startswith("#")]
    for text in texts:
        found = [match for match in map(LINE.match, text.splitlines()) if match]
        for name, match in zip(names, found, strict=True):
            if "diff" in name:
                yield f"{name} of rank {match[1]}", float(match[2])


def _run(file: Path, dtype: str) -> None:
    """One process of a file."""
    ring_flash_attn.install()
    stand_ins.flash_attn()
    stand_ins.gloo_for_nccl()
    if dtype != "bfloat16":
        torch.bfloat16 = getattr(torch, dtype)
    sys.path.insert(0, str(file.parent))
    sys.argv = [file.name]
    with stand_ins.CpuForCuda():
        runpy.run_path(str(file), run_name="__main__")


if __name__ == "__main__":
    run_script(main)

"""All that is to be measured on a GPU, in one command and nine minutes.

    python -m benchmarks.gpu [--minutes 9] [--part correctness ...] [--out FILE]
    python -m benchmarks.gpu --dry-run          # the same code, tiny, on the CPU

Rows go to benchmarks/results/gpu_<device>_<date>.jsonl as they come, each part's first with
versions, clocks and commit; a short table is printed at the end. A case that fails, or for which no
time is left, has a row that says so.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu_parts import correctness, executor, kernels, scaling
from benchmarks.gpu_parts.session import Row, Session

RESULTS = Path(__file__).parent / "results"
# In this order, each with its share of the time that is left when it begins.
PARTS: dict[str, tuple[Callable[[Session], None], float]] = {
    "correctness": (correctness.run, 0.2),
    "executor": (executor.run, 0.3),
    "kernels": (kernels.run, 0.65),
    "graphs": (executor.graphs, 0.45),
    "scaling": (scaling.run, 0.9),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    given = parser.parse_args()
    if not given.dry_run and not torch.cuda.is_available():
        print(
            f"no CUDA device here (torch {torch.__version__}): run this on a machine with a GPU, "
            "or try the code with --dry-run",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cpu" if given.dry_run else "cuda:0")
    name = "dry run" if given.dry_run else torch.cuda.get_device_name(device)
    stem = re.sub(r"\W+", "_", f"gpu_{name}_{time.strftime('%Y%m%d_%H%M%S')}").lower()
    path = given.out or RESULTS / f"{stem}.jsonl"
    session = Session(device, path, given.minutes * 60, given.dry_run)
    torch.empty(0, device=device)  # CUDA is in use: loopback's ranks get streams of their own
    for part in given.part or PARTS:
        run, share = PARTS[part]
        session.begin(part, 1.0 if given.part and len(given.part) == 1 else share)
        run(session)
    print("\n".join([f"{name}, rows in {path}", *summary(session.rows)]))
    wrong = [r for r in session.rows if r.get("right") is False]
    return 1 if wrong else 0


def summary(rows: list[Row]) -> list[str]:
    checks = [r for r in rows if r.get("part") == "correctness" and "plan" in r]
    right = sum(r.get("right") is True for r in checks)
    lines = [f"correctness: {right} of {len(checks)} right"]
    lines += [
        f"  wrong: {r['plan']} {r['mask']} {r['heads']}" for r in checks if r.get("right") is False
    ]
    lines += ["executor against one call (share of its speed), peak / planned memory"]
    for r in (r for r in rows if r.get("part") == "executor" and "forward_share" in r):
        ratios = [r[f"{x}_peak_bytes"] / r[f"{x}_planned_bytes"] for x in ("forward", "backward")]
        lines.append(
            f"  {r['kernel']} {r['mask']} {r['heads']}: forward {r['forward_share']:.3f}, "
            f"backward {r['backward_share']:.3f}; memory {ratios[0]:.2f}, {ratios[1]:.2f}"
        )
    lines += [
        "kernels, TFLOP/s forward / backward",
        *kernels.summary(rows),
        "graphs, eager / replayed",
    ]
    for r in (r for r in rows if r.get("part") == "graphs" and "forward_gain" in r):
        lines.append(
            f"  {r['kernel']} {r['num_tokens']} on {r['world_size']}: "
            f"forward {r['forward_gain']:.2f}, backward {r['backward_gain']:.2f}"
        )
    lines += ["loopback, ms of both passes"]
    for r in (r for r in rows if r.get("part") == "scaling" and "both_passes_ms" in r):
        graph = " graph" if r["graph"] else ""
        lines.append(f"  {r['plan']}{graph}: {r['both_passes_ms']}")
    lines += [f"failed: {r['part']} {r['error']}" for r in rows if "error" in r]
    skipped = sum("skipped" in r for r in rows)
    return [*lines, f"{skipped} cases skipped for time"] if skipped else lines


if __name__ == "__main__":
    sys.exit(main())

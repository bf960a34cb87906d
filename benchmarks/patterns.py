"""All 14 patterns: bytes in forward of tiled, ring, zigzag mesh, needed, and the reference.

Of actual plans after pruning, mean over ranks and busiest receiver, in units of a ring that sends
all keys to everybody. Areas: largest over mean.

    python benchmarks/patterns.py [--ranks 16] [--tokens 1024] [--kv-heads 64] [--json]
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np

import tilewise as tw
from benchmarks.documents import HEAD_DIM, HEADS, work_on
from benchmarks.hypergraph import reference
from tilewise.arguments import require_range
from tilewise_tools.mask_report.figures import Moved, moved
from tilewise_tools.naming import Parser, run_script, whole_number

CHUNKS = 8  # of a rank, for the reference


def figures(found: Moved, ring: float) -> dict[str, float]:
    return {
        "mean": float(np.mean(found.sent)) / ring,
        "received": max(found.received) / ring,
        "area": found.imbalance,
    }


def row(name: str, n: int, tokens: int, num_kv_heads: int) -> dict[str, Any]:
    num_tokens, kv_bytes = tokens * n, 2 * num_kv_heads / HEADS
    row_bytes = HEADS * HEAD_DIM * 2
    ring = (n - 1) * kv_bytes * tokens * row_bytes
    density = 0.2 if name.startswith("block_sparse") else None
    mask = tw.masks.random(name, num_tokens, seed=0, density=density)
    start = time.process_time()
    layout = tw.tiled_layout(mask, num_tokens, n, kv_bytes=kv_bytes)
    plan = tw.tiled(mask, layout, kv_bytes=kv_bytes)
    seconds = time.process_time() - start
    found = {"tiled": moved(plan, work_on(mask, layout, num_kv_heads))}
    balanced = tw.balanced(mask, num_tokens, n)
    found["needed"] = moved(tw.needed(mask, balanced), work_on(mask, balanced, num_kv_heads))
    work = work_on(mask, tw.zigzag(num_tokens, n), num_kv_heads)
    found["ring"] = moved(tw.ring(n), work)
    meshes = [moved(tw.mesh(n, q_tile=a), work) for a in range(2, n) if n % a == 0]
    if meshes:
        found["mesh"] = min(meshes, key=lambda x: sum(x.sent))
    shares: dict[str, Any] = {who: figures(x, ring) for who, x in found.items()}
    try:
        other = reference(mask, num_tokens, n, kv_bytes, chunk=tokens // CHUNKS)
    except ImportError:
        pass
    else:
        received = other.received * row_bytes / ring
        shares["reference"] = {
            "mean": float(received.mean()),
            "received": float(received.max()),
            "area": float(other.areas.max() / other.areas.mean()),
        }
    return {"mask": name, "seconds": seconds, **shares}


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=whole_number, default=16)
    parser.add_argument("--tokens", type=whole_number, default=1024)
    parser.add_argument("--kv-heads", type=whole_number, default=64)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    require_range("--ranks", options.ranks, least=2)
    if options.tokens % CHUNKS:
        parser.error(
            f"--tokens ({options.tokens}) must be a multiple of {CHUNKS}, chunks of a rank"
        )
    rows = [row(m, options.ranks, options.tokens, options.kv_heads) for m in tw.masks.NAMES]
    if options.json:
        print(json.dumps(rows))
        return
    columns = ("tiled", "reference", "needed", "ring", "mesh")
    print("| mask | " + " | ".join(columns) + " | seconds |")
    print("|" + "---|" * (len(columns) + 2))
    for x in rows:
        cells = [
            f"{x[c]['mean']:.3f} {x[c]['received']:.3f} ({x[c]['area']:.2f})" if c in x else ""
            for c in columns
        ]
        print(f"| {x['mask']} | " + " | ".join(cells) + f" | {x['seconds']:.1f} |")


if __name__ == "__main__":
    run_script(main, world_size="--ranks", num_tokens="--tokens", num_kv_heads="--kv-heads")

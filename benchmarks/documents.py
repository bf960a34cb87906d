"""Causal documents: bytes in forward of the tiled plan, ring, zigzag mesh, needed and a reference.

Everything is counted of actual plans, in units of a ring that sends all keys to everybody: the
mean over ranks, and the busiest sender and receiver. The reference (hypergraph.py) needs the extra
`partition`; without it the figures that tests keep of it are taken.

    python benchmarks/documents.py [--ranks 8,64,96] [--seeds 5] [--no-mesh] [--json]
    python benchmarks/documents.py --reference > tests/strategies/documents_reference.json
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import tilewise as tw
from benchmarks.hypergraph import reference
from tilewise.arguments import require_range
from tilewise_tools.mask_report.figures import Moved, moved
from tilewise_tools.naming import Parser, run_script, whole_number, whole_numbers

KEPT = Path(__file__).parents[1] / "tests" / "strategies" / "documents_reference.json"
TOKENS, HEADS, HEAD_DIM = 8192, 64, 128  # tokens of a rank
WORKLOADS = {  # corpus, longest document as a share of the sequence, mix
    "prolong512k": ("prolong512k", 4, 0.0),
    "pile": ("pile", 4, 0.0),
    "prolong512k, mix": ("prolong512k", 1, 0.6),
    "pile, mix": ("pile", 1, 0.6),
}


def draw(workload: str, n: int, seed: int) -> tuple[int, ...]:
    corpus, share, mix = WORKLOADS[workload]
    return tw.lengths.sample(corpus, TOKENS * n, seed=seed, cap=TOKENS * n // share, mix=mix)


def work_on(mask: tw.masks.Mask, layout: tw.Layout, num_kv_heads: int) -> tw.Workload:
    return tw.Workload(
        num_tokens=layout.num_tokens,
        num_heads=HEADS,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        mask=mask,
        layout=layout,
    )


def tiled(mask: tw.masks.Mask, n: int, num_kv_heads: int) -> dict[str, Any]:
    """The tiled plan's figures, and the seconds of planning with one rank's program."""
    kv_bytes = 2 * num_kv_heads / HEADS
    start = time.process_time()
    layout = tw.tiled_layout(mask, TOKENS * n, n, kv_bytes=kv_bytes)
    plan = tw.tiled(mask, layout, kv_bytes=kv_bytes)
    plan.program(0)
    seconds = time.process_time() - start
    assert max(layout.sizes) == min(layout.sizes)
    found = moved(plan, work_on(mask, layout, num_kv_heads))
    return {**figures(found), "area": found.imbalance, "seconds": seconds}


def figures(found: Moved) -> dict[str, Any]:
    return {
        "mean": float(np.mean(found.sent)),
        "received": int(max(found.received)),
        "sent": int(max(found.sent)),
    }


def others(
    mask: tw.masks.Mask, n: int, num_kv_heads: int, mesh: bool
) -> Iterator[tuple[str, dict]]:
    layout = tw.balanced(mask, TOKENS * n, n)
    yield "needed", figures(moved(tw.needed(mask, layout), work_on(mask, layout, num_kv_heads)))
    if not mesh:
        return
    work = work_on(mask, tw.zigzag(TOKENS * n, n), num_kv_heads)
    yield "ring", figures(moved(tw.ring(n), work))
    best = (n * num_kv_heads / HEADS) ** 0.5
    tiles = sorted((a for a in range(2, n) if n % a == 0), key=lambda a: abs(np.log(a / best)))[:2]
    meshes = [figures(moved(tw.mesh(n, q_tile=a), work)) for a in tiles]
    if meshes:
        yield "mesh", min(meshes, key=lambda row: row["mean"])


def row(workload: str, n: int, num_kv_heads: int, seed: int, mesh: bool) -> dict[str, Any]:
    """All figures of one draw, bytes as shares of the ring's."""
    mask = tw.masks.causal_document(draw(workload, n, seed))
    row_bytes, kv_bytes = HEADS * HEAD_DIM * 2, 2 * num_kv_heads / HEADS
    ring = (n - 1) * kv_bytes * TOKENS * row_bytes
    found: dict[str, dict] = {"tiled": tiled(mask, n, num_kv_heads)}
    found.update(others(mask, n, num_kv_heads, mesh))
    shares = {
        who: {k: v if k in ("area", "seconds") else v / ring for k, v in values.items()}
        for who, values in found.items()
    }
    kept = json.loads(KEPT.read_text()).get(key_of(n, workload, num_kv_heads, seed))
    with suppress(ImportError):
        kept = kept or reference_shares(mask, n, num_kv_heads)
    if kept:
        shares["reference"] = dict(zip(("mean", "received"), kept, strict=True))
    return {"documents": workload, "ranks": n, "kv_heads": num_kv_heads, "seed": seed, **shares}


def key_of(n: int, workload: str, num_kv_heads: int, seed: int) -> str:
    return f"{n}|{workload}|{num_kv_heads}|{seed}"


def reference_shares(mask: tw.masks.Mask, n: int, num_kv_heads: int) -> list[float]:
    """Mean and busiest receiver of the reference."""
    kv_bytes = 2 * num_kv_heads / HEADS
    shares = reference(mask, TOKENS * n, n, kv_bytes).received / ((n - 1) * kv_bytes * TOKENS)
    return [round(float(x), 5) for x in (shares.mean(), shares.max())]


def span(values: list[float]) -> str:
    return f"{min(values):.3f}-{max(values):.3f}" if values else ""


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """One line for each workload, world size and heads, over its seeds: means, the busiest rank
    (sending or receiving), and the worst of the seeds against the reference."""
    columns = ("tiled", "reference", "needed", "ring", "mesh")
    heads = ["documents", "ranks", "heads", *columns, "of reference", "busiest", "of reference"]
    yield "| " + " | ".join([*heads, "area", "seconds"]) + " |"
    yield "|" + "---|" * (len(heads) + 2)
    keys = dict.fromkeys((r["documents"], r["ranks"], r["kv_heads"]) for r in rows)
    for key in keys:
        mine = [r for r in rows if (r["documents"], r["ranks"], r["kv_heads"]) == key]
        means = [span([r[who]["mean"] for r in mine if who in r]) for who in columns]
        busiest = [max(r["tiled"]["sent"], r["tiled"]["received"]) for r in mine]
        ratios = [
            (r["tiled"]["mean"] / r["reference"]["mean"], most / r["reference"]["received"])
            for r, most in zip(mine, busiest, strict=True)
            if "reference" in r
        ]
        worst = [f"{max(x):.2f}" for x in zip(*ratios, strict=True)] or ["", ""]
        area, seconds = (max(r["tiled"][x] for r in mine) for x in ("area", "seconds"))
        cells = [key[0], key[1], f"{HEADS}:{key[2]}", *means, worst[0], span(busiest), worst[1]]
        yield "| " + " | ".join(map(str, cells)) + f" | {area:.3f} | {seconds:.2f} |"


def references(ranks: list[int], seeds: int) -> dict[str, list[float]]:
    """What tests compare with."""
    return {
        key_of(n, workload, num_kv_heads, seed): reference_shares(
            tw.masks.causal_document(draw(workload, n, seed)), n, num_kv_heads
        )
        for n in ranks
        for workload in WORKLOADS
        for num_kv_heads in (64, 8)
        for seed in range(seeds)
    }


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=whole_numbers, default="8,64,96")
    parser.add_argument("--seeds", type=whole_number, default=5)
    parser.add_argument("--no-mesh", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--reference", action="store_true")
    options = parser.parse_args()
    ranks = options.ranks
    require_range("--ranks", min(ranks), least=2)
    if options.reference:
        print(json.dumps(references(ranks, options.seeds), indent=0))
        return
    rows = [
        row(workload, n, num_kv_heads, seed, not options.no_mesh)
        for n in ranks
        for workload in WORKLOADS
        for num_kv_heads in (64, 8)
        for seed in range(options.seeds)
    ]
    for line in table(rows) if not options.json else [json.dumps(rows)]:
        print(line)


if __name__ == "__main__":
    run_script(main)

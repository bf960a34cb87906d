"""Layouts compared: areas, tokens and bytes when every rank computes its own queries.

Per mask and layout: largest over mean area; mean and largest bytes received in forward by `needed`,
in units of a ring that sends all keys to everybody; ranges a rank owns at most.

    python benchmarks/balance.py [--ranks 16] [--tokens 4096] [--json]
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

import tilewise as tw
from tilewise.arguments import require_range
from tilewise.layouts.balanced import layout_of
from tilewise.masks.components import row_areas
from tilewise_tools.mask_report.figures import moved
from tilewise_tools.naming import Parser, run_script, whole_number

CHUNK = 128
LAYOUTS = ("contiguous", "zigzag", "striped", "heaviest first", "balanced")


def heaviest_first(mask: tw.masks.Mask, num_tokens: int, n: int) -> tw.Layout:
    """Chunks by descending area, each to the rank with the least of those that have room."""
    if num_tokens % (n * CHUNK):
        raise ValueError(f"num_tokens ({num_tokens // n}) must be a multiple of {CHUNK} for a rank")
    areas = row_areas(mask, num_tokens).reshape(-1, CHUNK).sum(1)
    load, room = np.zeros(n), np.full(n, num_tokens // n // CHUNK)
    owned = []
    for chunk in np.argsort(-areas, kind="stable").tolist():
        rank = int(np.where(room > 0, load, np.inf).argmin())
        load[rank] += areas[chunk]
        room[rank] -= 1
        owned.append((chunk * CHUNK, (chunk + 1) * CHUNK, rank))
    return layout_of(num_tokens, n, owned, "heaviest first")


def layout(kind: str, mask: tw.masks.Mask, num_tokens: int, n: int) -> tw.Layout:
    match kind:
        case "balanced":
            return tw.balanced(mask, num_tokens, n)
        case "heaviest first":
            return heaviest_first(mask, num_tokens, n)
    plain = {"contiguous": tw.contiguous, "zigzag": tw.zigzag, "striped": tw.striped}
    return plain[kind](num_tokens, n)


def row(name: str, n: int, tokens: int) -> dict[str, Any]:
    num_tokens = n * tokens
    density = 0.2 if name.startswith("block_sparse") else None
    mask = tw.masks.random(name, num_tokens, seed=0, density=density)
    found: dict[str, Any] = {"mask": name}
    for kind in LAYOUTS:
        here = layout(kind, mask, num_tokens, n)
        work = tw.Workload(num_tokens, 1, 1, 128, mask=mask, layout=here)
        seen = moved(tw.needed(mask, here), work)
        ring = (n - 1) * tokens * 2 * 128 * 2
        found[kind] = {
            "area": seen.imbalance,
            "mean": sum(seen.received) / n / ring,
            "busiest": max(seen.received) / ring,
            "ranges": max(map(len, here.runs)),
        }
    return found


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=whole_number, default=16)
    parser.add_argument("--tokens", type=whole_number, default=4096)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    require_range("--ranks", options.ranks, least=2)
    rows = [row(name, options.ranks, options.tokens) for name in tw.masks.NAMES]
    if options.json:
        print(json.dumps(rows))
        return
    print("| mask | " + " | ".join(LAYOUTS) + " |")
    print("|" + "---|" * (len(LAYOUTS) + 1))
    for x in rows:
        cells = [f"{x[k]['area']:.2f} {x[k]['mean']:.2f} {x[k]['busiest']:.2f}" for k in LAYOUTS]
        print(f"| {x['mask']} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    run_script(main, world_size="--ranks", num_tokens="--tokens")

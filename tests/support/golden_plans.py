"""The plans whose grids are kept in tests/golden, one file each.

Run `python tests/support/golden_plans.py` to write the files anew, then read what changed.
"""

from __future__ import annotations

from pathlib import Path

import tilewise as tw

FOLDER = Path(__file__).parents[1] / "strategies" / "golden"

GOLDEN = {
    "ring_4": tw.ring(4),
    "ring_4_moves_q": tw.ring(4, moves="q"),
    "all_gather_3": tw.all_gather(3),
    "double_ring_2x2": tw.double_ring(2, 2),
    "double_ring_2x3": tw.double_ring(2, 3),
    "balanced_ring_4": tw.balanced_ring(4),
    "balanced_ring_5": tw.balanced_ring(5),
    "balanced_ring_5_causal": tw.prune(tw.balanced_ring(5), tw.Causal(), tw.contiguous(20, 5)),
    "attention2d_2x2": tw.attention2d(2, 2),
    "attention2d_2x3": tw.attention2d(2, 3),
    "hierarchical_ring_2_moves_q_ring_2": tw.hierarchical(tw.ring(2, moves="q"), tw.ring(2)),
    "hierarchical_mesh_4_ring_2": tw.hierarchical(tw.mesh(4, q_tile=2), tw.ring(2)),
    "mesh_4_q_tile_2": tw.mesh(4, q_tile=2),
    "mesh_9_q_tile_3_greedy": tw.mesh(9, q_tile=3, schedule="greedy"),
    "mesh_9_q_tile_3_eager": tw.mesh(9, q_tile=3, schedule="eager"),
    "mesh_9_q_tile_3_kv_first": tw.mesh(9, q_tile=3, schedule="kv_first"),
    "mesh_9_q_tile_3_paper": tw.mesh(9, q_tile=3, schedule="paper"),
    "mesh_9_q_tile_3_backward": tw.mesh(9, q_tile=3, backward=True),
    "mesh_6_q_tile_2_gather": tw.mesh(6, q_tile=2, schedule="gather"),
    "mesh_4_q_tile_2_causal_zigzag": tw.prune(tw.mesh(4, q_tile=2), tw.Causal(), tw.zigzag(32, 4)),
    "ulysses_3": tw.ulysses(3),
    "ulysses_2_ring_2": tw.ulysses(2, inner=tw.ring(2)),
    "ulysses_2_mesh_4": tw.ulysses(2, inner=tw.mesh(4, q_tile=2)),
    "tree_5": tw.tree(5),
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.txt"):
        path.unlink()
    for name, plan in GOLDEN.items():
        (FOLDER / f"{name}.txt").write_text(tw.show(plan))


if __name__ == "__main__":
    main()

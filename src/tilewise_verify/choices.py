"""Facts about indexers: modules that return the positions of the keys that each query attends to.

An indexer returns whole numbers, [..., queries, k], and calls topk on its scores. If the split one
scores fewer keys than there are, those of its rank, it restarts there; if it chooses other keys
whose scores are the same, the two models break ties in other ways.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise_verify.comparison import Comparison
from tilewise_verify.records import Record, rows_of_one
from tilewise_verify.tables import some

HIDDEN = -1e30  # a score of a key that its query may not choose
SAME_SCORE = 64  # times the rounding of the largest score of a query


def facts_of_choice(comparison: Comparison, layer: str) -> dict[str, Any]:
    """Facts of the first indexer in a layer that chooses other keys in the split model."""
    num_tokens = len(comparison.counted)
    for name, chosen in comparison.whole.tables["choice"].items():
        if layer and name != layer and not name.startswith(f"{layer}."):
            continue
        scores = _rows(comparison.whole, "scores", name, num_tokens)
        table = rows_of_one(chosen, num_tokens)
        if scores is None or table is None or scores.shape[1] != num_tokens:
            continue
        if facts := _facts(comparison, name, _as_table(table, num_tokens), scores):
            return facts
    return {}


def _facts(comparison: Comparison, name: str, want: Tensor, scores: Tensor) -> dict[str, Any]:
    """Facts of one indexer.

    Args:
        want: whether the unsplit model chooses a key, bool [queries, keys].
        scores: of the unsplit model, [queries, keys].
    """
    num_tokens, others, visible = len(want), list[tuple[int, float, float]](), scores > HIDDEN
    for rank, (record, positions) in enumerate(
        zip(comparison.ranks, comparison.positions, strict=True)
    ):
        table = record.tables["choice"].get(name)
        mine = None if table is None else rows_of_one(table, len(positions))
        if mine is None:
            return {}
        own_scores = _rows(record, "scores", name, len(positions))
        if own_scores is not None and own_scores.shape[1] == len(positions) < num_tokens:
            foreign = want & visible
            foreign[:, positions[positions >= 0]] = False
            queries = positions[positions >= 0]
            lost = queries[foreign[queries].any(1)].tolist()
            if lost:
                return {
                    "index_alone": f"rank {rank} scores {len(positions)} keys, its own, of "
                    f"{num_tokens}, and the unsplit {name} chooses others for {len(lost)} of its "
                    f"queries, such as those at {some(lost, 4)}"
                }
            continue
        got = _as_table(mine, num_tokens)
        for row, query in enumerate(positions.tolist()):
            if query < 0 or not comparison.counted[query]:
                continue
            differ = (got[row] != want[query]) & visible[query]
            if differ.any():
                found = scores[query][differ]
                others.append((query, float(found.min()), float(found.max())))
    limits = SAME_SCORE * comparison.eps * scores.masked_fill(~visible, 0.0).abs().amax(1)
    if not others or any(most - least > limits[query] for query, least, most in others):
        return {}
    query, score, _ = others[0]
    return {
        "tied_choice": f"{len(others)} queries choose other keys than the unsplit {name}, of the "
        f"same scores: the one at {query} among keys that score {score:.4g}"
    }


def _rows(record: Record, kind: str, name: str, num_rows: int) -> Tensor | None:
    table = record.tables[kind].get(name)
    return None if table is None else rows_of_one(table, num_rows)


def _as_table(chosen: Tensor, num_keys: int) -> Tensor:
    """Chosen positions [queries, k] as bool [queries, keys]; others than keys are left out."""
    places = torch.where((chosen >= 0) & (chosen < num_keys), chosen, num_keys).long()
    table = torch.zeros(len(chosen), num_keys + 1, dtype=torch.bool)
    return table.scatter(1, places, True)[:, :num_keys]

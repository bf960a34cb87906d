"""The benchmark of layers with a state: every way but the kernel alone is right; committed rows."""

from __future__ import annotations

import json

import pytest

import tilewise as tw
from tilewise.planning import StateLayer
from tilewise.tokens.moves import scan_moves
from tilewise.transport.processes import gather_yields

pytest.importorskip("transformers", reason="needs transformers, of the extra hf")

from benchmarks.hybrid_layers import (
    DIM,
    HEADS,
    HOSTS,
    KINDS,
    LAB_TOKENS,
    ROWS,
    measured,
    rows_of,
    serve,
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ways_are_right_and_the_kernel_alone_is_not(kind):
    ways = ("local", "tilewise", "tilewise zigzag", "gather")
    found = measured(gather_yields(2, serve, (kind, 128)), ways, 1, None)
    assert found["local"]["error"] > 1e-3
    assert all(found[way]["error"] < 1e-5 for way in ways[1:])
    rows = rows_of(found, kind, 2, 128, "loopback")
    assert [row["way"] for row in rows] == [*ways] and rows[0]["passes"] == 1


def test_committed_rows_count_bytes_of_a_scan_that_do_not_grow_with_length():
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    ours = [row for row in rows if row["way"].startswith("tilewise")]
    assert all(row["transformers_version"] and row["ringmaster_version"] for row in rows)
    for kind, decay in zip(KINDS, ("matrix", "number"), strict=True):
        message = StateLayer(HEADS, DIM, DIM, decay).scan_bytes
        rounds = scan_moves(tw.contiguous(HOSTS, HOSTS), (0, HOSTS))
        by_rank = zip(
            *(map(sum, zip(*one.volume(message), strict=True)) for one in rounds), strict=True
        )
        counted = [row for row in ours if (row["layer"], row["way"]) == (kind, "tilewise")]
        counted = {r["tokens_per_rank"]: r["sent_bytes"] for r in counted if "sent_bytes" in r}
        assert set(counted) == set(LAB_TOKENS)
        assert max(counted.values()) < 1.02 * min(counted.values())
        assert max(map(sum, by_rank)) == pytest.approx(max(counted.values()), rel=0.1)

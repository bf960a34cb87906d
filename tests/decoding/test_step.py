"""What a decoding step reads of the cache: how many calls, and of which cells."""

from typing import Any

import numpy as np
import pytest
import torch
from support.bound_passes import Counting, Exempt

import tilewise as tw
from tilewise.decoding.step import QuerySpan, RankReads, reads
from tilewise.kernels.call_masks import call_mask
from tilewise.tiles.call_rows import CallStyle

MASKS = {
    "causal": tw.Causal(),
    "window": tw.Window(4, 0),
    "sinks": tw.Window(4, 0) | tw.Slices([((0, 40), (0, 3), "full")]) & tw.Causal(),
}
PLACES = [QuerySpan(10, 14), QuerySpan(10, 14), QuerySpan(25, 29), QuerySpan(0, 0)]


def cells(mask: tw.Mask, cut: CallStyle, here: RankReads) -> tuple[int, np.ndarray]:
    """How many calls there are, and how often each has [sequence, query, cached row]."""
    count, calls = np.zeros((len(PLACES), 4, 40), int), 0
    for read in reads(mask, PLACES, here, (4, 2), cut):
        q, k = (np.concatenate([np.arange(*r) for r in rows]) for rows in read.call[:2])
        calls += 1
        count[read.sequences, q[:, None], k] += call_mask(read.call).numpy()
    return calls, count


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_kernels_of_whole_tiles_get_one_call_for_neighbours_alike(mask):
    here = RankReads(1, 3)
    calls, count = cells(mask, CallStyle(whole_tile=True), here)
    assert calls == 2
    many, same = cells(mask, CallStyle(square_causal=True), here)
    assert many >= calls and (same == count).all()
    for b, place in enumerate(PLACES):
        positions = here.positions(place.stop)
        want = mask.dense(range(place.start, place.stop), positions)
        assert (count[b, : len(want), : len(positions)] == want).all()
        assert count[b].sum() == want.sum()


def test_a_step_asks_the_device_for_nothing():
    counting = Counting()
    kernel = Exempt(tw.kernel("cpu"), counting)

    def on_rank(rank: int, group: Any) -> None:
        options = {"num_kv_heads": 2, "head_dim": 8, "batch": 2, "group": group, "kernel": kernel}
        made = tw.KVCache(16, **options)
        for counts in ((5, 1), (1, 1), (1, 0)):
            q, k = torch.ones(2, max(counts), 4, 8), torch.ones(2, max(counts), 2, 8)
            with counting:
                made.decode(q, k, k, counts=counts)

    tw.loopback(3, on_rank)
    assert counting.allocated and not counting.asked

"""Chunks of growing sequences: their positions, and their mask against its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise.decoding.chunk import Chunk
from tilewise.masks.sequences import Growing

FIRST = tw.Slices([((0, 40), (0, 3), "full")])
FAR = tw.Window(4, 0) | FIRST & tw.Causal()


def test_a_chunks_queries_and_keys_meet_as_the_mask_says():
    chunk = Chunk((3, 0, 6), (2, 4, 0), 3)
    for within in (tw.Causal(), tw.Window(2, 0), FAR):
        mask = chunk.mask(within)
        want = np.zeros((6, 5 + 4 + 6), bool)
        want[:2, :5] = within.dense(range(3, 5), range(5))
        want[2:, 5:9] = within.dense(range(4), range(4))
        assert (mask.dense(range(6), range(15)) == want).all()
        assert mask.area((0, 6), (0, 15)) == want.sum()
        cells = mask.areas(range(7), range(16))
        assert (cells == want).all(), "by its strips"
        assert mask.coverage([0, 2], [0, 4])[0, 0] in (1, 2)
    with pytest.raises(ValueError, match="6 queries and 15 keys, but there are 6 and 6"):
        Growing(tw.Causal(), (3, 0, 6), (2, 4, 0)).check_tokens(6)
    positions = torch.cat([chunk.position_ids(r) for r in range(3)])
    assert sorted(positions.tolist()) == [0, 1, 2, 3, 3, 4]

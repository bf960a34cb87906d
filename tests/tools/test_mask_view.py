"""Pictures of masks: every cell and every colour means what it says."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

import tilewise as tw
from tilewise_tools.mask_report.view import colours, draw, owner_of_tokens, painted, view


def test_cells_are_the_allowed_share_of_their_pairs():
    mask, num_tokens = tw.masks.random("share_question", 60, seed=3), 60
    seen = view(mask, tw.zigzag(num_tokens, 4), 7)
    dense = mask.dense(range(num_tokens), range(num_tokens))
    for i, j in np.ndindex(seen.shares.shape):
        (a, b), (c, d) = seen.edges[i : i + 2], seen.edges[j : j + 2]
        assert seen.shares[i, j] == pytest.approx(dense[a:b, c:d].mean())
    assert ((seen.ranks == -1) == (seen.shares == 0)).all()


@pytest.mark.parametrize("make", [tw.contiguous, tw.zigzag, tw.striped])
def test_cells_of_one_token_belong_to_its_owner(make):
    layout = make(40, 3)
    seen = view(tw.Causal(), layout, 100)
    assert (seen.owners == owner_of_tokens(layout)).all()
    allowed = tw.Causal().dense(range(40), range(40))
    assert (seen.ranks == np.where(allowed, seen.owners[:, None], -1)).all()


@pytest.mark.parametrize("make", [tw.contiguous, tw.zigzag, tw.striped])
def test_every_rank_gets_its_share_of_the_strip(make):
    seen = view(tw.Full(), make(8000, 8), 64)
    assert (np.bincount(seen.owners) == 8).all()


def test_a_plan_says_who_computes_a_cell():
    mask, n = tw.Causal(), 6
    layout = tw.tiled_layout(mask, 24 * n, n)
    plan = tw.tiled(mask, layout, kv_bytes=2.0)
    seen = view(mask, layout, 24 * n, plan)
    sides = layout.cut([home for (home,) in plan.owners[0]], plan.cuts or ())
    shard = owner_of_tokens(sides)
    for rank in range(n):
        tiles = [tile for step in plan.rank_steps(rank) for tile in step.tiles]
        mine = np.zeros((sides.world_size, sides.world_size), bool)
        for tile in tiles:
            mine[np.ix_(tile.q, tile.kv)] = True
        computed = mine[np.ix_(shard, shard)] & mask.dense(range(24 * n), range(24 * n))
        assert ((seen.ranks == rank) == computed).all()


@pytest.mark.parametrize("n", [1, 2, 8, 10, 11, 64])
def test_ranks_have_colours_of_their_own(n: int):
    found = colours(n)
    assert found.shape == (n, 3) and ((found >= 0) & (found <= 1)).all()
    apart = np.abs(found[:, None] - found[None]).sum(2) + 9 * np.eye(n)
    assert apart.min() > (0.2 if n <= 11 else 0.01)


def test_empty_cells_are_white_and_allowed_ones_are_not():
    seen = view(tw.Window(0, 0), tw.contiguous(400, 4), 20)
    pixels = painted(seen, 4)
    assert (pixels[seen.shares == 0] == 1).all()
    assert (pixels[seen.shares > 0].min(-1) < 0.95).all()


def test_a_picture_is_small_and_the_same_every_time(tmp_path: Path):
    seen = view(tw.masks.random("share_question", 1 << 15, seed=1), tw.zigzag(1 << 15, 64), 360)
    paths = tmp_path / "a.png", tmp_path / "b.png"
    for path in paths:
        draw(seen, 64, ("name", "one", "two"), path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert paths[0].stat().st_size < 60_000
    height, width, _ = image.imread(paths[0]).shape
    assert 300 <= width <= 800 and 300 <= height <= 800

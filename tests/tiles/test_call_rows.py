"""Which rows of which shard calls read: the same whether or not tiles that are alike share them."""

import numpy as np
import pytest

import tilewise as tw
from tilewise.plan.ir import Tile
from tilewise.plan.payload import head_groups
from tilewise.tiles import call_rows
from tilewise.tiles.call_rows import CallStyle, TileCalls

N, ROWS = 6, 8


def _plain(value):
    """Calls as values that compare: arrays as lists."""
    if isinstance(value, tuple):
        return [_plain(x) for x in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("layout", [tw.zigzag(N * ROWS, N), tw.contiguous(N * ROWS, N)], ids=repr)
@pytest.mark.parametrize("mask", [tw.Full(), tw.Causal()], ids=repr)
@pytest.mark.parametrize("cut", [(False, False), (True, False), (False, True)])
def test_tiles_whose_positions_have_one_order_share_their_calls(layout, mask, cut, monkeypatch):
    table = TileCalls((layout, layout), mask, head_groups(1, 1, 1), CallStyle(*cut))
    whole, half = ((0, ROWS),), ((ROWS // 2, ROWS),)
    cases = [
        (Tile((q, other), (kv,)), ((whole, some), (rest,)))
        for q, other in ((0, 1), (1, 0), (2, 5), (5, 3))
        for kv in range(N)
        for some in (whole, half)
        for rest in (whole, half, ((0, 2), (5, 6)))
    ]
    shared = [_plain(tuple(table.calls(*case))) for case in cases]
    hits = call_rows._long.cache_info().hits
    monkeypatch.setattr(call_rows, "_spans", lambda *_: None)
    assert [_plain(tuple(table.calls(*case))) for case in cases] == shared
    assert hits

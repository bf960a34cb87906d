"""What an indexed layer sends and holds: by the formulas of docs/indexed.md, at full length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.drawn_layouts import normal
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tilewise as tw
from tilewise.indexed import choice
from tilewise.indexed.visible import VisibleKeys, visible_keys

N, RANKS, K, INDEX_WIDTH, HEADS, WIDTH = 1 << 16, 8, 16, 3, 1, 2


def near_and_far(rows: np.ndarray) -> Tensor:
    """Visible keys of each query, [rows, K]: some right before it, most anywhere before."""
    make = np.random.default_rng(0)
    far = (make.random((len(rows), K - 4)) * np.maximum(1, rows[:, None] - 4)).astype(np.int64)
    near = rows[:, None] - np.arange(4)
    found = np.sort(np.concatenate([far, np.maximum(near, -1)], 1), 1)
    found[:, 1:][found[:, 1:] == found[:, :-1]] = -1
    return torch.from_numpy(np.minimum(found, rows[:, None]))


@pytest.mark.parametrize("make", [tw.contiguous, tw.zigzag])
def test_bytes_of_a_layer_at_64k_tokens_on_8_ranks(make: Any, monkeypatch: pytest.MonkeyPatch):
    """At most 1.05 of the formula; scores, which take no bytes, are left out."""
    layout = make(N, RANKS)
    monkeypatch.setattr(choice, "chosen_among", lambda *_: None)
    index_bytes, row_bytes = 4 * INDEX_WIDTH, 4 * 2 * HEADS * WIDTH

    def run(rank: int, group: Any) -> tuple[list[int], int, int]:
        cp = tw.ContextParallel(group, num_tokens=N, layout=layout, mask=tw.Causal())
        rows, sent = layout.rows(rank), [group.bytes_sent]
        found = near_and_far(rows)
        draws = [(INDEX_WIDTH,), (HEADS, WIDTH), (HEADS, WIDTH), (HEADS, WIDTH)]
        index, *own = (torch.randn(len(rows), *shape) for shape in draws)
        q, k, v = (x.requires_grad_() for x in own)
        cp.index(index[:, None], index, index[:, :1], K)
        sent.append(group.bytes_sent)
        out = cp.attention(q, k, v, mask=tw.Chosen(found))
        sent.append(group.bytes_sent)
        out.sum().backward()
        sent.append(group.bytes_sent)
        named = np.unique(found[found >= 0].numpy())
        foreign = len(named) - len(np.intersect1d(named, rows))
        visible = int(rows.max()) + 1 - int((rows <= rows.max()).sum())
        return np.diff(sent).tolist(), foreign, visible

    counts, foreign, visible = zip(*tw.loopback(RANKS, run), strict=True)
    index, forward, backward = (sum(x) for x in zip(*counts, strict=True))
    assert sum(foreign) < 0.75 * N * (RANKS - 1)  # else all rows would travel
    assert 0 < index <= 1.05 * index_bytes * sum(visible)
    assert forward <= 1.05 * ((row_bytes + 4) * sum(foreign) + 8 * RANKS * RANKS)
    assert backward <= 1.05 * row_bytes * sum(foreign)
    assert min(forward, backward) > 0.95 * row_bytes * sum(foreign)


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that operations make, of those that read none of `but`."""

    def __init__(self, *but: Tensor) -> None:
        super().__init__()
        self.bytes, self.but = 0, {x.untyped_storage().data_ptr() for x in but}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self.but:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


def test_no_table_of_scores_is_made():
    """The last of 64 ranks, which sees a million keys: one block of its queries."""
    heads, k, few, num_tokens = 2, 32, 64, 1 << 20
    low, high = visible_keys(tw.Causal(), tw.contiguous(num_tokens, 64), 63)
    seen = VisibleKeys(low[:, -few:], high[:, -few:])
    q, keys = normal(few, heads, 16).float(), normal(num_tokens, 16).float()
    with LargestTensor(keys) as largest:
        found = choice.chosen_among(q, keys, torch.ones(few, heads), seen, k)
    assert (found >= 0).all()
    assert largest.bytes <= choice.score_bytes(heads, k) < few * num_tokens * 4

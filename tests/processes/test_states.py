"""States that real processes carry along the sequence, as ringmaster's gloo tests ask of its own.

Those are tests/test_state_passing.py and tests/test_mamba_cp.py of its repository: a linear scan
with gradients, gated linear attention, and Mamba2's states of 2, 4 and 8 ranks.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewise as tw
from processes.launcher import run_processes

T, HEADS, DIM, STATE = 16, 2, 3, 4


def recurrence(decay: Tensor, x: Tensor, b: Tensor, c: Tensor, state: Tensor) -> list[Tensor]:
    """S_t = decay_t S_{t-1} + x_t b_t^T, out_t = S_t c_t: results, all decays, the last state."""
    outs = list[Tensor]()
    for d, row, key, query in zip(decay, x, b, c, strict=True):
        state = d[:, None, None] * state + row[:, :, None] * key[:, None]
        outs.append((state * query[:, None]).sum(-1))
    return [torch.stack(outs), decay.prod(0), state]


def operands() -> list[Tensor]:
    """Of the whole sequence, the same on every rank, leaves of a graph."""
    make = torch.Generator().manual_seed(0)
    sizes = (HEADS,), (HEADS, DIM), (HEADS, STATE), (HEADS, STATE)
    x = [torch.randn(T, *size, generator=make, dtype=torch.float64) for size in sizes]
    return [x[0].sigmoid(), *x[1:]]


def layouts(n: int, zigzag: bool) -> tuple[tw.Layout, tw.Layout]:
    """Of the tokens, and within attention."""
    both = tw.zigzag(T, n), tw.contiguous(T, n)
    return both if zigzag else both[::-1]


def share(rank: int, zigzag: bool) -> tuple[Tensor, ...]:
    """A rank's rows of the result and of every gradient."""
    n = torch.distributed.get_world_size()
    tokens, within = layouts(n, zigzag)
    cp = tw.ContextParallel(
        num_tokens=T,
        mask=tw.Causal(),
        layout=tokens,
        attention_layout=within,
        strategy=tw.ring(n),
    )
    mine = [cp.shard(x, 0).clone().requires_grad_() for x in operands()]
    sizes = [stop - start for start, stop in cp.pieces()]
    pieces = list(zip(*(x.split(sizes) for x in mine), strict=True))
    none = torch.zeros(HEADS, DIM, STATE, dtype=torch.float64)
    alone = [recurrence(*piece, none) for piece in pieces]
    decays, states = (torch.stack([part[i] for part in alone]) for i in (1, 2))
    before = cp.scan(decays, states, dim=0)
    parts = zip(pieces, before, strict=True)
    out = torch.cat([recurrence(*piece, state)[0] for piece, state in parts])
    out = out + cp.attention(mine[3], mine[2], mine[1])
    out.square().sum().backward()
    return out.detach(), *(x.grad for x in mine)  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    ("n", "zigzag"),
    [
        (2, False),
        pytest.param(4, False, marks=pytest.mark.slow),
        (3, True),
        pytest.param(8, False, marks=pytest.mark.slow),
    ],
)
def test_states_pass_every_rank_beside_attention_on_another_layout(n: int, zigzag: bool):
    whole = [x.requires_grad_() for x in operands()]
    none = torch.zeros(HEADS, DIM, STATE, dtype=torch.float64)
    _, x, b, c = whole
    scores = torch.einsum("qhs,khs->hqk", c, b) / STATE**0.5
    weights = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1)
    want = recurrence(*whole, none)[0] + torch.einsum("hqk,khd->qhd", weights, x)
    want.square().sum().backward()
    layout, _ = layouts(n, zigzag)
    columns = zip(*run_processes(n, share, zigzag), strict=True)
    for got, right in zip(columns, [want.detach(), *(x.grad for x in whole)], strict=True):
        assert (layout.unshard(list(got)) - right).abs().max() < 1e-12

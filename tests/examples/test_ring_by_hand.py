"""The ring written by hand as a second oracle: it shares no code with the library."""

import torch
from conformance.oracle import draw
from processes.launcher import run_processes

import tilewise as tw
from examples.ring_by_hand import RingAttention

Tensors = list[torch.Tensor]


def run_both(rank: int, num_ranks: int) -> dict[str, float]:
    """Largest difference of out, dq, dk, dv between both, on this rank."""
    num_tokens = 9 * num_ranks
    shape = (num_tokens, 3, 8)
    x = draw(shape, shape, seed=1)
    layout = tw.contiguous(num_tokens, num_ranks)
    ring = tw.ring(num_ranks)

    def results(attend) -> Tensors:
        operands = [layout.shard(t, rank).clone().requires_grad_() for t in x[:3]]
        out = attend(*operands)
        grads = torch.autograd.grad(out, operands, layout.shard(x.dout, rank))
        return [out.detach(), *grads]

    ours = results(
        lambda q, k, v: tw.attention(q, k, v, plan=ring, layout=layout, mask=tw.Causal())
    )
    by_hand = results(RingAttention.apply)
    names = ("out", "dq", "dk", "dv")
    return {
        name: float((a - b).abs().max()) for name, a, b in zip(names, ours, by_hand, strict=True)
    }


def test_the_ring_agrees_with_one_written_by_hand():
    for differences in run_processes(3, run_both, 3):
        assert max(differences.values()) < 1e-13, differences

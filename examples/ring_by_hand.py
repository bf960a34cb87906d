"""Ring attention by hand: forward and backward in plain torch.distributed, nothing of tilewise.

Causal, contiguous equal shards, as many KV heads as query heads. Each rank keeps its queries and
sees every rank's keys and values pass by. tilewise's tests compare against it; run it as

    torchrun --nproc-per-node 4 examples/ring_by_hand.py
"""

import torch
import torch.distributed as dist


def rotate(tensors):
    """Send these tensors to the next rank, return those of the rank before."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if n == 1:
        return tensors
    arriving = [torch.empty_like(x) for x in tensors]
    works = [dist.irecv(x, (rank - 1) % n) for x in arriving]
    works += [dist.isend(x.contiguous(), (rank + 1) % n) for x in tensors]
    for work in works:
        work.wait()
    return arriving


def scores(q, k, shard):
    """Scaled scores [heads, queries, keys] of this rank's queries and a shard's keys."""
    s = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    rows, columns = torch.arange(len(q)), torch.arange(len(k))
    rows, columns = rows + dist.get_rank() * len(q), columns + shard * len(k)
    return s.masked_fill(columns > rows[:, None], -torch.inf)


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        rank, n = dist.get_rank(), dist.get_world_size()
        out = torch.zeros_like(q).transpose(0, 1)
        lse = out.new_full(out.shape[:2], -torch.inf)
        held = [k, v]
        for step in range(n):
            shard = (rank - step) % n
            if shard <= rank:  # the others lie wholly in the future
                s = scores(q, held[0], shard)
                new = torch.logaddexp(lse, s.logsumexp(-1))
                out = out * (lse - new).exp()[..., None]
                out = out + (s - new[..., None]).exp() @ held[1].transpose(0, 1)
                lse = new
            if step < n - 1:
                held = rotate(held)
        out = out.transpose(0, 1)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        rank, n = dist.get_rank(), dist.get_world_size()
        delta = (out * dout).sum(-1).T[..., None]
        dq, held = torch.zeros_like(q), [k, v, torch.zeros_like(k), torch.zeros_like(v)]
        for step in range(n):
            shard = (rank - step) % n
            if shard <= rank:
                k, v, dk, dv = held
                p = (scores(q, k, shard) - lse[..., None]).exp()
                ds = p * (torch.einsum("qhd,khd->hqk", dout, v) - delta) / q.shape[-1] ** 0.5
                dq = dq + torch.einsum("hqk,khd->qhd", ds, k)
                dk = dk + torch.einsum("hqk,qhd->khd", ds, q)
                dv = dv + torch.einsum("hqk,qhd->khd", p, dout)
                held = [k, v, dk, dv]
            held = rotate(held)  # n times: then the gradients are home
        return dq, held[2], held[3]


def main():
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = torch.randn(4, 16 * n, 2, 8, dtype=torch.float64)
    q, k, v, dout = (x.chunk(n)[rank].clone() for x in whole)
    operands = [x.requires_grad_() for x in (q, k, v)]
    out = RingAttention.apply(*operands)
    grads = torch.autograd.grad(out, operands, dout)
    dense = [x.clone().requires_grad_() for x in whole[:3]]
    heads_first = (x.transpose(0, 1) for x in dense)
    want = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)
    want = want.transpose(0, 1)
    wanted = want, *torch.autograd.grad(want, dense, whole[3])
    for name, x, y in zip(("out", "dq", "dk", "dv"), (out, *grads), wanted, strict=True):
        print(f"rank {rank} {name}: largest error {(x - y.chunk(n)[rank]).abs().max():.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

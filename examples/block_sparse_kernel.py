"""A block-sparse kernel as a plug-in: a call's mask as blocks, and a kernel that works on these.

    tilewise bench kernels --mask block_sparse_uniform --block 64 --density 0.2 --num-tokens 2048 \
        --heads 8:8 --kernel cpu --kernel examples/block_sparse_kernel.py:blocks_of_64

`blocks_of` is what libraries of block-sparse kernels take: for each block of queries, the blocks
of keys that it sees. `attend` and `differentiate` stand in a library's place, in plain torch; a
block that the mask allows in part is masked inside, which most libraries cannot do.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

import tilewise as tw
from tilewise.kernels.call_masks import call_mask
from tilewise.kernels.protocol import Accumulators, AsideKernel, Operands, Scores, accumulator_dtype
from tilewise.tiles.calls import KernelCall
from tilewise.transport import Group


def blocks_of(allowed: Tensor, block: int) -> Tensor:
    """bool [query blocks, key blocks]: whether any pair of the blocks is allowed.

    Args:
        allowed: bool [queries, keys]; the last blocks may be shorter.
    """
    fill = [-size % block for size in allowed.shape]
    padded = torch.nn.functional.pad(allowed, (0, fill[1], 0, fill[0]))
    return padded.unflatten(1, (-1, block)).unflatten(0, (-1, block)).any(-1).any(1)


class BlockSparse(AsideKernel):
    """Work and memory of a row of blocks at a time, over the key blocks that it sees."""

    device, dtypes = "cpu", (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    most_width, square_causal, whole_tile, equal_widths = None, False, True, False

    def __init__(self, block: int):
        self.block, self.name = block, f"blocks of {block}"

    def block_rows(self, call: KernelCall) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows of a block of queries, the keys that it sees, and which pairs are allowed."""
        allowed, size = call_mask(call), self.block
        for at, seen in enumerate(blocks_of(allowed, size)):
            keys = seen.repeat_interleave(size)[: call.num_k].nonzero().flatten()
            rows = slice(at * size, (at + 1) * size)
            if len(keys):
                yield rows, keys, allowed[rows, keys]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, scores: Scores
    ) -> Accumulators:
        dtype = accumulator_dtype(q.dtype)
        out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=dtype)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=dtype)
        for rows, keys, allowed in self.block_rows(call):
            table = _scores(q[rows].to(dtype), k[keys].to(dtype), allowed, scores.scale)
            found = table.logsumexp(-1)
            part = torch.einsum("bhgmn,nbhd->mbhgd", _weights(table, found), v[keys].to(dtype))
            out[rows], lse[rows] = part.flatten(2, 3), found.permute(3, 0, 1, 2).flatten(2)
        return out, lse

    def differentiate(
        self, operands: Operands, call: KernelCall, scores: Scores
    ) -> Iterable[Tensor]:
        dtype = accumulator_dtype(operands.q.dtype)
        q, k, v, dout, lse, delta = (x.to(dtype) for x in operands)
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        grouped = (k.shape[2], -1)  # query heads by the KV head that they read
        for rows, keys, allowed in self.block_rows(call):
            lse_of, delta_of = (
                x[rows].unflatten(2, grouped).permute(1, 2, 3, 0) for x in (lse, delta)
            )
            p = _weights(_scores(q[rows], k[keys], allowed, scores.scale), lse_of)
            dout_of = dout[rows].unflatten(2, grouped)
            dp = torch.einsum("mbhgd,nbhd->bhgmn", dout_of, v[keys])
            ds = p * (dp - delta_of[..., None]) * scores.scale
            dq[rows] = torch.einsum("bhgmn,nbhd->mbhgd", ds, k[keys]).flatten(2, 3)
            q_of = q[rows].unflatten(2, grouped)
            dk.index_add_(0, keys, torch.einsum("bhgmn,mbhgd->nbhd", ds, q_of))
            dv.index_add_(0, keys, torch.einsum("bhgmn,mbhgd->nbhd", p, dout_of))
        return dq, dk, dv


def _scores(q: Tensor, k: Tensor, allowed: Tensor, scale: float) -> Tensor:
    """scale q k^T, -inf where not allowed: [batch, KV heads, query heads of each, rows, keys]."""
    table = torch.einsum("mbhgd,nbhd->bhgmn", q.unflatten(2, (k.shape[2], -1)), k)
    return (table * scale).masked_fill_(~allowed, -torch.inf)


def _weights(table: Tensor, lse: Tensor) -> Tensor:
    """exp(table - lse), 0 on rows whose lse is -inf."""
    return (table - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp_()


blocks_of_64, blocks_of_128 = BlockSparse(64), BlockSparse(128)

if __name__ == "__main__":
    torch.manual_seed(0)
    table = torch.rand(8, 8) < 0.3  # blocks of 64 queries x 64 keys
    mask, layout, plan = tw.masks.block_sparse(table, 64), tw.zigzag(512, 4), tw.mesh(4, q_tile=2)
    q, k, v = torch.randn(3, 512, 4, 32, dtype=torch.float64)

    def attend(rank: int, group: Group) -> tuple[Tensor, Tensor]:
        mine = [layout.shard(x, rank) for x in (q, k, v)]
        call = {"plan": plan, "layout": layout, "mask": mask, "group": group}
        ours, true = (tw.attention(*mine, **call, kernel=x) for x in (blocks_of_64, "reference"))
        return ours, true

    ours, true = map(layout.unshard, zip(*tw.loopback(4, attend), strict=True))
    print("largest difference", float((ours - true).abs().max()))

"""torch's flex_attention as a kernel: any mask, compiled or not at all.

A call's mask is a table of the keys' intervals of each row, given as a tensor, so that masks of the
same depth share compiled code. Where Dynamo would give up and leave a function uncompiled, it
raises here.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.call_cache import CALL_CACHE
from tilewise.kernels.call_masks import block_cells, compiled_intervals, listed_blocks
from tilewise.kernels.protocol import (
    Accumulators,
    AsideKernel,
    Asked,
    Operands,
    Scores,
    heads_first,
)
from tilewise.tiles.calls import KernelCall, Kind

BLOCK = 128  # rows and keys of a block of its mask
MAX_VARIANTS = 256  # compiled ones: of dtype, head_dim, heads, depth and special sizes


class Flex(AsideKernel):
    """bf16, fp16 and fp32, on CUDA.

    Its backward wants its own out and lse, not the whole attention's. With w = exp(lse of the call
    - lse of all), weights are w times those of the call alone; so the gradients are those of the
    call's own forward, done again, for w dout and a dlse that makes its delta w delta.
    """

    name = "flex"
    square_causal = False
    whole_tile = True
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    most_width = None
    has = ("softcap",)

    def unable(self, asked: Asked) -> str | None:
        if asked.device_type == "cpu":
            return "on cpu it yields no lse, and has no backward"
        return f"head_dim ({asked.head_dim}) is under 16" if asked.head_dim < 16 else None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, scores: Scores
    ) -> Accumulators:
        out, lse = _attend((q, k, v), call, scores)
        return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)

    def differentiate(
        self, operands: Operands, call: KernelCall, scores: Scores
    ) -> Iterable[Tensor]:
        q, k, v, dout, lse, delta = operands
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            own_out, own_lse = _attend(leaves, call, scores)
        lse, delta = lse.permute(1, 2, 0), delta.permute(1, 2, 0)
        weight = torch.exp(own_lse.detach() - lse).masked_fill(own_lse == -torch.inf, 0.0)
        dout = (weight[..., None] * heads_first(dout)).to(q.dtype)
        own_delta = (own_out.detach().float() * dout.float()).sum(-1)
        dlse = own_delta - weight * delta
        return torch.autograd.grad((own_out, own_lse), leaves, (dout, dlse))


def _attend(operands: Iterable[Tensor], call: KernelCall, scores: Scores) -> tuple[Tensor, Tensor]:
    """out and natural-log lse, -inf where out is 0, both [batch, heads, rows, ...]."""
    q, k, v = map(heads_first, operands)
    mask = None
    if call.kind is not Kind.FULL:
        mask = CALL_CACHE.get(call, "flex", q.device, lambda: _block_mask(call, q.device))
    # A softcap that was another before would become a symbol, which the kernel cannot take.
    options = {
        "recompile_limit": MAX_VARIANTS,
        "fail_on_recompile_limit_hit": True,
        "specialize_float": True,
    }
    with torch._dynamo.config.patch(options):
        return _compiled()(q, k, v, mask, scores.scale, scores.softcap)


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_fused, fullgraph=True)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float, softcap: float | None
) -> tuple[Tensor, Any]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    if not torch.compiler.is_compiling():
        raise RuntimeError(
            "flex_attention would run unfused, as compilation is off; "
            "take off TORCHDYNAMO_DISABLE or set_stance, or take another kernel"
        )

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    out, aux = flex_attention(
        q,
        k,
        v,
        score_mod=None if softcap is None else capped,
        block_mask=mask,
        scale=scale,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    return out, aux.lse


def _block_mask(call: KernelCall, device: torch.device) -> tuple[Any, list[Tensor]]:
    """flex_attention's mask of a call and its tensors; blocks are counted from the table alone."""
    from torch.nn.attention.flex_attention import BlockMask

    table = compiled_intervals(call, Flex.name)
    sizes = call.num_q, call.num_k
    cells = block_cells(table.numpy(), sizes[1], (BLOCK, BLOCK))
    full = cells == BLOCK * BLOCK
    lists = (
        torch.from_numpy(x)[None, None]
        for blocks in ((cells > 0) & ~full, full)
        for x in listed_blocks(blocks)
    )
    rows = table.to(device)
    mask = BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=BLOCK, mask_mod=_rule(rows), seq_lengths=sizes
    )
    # Made on the host and copied as a whole: other streams may find it here right after.
    mask = mask.to(device)
    return mask, [rows, *(x for x in mask.as_tuple() if isinstance(x, Tensor))]


def _rule(table: Tensor) -> Callable[..., Tensor]:
    def allows(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        inside = (key >= table[0, 0, row]) & (key < table[0, 1, row])
        for i in range(1, table.shape[0]):
            inside = inside | ((key >= table[i, 0, row]) & (key < table[i, 1, row]))
        return inside

    return allows

"""The package flash-attn-4 in plain torch: signatures, checks and blocks as in its sources.

Lists are honoured: what they do not name is not computed, full blocks are not masked, and a mask is
asked about every row of a block, also beyond the last.
"""

import math
from typing import NamedTuple

import pytest
import torch
from support.kernel_cases import package

from tilewise.kernels import flash_attn_4

Tensors = tuple[torch.Tensor, ...]
Sizes = tuple[int, int]
VERSION = "4.0.0b36"  # whose sources were read, the newest in November 2026


class BlockSparseTensorsTorch(NamedTuple):
    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor | None = None
    full_block_idx: torch.Tensor | None = None
    cu_total_m_blocks: torch.Tensor | None = None
    cu_block_idx_offsets: torch.Tensor | None = None
    block_size: Sizes | None = None
    dq_write_order: torch.Tensor | None = None
    dq_write_order_full: torch.Tensor | None = None
    spt: bool | None = None


class Package:
    """The functions of a version on a device.

    Attributes:
        major: compute capability.
        keys: of a block, in place of what its sources say.
        cells: that were computed by lists.
    """

    def __init__(self, major: int, keys: int | None = None):
        self.major, self.keys, self.cells = major, keys, 0

    def forward(
        self, q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None,
        seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None,
        softmax_scale=None, causal=False, softcap=None, window_size_left=None,
        window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None,
        intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None,
        score_mod=None, mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None,
        lse=None, aux_tensors=None, aux_scalars=None, q_descale=None, k_descale=None,
        v_descale=None, gather_kv_indices=None, scheduler_metadata=None, seqlen_k_per_split=None,
        disable_scheduler_metadata=False, gather_bwd_recompute_p=False,
    ):  # fmt: skip
        """Takes [batch, rows, heads, head_dim]; yields five values, three of them for others."""
        self._check_widths(q, v)
        assert return_lse and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        if block_sparse_tensors is None:
            allowed = rectangle(q, k, causal, window_size_left, window_size_right)
            assert allowed.any(-1).all()
        else:
            lists, width, v_width = block_sparse_tensors, q.shape[-1], v.shape[-1]
            self._check_forward(lists.block_size, q.shape[1], width, v_width)
            sizes = q.shape[1], k.shape[1]
            allowed = self._listed(lists, sizes, lists.block_size, mask_mod, aux_tensors)
        q, wide_k, wide_v = heads_apart(q, k, v)
        p, lse = weights(q, wide_k, softmax_scale, allowed)
        return (p @ wide_v.double()).transpose(1, 2).to(v.dtype), lse.float(), None, None, None

    def backward(
        self, q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0,
        window_size_left=None, window_size_right=None, *, pack_gqa=False, deterministic=False,
        dq=None, dk=None, dv=None,
        score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None,
        block_sparse_tensors=None, dlse=None, learnable_sink=None,
    ):  # fmt: skip
        """Without the arguments that set the sizes of tiles, which Hopper and Blackwell ignore."""
        self._check_widths(q, v)
        assert softcap == 0.0 and lse.dtype == dlse.dtype == torch.float32
        assert lse.shape == dlse.shape == (q.shape[0], q.shape[2], q.shape[1])
        assert out.shape == dout.shape and out.dtype == dout.dtype == q.dtype
        group = q.shape[2] // k.shape[2]
        assert self.major != 9 or group == 1 or q.shape[-1] == v.shape[-1]
        if block_sparse_tensors is None:
            allowed = rectangle(q, k, causal, window_size_left, window_size_right)
        else:
            lists, sizes = block_sparse_tensors, (k.shape[1], q.shape[1])
            assert not deterministic, "Deterministic not implemented for block-sparse backward"
            self._check_backward(lists.block_size, q.shape[-1])
            block = lists.block_size[::-1]
            allowed = self._listed(lists, sizes, block, mask_mod, aux_tensors, by_keys=True)
        q, wide_k, wide_v = heads_apart(q, k, v)
        dout, out = (x.transpose(1, 2).double() for x in (dout, out))
        lse = lse.double().masked_fill(lse == -math.inf, 0.0)[..., None]
        scores = softmax_scale * q.double() @ wide_k.double().mT
        p = torch.exp(scores - lse).masked_fill(~allowed, 0.0)
        delta = (dout * out).sum(-1) - dlse.double()
        ds = softmax_scale * p * (dout @ wide_v.double().mT - delta[..., None])
        dk, dv = ds.mT @ q.double(), p.mT @ dout
        grads = ds @ wide_k.double(), *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
        return tuple(x.transpose(1, 2).to(k.dtype) for x in grads)

    def _check_widths(self, q, v) -> None:
        width, v_width = q.shape[-1], v.shape[-1]
        assert width % 8 == v_width % 8 == 0 and min(width, v_width) >= 8
        if self.major == 10:
            assert (width, v_width) == (192, 128) or max(width, v_width) <= 128
        assert max(width, v_width) <= 256

    def _check_forward(self, block: Sizes, num_rows: int, width: int, v_width: int) -> None:
        rows, keys = block
        if self.major == 10:
            tile, stages = 128, 2 if num_rows > 128 else 1
            wrong = keys % (self.keys or tile)
        else:
            tile, stages = 128 if width <= 192 else 80, 1
            tile = 112 if 128 < width <= 192 and v_width > 128 else tile
            fitted = keys if keys < tile and keys % 16 == 0 else tile
            wrong = keys != (self.keys or fitted)
        if wrong or rows % (128 * stages):
            raise ValueError(f"Block sparsity requires sparse_block_size[1]={keys} to match tile_n")

    def _check_backward(self, block: Sizes, width: int) -> None:
        rows, keys = block
        if self.major == 10:
            assert rows % 128 == keys % 128 == 0 and (width != 192 or keys // 128 % 2 == 0)
        else:
            assert rows % (128 if width <= 64 else 64) == 0
            assert keys == (128 if width <= 128 else 96 if width <= 192 else 64)

    def _listed(self, lists, sizes, block, mask_mod, aux_tensors, by_keys=False) -> torch.Tensor:
        """The allowed cells [rows, keys] by lists of blocks of the first of both sizes."""
        own, others = (-(-size // n) for size, n in zip(sizes, block, strict=True))
        allowed = torch.zeros(own * block[0], others * block[1], dtype=torch.bool)
        for kind in ("mask", "full"):
            count = getattr(lists, f"{kind}_block_cnt")
            index = getattr(lists, f"{kind}_block_idx")
            assert count.dtype == index.dtype == torch.int32 and count.is_contiguous()
            assert count.shape == (1, 1, own) and index.shape[:3] == count.shape
            assert index.is_contiguous() and index.shape[3] <= others
            for i, number in enumerate(count[0, 0].tolist()):
                chosen = index[0, 0, i, :number].tolist()
                assert chosen == sorted({*chosen})  # the last block alone is cut at the end of keys
                for j in chosen:
                    x, y = (a * n + torch.arange(n) for a, n in zip((i, j), block, strict=True))
                    rows, keys = (y[:, None], x[None]) if by_keys else (x[:, None], y[None])
                    cells = torch.ones(rows.shape[0], keys.shape[1], dtype=torch.bool)
                    if kind == "mask":
                        zero = torch.zeros(1, dtype=torch.int64)
                        cells = mask_mod(zero, zero, rows[None], keys[None], None, aux_tensors)[0]
                    place = allowed[x[0] : x[-1] + 1, y[0] : y[-1] + 1]
                    assert not place.any() and cells.any()
                    place.copy_(cells.T if by_keys else cells)
                    self.cells += cells.numel()
        allowed = allowed.T if by_keys else allowed
        num_rows, num_keys = sizes[::-1] if by_keys else sizes
        assert not allowed[:, num_keys:].any()
        return allowed[:num_rows, :num_keys]


def install(
    monkeypatch: pytest.MonkeyPatch, major: int = 9, version: str = VERSION, keys: int | None = None
) -> Package:
    """Let the package's modules be this one's."""
    made = Package(major, keys)
    interface = {
        "_flash_attn_fwd": lambda *given, **options: made.forward(*given, **options),
        "_flash_attn_bwd": lambda *given, **options: made.backward(*given, **options),
    }
    utils = {"scalar_to_ssa": lambda x, dtype: x}
    package(monkeypatch, "flash_attn")
    package(monkeypatch, "flash_attn.cute")
    package(monkeypatch, "flash_attn.cute.interface", **interface)
    package(monkeypatch, "flash_attn.cute.utils", **utils)
    lists = {"BlockSparseTensorsTorch": BlockSparseTensorsTorch}
    package(monkeypatch, "flash_attn.cute.block_sparsity", **lists)
    package(monkeypatch, "cutlass", Int32=None, range_constexpr=range)
    package(monkeypatch, "cutlass.cute", jit=lambda function: function)
    monkeypatch.setattr(flash_attn_4, "_version", lambda: version)
    monkeypatch.setattr(flash_attn_4, "_major", lambda: major)
    for kept in (flash_attn_4._rule, flash_attn_4._prove):
        kept.cache_clear()
    return made


def rectangle(q, k, causal: bool, left: int | None, right: int | None) -> torch.Tensor:
    """As version 4 reads its arguments: only two negative sides together are no window."""
    m, n = q.shape[1], k.shape[1]
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    right = 0 if causal else right
    distance = torch.arange(n) - torch.arange(m)[:, None] - (n - m)
    seen = distance >= -left if left is not None else torch.ones(m, n, dtype=torch.bool)
    return seen & (distance <= right) if right is not None else seen


def heads_apart(q, k, v) -> Tensors:
    group = q.shape[2] // k.shape[2]
    return q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(group, 1) for x in (k, v))


def weights(q, k, scale, allowed) -> Tensors:
    """p, lse of [batch, heads, rows, head_dim] in fp64; 0 and -inf on rows without keys."""
    scores = (scale * q.double() @ k.double().mT).masked_fill(~allowed, -math.inf)
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]), lse

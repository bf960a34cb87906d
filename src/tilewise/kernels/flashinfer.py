"""flashinfer's kernels, where it is installed: forward only, made for decoding."""

import math
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from tilewise.kernels.call_masks import call_mask
from tilewise.kernels.protocol import Accumulators, AsideKernel, Asked, Operands, Scores
from tilewise.tiles.calls import KernelCall, Kind


class FlashInfer(AsideKernel):
    """One launch per sequence; full and causal (bottom-right aligned) calls, others by a mask.

    Its lse is in base 2.
    """

    name = "flashinfer"
    square_causal = False
    whole_tile = False

    def unable(self, asked: Asked) -> str | None:
        if find_spec("flashinfer") is None:
            return "flashinfer is not installed"
        if asked.backward:
            return "it has no backward"
        if asked.head_dim not in (64, 128, 256):
            return f"head_dim ({asked.head_dim}) is none of 64, 128, 256"
        return None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, scores: Scores
    ) -> Accumulators:
        attend = import_module("flashinfer").single_prefill_with_kv_cache
        allowed = call_mask(call, q.device) if call.kind is Kind.SLICES else None
        outs, lses = [], []
        for rows, keys, values in zip(*(x.unbind(1) for x in (q, k, v)), strict=True):
            out, lse = attend(
                rows.contiguous(),
                keys.contiguous(),
                values.contiguous(),
                custom_mask=allowed,
                causal=call.kind is Kind.CAUSAL,
                sm_scale=scores.scale,
                return_lse=True,
            )
            outs.append(out)
            lses.append(lse)
        out, lse = torch.stack(outs, 1), torch.stack(lses, 1) * math.log(2)
        if allowed is not None:
            unseen = ~allowed.any(1)[:, None, None]
            out = out.masked_fill(unseen[..., None], 0.0)
            lse = lse.masked_fill(unseen, -torch.inf)
        return out, lse

    def differentiate(
        self, operands: Operands, call: KernelCall, scores: Scores
    ) -> Iterable[Tensor]:
        raise NotImplementedError("flashinfer has no backward; take another kernel")

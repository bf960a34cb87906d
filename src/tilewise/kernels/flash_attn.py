"""The flash-attn package's version 2, where it is installed: for machines whose torch is older."""

from functools import lru_cache
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.scores import Scores
from tilewise.kernels.torch_flash import CudaFlash, FlashRect, batch_first, cuda_half_only

OLDEST = (2, 7)  # whose functions take a window's two sides one by one


class FlashAttn2(CudaFlash):
    """Flash attention of the package flash-attn; causal and windows are bottom-right aligned."""

    name = "flash_attn"

    def supports(
        self,
        device_type: str,
        dtype: torch.dtype,
        head_dim: int,
        backward: bool = True,
        needs: tuple[str, ...] = (),
    ) -> str | None:
        version = _version()
        if version is None:
            return "flash-attn is not installed"
        if tuple(map(int, version.split(".")[:2])) < OLDEST:
            return f"flash-attn ({version}) must be {'.'.join(map(str, OLDEST))} or later"
        return cuda_half_only(device_type, dtype, head_dim, needs, "softcap")

    def run_forward(
        self, operands: tuple[Tensor, ...], part: FlashRect, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _package()._flash_attn_forward(
            *map(batch_first, operands),
            **_options(part, scores),
            return_softmax=False,
        )
        return out, lse

    def run_backward(
        self, operands: tuple[Tensor, ...], lse: Tensor, part: FlashRect, scores: Scores
    ) -> tuple[Tensor, ...]:
        dout, q, k, v, out = (batch_first(x).contiguous() for x in operands)
        grads = tuple(torch.empty_like(x) for x in (q, k, v))
        _package()._flash_attn_backward(
            *(dout, q, k, v, out, lse, *grads),
            **_options(part, scores),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return grads


def _options(part: FlashRect, scores: Scores) -> dict[str, Any]:
    return {
        "dropout_p": 0.0,
        "softmax_scale": scores.scale,
        "causal": False,  # right = 0 says the same
        "window_size_left": part.left,
        "window_size_right": part.right,
        "softcap": scores.softcap or 0.0,
        "alibi_slopes": None,
    }


@lru_cache(maxsize=1)
def _version() -> str | None:
    """None if it is not installed. By name: version 4 brings a module of the same name."""
    try:
        return metadata.version("flash-attn")
    except metadata.PackageNotFoundError:
        return None


def _package() -> Any:
    return import_module("flash_attn.flash_attn_interface")

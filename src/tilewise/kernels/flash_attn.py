"""Flash attention's packages of versions 2 and 3, where they are installed; version 4 is apart."""

from functools import lru_cache
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.protocol import Asked, Scores
from tilewise.kernels.torch_flash import (
    CudaFlash,
    FlashRect,
    batch_first,
    is_causal,
)

OLDEST = (2, 7)  # whose functions take a window's two sides one by one
OLDEST_TORCH = (2, 11)  # whose calls of version 3 were read


class FlashAttn2(CudaFlash):
    """Flash attention of the package flash-attn; causal and windows are bottom-right aligned."""

    name = "flash_attn"
    has = ("softcap",)

    def unable(self, asked: Asked) -> str | None:
        version = _version()
        if version is None:
            return "flash-attn is not installed"
        if _numbers(version) < OLDEST:
            return f"flash-attn ({version}) must be {'.'.join(map(str, OLDEST))} or later"
        return None

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


class FlashAttn3(CudaFlash):
    """Flash attention 3, called as torch does when it reroutes its own operator; Hopper."""

    name = "flash_attn_3"
    module = "flash_attn_interface"

    def unable(self, asked: Asked) -> str | None:
        if find_spec(self.module) is None:
            return f"its module {self.module} is not installed"
        if _numbers(torch.__version__) < OLDEST_TORCH:
            return f"torch ({torch.__version__}) must be 2.11 or later to call it"
        if asked.device_type == "cuda" and torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability()
            if major != 9:
                return f"compute capability {major}.{minor} is not 9.0"
        return None

    def run_forward(
        self, operands: tuple[Tensor, ...], part: FlashRect, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        sizes = part.q1 - part.q0, part.k1 - part.k0
        q, k, v = map(batch_first, operands)
        given = (q, k, v, None, None, *sizes, scores.scale)
        return _wrapper()._fa3_run_forward(*given, *_shape(part), None)

    def run_backward(
        self, operands: tuple[Tensor, ...], lse: Tensor, part: FlashRect, scores: Scores
    ) -> tuple[Tensor, ...]:
        sizes = part.q1 - part.q0, part.k1 - part.k0
        given = (*map(batch_first, operands), lse, None, None)
        deterministic = torch.are_deterministic_algorithms_enabled()
        shape = *sizes, scores.scale, *_shape(part)
        return _wrapper()._fa3_run_backward(*given, *shape, deterministic)


def _shape(part: FlashRect) -> tuple[bool, int, int]:
    """Return whether a part is causal, and its window, -1 where unbounded."""
    right = part.right if part.left >= 0 else -1
    return is_causal(part), part.left, right


@lru_cache(maxsize=1)
def _wrapper() -> Any:
    """torch's calls of version 3, made ready as its activation does, but nothing rerouted."""
    found = import_module("torch.nn.attention._fa3")
    found._fa3_import_module(FlashAttn3.module)
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


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
    """Return the version of the package flash-attn, or None if it is not installed.

    The package is asked, not the module: version 4 brings a module of the same name.
    """
    try:
        return metadata.version("flash-attn")
    except metadata.PackageNotFoundError:
        return None


def _package() -> Any:
    return import_module("flash_attn.flash_attn_interface")

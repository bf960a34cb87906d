"""The package flash-attn-4, where it is installed: flash attention for Hopper and Blackwell.

It takes the loss's gradient of lse beside dout: rowsum(out * dout) - dlse is delta where out is 0
and dlse is -delta. Not through torch, whose adapter takes two of the five values that it returns.
Written against 4.0.0b36's sources and tested by a stub of its signatures; not yet run on a GPU.
"""

import re
from functools import lru_cache
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.protocol import Asked, Scores, widened
from tilewise.kernels.torch_flash import CudaFlash, FlashRect, batch_first, window

OLDEST = "4.0.0b36"
MOST_BLACKWELL = 128  # head_dim, but for keys of 192 with values of up to 128


class FlashAttn4(CudaFlash):
    """Flash attention 4; values may be of another width, results come in the input dtype."""

    name = "flash_attn_4"
    equal_widths = False

    def unable(self, asked: Asked) -> str | None:
        version = _version()
        if version is None:
            return "flash-attn-4 is not installed"
        if _numbers(version) < _numbers(OLDEST):
            return f"flash-attn-4 ({version}) must be {OLDEST} or later"
        major = _major()
        if asked.device_type == "cuda" and major not in (9, 10):
            return f"it runs on compute capability 9 and 10, not on {major}"
        if major == 10 and asked.head_dim > MOST_BLACKWELL and asked.head_dim != 192:
            return f"head_dim ({asked.head_dim}) is over {MOST_BLACKWELL} and not 192, on Blackwell"
        return None

    def beside_dout(self, dout: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        return dout, delta

    def run_forward(
        self, operands: tuple[Tensor, ...], part: FlashRect, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        q, k, *values = operands
        q, k, v = map(batch_first, (q, k, *_fitting(q, *values)))
        found = _package()._flash_attn_fwd(q, k, v, **_options(part, scores), return_lse=True)
        return found[0], found[1]

    def run_backward(
        self, operands: tuple[Tensor, ...], lse: Tensor, part: FlashRect, scores: Scores
    ) -> tuple[Tensor, ...]:
        dout, q, k, v, delta = operands
        q, k, v, dout = map(batch_first, (q, k, *_fitting(q, v, dout)))
        found = _package()._flash_attn_bwd(
            *(q, k, v, torch.zeros_like(dout, memory_format=torch.contiguous_format), dout, lse),
            **_options(part, scores),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            dlse=delta.permute(1, 2, 0).neg().contiguous(),
        )
        return found[:3]


def _options(part: FlashRect, scores: Scores) -> dict[str, Any]:
    # causal stays False: a right side of 0 without a left one says the same
    return {"softmax_scale": scores.scale, "causal": False, **window(part)}


def _fitting(q: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """Values, and dout, of a width that is compiled beside q's: on Blackwell 128 beside 192.

    Raises:
        ValueError: for wider ones there.
    """
    width, v_width = q.shape[-1], values[0].shape[-1]
    if _major() != 10 or max(width, v_width) <= MOST_BLACKWELL:
        return values
    if v_width > MOST_BLACKWELL:
        raise ValueError(
            f"v_head_dim ({v_width}) must be at most {MOST_BLACKWELL} beside head_dim ({width}) "
            "for kernel 'flash_attn_4' on Blackwell; take another kernel"
        )
    return widened(MOST_BLACKWELL, *values)


def _numbers(version: str) -> tuple[int, ...]:
    """4.0.0b36 as 4, 0, 0, 36; a release as later than its betas."""
    first = version.split("+")[0]
    return *map(int, re.findall(r"\d+", first)), *(() if re.search("[a-z]", first) else (1 << 30,))


@lru_cache(maxsize=1)
def _version() -> str | None:
    try:
        return metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return None


def _major() -> int:
    """Return the major compute capability of this device; where there is none, Hopper's."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 9


def _package() -> Any:
    return import_module("flash_attn.cute.interface")

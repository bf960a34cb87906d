"""Measuring kernels against each other, as rows of the table that kernels/select.py
chooses by."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from tilewise.bench.whole_mask import placed
from tilewise.calibration.clock import Clock
from tilewise.kernels.protocol import Kernel, accumulator_dtype
from tilewise.kernels.providers import PROVIDERS, kernel_named
from tilewise.kernels.select import Use, mask_kind
from tilewise.mask import Mask
from tilewise.tile import tile_calls


class Size(NamedTuple):
    """Operands to measure with."""

    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


class Row(NamedTuple):
    """What each kernel took for forward and backward, in seconds."""

    use: Use
    dtype: torch.dtype
    head_dim: int
    seconds: dict[str, float]


def measure(
    mask: Mask,
    size: Size,
    dtype: torch.dtype,
    device: torch.device,
    names: Iterable[str] = tuple(PROVIDERS),
) -> Row:
    """The time of every kernel that can do both passes here; those that cannot are left out."""
    seconds = {}
    for name in names:
        kernel = kernel_named(name)
        if kernel.supports(device.type, dtype, size.head_dim) is None:
            seconds[name] = _seconds(kernel, mask, size, dtype, device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    use = Use(name, mask_kind(mask), size.num_tokens)
    return Row(use, dtype, size.head_dim, seconds)


def write(rows: Iterable[Row], path: Path) -> None:
    """Append rows to a table."""
    text = "".join(f"\n{_toml(row)}" for row in rows)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def _toml(row: Row) -> str:
    times = ", ".join(f"{name} = {value:.3e}" for name, value in row.seconds.items())
    dtype = str(row.dtype).removeprefix("torch.")
    return (
        f'[[row]]\ndevice = "{row.use.device}"\ndtype = "{dtype}"\nhead_dim = {row.head_dim}\n'
        f'mask = "{row.use.mask}"\nnum_tokens = {row.use.num_tokens}\nseconds = {{ {times} }}\n'
    )


def _seconds(
    kernel: Kernel, mask: Mask, size: Size, dtype: torch.dtype, device: torch.device
) -> float:
    rows = np.arange(size.num_tokens)
    cut = {"square_causal": kernel.square_causal, "whole_tile": kernel.whole_tile}
    calls = placed(tile_calls(rows, rows, mask, **cut), str(device))
    heads = size.num_heads, size.num_kv_heads, size.num_kv_heads, size.num_heads
    q, k, v, dout = (
        torch.randn(size.num_tokens, 1, n, size.head_dim, dtype=dtype, device=device) for n in heads
    )
    delta = torch.zeros(q.shape[:-1], dtype=accumulator_dtype(dtype), device=device)
    scale = size.head_dim**-0.5

    def work() -> None:
        for call, at, keys in calls:
            _, lse = kernel.forward(q[at], k[keys], v[keys], call, scale)
            kernel.backward(q[at], k[keys], v[keys], dout[at], lse, delta[at], call, scale)

    return Clock(device).seconds(work)

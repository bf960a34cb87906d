"""The table that kernels/registry.py chooses by: rows measured here, or of a benchmark."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.whole_mask import placed
from tilewise.kernels.protocol import Kernel, accumulator_dtype
from tilewise.kernels.registry import PROVIDERS, Use, kernel_named, mask_kind
from tilewise.masks.base import Mask
from tilewise.tiles.cover import tile_calls
from tilewise_tools.calibration.own_work import SharedClock


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

    @property
    def key(self) -> tuple[Use, str, int]:
        return self.use, str(self.dtype).removeprefix("torch."), self.head_dim


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


def from_benchmark(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Rows of the table from those of `python -m benchmarks.gpu`, in bf16.

    Masks of one kind, and numbers of heads, are added up: those that all kernels of a size have
    figures of. A kernel that failed at one of them, or that has figures of less than half of what
    another has, is left out.

    Args:
        rows: with `device_name` once, and one for each contender, mask, num_tokens and heads.
    """
    rows = list(rows)
    device = next(row["device_name"] for row in rows if "device_name" in row)
    found: dict[tuple[Use, int], dict[str, dict[tuple[str, str], float]]] = {}
    for row in rows:
        if row.get("part") != "kernels" or row["contender"] not in PROVIDERS or "skipped" in row:
            continue
        kind = row["mask"] if row["mask"] in ("full", "causal") else "slices"
        key = Use(device, kind, row["num_tokens"]), row["head_dim"]
        both = [row.get(f"{which}_ms", math.nan) for which in ("forward", "backward")]
        seconds = sum(both) / 1e3
        of_kernel = found.setdefault(key, {}).setdefault(row["contender"], {})
        of_kernel[row["mask"], row["heads"]] = seconds
    made = []
    for (use, head_dim), times in found.items():
        whole = {n: x for n, x in times.items() if not any(map(math.isnan, x.values()))}
        seconds = _summed(whole)
        made += [Row(use, torch.bfloat16, head_dim, seconds)] if seconds else []
    return made


def _summed(times: Mapping[str, Mapping[tuple[str, str], float]]) -> dict[str, float]:
    """Each kernel's time over the cases that all have; fastest first."""
    most = max(map(len, times.values()), default=0)
    times = {name: cases for name, cases in times.items() if 2 * len(cases) > most}
    common = set.intersection(*map(set, times.values())) if times else set()
    sums = {name: sum(cases[c] for c in common) for name, cases in times.items() if common}
    return dict(sorted(sums.items(), key=lambda item: item[1]))


def write(rows: Iterable[Row], path: Path) -> None:
    """Put rows into a table, in the place of those of the same use, dtype and head_dim.

    What stands before the first row, comments too, stays as it is.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    head = re.split(r"^\[\[row\]\]", text, maxsplit=1, flags=re.MULTILINE)[0].rstrip("\n")
    kept = {row.key: row for row in map(_read, tomllib.loads(text).get("row", ()))}
    kept |= {row.key: row for row in rows}
    made = "".join(f"\n{_toml(row)}\n" for row in kept.values())
    path.write_text((f"{head}\n" if head else "") + made, encoding="utf-8")


def _read(row: Mapping[str, Any]) -> Row:
    use = Use(row["device"], row["mask"], row["num_tokens"])
    return Row(use, getattr(torch, row["dtype"]), row["head_dim"], dict(row["seconds"]))


def _toml(row: Row) -> str:
    times = ", ".join(f"{name} = {value:.3e}" for name, value in row.seconds.items())
    use, dtype, head_dim = row.key
    return (
        f'[[row]]\ndevice = "{use.device}"\ndtype = "{dtype}"\nhead_dim = {head_dim}\n'
        f'mask = "{use.mask}"\nnum_tokens = {use.num_tokens}\nseconds = {{ {times} }}'
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

    return SharedClock(device).seconds(work)

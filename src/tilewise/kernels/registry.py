"""The kernels, in order of preference, and the choice of one for a call."""

import inspect
import math
import tomllib
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from importlib import import_module
from importlib.resources import files
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from tilewise.arguments import checks_arguments, require_known
from tilewise.kernels.protocol import Kernel
from tilewise.masks.base import Causal, Full, Mask

PROVIDERS: Mapping[str, str] = MappingProxyType(
    {
        "cpu": "torch_cpu.CpuFlash",
        "cuda": "torch_flash.CudaFlash",
        "triton": "triton.kernel.TritonSlices",
        "triton_deterministic": "triton.kernel.DeterministicTritonSlices",
        "cudnn": "torch_sdpa.CudnnSdpa",
        "efficient": "torch_sdpa.EfficientSdpa",
        "flex": "flex.Flex",
        "flash_attn": "flash_attn.FlashAttn2",
        "flash_attn_3": "flash_attn.FlashAttn3",
        "flash_attn_4": "flash_attn_4.FlashAttn4",
        "flash_attn_4_lists": "flash_attn_4.FlashAttn4Lists",
        "flashinfer": "flashinfer.FlashInfer",
        "reference": "reference.Reference",
    }
)
"""The class of each kernel, below tilewise.kernels. It is imported when it is first asked for."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256, 512)
PROTOCOL = ("name", "square_causal", "whole_tile", "supports", "forward", "backward")


@checks_arguments
def kernel_named(name: str) -> Kernel:
    """A kernel by its name in `tilewise doctor`: to pass as `kernel=`, to wrap, or to call.

    Raises:
        ValueError: with the names that are known.
    """
    require_known("kernel", name, PROVIDERS)
    return _kernel_class(name)()


@cache
def _kernel_class(name: str) -> Callable[[], Kernel]:
    module, _, class_name = PROVIDERS[name].rpartition(".")
    return getattr(import_module(f"tilewise.kernels.{module}"), class_name)


def given_kernel(kernel: Kernel | str) -> Kernel:
    """Return the kernel that a caller passes as `kernel`: by its name, or an object that has the
    protocol.

    Raises:
        ValueError: naming the names that are known, or what the object lacks.
    """
    if isinstance(kernel, str):
        return kernel_named(kernel)
    what = kernel.__name__ if isinstance(kernel, type) else type(kernel).__name__
    if isinstance(kernel, type):
        raise ValueError(f"kernel ({what}) is a class; pass an instance of it")
    lacking = [name for name in PROTOCOL if not hasattr(kernel, name)]
    if lacking:
        raise ValueError(
            f"kernel ({what}) lacks {', '.join(lacking)}; pass a name from tilewise doctor, or an "
            "object that has all of the protocol tw.kernels.Kernel"
        )
    return kernel


def serving_kernel(
    kernel: Kernel | str,
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    backward: bool,
    needs: tuple[str, ...] = (),
) -> Kernel:
    """The kernel that a caller asks for, and no other.

    Raises:
        ValueError: if it cannot serve, with its reason and the kernels that can.
    """
    asked = device_type, dtype, head_dim, backward
    found = given_kernel(kernel)
    reason = _refusal(found, *asked, needs=needs)
    if reason is None:
        return found
    able = [name for name in PROVIDERS if _refusal(kernel_named(name), *asked, needs=needs) is None]
    raise ValueError(
        f"kernel {found.name!r} cannot serve this: {reason}; these can: {', '.join(able)}"
    )


def _refusal(kernel: Kernel, *asked: Any, needs: tuple[str, ...]) -> str | None:
    """Ask a kernel whether it supports a call; returns None, or the reason why not.

    A kernel whose `supports` takes no `needs` cannot serve softcap, dropout, bias or max_logit.
    """
    if not needs:
        return kernel.supports(*asked)
    if "needs" not in inspect.signature(kernel.supports).parameters:
        return f"its supports() takes no needs, so it has no {', '.join(needs)}"
    return kernel.supports(*asked, needs=needs)


def abilities(name: str, device_type: str) -> tuple[bool, str]:
    """Return whether a kernel runs on this machine's device, and what it can there, or why it
    cannot.
    """
    kernel = kernel_named(name)
    forward = [x for x in DTYPES if _why_not(kernel, device_type, x, False) is None]
    both = [x for x in forward if _why_not(kernel, device_type, x, True) is None]
    if not forward:
        return False, str(_why_not(kernel, device_type, torch.bfloat16, False))
    dtypes = ", ".join(str(x).removeprefix("torch.") for x in forward)
    sizes = [d for d in HEAD_DIMS if kernel.supports(device_type, forward[0], d, False) is None]
    passes = "forward and backward" if both == forward else "forward only"
    ability = f"all masks, {passes}; {dtypes}; head_dim {', '.join(map(str, sizes))}"
    if device_type == "cuda" and not torch.cuda.is_available():
        return False, f"no CUDA device here; on one: {ability}"
    return True, ability


def _why_not(kernel: Kernel, device_type: str, dtype: torch.dtype, backward: bool) -> str | None:
    return kernel.supports(device_type, dtype, 64, backward)


class Use(NamedTuple):
    """A use for which kernels were measured apart, beside dtype and head_dim."""

    device: str  # its name, as "NVIDIA H200"
    mask: str  # "full", "causal" or "slices"
    num_tokens: int  # of one rank
    capability: int = 0  # first number of its compute capability


def use_of(device: torch.device, mask: Mask, num_tokens: int, *, square: bool = True) -> Use | None:
    """The use that an attention call is; None on devices without measurements.

    Args:
        square: queries lie as keys do, so that a causal mask leaves squares and whole blocks.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    kind = mask_kind(mask)
    kind = "slices" if kind == "causal" and not square else kind
    name, (major, _) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    return Use(name, kind, num_tokens, major)


def mask_kind(mask: Mask) -> str:
    match mask:
        case Full():
            return "full"
        case Causal():
            return "causal"
        case _:
            return "slices"


def kernel_for(
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    use: Use | None = None,
    needs: tuple[str, ...] = (),
) -> Kernel:
    """The kernel of a device: the first in the table's order that can do both passes.

    Where the use was measured on this device, that is by time. Then come, on compute capability 9
    and 10 in bf16 and fp16, cuDNN for full and causal masks and triton for others. Then the
    default: on cpu the cpu kernel; on cuda flash attention for bf16 and fp16 (over head_dim 256
    the memory-efficient kernel), for fp32 the memory-efficient kernel, then triton, then the
    reference (quadratic in memory), and for fp64 the reference. What needs more than these have
    (see `Scores.needs`) goes to the first of a longer list that has it, the reference in the end.

    Raises:
        ValueError: if none of the order can, with each one's reason.
    """
    return choose(read_table(), device_type, (dtype, head_dim), use, needs)


def choose(
    table: Mapping[str, Any],
    device_type: str,
    numbers: tuple[torch.dtype, int],
    use: Use | None,
    needs: tuple[str, ...] = (),
) -> Kernel:
    """`kernel_for` by any table; numbers are dtype and head_dim."""
    if device_type not in table["default"]:
        raise ValueError(
            f"no kernel runs on {device_type}; use cpu or cuda tensors, not {device_type} ones"
        )
    reasons = []
    names = order(table, device_type, numbers, use)
    for name in dict.fromkeys([*names, *table["needs"][device_type]]) if needs else names:
        kernel = kernel_named(name)
        reason = _refusal(kernel, device_type, *numbers, needs=needs)
        if reason is None:
            return kernel
        reasons.append(f"kernel {name!r} cannot serve this: {reason}")
    raise ValueError("; ".join(reasons))


def order(
    table: Mapping[str, Any], device_type: str, numbers: tuple[torch.dtype, int], use: Use | None
) -> list[str]:
    """Kernels by name, best first: as measured for a use, as its device prefers, the default."""
    dtype = str(numbers[0]).removeprefix("torch.")
    default = table["default"][device_type]
    default = default.get(dtype, default["any"])
    if use is None:
        return list(default)
    times = _measured(table, (dtype, numbers[1]), use)
    preferred = [
        name
        for rule in table.get("prefer", ())
        if use.capability in rule["capability"] and dtype in rule["dtypes"]
        for name in rule[use.mask]
    ]
    names = *sorted(times, key=times.__getitem__), *preferred, *default
    return list(dict.fromkeys(names))


def _measured(table: Mapping[str, Any], numbers: tuple[str, int], use: Use) -> dict[str, float]:
    """Return each kernel's measured time over the fastest kernel's, for a dtype, head_dim and use.

    The nearest measured number of tokens (by ratio) counts. Between two measured head_dims it is
    the mean of their rows, weighted by distance; beyond them the nearest counts.
    """
    dtype, head_dim = numbers
    nearest: dict[int, Mapping[str, Any]] = {}
    for row in table.get("row", ()):
        if (row["device"], row["dtype"], row["mask"]) == (use.device, dtype, use.mask):
            known = nearest.setdefault(row["head_dim"], row)
            nearest[row["head_dim"]] = min(known, row, key=lambda x: _far(x, use.num_tokens))
    lower = max((d for d in nearest if d <= head_dim), default=None)
    upper = min((d for d in nearest if d >= head_dim), default=lower)
    lower = upper if lower is None else lower
    if lower is None or upper is None:
        return {}
    share = (head_dim - lower) / (upper - lower) if upper > lower else 0.0
    below, above = _relative(nearest[lower]), _relative(nearest[upper])
    return {
        name: (1 - share) * below.get(name, above.get(name, 0.0))
        + share * above.get(name, below.get(name, 0.0))
        for name in {**below, **above}
    }


def _far(row: Mapping[str, Any], num_tokens: int) -> float:
    return abs(math.log(row["num_tokens"] / max(1, num_tokens)))


def _relative(row: Mapping[str, Any]) -> dict[str, float]:
    least = min(row["seconds"].values())
    return {name: seconds / least for name, seconds in row["seconds"].items()}


@lru_cache(maxsize=1)
def read_table() -> Mapping[str, Any]:
    """The table that comes with the package."""
    text = files("tilewise.kernels").joinpath("measured.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)

"""Stand-ins for what other libraries' code imports or asks of a device, on a machine without one.

flash_attn is computed by our CPU kernel (`tilewise_verify.flash_attn_shim`), devices named cuda
are the CPU, and NCCL is gloo.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tilewise_verify import flash_attn_shim


class CpuForCuda(TorchFunctionMode):
    """Makes on the CPU every tensor that is asked for on a device named cuda."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args = tuple(_on_cpu(x) for x in args)
        return func(*args, **{name: _on_cpu(x) for name, x in (kwargs or {}).items()})


def _on_cpu(x: Any) -> Any:
    named = isinstance(x, str) and x.partition(":")[0] == "cuda"
    if named or (isinstance(x, torch.device) and x.type == "cuda"):
        return torch.device("cpu")
    return x


def gloo_for_nccl() -> None:
    """Let init_process_group("nccl") make a group of gloo, and the current device be the CPU."""
    make = dist.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **named: Any) -> None:
        named.pop("device_id", None)
        make("gloo", *args, **named)

    dist.init_process_group = init_process_group
    torch.cuda.set_device = lambda device: None
    torch.cuda.current_device = lambda: torch.device("cpu")


def module(name: str, **values: Any) -> types.ModuleType:
    """A module of this name in sys.modules, with these values."""
    made = types.ModuleType(name)
    made.__spec__ = importlib.util.spec_from_loader(name, loader=None)
    vars(made).update(values)
    sys.modules[name] = made
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, made)
    return made


def flash_attn() -> None:
    """Let `import flash_attn` find the functions that the trainers' helpers and tests call."""
    flash_attn_shim.provide()
    package = sys.modules["flash_attn"]
    vars(package).update(
        flash_attn_qkvpacked_func=_packed(flash_attn_shim.flash_attn_func),
        flash_attn_varlen_qkvpacked_func=_packed_documents,
    )
    module(
        "flash_attn.bert_padding",
        index_first_axis=lambda x, rows: x.index_select(0, rows),
        pad_input=_pad_input,
        unpad_input=_unpad_input,
        rearrange=_rearrange,
    )
    module("flash_attn.utils")
    module("flash_attn.utils.distributed", all_gather=_all_gather)


def _packed(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(qkv: Tensor, *args: Any, **named: Any) -> Any:
        return function(*qkv.unbind(-3), *args, **_supported(named))

    return call


def _packed_documents(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **named: Any
) -> Any:
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_shim.flash_attn_varlen_func(
        *qkv.unbind(-3), *lengths, *args, **_supported(named)
    )


def _supported(named: dict[str, Any]) -> dict[str, Any]:
    """The options that the shim has; the others must be off."""
    options = dict(named)
    if options.pop("alibi_slopes", None) is not None or options.pop("deterministic", False):
        raise NotImplementedError("the stand-in of flash_attn has no alibi and no deterministic")
    return options


def _unpad_input(x: Tensor, attention_mask: Tensor) -> tuple[Any, ...]:
    """The rows of [batch, tokens, ...] that are not padding, as flash_attn.bert_padding has it."""
    lengths = attention_mask.sum(-1, dtype=torch.int32)
    rows = attention_mask.flatten().nonzero().flatten()
    edges = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return x.flatten(0, 1)[rows], rows, edges, int(lengths.max()), lengths


def _pad_input(x: Tensor, rows: Tensor, batch: int, num_tokens: int) -> Tensor:
    whole = x.new_zeros((batch * num_tokens, *x.shape[1:]))
    return whole.index_copy(0, rows, x).unflatten(0, (batch, num_tokens))


def _rearrange(x: Tensor, pattern: str) -> Tensor:
    assert pattern == "b s ... -> (b s) ...", pattern
    return x.flatten(0, 1)


def _all_gather(x: Tensor, group: Any) -> Tensor:
    from torch.distributed.nn.functional import all_gather

    return torch.cat([*all_gather(x.contiguous(), group=group)])
